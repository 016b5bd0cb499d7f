"""Every fat row comes back from the imported store, whatever late, restated or truncated rows the pipeline logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError, SchemaError, StoreExists
from thinrow.examples.records import ExampleBatch
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.verify import verify_generation
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.moving import FatLayout, ImportOptions, ImportReport, import_fat_rows
from thinrow.moving import importer as importer_module
from thinrow.schema import Projection
from thinrow.testing.fat_rows import random_fat_rows

EVENT_COLUMNS = ("event_ts", "item", "price", "tag", "bag")


def lists(table: pa.Table, newest_first: bool = False) -> dict[int, list[Any]]:
    """Request id -> its events, oldest first; NaN as text, so that it equals itself."""
    out = {}
    for row in table.to_pylist():
        events = list(zip(*(row[c] for c in EVENT_COLUMNS), strict=True))
        out[row["request_id"]] = repr(events[::-1] if newest_first else events)
    return out


def examples_of(path: Path) -> ExampleBatch:
    with ExampleTable.open(path) as table:
        return ExampleBatch.concat([table.read_bucket(b) for b in table.buckets()])


def rebuilt(store: Path, table: Path, projection: Projection) -> dict[int, str]:
    examples = examples_of(table)
    with HistoryStore.open(store) as opened:
        assert verify_generation(opened.pin()) == []
        assert opened.verify_recent() == []
        histories = reconstruct(opened.pin(), examples.batch, projection).histories
    columns = [histories.to_jagged(c).to_arrow().to_pylist() for c in EVENT_COLUMNS]
    return {int(i): repr(list(zip(*row, strict=True))) for i, *row in zip(examples.request_id, *columns, strict=True)}


def imported(table: pa.Table, folder: Path, options: ImportOptions | None = None, **told: Any) -> ImportReport:
    layout = FatLayout.infer(table, **told)
    return import_fat_rows(table, layout, folder / "s", folder / "t", options or ImportOptions(n_buckets=2))


# Each try makes a store and a table: a failing one is told by its seed, shrinking it would take minutes.
@settings(
    max_examples=12,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    newest=st.sampled_from([None, 1, 3, 8]),
    horizon=st.sampled_from([None, 60]),
    inclusive=st.booleans(),
    newest_first=st.booleans(),
    text_users=st.booleans(),
)
def test_every_row_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    newest: int | None,
    horizon: int | None,
    inclusive: bool,
    newest_first: bool,
    text_users: bool,
) -> None:
    rng = np.random.default_rng(seed)
    how = {"newest": newest, "horizon_ms": horizon, "inclusive": inclusive}
    table = random_fat_rows(rng, **how, newest_first=newest_first, text_users=text_users)
    folder = tmp_path_factory.mktemp("import")
    said = how if horizon or rng.random() < 0.5 else {"newest": newest}
    report = imported(table, folder, **said, newest_first=newest_first)
    assert report.counts.rejected == {}
    assert report.counts.rows == report.verified == len(table)
    projection = report.projection(None if horizon is None else horizon + inclusive)
    assert rebuilt(folder / "s", folder / "t", projection) == lists(table, newest_first)


def rows_of(*rows: tuple[int, list[tuple[int, int]]]) -> pa.Table:
    """Rows of user 1: (request_ts, [(time, item)])."""
    return pa.table(
        {
            "request_id": pa.array(range(len(rows))),
            "user_id": pa.array([1] * len(rows)),
            "request_ts": pa.array([t for t, _ in rows]),
            "event_ts": pa.array([[t for t, _ in e] for _, e in rows], pa.list_(pa.int64())),
            "item": pa.array([[i for _, i in e] for _, e in rows], pa.list_(pa.int64())),
        }
    )


def test_what_is_found_is_counted(tmp_path: Path) -> None:
    table = rows_of(
        (50, [(10, 1), (20, 2), (30, 3)]),
        (60, [(20, 2), (25, 9), (30, 3)]),  # truncated: of (10, 1) it says nothing; (25, 9) is late
        (70, [(20, 2), (25, 8), (30, 3)]),  # restated
        (80, [(25, 8), (30, 3)]),  # gone: (20, 2) and, as the row is not full, (10, 1)
        (90, [(25, 8), (30, 3), (90, 5)]),  # saw its own time
    )
    report = imported(table, tmp_path, newest=3)
    counts = report.counts
    found = (counts.late, counts.restated, counts.vanished, counts.truncated_rows, counts.lifted_rows)
    assert found == (1, 1, 2, 2, 1)
    assert counts.events == 6
    assert report.newest == 3
    examples = examples_of(tmp_path / "t")
    assert sorted(examples.batch.request_ts.tolist()) == [50, 60, 70, 80, 91]
    # What comes later has numbers of its own, and sees what is left.
    with HistoryStore.open(tmp_path / "s") as store:
        seen = store.read([1], 1_000).histories
        assert seen.to_jagged("item").values.tolist() == [8, 3, 5]
        row = {"user_id": [1], "event_ts": [95], "item": [7]}
        assert store.append(pa.table(row)).arrivals.tolist() == [8]
        store.compact(full=True)
        assert store.read([1], 1_000).histories.to_jagged("item").values.tolist() == [8, 3, 5, 7]
        whole = reconstruct(store.pin(), examples.batch, report.projection()).histories
        assert sorted(whole.lengths().tolist()) == [2, 3, 3, 3, 3]


def test_what_cannot_be_aligned_is_left_out_and_said(tmp_path: Path) -> None:
    table = rows_of((50, [(10, 1)]), (60, [(30, 1), (20, 2)]), (70, [(99, 1)]), (80, [(10, 1), (20, 1)]))
    table = pa.concat_tables([table, table.slice(3)])
    report = imported(table, tmp_path, newest=4)
    assert report.counts.rejected == {"unordered": 1, "future": 1, "repeated": 1}
    assert sorted(report.left_out) == [(1, "unordered"), (2, "future"), (3, "repeated")]
    assert report.verified == report.counts.rows == 2


def test_ties_keep_their_order(tmp_path: Path) -> None:
    report = imported(rows_of((50, [(10, 1), (10, 2)]), (60, [(10, 2), (10, 3), (10, 1)])), tmp_path)
    assert report.verified == 2
    assert report.counts.reordered == 1


class _Killed(BaseException):
    pass


def test_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = random_fat_rows(np.random.default_rng(5), n_rows=3_000, n_users=60, newest=9)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=100)
    monkeypatch.setattr(importer_module, "CHUNK_ROWS", 64)
    layout = FatLayout.infer(table, newest=9)
    begun: list[str] = []
    left = [0]

    def progress(what: str, done: int, of: int | None) -> None:
        begun.append(what)
        left[0] -= 1
        if left[0] == 0:
            raise _Killed

    options = ImportOptions(n_buckets=3, memory_bytes=16 << 20, progress=progress)
    kills = 0
    while True:
        kills += 1
        left[0] = 2 + kills
        try:
            report = import_fat_rows(tmp_path / "rows.parquet", layout, tmp_path / "s", tmp_path / "t", options)
            break
        except _Killed:
            assert kills < 60
    assert kills > 5
    assert {"rows", "parts", "appended", "verified"} <= set(begun)
    assert report.verified == 3_000
    assert rebuilt(tmp_path / "s", tmp_path / "t", report.projection()) == lists(table)
    again = import_fat_rows(tmp_path / "rows.parquet", layout, tmp_path / "s", tmp_path / "t", options)
    assert again == report


def test_others_are_left_alone(tmp_path: Path) -> None:
    table = rows_of((50, [(10, 1)]))
    imported(table, tmp_path)
    with pytest.raises(StoreExists, match="import into a new one"):
        imported(table, tmp_path)


def test_bad_rows_begin_nothing(tmp_path: Path) -> None:
    table = rows_of((50, [(10, 1)]))
    with pytest.raises(SchemaError, match="which column is the user"):
        FatLayout.infer(table.drop_columns(["user_id"]))
    with pytest.raises(SchemaError, match="no list column"):
        FatLayout.infer(table, event_ts="request_ts")
    with pytest.raises(SchemaError, match="horizon needs"):
        FatLayout.infer(table, horizon_ms=5)
    null = table.set_column(1, "user_id", pa.array([None], pa.int64()))
    with pytest.raises(InputError, match="null"):
        imported(null, tmp_path)
    assert not (tmp_path / "s").exists()
