"""Bulk load against the oracle: the same events appended one by one and compacted. Runs, blocks, parts and stripes of
a few rows each, so that small inputs go every way."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinrow.history import buckets, load
from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.verify import verify_generation
from thinrow.history.archive.window import read_everything
from thinrow.history.bulk import merge, runs, source
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema

COLUMNS = {"item": pa.int64(), "city": pa.string(), "price": pa.float32()}


def schema_of(kind: str, arrives: bool) -> EventSchema:
    user = pa.string() if kind == "string" else pa.int64()
    fields = pa.schema({"user": user, "ts": pa.int64(), "at": pa.int64(), **COLUMNS})
    return EventSchema.infer(fields, user="user", time="ts", arrival_time="at" if arrives else None)


def table_of(rng: np.random.Generator, n: int, kind: str, n_users: int, skew: bool) -> pa.Table:
    who = rng.integers(0, n_users, n)
    if skew:
        who[rng.random(n) < 0.8] = 0
    names = [f"user {u}é" for u in who] if kind == "string" else (who * 7 - 9).tolist()
    city = [None if c == 0 else f"city {c}" for c in rng.integers(0, 9, n)]
    return pa.table(
        {
            "user": pa.array(names, pa.string() if kind == "string" else pa.int64()),
            "ts": rng.integers(0, 30, n),
            "at": rng.integers(0, 12, n),
            "item": rng.integers(-(1 << 60), 1 << 60, n),
            "city": pa.array(city, pa.string()),
            "price": pa.array(rng.random(n).astype(np.float32), mask=rng.random(n) < 0.2),
        }
    )


def content(store: HistoryStore) -> list[dict[str, Any]]:
    generation = store.pin()
    assert verify_generation(generation) == []
    events = read_everything(generation, generation.users(), stored_columns(generation.schema)[3:], ReadStats())
    rows = {n: c.to_arrow().to_pylist() for n, c in events.columns.items()}
    users = np.repeat(events.users, events.lengths).tolist()
    keys = zip(users, events.event_ts.tolist(), events.arrival.tolist(), strict=True)
    return [{"key": k, **{n: v[i] for n, v in rows.items()}} for i, k in enumerate(keys)]


@contextlib.contextmanager
def small(run_bytes: int, stripe_rows: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_LEAST_MEMORY", 0)
        patch.setattr(load, "_RUN_SHARE", 1)
        for module in (load, buckets):
            patch.setattr(module, "STRIPE_ROWS", stripe_rows)
        patch.setattr(buckets, "PART_BYTES", 0)
        patch.setattr(load, "_FIRST_USERS", 1)
        patch.setattr(source, "CHUNK_ROWS", 5)
        for module in (runs, merge):
            patch.setattr(module, "BATCH_ROWS", 3)
        yield


def given_as(how: str, table: pa.Table, folder: Path, cuts: list[int]) -> Any:
    bounds = [0, *sorted(c % (table.num_rows + 1) for c in cuts), table.num_rows]
    parts = [table.slice(a, b - a) for a, b in itertools.pairwise(bounds)]
    if how == "table":
        return table
    if how == "reader":
        batches = [b for p in parts for b in p.to_batches()]
        return pa.RecordBatchReader.from_batches(table.schema, batches)
    folder.mkdir()
    for i, part in enumerate(parts):
        if how == "parquet":
            pq.write_table(part, folder / f"{i}.parquet", row_group_size=4)
        else:
            with pa.OSFile(str(folder / f"{i}.arrow"), "wb") as sink, pa.ipc.new_file(sink, part.schema) as out:
                out.write_table(part, 6)
    return folder


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 60)),
    kind=st.sampled_from(["int64", "string"]),
    arrives=st.booleans(),
    how=st.sampled_from(["table", "reader", "parquet", "arrow"]),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    n_users=st.sampled_from([1, 3, 20]),
    skew=st.booleans(),
    run_bytes=st.sampled_from([1, 600, 1 << 30]),
    stripe_rows=st.sampled_from([2, 7]),
)
def test_a_bulk_load_is_an_append_and_a_compaction(
    seed: int, sizes: tuple[int, int, int], kind: str, arrives: bool, how: str, cuts: list[int], n_users: int,
    skew: bool, run_bytes: int, stripe_rows: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    before, recent, loaded = (table_of(rng, n, kind, n_users, skew) for n in sizes)
    schema = schema_of(kind, arrives)
    with TemporaryDirectory() as name, small(run_bytes, stripe_rows):
        folder = Path(name)
        with (
            HistoryStore.create(folder / "a", schema, 2, sync=False) as a,
            HistoryStore.create(folder / "b", schema, 2, sync=False) as b,
        ):
            for store in (a, b):
                store.append(before)
                store.compact()
                store.append(recent)
            a.append(loaded)
            report = b.bulk_load(given_as(how, loaded, folder / "in", cuts), memory_bytes=run_bytes)
            held = b.recent.read_since(b.recent.users(), np.zeros(len(b.recent.users()), np.int64))
            assert report.events == sizes[1] + sizes[2] - len(held.events)
            for store in (a, b):
                store.compact(full=True)
            assert content(b) == content(a)
            assert not [p for p in (folder / "b" / "loads").rglob("*") if p.suffix == ".arrow"]


@pytest.mark.parametrize("change", ["nothing", "evolve", "rebucket"])
def test_a_load_that_was_killed_after_its_commit_is_not_done_again(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(np.random.default_rng(0), 40, "int64", 4, False)
    with HistoryStore.create(tmp_path / "s", schema_of("int64", False), 2, sync=False) as store:
        real = store.archive.commit

        def commit(*args: Any, **named: Any) -> None:
            real(*args, **named)
            raise KeyboardInterrupt

        monkeypatch.setattr(store.archive, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            store.bulk_load(table, load_id="x")
        monkeypatch.undo()
        if change == "evolve":
            store.evolve(widen={"price": "float64"})
        if change == "rebucket":
            store.rebucket()
        for _ in range(2):
            assert store.bulk_load(table, load_id="x").events == 40
            assert store.pin().n_rows == 40
