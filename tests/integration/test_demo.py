"""The main job on little data, through its command: exact, reported, repeatable, careful with folders; a learner sees
what was known at the cut and is asked for every request after it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from rich.console import Console

from thinrow.cli.demo import job, replay
from thinrow.cli.demo.command import command
from thinrow.cli.demo.data import DemoData
from thinrow.cli.demo.git import load_git
from thinrow.cli.demo.job import DemoConfig, Run, run_demo
from thinrow.cli.demo.retail import load_retail
from thinrow.cli.main import main
from thinrow.core.errors import InputError
from thinrow.history.reconstruct import reconstruct
from thinrow.history.snapshot import Snapshot
from thinrow.testing.git_repo import Commit, make_repo, write

LENGTHS = {"16", "128", "1024", "all"}
STORES = {"thinrow_shared", "thinrow_copies", "fat_rows_sorted", "fat_rows_arrival_order"}
SMALL = ["--weeks", "9", "--households", "10"]


def test_demo_is_exact_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_warm_up", lambda *_: None)
    out = tmp_path / "out"
    # What an earlier run left is replaced.
    (out / "store").mkdir(parents=True)
    (out / "store" / "half").touch()
    (out / ".thinrow-demo").touch()
    done = CliRunner().invoke(command, [*SMALL, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert not (out / "store" / "half").exists()
    report = json.loads((out / "report.json").read_text())
    n = len(load_retail(9, 10).requests)
    assert n >= 10
    assert report["requests"] == report["versions_verified"] == n
    assert report["mismatches"] == 0
    assert report["comparisons"] == 4 * n
    assert report["outcomes"]["labelled"] == load_retail(9, 10).requests.labels["bought"].values.sum()
    assert set(report["bytes"]) == {"thinrow_history", "thinrow_examples", "fat_rows_arrival_order", "fat_rows_sorted"}
    assert all(size > 0 for size in report["bytes"].values())
    assert set(report["events_per_second"]) == STORES
    assert all(set(by_length) == LENGTHS for by_length in report["events_per_second"].values())
    assert report["seconds"]["total"] > 0
    assert f"All {n} histories" in " ".join(done.output.split())
    assert report["online_offline_differences"] == 0
    held_out = report["held_out_requests"]
    served = report["serving"]
    assert 0 < served["outcomes_in_top"] <= served["outcomes"]
    assert served["requests"] == served["ranked"] == held_out > 0
    assert [(r["model"], r["history"]) for r in report["quality"]] == [
        (model, history) for model in ("hstu", "dlrm") for history in ("16", "128", "1024", "all")
    ]
    for row in report["quality"]:
        assert row["seeds"] == 3
        assert 0 < row["auc"] < 1
        assert 0 < row["gauc"] < 1
        assert min(row["ne"], row["ne_progressive"]) > 0
    assert 0.5 <= report["single_column"]["auc"] < 0.95
    assert "<svg" in (out / "report.html").read_text()
    # A difference is an exit status of 1.
    monkeypatch.setattr(job, "run_demo", lambda *_: report | {"mismatches": 2})
    wrong = CliRunner().invoke(command, ["--out", str(out)])
    assert wrong.exit_code == 1
    assert f"2 of {4 * n} comparisons with a fat row differ." in " ".join(wrong.output.split())


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    with pytest.raises(InputError, match="not a demo's output; pass another folder"):
        CliRunner().invoke(command, [*SMALL, "--out", str(tmp_path)], catch_exceptions=False)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_no_request_left_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_warm_up", lambda *_: None)
    with pytest.raises(InputError, match="no request in weeks=3, households=2; raise the limits"):
        CliRunner().invoke(
            command, ["--weeks", "3", "--households", "2", "--out", str(tmp_path)], catch_exceptions=False
        )


@pytest.mark.parametrize("data_of", ["retail", "git"])
def test_rounds_hold_one_request_of_a_user_and_keep_its_order(data_of: str, repo: Path) -> None:
    data = load_retail(weeks=10, households=300) if data_of == "retail" else load_git(repo)
    first = data.bundle_offsets[:-1]
    asks = set(data.requests.bundle.tolist())
    seen: dict[object, int] = {}
    n_bundles, last_end, was_held_out = 0, -1, False
    for step in replay.steps_of(data):
        assert step.end_ms > last_end
        assert step.is_held_out >= was_held_out
        arrived = data.arrival_ts[step.bundles]
        assert arrived.min() >= last_end
        assert arrived.max() < step.end_ms
        assert np.unique(arrived // data.step_ms).size == 1
        assert np.all((arrived >= data.cut_ms) == step.is_held_out)
        last_end, was_held_out = step.end_ms, step.is_held_out
        for bundles in step.rounds:
            users = data.users[first[bundles]].tolist()
            here: set[object] = set()
            for user, bundle in zip(users, bundles.tolist(), strict=True):
                assert seen.get(user, -1) < bundle
                assert user not in here or bundle not in asks
                here.add(user)
                seen[user] = bundle
            n_bundles += len(bundles)
        # No round but the first is there without need.
        assert all(asks & set(bundles.tolist()) for bundles in step.rounds[1:])
    assert was_held_out
    assert n_bundles == len(first)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits of three authors within a day or so, one in three made up to ten days before it was taken."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    rng = random.Random(2)
    commits, taken = [], 1_500_000_000
    for i in range(160):
        taken += rng.randrange(900)
        made = taken - (rng.randrange(864_000) if i % 3 == 0 else 0)
        touched = tuple(write(f"lib{f % 5}/f{f}.py", i) for f in sorted({rng.randrange(60) for _ in range(6)}))
        commits.append(Commit(rng.choice(["ann@a.org", "bob@b.org", "ünal@c.org"]), made, taken, touched))
    return make_repo(tmp_path_factory.mktemp("git") / "history", commits)


@pytest.mark.slow
def test_a_git_history_is_exact_with_late_events(repo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(command, ["--git", str(repo), "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    report = json.loads((out / "report.json").read_text())
    data = load_git(repo)
    n = len(data.requests)
    assert n > 100
    assert (report["mismatches"], report["requests"], report["versions_verified"]) == (0, n, n)
    assert (report["events"], report["users"]) == (len(data), 3)
    assert report["outcomes"]["labelled"] == data.requests.labels["touched"].values.sum()
    assert sum(report["outcomes"].values()) == report["outcomes"]["labelled"]
    assert report["held_out_requests"] == data.held_out.sum()
    # Late events are the point: some request lacks an event that lies before it in time.
    assert any(v["mixed_stripes_share"] > 0 for v in report["verification"].values())
    shown = " ".join(done.output.split())
    assert f"The longest history that a request saw has {report['longest_history']} events." in shown
    page = (out / "report.html").read_text()
    assert f"{len(data):,} changes of files of 3 authors (git history of history, 160 commits)" in page
    assert not {"purchases", "households"} & set((page + shown).split())
    assert report["online_offline_differences"] == 0
    # A late request is before the cut in time and after it in arrival: it is served, and no part of the evaluation.
    assert report["serving"]["requests"] == report["held_out_requests"]
    assert report["held_out"]["held_out_requests"] <= report["held_out_requests"]
    assert len(report["quality"]) == 8


def test_a_history_without_requests_and_options_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    short = make_repo(tmp_path / "short", [Commit("a@b", 1, 1, (write("a"),))])
    with pytest.raises(InputError, match=r"no request in 1 commits of .*short; .* pass a longer history"):
        run_demo(DemoConfig(out=tmp_path / "out", git=short), Console(quiet=True))
    monkeypatch.setattr("sys.argv", ["thinrow", "demo", "--git", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        main()
    assert "is no git repository that git can read" in capsys.readouterr().err
    for options, message in (
        (["--git", str(short), "--weeks", "9"], "--weeks goes without --git"),
        (["--max-commits", "9"], "--max-commits goes with --git"),
    ):
        wrong = CliRunner().invoke(command, [*options, "--out", str(tmp_path / "out")])
        assert wrong.exit_code == 2
        assert message in wrong.output


class Witness:
    """A learner that learns nothing, and checks what it is given."""

    version = "witness-1"

    def __init__(self, run: Run) -> None:
        self.run = run
        data = run.data
        self.asked: list[int] = []
        rows = np.flatnonzero(~data.held_out)
        tables = [run.table.scan_bucket(b) for b in range(run.config.n_buckets)]
        ids = np.concatenate([t["request_id"].to_numpy() for t in tables]) if tables else np.empty(0)
        assert sorted(ids) == sorted(data.requests.request_id[rows])
        touched = np.flatnonzero(np.repeat(data.held_out, np.diff(data.requests.candidate_offsets)))
        assert all(not jagged.values[touched].any() for jagged in run.cross.values())
        with run.stages.stage("witness"):
            pass

    def on_requests(self, rows: npt.NDArray[np.int64], taken: Snapshot) -> None:
        data, source = self.run.data, self.run.source
        assert data.held_out[rows].all()
        assert np.array_equal(taken.requests.users, data.requests.users[rows])
        assert np.array_equal(taken.requests.request_ts, data.requests.request_ts[rows])
        seen = reconstruct(taken.generation, taken.requests).histories
        assert np.array_equal(seen.lengths(), source.lengths[rows])
        index, _ = source.history(rows)
        assert np.array_equal(seen.to_jagged("event_ts").values, source.columns["event_ts"][index])
        # Cross features stand: how often the first candidate is in the history.
        offsets = data.requests.candidate_offsets[rows]
        item = data.requests.candidates[data.item].values[offsets]
        counted = [int((row == c).sum()) for row, c in zip(_rows(source, data.item, rows), item, strict=True)]
        assert self.run.cross[data.cross[2]].values[offsets].tolist() == counted
        self.asked += rows.tolist()

    def report(self) -> dict[str, Any]:
        return {"quality": {"asked": len(self.asked)}}


def _rows(source: Any, column: str, rows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
    for row in rows:
        index, _ = source.history(np.array([row]))
        yield source.columns[column][index]


@pytest.mark.parametrize("data_of", ["retail", pytest.param("git", marks=pytest.mark.slow)])
def test_a_learner_is_made_at_the_cut_and_asked_after_it(data_of: str, repo: Path, tmp_path: Path) -> None:
    config = DemoConfig(out=tmp_path / "out", weeks=10, households=15)
    config = config if data_of == "retail" else replace(config, git=repo)
    witnesses: list[Witness] = []

    def learn(run: Run) -> Witness:
        witnesses.append(Witness(run))
        return witnesses[-1]

    report = run_demo(config, Console(quiet=True), learn)
    assert [w.run.is_warm_up for w in witnesses] == [True, False]
    data: DemoData = witnesses[1].run.data
    assert sorted(witnesses[1].asked) == np.flatnonzero(data.held_out).tolist()
    assert report["quality"] == {"asked": report["held_out_requests"]}
    assert report["mismatches"] == 0
    assert {"learn", "on_requests", "witness"} <= set(report["seconds"])
    logged = job.ImpressionLog(config.out / "impressions", data.event_schema, data.example_schema)
    for number in logged.numbers():
        shown = logged.read(number)
        late = np.isin(shown.request_id, data.requests.request_id[data.held_out])
        assert (
            shown.model_version.to_arrow().to_numpy(zero_copy_only=False) == np.where(late, "witness-1", "demo")
        ).all()
