"""``thinrow ingest --bulk``: folders of files, an Iceberg table, what is done is not done again, bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyiceberg.catalog.sql import SqlCatalog

from thinrow.cli.ingest import command
from thinrow.core.errors import InputError
from thinrow.history.store import HistoryStore


def table_of(n: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table({"user": rng.integers(0, 9, n), "ts": rng.integers(0, 99, n), "item": np.arange(n)})


def ingest(*arguments: str) -> str:
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_folder_is_loaded_once(tmp_path: Path) -> None:
    files, store = tmp_path / "in", str(tmp_path / "s")
    files.mkdir()
    pq.write_table(table_of(50), files / "a.parquet")
    with pa.OSFile(str(files / "b.arrow"), "wb") as sink, pa.ipc.new_file(sink, table_of(1).schema) as out:
        out.write_table(table_of(30, 1))
    create = ["--create", "--user", "user", "--time", "ts", "--buckets", "2"]
    first = ingest(str(files), "--store", store, "--bulk", *create)
    assert first == "generation 2: 80 events loaded into 2 segments\n"
    again = "generation 2: 80 events were loaded before, into 2 segments\n"
    assert ingest(str(files), "--store", store, "--bulk", "--memory", "100", "--compact").startswith(again)
    assert "generation 3: 50" in ingest(str(files / "a.parquet"), "--store", store, "--bulk")
    with HistoryStore.open(store) as opened:
        assert opened.pin().n_rows == 130


def test_bad_input_leaves_no_store(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": [1, None], "ts": [1, 2]}), tmp_path / "a.parquet")
    create = ["--create", "--user", "user", "--time", "ts", "--store", str(tmp_path / "s")]
    with pytest.raises(InputError, match=r"a\.parquet: user 'user' is null in row 1"):
        ingest(str(tmp_path / "a.parquet"), "--bulk", *create)
    assert not (tmp_path / "s").exists()
    with pytest.raises(InputError, match="is null in row 1"):
        ingest(str(tmp_path / "a.parquet"), "--bulk", *create[:-1], str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
    with pytest.raises(InputError, match="go with --bulk"):
        ingest(str(tmp_path / "a.parquet"), "--memory", "5", *create)


def test_an_iceberg_table_is_loaded_once_a_snapshot(tmp_path: Path) -> None:
    catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/w")
    catalog.create_namespace("db")
    table = catalog.create_table("db.events", table_of(1).schema)
    for seed in range(3):
        table.append(table_of(40, seed))
    table.delete("item < 10")
    store = str(tmp_path / "s")
    create = ["--create", "--user", "user", "--time", "ts", "--buckets", "1"]
    for when in ("loaded", "were loaded before,"):
        said = ingest(table.metadata_location, "--store", store, "--bulk", *create)
        assert said == f"generation 2: 90 events {when} into 1 segments\n"
    table.append(table_of(5, 9))
    again = ingest(table.metadata_location, "--store", store, "--bulk")
    assert again.startswith("generation 3: 95 events")
