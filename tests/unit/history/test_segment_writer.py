"""Segments written part by part: what a reader finds does not depend on the parts, and nothing is left of a failure."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import SchemaError
from thinrow.core.users import as_users
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.hides import Hides
from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.scan import scan
from thinrow.history.archive.verify import verify_generation
from thinrow.history.archive.window import read_everything
from thinrow.history.archive.writer import SegmentWriter
from thinrow.jagged import HIDE_DTYPE, Column, Events
from thinrow.jagged.column import concat_columns
from thinrow.jagged.events import never_hidden
from thinrow.schema import EventSchema
from thinrow.storage.objects import LocalObjects, MemoryObjects
from thinrow.testing.segments import write_segment

SCHEMA = EventSchema.infer(
    pa.schema(
        {
            "user": pa.int64(),
            "ts": pa.int64(),
            "few": pa.int64(),
            "wide": pa.int64(),
            "city": pa.string(),
            "n": pa.int8(),
        }
    ),
    user="user",
    time="ts",
)
NAMED = EventSchema.from_dict({**SCHEMA.to_dict(), "user_kind": "string"})


def events_of(lengths: list[int], seed: int = 0, kind: str = "int64", cities: int = 40) -> Events:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    offsets = np.cumsum([0, *lengths])
    ts = np.concatenate([np.sort(rng.integers(1, 1000, k)) for k in lengths] or [np.empty(0)]).astype(np.int64)
    arrival = np.concatenate([np.arange(1, k + 1) for k in lengths] or [np.empty(0)]).astype(np.int64)
    users = np.arange(len(lengths)) * 3 - 5
    names = np.array([f"user {i:06d}" for i in range(len(lengths))], object)
    text = pa.array(
        [None if i % 11 == 0 else f"city {c}" for i, c in enumerate(rng.integers(0, cities, n))], pa.string()
    )
    columns = {
        "few": Column(rng.choice(np.array([5, -(1 << 60), 1 << 61]), n)),
        "wide": Column(rng.integers(-(1 << 62), 1 << 62, n)),
        "city": Column.from_arrow(text, "string"),
        "n": Column(rng.integers(0, 100, n).astype(np.int8), rng.random(n) < 0.9),
    }
    return Events(as_users(names if kind == "string" else users), offsets, ts, arrival, never_hidden(n), columns)


def no_hides(events: Events) -> Hides:
    return Hides(events.users[:0], np.zeros(1, np.int64), np.empty(0, HIDE_DTYPE))


def opened(objects: Any, events: Events, parts: list[int], schema: EventSchema) -> Generation:
    """A generation of one segment, written in ``parts`` (numbers of users)."""
    archive = Archive.create(objects, schema, 1)
    with SegmentWriter(objects, "segments/00000/a.seg", schema, bucket=0, n_buckets=1, stripe_rows=16) as writer:
        at = 0
        for k in [*parts, len(events.users) - sum(parts)]:
            writer.add(events.take_users(np.arange(at, at + k)))
            at += k
        info = writer.finish(no_hides(events))
    base = archive.pin()
    return archive.commit(base, {0: [info]}, "test")


def same(found: Events, wanted: Events) -> None:
    shown = np.flatnonzero(wanted.lengths)
    wanted = wanted.take_users(shown)
    assert found.users.tolist() == wanted.users.tolist()
    for name in ("offsets", "event_ts", "arrival", "hidden_from"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert {n: c.to_arrow().to_pylist() for n, c in found.columns.items()} == {
        n: c.to_arrow().to_pylist() for n, c in wanted.columns.items()
    }


@pytest.mark.parametrize("kind", ["int64", "string"])
@pytest.mark.parametrize("parts", [[], [1, 1, 1, 200], [150, 0, 100]])
def test_parts_read_as_the_whole(kind: str, parts: list[int]) -> None:
    rng = np.random.default_rng(3)
    lengths = rng.choice([0, 1, 2, 15, 16, 17, 100], 300, p=[0.1, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1]).tolist()
    events = events_of(lengths, kind=kind)
    generation = opened(MemoryObjects(), events, parts, NAMED if kind == "string" else SCHEMA)
    assert verify_generation(generation) == []
    users = events.users[np.flatnonzero(events.lengths)]
    columns = stored_columns(SCHEMA)[3:]
    same(read_everything(generation, users, columns, ReadStats()), events)
    info = generation.segments[0][1]
    assert (info.n_rows, info.n_users) == (len(events), len(users))
    whole = opened(MemoryObjects(), events, [], NAMED if kind == "string" else SCHEMA)
    assert info.digests == whole.segments[0][1].digests
    meta = generation.segment(0).meta
    assert (meta["min_ts"], meta["max_ts"]) == (events.event_ts.min(), events.event_ts.max())


def test_a_column_stops_using_its_dictionary() -> None:
    """A first part of few strings and words, a second of many: the same column is coded, then is not."""
    few, many = events_of([400], cities=10), events_of([0, 9000], seed=1, cities=1 << 40)
    varied = {**few.columns, "wide": few.columns["few"]}
    first = Events(few.users, few.offsets, few.event_ts, few.arrival, few.hidden_from, varied)
    joined = {n: concat_columns([first.columns[n], many.columns[n]]) for n in varied}
    both = Events(
        many.users,
        np.array([0, 400, 9400]),
        np.concatenate([few.event_ts, many.event_ts]),
        np.concatenate([few.arrival, many.arrival]),
        never_hidden(9400),
        joined,
    )
    generation = opened(MemoryObjects(), both, [1], SCHEMA)
    same(read_everything(generation, both.users, stored_columns(SCHEMA)[3:], ReadStats()), both)
    described = {c["name"]: c for c in generation.segment(0).meta["columns"]}
    assert described["city"]["dictionary"]["n"] == 10
    assert described["city"]["codec_counts"]["7"] == 563
    assert described["wide"]["dictionary"]["n"] == 3
    assert described["wide"]["codec_counts"]["6"] == 563
    assert verify_generation(generation) == []


def test_a_user_goes_on_in_the_next_part() -> None:
    events = events_of([3, 16 * 8 + 5, 2])
    objects = MemoryObjects()
    archive = Archive.create(objects, SCHEMA, 1)
    cuts = [(0, 3 + 64), (3 + 64, 3 + 128), (3 + 128, len(events))]
    owner = np.repeat(np.arange(3), events.lengths)
    with SegmentWriter(objects, "segments/00000/a.seg", SCHEMA, bucket=0, n_buckets=1, stripe_rows=16) as writer:
        for a, b in cuts:
            offsets = np.searchsorted(owner[a:b], np.arange(4))
            writer.add(events.take_rows(np.arange(a, b), offsets))
        info = writer.finish(no_hides(events))
    assert info.n_users == 3
    generation = archive.commit(archive.pin(), {0: [info]}, "test")
    same(read_everything(generation, events.users, stored_columns(SCHEMA)[3:], ReadStats()), events)
    assert verify_generation(generation) == []


@pytest.mark.parametrize("rows_at_once", [1, 7, 50, 100_000])
@pytest.mark.parametrize("kind", ["int64", "string"])
def test_a_scan_gives_everything_once_in_bounded_parts(kind: str, rows_at_once: int) -> None:
    schema = NAMED if kind == "string" else SCHEMA
    objects = MemoryObjects()
    archive = Archive.create(objects, schema, 1)
    rng = np.random.default_rng(8)
    infos = []
    long = 5 if kind == "int64" else 2
    for k in range(3):
        # Stripes of one row, and one user whose pieces fill more pages than are read at once.
        lengths = rng.choice([0, 1, 3], 60)
        lengths[long] = 300 * k
        events = events_of(lengths.tolist(), seed=k, kind=kind)
        events = Events(
            events.users, events.offsets, events.event_ts, events.arrival + 1000 * k, events.hidden_from, events.columns
        )
        name = f"segments/00000/{k}.seg"
        infos.append(
            write_segment(objects, name, events, no_hides(events), schema, bucket=0, n_buckets=1, stripe_rows=1)
        )
    generation = archive.commit(archive.pin(), {0: infos}, "test")
    columns = stored_columns(schema)[3:]
    parts = list(scan(generation, columns, rows_at_once=rows_at_once))
    users = np.concatenate([p.users for p in parts])
    assert users.tolist() == generation.users().tolist()
    whole = read_everything(generation, generation.users(), columns, ReadStats())
    at = 0
    for part in parts:
        assert len(part) <= rows_at_once or len(part.users) == 1
        same(part, whole.take_users(np.arange(at, at + len(part.users))))
        at += len(part.users)
    for left, right in itertools.pairwise(parts):
        assert len(left) + right.lengths[0] > rows_at_once, "as many users as fit"


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    events = events_of([20])
    lacking = Events(events.users, events.offsets, events.event_ts, events.arrival, events.hidden_from, {})
    strict = EventSchema.from_dict(
        {**SCHEMA.to_dict(), "columns": [{**c, "nullable": False} for c in SCHEMA.to_dict()["columns"]]}
    )
    with (
        pytest.raises(SchemaError, match="missing and not nullable"),
        SegmentWriter(objects, "segments/00000/a.seg", strict, bucket=0, n_buckets=1) as writer,
    ):
        writer.add(lacking)
    assert not list(tmp_path.rglob("*.seg"))
    assert objects.list("") == []


def test_memory_is_that_of_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 parts of 4,000 rows: the peak is that of a few parts, not of all."""
    monkeypatch.setattr("thinrow.storage.spool.Spool.__init__.__defaults__", (None, 1 << 16))
    part = events_of([4000])

    def peak(n_parts: int) -> int:
        objects = LocalObjects(tmp_path / str(n_parts))
        tracemalloc.start()
        with SegmentWriter(objects, "a.seg", SCHEMA, bucket=0, n_buckets=1) as writer:
            for k in range(n_parts):
                writer.add(
                    Events(part.users + k, part.offsets, part.event_ts, part.arrival, part.hidden_from, part.columns)
                )
            writer.finish(no_hides(part))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(2)
    assert peak(40) < 2 * peak(2)
