"""KeyIndex: the row number of every 64-bit key. Rows are numbered in order of first insertion and keep their number.

Inserting keys (7, -1, 7) into an empty index gives rows (0, 1, 0); then (5, -1) without inserting gives (-1, 1).

It grows by a segment of slots at a time, which takes its keys from one other segment (linear hashing, decision 058):
twenty thousand new keys are about a millisecond of moving keys, however many are there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinrow.core.blocks import Blocks
from thinrow.core.errors import InputError
from thinrow.core.pool import empty
from thinrow.embeddings.blocks import RowBlocks
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]

#: Slots of the first segment, which doubles up to those of all others. A slot is 16 bytes: key and row.
_MIN_SLOTS, _SEGMENT_SLOTS = 1024, 1 << 16
#: Slots of the memory that segments are cut from: large, since its pages then are large ones, which look-ups find in
#: 0.8 of the time that they take in memory of a segment each.
_SLAB_SLOTS = 1 << 20
#: A segment is added when there are more keys than this share of all slots. Those that have not been split yet are
#: then up to twice as full: 5 of 8.
_FULL, _OF = 5, 16
#: Rows of a block of keys.
_BLOCK_ROWS = 65_536
#: Bytes of the index for a key at most, but for what is left of the last segment and block.
INDEX_BYTES = 16 * _OF // _FULL + 1 + 8
_NO_BOUND = np.iinfo(np.int64).max


class KeyIndex:
    """An open-addressing hash table in segments (``kernels.reference.keys``)."""

    _slots: Blocks
    _counts: Ints

    def __init__(self, keys: Ints | None = None) -> None:
        """With ``keys`` (n,) they are rows 0 to n - 1.

        Raises:
            InputError: a key is there twice.
        """
        self._fill(np.empty(0, np.int64) if keys is None else keys, _MIN_SLOTS)

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self, first: int = 0) -> Ints:
        """(n - first,) copy: the keys of the rows from ``first`` on."""
        return self._keys.to_array(first)[:, 0]

    def keys_of(self, rows: Ints) -> Ints:
        """(m,) keys of ``rows`` (m,), which ascend."""
        return self._keys.take(rows)[:, 0]

    @property
    def n_bytes(self) -> int:
        """Memory that is in use."""
        return sum(s.nbytes for s in self._slots) + sum(b.nbytes for b in self._keys.blocks)

    def rows(self, wanted: Ints, *, insert: bool, most: int | None = None) -> Ints:
        """(m,) row of each wanted key; absent ones are inserted while there are fewer than ``most`` rows, or -1."""
        rows: Ints = kernel("find_keys")(self._slots, wanted)
        if not insert or rows.min(initial=0) >= 0:
            return rows
        # What was saved under a larger budget, or joined from several shards, may have more rows already.
        bound = _NO_BOUND if most is None else max(most, len(self))
        if not self._insert(wanted, rows, bound):
            # The keys after the first that found no room may be there.
            return np.asarray(kernel("find_keys")(self._slots, wanted))
        return rows

    def _insert(self, wanted: Ints, rows: Ints, most: int) -> bool:
        """Give a row to all whose entry in ``rows`` is negative; whether all have one: no more than ``most`` do."""
        at, fresh = 0, empty(len(wanted), np.int64)
        while at < len(wanted):
            at, n = kernel("insert_keys")(self._slots, self._counts, len(self), most, wanted, rows, fresh, at)
            self._keys.append(fresh[: n - len(self), None])
            if at < len(wanted) and n == most:
                return False
            self._make_room(stopped=at < len(wanted))
        return True

    def _make_room(self, *, stopped: bool) -> None:
        """Add segments as there are keys; ``stopped``: a key has found no room, so that something must change."""
        size = len(self._slots[0])
        larger = size
        while larger < _SEGMENT_SLOTS and len(self) * _OF > 2 * _FULL * larger:
            larger *= 2
        if larger > size:
            self._fill(self.keys(), larger)
            stopped = False
        while len(self) * _OF > _FULL * self._n_slots and len(self._slots[0]) >= _SEGMENT_SLOTS:
            self._split()
            stopped = False
        if stopped:
            # One segment is full and the others are not, which chance never does: keys were made so.
            self._fill(self.keys(), 2 * size)

    @property
    def _n_slots(self) -> int:
        return len(self._slots) * len(self._slots[0])

    def _split(self) -> None:
        """Add a segment; it takes keys from the next one that has not been split since their number was a power of
        two."""
        bit = len(self._slots).bit_length() - 1
        source = len(self._slots) - (1 << bit)
        self._add(len(self._slots[0]))
        moved = kernel("split_keys")(self._slots[source], self._slots[-1], bit)
        self._counts[source] -= moved
        self._counts[-1] += moved

    def _add(self, size: int) -> None:
        """Add an empty segment."""
        if size < _SEGMENT_SLOTS:
            self._slots.append(np.empty((size, 2), np.int64))
        else:
            a_slab = max(1, _SLAB_SLOTS // size)
            k = len(self._slots) % a_slab
            if k == 0:
                self._slab = empty(a_slab * size * 2, np.int64).reshape(a_slab, size, 2)
            self._slots.append(self._slab[k])
        self._slots[-1].fill(-1)
        self._counts = np.append(self._counts, 0)

    def _fill(self, keys: Ints, size: int) -> None:
        """Start anew, with segments of ``size`` slots or more, and ``keys`` as rows 0 to n - 1. Raises InputError where
        one is there twice."""
        while size < _SEGMENT_SLOTS and len(keys) * _OF > 2 * _FULL * size:
            size *= 2
        self._keys = RowBlocks(1, np.int64, _BLOCK_ROWS, fill=None)
        self._slots = Blocks()
        self._counts = np.empty(0, np.int64)
        self._add(size)
        while len(keys) * _OF > _FULL * self._n_slots and size >= _SEGMENT_SLOTS:
            self._add(size)
        rows = np.full(len(keys), -1, np.int64)
        self._insert(keys, rows, _NO_BOUND)
        if len(self) < len(keys):
            twice = keys[np.flatnonzero(rows != np.arange(len(keys)))[0]]
            raise InputError(f"key {twice} is there twice; each key has one row")

    def drop(self, gone: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Forget the keys of the rows ``gone``. The last rows that stay take their places.

        Returns:
            Rows that moved and where to, both ascending.
        """
        left = len(self) - int(gone.sum())
        source, target = np.flatnonzero(~gone[left:]) + left, np.flatnonzero(gone[:left])
        kernel("drop_keys")(self._slots, self._counts, self.keys_of(np.flatnonzero(gone)))
        kernel("renumber_keys")(self._slots, self.keys_of(source), target)
        self._keys.move(source, target, left)
        return source, target
