"""Pins, garbage collection and revocation, interleaved at every single call of the object store."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.core.clock import system_clock
from thinrow.core.errors import (
    CommitConflict,
    Erased,
    InputError,
    ObjectNotFound,
    StoreError,
    StoreExists,
    StoreNotFound,
)
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.hides import Hides
from thinrow.history.archive.layout import SegmentInfo
from thinrow.history.archive.verify import verify_generation
from thinrow.jagged import HIDE_DTYPE, Events
from thinrow.jagged.events import never_hidden
from thinrow.schema import EventSchema
from thinrow.storage.objects import MemoryObjects
from thinrow.storage.pins import Pins
from thinrow.testing.segments import write_segment

SCHEMA = EventSchema((), user_kind="int64")
NO_HIDES = Hides(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, HIDE_DTYPE))


class Clock:
    """Beside that of the object store, which is the machine's."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> int:
        return system_clock() + self.ahead_ms


class Interrupted(MemoryObjects):
    """Runs ``then`` just before call number ``at`` (from 0) of the collector's."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.then, self.calls = -1, lambda: None, 0

    def arm(self, at: int, then: Callable[[], Any]) -> None:
        self.at, self.then, self.calls = at, then, 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("put", "put_if_absent", "get", "size", "list", "entries", "delete", "sweep"):
            self.calls += 1
            if self.calls == self.at + 1:
                self.at = -1
                self.then()
        return found


def opened(objects: MemoryObjects, clock: Clock | None = None) -> Archive:
    return Archive(objects, pins=Pins(objects, clock or Clock(), lease_ms=60_000, skew_ms=0))


def created(objects: MemoryObjects, clock: Clock | None = None) -> Archive:
    Archive.create(objects, SCHEMA, 1)
    return opened(objects, clock)


def segment(archive: Archive, user: int) -> SegmentInfo:
    events = Events(np.array([user]), np.array([0, 1]), np.array([5]), np.array([1]), never_hidden(1), {})
    return write_segment(archive.objects, f"segments/{user}.seg", events, NO_HIDES, SCHEMA, bucket=0, n_buckets=1)


def replace(archive: Archive, user: int) -> Generation:
    """A generation of one new segment."""
    with archive.writing() as base:
        return archive.commit(base, {0: [segment(archive, user)]}, "test")


def check(archive: Archive, number: int, user: int) -> None:
    generation = archive.generation(number)
    assert generation.users().tolist() == [user]


def named(objects: MemoryObjects, prefix: str) -> list[str]:
    return [n.removeprefix(prefix) for n in objects.list(prefix)]


def test_old_generations_and_their_files_go() -> None:
    objects = MemoryObjects()
    archive = created(objects)
    for user in (1, 2, 3, 4):
        replace(archive, user)
    objects.put("segments/orphan.seg", b"xyz")
    archive = opened(objects)
    planned = archive.collect_garbage(keep=2, grace_s=0, dry_run=True)
    assert len(objects.list("manifests/")) == 5
    report = archive.collect_garbage(keep=2, grace_s=0)
    assert report == planned
    assert report.generations == (1, 2, 3)
    assert report.objects == ("segments/1.seg", "segments/2.seg", "segments/orphan.seg")
    assert report.bytes > 3
    assert archive.numbers() == [4, 5]
    check(archive, 4, 3)
    check(archive, 5, 4)
    with pytest.raises(ObjectNotFound):
        archive.generation(3)
    with pytest.raises(StoreExists):
        Archive.create(objects, SCHEMA, 1)


def test_what_is_young_stays() -> None:
    objects, clock = MemoryObjects(), Clock()
    archive = created(objects, clock)
    for user in (1, 2):
        replace(archive, user)
    objects.put("segments/unfinished.seg", b"xyz")
    archive = opened(objects, clock)
    assert archive.collect_garbage(keep=1, grace_s=60).objects == ()
    assert archive.numbers() == [1, 2, 3]
    clock.ahead_ms = 61_000
    assert archive.collect_garbage(keep=1, grace_s=60).objects == ("segments/1.seg", "segments/unfinished.seg")


@pytest.mark.parametrize(("keep", "grace_s"), [(0, 0), (1, -1)])
def test_bounds(keep: int, grace_s: float) -> None:
    with pytest.raises(InputError, match="keep must be 1 or more"):
        created(MemoryObjects()).collect_garbage(keep=keep, grace_s=grace_s)


def test_an_empty_store_has_no_garbage() -> None:
    with pytest.raises(StoreNotFound):
        opened(MemoryObjects()).collect_garbage()


def test_a_held_generation_stays_until_it_is_let_go() -> None:
    objects = MemoryObjects()
    archive, other = created(objects), opened(objects)
    replace(archive, 1)
    with archive.hold(archive.pin(), "a trainer") as held, archive.hold(held):
        number = held.number
        for user in (2, 3, 4):
            replace(archive, user)
        assert other.holders() == [(number, "a trainer", False)]
        assert len(objects.list("pins/")) == 1
        assert other.collect_garbage(keep=1, grace_s=0).pinned == (number,)
        check(other, number, 1)
        # The next collection finds it held still, no longer in the log.
        assert other.collect_garbage(keep=1, grace_s=0).pinned == (number,)
        assert named(objects, "segments/") == ["1.seg", "4.seg"]
        with pytest.raises(ObjectNotFound, match="take a newer one"), other.hold(held):
            pass
    assert objects.list("pins/") == []
    assert other.collect_garbage(keep=1, grace_s=0).generations == (number,)
    assert named(objects, "segments/") == ["4.seg"]


def test_what_this_process_has_in_hand_stays() -> None:
    objects = MemoryObjects()
    archive = created(objects)
    old = replace(archive, 1)
    replace(archive, 2)
    assert archive.collect_garbage(keep=1, grace_s=0).pinned == (old.number,)
    assert old.users().tolist() == [1]


def test_a_dead_holder_holds_for_its_lease_only() -> None:
    objects, clock = MemoryObjects(), Clock()
    archive = created(objects, clock)
    replace(archive, 1)
    dead = opened(objects, clock)
    dead._pins.take(dead.pin().number)
    dead._pins.take(dead.pin().number, writes=True)
    del dead
    replace(archive, 2)
    archive = opened(objects, clock)
    assert archive.collect_garbage(keep=1, grace_s=0).objects == ()
    clock.ahead_ms = 59_000
    assert archive.collect_garbage(keep=1, grace_s=0).objects == ()
    clock.ahead_ms = 61_000
    assert archive.collect_garbage(keep=1, grace_s=0).objects == ("segments/1.seg",)
    assert objects.list("pins/") == []


def test_pins_are_renewed_while_the_holder_lives() -> None:
    objects, clock = MemoryObjects(), Clock()
    archive = created(objects, clock)
    replace(archive, 1)
    other = opened(objects, clock)
    with other.hold(other.pin()) as held:
        number = held.number
        replace(archive, 2)
        for seconds in (40, 80, 120):
            clock.ahead_ms = 1000 * seconds
            other._pins.renew()
            archive.collect_garbage(keep=1, grace_s=0)
            check(archive, number, 1)
        # A holder that stood still for too long does not come back: its files may be gone.
        clock.ahead_ms += 70_000
        other._pins.renew()
        assert archive.holders() == []


def test_the_newest_is_found_whatever_was_collected() -> None:
    objects = MemoryObjects()
    archive = created(objects)
    idle = opened(objects)
    first = idle.pin()
    with idle.hold(first):
        for user in (1, 2, 3):
            replace(archive, user)
        opened(objects).collect_garbage(keep=1, grace_s=0)
        assert idle.pin().number == 4
    idle._pinned = first
    opened(objects).collect_garbage(keep=1, grace_s=0)
    assert idle.pin().number == 4


def test_a_number_that_was_taken_never_comes_free() -> None:
    objects, clock = MemoryObjects(), Clock()
    archive, slow = created(objects, clock), opened(objects, clock)
    with slow.writing() as base:
        info = segment(slow, 9)
        for user in (1, 2, 3):
            replace(archive, user)
        # Stood still for longer than its lease: what it builds on is gone, and number base + 1 with it.
        clock.ahead_ms = 100_000
        opened(objects, clock).collect_garbage(keep=1, grace_s=0)
        assert archive.numbers() == [4]
        with pytest.raises(StoreError, match="collected meanwhile"):
            slow.commit(base, {0: [info]}, "late")
        with pytest.raises(CommitConflict):
            slow.commit(base, {}, "late")
    assert archive.numbers() == [4]
    check(archive, 4, 3)


def collector_calls() -> int:
    objects = Interrupted()
    archive = created(objects)
    for user in (1, 2, 3):
        replace(archive, user)
    archive = opened(objects)
    objects.arm(-1, lambda: None)
    archive.collect_garbage(keep=1, grace_s=0)
    return objects.calls


def test_a_reader_at_any_moment_of_a_collection() -> None:
    """Whoever holds a generation can read it, whenever the collector comes."""
    held = 0
    for at, number in itertools.product(range(collector_calls()), (2, 3, 4)):
        objects = Interrupted()
        archive = created(objects)
        for user in (1, 2, 3):
            replace(archive, user)
        archive, reader = opened(objects), opened(objects)
        body = reader.generation(number)
        with ExitStack() as stack:
            refused: list[Exception] = []

            def hold(reader=reader, body=body, stack=stack, refused=refused) -> None:  # type: ignore[no-untyped-def]
                try:
                    stack.enter_context(reader.hold(body))
                except ObjectNotFound as e:
                    refused.append(e)

            objects.arm(at, hold)
            archive.collect_garbage(keep=1, grace_s=0)
            if not refused:
                held += 1
                check(opened(objects), number, number - 1)
                archive.collect_garbage(keep=1, grace_s=0)
                check(opened(objects), number, number - 1)
        check(opened(objects), 4, 3)
    assert held > collector_calls()


def write_during_a_collection(at: int, later: int) -> None:
    objects = Interrupted()
    archive = created(objects)
    for user in (1, 2, 3):
        replace(archive, user)
    archive, writer = opened(objects), opened(objects)
    # As a writer that has not looked for a while.
    writer._pinned = writer.generation(2)
    bases: list[Generation] = []

    def begin() -> None:
        bases.append(stack.enter_context(writer.writing()))
        objects.arm(later, commit)

    def commit() -> None:
        objects.arm(-1, commit)
        base = bases.pop()
        writer.commit(base, {0: [*(i for _, i in base.segments), segment(writer, 9)]}, "test")

    with ExitStack() as stack:
        objects.arm(at, begin)
        archive.collect_garbage(keep=1, grace_s=0)
        if bases:
            commit()
        archive.collect_garbage(keep=1, grace_s=0)
    archive.collect_garbage(keep=1, grace_s=0)
    assert archive.numbers() == [5]
    assert opened(objects).generation(5).users().tolist() == [3, 9]


def test_a_writer_at_any_moment_of_a_collection() -> None:
    """What a writer writes and commits while garbage is collected is there afterwards, under a number of its own."""
    for at, later in itertools.product(range(collector_calls()), (1, 2, 5, 100)):
        write_during_a_collection(at, later)


def test_a_writer_that_stood_still_for_longer_than_its_pin_commits_nothing_that_is_gone() -> None:
    for call in itertools.count():
        objects, clock = Interrupted(), Clock()
        writer = created(objects, clock)
        with writer.writing() as base:
            written = segment(writer, 1)
            clock.ahead_ms = 61_000
            collector = opened(objects, clock)
            objects.arm(call, lambda c=collector: c.collect_garbage(keep=1, grace_s=0))
            refused = None
            try:
                writer.commit(base, {0: [written]}, "late")
            except StoreError as e:
                refused = e
            met = objects.at == -1
        newest = opened(objects).pin()
        assert {info.name for _, info in newest.segments} <= set(objects.list("segments/"))
        assert newest.number == (2 if refused is None else 1)
        if call == 0:
            assert "run again" in str(refused)
        if not met:
            assert refused is None
            return


def test_a_writer_may_build_on_what_was_written_long_before() -> None:
    objects, clock = MemoryObjects(), Clock()
    writer = created(objects, clock)
    written = segment(writer, 1)
    clock.ahead_ms = 10 * 3_600_000
    with writer.writing(since_ms=0) as base:
        assert opened(objects, clock).collect_garbage(keep=1, grace_s=0).objects == ()
        assert writer.commit(base, {0: [written]}, "resumed").number == 2


def test_a_collector_that_is_killed_at_any_moment() -> None:
    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    for at in range(collector_calls()):
        objects = Interrupted()
        archive = created(objects)
        for user in (1, 2, 3):
            replace(archive, user)
        archive, reader = opened(objects), opened(objects)
        with reader.hold(reader.generation(3)):
            objects.arm(at, kill)
            with pytest.raises(Killed):
                archive.collect_garbage(keep=1, grace_s=0)
            check(opened(objects), 3, 2)
            check(opened(objects), 4, 3)
            archive.collect_garbage(keep=1, grace_s=0)
            check(opened(objects), 3, 2)
            assert named(objects, "segments/") == ["2.seg", "3.seg"]
        assert archive.collect_garbage(keep=1, grace_s=0).objects == ("segments/2.seg",)


def test_two_collectors_at_once() -> None:
    for at in range(collector_calls()):
        objects = Interrupted()
        archive = created(objects)
        for user in (1, 2, 3):
            replace(archive, user)
        archive, other, reader = opened(objects), opened(objects), opened(objects)
        with reader.hold(reader.generation(3)):
            objects.arm(at, lambda other=other: other.collect_garbage(keep=2, grace_s=0))
            archive.collect_garbage(keep=1, grace_s=0)
            check(opened(objects), 3, 2)
            check(opened(objects), 4, 3)
        assert opened(objects).pin().number == 4
        archive.collect_garbage(keep=1, grace_s=0)
        assert archive.numbers() == [4]
        assert named(objects, "segments/") == ["3.seg"]


@pytest.mark.parametrize("retired", [False, True])
def test_a_reader_that_ends_between_two_collectors(retired: bool) -> None:
    """One collector saw the pin, the other one saw it end, and removed what the first is about to keep."""
    for at in range(collector_calls()):
        objects = Interrupted()
        archive = created(objects)
        for user in (1, 2, 3):
            replace(archive, user)
        archive, other, reader = opened(objects), opened(objects), opened(objects)
        with ExitStack() as held:
            held.enter_context(reader.hold(reader.generation(3)))
            if retired:
                other.collect_garbage(keep=1, grace_s=0)

            def end(held: ExitStack = held, other: Archive = other) -> None:
                held.close()
                other.collect_garbage(keep=1, grace_s=0)

            objects.arm(at, end)
            archive.collect_garbage(keep=1, grace_s=0)
        archive.collect_garbage(keep=1, grace_s=0)
        assert archive.numbers() == [4]
        assert named(objects, "segments/") == ["3.seg"]
        assert objects.list("retired/") == []


def test_revoked_generations_are_erased_to_their_readers() -> None:
    objects, clock = MemoryObjects(), Clock()
    archive, reader = created(objects, clock), opened(objects, clock)
    replace(archive, 1)
    with reader.hold(reader.pin()) as held:
        newest = replace(archive, 2)
        archive.revoke(newest.number, grace_s=0.2)
        assert archive.collect_garbage(keep=1, grace_s=0).objects == ("segments/1.seg",)
        clock.ahead_ms = 1000
        reader._pins.renew()
        with pytest.raises(Erased, match=f"generation {held.number} was revoked.*generation {newest.number}"):
            held.users()
    assert reader.pin().users().tolist() == [2]
    with pytest.raises(Erased), reader.hold(held):
        pass


def test_what_went_while_it_was_verified_is_no_damage() -> None:
    objects = MemoryObjects()
    archive, reader = created(objects), opened(objects)
    replace(archive, 1)
    old = reader.pin()
    replace(archive, 3)
    archive.collect_garbage(keep=1, grace_s=0)
    with pytest.raises(ObjectNotFound, match=f"generation {old.number} was collected while it was verified"):
        verify_generation(old)
    old = reader.pin()
    archive.revoke(replace(archive, 4).number)
    archive.collect_garbage(keep=1, grace_s=0)
    with pytest.raises(Erased):
        verify_generation(old)


def test_without_holders_revocation_waits_for_nobody() -> None:
    objects = MemoryObjects()
    archive, reader = created(objects), opened(objects)
    replace(archive, 1)
    old = reader.pin()
    newest = replace(archive, 2)
    archive.revoke(newest.number, grace_s=3_600)
    archive.collect_garbage(keep=1, grace_s=0)
    assert named(objects, "segments/") == ["2.seg"]
    with pytest.raises((Erased, ObjectNotFound)):
        old.users()


_FORKS = """
import os, sys, time
from thinrow.storage.objects import LocalObjects
from thinrow.storage.pins import Pins
pins = Pins(LocalObjects(sys.argv[1]), lease_ms=600, skew_ms=0)
first = pins.take(1)
child = os.fork()
if child == 0:
    second = pins.take(2)
    ends = second.record.expires_ms
    for _ in range(1000):
        if second.record.expires_ms > ends:
            os._exit(0)
        time.sleep(0.01)
    os._exit(1)
first.release()
print(os.waitpid(child, 0)[1], [p.number for p in pins.live() if p.number == 1])
"""


def test_a_forked_process_renews_its_own_pins_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "0 []\n"
