"""The resumable join over logs: nothing lost or doubled, whatever is killed, repeated, late or pruned."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import CommitConflict, CorruptionError, NewerFormatError, SchemaError, StoreError
from thinrow.examples.joiner import JoinReport, JoinState, join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.outcomes import JoinCounts, join
from thinrow.examples.records import ExampleBatch, Impressions, Outcomes
from thinrow.examples.table import ExampleTable
from thinrow.schema.example_schema import ExampleSchema
from thinrow.testing.examples import (
    event_schema,
    example_schema,
    random_impressions,
    random_outcomes,
    same_records,
)

ES, XS = event_schema(), example_schema()


@dataclass
class _Place:
    """Two logs and a table under one directory, reopened for every use, as by a new process."""

    path: Path

    def make(self) -> _Place:
        ExampleTable.create(self.path / "t", event_schema=ES, example_schema=XS, n_buckets=2).close()
        return self

    @property
    def impressions(self) -> ImpressionLog:
        return ImpressionLog(self.path / "i", ES, XS)

    @property
    def outcomes(self) -> OutcomeLog:
        return OutcomeLog(self.path / "o")

    def join(self, now_ms: int) -> JoinReport:
        with ExampleTable.open(self.path / "t") as table:
            return join_logs(self.impressions, self.outcomes, table, now_ms)

    def examples(self) -> ExampleBatch:
        with ExampleTable.open(self.path / "t") as table:
            whole = ExampleBatch.concat([table.read_bucket(b) for b in range(2)])
        return whole.take(np.argsort(whole.request_id, kind="stable"))


@settings(max_examples=5)
@given(st.integers(0, 2**32), st.booleans())
def test_joins_over_logs_are_joins_in_memory(tmp_path_factory: pytest.TempPathFactory, seed: int, prune: bool) -> None:
    place, rng = _Place(tmp_path_factory.mktemp("join")).make(), np.random.default_rng(seed)
    requests = random_impressions(rng, 12, ES, XS)
    if not prune:
        # Pruning forgets that a request was logged, so only unpruned logs may hold repeated ones.
        requests = Impressions.concat([requests, requests.take(rng.integers(0, 12, 3))])
    requests = requests.take(rng.permutation(len(requests)))
    happened = random_outcomes(rng, 40, 12)
    times = [*rng.integers(0, 400, 3).tolist(), 1000]
    when, when_outcome = np.sort(rng.integers(0, 4, len(requests))), rng.integers(0, 4, 40)
    pending, waiting = requests.take(np.arange(0)), Outcomes.empty()
    totals, written, parts = JoinCounts(), np.empty(0, np.int64), []
    for r, now in enumerate(times):
        new, arrived = requests.take(np.flatnonzero(when == r)), happened.take(when_outcome == r)
        place.impressions.append(new)
        place.outcomes.append(arrived)
        cut = max(times[: r + 1])
        joined = join(Impressions.concat([pending, new]), Outcomes.concat([waiting, arrived]), XS, cut, written=written)
        pending, waiting = joined.pending, joined.pending_outcomes
        written = np.concatenate([written, joined.examples.request_id])
        parts.append(joined.examples)
        totals += joined.counts

        report = place.join(now)
        assert (report.examples, report.pending) == (len(joined.examples), len(pending))
        if prune:
            place.outcomes.prune(report.outcomes_done)
            place.impressions.prune(report.impressions_done)
        else:
            assert report.counts == joined.counts
            assert report.pending_outcomes == len(waiting)
    assert _known(report.totals) == _known(totals)
    again = place.join(times[-1])
    assert (again.examples, again.counts, again.totals) == (0, JoinCounts(), report.totals)
    assert again.snapshot_id == report.snapshot_id
    whole = ExampleBatch.concat(parts)
    assert same_records(place.examples(), whole.take(np.argsort(whole.request_id, kind="stable")))


def _known(counts: JoinCounts) -> dict[str, int]:
    """Counts, with outcomes of requests that were written or that the pruned log no longer knows as one kind."""
    kinds = counts.to_dict()
    return kinds | {"after_write": kinds.pop("after_write") + kinds.pop("unknown_request")}


def _filled(path: Path) -> _Place:
    place, rng = _Place(path).make(), np.random.default_rng(11)
    for i in range(6):
        place.impressions.append(random_impressions(rng, 5, ES, XS, first_id=5 * i))
        place.outcomes.append(random_outcomes(rng, 20, 30))
    return place


TIMES = (100, 150, 200, 400)


def _reference(path: Path) -> tuple[ExampleBatch, JoinCounts]:
    place = _filled(path)
    reports = [place.join(now) for now in TIMES]
    assert [r.examples > 0 for r in reports[:-1]] == [True] * 3
    return place.examples(), reports[-1].totals


@pytest.mark.parametrize("where", ["before the commit", "after the commit"])
def test_a_crash_around_the_commit_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    expected, totals = _reference(tmp_path / "a")
    place = _filled(tmp_path / "b")
    for now in TIMES:
        with ExampleTable.open(place.path / "t") as table:
            commit: Callable[..., Any] = table._catalog.commit_table

            def crash(*args: Any, commit: Callable[..., Any] = commit, **named: Any) -> Any:
                if where == "after the commit":
                    commit(*args, **named)
                raise KeyboardInterrupt

            monkeypatch.setattr(table._catalog, "commit_table", crash)
            with pytest.raises(KeyboardInterrupt):
                join_logs(place.impressions, place.outcomes, table, now)
        place.join(now)
    assert same_records(place.examples(), expected)
    assert place.join(TIMES[-1]).totals == totals


_CHILD = """
import sys
from pathlib import Path
from thinrow.examples.joiner import join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.table import ExampleTable
from thinrow.testing.examples import event_schema, example_schema
path = Path(sys.argv[1])
logs = ImpressionLog(path / "i", event_schema(), example_schema()), OutcomeLog(path / "o")
table = ExampleTable.open(path / "t")
print("ready", flush=True)
for now in range(50, 400, 5):
    join_logs(*logs, table, now)
    if now % 50 == 0:
        table.cluster()
print("done", flush=True)
"""


def test_sigkill_loses_and_doubles_nothing(tmp_path: Path) -> None:
    expected, totals = _reference(tmp_path / "a")
    place = _filled(tmp_path / "b")
    delays, kills = [0.0, 0.05, 0.2], 0
    for delay in delays:
        child = subprocess.Popen([sys.executable, "-c", _CHILD, str(place.path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        kills += child.wait() == -signal.SIGKILL
        child.stdout.close()
    assert kills > 0
    assert place.join(TIMES[-1]).totals == totals
    assert same_records(place.examples(), expected)


def test_two_joiners_do_not_double(tmp_path: Path) -> None:
    place = _filled(tmp_path)
    with ExampleTable.open(place.path / "t") as table:
        state = table.join_state()
        table.join_state = lambda: state  # type: ignore[method-assign]
        first = place.join(200)
        with pytest.raises(CommitConflict, match="run again"):
            join_logs(place.impressions, place.outcomes, table, 200)
    assert first.examples == len(place.examples())
    assert place.join(200).examples == 0


def test_a_file_appended_during_a_join_is_joined_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = _filled(tmp_path)
    late = random_impressions(np.random.default_rng(1), 3, ES, XS, first_id=100)
    log, appended = place.impressions, []
    keys = log.keys

    def append_and_read(number: int) -> Any:
        if not appended:
            appended.append(place.impressions.append(late))
        return keys(number)

    monkeypatch.setattr(log, "keys", append_and_read)
    with ExampleTable.open(place.path / "t") as table:
        assert join_logs(log, place.outcomes, table, 400).examples == 30
    assert place.join(400).examples == 3


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path) -> None:
    place = _filled(tmp_path)
    first = place.join(200)
    assert place.join(100).examples == 0
    assert place.join(200).totals == first.totals


def test_wrong_logs_are_refused(tmp_path: Path) -> None:
    place = _filled(tmp_path / "a")
    place.join(200)
    other = _filled(tmp_path / "b")
    with ExampleTable.open(place.path / "t") as table:
        with pytest.raises(StoreError, match="pass the same logs"):
            join_logs(other.impressions, other.outcomes, table, 400)
        schema = ExampleSchema(XS.context, XS.candidates, "item", (("click", 10),))
        with pytest.raises(SchemaError, match="another example schema"):
            join_logs(ImpressionLog(place.path / "i", ES, schema), place.outcomes, table, 400)
        newest = max((place.path / "i").glob("*.log"))
        whole = newest.read_bytes()
        newest.write_bytes(whole[:-1])
        with pytest.raises(CorruptionError, match=newest.name):
            join_logs(place.impressions, place.outcomes, table, 400)
        newest.unlink()
        with pytest.raises(StoreError, match="6 was joined"):
            join_logs(place.impressions, place.outcomes, table, 400)
        newest.write_bytes(whole)
        assert join_logs(place.impressions, place.outcomes, table, 400).examples > 0


def test_state_formats(tmp_path: Path) -> None:
    state = JoinState(5, 2, 3, ("a", "b"), JoinCounts(labelled=4))
    assert JoinState.from_json(state.to_json(), "t") == state
    with pytest.raises(NewerFormatError, match="format 9"):
        JoinState.from_json(state.to_json().replace('"format": 1', '"format": 9'), "t")
    with pytest.raises(CorruptionError, match="file t"):
        JoinState.from_json("{}", "t")
