"""What joins the logs while the service runs: into a table, a log of splits, or both, and goes on after any error."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from thinrow.cli.serve import command
from thinrow.core.errors import InputError
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.splits import SplitLog
from thinrow.examples.table import ExampleTable
from thinrow.history.store import HistoryStore
from thinrow.online import TableWriter, server
from thinrow.schema import EventSchema, ExampleSchema

EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 50})


@pytest.fixture
def schema(tmp_path: Path) -> EventSchema:
    """Of a store ``s`` of user 7 with one event, beside an empty table ``t``."""
    table = pa.table({"user": [7], "ts": [5], "item": [3]})
    schema = EventSchema.infer(table.schema, user="user", time="ts")
    with HistoryStore.create(tmp_path / "s", schema, 1, sync=False) as store:
        store.append(table)
    ExampleTable.create(tmp_path / "t", event_schema=schema, example_schema=EXAMPLES, n_buckets=1).close()
    return schema


def labels(batches: list[Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for batch in batches:
        clicks = batch.labels["click"].to_arrow().to_pylist()
        found |= dict(zip(batch.request_id.tolist(), clicks, strict=True))
    return found


@pytest.mark.parametrize("has_table", [True, False])
def test_the_command_joins_by_watermarks_into_a_log_of_splits(
    tmp_path: Path, schema: EventSchema, has_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(served: server.DrainingServer) -> None:
        with TestClient(served.config.app) as http:  # type: ignore[arg-type]
            for number, at in ((1, 10), (2, 20), (3, 200)):
                seen = http.post("/v1/snapshots", json={"users": [7], "request_ts": at}).json()["seen"]
                shown = {"seen": seen, "request_id": [number], "candidates": {"item": [[1, 2]]}}
                assert http.post("/v1/impressions", json=shown).status_code == 201
            done = {"request_id": [1, 3], "item": [2, 1], "name": "click", "ts": [30, 210]}
            assert http.post("/v1/outcomes", json=done).status_code == 201

    monkeypatch.setattr(server.DrainingServer, "run", run)
    (tmp_path / "x.json").write_text(json.dumps(EXAMPLES.to_dict()))
    fields = ["--table", f"{tmp_path}/t"] if has_table else ["--example-schema", f"{tmp_path}/x.json"]
    options = ["snapshots", "--store", f"{tmp_path}/s", "--log", f"{tmp_path}/l", *fields]
    options += ["--splits", f"{tmp_path}/p", "--lateness-s", "0.1"]
    done = CliRunner().invoke(command, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    splits = SplitLog(tmp_path / "p", schema, EXAMPLES)
    # 210 ms less the lateness is past 10 + 50 and 20 + 50, and before 200 + 50.
    assert labels([splits.read(n).examples for n in splits.numbers()]) == {1: [0, 1], 2: [0, 0]}
    if has_table:
        with ExampleTable.open(tmp_path / "t") as table:
            assert labels([table.read_bucket(b) for b in table.buckets()]) == {1: [0, 1], 2: [0, 0]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splits": "p", "lateness_s": 1.0}, "--splits needs --log"),
        ({"splits": "p", "log": "l"}, "--splits needs --log"),
        ({"lateness_s": 1.0, "log": "l"}, "add --table, or --splits"),
    ],
)
def test_options_that_need_others(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    placed = {n: tmp_path / v if isinstance(v, str) else v for n, v in options.items()}
    with pytest.raises(InputError, match=message):
        server.serve(server.ServeOptions(tmp_path / "s", **placed))


def test_splits_are_not_closed_by_a_clock(tmp_path: Path, schema: EventSchema) -> None:
    logs = ImpressionLog(tmp_path / "i", schema, EXAMPLES), OutcomeLog(tmp_path / "o")
    with pytest.raises(InputError, match="give lateness_ms"):
        TableWriter(*logs, None, splits=SplitLog(tmp_path / "p", schema, EXAMPLES))
    with pytest.raises(InputError, match="neither a table"):
        TableWriter(*logs, None)


def test_no_error_ends_the_join(tmp_path: Path, schema: EventSchema, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = ImpressionLog(tmp_path / "i", schema, EXAMPLES), OutcomeLog(tmp_path / "o")
    run_once, failed = TableWriter.run_once, threading.Event()

    def fail(writer: TableWriter) -> Any:
        failed.set()
        raise MemoryError("no room for anything")

    monkeypatch.setattr(TableWriter, "run_once", fail)
    with ExampleTable.open(tmp_path / "t") as table, TableWriter(*logs, table, commit_s=0.01) as writer:
        assert failed.wait(300)
        while writer.error is None:
            threading.Event().wait(0.01)
        monkeypatch.setattr(TableWriter, "run_once", run_once)
        while writer.last is None:
            threading.Event().wait(0.01)
    assert writer.error is None
