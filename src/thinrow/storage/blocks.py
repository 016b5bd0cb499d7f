"""Streams of fixed-width values as stripe blocks: for each stripe the smallest of what the codecs give it.

Worked example, one stripe of 600 rows of 8 bytes: 300 times 7, then 300 times 123,456,789. Plain codecs give it 104
bytes (a local dictionary of two words, one bit a row). As two runs (codec 8) it takes a header of 8 bytes, their last
rows 299 and 599 (16 bytes) and a plain block of two values (16 bytes): 40 bytes, so the stripe is of codec 8.

A block *within* another (of runs, or of the rows that have a value of their own) is planned and written by the same
kernels as a plain one, over shorter stripes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.kernels import kernel
from thinrow.storage.codecs import (
    ABSENT,
    DICTIONARY,
    LANES,
    LANES_FROM,
    MARKED,
    MIXED,
    NO_CODE,
    RUNS,
    SPARSE,
    EncodedStream,
)

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: More bytes than any block has.
_NEVER = np.int64(1) << np.int64(50)


@dataclass(frozen=True, slots=True)
class Values:
    """R values of S stripes.

    Attributes:
        words: (R,) uint64: integers sign-extended, floats by their bits.
        stripe_off: (S + 1,) int64 values of each stripe.
        restarts: (P,) int64 ascending values where a piece begins; the first value of every stripe must be one.
        itemsize: bytes of a raw value (1, 2, 4 or 8).
        float_bits: 32 or 64 where the values are floats, else 0.
        codes: (R,) uint32 codes into the column's segment dictionary, ``NO_CODE`` where it lacks the word; empty where
            there is no dictionary.
        n_words: words in that dictionary.
    """

    words: U64
    stripe_off: I64
    restarts: I64
    itemsize: int
    float_bits: int = 0
    codes: U32 = field(default_factory=lambda: np.empty(0, np.uint32))
    n_words: int = 0

    def check(self) -> None:
        """Raises InputError: a stripe does not begin with a restart, or a code is not in the dictionary."""
        firsts = self.stripe_off[:-1][np.diff(self.stripe_off) > 0]
        found = np.searchsorted(self.restarts, firsts)
        if len(firsts) and (found[-1] >= len(self.restarts) or not np.array_equal(self.restarts[found], firsts)):
            raise InputError(
                "a stripe begins with a row that is no restart; add the first row of every stripe to restarts"
            )
        # With 1 added no code is 0.
        if int((self.codes + np.uint32(1)).max(initial=0)) > self.n_words:
            beyond = self.codes[(self.codes >= self.n_words) & (self.codes != NO_CODE)]
            raise InputError(f"dictionary code {beyond[0]} of a dictionary of {self.n_words}; codes must be less")

    def take(self, rows: I64, counts: I64) -> Values:
        """The values at ``rows``, ``counts`` of each stripe, each stripe one piece."""
        off = offsets_of(counts)
        codes = self.codes[rows] if self.n_words else self.codes
        return replace(self, words=self.words[rows], stripe_off=off, restarts=off[:-1][counts > 0], codes=codes)


class _Candidate(Protocol):
    """Planned blocks of all stripes: (S,) codec, width and size in bytes, ``_NEVER`` where it has none; and whether
    they hold codes into the segment dictionary."""

    codec: U8
    width: U8
    size: I64
    coded: Bools

    def write(self, chosen: Bools, payload: U8, place: I64) -> None:
        """The blocks of the chosen stripes at ``place`` (S,) of ``payload`` (zeros)."""
        ...


class _Plain:
    """Codecs 0 to 6 and 11 to 13."""

    def __init__(self, values: Values) -> None:
        v = self._values = values
        self._arguments = v.words, v.float_bits, v.stripe_off, v.restarts, v.itemsize, v.codes, v.n_words
        self.codec, self.width, self.size, self._base, self._scale = kernel("plan_blocks")(*self._arguments)
        self.coded = (self.codec == DICTIONARY) | (self.codec == MARKED) | ((self.codec == MIXED) & (self._scale > 0))

    def write(self, chosen: Bools, payload: U8, place: I64) -> None:
        if chosen.all() and len(payload) == self.size.sum():
            plan = self.codec, self.width, self._base, self._scale
            kernel("write_blocks")(*self._arguments, *plan, offsets_of(self.size), payload)
            return
        codec, size = np.where(chosen, self.codec, 0).astype(np.uint8), np.where(chosen, self.size, 0)
        offsets = offsets_of(size)
        written = np.zeros(int(offsets[-1]), np.uint8)
        kernel("write_blocks")(*self._arguments, codec, self.width, self._base, self._scale, offsets, written)
        _copy(written, offsets[:-1], size, payload, place)


class _Nested:
    """Codecs 8 and 9: a head, runs' ends or a bitmap, and a plain block."""

    def __init__(self, codec: int, values: Values, head_bytes: I64, possible: Bools) -> None:
        n = len(head_bytes)
        self._inner, self._head = _Plain(values), head_bytes
        self._counts = np.diff(values.stripe_off)
        self.codec, self.width = np.full(n, codec, np.uint8), np.zeros(n, np.uint8)
        self.size = np.where(possible, head_bytes + self._inner.size, _NEVER)
        self.coded = self._inner.coded

    def _counts_and_inner(self) -> U64:
        """(S,) the word that tells of the block within."""
        codec, width = self._inner.codec.astype(np.uint64), self._inner.width.astype(np.uint64)
        head: U64 = self._counts.astype(np.uint64) | codec << np.uint64(32) | width << np.uint64(40)
        return head

    def _put(self, words: U64, chosen: Bools, payload: U8, place: I64, at: int) -> None:
        stripes = np.flatnonzero(chosen)
        payload.view("<u8")[place[stripes] // 8 + at] = words[stripes]


class _Runs(_Nested):
    """Codec 8, for stripes of two rows a run or more."""

    def __init__(self, values: Values, possible: Bools, counts: I64) -> None:
        """``counts``: (S,) runs."""
        rows, words = np.diff(values.stripe_off), values.words
        new = np.ones(len(words), np.bool_)
        np.not_equal(words[1:], words[:-1], out=new[1:])
        new[values.stripe_off[:-1][rows > 0]] = True
        starts = np.flatnonzero(new & np.repeat(possible, rows))
        counts = np.where(possible, counts, 0)
        runs = values.take(starts, counts)
        stripe = np.repeat(np.arange(len(rows)), counts)
        last = np.append(starts[1:], 0) - 1
        ends_stripe = np.cumsum(counts)[counts > 0] - 1
        last[ends_stripe] = values.stripe_off[1:][counts > 0] - 1
        self._ends = (last - values.stripe_off[:-1][stripe]).astype(np.uint32)
        bits = np.array([(int(n) - 1).bit_length() if n else 0 for n in np.unique(rows)])
        self._ends_width = (
            bits[np.searchsorted(np.unique(rows), rows)] | np.where(counts >= LANES_FROM, LANES, 0)
        ).astype(np.uint8)
        self._ends_bytes, self._runs = packed_bytes(counts, self._ends_width), runs
        super().__init__(RUNS, runs, 8 + self._ends_bytes, possible)

    def write(self, chosen: Bools, payload: U8, place: I64) -> None:
        self._put(
            self._counts_and_inner() | self._ends_width.astype(np.uint64) << np.uint64(48), chosen, payload, place, 0
        )
        runs, n = self._runs, len(chosen)
        offsets = offsets_of(np.where(chosen, self._ends_bytes, 0))
        written = np.zeros(int(offsets[-1]), np.uint8)
        # A block of codec 4 is packed numbers and nothing else.
        codec, none = np.where(chosen, DICTIONARY, 0).astype(np.uint8), np.zeros(n, np.uint64)
        ends = runs.words, 0, runs.stripe_off, runs.restarts, 8, self._ends, 1
        kernel("write_blocks")(*ends, codec, self._ends_width, none, none, offsets, written)
        _copy(written, offsets[:-1], np.diff(offsets), payload, place + 8)
        self._inner.write(chosen, payload, place + self._head)


class _Sparse(_Nested):
    """Codec 9: ``present`` (R,) rows have values of their own, the others the stripe's ``fill`` (S,)."""

    def __init__(self, values: Values, present: Bools, fill: U64, possible: Bools) -> None:
        rows = np.diff(values.stripe_off)
        present = present & np.repeat(possible, rows)
        counts = np.diff(offsets_of(present)[values.stripe_off])
        self._present, self._fill, self._rows = present, fill, rows
        super().__init__(SPARSE, values.take(np.flatnonzero(present), counts), 16 + (rows + 63) // 64 * 8, possible)

    def write(self, chosen: Bools, payload: U8, place: I64) -> None:
        self._put(self._fill, chosen, payload, place, 0)
        self._put(self._counts_and_inner(), chosen, payload, place, 1)
        words = np.where(chosen, (self._rows + 63) // 64, 0)
        off = offsets_of(words)
        mine = np.repeat(chosen, self._rows)
        bits = np.zeros(int(off[-1]) * 64, np.bool_)
        stripe_off = offsets_of(np.where(chosen, self._rows, 0))
        shift = np.repeat((off[:-1] * 64 - stripe_off[:-1])[chosen], self._rows[chosen])
        bits[np.arange(int(stripe_off[-1])) + shift] = self._present[mine]
        packed = np.packbits(bits, bitorder="little")
        _copy(packed, off[:-1] * 8, words * 8, payload, place + 16)
        self._inner.write(chosen, payload, place + self._head)


def _copy(data: U8, start: I64, size: I64, payload: U8, place: I64) -> None:
    """Copy ranges; where nothing is copied the place may lie beyond the end, at which the kernel would stop."""
    stopped_at = kernel("copy_ranges")(data, start, size, payload, np.where(size > 0, place, 0))
    assert stopped_at == -1


def packed_bytes(n: I64, width: npt.NDArray[Any]) -> I64:
    """(S,) bytes of n packed values of a width (with the flag ``LANES``)."""
    bits = (width & (LANES - 1)).astype(np.int64)
    lanes = ((n + 7) // 8 * bits + 63) // 64 * 64
    found: I64 = np.where(width & LANES, lanes, ((n * bits + 63) // 64 + 1) * 8)
    return found


class Planned:
    """The best block of each stripe, chosen but not written; that of the last candidate where ``last`` (S,) says so,
    and only there.

    Attributes:
        n_bytes: of all blocks.
    """

    def __init__(self, candidates: Sequence[_Candidate], last: Bools | None = None) -> None:
        choice = candidates if last is None else candidates[:-1]
        if len(choice) == 1:
            best = np.zeros(len(choice[0].size), np.int64)
        else:
            best = np.stack([c.size * 32 + c.codec for c in choice]).argmin(axis=0)
        if last is not None:
            best = np.where(last, len(choice), best)
        self._candidates, self._best = candidates, best
        self._offsets = offsets_of(self._chosen([c.size for c in candidates]))
        self.n_bytes = int(self._offsets[-1])

    def _chosen(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """(S,) what each stripe's candidate has."""
        found: npt.NDArray[Any] = arrays[0] if len(arrays) == 1 else np.choose(self._best, arrays)
        return found

    def write(self) -> EncodedStream:
        """The blocks."""
        offsets, candidates = self._offsets, self._candidates
        payload = np.zeros(self.n_bytes, np.uint8)
        for i, candidate in enumerate(candidates):
            chosen = self._best == i
            if chosen.any():
                candidate.write(chosen, payload, offsets[:-1])
        codec, width = self._chosen([c.codec for c in candidates]), self._chosen([c.width for c in candidates])
        crc = kernel("crc32c_many")(payload, offsets[:-1], np.diff(offsets))
        coded = bool(self._chosen([c.coded for c in candidates]).any())
        return EncodedStream(codec, width, payload, offsets, crc, coded)


def plan_fixed(values: Values) -> Planned:
    """Fixed-width values in the smallest block that the codecs give each stripe; ties go to the lower codec.

    Raises:
        InputError: a stripe does not begin with a restart, or a code is not in the dictionary.
    """
    values.check()
    return Planned(_candidates(values))


def plan_nullable(values: Values, null: Bools) -> tuple[Planned, Planned]:
    """The streams of nulls and of values of a column in which ``null`` (R,) rows are null; their words must be 0.

    Where that is smaller a stripe's values are those of the other rows alone, and its nulls are the absent ones.

    Raises:
        InputError: as ``plan_fixed``.
    """
    values.check()
    flags = Values(null.astype(np.uint64), values.stripe_off, values.restarts, 1)
    candidates, of_flags = _candidates(values), _candidates(flags)
    n_null = np.diff(offsets_of(null)[values.stripe_off])
    sparse = _Sparse(values, ~null, np.zeros(len(n_null), np.uint64), n_null > 0)
    apart = np.min([c.size for c in candidates], axis=0) + np.min([c.size for c in of_flags], axis=0)
    together = sparse.size < apart
    return Planned([*of_flags, _Absent(len(n_null))], together), Planned([*candidates, sparse], together)


def encode_fixed(values: Values) -> EncodedStream:
    """``plan_fixed``, written."""
    return plan_fixed(values).write()


class _Absent:
    """Codec 10: the rows that the next stream's block of codec 9 leaves out."""

    def __init__(self, n: int) -> None:
        self.codec, self.width = np.full(n, ABSENT, np.uint8), np.zeros(n, np.uint8)
        self.size, self.coded = np.zeros(n, np.int64), np.zeros(n, np.bool_)

    def write(self, chosen: Bools, payload: U8, place: I64) -> None:
        """Nothing."""


def _candidates(values: Values) -> list[_Candidate]:
    plain = _Plain(values)
    found: list[_Candidate] = [plain]
    # Below this no head pays.
    possible = plain.size > 24
    if not possible.any():
        return found
    runs, fill, count = kernel("stripe_words")(values.words, values.stripe_off)
    rows = np.diff(values.stripe_off)
    few = possible & (2 * runs <= rows)
    if few.any():
        found.append(_Runs(values, few, runs))
    often = possible & (2 * count > rows)
    if often.any():
        found.append(_Sparse(values, values.words != np.repeat(fill, rows), fill, often))
    return found
