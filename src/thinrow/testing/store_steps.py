"""Steps of random programs against a whole store: each does something to the store and says so to a ``StoreModel``.

Worked example: ``steps.append(rng)`` appends some events to ``steps.store`` and adds the same facts to ``steps.model``;
``steps.compact(rng)`` moves them to the archive, and the model learns that they are there. Every step takes a generator
of its own, so that a program can be cut down to the steps that it needs. What a step sees that it should not is an
AssertionError.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import (
    SchemaError,
    UnknownEventError,
)
from thinrow.core.units import EPOCH_BITS
from thinrow.core.users import UserKind, as_users, bucket_of
from thinrow.examples.erase import redact
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.lookup import look_up
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import read_everything
from thinrow.history.erase import EventsOf, Retention
from thinrow.history.missing import STATUS_ERASED, STATUS_EXPIRED
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.schema.evolution import WIDER
from thinrow.storage.objects import LocalObjects
from thinrow.testing.columns import STYLES, TRAITS, spec_of, styled_column
from thinrow.testing.store_model import Fact, Logged, StoreModel, fat_rows

Table = tuple[pa.Table, list[dict[str, Any]]]


@dataclass(eq=False)
class Held:
    """A generation that somebody reads on, and what the model said of its events then."""

    generation: Generation
    values: dict[Fact, dict[int, Any]]
    gone: dict[Fact, int]
    elsewhere: bool
    close: Callable[[], None]
    revoked: bool = False


class Steps:
    """A store and its model side by side."""

    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        """An empty store in ``folder``, of a random schema."""
        self.folder = folder
        kind: UserKind = "int64" if rng.random() < 0.5 else "string"
        names: list[Any] = ["a", "é", "b" * 60, "c", "d", "\x7f"]
        self.users = [0, -7, 1 << 40, 12, 13, -(1 << 63)] if kind == "int64" else names
        self.with_ids = bool(rng.random() < 0.6)
        self.arrives = not self.with_ids and bool(rng.random() < 0.5)
        picked = [TRAITS[i] for i in rng.integers(0, len(TRAITS), rng.integers(1, 6))]
        columns = [spec_of(i, trait, dtype, bool(rng.random() < 0.5)) for i, (trait, dtype) in enumerate(picked, 1)]
        id_dtype: UserKind | None = "int64" if rng.random() < 0.5 else "string"
        schema = EventSchema(
            tuple(columns),
            user_kind=kind,
            event_id_column="event_id" if self.with_ids else None,
            event_id_dtype=id_dtype if self.with_ids else None,
            supersedes_column="supersedes" if self.with_ids else None,
            arrival_time_column="arrived" if self.arrives else None,
        )
        self.max_inline = 3 if rng.random() < 0.2 else 2_048
        self.now = 60
        self.path = folder / "s0"
        n_buckets, recent = int(rng.integers(1, 4)), self.recent_url()
        store = HistoryStore.create(self.path, schema, n_buckets, recent=recent, sync=False, clock=lambda: self.now)
        self._use(store)
        self.model = StoreModel(schema)
        self.schemas = {1: schema}
        self.top: dict[Any, int] = {}
        self.held: list[Held] = []
        self.saved: list[tuple[int, StoreModel, int, dict[int, EventSchema]]] = []
        self.foreign: list[tuple[RequestBatch, list[list[tuple[int, int]]]]] = []
        self.serial = itertools.count(1)
        self.names = itertools.count(1)
        self.column_names = itertools.count(100)
        self.nested = False
        self.step_name = ""

    def _use(self, store: HistoryStore) -> None:
        self.store = store
        store.max_inline = self.max_inline

    def recent_url(self) -> str | None:
        """Where recent events are kept, of a subclass whose stores have a server for them."""
        return None

    # -- what is there --

    def pin(self) -> Generation:
        """The newest generation."""
        return self.store.pin()

    def ids(self, users: Sequence[Any]) -> Any:
        """Users as the store takes them."""
        return as_users(list(users), self.model.schema.user_kind)

    def settle(self) -> None:
        """Learn what has been archived; and what a compaction let expire, which must be all of a bucket or nothing."""
        generation = self.pin()
        users = [u for u in self.model.facts]
        if not users:
            return
        watermark = look_up(generation, self.ids(users)).watermark.tolist()
        for user, through in zip(users, watermark, strict=True):
            for fact in self.model.alive(user):
                fact.archived = fact.archived or fact.arrival <= through
        if self.model.retention == Retention():
            return
        there = self.archived_numbers()
        by_bucket: dict[int, list[Fact]] = {}
        for user in users:
            bucket = int(bucket_of(self.ids([user]), generation.n_buckets)[0])
            by_bucket.setdefault(bucket, []).extend(self.model.expired(user, self.now))
        for facts in by_bucket.values():
            left = [f for f in facts if f.arrival in there[f.user]]
            assert len(left) in (0, len(facts)), "a bucket is expired whole or not"
            if not left:
                self.model.lose(facts, STATUS_EXPIRED, id_kept=True)

    def archived_numbers(self) -> dict[Any, dict[int, tuple[int, int]]]:
        """Of each user: arrival -> (event_ts, hidden_from), of all that the newest generation holds."""
        users = self.ids(list(self.model.facts))
        held = read_everything(self.pin(), users, [], ReadStats())
        found: dict[Any, dict[int, tuple[int, int]]] = {}
        for i, user in enumerate(users.tolist()):
            rows = range(held.offsets[i], held.offsets[i + 1])
            found[user] = {int(held.arrival[r]): (int(held.event_ts[r]), int(held.hidden_from[r])) for r in rows}
        return found

    # -- making events --

    def column(self, rng: np.random.Generator, spec: ColumnSpec, n: int) -> pa.Array:
        """n values of a column."""
        return styled_column(rng, n, spec, STYLES[rng.integers(len(STYLES))]).to_arrow()

    def rows(self, rng: np.random.Generator, n: int, schema: EventSchema) -> Table:
        """A table of n events under ``schema`` and the same rows as Python values, in order of arrival."""
        weight = np.array([8, 4, 2, 1, 1, 1]) / 17
        users = [self.users[i] for i in rng.choice(6, n, p=weight)]
        base = int(rng.integers(0, 55))
        late = rng.random(n) < 0.3
        ts = np.where(late, rng.integers(0, 60, n), base + np.sort(rng.integers(0, 5, n))).tolist()
        arrays = {c.name: self.column(rng, c, n) for c in schema.columns}
        rows: list[dict[str, Any]] = [{"user_id": u, "event_ts": t} for u, t in zip(users, ts, strict=True)]
        for name, array in arrays.items():
            for row, value in zip(rows, array.to_pylist(), strict=True):
                row[name] = value
        user_type = pa.int64() if schema.user_kind == "int64" else pa.string()
        table = {"user_id": pa.array(users, user_type), "event_ts": pa.array(ts, pa.int64()), **arrays}
        if schema.event_id_dtype is not None:
            kind = pa.int64() if schema.event_id_dtype == "int64" else pa.string()
            self.name_rows(rng, rows)
            for name in ("event_id", "supersedes"):
                table[name] = pa.array([r[name] for r in rows], kind)
        if self.arrives:
            arrived = rng.integers(0, 10, n).tolist()
            table["arrived"] = pa.array(arrived, pa.int64())
            rows = [rows[i] for i in sorted(range(n), key=lambda i: arrived[i])]
        return pa.table(table), rows

    def name_rows(self, rng: np.random.Generator, rows: list[dict[str, Any]]) -> None:
        """Give rows ids: new, known, forgotten or none; and let some correct earlier events."""
        named: set[tuple[Any, Any]] = set()
        for row in rows:
            user = row["user_id"]
            facts = self.model.facts.get(user, [])
            known = [f.event_id for f in facts if f.event_id is not None and (not f.gone or f.id_kept)]
            gone = [f.event_id for f in facts if f.gone and f.event_id is not None]
            new = next(self.names)
            name: Any = new if self.model.schema.event_id_dtype == "int64" else f"id-{new}"
            dice = rng.random()
            if dice < 0.1:
                name = None
            elif dice < 0.25 and known:
                name = known[rng.integers(len(known))]
            elif dice < 0.4 and gone:
                name = gone[rng.integers(len(gone))]
            if (user, name) in named:
                name = None
            row["event_id"], row["supersedes"] = name, None
            earlier = [i for u, i in named if u == user]
            targets = [i for i in [*known, *earlier] if i != name]
            if targets and rng.random() < 0.25:
                row["supersedes"] = targets[rng.integers(len(targets))]
            if name is not None:
                named.add((user, name))

    def by_id(self, row: dict[str, Any], schema: EventSchema) -> dict[int, Any]:
        """A row's values by column id."""
        return {c.id: row[c.name] for c in schema.columns if row[c.name] is not None}

    def number(self, user: Any, arrival: int) -> None:
        """Hold an arrival number to be above all that its user had."""
        assert arrival > self.top.get(user, 0), "numbers never repeat"
        self.top[user] = arrival

    # -- steps --

    def append(self, rng: np.random.Generator) -> None:
        """Append events, under today's schema or an older one."""
        schema = self.model.schema
        if rng.random() < 0.2:
            # Who knows an older schema only: taken where no column has got another meaning since.
            old = self.schemas[int(rng.integers(1, schema.schema_id + 1))]
            names = {c.name: c for c in old.columns}
            for number in range(schema.schema_id, 0, -1):
                fits = self.schemas[number]
                if all(c.name in names for c in fits.columns):
                    break
            else:
                return
            later = [c for n in range(number + 1, schema.schema_id + 1) for c in self.schemas[n].columns]
            here = {c.name: c.id for c in fits.columns}
            if any(c.name in names and here.get(c.name) != c.id for c in later):
                with pytest.raises(SchemaError):
                    self.store.append(self.rows(rng, 3, old)[0])
                return
            same = all(names[c.name].id == c.id and names[c.name].dtype == c.dtype for c in fits.columns)
            if not same or not all(c.nullable or not names[c.name].nullable for c in fits.columns):
                return
            schema, under = old, fits
        else:
            under = schema
        table, rows = self.rows(rng, int(rng.integers(1, 40 if rng.random() < 0.2 else 10)), schema)
        if self.with_ids and rng.random() < 0.1:
            self.refuse_unknown(rng, table)
        done = self.store.append(table)
        for row, arrival, duplicate in zip(rows, done.arrivals.tolist(), done.duplicate.tolist(), strict=True):
            user = row["user_id"]
            held = self.model.named(user, row.get("event_id"))
            assert duplicate == (held is not None), "an id names one event"
            if held is not None:
                assert arrival == held.arrival
                continue
            self.number(user, arrival)
            self.model.add(
                user, row["event_ts"], arrival, self.by_id(row, under), row.get("event_id"), row.get("supersedes")
            )

    def refuse_unknown(self, rng: np.random.Generator, table: pa.Table) -> None:
        """A correction of what is gone, or never was, is refused, and all that comes with it."""
        user = table["user_id"][0].as_py()
        names = {f.event_id for f in self.model.facts.get(user, [])} - {None}
        gone = {n for n in names if self.model.named(user, n) is None}
        gone -= set(table["event_id"].to_pylist())
        unknown = sorted(gone)[:1] or ([-5] if self.model.schema.event_id_dtype == "int64" else ["nothing"])
        index = table.column_names.index("supersedes")
        values = [unknown[0], *table["supersedes"].to_pylist()[1:]]
        if self.model.named(user, table["event_id"][0].as_py()) is not None:
            return
        with pytest.raises(UnknownEventError):
            self.store.append(table.set_column(index, "supersedes", pa.array(values, table["supersedes"].type)))

    def bulk_load(self, rng: np.random.Generator) -> None:
        """Load events straight into the archive."""
        if self.with_ids:
            self.append(rng)
            return
        table, rows = self.rows(rng, int(rng.integers(1, 30)), self.model.schema)
        number = self.model.schema.schema_id
        load_id = f"load-{next(self.names)}" if rng.random() < 0.5 else None
        try:
            self.store.bulk_load(table, load_id=load_id)
        except SchemaError:
            # Schema or buckets changed meanwhile; under another schema the table may not fit.
            assert self.nested
            if self.model.schema.schema_id != number:
                shutil.rmtree(self.path / "loads")
                return
            self.store.bulk_load(table, load_id=load_id)
        # Of a table that lacks a column which came meanwhile, the newest schema that it has all columns of.
        newest = [self.schemas[n] for n in range(self.model.schema.schema_id, 0, -1)]
        under = next(s for s in newest if all(c.name in rows[0] for c in s.columns))
        there = self.archived_numbers_of({r["user_id"] for r in rows})
        for user in dict.fromkeys(r["user_id"] for r in rows):
            mine = [r for r in rows if r["user_id"] == user]
            known = {f.arrival for f in self.model.facts.get(user, [])}
            new = sorted(a for a in there[user] if a not in known)
            assert len(new) == len(mine), "all that was loaded is there, once"
            for row, arrival in zip(mine, new, strict=True):
                # Events that were appended while it was under way may have higher numbers.
                assert arrival > max([0, *(f.arrival for f in self.model.facts.get(user, []) if f.gone)])
                self.top[user] = max(self.top.get(user, 0), arrival)
                fact = self.model.add(user, row["event_ts"], arrival, self.by_id(row, under))
                fact.archived = True
        self.settle()

    def archived_numbers_of(self, users: set[Any]) -> dict[Any, set[int]]:
        """Of users, known to the model or not, the arrivals that the archive holds."""
        for user in users:
            self.model.facts.setdefault(user, [])
        return {u: set(n) for u, n in self.archived_numbers().items()}

    def compact(self, rng: np.random.Generator) -> None:
        """Compact, fully or not."""
        recent = {f for f in self.model.all_alive() if not f.archived}
        self.store.compact(full=bool(rng.random() < 0.4))
        self.settle()
        assert all(f.archived or f.gone for f in recent), "a compaction takes all that was there"

    def snapshot(self, rng: np.random.Generator) -> None:
        """Log requests."""
        picked = [u for u in self.users if rng.random() < 0.7] or self.users[:1]
        times = rng.integers(0, 64, len(picked))
        taken = self.store.snapshot(picked, times)
        self.settle()
        seen = [self.model.visible(u, t) for u, t in zip(picked, times.tolist(), strict=True)]
        batch = taken.requests
        assert batch.versions["schema_id"].tolist() == [self.model.schema.schema_id] * len(picked)
        entry = Logged(batch, seen, taken.generation.number, next(self.serial), fat_rows(seen))
        self.model.logged.append(entry)

    def erase_users(self, rng: np.random.Generator) -> None:
        """Erase one or two users, and perhaps events of another."""
        picked = list(dict.fromkeys(self.users[i] for i in rng.integers(0, 6, rng.integers(1, 3))))
        if rng.random() < 0.3:
            # A count changes nothing.
            self.store.erase(picked, dry_run=True)
        events: list[EventsOf] = []
        facts: set[Fact] = set()
        if rng.random() < 0.3:
            other = next(u for u in self.users if u not in picked)
            events, facts = self.some_events(rng, other)
        self.store.erase(picked, events, grace_s=0)
        self.erased(picked, facts, events)

    def erased(self, picked: list[Any], facts: set[Fact], events: Sequence[EventsOf] = ()) -> None:
        """What an erasure that named these users, and these facts by ``events``, leaves: of users of whom no event was
        met, too, it forgets the ids of what is gone."""
        last = self.pin().tombstones(self.ids(picked)).whole().tolist() if picked else []
        for user, number in zip(picked, last, strict=True):
            mine = self.model.facts.get(user, [])
            assert number >= max([1, *(f.arrival for f in mine if not self.nested)])
            self.model.lose([f for f in mine if f.arrival <= number], STATUS_ERASED)
            self.model.whole[user] = number
            self.top[user] = max(self.top.get(user, 0), number)
        self.settle_archived_only()
        self.model.lose(facts, STATUS_ERASED)
        self.model.forget_ids([*picked, *(e.user for e in events)])
        self.revoke()

    def settle_archived_only(self) -> None:
        """Learn what has been archived, where nothing can have expired."""
        policy, self.model.retention = self.model.retention, Retention()
        self.settle()
        self.model.retention = policy

    def erase_events(self, rng: np.random.Generator) -> None:
        """Erase some events of some users."""
        picked = list(dict.fromkeys(self.users[i] for i in rng.integers(0, 4, rng.integers(1, 3))))
        events: list[EventsOf] = []
        facts: set[Fact] = set()
        for user in picked:
            more, gone = self.some_events(rng, user)
            events += more
            facts |= gone
        if not events:
            return
        if rng.random() < 0.2:
            self.store.erase(events=events, dry_run=True)
            self.settle_archived_only()
        self.store.erase(events=events, grace_s=0)
        self.erased([], facts, events)

    def some_events(self, rng: np.random.Generator, user: Any) -> tuple[list[EventsOf], set[Fact]]:
        """A way to name some events of a user, and which they are."""
        held = self.model.alive(user)
        some = [f for f in held if rng.random() < 0.3]
        dice = rng.random()
        if dice < 0.3:
            low, high = sorted(rng.integers(0, 60, 2).tolist())
            return [EventsOf(user, start_ts=low, end_ts=high)], {f for f in held if low <= f.ts <= high}
        if dice < 0.5 and held:
            newest = held[-int(rng.integers(1, len(held) + 1)) :]
            return [EventsOf(user, start_ts=newest[0].ts)], {f for f in held if f.ts >= newest[0].ts}
        named = [f for f in some if f.event_id is not None]
        if self.with_ids and dice < 0.8 and named:
            return [EventsOf(user, event_ids=[f.event_id for f in named])], set(named)
        return ([EventsOf(user, arrivals=[f.arrival for f in some])], set(some)) if some else ([], set())

    def retain(self, rng: np.random.Generator) -> None:
        """Let go of what has expired, under a new policy or the old one."""
        self.now += int(rng.integers(0, 3))
        policy: Retention | None = None
        if rng.random() < 0.8:
            most = int(rng.integers(1, 15)) if rng.random() < 0.7 else None
            age = int(rng.integers(20, 80)) if rng.random() < 0.5 else None
            policy = Retention(age, most)
        self.store.retain(policy, grace_s=0)
        self.settle_archived_only()
        if policy is not None:
            self.model.retention = policy
        for user in list(self.model.facts):
            self.model.lose(self.model.expired(user, self.now), STATUS_EXPIRED)
        self.model.forget_ids(self.model.facts)
        self.revoke()

    def tick(self, rng: np.random.Generator) -> None:
        """Time passes; now and then the clock is set back."""
        self.now += int(rng.integers(0, 10))
        if rng.random() < 0.3:
            self.now -= int(rng.integers(0, 15))

    def revoke(self) -> None:
        """Whoever holds a generation from before an erasure has lost it."""
        since = self.pin().tombstone_index.since
        for held in self.held:
            held.revoked |= held.generation.number < since

    def evolve(self, rng: np.random.Generator) -> None:
        """Change columns, in several ways at once."""
        schema, log = self.model.schema, self.schemas
        names = [c.name for c in schema.columns]
        asked: dict[str, Any] = {"add": {}, "drop": [], "rename": {}, "widen": {}, "nullable": []}
        for column in schema.columns:
            dice = rng.random()
            if dice < 0.15 and len(names) > 1:
                asked["drop"].append(column.name)
                names.remove(column.name)
                continue
            if dice < 0.35:
                asked["rename"][column.name] = f"c{next(self.column_names)}"
            wider = WIDER.get(column.dtype, ()) if column.trait is not Trait.BITMAP else ()
            if wider and rng.random() < 0.4:
                asked["widen"][column.name] = wider[rng.integers(len(wider))]
            if rng.random() < 0.2:
                asked["nullable"].append(column.name)
        for _ in range(rng.integers(0, 2 if len(names) < 8 else 1)):
            trait, dtype = TRAITS[rng.integers(len(TRAITS))]
            new = spec_of(1, trait, dtype, True)
            known = {c.name for s in log.values() for c in s.columns} - {c.name for c in schema.columns}
            free = sorted(known - set(asked["rename"].values()))
            name = free[rng.integers(len(free))] if free and rng.random() < 0.3 else f"c{next(self.column_names)}"
            asked["add"][name] = {"trait": trait.value, "dtype": dtype, "group": "abc"[rng.integers(3)]}
            if new.size:
                asked["add"][name]["size"] = new.size
        try:
            changed = self.store.evolve(**asked)
        except SchemaError:
            assert self.nested or self.model.schema == self.store.schema
            return
        assert changed == self.store.schema
        self.model.schema = self.schemas[changed.schema_id] = changed

    def backfill(self, rng: np.random.Generator) -> None:
        """Give events, archived or not, there or not, values of a column."""
        schema = self.model.schema
        spec = schema.columns[rng.integers(len(schema.columns))]
        facts = [f for facts in self.model.facts.values() for f in facts if rng.random() < 0.4]
        by_id = self.with_ids and rng.random() < 0.4
        if by_id:
            ids: dict[Any, Fact] = {}
            for f in facts:
                known = self.model.named(f.user, f.event_id)
                if known is not None and not known.gone:
                    ids[f.user, f.event_id] = known
            facts = list(ids.values())
        n = len(facts)
        if not n:
            return
        wrong = rng.random(n) < (0.0 if by_id else 0.1)
        array = self.column(rng, spec, n)
        kind = pa.int64() if schema.user_kind == "int64" else pa.string()
        table = pa.table({"user_id": pa.array([f.user for f in facts], kind), spec.name: array})
        if by_id:
            id_type = pa.int64() if schema.event_id_dtype == "int64" else pa.string()
            table = table.append_column("event_id", pa.array([f.event_id for f in facts], id_type))
        else:
            times = [f.ts + bool(w) for f, w in zip(facts, wrong, strict=True)]
            table = table.append_column("event_ts", pa.array(times))
            table = table.append_column("arrival", pa.array([f.arrival for f in facts]))
        try:
            report = self.store.backfill(spec.name, table)
        except SchemaError:
            assert self.nested
            return
        self.settle()
        placed = 0
        for fact, value, bad in zip(facts, array.to_pylist(), wrong, strict=True):
            if fact.archived and not fact.gone and not bad:
                placed += 1
                fact.backfilled.add(spec.id)
                fact.values.pop(spec.id, None)
                if value is not None:
                    fact.values[spec.id] = value
        assert (report.placed, report.unplaced) == (placed, n - placed)

    def rebucket(self, rng: np.random.Generator) -> None:
        """Two or three times as many buckets."""
        if self.pin().n_buckets * 3 <= 24:
            self.store.rebucket(self.pin().n_buckets * int(rng.integers(2, 4)))

    def collect(self, rng: np.random.Generator) -> None:
        """Collect garbage."""
        self.store.collect_garbage(keep=int(rng.integers(1, 4)), grace_s=0)

    def hold(self, rng: np.random.Generator) -> None:
        """Keep reading today's generation, here or from another process."""
        generation, elsewhere = self.pin(), bool(rng.random() < 0.2)
        if elsewhere:
            generation = Archive(LocalObjects(self.path / "archive")).pin()
        stack = ExitStack()
        if elsewhere or rng.random() < 0.5:
            stack.enter_context(generation.hold("test"))
        facts = [f for facts in self.model.facts.values() for f in facts]
        values = {f: dict(f.values) for f in facts}
        self.held.append(Held(generation, values, {f: f.gone for f in facts}, elsewhere, stack.close))

    def release(self, rng: np.random.Generator) -> None:
        """Let go of a generation."""
        if self.held:
            self.held.pop(rng.integers(len(self.held))).close()

    def reopen(self, rng: np.random.Generator) -> None:
        """Close the store and open it again."""
        for held in self.held:
            held.close()
        self.held.clear()
        self.store.close()
        self._use(HistoryStore.open(self.path, sync=False, clock=lambda: self.now))
        assert self.store.schema == self.model.schema

    def backup(self, rng: np.random.Generator) -> None:
        """Back up."""
        number = self.store.backup(self.folder / "copy").number
        model = self.model.copy()
        if self.recent_url() is not None:
            # Of a tier on a server, what the archive has let go of is not copied, the ids included.
            model.forget_ids(model.facts)
        self.saved.append((number, model, next(self.serial), dict(self.schemas)))

    def restore(self, rng: np.random.Generator) -> None:
        """Go on with a restored backup; the store is lost, with what came after it."""
        if not self.saved:
            self.backup(rng)
            return
        number, model, serial, schemas = self.saved[rng.integers(len(self.saved))]
        for held in self.held:
            held.close()
        self.held.clear()
        self.store.close()
        lost = [g for g in self.model.logged if g.serial > serial]
        self.foreign += [(g.batch, [[(f.ts, f.arrival) for f in facts] for facts in g.seen]) for g in lost[-3:]]
        self.top = {u: max([0, *(f.arrival for f in facts)]) for u, facts in model.facts.items()} | model.whole
        epoch = (max([0, *self.top.values()]) >> EPOCH_BITS) + 1
        # Two stores that were restored from one backup count alike, and know nothing of each other.
        self.foreign = [(b, s) for b, s in self.foreign if (b.versions["snapshot_arrival"] >> EPOCH_BITS < epoch).all()]
        self.top = {u: (epoch << EPOCH_BITS) for u in self.users}
        self.path = self.folder / f"s{next(self.serial)}"
        HistoryStore.restore(self.folder / "copy", self.path, number, recent=self.recent_url())
        self.model, self.schemas = model.copy(), dict(schemas)
        self._use(HistoryStore.open(self.path, sync=False, clock=lambda: self.now))

    def redact(self, rng: np.random.Generator) -> None:
        """Redact logged requests as an erasure does in logs."""
        for i, logged in enumerate(self.model.logged):
            if rng.random() < 0.5 or not len(logged.batch):
                continue
            kept = redact(self.pin(), logged.batch, self.ids([]))
            users = logged.batch.users.tolist()
            before = logged.batch.versions["snapshot_arrival"] >= [self.model.whole.get(u, 0) for u in users]
            assert kept.rows.tolist() == np.flatnonzero(before).tolist()
            seen = [logged.seen[r] for r in kept.rows]
            fat = [logged.fat[r] for r in kept.rows]
            self.model.logged[i] = Logged(kept.batch, seen, self.pin().number, logged.serial, fat)
