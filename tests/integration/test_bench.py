"""Every benchmark case runs, prints one JSON object last, and its contestants deliver the same events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
CASES = sorted(p.stem for p in (ROOT / "bench" / "cases").glob("*.py") if p.stem != "__init__")


#: The others take ten seconds each and more, for what peers import or compile.
_SHORT = {"reconstruct", "storage"}


@pytest.mark.parametrize("case", [c if c in _SHORT else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_case_prints_ratios(case: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bench", case, "--quick", "--json", "-"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    printed = json.loads(ran.stdout.splitlines()[-1])
    assert list(printed) == ["case", "parameters", "machine", "figures", "ratios"]
    assert printed["case"] == case
    assert printed["ratios"]
    assert all(key.startswith(("vs_", "threads_2_over_1")) for key in printed["ratios"])
    assert all(ratio > 0 for ratio in printed["ratios"].values())


@pytest.fixture(scope="module")
def git_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in the form that ``--git-file`` takes."""
    path, n, rng = tmp_path_factory.mktemp("git") / "changes.parquet", 6_000, np.random.default_rng(5)
    event_ts = np.sort(rng.integers(0, 400, n)) * 60_000
    columns = {
        "user_id": np.sort(rng.integers(3, 40, n)).astype(np.int32),
        "event_ts": event_ts.astype("datetime64[ms]"),
        "arrival_ts": (event_ts + rng.integers(0, 2, n) * 7_200_000).astype("datetime64[ms]"),
        "item_id": rng.integers(0, 900, n).astype(np.int32),
        "action": pa.array(rng.choice(["add", "modify"], n)).dictionary_encode(),
        "domain": rng.integers(0, 3, n).astype(np.int8),
        "folder_id": rng.integers(0, 50, n).astype(np.int32),
        "extension_id": rng.integers(0, 9, n).astype(np.int16),
    }
    pq.write_table(pa.table(columns), path)
    return path


_LATE_SLOW = ("projection", "published_rule", "single", "storage", "write")


@pytest.mark.parametrize("case", ["reconstruct", *(pytest.param(c, marks=pytest.mark.slow) for c in _LATE_SLOW)])
def test_case_runs_on_late_events(case: str, git_file: Path) -> None:
    options = ["--newest", "256", "--peers", "raw_copy,sorted_fat_rows"] if case == "reconstruct" else []
    ran = subprocess.run(
        [sys.executable, "-m", "bench", case, "--quick", "--data", "git", "--git-file", str(git_file), *options],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    printed = json.loads(ran.stdout.splitlines()[-1])
    assert printed["ratios"]
    assert (printed["parameters"]["data"], printed["parameters"]["events"]) == ("git", 6_000)


def test_unknown_case_is_refused() -> None:
    ran = subprocess.run([sys.executable, "-m", "bench", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "reconstruct" in ran.stderr


def _reconstruct(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "reconstruct", "--quick", "--newest", "256", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.slow
def test_peer_that_is_not_installed_is_named_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'lance' else found(name, *a)\n"
    )
    ran = _reconstruct(
        "--patterns", "random", "--peers", "raw_copy,lance",
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    printed = json.loads(ran.stdout.splitlines()[-1])
    assert printed["figures"]["skipped"] == {"lance": "lance is not installed"}
    assert "without lance" in ran.stderr
    assert {k.split(".")[0] for k in printed["ratios"]} == {"vs_raw_copy", "threads_2_over_1"}


@pytest.mark.slow
def test_work_folder_is_used_again(tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-m", "bench", "projection", "--quick", "--work", str(tmp_path)],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        made.append({p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()})
    assert {name.split("-")[0] for name in made[0]} == {"synthetic", "thinrow"}
    assert made[0] == made[1]


def test_unknown_choice_is_refused() -> None:
    ran = _reconstruct("--patterns", "zigzag")
    assert ran.returncode == 1
    assert "random, k20" in ran.stderr
