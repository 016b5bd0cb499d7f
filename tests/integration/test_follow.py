"""Sessions that follow a log of splits: equal batches whenever splits came, whoever was killed or erased."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CommitConflict, CorruptionError, Erased, InputError, StoreError
from thinrow.dpp import Batch, Loader, SessionSpec, follow, loader
from thinrow.dpp.stream import StreamSource
from thinrow.examples.erase import erase_from_splits
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import ExampleBatch
from thinrow.examples.splits import SplitLog
from thinrow.examples.streaming import heartbeat, join_stream
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.history.missing import OnMissing
from thinrow.history.store import HistoryStore
from thinrow.schema import Projection
from thinrow.testing.world import EXAMPLES, World, make_world

SIZES = {"base_rows": 5, "block": 2, "threads": 2, "poll_s": 0.01}


def digest(batch: Batch) -> str:
    h = hashlib.sha256()
    names = ["event_ts", *batch.histories.events.columns]
    rows = {n: batch.histories.to_jagged(n).to_arrow().to_pylist() for n in names}
    rows |= {n: c.to_arrow().to_pylist() for n, c in batch.context.items()}
    for group in (batch.candidates, batch.labels):
        rows |= {n: c.to_arrow().to_pylist() for n, c in group.items()}
    h.update(repr((batch.t, batch.request_id.tolist(), batch.request_ts.tolist(), sorted(rows.items()))).encode())
    return h.hexdigest()


class _Stream:
    """The logs of a small world, given out day by day, and what the join made of them."""

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.world = path, world
        with world.table() as table:
            schema = table.event_schema
        made = world.store_path.parent
        self.days = list(ImpressionLog(made / "shown", schema, EXAMPLES).scan())
        self.bought = list(OutcomeLog(made / "bought").scan())
        self.shown, self.happened = ImpressionLog(path / "i", schema, EXAMPLES), OutcomeLog(path / "o")
        self.splits = SplitLog(path / "s", schema, EXAMPLES)

    def day(self, *, join: bool = True) -> None:
        day = self.days.pop(0)
        self.shown.append(day)
        self.happened.append(self.bought.pop(0))
        self.happened.append(heartbeat(int(day.snapshots.request_ts.max()) + 5_000))
        if join:
            join_stream(self.shown, self.happened, self.splits, 0)

    def rows(self) -> int:
        numbers = self.splits.numbers()
        last = self.splits.read(numbers[-1]) if numbers else None
        return 0 if last is None else last.rows_before + last.n_rows

    def all(self) -> _Stream:
        while self.days:
            self.day()
        self.splits.seal()
        return self


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), users=7, days=9)


@pytest.fixture(scope="module")
def expected(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The batches of a batch session: the order of one split of a table, over the whole log."""
    stream = _Stream(tmp_path_factory.mktemp("whole"), world).all()
    with world.store() as store:
        source = StreamSource(store, stream.splits, 0.01, 1.0)
        spec = SessionSpec("s", 0, 0, base_rows=5, block=2, interleave=1)
        return [digest(b) for b in Loader(spec, source)]


def test_batches_are_those_of_a_session_that_comes_later(world: World, expected: list[str], tmp_path: Path) -> None:
    stream = _Stream(tmp_path, world)
    got: list[str] = []
    with world.store() as store:
        session = follow(store, stream.splits, **SIZES)
        reader = threading.Thread(target=lambda: got.extend(digest(b) for b in session))
        reader.start()
        while stream.days:
            stream.day()
            time.sleep(0.02)
        stream.splits.seal()
        reader.join(300)
        assert got == expected
        assert len(got) == session.n_batches == 7


def test_it_goes_on_at_every_step_with_any_ranks(world: World, expected: list[str], tmp_path: Path) -> None:
    stream = _Stream(tmp_path, world)
    with world.store() as store:
        for _ in range(5):
            stream.day()
        states = [follow(store, stream.splits, **SIZES).state_dict()]
        session = follow(store, stream.splits, **SIZES)
        for batch, want in zip(islice(session, 3), expected, strict=False):
            assert digest(batch) == want
            states.append(json.loads(json.dumps(session.state_dict())))
        stream.all()
        for t, state in enumerate(states):
            again = follow(store, stream.splits, **{**SIZES, "threads": 1 + t})
            again.load_state_dict(state)
            assert [digest(b) for b in again] == expected[t:]
        halves = [follow(store, stream.splits, rank=r, n_ranks=2, **SIZES) for r in range(2)]
        for half in halves:
            half.load_state_dict(states[1])
        whole = follow(store, stream.splits, **SIZES)
        whole.load_state_dict(states[1])
        for batch, *parts in zip(whole, *halves, strict=True):
            assert batch.request_id.tolist() == [i for p in parts for i in p.request_id.tolist()]
        other = follow(store, stream.splits, **{**SIZES, "base_rows": 6})
        with pytest.raises(InputError, match="base_rows"):
            other.load_state_dict(states[1])


def test_a_log_that_stands_still_is_waited_for_or_told(world: World, expected: list[str], tmp_path: Path) -> None:
    stream = _Stream(tmp_path, world)
    with world.store() as store:
        session = follow(store, stream.splits, wait_s=0.1, **SIZES)
        stream.day()
        stream.day()
        got: list[str] = []
        with pytest.raises(StoreError, match=r"14 rows and had no new split for 0.1 s"):
            got.extend(digest(b) for b in session)
        stream.all()
        got.extend(digest(b) for b in session)
        assert got[-len(expected) + 1 :] == expected[1:]


def test_leaving_does_not_wait_for_splits(world: World, tmp_path: Path) -> None:
    stream = _Stream(tmp_path, world)
    stream.day()
    stream.day()
    with world.store() as store, follow(store, stream.splits, **SIZES) as session:
        assert len(next(iter(session))) == 10
    assert not [t for t in threading.enumerate() if t.name.startswith("thinrow-dpp")]


def test_a_killed_session_goes_on_where_it_was(world: World, expected: list[str], tmp_path: Path) -> None:
    stream, rng = _Stream(tmp_path, world), np.random.default_rng(3)
    command = [sys.executable, __file__, str(tmp_path), str(world.store_path), str(world.table_path)]
    seen: dict[int, str] = {}

    def lines(process: subprocess.Popen[str]) -> Iterator[tuple[int, str]]:
        assert process.stdout is not None
        for line in process.stdout:
            t, found = line.split()
            yield int(t), found

    for _ in range(4):
        stream.day()
    for kills in range(3):
        if kills == 1:
            # The first one may have yielded all that there was.
            for _ in range(3):
                stream.day()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            if kills == 2:
                stream.all()
                seen.update({t: d for t, d in lines(process) if seen.get(t, d) == d})
                assert process.wait(300) == 0
            else:
                # Killed once a batch has come, at whatever it does next; it may have yielded more by then.
                for t, found in lines(process):
                    assert seen.setdefault(t, found) == found
                    time.sleep(float(rng.random()) * 0.02)
                    process.send_signal(signal.SIGKILL)
    assert [seen[t] for t in sorted(seen)] == expected


def test_erasure_takes_the_erased_rows_and_nothing_else(world: World, tmp_path: Path) -> None:
    stream = _Stream(tmp_path, world).all()
    with world.store() as store:
        before = list(follow(store, stream.splits, **SIZES))
        user = int(before[0].users[0])
        done = erase_from_splits(stream.splits, store.pin(), np.array([user]))
        assert done.removed == 9
        with pytest.raises(Erased):
            list(follow(store, stream.splits, **SIZES))
        after = list(follow(store, stream.splits, on_missing="skip", **SIZES))
    assert len(after) == len(before)
    for whole, left in zip(before, after, strict=True):
        stays = np.flatnonzero(np.asarray(whole.users) != user)
        assert left.request_id.tolist() == whole.request_id[stays].tolist()
        assert digest(left) == digest(whole.take(stays, whole.t))


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_erasure_while_a_session_runs(world: World, tmp_path: Path, policy: OnMissing) -> None:
    """Of a user who is erased between two batches, whatever comes later has nothing, though splits were read before."""
    stream = _Stream(tmp_path, world).all()
    shutil.copytree(world.store_path, tmp_path / "store")
    with HistoryStore.open(tmp_path / "store") as store:
        before = list(follow(store, stream.splits, **SIZES))
        user = int(before[-1].users[0])
        session = follow(store, stream.splits, on_missing=policy, **SIZES)
        batches = iter(session)
        assert digest(next(batches)) == digest(before[0])
        store.erase([user], grace_s=0)
        erase_from_splits(stream.splits, store.pin(), np.array([user]))
        if policy == "fail":
            with pytest.raises(Erased):
                list(batches)
            return
        after = list(batches)
    assert len(after) == len(before) - 1
    # What the workers had rebuilt when the erasure came is on its way.
    ahead = session.spec.window // session.spec.block
    for whole, left in zip(before[1 + ahead :], after[ahead:], strict=True):
        stays = np.flatnonzero(np.asarray(whole.users) != user)
        assert digest(left) == digest(whole.take(stays, whole.t))


def test_a_slow_trainer_stops_the_workers(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, rebuilt, rebuild = _Stream(tmp_path, world).all(), [], StreamSource.rebuild
    monkeypatch.setattr(StreamSource, "rebuild", lambda *args: rebuilt.append(1) or rebuild(*args))
    with world.store() as store:
        session = follow(store, stream.splits, **{**SIZES, "base_rows": 1, "block": 1, "threads": 1})
        batches = iter(session)
        for n in range(1, 4):
            next(batches)
            time.sleep(0.3)
            assert len(rebuilt) <= n + session.spec.window < 63
        assert len(list(batches)) == 60


def test_a_killed_join_loses_and_doubles_nothing(world: World, tmp_path: Path) -> None:
    stream, rng, got = _Stream(tmp_path, world), np.random.default_rng(4), []
    shown = [int(i) for day in stream.days for i in day.request_id]
    command = [sys.executable, __file__, str(tmp_path), "join", str(world.table_path)]
    with world.store() as store:
        session = follow(store, stream.splits, **SIZES)
        reader = threading.Thread(target=lambda: got.extend((digest(b), b.request_id.tolist()) for b in session))
        reader.start()
        while stream.days or stream.rows() < len(shown):
            with subprocess.Popen(command, stdout=subprocess.PIPE) as joiner:
                assert joiner.stdout is not None
                joiner.stdout.readline()
                for _ in range(int(rng.integers(1, 4))):
                    if stream.days:
                        stream.day(join=False)
                    time.sleep(float(rng.random()) * 0.05)
                joiner.send_signal(signal.SIGKILL)
        stream.splits.seal()
        reader.join(300)
        assert sorted(i for _, ids in got for i in ids) == sorted(shown)
        assert [d for d, _ in got] == [digest(b) for b in follow(store, stream.splits, **SIZES)]


def _examples(batches: Iterable[Batch]) -> dict[int, str]:
    """Request id -> everything that its example has, bit for bit."""
    found: dict[int, str] = {}
    for batch in batches:
        for i, request in enumerate(batch.request_id.tolist()):
            assert request not in found
            found[request] = digest(batch.take(np.array([i]), 0))
    return found


def test_a_batch_session_over_the_table_of_the_same_join_has_the_same_examples(world: World, tmp_path: Path) -> None:
    """Each example is equal bit for bit, history, candidates and labels; which batch it is in differs: the stream has
    the order in which requests closed, the table that of buckets and users."""
    stream = _Stream(tmp_path, world)
    with world.table() as made:
        schema = made.event_schema
    published = ExampleTable.create(tmp_path / "t", event_schema=schema, example_schema=EXAMPLES, n_buckets=2)
    live: list[Batch] = []
    with world.store() as store, published as table:
        session = follow(store, stream.splits, projection=Projection(max_len=20), **SIZES)
        reader = threading.Thread(target=lambda: live.extend(session))
        reader.start()
        while stream.days:
            stream.day()
            join_stream(stream.shown, stream.happened, table, 0)
        stream.splits.seal()
        reader.join(300)
        batches = list(loader(store, table, max_len=20, base_rows=5, block=2, batch_rows=10))
        assert len(batches) == len(live) == 7
        assert _examples(batches) == _examples(live)
        assert sorted(_examples(live)) == list(range(63))
        assert [b.request_id.tolist() for b in batches] != [b.request_id.tolist() for b in live]


def _counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    calls: list[int] = []
    real = getattr(SplitLog, name)
    monkeypatch.setattr(SplitLog, name, lambda self, *args: calls.append(args[0] if args else 0) or real(self, *args))
    return calls


def test_opening_reads_what_it_goes_on_with_and_waiting_lists_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _Stream(tmp_path, world).all()
    whole = [s.examples for s in stream.splits.scan() if len(s.examples)]
    rows = ExampleBatch.concat(whole)
    log = SplitLog(tmp_path / "many", stream.splits.event_schema, EXAMPLES)
    number = None
    for i in range(600):
        # Every third split is one of outcomes that were counted, without rows.
        part = rows.take(np.array([i % len(rows)] if i % 3 else [], np.int64))
        number = log.append_after(number, part, "{}")
    with world.store() as store:
        session = follow(store, log, **{**SIZES, "threads": 1})
        expected = [digest(b) for b in islice(session, 40)]
        state = {**session.state_dict(), "t": 29}
        session.close()
        reads, lists = _counted(monkeypatch, "read"), _counted(monkeypatch, "numbers")
        again = follow(store, SplitLog(tmp_path / "many", stream.splits.event_schema, EXAMPLES), **SIZES)
        again.load_state_dict(state)
        assert reads == [600]
        assert digest(next(iter(again))) == expected[30]
        again.close()
        # Halving, then what the workers read ahead.
        assert len(reads) < 60
        waiting = follow(store, log, **SIZES, wait_s=0.2)
        waiting.load_state_dict({**state, "t": 39})
        assert not lists
        reads.clear()
        with pytest.raises(StoreError, match="400 rows"):
            list(waiting)
        # The newest when it was opened, nothing while it waits; in the end each worker lists, for a split that is lost.
        assert len(reads) < 20
        assert len(lists) <= 2


def test_splits_that_were_pruned_before_they_were_read_are_not_skipped(world: World, tmp_path: Path) -> None:
    stream = _Stream(tmp_path, world)
    stream.day()
    stream.day()
    with world.store() as store:
        session = follow(store, stream.splits, on_missing="skip", **SIZES)
        batches = iter(session)
        assert len(next(batches)) == 10
        batches.close()
        stream.all()
        SplitLog(tmp_path / "s", stream.splits.event_schema, EXAMPLES).prune(8)
        with pytest.raises(InputError, match=r"row \d+ of splits .* was pruned, it begins at \d+"):
            list(session)


def test_splits_that_are_done_can_be_pruned(world: World, expected: list[str], tmp_path: Path) -> None:
    stream = _Stream(tmp_path, world)
    with world.store() as store:
        assert follow(store, stream.splits, **SIZES).splits_done() == 0
        stream.all()
        session = follow(store, stream.splits, **SIZES)
        done = [session.splits_done()]
        for batch, want in zip(session, expected, strict=True):
            assert digest(batch) == want
            done.append(session.splits_done())
            stream.splits.prune(done[-1])
            again = follow(store, stream.splits, **SIZES)
            again.load_state_dict(session.state_dict())
            assert [digest(b) for b in again] == expected[batch.t + 1 :]
        # Days of 7 requests are splits, batches have 10 rows.
        assert done == [1, 2, 3, 5, 6, 8, 9, 10]
        with pytest.raises(InputError, match="was pruned"):
            follow(store, stream.splits, **SIZES).splits_done()


def test_a_lost_split_is_told_while_the_log_is_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinrow.dpp.stream._LIST_S", 0.1)
    stream = _Stream(tmp_path, world)
    stream.day()
    with world.store() as store:
        session = follow(store, stream.splits, **SIZES)
        stream.all()
        for number in (2, 3):
            (tmp_path / "s" / f"{number:016d}.log").unlink()
        with pytest.raises(CorruptionError, match="missing"):
            list(session)


def test_a_late_pin_does_not_take_a_newer_one_back(world: World, tmp_path: Path) -> None:
    """A worker that found its generation collected pins anew, slowly; meanwhile a split came, with a newer one."""
    stream = _Stream(tmp_path, world).all()

    class Slow:
        def __init__(self, store: HistoryStore) -> None:
            self.store, self.slow = store, threading.Event()
            self.go = threading.Event()

        def pin(self) -> Generation:
            found = self.store.pin()
            if self.slow.is_set():
                self.slow.clear()
                self.go.wait(10)
            return found

    shutil.copytree(world.store_path, tmp_path / "store")
    with HistoryStore.open(tmp_path / "store") as store:
        slow = Slow(store)
        source = StreamSource(slow, stream.splits, 0.01, 1.0)
        slow.slow.set()
        late = threading.Thread(target=source._pin)
        late.start()
        while slow.slow.is_set():
            time.sleep(0.001)
        store.append(pa.table({"user": [1], "ts": [world.end_ms], "item": [1], "brand": ["b"]}))
        store.compact()
        newest = source._pin().number
        slow.go.set()
        late.join()
        assert source._generation.number == newest == store.pin().number


def test_the_log_keeps_its_order_and_its_end(world: World, tmp_path: Path) -> None:
    stream = _Stream(tmp_path, world)
    stream.day()
    number, state = stream.splits.join_state()
    assert number is not None
    assert state is not None
    examples = stream.splits.read(number).examples
    with pytest.raises(CommitConflict):
        stream.splits.append_after(number - 1 or None, examples, state)
    assert stream.splits.append_after(number, examples.take(np.arange(0)), state) == number + 1
    last = stream.splits.seal()
    assert stream.splits.seal() == last == number + 2
    with pytest.raises(StoreError, match="sealed"):
        stream.splits.append_after(last, examples, state)
    file = tmp_path / "s" / f"{number:016d}.log"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="torn"):
        stream.splits.read(number)


def _follow(place: Path, store: Path, table: Path) -> None:
    """The process that is killed: prints each batch, then stores where it stands."""
    with ExampleTable.open(table) as opened:
        schema = opened.event_schema
    session = follow(HistoryStore.open(store), SplitLog(place / "s", schema, EXAMPLES), **SIZES)
    if (place / "state").exists():
        session.load_state_dict(json.loads((place / "state").read_text()))
    for batch in session:
        print(batch.t, digest(batch), flush=True)
        (place / "new").write_text(json.dumps(session.state_dict()))
        os.replace(place / "new", place / "state")


def _join(place: Path, table: Path) -> None:
    """The join that is killed, at whatever it does after its first step."""
    with ExampleTable.open(table) as opened:
        schema = opened.event_schema
    while True:
        logs = ImpressionLog(place / "i", schema, EXAMPLES), OutcomeLog(place / "o")
        join_stream(*logs, SplitLog(place / "s", schema, EXAMPLES), 0)
        print("joined", flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "join":
        _join(Path(sys.argv[1]), Path(sys.argv[3]))
    _follow(*map(Path, sys.argv[1:]))
