"""States of tables as named arrays: a delta replayed, shards joined, rows picked. No table is built for any of it.

A state is what ``DynamicTable.state`` returns; a delta is what ``DynamicTable.delta`` does: a state of the changed rows
alone, and where they are. Worked example: on a state of keys [7, 8], the delta of rows [0, 2] with keys [9, 5] and 3
rows in all gives a state of keys [9, 8, 5].

A checkpoint has states under prefixes: ``table.keys``, ``table.values``, ...; ``tables_of`` finds them. Other tensors
may share a table's prefix: ``table.weight`` is none of its entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.wrap import MASK64
from thinrow.embeddings.changes import places

Arrays = dict[str, npt.NDArray[Any]]
State = Mapping[str, npt.NDArray[Any]]

ROW_STATE, ROW_FILL = "row_state.", "row_fill."
DELTA, WHOLE = "delta.", "delta.whole."
#: Of a delta, step and CRC of the checkpoint that it was marked at.
BASE = "delta.base"
#: Of a delta, ``changes.places`` at its mark, and the marks before it; early ones have neither.
PLACES, MARKS = "delta.from_places", "delta.marks"
#: What makes a prefix that of a table.
_MARKS = ("keys", "values", "dim")
#: Entries of a state, beside those with the prefixes above.
_ENTRIES = {*_MARKS, "seed", "init", "init_scale", "budget", "step", "sketch", "sketch_sightings"}
#: Entries that count something, shard by shard: of several the largest holds for all.
_COUNTED = ("step", "sketch", "sketch_sightings")


def tables_of(tensors: State) -> dict[str, Arrays]:
    """Prefix -> state or delta of each table among ``tensors``, names without the prefix."""
    prefixes = [n.removesuffix("keys") for n in tensors if n == "keys" or n.endswith(".keys")]
    tables = [p for p in prefixes if all(p + mark in tensors for mark in _MARKS)]
    return {p: {n.removeprefix(p): a for n, a in tensors.items() if is_entry(n, p)} for p in tables}


def is_entry(name: str, prefix: str) -> bool:
    """Whether a tensor of this name is part of a table with this prefix, if there is one."""
    entry = name.removeprefix(prefix)
    return name.startswith(prefix) and (entry in _ENTRIES or entry.startswith((ROW_STATE, ROW_FILL, DELTA)))


def prefixed(prefix: str, state: State) -> Arrays:
    """Reverse of ``tables_of`` for one table.

    Raises:
        InputError: ``prefix`` is neither empty nor ends with a dot, so that ``tables_of`` would not find the table.
    """
    if prefix and not prefix.endswith("."):
        raise InputError(f"prefix {prefix!r} of a table; it must be empty or end with a dot, as {prefix + '.'!r} does")
    return {prefix + n: a for n, a in state.items()}


def is_delta(state: State) -> bool:
    """Whether it is a delta and no state."""
    return DELTA + "rows" in state


def n_rows(state: State) -> int:
    """How many rows the table had when the state or delta was taken."""
    return int(state[DELTA + "n_rows"]) if is_delta(state) else len(state["keys"])


def marked_at(tables: Mapping[str, State]) -> tuple[int, int] | None:
    """Step and CRC of the checkpoint at which the deltas among ``tables``, by prefix, were marked; None where there are
    no deltas.

    Raises:
        InputError: it was not said at the mark, or differs between the tables.
    """
    deltas = {prefix: state for prefix, state in tables.items() if is_delta(state)}
    found = {p: (int(s[BASE][0]), int(s[BASE][1])) if BASE in s else None for p, s in deltas.items()}
    for prefix, base in found.items():
        if base is None:
            raise InputError(
                f"table {prefix!r} is a delta on an unknown checkpoint; when one is saved, tell its changes: "
                "changes.mark(version_of(path))"
            )
    if len(set(found.values())) > 1:
        raise InputError(f"deltas that were marked at different checkpoints: {found}; save them one by one, or full")
    return next(iter(found.values()), None)


def check_follow(tensors: State, before: State) -> None:
    """Raises InputError unless each table among ``tensors`` that is a delta has what it follows in ``before``."""
    below = tables_of(before)
    for prefix, state in tables_of(tensors).items():
        if is_delta(state):
            if prefix not in below:
                raise InputError(f"a delta of table {prefix!r}, of which the base has no state there; save a full one")
            _check_follows(state, n_rows(below[prefix]))


def replay(state: State, *deltas: State) -> Arrays:
    """The state that a table had when the last of ``deltas`` was taken, from the one that it had at the mark of the
    first; each was taken at the mark of the next. Which keys were in which rows tells whether they follow each other,
    and how often the changes had been marked; checkpoints know what each rests on.

    Raises:
        InputError: a delta does not follow what is before it.
    """
    marks = [int(delta[MARKS]) if MARKS in delta else None for delta in deltas]
    for before, number in itertools.pairwise(marks):
        if before is not None and number is not None and number != before + 1:
            raise InputError(
                f"a delta since mark {number} does not follow one since mark {before}; replay all deltas, in order"
            )
    return _replay(state, *deltas)


def _replay(state: State, *deltas: State) -> Arrays:
    """``replay`` of deltas whose order is known: runs that are resumed count their marks anew."""
    counts = [n_rows(s) for s in (state, *deltas)]
    for delta, before in zip(deltas, counts[:-1], strict=True):
        _check_follows(delta, before)
    _check_places(state, deltas, max(counts))
    last = deltas[-1]
    out = {name: array for name, array in last.items() if not (_of_rows(name) or name.startswith(DELTA))}
    for name in sorted({n.removeprefix(WHOLE) for n in last if _of_rows(n.removeprefix(WHOLE))}):
        out[name] = _rows_after(name, state, deltas, max(counts))[: counts[-1]]
    return out


def replayed(chain: Sequence[State]) -> Arrays:
    """The tensors of the last of ``chain``, whose tables may be deltas on those before.

    Raises:
        InputError: they do not follow each other, or there is no state to begin with.
    """
    tables = [tables_of(tensors) for tensors in chain]
    out = dict(chain[-1])
    for prefix, newest in tables[-1].items():
        first = len(chain) - 1
        while first >= 0 and is_delta(tables[first].get(prefix, {})):
            first -= 1
        if first < 0 or prefix not in tables[first]:
            raise InputError(f"a delta of table {prefix!r} without a state that it follows; load an earlier checkpoint")
        if first < len(chain) - 1:
            for name in newest:
                del out[prefix + name]
            out |= prefixed(prefix, _replay(tables[first][prefix], *(t[prefix] for t in tables[first + 1 :])))
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
            out[name] = np.array(np.maximum.reduce(parts))
        elif any(not np.array_equal(p, parts[0]) for p in parts):
            raise InputError(f"shards differ in {name!r}; they must be of one table")
        else:
            out[name] = parts[0]
    return out


def pick(state: State, rows: npt.NDArray[Any]) -> Arrays:
    """A state of some rows: ``rows`` are numbers or a mask."""
    return {name: array[rows] if _of_rows(name) else array for name, array in state.items()}


def _check_follows(delta: State, before: int) -> None:
    rows, n, taken_from = delta[DELTA + "rows"], n_rows(delta), int(delta[DELTA + "from_rows"])
    ascending = (np.diff(rows) > 0).all() and rows.min(initial=0) >= 0 and rows.max(initial=-1) < n
    held = min(before, n)
    if taken_from != before or not ascending or len(rows) - int(np.searchsorted(rows, held)) != n - held:
        raise InputError(
            f"a delta of a table that had {taken_from} rows does not follow a state of {before}; replay deltas in "
            "order, each on what it was taken from"
        )


def _check_places(state: State, deltas: Sequence[State], capacity: int) -> None:
    """Raises InputError unless each delta was taken from a table with the keys, each in the row, that it has here."""
    keys, n = np.empty(capacity, np.int64), n_rows(state)
    keys[:n] = state["keys"]
    found = places(keys[:n])
    for delta in deltas:
        if PLACES in delta and int(delta[PLACES]) & MASK64 != found & MASK64:
            raise InputError(
                "a delta of a table that had other keys, or in other rows, does not follow this state; replay deltas "
                "in order, each on what it was taken from"
            )
        rows, left = delta[DELTA + "rows"], n_rows(delta)
        kept = rows[rows < n]
        found -= places(keys[kept], kept) + places(keys[left:n], left)
        keys[rows] = delta["keys"]
        found += places(delta["keys"], rows)
        n = left


def _rows_after(name: str, state: State, deltas: Sequence[State], capacity: int) -> npt.NDArray[Any]:
    """``name``, row by row, with every delta written over what was before it."""
    like = next(a for s in (deltas[-1], state) for a in (s.get(name), s.get(WHOLE + name)) if a is not None)
    out = np.empty((capacity, *like.shape[1:]), like.dtype)
    if name in state:
        out[: len(state[name])] = state[name]
    else:
        # The optimizer made it since: its fill, but for the rows that changed.
        out[:] = _fill(deltas[-1], name)
    for delta in deltas:
        if WHOLE + name in delta:
            out[: len(delta[WHOLE + name])] = delta[WHOLE + name]
        elif name in delta:
            out[delta[DELTA + "rows"]] = delta[name]
    return out


def _of_rows(name: str) -> bool:
    return name in ("keys", "values") or name.startswith(ROW_STATE)


def _fill(state: State, name: str) -> npt.NDArray[Any]:
    return state[ROW_FILL + name.removeprefix(ROW_STATE)]


def _filled(state: State, name: str, like: npt.NDArray[Any], states: Sequence[State]) -> npt.NDArray[Any]:
    """What a shard whose optimizer never stepped would hold."""
    fill = next(_fill(s, name) for s in states if name in s)
    return np.full((len(state["keys"]), *like.shape[1:]), fill, like.dtype)
