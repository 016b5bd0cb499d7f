"""The contract of a recent tier as plain Python, and the events that its suite writes (``thinrow.testing.recent``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from thinrow.core.units import NEVER
from thinrow.core.users import UserKind, Users
from thinrow.history.recent.tier import Advance, AppendResult, RecentRead, RecentTier, Resolve
from thinrow.jagged import Column
from thinrow.jagged.column import ARROW_TYPES
from thinrow.schema import ColumnSpec, EventSchema, Trait

#: One event as the suite writes it: (user, event_ts, event_id, supersedes, values of the columns).
Row = tuple[Any, int, Any, Any, tuple[Any, ...]]

LONGEST = "é" * 127 + "x"
INT_USERS = (0, 1, -1, 255, 256, -256, 2**63 - 1, -(2**63))
TEXT_USERS = ("a", "a\0", "a\0b", "ab", "\0", "é", "\U0010ffff", LONGEST, "\0" * 255)


def contract_schema(user_kind: UserKind = "int64", ids: Any = "int64") -> EventSchema:
    """Every dtype and shape, with and without nulls."""
    columns = (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "shop", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(3, "price", Trait.NUMERIC, "float64", "price", nullable=True),
        ColumnSpec(4, "note", Trait.TEXT, "binary", "item"),
        ColumnSpec(5, "kind", Trait.CATEGORICAL, "int8", "item"),
        ColumnSpec(6, "count", Trait.NUMERIC, "int16", "price", nullable=True),
        ColumnSpec(7, "weight", Trait.NUMERIC, "float32", "price"),
        ColumnSpec(8, "place", Trait.ID, "int32", "item"),
        ColumnSpec(9, "tags", Trait.ID_LIST, "string", "item", nullable=True),
        ColumnSpec(10, "seen", Trait.ID_LIST, "int16", "item"),
        ColumnSpec(11, "spot", Trait.VECTOR, "float32", "price", nullable=True, size=2),
    )
    if ids is None:
        return EventSchema(columns, user_kind=user_kind)
    return EventSchema(
        columns, user_kind=user_kind, event_id_column="id", event_id_dtype=ids, supersedes_column="corrects"
    )


def values_of(i: int) -> tuple[Any, ...]:
    """Values of the contract schema's columns that differ by ``i``, nulls, NUL and empty strings among them."""
    shop = None if i % 5 == 0 else ("", "a\0b", "ü", f"shop {i % 7}")[i % 4]
    price = None if i % 3 == 0 else (-0.0, math.inf, i / 8)[i % 3]
    tags, spot = None if i % 4 == 1 else ["", "a\0b", f"tag {i}"][: i % 4], None if i % 7 == 0 else [i / 2, -0.0]
    single = (i - 3, shop, price, bytes([i % 256]) * (i % 4), i % 100 - 50, None if i % 2 else i, i / 4, -i)
    return (*single, tags, [i % 128] * (i % 3), spot)


def column_of(values: Sequence[Any], dtype: str, *, ragged: bool = False, size: int = 0) -> Column:
    """Python values (None where null) as a Column."""
    kind = ARROW_TYPES[dtype]
    kind = pa.list_(kind, size) if size else pa.list_(kind) if ragged else kind
    return Column.from_arrow(pa.array(values, kind), dtype, ragged=ragged, size=size)


def repeated(schema: EventSchema, i: int, n: int) -> dict[str, Column]:
    """The columns of ``n`` events with the values ``values_of(i)``."""
    return {
        c.name: column_of([v] * n, c.dtype, ragged=c.ragged, size=c.size)
        for v, c in zip(values_of(i), schema.columns, strict=True)
    }


def users_of(users: Sequence[Any], kind: UserKind) -> Users:
    """User ids as an array, made as object where text: NumPy's own text type would strip trailing NULs."""
    if kind == "int64":
        return np.array(users, np.int64)
    out = np.empty(len(users), object)
    out[:] = users
    return out


def append_rows(
    tier: RecentTier, rows: Sequence[Row], resolve: Resolve | None = None, advances: Sequence[Advance] = ()
) -> AppendResult:
    """Append rows as columns."""
    schema = tier.schema
    users = users_of([r[0] for r in rows], schema.user_kind)
    columns = {
        c.name: column_of([r[4][i] for r in rows], c.dtype, ragged=c.ragged, size=c.size)
        for i, c in enumerate(schema.columns)
    }
    ids = supersedes = None
    if schema.event_id_dtype is not None:
        ids = column_of([r[2] for r in rows], schema.event_id_dtype)
        supersedes = column_of([r[3] for r in rows], schema.event_id_dtype)
    event_ts = np.array([r[1] for r in rows], np.int64)
    return tier.append(users, event_ts, columns, ids, supersedes, resolve, advances=advances)


def read(tier: RecentTier, users: Sequence[Any], after: Sequence[int] | None = None) -> RecentRead:
    """``read_since`` with Python arguments; ``after`` defaults to 0."""
    bounds = np.array([0] * len(users) if after is None else after, np.int64)
    return tier.read_since(users_of(users, tier.schema.user_kind), bounds)


def listed(found: RecentRead) -> dict[Any, list[tuple[Any, ...]]]:
    """Events as Python tuples (arrival, event_ts, event id, values) by user."""
    events = found.events
    ids = [None] * len(events) if found.event_ids is None else found.event_ids.to_arrow().to_pylist()
    columns = [c.to_arrow().to_pylist() for c in events.columns.values()]
    rows = list(zip(events.arrival.tolist(), events.event_ts.tolist(), ids, zip(*columns, strict=True), strict=True))
    cuts = events.offsets.tolist()
    users = events.users.tolist()
    return {user: rows[a:b] for user, a, b in zip(users, cuts[:-1], cuts[1:], strict=True)}


def hides_of(found: RecentRead) -> dict[Any, list[tuple[int, int, int]]]:
    """Hides as (event_ts, arrival, hidden_from) by user."""
    cuts = found.hide_offsets.tolist()
    users = found.events.users.tolist()
    return {user: found.hides[a:b].tolist() for user, a, b in zip(users, cuts[:-1], cuts[1:], strict=True)}


@dataclass
class _ModelUser:
    counter: int = 0
    trimmed: int = 0
    events: list[tuple[Any, ...]] = field(default_factory=list)
    hides: dict[int, tuple[int, int]] = field(default_factory=dict)
    ids: dict[Any, tuple[int, int]] = field(default_factory=dict)


class ModelTier:
    """What a tier must do, one event at a time (no resolve, no errors: the suite gives it valid rows)."""

    def __init__(self) -> None:
        self.of: dict[Any, _ModelUser] = {}

    def append(self, rows: Sequence[Row]) -> list[tuple[int, bool]]:
        """(arrival, duplicate) of each row."""
        return [self._append(*row) for row in rows]

    def _append(self, user: Any, ts: int, name: Any, supersedes: Any, values: tuple[Any, ...]) -> tuple[int, bool]:
        state = self.of.setdefault(user, _ModelUser())
        if name is not None and name in state.ids:
            return state.ids[name][1], True
        state.counter += 1
        state.events.append((state.counter, ts, name, values))
        if supersedes is not None:
            state.hides[state.counter] = state.ids[supersedes]
        if name is not None:
            state.ids[name] = (ts, state.counter)
        return state.counter, False

    def trim(self, user: Any, through: int) -> None:
        """Drop events of one user."""
        state = self.of.setdefault(user, _ModelUser())
        state.trimmed, state.counter = max(state.trimmed, through), max(state.counter, through)
        state.events = [e for e in state.events if e[0] > through]

    def check(self, tier: RecentTier, users: Sequence[Any], after: Sequence[int]) -> None:
        """Compare a read of ``users``, and the list of users."""
        found = read(tier, users, after)
        states = [self.of.get(u, _ModelUser()) for u in users]
        assert found.top.tolist() == [s.counter for s in states]
        assert found.trimmed_through.tolist() == [s.trimmed for s in states]
        assert (found.events.hidden_from == NEVER).all()
        events, hides = listed(found), hides_of(found)
        for user, state, bound in zip(users, states, after, strict=True):
            expected = [e for e in state.events if e[0] > bound]
            assert events[user] == expected
            assert hides[user] == [(*state.hides[e[0]], e[0]) for e in expected if e[0] in state.hides]
        assert tier.users().tolist() == sorted(u for u, s in self.of.items() if s.events)


def fields_of(result: AppendResult) -> tuple[Any, Any]:
    return result.arrivals, result.duplicate


def state_of(tier: RecentTier, users: Sequence[Any]) -> tuple[Any, ...]:
    """Everything a tier says about ``users``."""
    found = read(tier, users)
    return listed(found), hides_of(found), found.top.tolist(), found.trimmed_through.tolist(), tier.users().tolist()


def random_rows(
    rng: np.random.Generator, users: list[Any], model: ModelTier, schema: EventSchema, step: int
) -> list[Row]:
    """Rows with new ids, retried ids, null ids and corrections of ids that the user has."""
    rows: list[Row] = []
    used: set[tuple[Any, Any]] = set()
    for i in range(int(rng.integers(0, 25))):
        user = users[int(rng.integers(len(users)))]
        state = model.of.get(user, _ModelUser())
        held = list(state.ids)
        number = step * 100 + i - 1000
        name: Any = number if schema.event_id_dtype == "int64" else f"id {number}"
        chance = rng.random()
        if chance < 0.2:
            name = None
        elif chance < 0.4 and held:
            name = held[int(rng.integers(len(held)))]
        if (user, name) in used:
            name = None
        used.add((user, name) if name is not None else (user, i))
        target = held[int(rng.integers(len(held)))] if held and rng.random() < 0.3 else None
        rows.append((user, int(rng.integers(0, 50)), name, target, values_of(number)))
    return rows
