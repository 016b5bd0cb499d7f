"""States of tables as named arrays: a delta replayed, shards joined, rows picked. No table is built for any of it.

A state is what ``DynamicTable.state`` returns; a delta is what ``DynamicTable.delta`` does: a state of the changed rows
alone, with ``delta.rows`` (where they are), ``delta.n_rows`` and ``delta.gone``. Worked example: on a state of keys
[7, 8], the delta of rows [0, 2] with keys [9, 5] and 3 rows gives a state of keys [9, 8, 5].

A checkpoint has states under prefixes: ``table.keys``, ``table.values``, ...; ``tables_of`` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError

Arrays = dict[str, npt.NDArray[Any]]
State = Mapping[str, npt.NDArray[Any]]

ROW_STATE, ROW_FILL = "row_state.", "row_fill."
DELTA, WHOLE = "delta.", "delta.whole."
#: What makes a prefix that of a table.
_MARKS = ("keys", "values", "dim")
#: Entries that count something, shard by shard: of several the largest holds for all.
_COUNTED = ("step", "sketch", "sketch_sightings")


def tables_of(tensors: State) -> dict[str, Arrays]:
    """Prefix -> state or delta of each table among ``tensors``, names without the prefix."""
    prefixes = [n.removesuffix("keys") for n in tensors if n == "keys" or n.endswith(".keys")]
    tables = [p for p in prefixes if all(p + mark in tensors for mark in _MARKS)]
    return {p: {n.removeprefix(p): a for n, a in tensors.items() if n.startswith(p)} for p in tables}


def prefixed(prefix: str, state: State) -> Arrays:
    """Reverse of ``tables_of`` for one table."""
    return {prefix + n: a for n, a in state.items()}


def is_delta(state: State) -> bool:
    """Whether it is a delta and no state."""
    return DELTA + "rows" in state


def replay(state: State, delta: State) -> Arrays:
    """The state that a table had when ``delta`` was taken, from the one that it had at the delta's mark.

    Raises:
        InputError: the delta does not follow ``state``.
    """
    rows, n = delta[DELTA + "rows"], int(delta[DELTA + "n_rows"])
    held = min(len(state["keys"]), n)
    ascending = (np.diff(rows) > 0).all() and rows.min(initial=0) >= 0 and rows.max(initial=-1) < n
    if not ascending or len(rows) - int(np.searchsorted(rows, held)) != n - held:
        raise InputError(
            f"a delta of {n} rows, {len(rows)} of them changed, does not follow a state of {len(state['keys'])} rows; "
            "replay deltas in order, each on what it was taken from"
        )
    out = {name: array for name, array in delta.items() if not (_of_rows(name) or name.startswith(DELTA))}
    for name, changed in delta.items():
        if name.startswith(WHOLE):
            out[name.removeprefix(WHOLE)] = changed
        elif _of_rows(name):
            out[name] = np.empty((n, *changed.shape[1:]), changed.dtype)
            # A state that the optimizer made since the mark: its fill, but for the rows that changed.
            out[name][:held] = state[name][:held] if name in state else _fill(delta, name)
            out[name][rows] = changed
    return out


def join(states: Sequence[State]) -> Arrays:
    """One state of the rows of all, in the order given.

    Raises:
        InputError: they are not shards of one table: what is said of the table as a whole differs.
    """
    out: Arrays = {}
    for name in sorted({name for state in states for name in state}):
        parts = [state[name] for state in states if name in state]
        if _of_rows(name):
            out[name] = np.concatenate([s[name] if name in s else _filled(s, name, parts[0], states) for s in states])
        elif name in _COUNTED and len({p.shape for p in parts}) == 1:
            out[name] = np.maximum.reduce(parts)
        elif any(not np.array_equal(p, parts[0]) for p in parts):
            raise InputError(f"shards differ in {name!r}; they must be of one table")
        else:
            out[name] = parts[0]
    return out


def pick(state: State, rows: npt.NDArray[Any]) -> Arrays:
    """A state of some rows: ``rows`` are numbers or a mask."""
    return {name: array[rows] if _of_rows(name) else array for name, array in state.items()}


def _of_rows(name: str) -> bool:
    return name in ("keys", "values") or name.startswith(ROW_STATE)


def _fill(state: State, name: str) -> npt.NDArray[Any]:
    return state[ROW_FILL + name.removeprefix(ROW_STATE)]


def _filled(state: State, name: str, like: npt.NDArray[Any], states: Sequence[State]) -> npt.NDArray[Any]:
    """What a shard whose optimizer never stepped would hold."""
    fill = next(_fill(s, name) for s in states if name in s)
    return np.full((len(state["keys"]), *like.shape[1:]), fill, like.dtype)
