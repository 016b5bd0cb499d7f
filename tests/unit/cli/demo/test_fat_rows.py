"""Fat rows hold what a plain loop over the purchases gives; reading and comparing them finds every difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from thinrow.cli.demo import fat_rows
from thinrow.cli.demo.compare import count_altered, count_mismatches
from thinrow.cli.demo.data import DemoData
from thinrow.cli.demo.fat_rows import FatRowReader, FatRowSource, FatRowWriter, filled, write_sorted
from thinrow.cli.demo.retail import load_retail
from thinrow.core.errors import InputError
from thinrow.core.users import bucket_of
from thinrow.jagged import Column, Events, Jagged, SharedHistories
from thinrow.jagged.events import never_hidden


@pytest.fixture(scope="module")
def data() -> DemoData:
    return load_retail(weeks=10, households=40)


@pytest.fixture(scope="module")
def source(data: DemoData) -> FatRowSource:
    offsets = data.requests.candidates["product_id"].offsets
    return FatRowSource.of(data, {"times_bought": Jagged(Column(np.arange(offsets[-1], dtype=np.int32)), offsets)})


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fat_rows, "GROUP_EVENTS", 1_000)


def test_rows_in_arrival_order(data: DemoData, source: FatRowSource, tmp_path: Path, small_groups: None) -> None:
    path = tmp_path / "fat.parquet"
    n = len(data.requests)
    with FatRowWriter(path, source) as writer:
        for first in range(0, n, 7):
            writer.append(np.arange(first, min(first + 7, n)))
    table = pq.read_table(path)
    assert pq.ParquetFile(path).num_row_groups > 3
    assert table["request_id"].to_pylist() == data.requests.request_id.tolist()
    for i in (0, n // 2, n - 1):
        seen = (data.users == data.requests.users[i]) & (data.event_ts < data.requests.request_ts[i])
        assert table["event_ts"][i].as_py() == data.event_ts[seen].tolist()
        for name, column in data.columns.items():
            assert table[name][i].as_py() == filled(column)[seen].tolist()
        assert table["cand_product_id"][i].as_py() == data.requests.candidates["product_id"].row(i).tolist()
        assert table["cand_times_bought"][i].as_py() == source.candidates["cand_times_bought"].row(i).tolist()
        assert table["label_bought"][i].as_py() == data.requests.labels["bought"].row(i).tolist()


def test_sorted_groups_hold_one_bucket_each(source: FatRowSource, tmp_path: Path, small_groups: None) -> None:
    path = tmp_path / "fat.parquet"
    write_sorted(path, source, n_buckets=4)
    file = pq.ParquetFile(path)
    users = [file.read_row_group(g)["user_id"].to_numpy() for g in range(file.num_row_groups)]
    buckets = [np.unique(bucket_of(u, 4)) for u in users]
    assert all(len(b) == 1 for b in buckets)
    assert np.all(np.diff(np.concatenate(buckets)) >= 0)
    assert sorted(file.read()["request_id"].to_pylist()) == sorted(source.request_id.tolist())


@pytest.mark.parametrize("newest", [1, 16, None])
def test_read_by_request(source: FatRowSource, tmp_path: Path, small_groups: None, newest: int | None) -> None:
    write_sorted(tmp_path / "fat.parquet", source, n_buckets=4)
    reader = FatRowReader(tmp_path / "fat.parquet", ["event_ts", "brand"], cache_groups=2)
    rows = np.random.default_rng(0).permutation(len(source.request_id))[:50]
    seen = []
    for places, whole in reader.fetch(source.request_id[rows]):
        batch = whole.newest(newest)
        seen += places.tolist()
        for k, i in enumerate(rows[places]):
            stop = source.stop[i]
            start = source.start[i] if newest is None else max(source.start[i], stop - newest)
            for name, values in batch.columns.items():
                assert np.array_equal(values[batch.offsets[k] : batch.offsets[k + 1]], source.columns[name][start:stop])
    assert sorted(seen) == list(range(50))
    lengths = source.lengths if newest is None else np.minimum(source.lengths, newest)
    groups = [reader.read_group(g).newest(newest) for g in range(reader.n_groups)]
    assert sum(len(b.columns["brand"]) for b in groups) == lengths.sum()
    with pytest.raises(InputError, match="no fat row of request -5"):
        next(reader.fetch(np.array([-5])))


def _histories(data: DemoData, source: FatRowSource) -> SharedHistories:
    order = np.argsort(data.users, kind="stable")
    users, counts = np.unique(data.users, return_counts=True)
    events = Events(
        users,
        np.cumsum([0, *counts]),
        data.event_ts[order],
        np.arange(len(data)) + 1,
        never_hidden(len(data)),
        {n: c.take(order) for n, c in data.columns.items()},
    )
    n = len(source.request_id)
    user_of = np.searchsorted(users, source.users)
    return SharedHistories(events, user_of, source.start, source.stop, np.full(n, len(data)), np.ones(n, np.bool_))


def test_comparison_counts_differing_examples(data: DemoData, source: FatRowSource, tmp_path: Path) -> None:
    write_sorted(tmp_path / "fat.parquet", source, n_buckets=4)
    reader = FatRowReader(tmp_path / "fat.parquet", list(source.columns))
    assert reader.n_groups == 4
    fat = reader.read_group(0)
    rows = np.flatnonzero(np.isin(source.request_id, fat.request_id))
    fat = fat.take(np.argsort(fat.request_id)[np.argsort(np.argsort(source.request_id[rows]))])
    ours = _histories(data, source).select(rows)
    assert count_mismatches(ours, fat, reader.dictionaries) == 0
    longer = np.flatnonzero(source.lengths[rows] > 0)
    late = replace(ours, start=ours.start + np.isin(np.arange(len(ours)), longer[:3]))
    assert count_mismatches(late, fat, reader.dictionaries) == 3
    for name in ("event_ts", "sales_value", "brand", "manufacturer_id", "week"):
        changed = fat.columns[name].copy()
        changed[fat.offsets[longer[4]]] += 1
        changed[fat.offsets[longer[5] + 1] - 1] += 1
        assert count_mismatches(ours, replace(fat, columns=fat.columns | {name: changed}), reader.dictionaries) == 2


def test_a_row_that_was_altered_on_the_way_is_counted(source: FatRowSource, tmp_path: Path, small_groups: None) -> None:
    columns = list(source.columns)
    with FatRowWriter(tmp_path / "kept", source) as writer:
        writer.append(np.arange(len(source.request_id)))
    write_sorted(tmp_path / "same", source, n_buckets=4)
    assert count_altered(tmp_path / "kept", tmp_path / "same", columns) == 0
    row = int(np.argmax(source.lengths))
    event = int(source.start[row])
    price = source.columns["sales_value"].copy()
    price[event] += 0.01
    write_sorted(tmp_path / "other", replace(source, columns={**source.columns, "sales_value": price}), n_buckets=4)
    touched = int(((source.start <= event) & (event < source.stop)).sum())
    assert touched > 1
    assert count_altered(tmp_path / "kept", tmp_path / "other", columns) == touched
    assert count_altered(tmp_path / "kept", tmp_path / "other", ["event_ts"]) == 0
