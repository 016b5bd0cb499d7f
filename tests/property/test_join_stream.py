"""The join that follows its logs: whatever is cut, interleaved, killed or pruned, the table is that of one step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError, StoreError
from thinrow.examples.joiner import JoinReport, join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.outcomes import JoinCounts, join
from thinrow.examples.records import ExampleBatch, Impressions, Outcomes
from thinrow.examples.streaming import IdleRule, heartbeat, join_stream
from thinrow.examples.table import ExampleTable
from thinrow.testing.examples import event_schema, example_schema, random_impressions, random_outcomes, same_records

ES, XS = event_schema(), example_schema()
END = 10_000


class _Killed(Exception):
    pass


class _Place:
    """Two logs and tables under one directory; everything is opened anew for every use, as by a new process."""

    def __init__(self, path: Path, *tables: str) -> None:
        self.path = path
        for name in tables:
            ExampleTable.create(path / name, event_schema=ES, example_schema=XS, n_buckets=2).close()

    @property
    def impressions(self) -> ImpressionLog:
        return ImpressionLog(self.path / "i", ES, XS)

    @property
    def outcomes(self) -> OutcomeLog:
        return OutcomeLog(self.path / "o")

    def step(self, name: str, lateness: int, correct: int = 0, kill: str = "") -> JoinReport | None:
        with ExampleTable.open(self.path / name) as table:
            if kill:
                commit = table.append_after

                def killed(*args: object) -> int:
                    if kill == "after":
                        commit(*args)
                    raise _Killed

                table.append_after = killed
            try:
                return join_stream(self.impressions, self.outcomes, table, lateness, correct_for_ms=correct)
            except _Killed:
                return None

    def examples(self, name: str) -> ExampleBatch:
        with ExampleTable.open(self.path / name) as table:
            whole = ExampleBatch.concat([table.read_bucket(b) for b in range(2)])
        return whole.take(np.argsort(whole.request_id, kind="stable"))


def _stream(place: _Place, seed: int, lateness: int, correct: int, *, repeats: bool, prune: bool) -> Outcomes:
    """Logs that grow while joins step and die; every outcome but heartbeats is returned."""
    rng = np.random.default_rng(seed)
    requests = random_impressions(rng, 14, ES, XS)
    if repeats:
        requests = Impressions.concat([requests, requests.take(rng.integers(0, 14, 3))])
    happened = random_outcomes(rng, 60, 14)
    # Roughly in the order of time, as logs are, or in none.
    noise = int(rng.choice([1, 40, 400]))
    requests = requests.take(np.argsort(requests.snapshots.request_ts + rng.integers(0, noise, len(requests))))
    happened = happened.take(np.argsort(happened.ts + rng.integers(0, noise, 60)))
    cuts_r, cuts_o = (np.sort(rng.integers(0, n + 1, 5)) for n in (len(requests), 60))
    chunks_r = [c for c in np.split(np.arange(len(requests)), cuts_r)]
    chunks_o = [c for c in np.split(np.arange(60), cuts_o)]
    tables = [("t", 0)] + ([("c", correct)] if correct else [])
    done: dict[str, JoinReport] = {}
    while chunks_r or chunks_o:
        what = rng.integers(0, 6)
        if what == 0 and chunks_r:
            place.impressions.append(requests.take(chunks_r.pop(0)))
        elif what == 1 and chunks_o:
            place.outcomes.append(happened.take(chunks_o.pop(0)))
        elif what == 2 and rng.random() < 0.1:
            place.outcomes.append(heartbeat(int(rng.integers(0, 200))))
        elif what == 3 and prune and len(done) == len(tables):
            place.impressions.prune(min(r.impressions_done for r in done.values()))
            place.outcomes.prune(min(r.outcomes_done for r in done.values()))
        else:
            name, late = tables[rng.integers(0, len(tables))]
            report = place.step(name, lateness, late, str(rng.choice(["", "", "before", "after"])))
            if report is not None:
                done[name] = report
    return happened


@settings(max_examples=2)
@given(st.integers(0, 2**32), st.sampled_from([0, 5, 60]), st.sampled_from([0, 30]))
def test_any_steps_write_what_one_step_writes(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lateness: int, correct: int
) -> None:
    place = _Place(tmp_path_factory.mktemp("stream"), "t", "c", "whole", "whole_c")
    _stream(place, seed, lateness, correct, repeats=True, prune=False)
    place.outcomes.append(heartbeat(END))
    for name, late in (("t", 0), ("c", correct))[: 1 + (correct > 0)]:
        last = place.step(name, lateness, late)
        once = place.step(f"whole{'_c' * (name == 'c')}", lateness, late)
        assert last is not None
        assert once is not None
        assert same_records(place.examples(name), place.examples("whole_c" if name == "c" else "whole"))
        assert last.totals.late_requests == once.totals.late_requests
        assert last.pending == once.pending == 0
        # An outcome before its request may settle as of no request, if it expires before that is logged.
        for count in ("labelled", "repeated", "late", "unknown_item"):
            assert getattr(last.totals, count) == getattr(once.totals, count)
        n_once = 60 + once.totals.repeated_requests + once.totals.late_requests
        assert [sum(r.totals.to_dict().values()) + r.pending_outcomes for r in (last, once)] == [n_once, n_once]
        again = place.step(name, lateness, late)
        assert again is not None
        assert (again.examples, again.counts) == (0, JoinCounts())


@settings(max_examples=2)
@given(st.integers(0, 2**32))
def test_within_the_lateness_it_is_the_join_in_memory(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    place = _Place(tmp_path_factory.mktemp("stream"), "t")
    happened = _stream(place, seed, 1_000, 0, repeats=False, prune=True)
    place.outcomes.append(heartbeat(END))
    report = place.step("t", 1_000)
    rng = np.random.default_rng(seed)
    expected = join(random_impressions(rng, 14, ES, XS), happened, XS, END)
    assert report is not None
    assert report.totals.after_write == report.totals.late_requests == 0
    assert same_records(place.examples("t"), expected.examples)
    assert report.totals.labelled == expected.counts.labelled


@settings(max_examples=2)
@given(st.integers(0, 2**32), st.sampled_from([0, 20]))
def test_corrected_examples_are_those_of_the_join_in_memory(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lateness: int
) -> None:
    place = _Place(tmp_path_factory.mktemp("stream"), "t", "c")
    happened = _stream(place, seed, lateness, 2_000, repeats=False, prune=True)
    place.outcomes.append(heartbeat(END))
    first, last = place.step("t", lateness), place.step("c", lateness, 2_000)
    assert first is not None
    assert last is not None
    examples, corrections = place.examples("t"), place.examples("c")
    stays = ~np.isin(examples.request_id, corrections.request_id)
    both = ExampleBatch.concat([examples.take(np.flatnonzero(stays)), corrections])
    both = both.take(np.argsort(both.request_id))
    whole = join(random_impressions(np.random.default_rng(seed), 14, ES, XS), happened, XS, END).examples
    written = np.flatnonzero(np.isin(whole.request_id, both.request_id))
    assert len(whole) - len(written) == first.totals.late_requests
    assert same_records(both, whole.take(written))
    assert set(corrections.request_id) <= set(examples.request_id)
    assert (len(corrections) == 0) or first.totals.after_write > 0


def test_an_idle_log_closes_windows_by_a_heartbeat(tmp_path: Path) -> None:
    place = _Place(tmp_path, "t")
    place.impressions.append(random_impressions(np.random.default_rng(1), 4, ES, XS))
    now_s = [0.0]
    rule = IdleRule(place.outcomes, 1_000, lambda: 5_000, lambda: now_s[0])
    assert not rule.apply()
    now_s[0] = 0.9
    place.outcomes.append(Outcomes.of("buy", 1, 1, 3))
    assert not rule.apply()
    now_s[0] = 1.8
    assert not rule.apply()
    report = place.step("t", 10)
    assert report is not None
    assert report.pending == 4
    now_s[0] = 2.0
    assert rule.apply()
    assert not rule.apply()
    report = place.step("t", 10)
    assert report is not None
    assert (report.pending, report.examples) == (0, 4)
    # A heartbeat is no outcome.
    assert sum(report.totals.to_dict().values()) == 1


def test_a_table_keeps_to_its_rule(tmp_path: Path) -> None:
    place = _Place(tmp_path, "t", "clock")
    place.impressions.append(random_impressions(np.random.default_rng(1), 4, ES, XS))
    place.outcomes.append(heartbeat(END))
    place.step("t", 10)
    for lateness, correct in ((11, 0), (10, 1)):
        with pytest.raises(StoreError, match="lateness_ms=10"):
            place.step("t", lateness, correct)
    with pytest.raises(InputError, match="lateness_ms=-1"):
        place.step("t", -1)
    with ExampleTable.open(tmp_path / "t") as table, pytest.raises(StoreError, match="join_stream"):
        join_logs(place.impressions, place.outcomes, table, END)
    with ExampleTable.open(tmp_path / "clock") as table:
        join_logs(place.impressions, place.outcomes, table, END)
    with pytest.raises(StoreError, match="by a clock"):
        place.step("clock", 10)
