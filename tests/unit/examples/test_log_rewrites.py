"""Logs that are erased from, pruned and joined at once: nothing is lost, doubled or brought back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.cli.main import cli
from thinrow.core.errors import CommitConflict, CorruptionError, ObjectNotFound
from thinrow.examples import joiner, streaming
from thinrow.examples.erase import erase_everywhere, erase_from_log, erase_from_splits
from thinrow.examples.log import ImpressionLog, OutcomeLog, file_name, verify_log
from thinrow.examples.records import Outcomes
from thinrow.examples.splits import SplitLog
from thinrow.examples.streaming import heartbeat, join_stream
from thinrow.examples.table import ExampleTable
from thinrow.storage.objects import LocalObjects, MemoryObjects
from thinrow.testing.world import EXAMPLES, make_world

VICTIM = 4


class _Logs:
    """A store of four users, and the logs of their requests as one file each; nothing is joined yet."""

    def __init__(self, path: Path) -> None:
        world = make_world(path / "world", users=4, days=3)
        self.store, self.end_ms = world.store(), world.end_ms
        schema = self.store.schema
        made = ImpressionLog(path / "world/shown", schema, EXAMPLES), OutcomeLog(path / "world/bought")
        self.shown, self.bought = ImpressionLog(path / "i", schema, EXAMPLES), OutcomeLog(path / "o")
        self.requests = [r for part in made[0].scan() for r in part.request_id.tolist()]
        self.victims = [r for p in made[0].scan() for r in p.request_id[p.snapshots.users == VICTIM].tolist()]
        rows = list(made[0].scan())
        self.shown.append(type(rows[0]).concat(rows))
        self.bought.append(Outcomes.concat(list(made[1].scan())))
        self.bought.append(heartbeat(self.end_ms + 10_000))
        self.splits = SplitLog(path / "s", schema, EXAMPLES)

    def erase(self, *, splits: bool = True, tables: tuple[ExampleTable, ...] = ()) -> Any:
        logs = {"impressions": [self.shown], "outcomes": [self.bought], "tables": list(tables)}
        kept: list[Any] = []

        def also(generation: Any, whole: Any) -> None:
            kept.append(erase_everywhere(generation, whole, **logs, splits=[self.splits] if splits else []))

        self.store.erase([VICTIM], also=also, grace_s=0)
        return kept[0]

    def joined(self) -> list[int]:
        return sorted(r for split in self.splits.scan() for r in split.examples.request_id.tolist())

    def others(self) -> list[int]:
        return sorted(set(self.requests) - set(self.victims))


@pytest.fixture
def logs(tmp_path: Path) -> _Logs:
    return _Logs(tmp_path)


def _once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, act: Callable[[], Any]) -> None:
    """``act`` before the first call of ``where.name``."""
    real, done = getattr(where, name), []

    def first(*args: Any, **named: Any) -> Any:
        if not done:
            done.append(1)
            act()
        return real(*args, **named)

    monkeypatch.setattr(where, name, first)


@pytest.mark.parametrize("name", ["load_impressions", "load_outcomes"])
def test_a_join_whose_log_is_erased_from_between_keys_and_rows_starts_over(
    logs: _Logs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _once(monkeypatch, streaming, name, lambda: logs.erase(splits=False))
    with pytest.raises(CommitConflict, match="rewrote file 1"):
        join_stream(logs.shown, logs.bought, logs.splits, 0)
    join_stream(logs.shown, logs.bought, logs.splits, 0)
    assert logs.joined() == logs.others()


def test_the_batch_join_does_so_too(logs: _Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ExampleTable.create(tmp_path / "t", event_schema=logs.store.schema, example_schema=EXAMPLES, n_buckets=2)
    with table:
        _once(monkeypatch, joiner, "load_impressions", lambda: logs.erase(splits=False))
        with pytest.raises(CommitConflict, match="rewrote file 1"):
            joiner.join_logs(logs.shown, logs.bought, table, logs.end_ms + 10_000)
        joiner.join_logs(logs.shown, logs.bought, table, logs.end_ms + 10_000)
        found = [r for b in table.buckets() for r in table.read_bucket(b).request_id.tolist()]
        assert sorted(found) == logs.others()


def test_a_step_that_read_its_logs_before_an_erasure_brings_nothing_back(
    logs: _Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    _once(monkeypatch, SplitLog, "append_after", logs.erase)
    with pytest.raises(CommitConflict):
        join_stream(logs.shown, logs.bought, logs.splits, 0)
    join_stream(logs.shown, logs.bought, logs.splits, 0)
    assert logs.joined() == logs.others()


def test_a_sealed_log_needs_no_fence_and_keeps_its_end(logs: _Logs) -> None:
    join_stream(logs.shown, logs.bought, logs.splits, 0)
    last = logs.splits.seal()
    logs.erase()
    assert logs.splits.numbers()[-1] == last
    assert logs.splits.fence() is None
    assert logs.joined() == logs.others()


def test_outcomes_of_requests_that_only_splits_know_go_too(logs: _Logs) -> None:
    """As in a stream: what was joined is pruned from the log of impressions."""
    join_stream(logs.shown, logs.bought, logs.splits, 0)
    logs.shown.rewrite(1, next(logs.shown.scan()).take(np.arange(0)))
    told = {i for part in logs.bought.scan() for i in part.request_id.tolist()}
    assert told & set(logs.victims)
    logs.erase()
    left = {i for part in logs.bought.scan() for i in part.request_id.tolist()}
    assert left == told - set(logs.victims)


def _many(objects: Any, files: int) -> OutcomeLog:
    log = OutcomeLog(objects)
    for i in range(files):
        log.append(Outcomes.of("click", [i], [1], [i]))
    return log


@pytest.mark.parametrize("below", [3, 4, 6])
def test_a_file_that_is_rewritten_while_it_is_pruned_does_not_come_back(below: int) -> None:
    objects = MemoryObjects()
    log, put = _many(objects, 6), objects.put
    rows = log.read(3)

    def late(name: str, data: bytes) -> None:
        OutcomeLog(objects).prune(below)
        put(name, data)

    objects.put = late  # type: ignore[method-assign]
    assert log.rewrite(3, rows) == (below < 5)
    # One that stands before the files that are left is as if it had not been pruned.
    assert log.numbers() == range(6 if below == 6 else 3, 7)
    assert not log.rewrite(2, rows)


def test_a_file_that_is_rewritten_after_it_was_pruned_goes_with_the_rest() -> None:
    objects = MemoryObjects()
    log, delete = _many(objects, 6), objects.delete
    rows = objects.get(file_name(2))

    late = [file_name(2)]

    def slow(name: str) -> None:
        delete(name)
        if name in late:
            objects.put(late.pop(), rows)

    objects.delete = slow  # type: ignore[method-assign]
    log.prune(5)
    assert log.numbers() == range(5, 7)


def test_keys_and_rows_of_a_file_that_is_rewritten_meanwhile_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _many(tmp_path, 1)
    more = Outcomes.of("click", np.arange(7, 47), np.ones(40, np.int64), np.arange(40))
    read, calls = LocalObjects.read_into, []

    def between(self: LocalObjects, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            OutcomeLog(tmp_path).rewrite(1, more)
        read(self, *args)

    monkeypatch.setattr(LocalObjects, "read_into", between)
    assert len(log.keys(1)) == 40
    assert len(calls) == 2
    assert len(log.read(1)) == 40


@settings(max_examples=60)
@given(st.data())
def test_the_newest_file_is_found_without_a_list(data: st.DataObject) -> None:
    objects = MemoryObjects()
    log = _many(objects, data.draw(st.integers(0, 40)))
    numbers = log.numbers()
    if len(numbers) > 1 and data.draw(st.booleans()):
        log.prune(data.draw(st.integers(1, len(numbers))))
    known = data.draw(st.integers(0, numbers.stop - 1))
    lists, real = [], objects.list
    objects.list = lambda *args: lists.append(1) or real(*args)  # type: ignore[method-assign,func-returns-value]
    assert log.newest(known) == (numbers[-1] if numbers else None)
    assert len(lists) <= (0 if numbers and file_name(known) in objects._objects else 1)


def test_a_lost_file_is_not_taken_for_the_end() -> None:
    objects = MemoryObjects()
    log = _many(objects, 5)
    objects.delete(file_name(4))
    for known in (0, 1, 3):
        with pytest.raises(CorruptionError, match="missing"):
            log.newest(known)
    with pytest.raises(ObjectNotFound):
        log.read(4)


def test_a_log_of_an_unknown_kind_is_told(tmp_path: Path) -> None:
    _many(tmp_path, 1)
    head = tmp_path / "log.json"
    head.write_text(head.read_text().replace("outcomes", "outputs"))
    assert [name for name, _ in verify_log(tmp_path)] == ["log.json"]


def test_erasure_goes_on_beside_pruning(logs: _Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer of the table prunes what it has joined while an erasure reads the log."""
    rows = next(logs.shown.scan())
    for part in np.array_split(np.arange(len(rows)), 5):
        logs.shown.append(rows.take(part))
    store = logs.store
    store.erase([VICTIM], grace_s=0)
    _once(monkeypatch, ImpressionLog, "read", lambda: logs.shown.prune(3))
    erase_from_log(logs.shown, store.pin(), np.array([VICTIM]))
    erase_from_splits(logs.splits, store.pin(), np.array([VICTIM]))
    users = {u for part in logs.shown.scan() for u in np.asarray(part.snapshots.users).tolist()}
    assert logs.shown.numbers() == range(3, 7)
    assert VICTIM not in users


def test_the_command_cleans_splits(logs: _Logs, tmp_path: Path) -> None:
    join_stream(logs.shown, logs.bought, logs.splits, 0)
    logs.store.close()
    arguments = ["erase", str(VICTIM), "--store", str(tmp_path / "world/store"), "--splits", str(tmp_path / "s")]
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code != 0
    assert "add --table" in str(refused.output) + str(refused.exception)
    arguments += ["--table", str(tmp_path / "world/examples"), "--grace", "0"]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert logs.joined() == logs.others()
