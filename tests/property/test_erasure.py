"""Random streams with erasures, retention, compactions, redactions: every request resolves as a model says."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinrow.core.errors import Erased, Expired
from thinrow.core.units import NEVER
from thinrow.core.users import as_users
from thinrow.examples.erase import redact
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.verify import verify_generation
from thinrow.history.compact import compact
from thinrow.history.erase import EventsOf, Retention
from thinrow.history.erasure import erase, retain
from thinrow.history.intake import check_table
from thinrow.history.missing import COMPLETE, STATUS_ERASED, STATUS_EXPIRED
from thinrow.history.recent.lmdb import LmdbRecent
from thinrow.history.recent.memory import MemoryRecent
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import take_snapshot
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait
from thinrow.storage.objects import MemoryObjects

SCHEMA = EventSchema(
    (ColumnSpec(1, "item", Trait.ID, "int64", "item"), ColumnSpec(2, "kind", Trait.CATEGORICAL, "string", "item")),
    user_kind="string",
    event_id_column="event_id",
    event_id_dtype="int64",
    supersedes_column="supersedes",
)
USERS = ["a", "b", "c"]


@dataclass(slots=True)
class Fact:
    """An event as the model knows it; ``gone`` is 0, or the status that it gives a request that saw it."""

    ts: int
    arrival: int
    name: int
    hidden_from: int = NEVER
    gone: int = COMPLETE


@dataclass(slots=True)
class Model:
    """Events of each user, and what each logged request saw."""

    facts: dict[str, list[Fact]] = field(default_factory=lambda: {u: [] for u in USERS})
    top: dict[str, int] = field(default_factory=lambda: dict.fromkeys(USERS, 0))
    whole: dict[str, int] = field(default_factory=lambda: dict.fromkeys(USERS, 0))

    def alive(self, user: str) -> list[Fact]:
        return sorted((f for f in self.facts[user] if not f.gone), key=lambda f: (f.ts, f.arrival))

    def visible(self, user: str, ts: int) -> list[Fact]:
        return [f for f in self.alive(user) if f.ts < ts and f.hidden_from == NEVER]

    def expire(self, user: str, most: int) -> None:
        held = self.alive(user)
        for i, fact in enumerate(held):
            if sum(f.hidden_from == NEVER for f in held[i + 1 :]) >= most:
                fact.gone = STATUS_EXPIRED


class Play:
    """A store and a model side by side."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        self.rng = np.random.default_rng(seed)
        self.archive = Archive.create(MemoryObjects(), SCHEMA, 2)
        self.recent: Any = MemoryRecent(SCHEMA) if folder is None else LmdbRecent(folder, SCHEMA, sync=False)
        self.model = Model()
        self.logged: list[tuple[RequestBatch, list[list[Fact]]]] = []
        self.names = itertools.count()

    def append(self) -> None:
        rows: list[tuple[str, int, int, int | None]] = []
        for _ in range(self.rng.integers(1, 8)):
            user = str(self.rng.choice(USERS))
            known = [f.name for f in self.model.facts[user] if not f.gone]
            target = int(self.rng.choice(known)) if known and self.rng.random() < 0.2 else None
            rows.append((user, int(self.rng.integers(0, 30)), next(self.names), target))
        user, ts, name, target = zip(*rows, strict=True)
        data = {"user_id": user, "event_ts": ts, "event_id": name, "supersedes": pa.array(target, pa.int64())}
        table = pa.table(data | {"item": name, "kind": [f"kind {n}" for n in name]})
        checked = check_table(table, SCHEMA)
        got = self.recent.append(
            checked.users, checked.event_ts, checked.columns, checked.event_ids, checked.supersedes, None
        )
        assert not got.duplicate.any()
        for (u, t, n, corrects), arrival in zip(rows, got.arrivals.tolist(), strict=True):
            assert arrival > self.model.top[u], "numbers never repeat"
            self.model.top[u] = arrival
            self.model.facts[u].append(Fact(t, arrival, n))
            for fact in self.model.facts[u]:
                if corrects is not None and fact.name == corrects:
                    fact.hidden_from = min(fact.hidden_from, arrival)

    def request(self) -> None:
        users = as_users([u for u in USERS if self.rng.random() < 0.7] or USERS)
        times = self.rng.integers(0, 33, len(users))
        taken = take_snapshot(self.archive.pin, self.recent, users, times)
        seen = [self.model.visible(u, t) for u, t in zip(users.tolist(), times.tolist(), strict=True)]
        self.logged.append((taken.requests, seen))

    def erase_user(self) -> None:
        user = str(self.rng.choice(USERS))
        erase(self.archive, self.recent, as_users([user]), [], grace_s=0)
        for fact in self.model.facts[user]:
            fact.gone = STATUS_ERASED
        last = int(self.archive.pin().tombstones(as_users([user])).whole()[0])
        assert last >= self.model.top[user]
        self.model.top[user] = self.model.whole[user] = last

    def erase_events(self) -> None:
        user = str(self.rng.choice(USERS))
        held = self.model.alive(user)
        picked = [f for f in held if self.rng.random() < 0.3]
        if self.rng.random() < 0.5 and held:
            low, high = sorted(self.rng.integers(0, 30, 2).tolist())
            wanted = EventsOf(user, start_ts=low, end_ts=high)
            picked = [f for f in held if low <= f.ts <= high]
        elif picked:
            wanted = EventsOf(user, arrivals=[f.arrival for f in picked])
        else:
            return
        erase(self.archive, self.recent, as_users([], "string"), [wanted], grace_s=0)
        for fact in picked:
            fact.gone = STATUS_ERASED

    def retain(self) -> None:
        most = int(self.rng.integers(1, 12))
        retain(self.archive, self.recent, Retention(max_events=most), 0, grace_s=0)
        for user in USERS:
            self.model.expire(user, most)

    def redact(self) -> None:
        for i, (batch, seen) in enumerate(self.logged):
            kept = redact(self.archive.pin(), batch, as_users([], "string"))
            before = batch.versions["snapshot_arrival"] >= [self.model.whole[u] for u in batch.users]
            assert kept.rows.tolist() == np.flatnonzero(before).tolist()
            self.logged[i] = kept.batch, [seen[r] for r in kept.rows]

    def step(self) -> None:
        steps = [self.append] * 5 + [self.request] * 4 + [self.erase_user, self.erase_events, self.retain, self.redact]
        steps += [lambda: compact(self.archive, self.recent), lambda: compact(self.archive, self.recent, full=True)]
        steps[self.rng.integers(len(steps))]()

    def check(self) -> None:
        generation = self.archive.pin()
        assert verify_generation(generation) == []
        for batch, seen in self.logged:
            if not len(batch):
                continue
            got = reconstruct(generation, batch, on_missing="shorten")
            arrivals = got.histories.to_jagged("arrival").to_arrow().to_pylist()
            assert arrivals == [[f.arrival for f in facts if not f.gone] for facts in seen]
            names = got.histories.to_jagged("kind").to_arrow().to_pylist()
            assert names == [[f"kind {f.name}" for f in facts if not f.gone] for facts in seen]
            complete = [not any(f.gone for f in facts) for facts in seen]
            for i, facts in enumerate(seen):
                gone = {f.gone for f in facts} - {COMPLETE}
                allowed = {STATUS_ERASED} if STATUS_ERASED in gone else gone | {STATUS_ERASED} if gone else {COMPLETE}
                assert got.status[i] in allowed
            newest = reconstruct(generation, batch, Projection(max_len=2), on_missing="shorten")
            assert newest.histories.to_jagged("arrival").to_arrow().to_pylist() == [a[-2:] for a in arrivals]
            rest = reconstruct(generation, batch, on_missing="skip")
            assert rest.kept.tolist() == np.flatnonzero(complete).tolist()
            if all(complete):
                assert reconstruct(generation, batch).status.tolist() == [COMPLETE] * len(batch)
            else:
                with pytest.raises((Erased, Expired)):
                    reconstruct(generation, batch)

    def run(self, steps: int) -> None:
        try:
            for _ in range(steps):
                self.step()
            self.check()
            compact(self.archive, self.recent, full=True)
            self.check()
        finally:
            self.recent.close()


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 40))
def test_requests_resolve_as_the_model_says(seed: int) -> None:
    Play(seed, None).run(25)


def test_the_same_on_lmdb(tmp_path: Path) -> None:
    for seed in range(2):
        Play(seed, tmp_path / str(seed)).run(30)


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 40))
def test_many_streams(seed: int) -> None:
    Play(seed, None).run(40)
