"""The main job on a few households, through its command: exact, reported, repeatable, careful with folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from thinrow.cli.demo import job, replay
from thinrow.cli.demo.command import command
from thinrow.cli.demo.retail import load_retail
from thinrow.core.errors import InputError
from thinrow.core.units import DAY_MS

LENGTHS = {"16", "128", "1024", "all"}
STORES = {"thinrow_shared", "thinrow_copies", "fat_rows_sorted", "fat_rows_arrival_order"}
SMALL = ["--weeks", "9", "--households", "10"]


def test_demo_is_exact_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_warm_up", lambda: None)
    out = tmp_path / "out"
    done = CliRunner().invoke(command, [*SMALL, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
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
    assert "<svg" in (out / "report.html").read_text()
    # What an earlier run left is replaced.
    again = CliRunner().invoke(command, [*SMALL, "--seed", "1", "--out", str(out)], catch_exceptions=False)
    assert again.exit_code == 0
    assert json.loads((out / "report.json").read_text())["mismatches"] == 0
    # A difference is an exit status of 1.
    monkeypatch.setattr(job, "run_demo", lambda config, console: report | {"mismatches": 2})
    wrong = CliRunner().invoke(command, ["--out", str(out)])
    assert wrong.exit_code == 1
    assert f"2 of {4 * n} comparisons with a fat row differ." in " ".join(wrong.output.split())


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    with pytest.raises(InputError, match="not a demo's output; pass another folder"):
        CliRunner().invoke(command, [*SMALL, "--out", str(tmp_path)], catch_exceptions=False)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_no_request_left_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_warm_up", lambda: None)
    with pytest.raises(InputError, match="no request in weeks=3, households=2; raise the limits"):
        CliRunner().invoke(
            command, ["--weeks", "3", "--households", "2", "--out", str(tmp_path)], catch_exceptions=False
        )


def test_rounds_hold_each_household_once_and_keep_its_order() -> None:
    data = load_retail(weeks=4, households=300)
    seen: dict[int, int] = {}
    n_baskets, last_day = 0, -1
    for day, parts in replay.rounds(data):
        assert day > last_day
        last_day = day
        for baskets in parts:
            first = data.basket_offsets[:-1][baskets]
            users = data.users[first].tolist()
            assert len(set(users)) == len(users)
            assert set((data.event_ts[first] // DAY_MS).tolist()) == {day}
            for user, basket in zip(users, baskets.tolist(), strict=True):
                assert seen.get(user, -1) < basket
                seen[user] = basket
            n_baskets += len(baskets)
    assert n_baskets == len(data.basket_offsets) - 1
