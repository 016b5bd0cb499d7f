"""The order under a ``BatchBudget``: windows of a fixed number of rows, cut into batches by what these cost.

A window is a block of the virtual order. Its units (users, or examples) are permuted by seed and window, or sorted by
length and then permuted, and cut into batches in that order; the batches of a window come one after another, in the
order of units or, by length, permuted. All of it is a function of seed, sizes and budget, so that batch t is found, by
any worker, from its number alone. How many batches the windows before have is counted once, many windows at a time.

Ranks: batch t has the same rows whatever their number. Its units go, dearest first, each to the rank that has least
(of equals the lowest), so that users stay whole: a rank reads no history that another one reads in that batch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.core.wrap import mix64_words
from thinrow.dpp.budget import BatchBudget, Floats, Ints, RowSizes, state_of
from thinrow.dpp.order import BATCH_STREAM, UNIT_STREAM, Base, RowRefs, SplitManifest, VirtualOrder, permutation, state
from thinrow.kernels import kernel

#: Rows whose windows are counted at a time.
_CHUNK_ROWS = 1 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class _Units:
    """Units of some windows, window by window in the order in which they are cut.

    Attributes:
        window_off: (W + 1,) units of each window.
        row_off: (U + 1,) rows of each unit, in ``v`` and ``row``.
        cost, events: (U,).
        v, row: (n,) the base batch of each row, and its place there.
    """

    window_off: Ints
    row_off: Ints
    cost: Floats
    events: Ints
    v: Ints
    row: Ints


class BudgetOrder:
    """See the module, and ``VirtualOrder`` for the members.

    Args:
        order: the rows, and the windows: its blocks.
        budget: what a batch may cost.
        sizes: of all rows.
        max_len: newest events that an example reads; None for all.

    Raises:
        InputError: the order has ``batch_rows``, or the sizes are of other rows.
    """

    def __init__(self, order: VirtualOrder, budget: BatchBudget, sizes: RowSizes, max_len: int | None) -> None:
        if order.batch_rows is not None:
            raise InputError(
                f"both batch_rows={order.batch_rows} and {budget}; give one, batches are cut by one of them"
            )
        if len(sizes.events) != order.manifest.n_rows:
            raise InputError(f"sizes of {len(sizes.events)} rows for a table of {order.manifest.n_rows}")
        self._order, self._budget, self._sizes, self._max_len = order, budget, sizes, max_len
        self._split_off = offsets_of(order.manifest.split_rows)
        self._limits = budget.limit, budget.max_events or np.iinfo(np.int64).max
        #: First batch of each window that was counted, and of the one after.
        self._starts = np.zeros(1, np.int64)
        self._last: tuple[int, _Units, Ints] | None = None
        self._lock = threading.Lock()
        self.budget_state = state_of(budget, max_len, sizes.fingerprint())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_last": None}

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held, _lock=threading.Lock())

    @property
    def manifest(self) -> SplitManifest:
        """The rows."""
        return self._order.manifest

    @property
    def n_bases(self) -> int | None:
        """Base batches of the run; None where it has no end."""
        return self._order.n_bases

    @property
    def n_batches(self) -> int | None:
        """Global batches of the run; None where it has no end. Counts all windows when it is first asked for."""
        n = self._order.n_batches
        if n is None:
            return None
        while len(self._starts) <= n:
            self._count_more()
        return int(self._starts[n])

    def base(self, v: int) -> Base:
        """The base batch of virtual index ``v``."""
        return self._order.base(v)

    def bases_of(self, t: int) -> range:
        """Virtual indices that batch ``t`` is cut from: those of its window."""
        return self._order.bases_of(self._place(t)[0])

    def batch(self, t: int, rank: int = 0, n_ranks: int = 1) -> RowRefs:
        """Rows of global batch ``t`` for one rank: users one after another, each user's rows as stored."""
        window, number = self._place(t)
        units, batch_of = self._planned(window)
        mine = np.flatnonzero(batch_of == number)
        if n_ranks > 1:
            mine = mine[kernel("spread_units")(units.cost[mine], n_ranks) == rank]
        at, _ = ranges_index(units.row_off[mine], units.row_off[mine + 1])
        return RowRefs(units.v[at], units.row[at])

    def load(self, t: int, n_ranks: int) -> Floats:
        """(n_ranks,) what batch ``t`` costs each rank."""
        window, number = self._place(t)
        units, batch_of = self._planned(window)
        cost = units.cost[batch_of == number]
        return np.bincount(kernel("spread_units")(cost, n_ranks), cost, minlength=n_ranks).astype(np.float64)

    def _place(self, t: int) -> tuple[int, int]:
        """The window of batch ``t``, and its number there."""
        n = self._order.n_batches
        while t >= self._starts[-1] and (n is None or len(self._starts) <= n):
            self._count_more()
        if not 0 <= t < self._starts[-1]:
            raise InputError(f"batch {t} is not in the run; it has {self._starts[-1]} batches, numbered from 0")
        window = int(np.searchsorted(self._starts, t, side="right")) - 1
        return window, int(t - self._starts[window])

    def _count_more(self) -> None:
        """Count the batches of the next windows."""
        with self._lock:
            first, n = len(self._starts) - 1, self._order.n_batches
            windows = min(_CHUNK_ROWS // self.manifest.base_rows, self.manifest.n_bases) // self._order.block + 1
            stop = first + windows if n is None else min(first + windows, n)
            if stop <= first:
                return  # another thread has
            units = self._units(first, stop)
            counts = kernel("count_batches")(units.cost, units.events, units.window_off, *self._limits)
            self._starts = np.concatenate([self._starts, self._starts[-1] + np.cumsum(counts)])

    def _planned(self, window: int) -> tuple[_Units, Ints]:
        """Units of a window, and (U,) the batch of each, counted from the window's first."""
        held = self._last
        if held is not None and held[0] == window:
            return held[1:]
        units = self._units(window, window + 1)
        batch_of: Ints = kernel("cut_batches")(units.cost, units.events, *self._limits)
        if self._budget.by_length and len(batch_of):
            batch_of = permutation(int(batch_of[-1]) + 1, self._order.seed, BATCH_STREAM, window)[batch_of]
        self._last = window, units, batch_of
        return units, batch_of

    def _units(self, first: int, stop: int) -> _Units:
        """Units of windows ``[first, stop)``."""
        budget, sizes = self._budget, self._sizes
        vs, split, first_row, n = self._bases(first, stop)
        start = self._split_off[split] + first_row
        rows, _ = ranges_index(start, start + n)
        base = np.repeat(np.arange(len(vs)), n)
        window = vs[base] // self._order.block - first
        starts, by_unit = None, np.arange(len(rows))
        if budget.shared:
            key = window * sizes.n_users + sizes.users[rows]
            by_unit = np.argsort(key, kind="stable")
            sorted_key = key[by_unit]
            starts = np.flatnonzero(np.diff(sorted_key, prepend=-1))
        off = np.append(np.arange(len(rows)) if starts is None else starts, len(rows))
        events = sizes.held(rows[by_unit], self._max_len, starts)
        unit_window = window[by_unit[off[:-1]]]
        window_off = np.searchsorted(unit_window, np.arange(stop - first + 1))
        keys = self._keys(first, unit_window, window_off)
        cut = np.lexsort((keys, events, unit_window) if budget.by_length else (keys, unit_window))
        at, row_off = ranges_index(off[cut], off[cut + 1])
        chosen = by_unit[at]
        place = rows[chosen] - start[base[chosen]]
        costs = budget.costs(np.diff(row_off), events[cut])
        return _Units(window_off, row_off, costs, events[cut], vs[base[chosen]], place)

    def _keys(self, first: int, window: Ints, window_off: Ints) -> npt.NDArray[np.uint64]:
        """(U,) what units are sorted by: ``permutation`` of many windows at once."""
        number = np.arange(first, first + len(window_off) - 1, dtype=np.uint64)
        states = mix64_words(state(self._order.seed, UNIT_STREAM) + number)
        within = np.arange(1, len(window) + 1) - window_off[window]
        return mix64_words(states[window] + within.astype(np.uint64) * _GOLDEN)

    def _bases(self, first: int, stop: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Base batches of windows ``[first, stop)``: virtual index, split, first row and number of rows of each."""
        order, per_epoch = self._order, self.manifest.n_bases
        v_first, v_stop = first * order.block, stop * order.block
        v_stop = v_stop if order.n_bases is None else min(v_stop, order.n_bases)
        parts: list[tuple[Ints, Ints, Ints]] = []
        for epoch in range(v_first // per_epoch, -(-v_stop // per_epoch)):
            a, b = max(v_first - epoch * per_epoch, 0), min(v_stop - epoch * per_epoch, per_epoch)
            found = order.epoch(epoch)
            parts.append((found.split[a:b], found.first_row[a:b], np.diff(found.row_start[a : b + 1])))
        split, first_row, n = (np.concatenate(p) for p in zip(*parts, strict=True))
        return np.arange(v_first, v_stop), split, first_row, n
