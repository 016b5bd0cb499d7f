"""The command line from a table to a ranked list, and a training process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinrow.checkpoints import steps
from thinrow.core.units import DAY_MS
from thinrow.examples import ImpressionLog
from thinrow.serving import Ranker
from thinrow.testing.forked import Commands
from thinrow.testing.world import World, make_world

MAIN = [sys.executable, "-c", "from thinrow.cli.main import main; main()"]

RECIPE = """
import dataclasses
from thinrow.testing.rankers import world_config

def slow():
    return world_config("hstu", epochs=12, checkpoint_every=3)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    made = make_world(folder)
    (folder / "mine.py").write_text(RECIPE)
    return made


def thinrow(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return Commands.shared().run(*arguments, stdin=stdin)


def train_command(world: World, out: Path, *more: object) -> list[str]:
    recipe = f"{world.store_path.parent / 'mine.py'}:slow"
    places = ["--store", world.store_path, "--table", world.table_path, "--out", out]
    return ["train", recipe, *map(str, places), *map(str, more)]


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_losses_of_one_that_was_left_alone(world: World, tmp_path: Path) -> None:
    whole = thinrow(*train_command(world, tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    assert "progressive NE" in whole.stdout
    out, kills = tmp_path / "killed", 0
    # Killed anywhere: between steps, in the middle of a checkpoint; once or twice before it may end.
    for wanted in (1, 7):
        resume = ["--resume"] if steps(out) else []
        process = subprocess.Popen([*MAIN, *train_command(world, out, *resume)], stdout=subprocess.DEVNULL)
        log = out / "log.jsonl"
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline:
            if log.exists() and log.read_bytes().count(b"\n") >= wanted and steps(out):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        kills += process.wait(300) == -signal.SIGKILL
    assert kills >= 1
    ended = thinrow(*train_command(world, out, "--resume"))
    assert ended.returncode == 0, ended.stderr
    assert losses(out) == losses(tmp_path / "whole")
    assert ended.stdout.split("progressive NE ")[1][:6] == whole.stdout.split("progressive NE ")[1][:6]


def test_train_evaluate_rank(world: World, tmp_path: Path) -> None:
    run, cut = tmp_path / "run", world.start_ms + 9 * DAY_MS
    trained = thinrow(*train_command(world, run, "--until", cut, "--set", "epochs=3", "--set", "ranker.dim=8"))
    assert trained.returncode == 0, trained.stderr
    assert "next: thinrow evaluate" in trained.stdout
    places = ["--store", world.store_path, "--table", world.table_path]
    scored = thinrow("evaluate", run, *places, "--since", cut, "--json")
    assert scored.returncode == 0, scored.stderr
    found = json.loads(scored.stdout)
    assert found["requests"] == 36
    assert found["ne"] > 0
    assert 0 < found["gauc"] < 1

    request = {"request_id": 1, "user": 4, "time": world.end_ms, "context": {"city": "city 1"}}
    items = [{"item": i, "brand": f"brand {i % 6}"} for i in range(5)]
    lines = "\n".join(json.dumps({**request, "request_id": i, "candidates": items}) for i in (1, 2)) + "\n"
    ranked = thinrow(
        "rank", run, "-", "--store", world.store_path, "--top", 3, "--log", tmp_path / "log", "--arm", "B", stdin=lines
    )
    assert ranked.returncode == 0, ranked.stderr
    answers = [json.loads(line) for line in ranked.stdout.splitlines()]
    assert [a["request_id"] for a in answers] == [1, 2]
    assert answers[0]["ranked"] == answers[1]["ranked"]
    scores = [c["score"] for c in answers[0]["ranked"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    with world.store() as store:
        log = ImpressionLog(tmp_path / "log", store.schema, Ranker(store, run).schema)
        logged = list(log.scan())
        assert sum(map(len, logged)) == 2
        assert logged[0].arm.to_arrow().to_pylist() == ["B"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 of the requests is no JSON"),
        ('{"user": 4, "time": 5, "candidates": []}', "lacks 'request_id'"),
        ('{"request_id": 1, "user": 4, "time": 5, "context": {"city": ""}, "candidates": [{"item": 1}]}', "lacks 'br"),
        ('{"request_id": 1, "user": 4, "time": 5, "candidates": 3, "context": {"city": ""}}', "has another shape"),
        (
            '{"request_id": "a", "user": 4, "time": 5, "candidates": [], "context": {"city": ""}}',
            "request_id 'a' is no",
        ),
        ('{"request_id": 1, "user": [4], "time": 5, "candidates": [], "context": {"city": ""}}', "neither an integer"),
    ],
)
def test_a_bad_request_is_one_line(
    world: World, tmp_path_factory: pytest.TempPathFactory, line: str, message: str
) -> None:
    run = tmp_path_factory.getbasetemp() / "small-run"
    if not run.exists():
        done = thinrow(*train_command(world, run, "--set", "epochs=1"))
        assert done.returncode == 0, done.stderr
    failed = thinrow("rank", run, "-", "--store", world.store_path, stdin=line)
    assert failed.returncode == 1
    assert message in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_what_cannot_be_trained_or_loaded_is_one_line(world: World, tmp_path: Path) -> None:
    places = ["--store", world.store_path, "--table", world.table_path]
    for command, message in (
        (["train", "hstu", *places, "--out", tmp_path / "x"], "no recipe 'hstu'"),
        (["train", *places, "--out", tmp_path / "x"], "Missing argument 'RECIPE'"),
        (train_command(world, tmp_path / "x", "--set", "epochs=null"), "must be of type int"),
        (train_command(world, tmp_path / "x", "--set", "ranker.projection.max_len=abc"), "must be of type int | None"),
        (train_command(world, tmp_path / "x", "--set", "epoch=1"), "no value 'epoch'"),
        (train_command(world, tmp_path / "x", "--set", "epochs"), "has no '='"),
        (train_command(world, tmp_path / "x", "--resume"), "no checkpoint"),
        (["train", "hstu_retail_small", *places, "--out", tmp_path / "x"], "outcomes buy"),
        (["evaluate", tmp_path / "nothing", *places], "no checkpoint"),
    ):
        failed = thinrow(*command)
        assert failed.returncode in (1, 2)
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr


def test_without_torch_the_data_half_works_and_the_rest_names_the_extra(world: World, tmp_path: Path) -> None:
    """A process in which torch and safetensors cannot be imported, as after a plain `pip install thinrow`."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torch', 'safetensors', 'lightning'):\n    sys.modules[name] = None\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = (
        "import sys, thinrow\n"
        "from thinrow.core.errors import MissingExtraError\n"
        "store, table = thinrow.open_store(sys.argv[1]), thinrow.ExampleTable.open(sys.argv[2])\n"
        "print(sum(len(b) for b in thinrow.loader(store, table)))\n"
        "import thinrow.serving\n"
        "for name in ('models', 'training', 'serving', 'recipes.registry', 'dpp.torch', 'jagged.torch'):\n"
        "    try:\n"
        "        exec(f'from thinrow.{name} import *')\n"
        "    except MissingExtraError as e:\n"
        "        print(e)\n"
    )
    arguments = [sys.executable, "-c", code, str(world.store_path), str(world.table_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["144"] + ["torch is not installed; run: pip install 'thinrow[train]'"] * 6
    for what, extra in (("demo", "demo"), (f"evaluate x --store {world.store_path} --table t", "train")):
        command = [*MAIN, *what.split(), *(["--out", str(tmp_path / "out")] if extra == "demo" else [])]
        failed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert failed.returncode == 1
        assert failed.stderr == f"thinrow: torch is not installed; run: pip install 'thinrow[{extra}]'\n"
    command = [*MAIN, *train_command(world, tmp_path / "x")]
    failed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert failed.returncode == 1
    assert failed.stderr == "thinrow: torch is not installed; run: pip install 'thinrow[train]'\n"
