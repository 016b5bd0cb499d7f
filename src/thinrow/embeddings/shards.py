"""Shard: the part of an embedding table that one rank owns, and how ranks look up and train in each other's parts.

A key is at the rank that ``Routing.even`` says. A look-up asks each owner once for each distinct key of the rank's
batch, and every owner inserts and trains a key once, whoever asked for it. With two ranks, keys 1 and 2 at rank 1:

    rank 0 looks up [1, 1, 2]    asks rank 1 for [1, 2], gets 2 vectors, spreads them over 3 positions
    rank 1 looks up [2]          asks itself
    backward                     on each rank alone: the gradients of a key's positions are summed, and wait
    the optimizer steps          rank 0 sends the sums of 1 and 2; rank 1 adds its own of 2, in order of rank, and
                                 updates keys 1 and 2

Gradients are summed over ranks and never divided by their number: the loss of a step is the sum over all labelled
candidates of all ranks divided by their all-reduced count, and then any number of ranks trains alike. Backward
exchanges nothing, so that ranks need not reach their look-ups in the same order, or at all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.pool import empty
from thinrow.core.routing import Routing
from thinrow.embeddings.checks import gradient_not_finite
from thinrow.embeddings.index import KeyIndex
from thinrow.embeddings.ranks import Bytes, Ranks
from thinrow.embeddings.table import DynamicTable
from thinrow.embeddings.waiting import with_part
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]

WIRES = ("float32", "float64", "bfloat16")


class Shard:
    """This rank's part of a table, or with ``whole`` a copy of all of it.

    A whole table is read without asking anybody; its gradients go to all ranks, which all make the same update. So what
    has been trained is the same on all, key by key, though in another order of rows; a key that was only looked up is
    where that was, with the vector that it starts from everywhere. Any one rank saves it.

    Attributes:
        table: of this rank. Its budget is that of the shard (``Budget.share``).
        ranks: that share the table.
        routing: whose key is whose, as ``save_shard`` and ``load_shard`` take it.
        whole: each rank has all of it.
        wire: what vectors and gradients travel as. All ranks see the same bits of a vector, its owner too.
    """

    def __init__(self, table: DynamicTable, ranks: Ranks, *, whole: bool = False, wire: str | None = None) -> None:
        """``wire``: ``float32``, ``float64`` or ``bfloat16``; None for the table's dtype.

        Raises:
            InputError: the table holds keys of another shard, is whole and has a budget, or ``wire`` is unknown.
        """
        if not isinstance(table, DynamicTable):
            raise InputError(f"a {type(table).__name__} over ranks; ranks share rows of a DynamicTable")
        self.table, self.ranks, self.whole = table, ranks, whole
        self.wire = table.dtype.name if wire is None else wire
        if self.wire not in WIRES:
            raise InputError(f"wire={wire!r}; it must be one of {', '.join(WIRES)}, or None for the table's dtype")
        if whole and table.budget is not None:
            raise InputError("a whole table has no budget: what is large enough for one is sharded (whole=False)")
        self.routing = Routing.even(ranks.size)
        self._waiting: list[tuple[Ints, Floats]] = []
        strange = table.keys()[self.owners(table.keys()) != ranks.rank]
        if len(strange) and not whole:
            raise InputError(
                f"the table of rank {ranks.rank} of {ranks.size} holds key {strange[0]}, which is rank "
                f"{self.owners(strange[:1])[0]}'s; load what was saved for this number of ranks"
            )
        table.of_ranks = True

    def owners(self, keys: Ints) -> Ints:
        """(n,) rank that owns each of ``keys`` (n,)."""
        return self.routing.shards(keys)

    def distinct(self, keys: Ints) -> tuple[Ints, Ints]:
        """The distinct ones of ``keys`` (n,), and of each key its place among them."""
        index = KeyIndex()
        places = index.rows(keys, insert=True)
        return index.keys(), places

    def add_gradient(self, keys: Ints, places: Ints, gradient: Floats, of: Ints | None = None) -> None:
        """Keep ``gradient`` (n, dim) of the keys ``keys[places]``, summed by key in the order given, until the
        optimizer steps. With ``of`` (n,) ``gradient`` is (b, dim) and position i has ``gradient[of[i]]``.

        Raises:
            InputError: a sum is NaN or infinite (names the key); nothing is kept then.
        """
        if len(places):
            self._waiting = with_part(self._waiting, self._summed(keys, places, gradient, of), self._merged)

    def clear_gradient(self) -> None:
        """Forget the gradients that wait for a step."""
        self._waiting.clear()

    def sum_gradient(self) -> tuple[Ints, Floats]:
        """Distinct keys (d,) and the sums of their gradients (d, dim) since the last step, which stay.

        Raises:
            InputError: a sum of several calls overflows (names the key).
        """
        if len(self._waiting) > 1:
            self._waiting = [self._merged(self._waiting)]
        return self._waiting[0] if self._waiting else self._no_gradient()

    def _no_gradient(self) -> tuple[Ints, Floats]:
        return np.empty(0, np.int64), np.empty((0, self.table.dim), self.table.dtype)

    def _merged(self, parts: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
        keys, gradients = (np.concatenate(side) for side in zip(*parts, strict=True))
        return self._summed(*self.distinct(keys), gradients)

    def _summed(self, keys: Ints, places: Ints, gradient: Floats, of: Ints | None = None) -> tuple[Ints, Floats]:
        used, among = kernel("distinct_rows")(places, len(keys))
        sums = empty(len(used) * self.table.dim, self.table.dtype).reshape(len(used), self.table.dim)
        bad = kernel("sum_rows")(gradient, of, among, sums)
        if bad >= 0:
            column = int(np.flatnonzero(~np.isfinite(sums[bad]))[0])
            raise gradient_not_finite(int(keys[used[bad]]), float(sums[bad, column]), column)
        return keys[used], sums

    def encode(self, vectors: Floats) -> npt.NDArray[Any]:
        """``vectors`` as they travel; bfloat16 as int16, since NumPy has none."""
        if self.wire != "bfloat16":
            return vectors.astype(self.wire, copy=False)
        import torch

        return torch.from_numpy(vectors).to(torch.bfloat16).view(torch.int16).numpy()

    def decode(self, raw: Bytes) -> Floats:
        """(n, dim) vectors in the table's dtype, of what ``encode`` gave."""
        if self.wire != "bfloat16":
            return raw.view(self.wire).reshape(-1, self.table.dim).astype(self.table.dtype, copy=False)
        import torch

        halves = torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
        as_table = torch.float64 if self.table.dtype == np.float64 else torch.float32
        return cast(Floats, halves.to(as_table).view(-1, self.table.dim).numpy())


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up gives for one table: vector i is ``vectors[places[i]]``.

    Attributes:
        keys: (d,) distinct keys of this rank's batch.
        places: (n,) of each key looked up.
        vectors: (d, dim) in the table's dtype.
    """

    keys: Ints
    places: Ints
    vectors: Floats


@dataclass(frozen=True, slots=True)
class _Asked:
    """The exchanged ids of a look-up of some shards: ``keys`` and ``places`` as in ``Found``, grouped by owner, and
    what each rank wants to know here: distinct keys, and how often it has each where the table has a budget."""

    given: tuple[Ints, ...]
    keys: list[Ints]
    places: list[Ints]
    wanted: list[list[Ints]]
    counts: list[list[Ints]]


class Lookup:
    """Look-ups in several shards by one exchange: ids to their owners, vectors back."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Raises InputError where the shards are not of the same ranks."""
        self.shards, self.ranks = list(shards), same_ranks(shards)
        self._sharded = [shard for shard in self.shards if not shard.whole]
        self._ahead: Future[_Asked] | None = None

    def prefetch(self, keys: Sequence[Ints]) -> None:
        """Begin the exchange of the ids that the next look-up will ask for; it goes on while this rank computes. All
        ranks must. Tables are not read before the look-up, so its results are those without.

        Raises:
            InputError: the last keys that were prefetched were not looked up.
        """
        if self._ahead is not None:
            raise InputError("prefetch twice; look up the keys of the first call before the next")
        if self._sharded:
            ranks, thread = self.ranks.beside()
            # A copy: the caller may use the memory again before this is done.
            self._ahead = thread.submit(self._ask, ranks, tuple(map(np.copy, self._of_sharded(keys))))

    def forget(self) -> None:
        """Drop what was prefetched, if anything; every rank must."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.result()

    def __call__(self, keys: Sequence[Ints], *, insert: bool) -> list[Found]:
        """Look ``keys``, one array (n,) a shard, up; absent keys are inserted, or read as zeros. All ranks must.

        Raises:
            InputError: other keys were prefetched.
            RankLost: a rank is lost.
        """
        found = iter(self._exchanged(self._of_sharded(keys), insert) if self._sharded else ())
        return [
            _read(shard, wanted, insert) if shard.whole else next(found)
            for shard, wanted in zip(self.shards, keys, strict=True)
        ]

    def _of_sharded(self, keys: Sequence[Ints]) -> tuple[Ints, ...]:
        return tuple(k for shard, k in zip(self.shards, keys, strict=True) if not shard.whole)

    def _exchanged(self, keys: tuple[Ints, ...], insert: bool) -> list[Found]:
        if self._ahead is None:
            asked = self._ask(self.ranks, keys)
        else:
            ahead, self._ahead = self._ahead, None
            asked = ahead.result()
            if not all(map(np.array_equal, asked.given, keys)):
                raise InputError("other keys were prefetched than are looked up; look those up first")
        # A rank in training beside one in evaluation would send gradients of keys that nobody made.
        how = "training" if insert else "reading"
        answers: list[list[npt.NDArray[Any]]] = [[] for _ in range(self.ranks.size)]
        for shard, wanted, counts in zip(self._sharded, asked.wanted, asked.counts, strict=True):
            for answer, vectors in zip(answers, _answer(shard, wanted, counts, insert), strict=True):
                answer.append(shard.encode(vectors))
        received = self.ranks.exchange(f"{how} vectors {_fingerprint(self._sharded)}", [_pack(a) for a in answers])
        parts = zip(*(_unpack(raw, len(self._sharded)) for raw in received), strict=True)
        return [
            Found(keys, places, shard.decode(np.concatenate(part)))
            for shard, keys, places, part in zip(self._sharded, asked.keys, asked.places, parts, strict=True)
        ]

    def _ask(self, ranks: Ranks, keys: tuple[Ints, ...]) -> _Asked:
        grouped, questions = [], [[] for _ in range(ranks.size)]  # type: ignore[var-annotated]
        for shard, wanted in zip(self._sharded, keys, strict=True):
            distinct, places = shard.distinct(wanted)
            order, ends = _by_owner(shard, distinct)
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            distinct, places = distinct[order], place[places]
            grouped.append((distinct, places))
            counts = np.bincount(places, minlength=len(distinct)) if shard.table.budget is not None else distinct[:0]
            for question, part, number in zip(
                questions, np.split(distinct, ends), np.split(counts, np.minimum(ends, len(counts))), strict=True
            ):
                question += [part, number]
        received = ranks.exchange(f"ids {_fingerprint(self._sharded)}", [_pack(q) for q in questions])
        arrived = [[a.view(np.int64) for a in _unpack(raw, 2 * len(self._sharded))] for raw in received]
        by_shard = list(zip(*arrived, strict=True))
        return _Asked(
            keys,
            [d for d, _ in grouped],
            [p for _, p in grouped],
            [list(w) for w in by_shard[::2]],
            [list(c) for c in by_shard[1::2]],
        )


def exchange_gradients(shards: Sequence[Shard]) -> None:
    """Bring the gradients that wait on all ranks to their owners, by one exchange, and leave their sums with the
    tables; sparse optimizers call it when they step. All ranks must, whether they have gradients or not.

    Raises:
        RankLost: a rank is lost.
        InputError: a sum on one of the ranks is NaN or infinite (names the key). All ranks raise it, and all gradients
            wait as before.
    """
    ranks = same_ranks(shards)
    error = _bring_gradients(ranks, shards)
    try:
        ranks.agree(f"sums {_fingerprint(shards)}", error)
    except InputError:
        for shard in shards:
            shard.table.clear_gradient()
        raise
    for shard in shards:
        shard.clear_gradient()


def _bring_gradients(ranks: Ranks, shards: Sequence[Shard]) -> InputError | None:
    """The exchange; what is wrong with sums of this rank, which takes part in it all the same."""
    error: InputError | None = None
    parts: list[list[npt.NDArray[Any]]] = [[] for _ in range(ranks.size)]
    for shard in shards:
        try:
            keys, gradient = shard.sum_gradient()
        except InputError as e:
            error, (keys, gradient) = e, shard._no_gradient()
        if shard.whole:
            pieces = [(keys, gradient)] * ranks.size
        else:
            # The keys of one look-up are grouped already, in most steps all of them.
            order, ends = _by_owner(shard, keys)
            if (np.diff(order) < 0).any():
                keys, gradient = keys[order], gradient[order]
            pieces = list(zip(np.split(keys, ends), np.split(gradient, ends), strict=True))
        for part, (some, sums) in zip(parts, pieces, strict=True):
            part += [some, shard.encode(sums)]
    received = ranks.exchange(f"gradients {_fingerprint(shards)}", [_pack(p) for p in parts])
    arrived = list(zip(*(_unpack(raw, 2 * len(shards)) for raw in received), strict=True))
    for shard, owned, gradients in zip(shards, arrived[::2], arrived[1::2], strict=True):
        rows = shard.table.rows(np.concatenate(owned).view(np.int64), insert=shard.whole)
        try:
            shard.table.add_gradient(rows, shard.decode(np.concatenate(gradients)))
        except InputError as e:
            error = error or e
    return error


def same_ranks(shards: Iterable[Shard]) -> Ranks:
    """The ranks of ``shards``. Raises InputError where there are none, or several."""
    found = list({id(shard.ranks): shard.ranks for shard in shards}.values())
    if len(found) != 1:
        raise InputError(f"tables of {len(found)} groups of ranks; there must be one table at least, and one group")
    return found[0]


def _read(shard: Shard, keys: Ints, insert: bool) -> Found:
    distinct, places = shard.distinct(keys)
    return Found(distinct, places, shard.table.read(shard.table.rows(distinct, insert=insert)))


def _answer(shard: Shard, wanted: list[Ints], counts: list[Ints], insert: bool) -> list[Floats]:
    """Vectors of the keys that each rank wants; a key that several want is inserted once."""
    keys, ends = np.concatenate(wanted), np.cumsum([len(w) for w in wanted])[:-1]
    if insert and shard.table.budget is not None:
        # Admission and eviction count positions, as on one rank.
        shard.table.rows(np.repeat(keys, np.concatenate(counts)), insert=True)
    rows = shard.table.rows(keys, insert=insert and shard.table.budget is None)
    return np.split(shard.table.read(rows), ends)


def _by_owner(shard: Shard, keys: Ints) -> tuple[Ints, Ints]:
    """The order of ``keys`` by owner, stable, and where in it the second owner's begin, the third's, ..."""
    owners = shard.owners(keys)
    n_ranks = shard.ranks.size
    order = np.argsort(owners.astype(np.uint16), kind="stable")
    return order, np.cumsum(np.bincount(owners, minlength=n_ranks))[:-1]


def _fingerprint(shards: Iterable[Shard]) -> str:
    """Of what must be the same on all ranks."""
    said = [
        (t.dim, t.seed, t.init, t.init_scale, t.dtype.name, t.budget, s.whole, s.wire)
        for s, t in ((shard, shard.table) for shard in shards)
    ]
    return f"{zlib.crc32(repr(said).encode()):08x}"


def _pack(arrays: Sequence[npt.NDArray[Any]]) -> Bytes:
    """The bytes of ``arrays``, each at a multiple of 8, behind the number of bytes of each."""
    sizes = np.array([a.nbytes for a in arrays], np.int64)
    ends = np.cumsum(-(-sizes // 8) * 8) + sizes.nbytes
    out = empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    out[: sizes.nbytes] = sizes.view(np.uint8)
    for array, n_bytes, end in zip(arrays, sizes, ends, strict=True):
        first = end - -(-n_bytes // 8) * 8
        out[first : first + n_bytes] = _raw(array)
        out[first + n_bytes : end] = 0
    return out


def _unpack(raw: Bytes, n_arrays: int) -> list[Bytes]:
    """Reverse of ``_pack``, as bytes."""
    sizes = raw[: 8 * n_arrays].view(np.int64)
    firsts = np.cumsum([8 * n_arrays, *(-(-sizes // 8) * 8)])
    return [raw[first : first + n_bytes] for first, n_bytes in zip(firsts, sizes, strict=False)]


def _raw(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
