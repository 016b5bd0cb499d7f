"""Reconstruction equals the fat row written at request time, for every request of random event streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.verify import verify_generation
from thinrow.history.compact import compact
from thinrow.history.intake import check_table
from thinrow.history.recent.memory import MemoryRecent
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import take_snapshot
from thinrow.jagged import SharedHistories
from thinrow.kernels import use
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait
from thinrow.storage.objects import MemoryObjects
from thinrow.testing.oracle import FatRowOracle

_QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

COLUMNS = (
    ColumnSpec(1, "item", Trait.ID, "int64", "item"),
    ColumnSpec(2, "kind", Trait.CATEGORICAL, "string", "item", nullable=True),
    ColumnSpec(3, "price", Trait.NUMERIC, "float32", "price", nullable=True),
)


def schema_for(kind: str) -> EventSchema:
    return EventSchema(
        COLUMNS,
        user_kind=kind,  # type: ignore[arg-type]
        event_id_column="event_id",
        event_id_dtype="int64",
        supersedes_column="supersedes",
    )


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """append (with ties, late events, repeats and corrections), request and compact, in any order."""
    ops: list[tuple[Any, ...]] = []
    known: dict[int, list[int]] = {}
    next_id = 0
    for _ in range(draw(st.integers(1, 14))):
        what = draw(st.sampled_from(["append", "append", "append", "request", "request", "compact", "full"]))
        if what == "append":
            rows = []
            for _ in range(draw(st.integers(1, 12))):
                user = draw(st.integers(0, 3))
                earlier = known.setdefault(user, [])
                repeat = bool(earlier) and draw(st.integers(0, 9)) == 0
                event_id = draw(st.sampled_from(earlier)) if repeat else next_id
                if any(r[0] == user and r[2] == event_id for r in rows):
                    continue
                corrects = (
                    draw(st.sampled_from(earlier)) if earlier and not repeat and draw(st.integers(0, 4)) == 0 else None
                )
                next_id += not repeat
                if not repeat:
                    earlier.append(event_id)
                kind = draw(st.sampled_from(["a", "bb", "", "ccc\0", None]))
                price = draw(st.sampled_from([0.5, -0.0, 3.25, None]))
                rows.append((user, draw(st.integers(0, 20)), event_id, corrects, draw(st.integers(-5, 5)), kind, price))
            if rows:
                ops.append(("append", rows))
        elif what == "request":
            users = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
            ops.append(("request", [(u, draw(st.integers(0, 22))) for u in users]))
        else:
            ops.append((what,))
    return ops


class World:
    """A real store (in memory) beside the oracle."""

    def __init__(self, kind: str, stripe_rows: int) -> None:
        self.schema = schema_for(kind)
        self.name: Callable[[int], Any] = (lambda u: u - 2) if kind == "int64" else (lambda u: f"user-{u}é")
        self.archive = Archive.create(MemoryObjects(), self.schema, 2)
        self.recent = MemoryRecent(self.schema)
        self.oracle = FatRowOracle()
        self.pinned: list[Generation] = [self.archive.pin()]
        self.logged: list[tuple[int, RequestBatch, list[list[tuple[Any, ...]]]]] = []
        self.stripe_rows = stripe_rows

    def append(self, rows: list[tuple[Any, ...]]) -> None:
        table = pa.table(
            {
                "user_id": pa.array([self.name(r[0]) for r in rows]),
                "event_ts": pa.array([r[1] for r in rows], pa.int64()),
                "event_id": pa.array([r[2] for r in rows], pa.int64()),
                "supersedes": pa.array([r[3] for r in rows], pa.int64()),
                "item": pa.array([r[4] for r in rows], pa.int64()),
                "kind": pa.array([r[5] for r in rows], pa.string()),
                "price": pa.array([r[6] for r in rows], pa.float32()),
            }
        )
        events = check_table(table, self.schema)
        got = self.recent.append(events.users, events.event_ts, events.columns, events.event_ids, events.supersedes)
        for r, arrival in zip(rows, got.arrivals, strict=True):
            values = {"item": r[4], "kind": r[5], "price": r[6]}
            assert self.oracle.append(self.name(r[0]), r[1], values, r[2], r[3]) == arrival

    def compact(self, full: bool) -> None:
        compact(self.archive, self.recent, full=full)
        generation = self.archive.pin()
        if generation.number != self.pinned[-1].number:
            self.pinned.append(generation)

    def request(self, asked: list[tuple[int, int]]) -> None:
        users = np.array([self.name(u) for u, _ in asked], np.int64 if self.schema.user_kind == "int64" else object)
        times = np.array([t for _, t in asked], np.int64)
        taken = take_snapshot(self.archive.pin, self.recent, users, times)
        rows = [self.oracle.fat_row(self.name(u), t) for u, t in asked]
        self.logged.append((len(self.pinned) - 1, taken.requests, rows))


def rows_of(histories: SharedHistories, names: list[str]) -> list[list[tuple[Any, ...]]]:
    """Each example's visible events as (event_ts, arrival, values...)."""
    positions, offsets = histories.positions()
    events = histories.events
    values = [events.columns[n].take(positions).to_arrow().to_pylist() for n in names]
    flat = list(
        zip(
            events.event_ts[positions].tolist(),
            events.arrival[positions].tolist(),
            zip(*values, strict=True),
            strict=True,
        )
    )
    return [flat[a:b] for a, b in itertools.pairwise(offsets)]


def aligned_start(length: int, n: int, align: int) -> int:
    """The least multiple of ``align`` from which at most ``n`` of ``length`` events are left."""
    return next(start for start in itertools.count(0, align) if length - start <= n)


def check(world: World) -> None:
    names = ["item", "kind", "price"]
    for at in range(len(world.pinned)):
        since = [(batch, rows) for pinned, batch, rows in world.logged if pinned <= at]
        if not since:
            continue
        batch = RequestBatch.concat([b for b, _ in since])
        truth = [row for _, rows in since for row in rows]
        for n in (1, 3, 1000, None):
            built = reconstruct(world.pinned[at], batch, Projection(max_len=n))
            want = [row[-n:] if n else row for row in truth]
            assert rows_of(built.histories, names) == want
            assert built.histories.lengths().tolist() == [len(r) for r in want]
        for n, align in ((1, 1), (3, 2), (4, 4), (6, 5), (1000, 7)):
            built = reconstruct(world.pinned[at], batch, Projection(max_len=n, align=align))
            assert rows_of(built.histories, names) == [row[aligned_start(len(row), n, align) :] for row in truth]
        horizon = reconstruct(world.pinned[at], batch, Projection(columns=("kind",), max_len=4, horizon_ms=5))
        want = [
            [(t, a, (v[1],)) for t, a, v in row if t >= request - 5][-4:]
            for row, request in zip(truth, batch.request_ts.tolist(), strict=True)
        ]
        assert rows_of(horizon.histories, ["kind"]) == want
    for generation in world.pinned:
        assert verify_generation(generation) == []


def play(script: list[tuple[Any, ...]], kind: str, stripe_rows: int, monkeypatch: pytest.MonkeyPatch) -> World:
    from thinrow.history import buckets, compact

    world = World(kind, stripe_rows)
    monkeypatch.setattr(buckets, "STRIPE_ROWS", stripe_rows)
    # Parts of few rows, so that a merge goes through several.
    monkeypatch.setattr(buckets, "PART_BYTES", 0)
    monkeypatch.setattr(compact, "PART_BYTES", 0)
    monkeypatch.setattr(compact, "_FIRST_USERS", 1)
    for op in script:
        if op[0] == "append":
            world.append(op[1])
        elif op[0] == "request":
            world.request(op[1])
        else:
            world.compact(op[0] == "full")
    world.compact(False)
    world.compact(True)
    return world


@settings(max_examples=60, suppress_health_check=_QUIET)
@given(script=scripts(), kind=st.sampled_from(["int64", "string"]), stripe_rows=st.sampled_from([1, 3, 512]))
def test_reconstruction_equals_fat_row(
    script: list[tuple[Any, ...]], kind: str, stripe_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        check(play(script, kind, stripe_rows, patch))


@settings(max_examples=15, suppress_health_check=_QUIET)
@given(script=scripts())
def test_reference_kernels_agree(script: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    with use("reference"), monkeypatch.context() as patch:
        check(play(script, "int64", 3, patch))


@pytest.mark.slow
@settings(max_examples=3000, suppress_health_check=_QUIET)
@given(script=scripts(), kind=st.sampled_from(["int64", "string"]), stripe_rows=st.sampled_from([1, 2, 3, 8, 512]))
def test_reconstruction_equals_fat_row_long(
    script: list[tuple[Any, ...]], kind: str, stripe_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        check(play(script, kind, stripe_rows, patch))


def test_files_appear_in_the_store(tmp_path: Path) -> None:
    """The same over real files: what a path holds after one append and one compaction."""
    from thinrow.history.store import HistoryStore

    with HistoryStore.create(tmp_path / "s", schema_for("int64"), n_buckets=2) as store:
        table = pa.table(
            {
                "user_id": [1, 1, 2],
                "event_ts": [5, 4, 9],
                "event_id": [1, 2, 3],
                "supersedes": pa.array([None, None, None], pa.int64()),
                "item": [7, 8, 9],
                "kind": ["a", None, "b"],
                "price": pa.array([1.0, None, 2.0], pa.float32()),
            }
        )
        store.append(table)
        assert store.compact().events == 3
        assert store.users().tolist() == [1, 2]
        built = store.read([1, 2, 3], 100)
        assert rows_of(built.histories, ["item"]) == [[(4, 2, (8,)), (5, 1, (7,))], [(9, 1, (9,))], []]
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["archive", "recent"]
