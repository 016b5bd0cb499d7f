"""What a ranker reads: keys to embed and numbers, beside events, requests and candidates, from a plan's outputs.

Worked example. A plan with the outputs ``product`` (history), ``item``, ``price`` (cand) and ``store`` (ctx), of which
``price`` is a number. Two requests of one user with three events, two candidates and one::

    event_keys      (3, 1) int64      each event once, whatever the number of requests
    context_keys    (2, 1)            candidate_keys (3, 1)      candidate_numbers (3, 1) float32
    example_of      [0, 0, 1]         candidate -> request

An output that is a vector or a list of keys (``MultiHash``, ``BagOfWords``) is a bag: its vector is the sum of theirs.

Keys are 64 bits in one table: hash each field under a seed of its own, and the same field of events and candidates
under the same. A null is key 0. Serving and training make these inputs by this one function, so they are equal bit
for bit.

Shape letters: E events, X examples (requests), C candidates, F fields, B bags, N numbers.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.features import BagOfWords, FeaturePlan, HistoryMatch, Truncate
from thinrow.features.node import DOMAINS, Domain, Elementwise, Node
from thinrow.jagged import Column, Jagged, SharedHistories
from thinrow.jagged.passes import Passes
from thinrow.jagged.torch import TorchHistories, tensor


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Names of the outputs that a model reads, in the order in which it reads them.

    Attributes:
        keys: domain -> names of outputs that are 64-bit keys.
        numbers: domain -> names of outputs that are dense numbers.
        bags: domain -> names of outputs that are vectors or lists of keys.
        static: the first so many events of a pass see each other; requests that see fewer have passes apart.
    """

    keys: Mapping[Domain, tuple[str, ...]]
    numbers: Mapping[Domain, tuple[str, ...]]
    bags: Mapping[Domain, tuple[str, ...]]
    static: int = 0

    @classmethod
    def of(cls, plan: FeaturePlan, numbers: Iterable[str] = (), *, cross: bool = True, static: int = 0) -> InputSpec:
        """All outputs of a plan, those in ``numbers`` as numbers, the others as keys; without ``cross``, none that
        relates candidates to the history.

        Raises:
            InputError: ``numbers`` names what the plan does not have, or nothing stands beside candidates.
        """
        dense = set(numbers)
        unknown = sorted(dense - set(plan.outputs))
        if unknown:
            raise InputError(f"numbers={unknown[0]!r} is no output of the plan; it has {', '.join(plan.outputs)}")
        # By name, since a plan that was stored and read back may list its outputs in another order.
        read = [n for n in sorted(plan.outputs) if cross or not _is_cross(plan.outputs[n])]
        bags = {n for n in read if _is_bag(plan.outputs[n])}
        by_domain = {d: [n for n in read if plan.domain(n) == d] for d in DOMAINS}
        if not by_domain["cand"]:
            raise InputError(
                "no output of the plan stands beside candidates; a ranker needs one, as Hash(Source('cand.X'))"
            )
        return cls(
            {d: tuple(n for n in names if n not in dense | bags) for d, names in by_domain.items()},
            {d: tuple(n for n in names if n in dense) for d, names in by_domain.items()},
            {d: tuple(n for n in names if n in bags - dense) for d, names in by_domain.items()},
            static,
        )

    def vectors(self, domain: Domain) -> tuple[str, ...]:
        """Names of the outputs that become a vector each, in the order of these: keys, then bags."""
        return self.keys[domain] + self.bags[domain]


def _is_cross(node: Node) -> bool:
    return isinstance(node, HistoryMatch) or any(_is_cross(o) for o in node.operands)


def _is_bag(node: Node) -> bool:
    if isinstance(node, Truncate):
        return any(_is_bag(o) for o in node.operands)
    return isinstance(node, BagOfWords) or (isinstance(node, Elementwise) and node.width > 0)


@dataclass(frozen=True, slots=True)
class Bags:
    """B bags of keys for each of n rows: bag b of row i has ``keys[bounds[i * B + b]:bounds[i * B + b + 1]]``."""

    keys: Tensor
    bounds: Tensor
    per_row: int

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.int64]) -> Bags:
        """Those of ``rows``."""
        bounds, keys = self.bounds.numpy(), self.keys.numpy()
        bag = (rows[:, None] * self.per_row + np.arange(self.per_row)).reshape(-1)
        index, ends = ranges_index(bounds[:-1][bag], bounds[1:][bag])
        return Bags(tensor(keys[index]), tensor(ends), self.per_row)


class RankerInputs:
    """The inputs of X requests with C candidates in all.

    Args:
        spec: which outputs to read.
        histories: X examples, derived columns of the plan among those of the events.
        features: the other outputs of the plan.
        request_ts: (X,) ms.
        share: one pass for the requests of a user where the rule allows it; False for one each.

    Attributes:
        event_keys: (E, F) int64; ``event_numbers`` (E, N) float32; ``event_ts`` (E,) int64 ms.
        context_keys: (X, F) int64; ``context_numbers`` (X, N) float32; ``request_ts`` (X,) int64 ms.
        candidate_keys: (C, F) int64; ``candidate_numbers`` (C, N) float32.
        event_bags, context_bags, candidate_bags: B bags for each.
        offsets: (X + 1,) int64, the candidates of each request.
        histories: what each request sees of the events.

    Raises:
        InputError: an output is missing, text, or a float that is not listed as a number.
    """

    def __init__(
        self,
        spec: InputSpec,
        histories: SharedHistories,
        features: Mapping[str, Column | Jagged],
        request_ts: npt.NDArray[np.int64],
        *,
        share: bool = True,
    ) -> None:
        rows = [features[n] for n in (*spec.vectors("cand"), *spec.numbers["cand"]) if n in features]
        jagged = [r for r in rows if isinstance(r, Jagged)]
        if not jagged:
            raise InputError("no candidate feature among the outputs; apply the plan that the model was made with")
        self.offsets = jagged[0].offsets
        self.histories = TorchHistories(histories, share=share, static=spec.static)
        n_events, n_examples, n_candidates = len(self.histories.event_ts), len(histories), int(self.offsets[-1])
        beside: dict[Domain, tuple[Mapping[str, Column | Jagged], int]] = {
            "history": (self.histories.numpy_columns, n_events),
            "ctx": (features, n_examples),
            "cand": (features, n_candidates),
        }
        keys = {d: _stack(found, spec.keys[d], n, np.int64) for d, (found, n) in beside.items()}
        numbers = {d: _stack(found, spec.numbers[d], n, np.float32) for d, (found, n) in beside.items()}
        self.event_keys, self.context_keys, self.candidate_keys = keys["history"], keys["ctx"], keys["cand"]
        self.event_numbers, self.context_numbers = numbers["history"], numbers["ctx"]
        self.candidate_numbers = numbers["cand"]
        bags = {d: _bags(found, spec.bags[d], n) for d, (found, n) in beside.items()}
        self.event_bags, self.context_bags, self.candidate_bags = bags["history"], bags["ctx"], bags["cand"]
        self.event_ts = self.histories.event_ts
        self.request_ts = tensor(request_ts)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def example_of(self) -> Tensor:
        """(C,) int64, the request of each candidate."""
        return tensor(np.repeat(np.arange(len(self)), np.diff(self.offsets)))

    def with_candidates(self, rows: npt.NDArray[np.intp], offsets: npt.NDArray[np.int64]) -> RankerInputs:
        """The same requests with the candidates at ``rows``, regrouped by ``offsets``; what a list shows, say."""
        chosen = copy.copy(self)
        chosen.__dict__.pop("example_of", None)
        chosen.offsets, index = offsets, tensor(rows)
        chosen.candidate_keys, chosen.candidate_numbers = self.candidate_keys[index], self.candidate_numbers[index]
        chosen.candidate_bags = self.candidate_bags.take(rows)
        return chosen

    def without_events(self) -> RankerInputs:
        """The same, but nothing of the events is looked up; for a model that holds states of them."""
        chosen = copy.copy(self)
        chosen.event_keys, chosen.event_numbers = self.event_keys[:0], self.event_numbers[:0]
        chosen.event_bags = Bags(self.event_bags.keys[:0], self.event_bags.bounds[:1] * 0, self.event_bags.per_row)
        return chosen

    def of_pass(self, number: int) -> RankerInputs:
        """The events of one pass, and no request."""
        chosen = copy.copy(self)
        chosen.__dict__.pop("example_of", None)
        passes = self.histories.passes
        rows = passes.index[passes.offsets[number] : passes.offsets[number + 1]]
        index, nothing = tensor(rows), np.empty(0, np.int64)
        chosen.histories = copy.copy(self.histories)
        chosen.histories.passes = Passes(np.arange(len(rows)), np.array([0, len(rows)]), nothing, nothing)
        chosen.histories.event_ts = chosen.event_ts = self.event_ts[index]
        chosen.event_keys, chosen.event_numbers = self.event_keys[index], self.event_numbers[index]
        chosen.event_bags, chosen.offsets = self.event_bags.take(rows), np.zeros(1, np.int64)
        chosen.context_keys, chosen.context_numbers = self.context_keys[:0], self.context_numbers[:0]
        chosen.candidate_keys, chosen.candidate_numbers = self.candidate_keys[:0], self.candidate_numbers[:0]
        chosen.context_bags, chosen.candidate_bags = self.context_bags.take(nothing), self.candidate_bags.take(nothing)
        chosen.request_ts = self.request_ts[:0]
        return chosen

    def event_digest(self) -> str:
        """Of all that a model reads of the events of one pass (``of_pass``): equal ones have equal states."""
        found = self.event_keys, self.event_numbers, self.event_ts, self.event_bags.keys, self.event_bags.bounds
        return _digest([t.numpy() for t in found])

    def fingerprints(self) -> list[str]:
        """For each request 32 hex digits over every input that its scores depend on: events that it sees, in order,
        with their times; its context, time and candidates, in order. Equal inputs, bit for bit, have equal ones."""
        passes = self.histories.passes
        start = passes.offsets[passes.pass_of]
        index, ends = ranges_index(start, start + passes.visible)
        events = [t.numpy()[passes.index[index]] for t in (self.event_keys, self.event_numbers, self.event_ts)]
        requests = [t.numpy() for t in (self.context_keys, self.context_numbers, self.request_ts)]
        candidates = [t.numpy() for t in (self.candidate_keys, self.candidate_numbers)]
        found = []
        for x in range(len(self)):
            parts = [a[ends[x] : ends[x + 1]] for a in events] + [a[x : x + 1] for a in requests]
            parts += [a[self.offsets[x] : self.offsets[x + 1]] for a in candidates]
            parts += self._bag_parts(passes.index[index[ends[x] : ends[x + 1]]], x)
            found.append(_digest(parts))
        return found

    def _bag_parts(self, events: npt.NDArray[np.int64], x: int) -> list[npt.NDArray[np.generic]]:
        # Nothing where there are no bags: digests of models without them stay what they were.
        candidates = np.arange(self.offsets[x], self.offsets[x + 1])
        chosen = (self.event_bags, events), (self.context_bags, np.array([x])), (self.candidate_bags, candidates)
        taken = [bags.take(rows) for bags, rows in chosen if bags.per_row]
        return [t.numpy() for bags in taken for t in (bags.keys, bags.bounds)]


def _digest(parts: Sequence[npt.NDArray[np.generic]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def _bags(found: Mapping[str, Column | Jagged], names: Sequence[str], n: int) -> Bags:
    columns = [_column(found, name, n) for name in names]
    lengths = np.zeros((n, len(names)), np.int64)
    for b, column in enumerate(columns):
        each = np.full(n, column.size) if column.offsets is None else np.diff(column.offsets)
        lengths[:, b] = each if column.valid is None else np.where(column.valid, each, 0)
    bounds = offsets_of(lengths.reshape(-1))
    keys = np.zeros(bounds[-1], np.int64)
    for b, (name, column) in enumerate(zip(names, columns, strict=True)):
        if column.values.dtype.kind not in "iu":
            raise InputError(f"output {name!r} holds {column.values.dtype}, not integer keys; hash it in the plan")
        there = np.repeat(lengths[:, b] > 0, np.full(n, column.size) if column.offsets is None else lengths[:, b])
        first = bounds[:-1].reshape(n, len(names))[:, b]
        keys[ranges_index(first, first + lengths[:, b])[0]] = column.values.reshape(-1)[there]
    return Bags(tensor(keys), tensor(bounds), len(names))


def _column(found: Mapping[str, Column | Jagged], name: str, n: int) -> Column:
    if name not in found:
        raise InputError(f"output {name!r} of the plan is not there; there are {', '.join(found)}")
    value = found[name]
    column = (value.column if isinstance(value, Jagged) else value).decoded()
    if len(column) != n:
        raise InputError(f"output {name!r} has {len(column)} values beside {n}; candidate fields must be alike")
    return column


def _stack(
    found: Mapping[str, Column | Jagged], names: Sequence[str], n: int, dtype: type[np.int64] | type[np.float32]
) -> Tensor:
    out = np.zeros((n, len(names)), dtype)
    for i, name in enumerate(names):
        column = _column(found, name, n)
        kind = "text" if column.dictionary is not None else column.values.dtype.kind
        if kind not in "iu" and (dtype is np.int64 or kind == "text"):
            raise InputError(
                f"output {name!r} is {'text' if kind == 'text' else column.values.dtype}, not an integer key; hash or "
                "bucketize it in the plan, or list a float in the model's numbers"
            )
        values = column.values if column.valid is None else np.where(column.valid, column.values, 0)
        out[:, i] = values
    return tensor(out)
