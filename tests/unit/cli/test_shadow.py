"""``thinrow import-fat-rows`` and ``thinrow shadow`` on the command line: what they print, and their exit status."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner, Result

from thinrow.cli.main import cli
from thinrow.testing.fat_rows import random_fat_rows


def ran(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(w) for w in words])


def test_imported_rows_have_no_difference_and_changed_ones_have(tmp_path: Path) -> None:
    table = random_fat_rows(np.random.default_rng(2), n_rows=60, newest=6)
    pq.write_table(table, tmp_path / "rows.parquet")
    where = ["--store", tmp_path / "s", "--table", tmp_path / "t"]
    done = ran(
        "import-fat-rows", tmp_path / "rows.parquet", *where, "--newest", 6, "--buckets", 2, "--window", "click=9"
    )
    assert done.exit_code == 0, done.output
    assert "60 examples, each equal to its fat row, read with max_len=6" in done.output
    same = ran("shadow", tmp_path / "rows.parquet", *where, "--newest", 6)
    assert same.exit_code == 0, same.output
    assert "60 requests, 60 equal" in same.output
    assert "unknown             0            0            0" in same.output

    row = next(i for i, events in enumerate(table["event_ts"].to_pylist()) if len(events) > 2)
    cut = {c: table[c].to_pylist() for c in ("event_ts", "item", "price", "tag", "bag")}
    for values in cut.values():
        values[row] = values[row][1:]
    changed = table
    for name, values in cut.items():
        changed = changed.set_column(changed.column_names.index(name), name, pa.array(values, table[name].type))
    pq.write_table(changed, tmp_path / "changed.parquet")
    found = ran("shadow", tmp_path / "changed.parquet", *where, "--newest", 6, "--json", tmp_path / "found.json")
    assert found.exit_code == 1
    assert f"request {7 * row} of user" in found.output
    body = json.loads((tmp_path / "found.json").read_text())
    assert (body["requests"], body["equal"]) == (60, 59)
    assert [d["causes"] for d in body["differences"]] == [{"truncated": {"theirs": 0, "ours": 1}}]


def test_against_what_is_known_now(tmp_path: Path) -> None:
    table = random_fat_rows(np.random.default_rng(3), n_rows=40, restated=0.0)
    pq.write_table(table, tmp_path / "rows.parquet")
    where = ["--store", tmp_path / "s"]
    assert ran("import-fat-rows", tmp_path / "rows.parquet", *where, "--table", tmp_path / "t").exit_code == 0
    found = ran("shadow", tmp_path / "rows.parquet", *where, "--show", 0)
    causes = {line.split()[0]: [int(n) for n in line.split()[1:]] for line in found.output.splitlines()[2:]}
    # Their rows lack what came late; the store knows it now.
    assert found.exit_code == 1
    assert causes["late"][0] > 0
    assert causes["restated"] == causes["order"] == causes["boundary"] == causes["future"] == [0, 0, 0]


def test_dry_run_and_refusals(tmp_path: Path) -> None:
    pq.write_table(random_fat_rows(np.random.default_rng(4), n_rows=3), tmp_path / "rows.parquet")
    where = ["--store", tmp_path / "s", "--table", tmp_path / "t"]
    dry = ran("import-fat-rows", tmp_path / "rows.parquet", *where, "--dry-run")
    assert dry.exit_code == 0
    assert "events: item, price, tag, bag" in dry.output
    assert not (tmp_path / "s").exists()
    bad = ran("import-fat-rows", tmp_path / "rows.parquet", *where, "--window", "click")
    assert "write NAME=MS" in str(bad.exception)
    bad = ran("import-fat-rows", tmp_path / "rows.parquet", *where, "--item", "no")
    assert "not one of the candidate fields" in str(bad.exception)
