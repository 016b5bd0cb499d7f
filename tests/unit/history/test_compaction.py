"""Compaction and bulk loads: the prefix invariant, few segments, hides applied, and all of it beside other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.core.errors import CommitConflict, SchemaError, StoreError
from thinrow.core.units import NEVER
from thinrow.history import load as load_module
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.verify import verify_generation
from thinrow.history.archive.window import read_everything
from thinrow.history.bulk.state import load_folder
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait

ITEM = ColumnSpec(1, "item", Trait.ID, "int64", "main")
PLAIN = EventSchema((ITEM,))
WITH_IDS = EventSchema((ITEM,), event_id_column="event_id", event_id_dtype="int64", supersedes_column="supersedes")
USERS = np.arange(-3, 6)


def batch(rng: np.random.Generator, n: int, users: Any = USERS) -> pa.Table:
    columns = {"user_id": rng.choice(users, n), "event_ts": rng.integers(0, 50, n), "item": rng.integers(0, 9, n)}
    return pa.table(columns)


def arrivals(generation: Generation, users: Any = USERS) -> dict[int, list[int]]:
    """The arrivals that a generation holds of each user, hidden ones included."""
    events = read_everything(generation, users, [], ReadStats())
    return {
        int(u): sorted(events.arrival[a:b].tolist())
        for u, a, b in zip(users, events.offsets[:-1], events.offsets[1:], strict=True)
    }


def hold_prefixes(store: HistoryStore) -> None:
    """Every generation holds arrivals 1 to W of each user, W never falls, and every digest is right."""
    before = dict.fromkeys(USERS.tolist(), 0)
    for number in store.archive.numbers():
        generation = store.archive.generation(number)
        held = arrivals(generation)
        assert all(a == list(range(1, len(a) + 1)) for a in held.values())
        assert all(len(a) >= before[u] for u, a in held.items())
        assert sum(map(len, held.values())) == generation.n_rows
        before = {u: len(a) for u, a in held.items()}
    assert verify_generation(store.pin()) == []
    assert store.verify_recent() == []


def visible(store: HistoryStore) -> dict[int, list[int]]:
    """The arrivals that a request now sees of each user."""
    seen = store.read(USERS, NEVER - 1).histories.to_jagged("arrival").to_arrow().to_pylist()
    return dict(zip(USERS.tolist(), map(sorted, seen), strict=True))


def files(store: HistoryStore) -> tuple[set[str], set[str]]:
    """Segment files that are there, and those that some manifest names."""
    named = {i.name for n in store.archive.numbers() for _, i in store.archive.generation(n).segments}
    return set(store.archive.objects.list("segments/")), named


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    with HistoryStore.create(tmp_path / "s", PLAIN, n_buckets=3, sync=False) as store:
        yield store


@pytest.mark.parametrize("seed", range(4))
def test_a_generation_holds_exactly_the_first_arrivals(store: HistoryStore, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = dict.fromkeys(USERS.tolist(), 0)
    for _ in range(25):
        table = batch(rng, int(rng.integers(1, 40)))
        what = rng.choice(["append", "append", "append", "compact", "full", "load"])
        if what in ("append", "load"):
            store.append(table) if what == "append" else store.bulk_load(table)
            for u in table.column("user_id").to_pylist():
                counts[u] += 1
        else:
            store.compact(full=what == "full")
        assert visible(store) == {u: list(range(1, n + 1)) for u, n in counts.items()}
    hold_prefixes(store)


def test_few_segments_and_few_rewrites(store: HistoryStore) -> None:
    """120 small compactions: sizes grow geometrically, so a bucket holds a logarithmic number of segments."""
    rng = np.random.default_rng(0)
    rewritten = 0
    for _ in range(120):
        store.append(batch(rng, 10))
        rewritten += store.compact().merged_events
        generation = store.pin()
        assert max(len(generation.segments_of(b)) for b in range(3)) <= 6
    sizes = [[generation.segments[i][1].n_rows for i in generation.segments_of(b)] for b in range(3)]
    assert all(s == sorted(s, reverse=True) for s in sizes)
    assert generation.n_rows == 1_200
    assert rewritten < 8 * 1_200
    assert store.compact(full=True).segments == 3
    assert store.compact(full=True).merged_events == 0, "nothing is left to do"


def corrected(ids: list[int], corrects: list[int | None], user: int = 1) -> pa.Table:
    n = len(ids)
    columns = {"user_id": [user] * n, "event_ts": [10 * i for i in ids], "item": ids, "event_id": ids}
    return pa.table({**columns, "supersedes": pa.array(corrects, pa.int64())})


def test_full_compaction_applies_the_hide_lists(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", WITH_IDS, n_buckets=1) as store:
        store.append(corrected(list(range(100)), [None] * 100))
        store.compact()
        before = store.snapshot([1], 10_000).requests
        store.append(corrected([200, 201, 202], [7, 200, None]))
        recent = store.snapshot([1], 10_000).requests
        store.compact()
        generation = store.pin()
        assert [len(generation.segment(i).hides.records) for i in range(2)] == [0, 1]
        shown = [i for i in range(100) if i != 7] + [201, 202]
        for _ in range(2):
            assert store.read([1], 10_000).histories.to_jagged("item").to_arrow().to_pylist() == [shown]
            for logged, want in ((before, list(range(100))), (recent, shown)):
                built = reconstruct(store.pin(), logged)
                assert built.histories.to_jagged("item").to_arrow().to_pylist() == [want]
            store.compact(full=True)
        generation = store.pin()
        assert [len(generation.segment(i).hides.records) for i in range(len(generation.segments))] == [0]
        events = read_everything(generation, np.array([1]), [], ReadStats())
        hidden = dict(zip(events.arrival.tolist(), events.hidden_from.tolist(), strict=True))
        assert {a: h for a, h in hidden.items() if h != NEVER} == {8: 101, 101: 102}
        assert store.compact(full=True).generation == generation.number


# --- interrupted and raced -------------------------------------------------------------------------------------------


class Stop(Exception):
    """What a test throws into a compaction."""


def stop(*_: object) -> None:
    raise Stop


def test_stopped_before_the_commit_nothing_has_changed(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    store.append(batch(rng, 60))
    held = visible(store)
    with pytest.raises(Stop):
        store.compact(progress=stop)
    assert visible(store) == held
    assert store.pin().number == 1
    with monkeypatch.context() as patch:
        patch.setattr(store.archive, "commit", stop)
        with pytest.raises(Stop):
            store.compact()
    assert (visible(store), store.pin().number) == (held, 1)
    assert store.compact().events == 60
    assert visible(store) == held
    hold_prefixes(store)


def test_stopped_after_the_commit_the_next_one_trims(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    store.append(batch(rng, 60))
    held = visible(store)
    with monkeypatch.context() as patch:
        patch.setattr(store.recent, "trim", stop)
        with pytest.raises(Stop):
            store.compact()
    assert store.pin().number == 2
    assert visible(store) == held
    assert store.compact().events == 0
    assert len(store.recent.users()) == 0
    assert visible(store) == held
    hold_prefixes(store)


def test_an_error_after_the_manifest_is_there_keeps_its_segments(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk reports a failed sync, or ^C comes, when the commit can be seen already: its files must stay."""
    rng = np.random.default_rng(3)
    store.append(batch(rng, 60))
    held = visible(store)
    original = store.archive.commit

    def late(*args: Any) -> Any:
        original(*args)
        raise StoreError("cannot sync")

    with monkeypatch.context() as patch:
        patch.setattr(store.archive, "commit", late)
        with pytest.raises(StoreError, match="cannot sync"):
            store.compact()
    assert (visible(store), store.pin().number) == (held, 2)
    store.compact()
    hold_prefixes(store)


def during(times: int, then: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress callback that calls ``then`` at the end of each of the first ``times`` attempts of a compaction."""
    calls = [0]

    def progress(done: int, total: int) -> None:
        if done == total and calls[0] < times:
            calls[0] += 1
            then()

    return progress


def test_the_writer_that_comes_second_starts_again(store: HistoryStore) -> None:
    rng = np.random.default_rng(4)
    store.append(batch(rng, 60))

    def other() -> None:
        store.compact()
        store.append(batch(rng, 20))

    report = store.compact(progress=during(3, other))
    assert (report.generation, report.events) == (5, 20)
    assert sum(map(len, visible(store).values())) == 120
    assert store.pin().n_rows == 120
    hold_prefixes(store)
    there, named = files(store)
    assert there == named, "what was written in vain is deleted"


def test_a_writer_that_always_comes_second_says_so(store: HistoryStore) -> None:
    rng = np.random.default_rng(5)
    store.append(batch(rng, 30))

    def other() -> None:
        store.compact()
        store.append(batch(rng, 5))

    with pytest.raises(CommitConflict, match="20 times in a row"):
        store.compact(progress=during(99, other))
    assert sum(map(len, visible(store).values())) == 30 + 20 * 5
    there, named = files(store)
    assert there == named


def test_a_bulk_load_that_comes_second_starts_again(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    store.append(batch(rng, 30))
    original = store.archive.commit

    def raced(*args: Any) -> Any:
        monkeypatch.undo()
        store.compact()
        return original(*args)

    monkeypatch.setattr(store.archive, "commit", raced)
    store.bulk_load(batch(rng, 50))
    seen = visible(store)
    assert sum(map(len, seen.values())) == 80
    there, named = files(store)
    assert there == named
    # The numbers of the first try stay unused; what comes next is seen all the same.
    result = store.append(batch(rng, 20))
    seen = visible(store)
    assert sum(map(len, seen.values())) == 100
    assert max(map(max, filter(None, seen.values()))) == result.arrivals.max()


@pytest.mark.parametrize("load_id", [None, "named"])
@pytest.mark.parametrize("change", ["rebucket", "evolve"])
@pytest.mark.parametrize("kind", ["table", "file", "stream"])
def test_a_bulk_load_whose_store_changes_meanwhile_reads_its_input_anew(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch, kind: str, change: str, load_id: str | None, tmp_path: Path
) -> None:
    rng = np.random.default_rng(16)
    store.append(batch(rng, 30))
    more = batch(rng, 50)
    pq.write_table(more, tmp_path / "more.parquet")
    sources = {"table": lambda: more, "file": lambda: tmp_path / "more.parquet", "stream": more.to_reader}
    original = store.archive.commit

    def raced(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        store.rebucket() if change == "rebucket" else store.evolve(nullable=["item"])
        return original(*args, **named)

    monkeypatch.setattr(store.archive, "commit", raced)
    if kind == "stream":
        with pytest.raises(SchemaError, match="nothing was loaded and nothing is lost: load the same input again"):
            store.bulk_load(sources[kind](), load_id=load_id)
        assert sum(map(len, visible(store).values())) == 30
    if kind != "stream" or load_id is not None:
        store.bulk_load(sources[kind](), load_id=load_id)
        assert sum(map(len, visible(store).values())) == 80
        assert verify_generation(store.pin()) == []
    store.collect_garbage(keep=1, grace_s=0)
    there, named = files(store)
    assert there == named


def test_a_bulk_load_into_a_store_that_never_stands_still_says_so(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(17)
    real, readings = load_module.read_runs, []

    def read_runs(*args: Any, **named: Any) -> Any:
        yield from real(*args, **named)
        readings.append(store.rebucket())

    monkeypatch.setattr(load_module, "read_runs", read_runs)
    with pytest.raises(SchemaError, match="when no evolve or rebucket is under way"):
        store.bulk_load(batch(rng, 50))
    assert len(readings) == 3
    assert not any(visible(store).values())


def test_a_bulk_load_that_always_comes_second_loads_nothing(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conflict(*_: Any) -> Any:
        raise CommitConflict("another writer was first")

    rng = np.random.default_rng(6)
    store.append(batch(rng, 30))
    held = visible(store)
    with monkeypatch.context() as patch:
        patch.setattr(store.archive, "commit", conflict)
        with pytest.raises(CommitConflict):
            store.bulk_load(batch(rng, 50))
    assert visible(store) == held
    there, named = files(store)
    assert there == named
    assert [p.name for p in (store.path / "loads").iterdir()] == [".lock"]


def test_events_appended_while_a_bulk_load_writes_are_kept(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)
    store.append(batch(rng, 30))
    original, seen = load_module.run_buckets, []

    def raced(*args: Any) -> Any:
        store.append(batch(rng, 25))
        seen.append(visible(store))
        return original(*args)

    monkeypatch.setattr(load_module, "run_buckets", raced)
    store.bulk_load(batch(rng, 50))
    assert sum(map(len, seen[0].values())) == 55
    for _ in range(2):
        now = visible(store)
        assert sum(map(len, now.values())) == 105
        assert all(a == list(range(1, len(a) + 1)) for a in now.values())
        store.compact()
    hold_prefixes(store)


# --- hammered --------------------------------------------------------------------------------------------------------


def run_until_first_ends(*work: Callable[[threading.Event], None]) -> None:
    """All of ``work`` in threads; the others are told to stop when the first has ended. Errors come out here."""
    done, failures = threading.Event(), []

    def guarded(one: Callable[[threading.Event], None]) -> None:
        try:
            one(done)
        except BaseException as e:
            failures.append(e)
            done.set()

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    threads[0].join(60)
    done.set()
    for thread in threads[1:]:
        thread.join(60)
    assert not any(t.is_alive() for t in threads)
    if failures:
        raise failures[0]


def test_snapshots_see_each_event_once_while_others_append_and_compact(store: HistoryStore) -> None:
    """One thread appends, two compact, two take snapshots; each snapshot is rebuilt at once, and all of them later."""
    acknowledged = dict.fromkeys(USERS.tolist(), 0)
    logged: list[tuple[RequestBatch, list[list[int]]]] = []

    def append(done: threading.Event) -> None:
        rng, until = np.random.default_rng(8), time.monotonic() + 2
        # A slow machine gets more time, so that something is seen.
        while (time.monotonic() < until or len(logged) < 10 or store.pin().number < 5) and not done.is_set():
            table = batch(rng, 12)
            store.append(table)
            for u in table.column("user_id").to_pylist():
                acknowledged[u] += 1

    def compact(done: threading.Event) -> None:
        n = 0
        while not done.is_set():
            store.compact(full=n % 5 == 4)
            n += 1

    def snapshot(done: threading.Event) -> None:
        while not done.is_set():
            least = dict(acknowledged)
            taken = store.snapshot(USERS, NEVER - 1)
            built = reconstruct(taken.generation, taken.requests).histories.to_jagged("arrival").to_arrow().to_pylist()
            seen = [sorted(a) for a in built]
            assert seen == [list(range(1, len(a) + 1)) for a in seen], "each event once, none left out"
            assert all(len(a) >= least[u] for u, a in zip(USERS.tolist(), seen, strict=True))
            assert [len(a) for a in seen] == taken.requests.versions["snapshot_arrival"].tolist()
            logged.append((taken.requests, built))

    run_until_first_ends(append, compact, compact, snapshot, snapshot)
    assert len(logged) >= 10
    store.compact()
    everything = RequestBatch.concat([requests for requests, _ in logged])
    built = reconstruct(store.pin(), everything).histories.to_jagged("arrival").to_arrow().to_pylist()
    assert built == [row for _, rows in logged for row in rows]
    assert visible(store) == {u: list(range(1, n + 1)) for u, n in acknowledged.items()}
    hold_prefixes(store)
    there, named = files(store)
    assert there == named


def test_a_load_that_begins_is_not_swept_by_another(tmp_path: Path) -> None:
    """Folders of unnamed loads that nobody holds are deleted: one must be held before another load can see it."""
    failures: list[BaseException] = []

    def begin(n: int) -> None:
        try:
            for _ in range(n):
                with load_folder(tmp_path, None) as folder:
                    folder.put("held", {"n": n})
                    assert folder.get("held") == {"n": n}
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=begin, args=(300,)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_bulk_loads_beside_appends_lose_nothing(store: HistoryStore) -> None:
    counts: dict[int, int] = dict.fromkeys(USERS.tolist(), 0)
    lock, wasted = threading.Lock(), []

    def add(table: pa.Table) -> None:
        with lock:
            for u in table.column("user_id").to_pylist():
                counts[u] += 1

    def append(done: threading.Event) -> None:
        rng, until = np.random.default_rng(9), time.monotonic() + 1.5
        while time.monotonic() < until and not done.is_set():
            table = batch(rng, 5)
            store.append(table)
            add(table)

    def compact(done: threading.Event) -> None:
        while not done.is_set():
            store.compact()
            time.sleep(0.02)

    def load(done: threading.Event) -> None:
        rng = np.random.default_rng(10)
        while not done.is_set():
            table = batch(rng, 30)
            try:
                store.bulk_load(table)
            except CommitConflict:
                wasted.append(1)
            else:
                add(table)

    run_until_first_ends(append, compact, load, load)
    store.compact()
    held = arrivals(store.pin())
    assert {u: len(a) for u, a in held.items()} == counts
    assert all(len(set(a)) == len(a) for a in held.values())
    assert verify_generation(store.pin()) == []
