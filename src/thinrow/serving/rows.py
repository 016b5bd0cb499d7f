"""Rows of embeddings that are elsewhere: fetched once for a batch, then read where a module expects its table.

Worked example. A batch looks up keys 9, 5, 9 and then a bag of 5 and 7::

    FetchedRows.of(keys=[9, 5, 9, 5, 7], source)   # asks the source for 5, 7 and 9, each once
    rows([9, 5, 9]) -> places [2, 0, 2]            # what a DynamicTable answers with its own row numbers
    read(places)    -> the very vectors that came  # so scores are those of a table in memory, bit for bit

A module's look-ups run in the thread that scores, so what was fetched hangs on the thread: many may score with one
module at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import nn

from thinrow.checkpoints import ServingTable, Version
from thinrow.core.errors import InputError, Unavailable
from thinrow.embeddings import Embedding, EmbeddingBag
from thinrow.kernels import kernel
from thinrow.models import RankerInputs
from thinrow.serving.lookups import EmbeddingClient

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Attributes:
    keys: (u,) int64 ascending, each once.
    vectors: (u, dim) float32.
    degraded: (u,) bool: the default stands for what no server answered.
    seconds: of each shard that was asked and answered.
    """

    keys: Ints
    vectors: Floats
    degraded: Bools
    seconds: Mapping[int, float] = field(default_factory=dict)


class RowSource(Protocol):
    """Where rows of one version of one table come from. Any number of threads may ask at once."""

    def fetch(self, keys: Ints) -> Fetched:
        """Rows of ``keys`` (u,) int64 ascending, each once; keys that are nowhere read as the table's default."""
        ...


class LocalRows:
    """Rows of an export that is mapped here."""

    def __init__(self, table: ServingTable) -> None:
        self._table = table

    def fetch(self, keys: Ints) -> Fetched:
        """As ``RowSource.fetch``."""
        vectors, _ = self._table.read(keys)
        return Fetched(keys, vectors, np.zeros(len(keys), np.bool_))


class ServerRows:
    """Rows of embedding servers, all of one version: a server that has another one is as one that does not answer.

    Args:
        client: of the servers.
        table: its prefix.
        version: of the export.
        dim: width of a vector.
        fail: raise where a server does not answer, in place of reading the default.
    """

    def __init__(self, client: EmbeddingClient, table: str, version: Version, dim: int, *, fail: bool = False) -> None:
        self._client, self._table, self._version, self._dim, self._fail = client, table, version, dim, fail

    def fetch(self, keys: Ints) -> Fetched:
        """As ``RowSource.fetch``.

        Raises:
            Unavailable: a server does not answer, and ``fail``.
            InputError: the servers' rows are of another width, or they do not have the table.
        """
        try:
            answer = self._client.read({self._table: keys}, pins={self._table: self._version})
        except Unavailable:
            # No server has said what the table is like: zeros, which is the default of a release.
            if self._fail:
                raise
            shape = len(keys), self._dim
            return Fetched(keys, np.zeros(shape, np.float32), np.ones(len(keys), np.bool_))
        found = answer[self._table]
        if self._fail and answer.degraded:
            raise Unavailable(
                f"shards {answer.missing} did not answer in time, or not of {self._version}", shards=answer.missing
            )
        if found.vectors.shape[1] != self._dim:
            raise InputError(
                f"table {self._table!r} of the servers has width {found.vectors.shape[1]}, the model needs "
                f"{self._dim}; serve the release that the model is of"
            )
        return Fetched(keys, found.vectors, found.degraded, answer.seconds)


class FetchedRows:
    """Stands where a module in evaluation mode has its table.

    Attributes:
        dim: width of a vector.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._here = threading.local()

    def stand_in(self, module: nn.Module) -> None:
        """Have all look-ups of ``module`` read here."""
        for part in module.modules():
            if isinstance(part, Embedding | EmbeddingBag):
                part.table = self  # type: ignore[assignment]

    @contextmanager
    def holding(self, fetched: Fetched) -> Iterator[None]:
        """While it lasts, look-ups of this thread read ``fetched``."""
        self._here.fetched = fetched
        try:
            yield
        finally:
            del self._here.fetched

    def rows(self, keys: Ints, *, insert: bool) -> Ints:
        """(n,) place of each of ``keys`` (n,), all of which were fetched."""
        assert not insert, "a served module is in evaluation mode"
        return places(self._here.fetched.keys, keys)

    def read(self, rows: Ints) -> Floats:
        """(n, dim) vectors at ``rows``."""
        out: Floats = np.take(self._here.fetched.vectors, rows, axis=0, mode="clip")
        return out

    def check_bounds(self, bounds: Ints, n: int) -> None:
        """Nothing: bounds come from ``RankerInputs``."""

    def pool(self, rows: Ints, bounds: Ints) -> Floats:
        """(b, dim) sums of bags, as ``DynamicTable.pool``."""
        vectors = self._here.fetched.vectors
        sums = np.zeros((len(bounds) - 1, self.dim), np.float32)
        if len(vectors):
            half = 1 << (len(vectors).bit_length() - 1)
            kernel("pool_rows")([vectors[:half], vectors[half:]], len(vectors), rows, bounds, sums)
        return sums


def places(have: Ints, keys: Ints) -> Ints:
    """(n,) place in ``have`` (ascending, each once) of each of ``keys``, all of which are there."""
    return np.searchsorted(have, keys).astype(np.int64, copy=False)


def keys_of(*inputs: RankerInputs) -> Ints:
    """(u,) int64 ascending: all keys that a model looks up for these inputs, each once."""
    parts: list[Any] = []
    for one in inputs:
        bags = one.event_bags, one.context_bags, one.candidate_bags
        parts += [one.event_keys, one.context_keys, one.candidate_keys, *(b.keys for b in bags)]
    return np.unique(np.concatenate([part.reshape(-1).numpy() for part in parts]))


def degraded_keys(keys: Any, bags: Any, fetched: Fetched) -> Ints:
    """(n,) int64: of each row of ``keys`` (n, F) and ``bags``, how many keys no server answered for."""
    numbers = keys.numpy()
    lost = fetched.degraded[places(fetched.keys, numbers.reshape(-1))].reshape(numbers.shape).sum(1)
    if bags.per_row:
        flags = fetched.degraded[places(fetched.keys, bags.keys.numpy())]
        ends = bags.bounds.numpy()[:: bags.per_row]
        lost = lost + np.diff(np.concatenate([[0], np.cumsum(flags)])[ends])
    return np.asarray(lost, np.int64)


def degraded_of(inputs: RankerInputs, fetched: Fetched, *, events: bool = True) -> Ints:
    """(X,) int64: how many rows each request's scores read that no server answered for; without ``events``, of its
    context and candidates."""
    out = np.zeros(len(inputs), np.int64)
    if not fetched.degraded.any():
        return out
    out += degraded_keys(inputs.context_keys, inputs.context_bags, fetched)
    lost = degraded_keys(inputs.candidate_keys, inputs.candidate_bags, fetched)
    out += np.diff(np.concatenate([[0], np.cumsum(lost)])[inputs.offsets])
    if not events:
        return out
    passes = inputs.histories.passes
    lost = degraded_keys(inputs.event_keys, inputs.event_bags, fetched)[passes.index]
    of_events = np.concatenate([[0], np.cumsum(lost)])
    start = passes.offsets[passes.pass_of]
    out += of_events[start + passes.visible] - of_events[start]
    return out


__all__ = [
    "Fetched",
    "FetchedRows",
    "LocalRows",
    "RowSource",
    "ServerRows",
    "degraded_keys",
    "degraded_of",
    "keys_of",
    "places",
]
