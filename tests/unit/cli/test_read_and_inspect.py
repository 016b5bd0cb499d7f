"""``thinrow read`` and ``inspect``: values are shown as they are, and a user without events is named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from thinrow.cli.main import cli
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema


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
