"""Where a training table may live: its files are below its directory whatever the directory is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinrow.core.errors import InputError
from thinrow.examples.export import export_events
from thinrow.examples.log import ImpressionLog
from thinrow.examples.table import ExampleTable
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema, Trait

EVENTS = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "item"),))
SHAPE = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 10})


@pytest.mark.parametrize("name", ["plain", "my data", "naïve", "a+b", "x=1,y"])
def test_everything_is_below_the_directory(tmp_path: Path, name: str) -> None:
    with ExampleTable.create(tmp_path / name, event_schema=EVENTS, example_schema=SHAPE, n_buckets=2):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert list((tmp_path / name).rglob("*.metadata.json"))
    with ExampleTable.open(tmp_path / name) as table:
        assert table.rows() == 0


@pytest.mark.parametrize("name", ["a#b", "q?x", "pct%20x", "semi;colon"])
def test_a_path_that_iceberg_reads_as_syntax_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="choose a path without it"):
        ExampleTable.create(tmp_path / name, event_schema=EVENTS, example_schema=SHAPE, n_buckets=2)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("url", ["s3://histories/shop", Path("s3://histories/shop"), "file:///histories"])
def test_a_url_is_no_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | Path) -> None:
    """A folder of the name ``s3:`` would be made, and hold what its owner believes to be in a bucket."""
    monkeypatch.chdir(tmp_path)
    with HistoryStore.create("store", EVENTS, n_buckets=2) as store:
        for make in (
            lambda: HistoryStore.create(url, EVENTS),
            lambda: HistoryStore.open(url),
            lambda: ExampleTable.create(url, event_schema=EVENTS, example_schema=SHAPE),
            lambda: ExampleTable.open(url),
            lambda: ImpressionLog(url, EVENTS, SHAPE),
            lambda: store.backup(url),
            lambda: export_events(store, url),
        ):
            with pytest.raises(InputError, match=r"a URL; it must be a path of this machine"):
                make()
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
