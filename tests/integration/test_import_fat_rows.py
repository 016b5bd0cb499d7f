"""Import of fat rows as others write them: the demo's rival, and the git histories whose events come late."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from thinrow.cli.demo.fat_rows import FatRowSource, write_sorted
from thinrow.cli.demo.retail import load_retail
from thinrow.cli.main import cli
from thinrow.jagged import Column, Jagged
from thinrow.moving import FatLayout, ImportOptions, import_fat_rows

DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data" / "git_interactions.parquet"
DATA = Path(os.environ.get("THINROW_GIT_DATA", DEFAULT))


def test_the_fat_rows_of_the_demo(tmp_path: Path) -> None:
    data = load_retail(weeks=10, households=40)
    offsets = data.requests.candidates["product_id"].offsets
    crossed = {"times_bought": Jagged(Column(np.arange(offsets[-1], dtype=np.int32)), offsets)}
    write_sorted(tmp_path / "fat.parquet", FatRowSource.of(data, crossed), n_buckets=4)
    command = ["import-fat-rows", str(tmp_path / "fat.parquet"), "--store", str(tmp_path / "s")]
    ran = CliRunner().invoke(cli, [*command, "--table", str(tmp_path / "t"), "--buckets", "4"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    assert f"{len(data.requests)} examples, each equal to its fat row" in ran.output
    seen = np.unique(data.requests.users)
    last = {u: data.requests.request_ts[data.requests.users == u].max() for u in seen}
    n_events = sum(int(((data.users == u) & (data.event_ts < t)).sum()) for u, t in last.items())
    assert f"{n_events} events of {len(seen)} users" in ran.output


@pytest.mark.skipif(not DATA.is_file(), reason=f"no file at {DATA}; name one by THINROW_GIT_DATA")
@pytest.mark.parametrize("newest", [None, 200])
def test_git_histories_with_late_events(tmp_path: Path, newest: int | None) -> None:
    """Rows of a pipeline that sees at T what arrived by T, in order of (event_ts, arrival)."""
    table = pq.read_table(DATA, columns=["user_id", "event_ts", "arrival_ts", "item_id", "action", "folder_id"])
    ms = {c: table[c].cast(pa.timestamp("ms")).cast(pa.int64()).to_numpy() for c in ("event_ts", "arrival_ts")}
    order = np.argsort(ms["arrival_ts"], kind="stable")
    user, event_ts, arrival_ts = (v[order] for v in (table["user_id"].to_numpy(), ms["event_ts"], ms["arrival_ts"]))
    table = table.take(order)
    rng = np.random.default_rng(3)
    often = np.bincount(user).argsort()[-60:]
    columns = {"request_id": [], "user_id": [], "request_ts": [], "event_ts": []}
    taken, lengths = [], []
    for number in range(600):
        u = int(rng.choice(often))
        mine = np.flatnonzero(user == u)
        now = int(arrival_ts[rng.choice(mine)]) + int(rng.integers(0, 2)) * 1_000
        rows = mine[(event_ts[mine] < now) & (arrival_ts[mine] <= now)]
        rows = rows[np.argsort(event_ts[rows], kind="stable")][-(newest or len(rows)) :] if len(rows) else rows
        taken.append(rows)
        lengths.append(len(rows))
        for name, value in (("request_id", number), ("user_id", u), ("request_ts", now)):
            columns[name].append(value)
    flat, offsets = np.concatenate(taken), pa.array(np.cumsum([0, *lengths]), pa.int64())
    lists = {"event_ts": pa.array(event_ts[flat])}
    lists |= {c: table[c].take(pa.array(flat)).combine_chunks() for c in ("item_id", "action", "folder_id")}
    del columns["event_ts"]
    fat = pa.table(columns | {n: pa.LargeListArray.from_arrays(offsets, v) for n, v in lists.items()})
    pq.write_table(fat, tmp_path / "fat.parquet", row_group_size=50)
    options = ImportOptions(n_buckets=2, memory_bytes=64 << 20)
    layout = FatLayout.infer(fat, newest=newest)
    report = import_fat_rows(tmp_path / "fat.parquet", layout, tmp_path / "s", tmp_path / "t", options)
    assert report.verified == report.counts.rows == 600
    assert report.counts.late > 100
    assert report.counts.row_events > (1 if newest else 3) * report.counts.events
