"""What the journal acknowledged is in the logs once, after any end; what it could not write is nowhere."""

from __future__ import annotations

import os
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError, InputError, NewerFormatError, Overloaded, StoreError
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import Impressions, Outcomes
from thinrow.history.store import HistoryStore
from thinrow.online.journal import Journal
from thinrow.schema import EventSchema, ExampleSchema

EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 50})


class World:
    def __init__(self, folder: Path) -> None:
        table = pa.table({"user": [1, 2], "ts": [5, 6], "item": [3, 4]})
        self.folder, self.schema = folder, EventSchema.infer(table.schema, user="user", time="ts")
        self.store = HistoryStore.create(folder / "s", self.schema, 1, sync=False)
        self.store.append(table)
        self.seen = self.store.snapshot([1], 100)

    def logs(self) -> tuple[ImpressionLog, OutcomeLog]:
        return ImpressionLog(self.folder / "i", self.schema, EXAMPLES), OutcomeLog(self.folder / "o")

    def journal(self, **options: Any) -> Journal:
        return Journal(self.folder / "j", *self.logs(), **options)

    def impression(self, number: int) -> Impressions:
        return Impressions.of(EXAMPLES, [number], self.seen, candidates={"item": [[number, 9]]})

    def logged(self) -> list[int]:
        return [int(i) for part in self.logs()[0].scan() for i in part.request_id]

    def outcomes(self) -> list[int]:
        return [int(i) for part in self.logs()[1].scan() for i in part.request_id]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_in_order_and_in_few_files(world: World) -> None:
    with world.journal() as journal:
        done = [journal.impressions(world.impression(i)) for i in range(200)]
        done.append(journal.outcomes(Outcomes.of("click", [3, 4], [3, 9], [110, 111])))
        assert [f.result(120) for f in done] == [1] * 200 + [2]
        assert world.logged() == []
    assert world.logged() == list(range(200))
    assert world.outcomes() == [3, 4]
    assert len(world.logs()[0].numbers()) == len(world.logs()[1].numbers()) == 1
    assert sorted(p.name for p in (world.folder / "j").iterdir()) == ["lock"]


def test_rolls_by_age_and_size(world: World) -> None:
    with world.journal(roll_s=0.05) as journal:
        journal.impressions(world.impression(1)).result(120)
        for _ in range(200):
            if world.logged():
                break
            threading.Event().wait(0.02)
        assert world.logged() == [1]
    with world.journal(roll_bytes=1) as journal:
        for i in (2, 3):
            journal.impressions(world.impression(i)).result(120)
    assert world.logged() == [1, 2, 3]
    assert len(world.logs()[0].numbers()) == 3


def test_many_threads(world: World) -> None:
    with world.journal() as journal:
        futures: list[Any] = []

        def send(first: int) -> None:
            futures.extend(journal.impressions(world.impression(first + i)) for i in range(25))

        threads = [threading.Thread(target=send, args=(100 * t,)) for t in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        wait(futures, 10)
    logged = world.logged()
    assert sorted(logged) == sorted(100 * t + i for t in range(4) for i in range(25))
    for t in range(4):
        assert [i for i in logged if i // 100 == t] == [100 * t + i for i in range(25)]


def left_by_a_kill(world: World, n: int) -> Path:
    """A journal file with ``n`` impressions and two outcomes, as a killed process leaves it."""
    journal = world.journal(roll_s=1e9)
    for i in range(n):
        journal.impressions(world.impression(i)).result(120)
    journal.outcomes(Outcomes.of("click", [0, 1], [0, 1], [110, 111])).result(120)
    path = next((world.folder / "j").glob("*.journal"))
    data = path.read_bytes()
    journal._held = []
    journal.close()
    path.write_bytes(data)
    return path


def test_a_killed_journal_goes_to_the_logs(world: World) -> None:
    path = left_by_a_kill(world, 3)
    # The last frame is torn: it was not acknowledged.
    path.write_bytes(path.read_bytes()[:-5])
    world.journal().close()
    assert (world.logged(), world.outcomes()) == ([0, 1, 2], [])
    assert not path.exists()


@pytest.mark.parametrize("rolled", [1, 3])
def test_what_was_brought_before_the_kill_is_not_brought_again(world: World, rolled: int) -> None:
    left_by_a_kill(world, 3)
    world.logs()[0].append(Impressions.concat([world.impression(i) for i in range(rolled)]))
    world.journal().close()
    assert (world.logged(), world.outcomes()) == ([0, 1, 2], [0, 1])


@pytest.mark.parametrize("again", [False, True])
def test_what_was_erased_from_the_log_after_the_kill_does_not_come_back(world: World, again: bool) -> None:
    journal = world.journal(roll_s=1e9)
    for i in range(3):
        journal.impressions(world.impression(i)).result(120)
    journal.outcomes(Outcomes.of("click", [0, 1], [0, 1], [110, 111])).result(120)
    path = next((world.folder / "j").glob("*.journal"))
    data = path.read_bytes()
    journal.close()
    # Killed after the files of the logs were there, before that of the journal was removed.
    path.write_bytes(data)
    impressions, outcomes = world.logs()
    assert impressions.rewrite(1, impressions.read(1).take(np.array([0, 2])))
    assert outcomes.rewrite(1, outcomes.read(1).take(np.array([False, True])))
    if again:
        # What was rewritten once is rewritten by a second erasure.
        assert impressions.rewrite(1, impressions.read(1).take(np.array([1])))
    world.journal().close()
    assert (world.logged(), world.outcomes()) == ([2] if again else [0, 2], [1])
    assert not path.exists()


def test_rows_that_were_brought_in_two_parts_are_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcomes' log refuses for a while, so that impressions of one journal file go to two files."""
    append, refusing = OutcomeLog.append, True

    def refused(self: OutcomeLog, *arguments: Any, **options: Any) -> int | None:
        if refusing:
            raise OSError("no space left")
        return append(self, *arguments, **options)

    monkeypatch.setattr(OutcomeLog, "append", refused)
    journal = world.journal(roll_bytes=1, roll_s=0.05)
    journal.outcomes(Outcomes.of("click", [0], [0], [110])).result(120)
    for i in range(2):
        journal.impressions(world.impression(i)).result(120)
        for _ in range(200):
            if len(world.logged()) == i + 1:
                break
            threading.Event().wait(0.02)
    path = next((world.folder / "j").glob("*.journal"))
    data = path.read_bytes()
    refusing = False
    journal.close()
    path.write_bytes(data)
    impressions, _ = world.logs()
    assert len(impressions.numbers()) == 2
    assert impressions.rewrite(1, impressions.read(1).take(np.array([], np.int64)))
    world.journal().close()
    assert (world.logged(), world.outcomes()) == ([1], [0])


def test_a_full_disk_refuses_and_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.journal(roll_s=1e9) as journal:
        journal.impressions(world.impression(1)).result(120)
        real = os.fsync

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="nothing of the call is there"):
            journal.impressions(world.impression(2)).result(120)
        monkeypatch.setattr(os, "fsync", real)
        # The file could not be mended either: nothing more is taken, what was acknowledged stays.
        assert journal.broken is not None
        with pytest.raises(StoreError, match="restart"):
            journal.impressions(world.impression(3)).result(120)
    assert world.logged() == [1]
    with world.journal() as journal:
        journal.impressions(world.impression(4)).result(120)
    assert world.logged() == [1, 4]


def test_refusals(world: World) -> None:
    with world.journal(waiting_bytes=1) as journal:
        with pytest.raises(StoreError, match="another process"):
            world.journal()
        journal._waiting = 5
        with pytest.raises(Overloaded, match="wait for the disk"):
            journal.impressions(world.impression(1))
        journal._waiting = 0
        with pytest.raises(InputError, match="exceeds int32"):
            journal.outcomes(Outcomes.of("click", [1], [1], 5, 1 << 40))
    with pytest.raises(StoreError, match="closed"):
        journal.impressions(world.impression(1))
    (world.folder / "j" / f"{7:016d}.journal").write_bytes(b"no head\n")
    with pytest.raises(CorruptionError, match="not the head"):
        world.journal()
    (world.folder / "j" / f"{7:016d}.journal").write_bytes(b'{"format": 9, "impressions": 1, "outcomes": 1}\n')
    with pytest.raises(NewerFormatError):
        world.journal()
    assert np.array_equal(world.logged(), [])


def test_a_log_that_others_damage_refuses_and_is_gone_on_with(world: World) -> None:
    """Not with callers that wait for ever for a thread that has ended."""
    stray = world.folder / "i" / "notes.txt"
    with world.journal(roll_s=0.05) as journal:
        journal.impressions(world.impression(1)).result(120)
        for _ in range(200):
            if world.logged():
                break
            threading.Event().wait(0.02)
        stray.write_text("mine")
        with pytest.raises(StoreError, match="move it away"):
            journal.impressions(world.impression(2)).result(120)
        stray.unlink()
        journal.impressions(world.impression(3)).result(120)
    assert world.logged() == [1, 3]


def test_a_log_that_takes_nothing_for_a_while_gets_it_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    append, refused = ImpressionLog.append, []

    def damaged_twice(log: ImpressionLog, records: Impressions, *, origin: str) -> int | None:
        if len(refused) < 2:
            refused.append(1)
            raise CorruptionError("missing", file="0000000000000001.log")
        return append(log, records, origin=origin)

    monkeypatch.setattr(ImpressionLog, "append", damaged_twice)
    with world.journal(roll_s=0.05) as journal:
        for i in (1, 2):
            journal.impressions(world.impression(i)).result(120)
            threading.Event().wait(0.3)
    assert len(refused) == 2
    assert world.logged() == [1, 2]


def test_a_log_that_takes_nothing_bounds_the_journal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    append, tries = ImpressionLog.append, []

    def fail(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise RuntimeError("no error that anybody expects")

    monkeypatch.setattr(ImpressionLog, "append", fail)
    with world.journal(roll_s=0.05, held_bytes=1) as journal:
        journal.impressions(world.impression(1)).result(120)
        while journal.broken is None:
            threading.Event().wait(0.01)
        with pytest.raises(StoreError, match="which its logs do not take"):
            journal.impressions(world.impression(2))
        monkeypatch.setattr(ImpressionLog, "append", append)
        while journal.broken is not None:
            threading.Event().wait(0.01)
        journal.impressions(world.impression(3)).result(120)
    assert tries
    assert world.logged() == [1, 3]


def test_no_error_ends_the_thread_that_writes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def fail(_: int) -> None:
        raise MemoryError("no room for anything")

    with world.journal() as journal:
        journal.impressions(world.impression(1)).result(120)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match="no room for anything"):
            journal.impressions(world.impression(2)).result(120)
        monkeypatch.setattr(os, "fsync", fsync)
        if journal.broken is None:
            journal.impressions(world.impression(3)).result(120)
    assert 2 not in world.logged()
    assert 1 in world.logged()


def test_a_schema_that_changes_between_two_calls(world: World) -> None:
    with world.journal() as journal:
        journal.impressions(world.impression(1)).result(120)
        world.store.evolve(add={"shop": {"trait": "categorical", "dtype": "string", "group": "g"}})
        world.seen = world.store.snapshot([1], 100)
        journal.impressions(world.impression(2)).result(120)
    assert world.logged() == [1, 2]
