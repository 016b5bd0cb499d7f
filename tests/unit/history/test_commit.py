"""The loser of a commit keeps what it wrote in buckets that the winner left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CommitConflict
from thinrow.core.units import NEVER
from thinrow.core.users import bucket_of
from thinrow.history import buckets, compact, load
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.verify import verify_generation
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column
from thinrow.schema import ColumnSpec, EventSchema, Trait

SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "item"),))
N_BUCKETS = 4
USERS = np.arange(40)


def events(users: np.ndarray, first: int) -> pa.Table:
    item = first + np.arange(len(users))
    return pa.table({"user_id": users, "event_ts": item, "item": item})


def users_in(*wanted: int) -> np.ndarray:
    return USERS[np.isin(bucket_of(USERS, N_BUCKETS), wanted)]


def items(store: HistoryStore) -> list[int]:
    return sorted(store.read(store.users(), NEVER - 1).histories.to_jagged("item").values.tolist())


@pytest.fixture
def store(tmp_path: Path):
    with HistoryStore.create(tmp_path / "store", SCHEMA, N_BUCKETS, sync=False) as store:
        yield store


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Buckets whose segment was written, in order."""
    found: list[int] = []
    real = buckets.write_bucket

    def count(task: buckets.BucketTask) -> buckets.BucketWrite | None:
        found.append(task.bucket)
        return real(task)

    monkeypatch.setattr(compact, "write_bucket", count)
    monkeypatch.setattr(load, "write_bucket", count)
    return found


def first_to_commit(monkeypatch: pytest.MonkeyPatch, *winners: Callable[[], object]) -> None:
    """Each of ``winners`` commits just before a commit of the test."""
    waiting, real, inside = list(winners), Archive.commit, []

    def commit(self: Archive, *args: object, **named: object) -> object:
        if waiting and not inside:
            inside.append(True)
            waiting.pop(0)()
            inside.clear()
        return real(self, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Archive, "commit", commit)


def touch(store: HistoryStore, bucket: int) -> None:
    """Another writer replaces the segments of one bucket; its content stays."""
    base = store.pin()
    copies = []
    for info in (base.segments[i][1] for i in base.segments_of(bucket)):
        name = buckets.new_name(bucket)
        store.archive.objects.put(name, store.archive.objects.get(info.name))
        copies.append(replace(info, name=name))
    store.archive.commit(base, {bucket: copies}, "another writer")


def test_only_buckets_that_the_winner_changed_are_done_again(
    store: HistoryStore, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(events(USERS, 0))
    store.compact(full=True)
    store.append(events(USERS, 100))
    written.clear()
    first_to_commit(monkeypatch, lambda: touch(store, 2), lambda: touch(store, 1))
    report = store.compact()
    assert sorted(written[:N_BUCKETS]) == [0, 1, 2, 3]
    assert written[N_BUCKETS:] == [2, 1]
    assert report.events == len(USERS)
    assert items(store) == [*range(len(USERS)), *range(100, 100 + len(USERS))]
    assert verify_generation(store.pin()) == []
    assert len(store.recent.users()) == 0
    live = {info.name for g in store.archive.numbers() for _, info in store.archive.generation(g).segments}
    assert set(store.archive.objects.list("segments/")) == live


def test_a_winner_that_did_the_same_leaves_nothing_to_do(
    store: HistoryStore, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(events(USERS, 0))
    first_to_commit(monkeypatch, store.compact)
    report = store.compact()
    assert report.events == 0
    assert items(store) == list(range(len(USERS)))
    assert verify_generation(store.pin()) == []


def test_a_load_beside_compactions_loads_once(
    store: HistoryStore, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(events(users_in(0, 1), 0))
    n = len(users_in(0, 1))
    # The compaction archives recent events that the load had taken along.
    first_to_commit(monkeypatch, store.compact)
    store.bulk_load(events(USERS, 100))
    assert items(store) == [*range(n), *range(100, 100 + len(USERS))]
    assert sorted(written[:4]) == [0, 1, 2, 3]
    assert sorted(written[6:]) == [0, 1]
    assert verify_generation(store.pin()) == []


def test_events_from_elsewhere_during_a_load_are_not_lost(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_process() -> None:
        store.recent.append(USERS, np.arange(len(USERS)), {"item": Column(500 + np.arange(len(USERS)))})
        store.compact()

    first_to_commit(monkeypatch, other_process)
    store.bulk_load(events(USERS, 100))
    assert items(store) == [*range(100, 100 + len(USERS)), *range(500, 500 + len(USERS))]
    assert verify_generation(store.pin()) == []


def test_losing_again_and_again_ends(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(events(USERS, 0))
    store.compact()
    store.append(events(users_in(3), 100))
    first_to_commit(monkeypatch, *[lambda: touch(store, 0)] * 100)
    with pytest.raises(CommitConflict, match="20 times"):
        store.compact()
    monkeypatch.undo()
    live = {info.name for g in store.archive.numbers() for _, info in store.archive.generation(g).segments}
    assert set(store.archive.objects.list("segments/")) == live
    assert store.compact().events == len(users_in(3))
