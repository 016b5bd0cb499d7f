"""KeyIndex: the row number of every 64-bit key. Rows are numbered in order of first insertion and keep their number.

Inserting keys (7, -1, 7) into an empty index gives rows (0, 1, 0); then (5, -1) without inserting gives (-1, 1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]

_MIN_SLOTS = 1024
#: Bytes of the index for a key at most: just after it doubled there are four slots of (key, row) and room for two keys.
INDEX_BYTES = 4 * 16 + 2 * 8


class KeyIndex:
    """An open-addressing hash table, at most half full; it doubles when it is (``kernels.reference.table``)."""

    def __init__(self, keys: Ints | None = None) -> None:
        """With ``keys`` (n,) they are rows 0 to n - 1.

        Raises:
            InputError: a key is there twice.
        """
        self._n = 0 if keys is None else len(keys)
        self._allocate(max(_MIN_SLOTS, 1 << (2 * self._n - 1).bit_length() if self._n else 0))
        if keys is not None:
            self._keys[: self._n] = keys
            twice = kernel("place_keys")(self._slots, self.keys)
            if twice >= 0:
                raise InputError(f"key {keys[twice]} is there twice; each key has one row")

    def __len__(self) -> int:
        return self._n

    @property
    def keys(self) -> Ints:
        """(n,) view: the key of each row."""
        return self._keys[: self._n]

    def rows(self, wanted: Ints, *, insert: bool, most: int | None = None) -> Ints:
        """(m,) row of each wanted key; absent ones are inserted while there are fewer than ``most`` rows, or -1."""
        rows: Ints = kernel("find_keys")(self._slots, wanted)
        if not insert or rows.min(initial=0) >= 0:
            return rows
        if most is not None:
            # What was saved under a larger budget, or joined from several shards, may have more rows already.
            most = max(most, self._n)
        at = 0
        while at < len(wanted):
            at, self._n = kernel("insert_keys")(self._slots, self._keys[:most], self._n, wanted, rows, at)
            if at < len(wanted) and self._n == most:
                # The keys after the first that found no room may be there.
                return np.asarray(kernel("find_keys")(self._slots, wanted))
            if at < len(wanted):
                keys = self.keys
                self._allocate(2 * len(self._slots))
                self._keys[: self._n] = keys
                kernel("place_keys")(self._slots, keys)
        return rows

    def drop(self, gone: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Forget the keys of the rows ``gone``. The last rows that stay take their places.

        Returns:
            Rows that moved and where to, both ascending.
        """
        left = self._n - int(gone.sum())
        source, target = np.flatnonzero(~gone[left:]) + left, np.flatnonzero(gone[:left])
        self._keys[target] = self._keys[source]
        self._n = left
        self._slots.fill(-1)
        kernel("place_keys")(self._slots, self.keys)
        return source, target

    def _allocate(self, n_slots: int) -> None:
        self._slots: Ints = np.full((n_slots, 2), -1, np.int64)
        self._keys: Ints = np.empty(n_slots // 2, np.int64)
