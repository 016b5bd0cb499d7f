"""Exports and embedding servers for tests, and what look-ups in them must give, key by key in plain NumPy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import ServingTable, export, version_of
from thinrow.core.errors import ProtocolError
from thinrow.core.routing import Routing
from thinrow.embeddings.states import BASE, DELTA
from thinrow.serving.lookups import Bags, EmbeddingServer, ServedTables, ServerLimits
from thinrow.serving.lookups.frames import Frame, FrameReader
from thinrow.serving.lookups.messages import Floats, Ints, encoded
from thinrow.serving.lookups.server import rest
from thinrow.serving.lookups.streams import Stream, connect, wait

_LONG_S = 60.0


def write_exports(
    folder: Path,
    dims: dict[str, int],
    *,
    keys: int = 300,
    since: int = 1,
    deltas: int = 0,
    shards: int = 1,
    dtype: str = "float32",
) -> None:
    """A full export of a table a name, keys ``[0, keys)``, and ``deltas`` that change, add and remove some of them; or
    those from step ``since`` on, where the ones before are there.

    At step s, as the last version of a key that was written at it, a vector is ``s + key / 1024`` in each place, plus
    ten times the number of its table: so that a look-up shows which version it has read.
    """
    base = None if since == 1 else version_of(folder / f"step-{since - 1:08d}")
    for step in range(since, deltas + 2):
        changed, gone = np.arange(keys), np.empty(0, np.int64)
        if step > 1:
            changed, gone = np.arange(step, keys + step, 7), np.arange(step * 5, keys, 31)
            gone = np.setdiff1d(gone, changed)
        parts: dict[str, dict[str, npt.NDArray[Any]]] = {}
        for number, (name, dim) in enumerate(dims.items()):
            parts[name] = {"keys": changed, "values": vectors_of(changed, step, number, dim)}
            if base is not None:
                parts[name] |= {DELTA + "rows": np.arange(len(changed)), DELTA + "gone": gone}
                parts[name][BASE] = np.array([base.step, base.crc32c])
        default = {name: np.full(dim, 0.25 + n, np.float32) for n, (name, dim) in enumerate(dims.items())}
        path = export(folder, step, parts, routing=Routing.even(shards), dtype=dtype, default=default, base=base)
        base = version_of(path)


def vectors_of(keys: Ints, step: int, number: int, dim: int) -> Floats:
    """(n, dim) float32, as ``write_exports`` writes them."""
    return np.repeat((step + keys / 1024 + 10 * number).astype(np.float32)[:, None], dim, axis=1)


def pooled_by_hand(folder: Path, table: str, bags: Bags, routing: Routing, dtype: str = "float32") -> Floats:
    """Sums or means (b, dim) of ``bags``: shard by shard, key by key."""
    vectors, _ = ServingTable.open(folder, table).read(bags.keys)
    shards = routing.shards(bags.keys)
    out = np.zeros((len(bags.bounds) - 1, vectors.shape[1]), np.float32)
    for bag, (first, last) in enumerate(zip(bags.bounds[:-1], bags.bounds[1:], strict=True)):
        for shard in range(len(routing)):
            mine = [i for i in range(first, last) if shards[i] == shard]
            part = np.zeros(vectors.shape[1], np.float32)
            for i in mine:
                part = part + (vectors[i] if bags.weights is None else vectors[i] * bags.weights[i])
            out[bag] += over_the_wire(part[None], dtype)[0] if mine else 0
        if bags.pooling == "mean" and last > first:
            out[bag] /= np.float32(last - first)
    return out


def over_the_wire(values: Floats, dtype: str) -> Floats:
    """``values`` (r, dim) as they arrive."""
    of, scales = encoded(values, dtype)
    return of.astype(np.float32) if scales is None else of * scales[:, None]


class Peer:
    """A client that speaks in frames; ``hello`` is what its server said first."""

    def __init__(self, address: str) -> None:
        self.stream: Stream = connect(address)
        self._reader = FrameReader(1 << 24)
        self.hello = json.loads(self.next().body.tobytes())  # type: ignore[union-attr]

    def send(self, *frames: list[Any]) -> None:
        parts = [part for one in frames for part in one]
        while parts:
            wait([], [self.stream], _LONG_S)
            parts = rest(parts, self.stream.send(parts))

    def next(self) -> Frame:
        until = time.monotonic() + _LONG_S
        while (found := self._reader.read(self.stream)) is None:
            assert time.monotonic() < until
            wait([self.stream], [], 1.0)
        return found

    def ended(self) -> bool:
        try:
            while True:
                self.next()
        except (EOFError, OSError, ProtocolError):
            return True


@contextmanager
def servers(
    folders: Sequence[Path],
    addresses: Sequence[str],
    routing: Routing,
    limits: ServerLimits | None = None,
    loop: str | None = None,
) -> Iterator[list[tuple[EmbeddingServer, str]]]:
    """A server a shard, and where each listens."""
    found = []
    try:
        for shard, address in enumerate(addresses):
            server = EmbeddingServer(ServedTables.open(folders, shard=shard, routing=routing), limits, loop=loop)
            found.append((server, server.listen(address).address))
        yield found
    finally:
        for server, _ in found:
            server.close()
