"""``thinrow read`` and ``inspect``: values are shown as they are, and a user without events is named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from thinrow.cli.main import cli
from thinrow.cli.read import plain_rows
from thinrow.examples import ExampleTable, ImpressionLog, Impressions, OutcomeLog, join_logs
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema, ExampleSchema


@pytest.fixture
def store(tmp_path: Path) -> str:
    events = pa.table({"user": ["[b]x", "y"], "ts": [1000, 2000], "text": ["[red]not a colour :smile:", "plain"]})
    path = str(tmp_path / "store")
    with HistoryStore.create(path, EventSchema.infer(events.schema, user="user", time="ts"), 1) as made:
        made.append(events)
        made.compact()
    return path


def test_values_are_no_markup(store: str) -> None:
    done = CliRunner().invoke(cli, ["inspect", "[b]x", "--store", store], catch_exceptions=False)
    assert done.exit_code == 0
    assert "user [b]x: bucket 0 of 1, generation 2" in done.stdout
    assert "[red]not a colour :smile:" in done.stdout
    assert "segments/00000/" in done.stdout
    assert "newest 1 events:" in done.stdout


def test_inspect_of_nobody(store: str) -> None:
    done = CliRunner().invoke(cli, ["inspect", "nobody", "--store", store, "--at", "1500"], catch_exceptions=False)
    assert done.exit_code == 1
    assert "user nobody has no events in the store" in done.stderr
    assert done.stdout == ""


def test_read_names_users_without_events(store: str) -> None:
    done = CliRunner().invoke(cli, ["read", "y", "nobody", "--store", store], catch_exceptions=False)
    assert done.exit_code == 1
    assert done.stdout == "y\t1970-01-01T00:00:02.000Z\tarrival=1\ttext=plain\n"
    assert done.stderr.startswith("thinrow: user nobody has no events in the store at ")


def test_inspect_shows_logged_versions(tmp_path: Path) -> None:
    events = pa.table({"user": [7, 7, 9], "ts": [1000, 2000, 2500], "item": [1, 2, 3]})
    with HistoryStore.create(tmp_path / "s", EventSchema.infer(events.schema, user="user", time="ts"), 2) as made:
        made.append(events)
        made.compact()
        shape = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 10})
        shown = ImpressionLog(tmp_path / "shown", made.schema, shape)
        shown.append(Impressions.of(shape, [100, 101], made.snapshot([7, 9], 2600), candidates={"item": [[4], [5]]}))
        shown.append(Impressions.of(shape, [102], made.snapshot([7], 1500), candidates={"item": [[6]]}))
        schema = made.schema
    with ExampleTable.create(tmp_path / "t", event_schema=schema, example_schema=shape, n_buckets=2) as table:
        join_logs(shown, OutcomeLog(tmp_path / "clicks"), table, now_ms=10_000)
    arguments = ["inspect", "7", "--store", str(tmp_path / "s"), "--examples", str(tmp_path / "t")]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert f"2 versions in {tmp_path / 't'}, all of them verified:" in done.stdout.replace("\n", "")
    requests = [line.split()[1] for line in done.stdout.splitlines() if "│ 10" in line]
    assert requests == ["102", "100"]


def test_float32_is_shown_as_it_was_written() -> None:
    price = pa.array([93.65, None], pa.float32())
    vector = pa.FixedSizeListArray.from_arrays(pa.array([0.1, 0.25, 1e20, -0.0], pa.float32()), 2)
    lists = pa.array([[0.1], [None, 3.4]], pa.list_(pa.float32()))
    table = pa.table({"price": price, "vector": vector, "lists": lists, "exact": [0.1 + 0.2, 1.0], "s": ["a", None]})
    assert plain_rows(table) == [
        {"price": 93.65, "vector": [0.1, 0.25], "lists": [0.1], "exact": 0.1 + 0.2, "s": "a"},
        {"price": None, "vector": [1e20, -0.0], "lists": [None, 3.4], "exact": 1.0, "s": None},
    ]
