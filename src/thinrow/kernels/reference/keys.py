"""Kernels of the index of 64-bit keys in NumPy: the oracle that other backends must equal bit for bit.

Keys are any int64. The index is an open-addressing hash table in segments of C slots (C, 2) int64, C a power of two:
(key, row) each, (-1, -1) where empty. Of G segments, S the largest power of two up to G, those below G - S and from S
on have been split: with w = mix64(key), a key is in segment w mod 2S if there is one of that number, else in w mod S
(linear hashing: Litwin 1980). There it is looked for from slot (w >> 32) mod C upwards, cyclically, until it or an
empty slot is met; one slot at least is empty.

Worked example: with C = 4 and G = 3, S = 2, so keys whose words end in the bits 00, 10 and 1 are in the segments 0, 2
and 1. The fourth segment takes from segment 1 the keys whose words end in 11, and then G = S = 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinrow.core.wrap import mix64_words

Ints = npt.NDArray[np.int64]


def find_keys(slots: Sequence[Ints], wanted: Ints) -> Ints:
    """(n,) int64 row of each wanted key, -1 where it is absent."""
    flat, size = np.concatenate(slots), len(slots[0])
    segment, at = _homes(wanted, len(slots), size)
    rows = np.full(len(wanted), -1, np.int64)
    left = np.arange(len(wanted))
    while len(left):
        key, row = flat[segment[left] * size + at[left]].T
        rows[left] = row
        left = left[(row >= 0) & (key != wanted[left])]
        at[left] = (at[left] + 1) & (size - 1)
    return rows


def insert_keys(
    slots: Sequence[Ints], counts: Ints, n_rows: int, most: int, wanted: Ints, rows: Ints, fresh: Ints, start: int
) -> tuple[int, int]:
    """Give a row to each wanted key from position ``start`` on whose ``rows`` entry is negative.

    New keys get rows ``n_rows``, ``n_rows + 1``, ... in order of first appearance and are written to ``fresh``, from
    its first place on. Changes ``slots``, ``counts`` (G,) (of each segment's keys), ``rows`` and ``fresh``. Returns the
    position at which it ended and the new number of rows; it ends early, before a new key, where there are ``most``
    rows or an eighth of the key's segment is all that is left (of fewer than eight slots one).
    """
    first, size = n_rows, len(slots[0])
    room = size - max(1, size >> 3)
    segment, home = _homes(wanted, len(slots), size)
    for i in range(start, len(wanted)):
        if rows[i] >= 0:
            continue
        own = slots[segment[i]]
        at = _probe(own, int(home[i]), wanted[i])
        if own[at, 1] < 0:
            if n_rows == most or counts[segment[i]] >= room:
                return i, n_rows
            own[at] = wanted[i], n_rows
            counts[segment[i]] += 1
            fresh[n_rows - first] = wanted[i]
            n_rows += 1
        rows[i] = own[at, 1]
    return len(wanted), n_rows


def split_keys(slots: Ints, other: Ints, bit: int) -> int:
    """Move the keys whose word has a 1 at ``bit`` from the segment ``slots`` to ``other``, which is empty.

    All keys are placed again, one after another, from the first empty slot on cyclically. Returns how many moved.
    """
    size = len(slots)
    empty = int(np.flatnonzero(slots[:, 1] < 0)[0])
    held = np.roll(slots, -empty, axis=0)
    held = held[held[:, 1] >= 0]
    slots[:] = -1
    _, homes = _homes(held[:, 0], 1, size)
    moves = (mix64_words(held[:, 0].view(np.uint64)) >> np.uint64(bit)) & np.uint64(1) == 1
    for entry, home, move in zip(held, homes.tolist(), moves.tolist(), strict=True):
        into = other if move else slots
        into[_probe(into, home, entry[0])] = entry
    return int(moves.sum())


def renumber_keys(slots: Sequence[Ints], keys: Ints, rows: Ints) -> None:
    """Give ``keys`` (n,), which are all there, the rows ``rows`` (n,)."""
    segment, home = _homes(keys, len(slots), len(slots[0]))
    for key, row, s, at in zip(keys, rows, segment, home.tolist(), strict=True):
        slots[s][_probe(slots[s], at, key), 1] = row


def drop_keys(slots: Sequence[Ints], counts: Ints, keys: Ints) -> None:
    """Take ``keys``, which are all there, out, one after another. A key behind the hole, up to the next empty slot,
    goes into it where it is looked for from there or before, and leaves the next hole (Knuth, volume 3, algorithm R).
    """
    size = len(slots[0])
    segment, home = _homes(keys, len(slots), size)
    for key, s, start in zip(keys, segment, home.tolist(), strict=True):
        own = slots[s]
        hole = at = _probe(own, start, key)
        while own[(at := (at + 1) & (size - 1)), 1] >= 0:
            wanted_at = int(_homes(own[at, :1], 1, size)[1][0])
            if (at - wanted_at) & (size - 1) >= (at - hole) & (size - 1):
                own[hole] = own[at]
                hole = at
        own[hole] = -1
        counts[s] -= 1


def count_keys(cells: npt.NDArray[np.uint8], keys: Ints) -> npt.NDArray[np.uint8]:
    """Count each key, one after another, in a sketch of two rows; (n,) its count after that, at most 255.

    With w = mix64(key), the cells of a key are ``cells[0, w mod m]`` and ``cells[1, (w >> 32) mod m]``, m a power of
    two; its count is the lesser, and counting raises the cells that hold no more than it.
    """
    out = np.empty(len(keys), np.uint8)
    words = mix64_words(keys.view(np.uint64))
    mask = np.uint64(cells.shape[1] - 1)
    for i, (a, b) in enumerate(zip(words & mask, (words >> np.uint64(32)) & mask, strict=True)):
        count = min(int(cells[0, a]), int(cells[1, b]))
        count = min(count + 1, 255)
        cells[0, a], cells[1, b] = max(cells[0, a], count), max(cells[1, b], count)
        out[i] = count
    return out


def _homes(keys: Ints, n_segments: int, size: int) -> tuple[Ints, Ints]:
    """Segment of each key, and the slot in it from which on it is looked for."""
    words = mix64_words(np.ascontiguousarray(keys).view(np.uint64))
    whole = 1 << (n_segments.bit_length() - 1)
    segment = (words & np.uint64(2 * whole - 1)).astype(np.int64)
    segment[segment >= n_segments] -= whole
    return segment, (words >> np.uint64(32) & np.uint64(size - 1)).astype(np.int64)


def _probe(slots: Ints, at: int, key: np.int64) -> int:
    while slots[at, 1] >= 0 and slots[at, 0] != key:
        at = (at + 1) & (len(slots) - 1)
    return at
