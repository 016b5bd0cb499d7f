"""Events and requests of a git history against the plan that made it, by plain loops."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from thinrow.cli.demo import git
from thinrow.cli.demo.data import DemoData
from thinrow.cli.demo.fat_rows import FatRowSource
from thinrow.cli.demo.git import MAX_TOUCHED, MIN_CANDIDATES, MIN_EVENTS, MIN_OTHERS, load_git
from thinrow.core.units import DAY_MS
from thinrow.testing.git_repo import Commit, FileChange, delete, make_repo, rename, run_git, write

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

AUTHORS = ("ann@example.org", "bob@example.org", "cleo@elsewhere.net", "dan")
START_S = 1_500_000_000


@dataclass
class Plan:
    """Commits in order of arrival, and for each: the changes as (action, path), the existing files before it."""

    commits: list[Commit] = field(default_factory=list)
    changes: list[list[tuple[str, str]]] = field(default_factory=list)
    before: list[dict[str, int]] = field(default_factory=list)


def plan_history(n_commits: int, seed: int) -> Plan:
    """Two in five commits were made up to a month before they were taken, so many are late; one touches 30 files."""
    rng = random.Random(seed)
    plan, files, next_id, taken = Plan(), {}, 0, START_S
    for i in range(n_commits):
        taken += rng.randrange(0, 40_000)
        made = taken - (rng.randrange(30 * 86_400) if rng.random() < 0.4 else 0)
        plan.before.append(dict(files))
        changes: list[FileChange] = []
        told: list[tuple[str, str]] = []
        free = sorted(files)
        rng.shuffle(free)
        n = 30 if i == n_commits // 2 else rng.randrange(1, 4)
        for k in range(n):
            lot = rng.random()
            if lot < 0.3 or not free:
                path = (
                    rng.choice(["", "src/", "src/deep/", "docs/ü/"]) + f"f{i}_{k}.{rng.choice(['py', 'MD', 'tar.gz'])}"
                )
                files[path], next_id = next_id, next_id + 1
                changes.append(write(path))
                told.append(("add", path))
            elif lot < 0.4 and n < 30:
                old = free.pop()
                path = f"moved/{i}_{k}.py"
                files[path] = files.pop(old)
                changes.append(rename(old, path))
                told.append(("rename", path))
            elif lot < 0.5 and n < 30:
                path = free.pop()
                del files[path]
                changes.append(delete(path))
                told.append(("delete", path))
            else:
                path = free.pop()
                changes.append(write(path, version=i + 1))
                told.append(("modify", path))
        plan.commits.append(Commit(rng.choice(AUTHORS), made, taken, tuple(changes), rng.choice(["+0000", "-0730"])))
        plan.changes.append(told)
    return plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_history(150, seed=4)


@pytest.fixture(scope="module")
def repo(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repo(tmp_path_factory.mktemp("git") / "planned.git", plan.commits)


@pytest.fixture(scope="module")
def data(repo: Path) -> DemoData:
    return load_git(repo, seed=7)


def test_events_are_the_changes_in_order_of_arrival(plan: Plan, data: DemoData) -> None:
    table = data.to_arrow()
    lengths = [len(c) for c in plan.changes]
    assert np.diff(data.bundle_offsets).tolist() == lengths
    assert data.arrival_ts.tolist() == [c.taken_s * 1000 for c in plan.commits]
    for i, told in enumerate(plan.changes):
        rows = table.slice(int(data.bundle_offsets[i]), lengths[i]).to_pylist()
        assert Counter((r["action"], r["path"]) for r in rows) == Counter(told)
        commit = plan.commits[i]
        for row in rows:
            assert row["author"] == commit.author
            assert int(row["authored"].timestamp()) == commit.made_s
            folder, _, name = row["path"].rpartition("/")
            assert (row["folder"], row["top_folder"]) == (folder, folder.split("/")[0])
            assert row["extension"] == name.rsplit(".", 1)[1].lower()
            assert row["commit_files"] == lengths[i]
            zone_s = -7.5 * 3600 if commit.zone == "-0730" else 0
            assert row["hour"] == (commit.made_s + zone_s) // 3600 % 24


def test_a_file_keeps_its_number_through_renames(plan: Plan, data: DemoData) -> None:
    number: dict[int, int] = {}
    paths = data.columns["path"].to_arrow().to_pylist()
    for i, before in enumerate(plan.before):
        after = plan.before[i + 1] if i + 1 < len(plan.before) else None
        for row in range(int(data.bundle_offsets[i]), int(data.bundle_offsets[i + 1])):
            planned = before.get(paths[row], (after or {}).get(paths[row]))
            if planned is not None:
                assert number.setdefault(planned, int(data.columns["file_id"].values[row])) == int(
                    data.columns["file_id"].values[row]
                )
    assert len(set(number.values())) == len(number) > 100


def visible(plan: Plan, i: int) -> list[tuple[int, int]]:
    """(made, arrival) of the commits whose events the request of commit i sees, oldest first."""
    asking = plan.commits[i]
    seen = [
        (c.made_s, k) for k, c in enumerate(plan.commits[:i]) if c.author == asking.author and c.made_s < asking.made_s
    ]
    return sorted(seen)


def test_a_request_sees_what_was_made_before_it_and_known(plan: Plan, data: DemoData) -> None:
    offsets = data.requests.candidate_offsets
    source = FatRowSource.of(data, {})
    commit_of = {int(b): r for r, b in enumerate(data.requests.bundle)}
    n_late = 0
    for i, commit in enumerate(plan.commits):
        seen = visible(plan, i)
        rows = [row for _, k in seen for row in range(int(data.bundle_offsets[k]), int(data.bundle_offsets[k + 1]))]
        touched = [p if a != "rename" else None for a, p in plan.changes[i] if a == "rename" or p in plan.before[i]]
        asks = len(rows) >= MIN_EVENTS and bool(touched)
        assert (i in commit_of) == asks
        if not asks:
            continue
        r = commit_of[i]
        assert data.requests.users[r] == commit.author
        assert data.requests.request_ts[r] == commit.made_s * 1000
        index, _ = source.history(np.array([r]))
        assert source.arrival[index].tolist() == rows
        assert source.lengths[r] == len(rows)
        n_late += source.stop[r] - source.start[r] > len(rows)
    assert n_late > 20
    assert offsets[-1] == sum(len(row) for row in (data.requests.labels["touched"].row(r) for r in commit_of.values()))


def test_candidates_are_existing_files(plan: Plan, data: DemoData) -> None:
    r = data.requests
    number = {int(f): p for f, p in zip(data.columns["file_id"].values, range(len(data)), strict=True)}
    assert len(number) > 100
    last_changed: dict[int, int] = {}
    n_changes: Counter[int] = Counter()
    request_of = {int(b): i for i, b in enumerate(r.bundle)}
    for i in range(len(plan.commits)):
        rows = range(int(data.bundle_offsets[i]), int(data.bundle_offsets[i + 1]))
        files = data.columns["file_id"].values[rows].tolist()
        if i in request_of:
            row = request_of[i]
            shown = r.candidates["file_id"].row(row).tolist()
            labels = r.labels["touched"].row(row).tolist()
            assert shown == sorted(set(shown))
            touched = {f for f, y in zip(shown, labels, strict=True) if y}
            expected = {f for f in files if f in n_changes}
            assert touched <= expected
            assert len(touched) == min(len(expected), MAX_TOUCHED)
            others = set(shown) - touched
            assert not others & set(files)
            # As many files exist as the plan says; which, folders and counts tell.
            n_exist = len(plan.before[i])
            assert len(others) == min(max(MIN_CANDIDATES - len(touched), MIN_OTHERS), n_exist - len(expected))
            days = r.candidates["days_since_change"].row(row).tolist()
            arrival = int(data.arrival_ts[i])
            assert r.candidates["changes"].row(row).tolist() == [n_changes[f] for f in shown]
            assert days == [(arrival - last_changed[f]) // DAY_MS for f in shown]
            folders = Counter(r.candidates["folder"].to_arrow()[row].as_py())
            existing = Counter(p.rpartition("/")[0] for p in plan.before[i])
            assert folders <= existing
        for f in files:
            n_changes[f] += 1
            last_changed[f] = int(data.arrival_ts[i])


def test_context_is_of_the_author(plan: Plan, data: DemoData) -> None:
    domains = data.requests.context["email_domain"].to_arrow().to_pylist()
    for row, bundle in enumerate(data.requests.bundle.tolist()):
        commit = plan.commits[bundle]
        assert domains[row] == {"dan": ""}.get(commit.author, commit.author.split("@")[-1])
        local_days = (commit.made_s - (27_000 if commit.zone == "-0730" else 0)) // 86_400
        assert data.requests.context["weekday"].values[row] == (local_days + 3) % 7


def test_a_request_is_named_by_its_commit(repo: Path, data: DemoData) -> None:
    shown = run_git(repo, "log", "--format=%H", "--reverse").decode().split()
    assert data.requests.request_id.tolist() == [int(shown[b][:15], 16) for b in data.requests.bundle]


def test_a_sample_depends_on_the_seed(repo: Path, data: DemoData) -> None:
    same, other = load_git(repo, seed=7), load_git(repo, seed=8)
    ours = data.requests.candidates["file_id"].values
    assert np.array_equal(ours, same.requests.candidates["file_id"].values)
    assert not np.array_equal(ours, other.requests.candidates["file_id"].values)


def test_the_last_requests_by_arrival_are_held_out(data: DemoData) -> None:
    assert abs(data.held_out.mean() - 0.15) < 0.02
    assert np.all(np.diff(data.held_out.astype(int)) >= 0)


def test_limits_are_told(repo: Path, data: DemoData, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(data.words.notes) == 1
    capped = load_git(repo, 100)
    assert len(capped.arrival_ts) == 100
    assert "the newest 100 commits; --max-commits takes more" in capped.words.notes[1]
    monkeypatch.setattr(git, "MAX_HISTORY_EVENTS", 500)
    fewer = load_git(repo)
    assert 0 < len(fewer.requests) < len(data.requests) / 2
    assert FatRowSource.of(fewer, {}).lengths.sum() < 1_500
    assert "were kept, by lot" in fewer.words.notes[1]


@pytest.mark.parametrize(
    ("days", "steps"), [(0.0, "hours"), (20.0, "steps of 2 hours"), (300.0, "days"), (4_000.0, "steps of 11 days")]
)
def test_steps_fit_the_time_that_a_history_spans(days: float, steps: str) -> None:
    stray = np.array([0] * 3 + [START_S * 1000 + int(i * days * DAY_MS / 999) for i in range(1000)], np.int64)
    assert git._steps(stray)[1] == steps
