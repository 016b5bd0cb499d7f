"""Every benchmark case runs, prints one JSON object last, and its contestants deliver the same events."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = sorted(p.stem for p in (ROOT / "bench" / "cases").glob("*.py") if p.stem != "__init__")


@pytest.mark.parametrize("case", CASES)
def test_case_prints_ratios(case: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bench", case, "--quick", "--json", "-"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    printed = json.loads(ran.stdout.splitlines()[-1])
    assert list(printed) == ["case", "parameters", "machine", "figures", "ratios"]
    assert printed["case"] == case
    assert printed["ratios"]
    assert all(key.startswith("vs_") and ratio > 0 for key, ratio in printed["ratios"].items())


def test_unknown_case_is_refused() -> None:
    ran = subprocess.run([sys.executable, "-m", "bench", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "reconstruct" in ran.stderr
