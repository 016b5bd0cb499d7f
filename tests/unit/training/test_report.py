"""What a run says of itself: the figures, the line, TensorBoard, a trace."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.core.errors import InputError, MissingExtraError
from thinrow.testing.forked import Commands
from thinrow.testing.rankers import world_config
from thinrow.testing.world import World, make_world
from thinrow.training import Trainer, report
from thinrow.training.metrics import auc, gauc
from thinrow.training.step import Scores


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    (folder / "mine.py").write_text(
        "from thinrow.testing.rankers import world_config\n\ndef small():\n    return world_config('hstu')\n"
    )
    return make_world(folder)


def record(step: int, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    scored = Scores(rng.normal(size=40), (rng.random(40) < 0.4).astype(np.int64), np.repeat(np.arange(4), 10))
    base = {"loss": 0.5 * step, "examples": 10, "table_bytes": 2_000, "flops": 3e6, "scored": [scored], "ne": 0.9}
    return {**base, "seconds": 2.0 * step, "waited_s": 0.5 * step, **changes}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "stream_bandwidth", lambda: 1e4)
    monkeypatch.setattr(report, "matmul_rate", lambda: 1e7)


def test_figures_are_of_the_steps_since_the_last_line() -> None:
    lines: list[str] = []
    found: list[dict[str, float]] = []
    meter = report.Meter(every_s=0, show=lines.append, write=lambda _, f: found.append(f), share=0.5)
    meter(1, 4, record(1))
    meter.every_s = 1e9
    meter(2, 4, record(2))
    meter(3, 4, record(3))
    meter.every_s = 0
    meter(4, 4, record(4))
    both = [record(s)["scored"][0] for s in (2, 3, 4)]
    logits, labels, users = (np.concatenate([getattr(s, n) for s in both]) for n in ("logits", "labels", "users"))
    assert found[1] == pytest.approx(
        {
            "loss": 1.5, "ne": 0.9, "auc": auc(logits, labels), "gauc": gauc(logits, labels, users),
            "requests_s": 30 / 6, "stall": 0.25, "mbu": 0.5 * 6_000 / 4.5 / 1e4, "mfu": 9e6 / 4.5 / 1e7,
        }
    )  # fmt: skip
    assert len(found) == 2
    assert lines[0].startswith("step 1/4: loss 0.5000, NE 0.9000, AUC 0.")
    assert lines[0].endswith(", 5 requests/s, stall 25.0%, MBU 6.7%, MFU 20.0%")


def test_what_there_is_nothing_to_tell_from_is_left_out() -> None:
    one_label = Scores(np.zeros(3), np.zeros(3, np.int64), np.arange(3))
    for scored in ([], [one_label]):
        lines: list[str] = []
        meter = report.Meter(every_s=0, show=lines.append)
        meter(1, None, record(1, scored=scored, flops=0.0, ne=math.nan))
        (text,) = lines
        assert text.startswith("step 1: loss 0.5000, 5 requests/s, stall")
        assert "AUC" not in text
        assert "MFU" not in text


def test_a_run_that_is_over_before_the_first_line_measures_nothing() -> None:
    lines: list[str] = []
    meter = report.Meter(every_s=1e9, show=lines.append)
    meter(1, 1, record(1))
    assert lines == []


def test_the_work_of_a_step_is_that_of_its_passes_and_steps_are_traced(world: World, tmp_path: Path) -> None:
    config = world_config("hstu")
    flops: list[float] = []
    path = tmp_path / "new" / "trace.json"
    with world.store() as store, world.table() as table, report.profiled(path, 2, 3) as trace:
        trainer = Trainer(config, store, table)

        def on_step(*step: Any) -> None:
            flops.append(step[2]["flops"])
            trace(*step)

        trainer.run(stop_after=4, on_step=on_step)
        one = trainer._sizes.step_flops(100, 8)
        assert trainer._sizes.batch_flops(np.array([100]), np.full(8, 100)) == pytest.approx(one)
        assert trainer._sizes.batch_flops(np.array([100]), np.full(8, 50)) < one
    assert flops[0] > 0
    names = [e.get("name", "") for e in json.loads(path.read_text())["traceEvents"]]
    assert {n for n in names if n.startswith("ProfilerStep")} == {"ProfilerStep#1", "ProfilerStep#2"}
    assert any("_Attention" in n for n in names)


def test_the_machines_rate_of_products_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert report.matmul_rate(64, 1) > 1e6


@pytest.mark.slow
def test_the_command_traces_steps_and_what_is_misspelt_is_said(world: World, tmp_path: Path) -> None:
    places = ["--store", world.store_path, "--table", world.table_path, "--out", tmp_path / "run"]
    command = ["train", f"{world.store_path.parent / 'mine.py'}:small", *places]
    done = Commands.shared().run(*command, "--profile", "2:3")
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert sum(e.get("name", "").startswith("ProfilerStep") for e in events) >= 2
    for text in ("3", "0:2", "3:2", "a:b"):
        failed = Commands.shared().run(*command, "--resume", "--profile", text)
        assert failed.returncode == 1
        assert "--profile" in failed.stderr or "the first must be 1 or more" in failed.stderr
    with pytest.raises(InputError, match="the first must be 1 or more"), report.profiled(tmp_path / "x", 2, 1):
        pass


def test_tensorboard_has_the_figures_or_is_named(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(MissingExtraError, match=r"thinrow\[tensorboard\]"), report.tensorboard(tmp_path):
            pass
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found]

    with report.tensorboard(tmp_path) as write:
        write(3, {"ne": 0.75})
        write(4, {"ne": 0.5})
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("train/ne")
    assert [(e.step, e.value) for e in found] == [(3, 0.75), (4, 0.5)]
