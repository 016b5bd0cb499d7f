"""Rebucketing changes where events are, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CommitConflict, CorruptionError, InputError, StoreError
from thinrow.core.units import NEVER
from thinrow.core.users import bucket_of
from thinrow.history import rebucket as module
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.verify import verify_generation
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait


def schema(kind: str) -> EventSchema:
    return EventSchema(
        (
            ColumnSpec(1, "item", Trait.ID, "int64", "item"),
            ColumnSpec(2, "shop", Trait.CATEGORICAL, "string", "item", nullable=True),
        ),
        user_kind=kind,  # type: ignore[arg-type]
        event_id_column="event_id",
        event_id_dtype="int64",
        supersedes_column="supersedes",
    )


def events(kind: str, first: int, n: int) -> pa.Table:
    """Ids from ``first`` on; each twentieth corrects the event of the same user sixty before."""
    k = first + np.arange(n)
    users = [int(u) if kind == "int64" else f"user {u}" for u in k % 30]
    corrected = [int(i) - 60 if i % 20 == 0 and i >= 60 else None for i in k]
    return pa.table(
        {
            "user_id": users,
            "event_ts": k * 10 - k % 7 * 50 + 500,
            "event_id": k,
            "supersedes": pa.array(corrected, pa.int64()),
            "item": k,
            "shop": pa.array([None if i % 9 == 0 else f"s{i % 4}" for i in k], pa.string()),
        }
    )


def seen(store: HistoryStore) -> Any:
    histories = store.read(store.users(), NEVER - 1).histories
    return {n: histories.to_jagged(n).to_arrow().to_pylist() for n in ("event_ts", "arrival", "item", "shop")}


@pytest.fixture(params=["int64", "string"])
def store(request: pytest.FixtureRequest, tmp_path: Path):
    kind = request.param
    with HistoryStore.create(tmp_path / "store", schema(kind), 3, sync=False) as store:
        for first, n in ((0, 900), (900, 100), (1000, 30)):
            store.append(events(kind, first, n))
            store.compact()
        store.append(events(kind, 1030, 50))
        assert any(len(store.pin().segments_of(b)) > 1 for b in range(3))
        yield store


def kind_of(store: HistoryStore) -> str:
    return store.schema.user_kind


def test_nothing_changes_but_the_buckets(store: HistoryStore) -> None:
    before, rows = seen(store), store.pin().n_rows
    logged = store.snapshot(store.users(), 9_000).requests
    rebuilt = reconstruct(store.pin(), logged).histories.to_jagged("item").to_arrow().to_pylist()
    for wanted, asked in ((6, None), (24, 24)):
        report = store.rebucket(asked)
        assert (report.n_buckets, report.events) == (wanted, rows)
        generation = store.pin()
        assert generation.n_buckets == wanted
        assert verify_generation(generation) == []
        assert seen(store) == before
        assert reconstruct(generation, logged).histories.to_jagged("item").to_arrow().to_pylist() == rebuilt
        for number, (bucket, _) in enumerate(generation.segments):
            users = generation.only([number]).users()
            assert (bucket_of(users, wanted) == bucket).all()
            assert len(generation.segments_of(bucket)) == 1
    store.compact()
    store.append(events(kind_of(store), 1080, 100))
    store.compact(full=True)
    assert verify_generation(store.pin()) == []
    assert store.verify_recent() == []
    assert store.pin().n_rows == rows + 150
    store.archive.collect_garbage(keep=1, grace_s=0)
    assert store.pin().n_buckets == 24


@pytest.mark.parametrize("n_buckets", [0, 1, 3, 4, 5, -6, 65_538])
def test_only_multiples(store: HistoryStore, n_buckets: int) -> None:
    with pytest.raises(InputError, match="multiple of 3, above it and at most 65536"):
        store.rebucket(n_buckets)


def racing(monkeypatch: pytest.MonkeyPatch, *winners: Callable[[], object]) -> None:
    waiting, real, inside = list(winners), Archive.commit, []

    def commit(self: Archive, *args: Any, **named: Any) -> object:
        if waiting and not inside:
            inside.append(True)
            waiting.pop(0)()
            inside.clear()
        return real(self, *args, **named)

    monkeypatch.setattr(Archive, "commit", commit)


def live_files(store: HistoryStore) -> set[str]:
    generations = map(store.archive.generation, store.archive.numbers())
    return {info.name for g in generations for _, info in g.segments}


def test_a_compaction_that_is_first_is_kept(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    split: list[int] = []
    real = module._split
    monkeypatch.setattr(module, "_split", lambda base, b, n: split.append(b) or real(base, b, n))
    before = seen(store)
    user = store.users()[:1]
    bucket = int(bucket_of(user, 3)[0])

    def one_bucket() -> None:
        base = store.pin()
        lists = [base.segments[i][1] for i in base.segments_of(bucket)]
        # As a writer whose other buckets did not change.
        name = "segments/copy.seg"
        store.archive.objects.put(name, store.archive.objects.get(lists[-1].name))
        store.archive.commit(base, {bucket: [*lists[:-1], replace(lists[-1], name=name)]}, "x")

    racing(monkeypatch, one_bucket, store.compact)
    store.rebucket()
    assert split[:4] == [0, 1, 2, bucket]
    assert seen(store) == before
    assert store.pin().n_buckets == 6
    assert verify_generation(store.pin()) == []
    assert set(store.archive.objects.list("segments/")) == live_files(store)


def test_a_compaction_that_loses_to_rebucketing_starts_again(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = seen(store)
    racing(monkeypatch, store.rebucket)
    report = store.compact()
    assert report.events == 50
    assert seen(store) == before
    assert store.pin().n_buckets == 6
    assert len(store.recent.users()) == 0
    assert verify_generation(store.pin()) == []
    assert set(store.archive.objects.list("segments/")) == live_files(store)


def test_of_two_rebucketings_one_wins(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    racing(monkeypatch, store.rebucket)
    with pytest.raises(CommitConflict):
        store.rebucket()
    assert store.pin().n_buckets == 6
    assert set(store.archive.objects.list("segments/")) == live_files(store)


def test_a_failure_leaves_nothing(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before, files = seen(store), store.archive.objects.list("")
    real = module._split_segments

    def fail(base: Any, bucket: int, targets: range, n: int) -> Any:
        if bucket == 2:
            raise StoreError("no space left")
        return real(base, bucket, targets, n)

    monkeypatch.setattr(module, "_split_segments", fail)
    with pytest.raises(StoreError):
        store.rebucket()
    assert seen(store) == before
    assert store.archive.objects.list("") == files


def test_digests_that_do_not_add_up_are_refused(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._parts

    def lose(part: Any, n: int) -> Any:
        for i, (target, some) in enumerate(real(part, n)):
            yield target, some if i else some.take_users(np.arange(1, len(some.users)))

    monkeypatch.setattr(module, "_parts", lose)
    files = store.archive.objects.list("")
    with pytest.raises(CorruptionError, match="rebucketing would change column"):
        store.rebucket()
    assert store.archive.objects.list("") == files


@pytest.mark.parametrize("change", ["widen", "backfill", "add", "drop"])
def test_a_store_whose_columns_have_changed_is_rebucketed(change: str, tmp_path: Path) -> None:
    columns = (
        ColumnSpec(1, "item", Trait.ID, "int32", "item"),
        ColumnSpec(2, "price", Trait.NUMERIC, "float32", "price", nullable=True),
    )
    with HistoryStore.create(tmp_path, EventSchema(columns), 2) as store:
        n = 400
        rows = {"user_id": np.arange(n) % 20, "event_ts": np.arange(n), "item": np.arange(n), "price": np.arange(n) / 8}
        store.append(pa.table(rows))
        store.compact()
        value = {"user_id": [7, 8], "event_ts": [7, 8], "arrival": [1, 1], "price": [-1.0, None]}
        if change == "widen":
            store.evolve(widen={"price": "float64", "item": "int64"})
        elif change == "backfill":
            store.backfill("price", pa.table(value))
        elif change == "add":
            store.evolve(add={"cost": {"trait": "numeric", "dtype": "float32", "group": "price"}})
            store.backfill("cost", pa.table(value).rename_columns(["user_id", "event_ts", "arrival", "cost"]))
        else:
            store.evolve(drop=["price"])
        before = store.read(store.users(), NEVER - 1).histories.events
        assert store.rebucket().n_buckets == 4
        after = store.read(store.users(), NEVER - 1).histories.events
        for name, column in before.columns.items():
            assert after.columns[name].to_arrow().equals(column.to_arrow())
        assert verify_generation(store.pin()) == []
