"""DynamicTable: vectors for 64-bit keys, made when a key first appears.

    table = DynamicTable(dim=2, seed=0)
    table.rows(np.array([7, -1, 7]), insert=True)      # [0, 1, 0]
    table.read(np.array([1, -1]))                      # the vector of key -1, then zeros: row -1 is nobody's

A key's first vector is a function of (seed, key) alone: it does not depend on which keys came before. Rows keep their
number while the table grows; only ``make_room``, at the end of a step of a table with a ``Budget``, moves some. All
results are the same bits for any number of threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.named import imported
from thinrow.core.pool import empty
from thinrow.embeddings.blocks import RowBlocks
from thinrow.embeddings.budget import USAGE, Budget, Usage
from thinrow.embeddings.changes import Changes
from thinrow.embeddings.checks import (
    bounds_wrong,
    budget_to_keep,
    check_loaded,
    check_row_state,
    gradient_not_finite,
    gradient_outside,
    gradient_shape,
    row_outside,
)
from thinrow.embeddings.index import INDEX_BYTES, KeyIndex
from thinrow.embeddings.sketch import Sketch
from thinrow.embeddings.states import BASE, DELTA, MARKS, PLACES, ROW_FILL, ROW_STATE, WHOLE
from thinrow.embeddings.traffic import LOOK_UP_BYTES, Traffic
from thinrow.embeddings.waiting import with_part
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_INITS = ("uniform", "normal", "constant")
_SCALARS = ("dim", "seed", "init_scale")
#: Of a state, where vectors do not start uniform: how they do, as UTF-8.
_INIT = "init"


class DynamicTable:
    """One embedding table; models, tasks and fields may share it if their keys differ (hash each field with its seed).

    Look-ups without insertion, and reads, may run in several threads at once; every other call needs the table alone.

    Attributes:
        dim: width of a vector.
        seed, init, init_scale: how new vectors are made.
        dtype: of the vectors, float32 or float64.
        values: the vectors, row by row.
        budget: what bounds the table; None for nothing.
        step: how many steps ended, counted where there is a budget.
        moves: how often rows moved: numbers of rows that were looked up before mean nothing after it.
        of_ranks: whether a ``Shard`` has it; then gradients wait with the shard, which optimizers are given.
        traffic: bytes that its calls had to move; not part of its state.
    """

    def __init__(
        self,
        dim: int,
        *,
        seed: int = 0,
        init: str = "uniform",
        init_scale: float = 0.05,
        block_rows: int = 65_536,
        dtype: npt.DTypeLike = np.float32,
        budget: Budget | None = None,
    ) -> None:
        """Args:
            init: how a new vector is drawn from (seed, key, column): ``uniform`` in [-init_scale, init_scale);
                ``normal``, of deviation ``init_scale``; ``constant``, ``init_scale`` everywhere; or ``module:name`` of
                a function (keys (n,) int64, dim, seed) -> (n, dim), whose result of a key must depend on nothing else.
            block_rows: rows that the table grows by, a power of two; it changes no result.
            budget: what bounds it; None for nothing.

        Raises:
            InputError: a parameter is out of its range.
        """
        if not isinstance(dim, int | np.integer) or dim < 1:
            raise InputError(f"dim={dim!r}; it must be an integer, 1 or more")
        if budget is not None and not isinstance(budget, Budget):
            raise InputError(f"budget={budget!r}; it must be a Budget, or None for nothing that bounds the table")
        if np.dtype(dtype) not in _DTYPES:
            raise InputError(f"dtype={np.dtype(dtype)}; it must be float32 or float64")
        if not 0 <= seed < 1 << 63:
            raise InputError(f"seed={seed}; it must be in [0, 2^63)")
        if init not in _INITS and init.count(":") != 1:
            raise InputError(f"init={init!r}; it must be {', '.join(_INITS)}, or 'module:name' of a function")
        # What is drawn may be some times the scale, and must be finite in the dtype.
        largest = float(np.finfo(dtype).max) / 16
        if not abs(init_scale) <= largest or (init_scale < 0 and init != "constant"):
            raise InputError(
                f"init_scale={init_scale}; it must be {largest:.3g} at most, and 0 or more but for init='constant'"
            )
        if block_rows < 1 or block_rows & (block_rows - 1):
            raise InputError(f"block_rows={block_rows}; it must be a power of two")
        self.dim, self.seed, self.dtype = int(dim), seed, np.dtype(dtype)
        self.init, self.init_scale = init, float(init_scale)
        self._block_rows = block_rows
        self._index = KeyIndex()
        self.values = RowBlocks(dim, self.dtype, block_rows, self.init_scale if init == "constant" else None)
        self._row_state: dict[str, RowBlocks] = {}
        self._gradients: list[tuple[Ints, Floats]] = []
        self._trackers: list[Changes] = []
        self.budget, self.step, self.moves, self.of_ranks = budget, 0, 0, False
        self.traffic = Traffic()
        self._sketch = Sketch(budget.sketch_cells) if budget is not None and budget.min_count > 1 else None

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> Ints:
        """(n,) int64 copy: the key of each row."""
        return self._index.keys()

    def rows(self, keys: Ints, *, insert: bool) -> Ints:
        """(n,) int64 row of each of ``keys`` (n,) int64; a key may appear many times.

        Absent keys get the next rows in order of first appearance, or with ``insert=False`` row -1. With a budget those
        that were seen too few times, or for which there is no room in this step, have row -1 too.

        Raises:
            InputError: ``keys`` is not one-dimensional int64.
        """
        wanted = _int64("keys", keys)
        before = len(self)
        if insert and self.budget is not None:
            rows = self._admit(wanted, self.budget)
        else:
            rows = self._index.rows(wanted, insert=insert)
        self.traffic.look_up += len(wanted) * LOOK_UP_BYTES
        if len(self) > before:
            self.traffic.start += (len(self) - before) * self._stored_bytes
            self._start(before)
            for state in self._row_state.values():
                state.grow(len(self))
            for changes in self._trackers:
                changes.grew(self._index.keys(before))
        if insert and self.budget is not None:
            kernel("touch_rows")(self.row_state(USAGE, 2, dtype=np.int64).blocks, rows, self.step)
            self._wrote(rows[rows >= 0] if self._trackers else rows)
        return rows

    def _start(self, before: int) -> None:
        """Make the vectors of the rows from ``before`` on."""
        keys = self._index.keys(before)
        if self.init == "constant":
            self.values.grow(len(self))
        elif self.init in _INITS:
            self.values.grow(len(self))
            drawn = self.seed, self.init_scale, self.init == "normal"
            kernel("start_rows")(self.values.blocks, before, keys, *drawn)
        else:
            try:
                given = np.asarray(imported(self.init, f"init={self.init!r}")(keys.copy(), self.dim, self.seed))
            except BaseException:
                self._index.drop(np.arange(len(self)) >= before)
                raise
            with np.errstate(over="ignore"):
                made = given.astype(self.dtype) if given.dtype.kind == "f" else given
            if made.shape != (len(keys), self.dim) or made.dtype.kind != "f" or not np.isfinite(made).all():
                self._index.drop(np.arange(len(self)) >= before)
                raise InputError(
                    f"{self.init} gave {given.dtype} {given.shape}; it must give {(len(keys), self.dim)} floats, "
                    f"finite as {self.dtype}"
                )
            self.values.append(made)

    def _admit(self, wanted: Ints, budget: Budget) -> Ints:
        most = budget.rows(self.row_bytes)
        if self._sketch is None:
            return self._index.rows(wanted, insert=True, most=most)
        rows = self._index.rows(wanted, insert=False)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            keys = wanted[absent]
            self._index.rows(keys[self._sketch.seen(keys) >= budget.min_count], insert=True, most=most)
            # Looked up again, so that a key has one row at all its places in the call.
            rows[absent] = self._index.rows(keys, insert=False)
        return rows

    @property
    def _stored_bytes(self) -> int:
        """Bytes of a row's vector and states."""
        return sum(b.width * b.dtype.itemsize for b in (self.values, *self._row_state.values()))

    @property
    def row_bytes(self) -> int:
        """Bytes of memory that a row takes at most: vector, optimizer state, usage, and its place in the index."""
        return (
            self._stored_bytes + INDEX_BYTES + (16 if USAGE not in self._row_state and self.budget is not None else 0)
        )

    def make_room(self) -> int:
        """End a step: where more rows are taken than the budget keeps, remove those that it names. Optimizers call it.

        Row numbers that were looked up before mean nothing after it. Returns how many rows went; a table without a
        budget has room.

        Raises:
            InputError: gradients are kept for the next step; further as ``Budget.leaving``.
        """
        if self.budget is None:
            return 0
        if self._gradients:
            raise InputError("make_room before a step used its gradients; step the optimizer first")
        too_many = self.budget.too_many(len(self), self.budget.rows(self.row_bytes))
        usage = self.row_state(USAGE, 2, dtype=np.int64)
        gone = np.zeros(0, np.bool_)
        if len(self) and (too_many or self.budget.max_age is not None):
            counts, last = usage.to_array().T
            gone = self.budget.leaving(Usage(self._index.keys(), counts, last, self.step), too_many)
        self.step += 1
        if not gone.any():
            return 0
        self.moves += 1
        before, lost = len(self), self._index.keys_of(np.flatnonzero(gone))
        source, target = self._index.drop(gone)
        for changes in self._trackers:
            changes.dropped(lost, gone, source, target, self._index.keys_of(target))
        for rows in (self.values, *self._row_state.values()):
            rows.move(source, target, len(self))
        if too_many and self.budget.evict == "lfu":
            for block in usage.blocks:
                block[:, 0] -= block[:, 0] >> 1
            for changes in self._trackers:
                changes.whole.add(USAGE)
        return before - len(self)

    def read(self, rows: Ints, out: Floats | None = None) -> Floats:
        """(n, dim) vectors of ``rows`` (n,) int64 in the table's dtype; row -1 reads as zeros.

        ``out``: written and returned instead of a new array.

        Raises:
            InputError: a row is not in [-1, len), or ``out`` is no C-contiguous (n, dim) array of the table's dtype.
        """
        rows = _int64("rows", rows)
        if out is None:
            out = empty(len(rows) * self.dim, self.dtype).reshape(len(rows), self.dim)
        elif out.shape != (len(rows), self.dim) or out.dtype != self.dtype or not out.flags.carray:
            raise InputError(
                f"out is {out.dtype} {out.shape}; it must be a writable, C-contiguous {self.dtype} array of "
                f"{(len(rows), self.dim)}"
            )
        bad = kernel("gather_rows")(self.values.blocks, len(self), rows, out)
        self.traffic.read += 2 * out.nbytes
        if bad >= 0:
            raise row_outside(rows[bad], bad, len(self))
        return out

    def pool(self, rows: Ints, bounds: Ints) -> Floats:
        """(b, dim): of every bag the sum of the vectors of its rows, added in their order; row -1 adds nothing.

        Args:
            rows: (n,) int64.
            bounds: (b + 1,) int64 ascending, from 0 to n: bag k has ``rows[bounds[k]:bounds[k + 1]]``.

        Raises:
            InputError: a row is not in [-1, len), or ``bounds`` are not such.
        """
        rows, bounds = _int64("rows", rows), _int64("bounds", bounds)
        self.check_bounds(bounds, len(rows))
        out = empty((len(bounds) - 1) * self.dim, self.dtype).reshape(-1, self.dim)
        bad = kernel("pool_rows")(self.values.blocks, len(self), rows, bounds, out)
        self.traffic.read += len(rows) * self.dim * self.dtype.itemsize + out.nbytes
        if bad >= 0:
            raise row_outside(rows[bad], bad, len(self))
        return out

    def check_bounds(self, bounds: Ints, n: int) -> None:
        """Raises InputError where ``bounds`` of bags are not (b + 1,) int64 ascending from 0 to ``n``."""
        _int64("bounds", bounds)
        # No differences: those of forged bounds wrap.
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != n or (bounds[1:] < bounds[:-1]).any():
            raise bounds_wrong(bounds[:3], n)

    def row_state(self, name: str, width: int, *, fill: float = 0.0, dtype: npt.DTypeLike | None = None) -> RowBlocks:
        """The optimizer state ``name``: (n, width) numbers that grow and are saved with the rows.

        It is made when it is first asked for, ``fill`` in old rows and new ones; later ``fill`` is ignored.
        ``dtype``: the table's where it is None.

        Raises:
            InputError: it is there with another width or dtype.
        """
        wanted = np.dtype(dtype) if dtype is not None else self.dtype
        state = self._row_state.get(name)
        if state is None:
            state = RowBlocks(width, wanted, self._block_rows, fill)
            state.grow(len(self))
            self._row_state[name] = state
        check_row_state(name, state, width, wanted)
        return state

    def add_gradient(self, rows: Ints, gradient: Floats, of: Ints | None = None) -> None:
        """Keep ``gradient`` (n, dim) of ``rows`` (n,), summed by row in the order given, for the next step; with a
        budget that of row -1 is nobody's. With ``of`` (n,) int64, ``gradient`` is (b, dim) and position i has
        ``gradient[of[i]]``: positions of a bag share one.

        Raises:
            InputError: a row is not in [0, len), shape or dtype are not the table's, or a sum is NaN or infinite
                (names the key); nothing is kept then.
        """
        rows = _int64("rows", rows)
        if gradient.shape != (len(rows) if of is None else len(gradient), self.dim) or gradient.dtype != self.dtype:
            raise gradient_shape(gradient.dtype, gradient.shape, self.dtype, (len(rows), self.dim))
        if of is not None and (of.shape != rows.shape or of.min(initial=0) < 0 or of.max(initial=-1) >= len(gradient)):
            raise InputError(f"of {of.shape}; it must be {rows.shape}, each in [0, {len(gradient)})")
        if self.budget is not None and rows.min(initial=0) == -1:
            held = np.flatnonzero(rows != -1)
            rows, of = rows[held], held if of is None else of[held]
        if rows.min(initial=0) < 0 or rows.max(initial=-1) >= len(self):
            outside = rows[(rows < 0) | (rows >= len(self))]
            raise gradient_outside(outside[0], len(self))
        if len(rows):
            new = self._summed(rows, np.ascontiguousarray(gradient), of)
            self._gradients = with_part(self._gradients, new, self._merged)

    def sum_gradient(self) -> tuple[Ints, Floats] | None:
        """What ``take_gradient`` would give, which stays. Raises as that."""
        if len(self._gradients) > 1:
            self._gradients = [self._merged(self._gradients)]
        return self._gradients[0] if self._gradients else None

    def take_gradient(self) -> tuple[Ints, Floats] | None:
        """Distinct rows (d,) ascending and their summed gradients (d, dim), kept no longer; None if there are none.

        Who takes them writes these rows; they count as changed.

        Raises:
            InputError: a sum of several calls overflows (names the key); all stays as it was.
        """
        found = self.sum_gradient()
        self.clear_gradient()
        if found is not None:
            self._wrote(found[0])
        return found

    def clear_gradient(self) -> None:
        """Forget the gradients kept for the next step."""
        self._gradients.clear()

    def track(self) -> Changes:
        """From now on note which rows change, until ``untrack``; what ``delta`` is given.

        ``load_state`` ends it, since every row may be another one then.
        """
        self._trackers.append(Changes(self._index.keys()))
        return self._trackers[-1]

    def untrack(self, changes: Changes) -> None:
        """Note no more."""
        self._trackers.remove(changes)

    def _wrote(self, rows: Ints) -> None:
        for changes in self._trackers:
            changes.touched(rows)

    def delta(self, changes: Changes, *, row_states: bool = True) -> dict[str, npt.NDArray[Any]]:
        """Copies of all that changed since the mark of ``changes``, by name: with the state of that moment it is
        ``state()`` bit for bit (``states.replay``). The mark stays; ``changes.mark(version)`` sets a new one.

        As ``state()``, but ``keys``, ``values`` and row states hold only the rows ``delta.rows`` (d,) int64, ascending.
        ``delta.n_rows`` () is how many there are in all, ``delta.from_rows`` () how many there were at the mark;
        ``delta.gone`` (g,) int64, ascending, the keys that lost their row and have none now; ``delta.base`` (2,) int64,
        step and CRC of ``changes.base`` where it is known; ``delta.from_places`` () and ``delta.marks`` () say which
        keys were in which rows at the mark, and how many marks were before it;
        ``delta.whole.row_state.NAME`` all rows of a row state of which more changed than ``delta.rows``. Without
        ``row_states`` what only training needs is left out; that can be served, not replayed.

        Raises:
            InputError: ``changes`` is not of this table, or was before ``load_state``.
        """
        if not any(changes is mine for mine in self._trackers):
            raise InputError("these changes are not of this table as it is now; call track() anew after load_state")
        rows, gone = changes.rows(), changes.gone()
        gone = gone[self._index.rows(gone, insert=False) < 0]
        delta = {
            DELTA + "rows": rows,
            DELTA + "n_rows": np.array(len(self)),
            DELTA + "from_rows": np.array(changes.marked_rows),
            PLACES: np.array(changes.marked_places, np.uint64).view(np.int64),
            MARKS: np.array(changes.marks),
            DELTA + "gone": gone,
            "keys": self._index.keys_of(rows),
            "values": self.values.take(rows),
        }
        if changes.base is not None:
            delta[BASE] = np.array([changes.base.step, changes.base.crc32c])
        for name, blocks in self._row_state.items() if row_states else ():
            if name in changes.whole:
                delta[WHOLE + ROW_STATE + name] = blocks.to_array()
            else:
                delta[ROW_STATE + name] = blocks.take(rows)
        return delta | self._constants(row_states)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all that the table needs to go on bit for bit, by name; gradients kept for a step are not part.

        ``keys`` (n,) int64 in row order; ``values`` (n, dim); for each row state ``row_state.NAME`` (n, width) and
        ``row_fill.NAME`` (), what its new rows hold; ``dim``, ``seed``, ``init_scale`` (). With a budget also
        ``budget``, ``step`` and what counts keys without a row.
        """
        state: dict[str, npt.NDArray[Any]] = {"keys": self.keys(), "values": self.values.to_array()}
        for name, blocks in self._row_state.items():
            state[ROW_STATE + name] = blocks.to_array()
        return state | self._constants()

    def state_names(self) -> list[str]:
        """What ``state`` would have now, sorted, without copies of the rows."""
        return sorted({"keys", "values", *(ROW_STATE + name for name in self._row_state), *self._constants()})

    def _constants(self, row_states: bool = True) -> dict[str, npt.NDArray[Any]]:
        """Of ``state``, what is not row by row."""
        scalars = np.array(self.dim), np.array(self.seed), np.array(self.init_scale)
        state = dict(zip(_SCALARS, scalars, strict=True))
        if not row_states:
            return state
        state |= {ROW_FILL + name: np.array(blocks.fill, np.float64) for name, blocks in self._row_state.items()}
        if self.init != "uniform":
            state[_INIT] = np.frombuffer(self.init.encode(), np.uint8)
        if self.budget is not None:
            state |= {"budget": self.budget.to_bytes(), "step": np.array(self.step)}
        if self._sketch is not None:
            state |= {"sketch": self._sketch.cells.copy(), "sketch_sightings": np.array(self._sketch.sightings)}
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]], *, block_rows: int = 65_536) -> DynamicTable:
        """A table as it was when ``state`` was taken. Warns where it has more rows than its budget allows.

        Raises:
            InputError: ``state`` is not what ``DynamicTable.state`` returns.
        """
        for name in ("keys", "values", *_SCALARS):
            if name not in state:
                raise InputError(
                    f"the state has no {name!r}, only {', '.join(sorted(state))}; pass DynamicTable.state()"
                )
        table = cls(
            int(state["dim"]),
            seed=int(state["seed"]),
            init=state[_INIT].tobytes().decode() if _INIT in state else "uniform",
            init_scale=float(state["init_scale"]),
            block_rows=block_rows,
            dtype=state["values"].dtype,
            budget=Budget.from_bytes(state["budget"]) if "budget" in state else None,
        )
        table._load_budget(state)
        keys = _int64("keys", state["keys"])
        table.values.append(_checked("values", state["values"], len(keys), table.dim))
        for full in sorted(set(state) - {"keys", "values", _INIT, *_SCALARS, *table._budget_names()}):
            kind, _, name = full.partition(".")
            if f"{kind}." not in (ROW_STATE, ROW_FILL) or not {ROW_STATE + name, ROW_FILL + name} <= set(state):
                raise InputError(
                    f"the state has {full!r}; beside keys, values, {', '.join(_SCALARS)} there may be only pairs of "
                    f"{ROW_STATE}NAME and {ROW_FILL}NAME"
                )
            if f"{kind}." == ROW_STATE:
                rows = _checked(full, state[full], len(keys))
                fill = float(state[ROW_FILL + name])
                table._row_state[name] = RowBlocks(rows.shape[1], rows.dtype, block_rows, fill)
                table._row_state[name].append(rows)
        table._index = KeyIndex(keys)
        if table.budget is not None and len(keys) > (most := table.budget.rows(table.row_bytes)):
            what = (
                f"{len(keys)} rows are loaded, of which the next step removes all but {most} at most; give the state "
            )
            warnings.warn(what + "another budget: Budget(...).put_in(state)", RuntimeWarning, stacklevel=2)
        return table

    def _budget_names(self) -> tuple[str, ...]:
        names = () if self.budget is None else ("budget", "step")
        return names if self._sketch is None else (*names, "sketch", "sketch_sightings")

    def _load_budget(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        for name in self._budget_names():
            if name not in state:
                raise InputError(f"the state has a budget but no {name!r}; pass DynamicTable.state()")
        if self.budget is not None:
            self.step = int(state["step"])
        if self._sketch is not None:
            self._sketch = Sketch.of(state["sketch"], int(state["sketch_sightings"]), len(self._sketch.cells[0]))

    def load_state(self, state: Mapping[str, npt.NDArray[Any]], *, keep_budget: bool = False) -> None:
        """Become what the table was when ``state`` was taken, seed and optimizer state included. With ``keep_budget``
        the table's own budget stays (``Budget.put_in``), as where the state is of another number of shards.

        Raises:
            InputError: ``state`` is of another dim or dtype, or not what ``state`` returns, or there is no budget to
                keep; nothing is changed then.
        """
        if keep_budget:
            state = budget_to_keep(self.budget).put_in(state)
        loaded = DynamicTable.from_state(state, block_rows=self._block_rows)
        check_loaded(loaded, self)
        kept = {"traffic": self.traffic, "moves": self.moves + 1, "of_ranks": self.of_ranks}
        vars(self).update(vars(loaded) | kept)

    def _merged(self, parts: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
        rows, gradients = (np.concatenate(side) for side in zip(*parts, strict=True))
        return self._summed(rows, gradients)

    def _summed(self, rows: Ints, gradient: Floats, of: Ints | None = None) -> tuple[Ints, Floats]:
        distinct, places = kernel("distinct_rows")(rows, len(self))
        sums = empty(len(distinct) * self.dim, self.dtype).reshape(len(distinct), self.dim)
        bad = kernel("sum_rows")(gradient, of, places, sums)
        self.traffic.sum += (len(rows) + len(distinct)) * self.dim * self.dtype.itemsize
        if bad >= 0:
            column = int(np.flatnonzero(~np.isfinite(sums[bad]))[0])
            raise gradient_not_finite(int(self._index.keys_of(distinct[bad : bad + 1])[0]), sums[bad, column], column)
        return distinct, sums


def _int64(what: str, array: Ints) -> Ints:
    if not isinstance(array, np.ndarray) or array.dtype != np.int64 or array.ndim != 1:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InputError(f"{what}: {found}; it must be a one-dimensional int64 array")
    return np.ascontiguousarray(array)


def _checked(name: str, rows: npt.NDArray[Any], n_rows: int, width: int | None = None) -> npt.NDArray[Any]:
    if rows.ndim != 2 or len(rows) != n_rows or width not in (None, rows.shape[1]):
        raise InputError(f"{name} of the state is {rows.shape}; it must be {(n_rows, width or 'width')}, a row a key")
    return rows
