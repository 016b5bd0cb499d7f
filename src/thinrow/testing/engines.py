"""Contract suite of the engines of the loader: subclass it for an engine of yours, and pytest holds it to the promises.

::

    class TestMyEngine(EngineContract):
        def choice(self, lease_s=60.0):
            return MyEngine(lease_s=lease_s)

        def kill(self, engine, rng):
            ...end one of its workers, without a word

Whatever the engine, the number of workers and whatever ends these: the same batches, each once, in order. Needs pytest.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError, Erased, InputError, WorkerLost
from thinrow.dpp.batch import Batch
from thinrow.dpp.client import Loader, loader
from thinrow.dpp.engines import Engine, EngineChoice, Threads
from thinrow.history.archive.generation import Generation
from thinrow.history.erase import EventsOf
from thinrow.history.store import HistoryStore
from thinrow.schema import Projection
from thinrow.testing.world import World, make_world

Item = dict[str, Any]
SMALL: dict[str, Any] = {"base_rows": 4, "block": 3, "seed": 5}


@dataclass(frozen=True)
class Blocks:
    """Items by arithmetic, each of ``rows`` integers, floats and texts; every production is noted in ``folder``.

    Attributes:
        delay_s: how long one takes.
        fails, dies, sticks: the item that raises an error; that ends its worker, ``times`` times; or never ends, once.
    """

    folder: Path
    rows: int = 100
    delay_s: float = 0.0
    fails: int | None = None
    dies: int | None = None
    sticks: int | None = None
    times: int = 1

    def __call__(self, item: int) -> Item:
        with open(self.folder / "made", "a") as made:
            made.write(f"{item}\n")
        if item == self.fails:
            try:
                raise KeyError("the cause")
            except KeyError as e:
                raise CorruptionError(f"item {item} is bad", file="a.seg", user=7, column="price") from e
        if item == self.dies and self.made.count(item) <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)
        if item == self.sticks and self.made.count(item) == 1:
            time.sleep(600)
        time.sleep(self.delay_s)
        return self.expected(item)

    @property
    def made(self) -> list[int]:
        """Items that were begun, in the order in which that was noted."""
        return list(map(int, (self.folder / "made").read_text().split()))

    def expected(self, item: int) -> Item:
        """The item."""
        n = np.arange(self.rows, dtype=np.int64) * (item + 1)
        texts = pa.array([f"text {item} {i % 7}" for i in range(min(self.rows, 50))])
        return {"item": item, "n": n, "x": n / 3, "none": n[:0], "texts": texts, "few": np.arange(item % 5)}


class Unopenable:
    """What fails when a worker opens it; with ``dies``, by ending the worker."""

    def __init__(self, folder: Path, *, dies: bool = False) -> None:
        self.folder, self.dies = folder, dies

    def __call__(self, item: int) -> Item:
        raise AssertionError("it was never opened")

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.dies,)


def _open(dies: bool) -> None:
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("it cannot be opened")


def same(one: Item, other: Item) -> bool:
    """Whether two items are equal, types and all."""
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def digest(batch: Batch) -> str:
    """The content of a batch, independent of how it is laid out."""
    rows: dict[str, Any] = {
        f"history.{n}": batch.histories.to_jagged(n) for n in ("event_ts", "arrival", *batch.histories.events.columns)
    }
    columns = rows | batch.context | batch.candidates | batch.labels | batch.features | {"model": batch.model_version}
    h = hashlib.sha256(repr([(n, c.to_arrow().to_pylist()) for n, c in sorted(columns.items())]).encode())
    arrays = batch.request_id, batch.request_ts, batch.users, batch.boundary, batch.status
    h.update(repr((batch.t, [a.tolist() for a in arrays])).encode())
    return h.hexdigest()


class EngineContract:
    """Subclass and implement ``choice`` and ``kill``; set ``mortal = False`` where a worker cannot end by itself."""

    mortal: ClassVar[bool] = True

    def choice(self, lease_s: float = 60.0) -> EngineChoice:
        """The engine."""
        raise NotImplementedError

    def kill(self, engine: Engine[Any], rng: np.random.Generator) -> bool:
        """End a worker of the engine at random, none of them twice; False where there is none at the moment."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory) -> World:
        return make_world(tmp_path_factory.mktemp("world"), users=8, days=8)

    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls, world: World) -> Iterator[tuple[HistoryStore, Any]]:
        with world.store() as store, world.table() as table:
            yield store, table

    @pytest.fixture(scope="class")
    @classmethod
    def wanted(cls, opened: tuple[HistoryStore, Any]) -> list[str]:
        """Digests of all batches, made by one thread."""
        return [digest(b) for b in loader(*opened, workers=1, epochs=2, **SMALL)]

    def start(
        self,
        produce: Blocks,
        *,
        workers: int = 2,
        first: int = 0,
        stop: int | None = 30,
        window: int = 8,
        **lease: float,
    ) -> Engine[Item]:
        return self.choice(**lease).start(produce, first=first, stop=stop, workers=workers, window=window)

    def reader(self, opened: tuple[HistoryStore, Any], workers: int = 2, **changes: Any) -> Loader:
        return loader(*opened, engine=self.choice(), workers=workers, **{"epochs": 2, **SMALL, **changes})

    def test_any_number_of_workers_at_any_time(self, tmp_path: Path) -> None:
        blocks = Blocks(tmp_path, delay_s=0.01)
        engine = self.start(blocks, stop=60)
        for v in range(60):
            if v % 10 == 5:
                engine.resize((4, 1, 3, 5, 2, 1)[v // 10])
            assert same(engine.next(), blocks.expected(v))
        # Those that were too many ended when they were done: nothing was made twice, but for a backup of a slow one.
        assert sorted(set(blocks.made)) == list(range(60))
        assert len(blocks.made) <= 61
        assert engine.restarts == 0
        deadline = time.monotonic() + 30
        while engine.gauges().workers > 1:
            assert time.monotonic() < deadline, engine.gauges()
            time.sleep(0.01)
        found = engine.gauges()
        assert (found.head, found.ready, found.busy, found.blocked) == (60, 0, 0, 0)
        with pytest.raises(InputError, match="workers=0"):
            engine.resize(0)
        engine.close()

    @pytest.mark.parametrize("workers", [1, 5])
    def test_items_come_in_order_each_once(self, tmp_path: Path, workers: int) -> None:
        blocks = Blocks(tmp_path)
        engine = self.start(blocks, workers=workers, first=3)
        assert all(same(engine.next(), blocks.expected(v)) for v in range(3, 30))
        for _ in range(2):
            with pytest.raises(StopIteration):
                engine.next()
        engine.close()
        engine.close()
        assert sorted(set(blocks.made)) == list(range(3, 30))
        assert len(blocks.made) <= 28
        assert engine.restarts == 0

    def test_what_is_kept_stays_as_it_was(self, tmp_path: Path) -> None:
        blocks = Blocks(tmp_path, rows=3_000)
        engine = self.start(blocks, stop=300, window=6)
        kept = [engine.next() for _ in range(200)]
        parts = [engine.next()["x"][5:9] for _ in range(50)]
        engine.close()
        assert all(same(item, blocks.expected(v)) for v, item in enumerate(kept))
        for v, part in enumerate(parts):
            assert np.array_equal(part, blocks.expected(200 + v)["x"][5:9])

    def test_a_slow_reader_stops_the_workers(self, tmp_path: Path) -> None:
        blocks = Blocks(tmp_path)
        engine = self.start(blocks, stop=None, window=5)
        for _ in range(3):
            engine.next()
        time.sleep(0.5)
        assert len(blocks.made) <= 3 + 5
        engine.close()

    def test_an_error_comes_in_its_turn_with_its_cause(self, tmp_path: Path) -> None:
        blocks = Blocks(tmp_path, fails=9, delay_s=0.002)
        engine = self.start(blocks, workers=3)
        assert all(same(engine.next(), blocks.expected(v)) for v in range(9))
        for _ in range(2):
            with pytest.raises(CorruptionError, match="item 9 is bad") as caught:
                engine.next()
        error = caught.value
        assert (error.file, error.user, error.column) == ("a.seg", 7, "price")
        assert isinstance(error.__cause__, KeyError)
        assert error.__cause__.args == ("the cause",)
        assert len(blocks.made) <= 9 + 8
        engine.close()
        with pytest.raises(StopIteration):
            engine.next()

    def test_closed_with_items_in_flight(self, tmp_path: Path) -> None:
        before = threading.active_count()
        for n in (0, 1, 4):
            engine = self.start(Blocks(tmp_path, delay_s=0.05), workers=3, stop=None)
            for _ in range(n):
                engine.next()
            engine.close()
            with pytest.raises(StopIteration):
                engine.next()
        assert threading.active_count() <= before

    def test_close_wakes_a_reader_that_waits(self, tmp_path: Path) -> None:
        engine = self.start(Blocks(tmp_path, delay_s=1.0), stop=None)
        closer = threading.Timer(0.3, engine.close)
        closer.start()
        n = sum(1 for _ in iter(lambda: next_or_none(engine), None))
        closer.join()
        assert n < 2 * 3

    def test_bad_sizes_are_named(self, tmp_path: Path) -> None:
        for name in ("workers", "window"):
            with pytest.raises(InputError, match=f"{'threads|' if name == 'workers' else ''}{name}=0"):
                self.choice().start(Blocks(tmp_path), first=0, stop=1, **{"workers": 1, "window": 1, name: 0})

    def killed(self, tmp_path: Path, kills: int, seed: int) -> None:
        rng, blocks = np.random.default_rng(seed), Blocks(tmp_path, delay_s=0.01, rows=2_000)
        engine, n, v = self.start(blocks, workers=3, stop=None), 0, 0
        while n < kills or v < 20:
            # From item to item at a random moment.
            time.sleep(float(rng.random()) * 0.02)
            n += n < kills and bool(rng.random() < 0.3) and self.kill(engine, rng)
            assert same(engine.next(), blocks.expected(v))
            v += 1
        assert all(same(engine.next(), blocks.expected(v + i)) for i in range(10))
        # An end is noticed, not waited for.
        deadline = time.monotonic() + 20
        while engine.restarts < kills and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.restarts == kills
        engine.close()

    def test_a_killed_worker_changes_nothing(self, tmp_path: Path) -> None:
        if not self.mortal:
            pytest.skip("its workers do not die alone")
        self.killed(tmp_path, 2, seed=0)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(3))
    def test_twenty_killed_workers_change_nothing(self, tmp_path: Path, seed: int) -> None:
        if not self.mortal:
            pytest.skip("its workers do not die alone")
        self.killed(tmp_path, 20, seed)

    def test_an_item_that_ends_a_worker_is_made_by_another(self, tmp_path: Path) -> None:
        if not self.mortal:
            pytest.skip("its workers do not die alone")
        blocks = Blocks(tmp_path, dies=4)
        engine = self.start(blocks, stop=12)
        assert all(same(engine.next(), blocks.expected(v)) for v in range(12))
        assert engine.restarts == 1
        engine.close()

    def test_an_item_that_ends_every_worker_is_an_error(self, tmp_path: Path) -> None:
        if not self.mortal:
            pytest.skip("its workers do not die alone")
        blocks = Blocks(tmp_path, dies=4, times=99)
        engine = self.start(blocks)
        assert all(same(engine.next(), blocks.expected(v)) for v in range(4))
        with pytest.raises(WorkerLost, match="base batch 4 was begun by 3 workers") as caught:
            engine.next()
        assert caught.value.item == 4
        engine.close()

    def test_a_stuck_worker_loses_its_lease(self, tmp_path: Path) -> None:
        if not self.mortal:
            pytest.skip("a thread cannot be ended")
        blocks = Blocks(tmp_path, sticks=5)
        # Too few items for it to have a backup.
        engine = self.start(blocks, stop=7, lease_s=5.0)
        assert all(same(engine.next(), blocks.expected(v)) for v in range(7))
        assert engine.restarts == 1
        engine.close()

    def test_a_stuck_worker_does_not_hold_up_the_reader_while_another_is_idle(self, tmp_path: Path) -> None:
        if not self.mortal:
            pytest.skip("threads have no backups")
        blocks = Blocks(tmp_path, sticks=15)
        engine = self.start(blocks, stop=60)
        assert all(same(engine.next(), blocks.expected(v)) for v in range(60))
        assert blocks.made.count(15) == 2
        assert engine.restarts == 0
        engine.close()

    @pytest.mark.parametrize("workers", [1, 2, 5])
    def test_workers_do_not_change_a_batch(
        self, opened: tuple[HistoryStore, Any], wanted: list[str], workers: int
    ) -> None:
        reader = self.reader(opened, workers)
        batches = list(reader)
        assert [digest(b) for b in batches] == wanted
        ids = np.concatenate([b.request_id for b in batches])
        found, times = np.unique(ids, return_counts=True)
        assert len(found) == opened[1].rows()
        assert set(times.tolist()) == {2}
        assert reader.stats.versions_verified == len(ids)
        assert reader.stats.copied_bytes == 0

    def test_a_run_is_taken_up_by_another_engine(self, opened: tuple[HistoryStore, Any], wanted: list[str]) -> None:
        rng = np.random.default_rng(3)
        at = int(rng.integers(1, len(wanted) - 1))
        for engine, workers, other, others in ((self.choice(), 2, Threads(), 3), (Threads(), 1, self.choice(), 3)):
            one = loader(*opened, engine=engine, workers=workers, epochs=2, **SMALL)
            walk = iter(one)
            seen = [digest(next(walk)) for _ in range(at)]
            state = json.loads(json.dumps(one.state_dict()))
            one.close()
            two = loader(*opened, engine=other, workers=others, epochs=2, **SMALL)
            two.load_state_dict(state)
            assert seen + [digest(b) for b in two] == wanted

    def test_keys_of_events_that_all_see_are_there_when_asked_for(self, tmp_path: Path) -> None:
        world = make_world(tmp_path, users=4, days=4, late=0.0)
        with world.store() as store, world.table() as table:
            pairs = zip(loader(store, table, workers=1, **SMALL), self.reader((store, table), epochs=1), strict=True)
            for one, other in pairs:
                assert one.histories.exact.all()
                assert np.array_equal(one.histories.events.arrival, other.histories.events.arrival)
                assert np.array_equal(one.histories.events.hidden_from, other.histories.events.hidden_from)
                assert digest(one) == digest(other)

    def test_batches_of_a_constant_size_are_the_same(self, opened: tuple[HistoryStore, Any]) -> None:
        want = [digest(b) for b in loader(*opened, workers=1, batch_rows=10, **SMALL)]
        reader = self.reader(opened, batch_rows=10, epochs=1)
        assert [digest(b) for b in reader] == want
        assert len(reader) == len(want)

    def test_ranks_have_equally_many_batches_and_every_row_once(self, opened: tuple[HistoryStore, Any]) -> None:
        whole = [b.request_id.tolist() for b in loader(*opened, workers=1, epochs=1, **SMALL)]
        parts = []
        for rank in range(2):
            reader = self.reader(opened, 1 + rank, rank=rank, n_ranks=2, epochs=1)
            parts.append([b.request_id.tolist() for b in reader])
        assert len(parts[0]) == len(parts[1]) == len(whole)
        assert [list(chain.from_iterable(ranks)) for ranks in zip(*parts, strict=True)] == whole

    def test_a_batch_after_a_kill_is_the_same(self, opened: tuple[HistoryStore, Any], wanted: list[str]) -> None:
        if not self.mortal:
            pytest.skip("its workers do not die alone")
        rng, reader, seen, killed = np.random.default_rng(1), self.reader(opened), [], 0
        for batch in reader:
            seen.append(digest(batch))
            if killed < 1 and reader.engine is not None:
                killed += self.kill(reader.engine, rng)
        assert seen == wanted
        assert killed == 1

    def test_damage_is_named_as_by_threads(
        self, world: World, opened: tuple[HistoryStore, Any], tmp_path: Path
    ) -> None:
        with HistoryStore.create(tmp_path / "other", opened[0].schema, 2, sync=False) as other:
            # Histories of another store: versions do not fit, and the error names a user.
            some = opened[0].read([1, 4], world.end_ms, Projection(columns=("item", "brand")))
            rows = some.histories.events
            other.append(
                pa.table(
                    {
                        "user": np.repeat(rows.users, rows.lengths),
                        "ts": rows.event_ts + 1,
                        "item": rows.columns["item"].to_arrow(),
                        "brand": rows.columns["brand"].to_arrow(),
                    }
                )
            )
            other.compact()
            errors = []
            for choice in (Threads(), self.choice()):
                with pytest.raises((CorruptionError, InputError), match="user") as caught:
                    list(loader(other, opened[1], engine=choice, workers=2, **SMALL))
                errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]

    def test_erased_examples_go_by_policy(self, tmp_path: Path) -> None:
        world = make_world(tmp_path, users=5, days=5)
        with world.store() as store, world.table() as table:
            user = int(next(iter(loader(store, table, workers=1, **SMALL))).users[0])
            store.erase(events=[EventsOf(user, arrivals=[1, 2])], grace_s=0)
            with pytest.raises(Erased, match=f"of user {user} at") as caught:
                list(self.reader((store, table)))
            assert caught.value.user == user
            for policy in ("skip", "shorten"):
                want = [digest(b) for b in loader(store, table, workers=1, on_missing=policy, **SMALL)]
                assert [digest(b) for b in self.reader((store, table), on_missing=policy, epochs=1)] == want

    def test_a_filter_is_applied_once_for_all_workers(self, opened: tuple[HistoryStore, Any]) -> None:
        filters: dict[str, Any] = {"user_share": 0.5, "user_seed": 2, "epochs": 1}
        want = [digest(b) for b in loader(*opened, workers=1, **(SMALL | filters))]
        assert len(want) > 0
        assert [digest(b) for b in self.reader(opened, **filters)] == want

    def test_reads_are_counted_where_they_are_asked_for(
        self, opened: tuple[HistoryStore, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counted: list[tuple[int, int]] = []

        class Counter:
            def add(self, column_bytes: Any, requests: int, events: int) -> None:
                counted.append((requests, events))

        generation: Generation = opened[0].pin()
        monkeypatch.setattr(generation._archive, "usage", Counter())
        reader = loader(generation, opened[1], engine=self.choice(), workers=2, epochs=1, **SMALL)
        n = sum(len(b) for b in reader)
        assert sum(requests for requests, _ in counted) == n
        assert sum(events for _, events in counted) == reader.stats.events_delivered


def next_or_none(engine: Engine[Item]) -> Item | None:
    """The next item; None where there is no more."""
    try:
        return engine.next()
    except StopIteration:
        return None


def kinds(item: Item) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an item."""
    return {name: value for name, value in item.items() if isinstance(value, np.ndarray)}
