"""``thinrow train --follow``: a run over a log of splits that grows, killed and resumed, has the losses of one that was
left alone over the whole log."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thinrow.checkpoints import steps
from thinrow.core.errors import CheckpointMismatch, InputError, NothingNew
from thinrow.dpp import RowFilter
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.splits import SplitLog
from thinrow.examples.streaming import heartbeat, join_stream
from thinrow.testing.forked import Commands
from thinrow.testing.rankers import world_config
from thinrow.testing.world import EXAMPLES, World, make_world
from thinrow.training import StreamTrainer, train_stream

MAIN = [sys.executable, "-c", "from thinrow.cli.main import main; main()"]
RECIPE = """
from thinrow.testing.rankers import world_config

def mine():
    return world_config("dlrm", base_rows=4, block=2, checkpoint_every=3)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    made = make_world(folder)
    (folder / "mine.py").write_text(RECIPE)
    return made


class Growing:
    """The world's logs, given out day by day to a join that writes splits."""

    def __init__(self, world: World, path: Path) -> None:
        with world.table() as table:
            schema = table.event_schema
        made = world.store_path.parent
        self.days = list(ImpressionLog(made / "shown", schema, EXAMPLES).scan())
        self.bought = list(OutcomeLog(made / "bought").scan())
        self.logs = ImpressionLog(path / "i", schema, EXAMPLES), OutcomeLog(path / "o")
        self.splits = SplitLog(path / "s", schema, EXAMPLES)

    def day(self) -> None:
        day = self.days.pop(0)
        self.logs[0].append(day)
        self.logs[1].append(self.bought.pop(0))
        self.logs[1].append(heartbeat(int(day.snapshots.request_ts.max()) + 5_000))
        join_stream(*self.logs, self.splits, 0)

    def all(self) -> Growing:
        while self.days:
            self.day()
        self.splits.seal()
        return self


def config(**changes):
    return world_config("dlrm", **{"base_rows": 4, "block": 2, "checkpoint_every": 3, **changes})


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Growing, list[float]]:
    folder = tmp_path_factory.mktemp("whole")
    log = Growing(world, folder).all()
    with world.store() as store:
        _, result = train_stream(config(), store, log.splits, out=folder / "run")
    assert result.steps == len(result.losses) == 18
    assert result.examples == 144
    assert losses(folder / "run") == result.losses
    assert steps(folder / "run")[-1] == 18
    return log, result.losses


@pytest.mark.slow
def test_a_killed_run_over_a_growing_log_resumes_to_the_same_losses(
    world: World, whole: tuple[Growing, list[float]], tmp_path: Path
) -> None:
    log, out = Growing(world, tmp_path), tmp_path / "run"
    recipe = f"{world.store_path.parent / 'mine.py'}:mine"
    places = ["--store", world.store_path, "--follow", tmp_path / "s", "--table", world.table_path, "--out", out]
    command = [*MAIN, "train", recipe, *map(str, places)]
    kills = []
    for wanted in (4, 11):
        process = subprocess.Popen([*command, *(["--resume"] if steps(out) else [])], stderr=subprocess.PIPE)
        end = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < end:
            if log.days and len(log.days) > 12 - wanted:
                log.day()
            if (out / "log.jsonl").exists() and len(losses(out)) >= wanted and steps(out):
                process.send_signal(signal.SIGKILL)
                kills.append(len(losses(out)))
                break
            time.sleep(0.005)
        process.wait()
    assert len(kills) == 2
    # It follows, is told to end while it waits for a split, and leaves a checkpoint of its last step.
    process = subprocess.Popen([*command, "--resume"], stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 200
    while len(log.days) > 0 and time.monotonic() < end:
        log.day()
    while len(losses(out)) < 18 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "step 18: progressive NE" in said
    assert steps(out)[-1] == 18
    log.splits.seal()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200)
    assert "0 requests" in done.stdout, done.stderr
    assert losses(out) == whole[1]


def test_a_run_stopped_at_any_step_resumes_to_the_same_losses(
    world: World, whole: tuple[Growing, list[float]], tmp_path: Path
) -> None:
    with world.store() as store:
        for step in range(1, 18, 4):
            out = tmp_path / str(step)
            first = StreamTrainer(config(), store, whole[0].splits, threads=1)
            assert first.run(out, stop_after=step).losses == whole[1][:step]
            _, rest = train_stream(config(), store, whole[0].splits, out=out, resume=True, threads=3)
            assert rest.losses == whole[1][step:]
            assert losses(out) == whole[1]


def test_a_log_that_stands_still_is_an_error_with_all_that_was_learned_kept(world: World, tmp_path: Path) -> None:
    log = Growing(world, tmp_path)
    for _ in range(3):
        log.day()
    with world.store() as store:
        with pytest.raises(NothingNew, match="does the join run"):
            train_stream(config(), store, log.splits, out=tmp_path / "run", wait_s=0.3)
        assert steps(tmp_path / "run")[-1] == len(losses(tmp_path / "run")) == 36 // 8
        stop = threading.Event()
        stop.set()
        _, result = train_stream(config(), store, log.splits, out=tmp_path / "run", resume=True, stop=stop)
        assert (result.steps, result.losses) == (4, [])


def test_what_does_not_fit_is_named(world: World, whole: tuple[Growing, list[float]], tmp_path: Path) -> None:
    log = whole[0].splits
    with world.store() as store:
        for wrong in ({"epochs": 2}, {"rows": RowFilter(since_ms=1)}):
            with pytest.raises(InputError, match="a log that grows is read once, whole"):
                StreamTrainer(config(**wrong), store, log)
        train_stream(config(), store, log, out=tmp_path / "run")
        with pytest.raises(InputError, match="holds checkpoints"):
            train_stream(config(), store, log, out=tmp_path / "run")
        other = Growing(world, tmp_path / "other").all().splits
        with pytest.raises(CheckpointMismatch, match="its log of splits is not here"):
            train_stream(config(), store, other, out=tmp_path / "run", resume=True)

    def run(*more: object) -> str:
        recipe = f"{world.store_path.parent / 'mine.py'}:mine"
        words = ["train", recipe, "--store", world.store_path, "--out", tmp_path / "new", *more]
        done = Commands.shared().run(*words)
        assert done.returncode == 1
        return done.stderr

    assert "add --table T, or --follow SPLITS" in run()
    assert "no log of splits" in run("--follow", tmp_path / "none")
    assert "--follow needs the fields of examples" in run("--follow", log._objects.root)
    assert "go with --follow" in run("--table", world.table_path, "--wait-s", 1)
