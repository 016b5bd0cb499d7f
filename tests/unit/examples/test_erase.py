"""Erasure in logs and training tables, beside the store's own: rows, outcomes, bounds in manifests, old files."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import read_manifest_list

from thinrow.core.errors import Erased, StoreNotFound
from thinrow.core.users import as_users, bucket_of
from thinrow.examples.erase import erase_everywhere, erase_from_log, erase_from_table, requests_that_go
from thinrow.examples.joiner import join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import Impressions, Outcomes
from thinrow.examples.successors import ERASED, Successors, _lift, _rows, _runs
from thinrow.examples.table import ExampleTable
from thinrow.history.erase import EventsOf, Retention
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema, ExampleSchema

EVENTS = pa.schema([("user", pa.string()), ("ts", pa.int64()), ("text", pa.string())])
SCHEMA = EventSchema.infer(EVENTS, user="user", time="ts")
EXAMPLES = ExampleSchema.of(
    context={"city": "string"}, candidates={"item": "int64"}, item="item", outcomes={"buy": 1_000}
)
USERS = [f"user-{u}" for u in "abc"]
VICTIM = "MARK-victim"


class Setup:
    """A store, both logs and a table: rounds of events and requests of four users, one of whom is marked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = HistoryStore.create(folder / "store", SCHEMA, 2, sync=False)
        self.shown = ImpressionLog(folder / "shown", SCHEMA, EXAMPLES)
        self.bought = OutcomeLog(folder / "bought")
        self.table = ExampleTable.create(folder / "table", event_schema=SCHEMA, example_schema=EXAMPLES, n_buckets=2)
        self.requests = 0

    def round(self, now: int, users: list[str], compact: bool) -> None:
        rows = [(u, now - i, f"{u[:4]}{secrets.token_hex(8)}") for u in users for i in range(1, 6)]
        self.store.append(pa.table([pa.array(c) for c in zip(*rows, strict=True)], EVENTS))
        seen = self.store.snapshot(users, now)
        ids = self.requests + np.arange(len(users))
        self.requests += len(users)
        city = [f"{u[:4]}{secrets.token_hex(8)}" for u in users]
        self.shown.append(
            Impressions.of(EXAMPLES, ids, seen, candidates={"item": [[1, 2]] * len(users)}, context={"city": city})
        )
        self.bought.append(Outcomes.of("buy", ids, [1] * len(users), [now + 1] * len(users)))
        if compact:
            self.store.compact()

    def join(self, now: int) -> None:
        join_logs(self.shown, self.bought, self.table, now)
        self.table.cluster()

    def also(self, generation: Any, whole: Any) -> None:
        erase_everywhere(generation, whole, impressions=[self.shown], outcomes=[self.bought], tables=[self.table])

    def rows(self) -> Any:
        return pa.concat_tables([self.table.scan_bucket(b) for b in range(2)])


@pytest.fixture
def setup(tmp_path: Path) -> Any:
    made = Setup(tmp_path)
    for i in range(4):
        made.round(1_000 * (i + 1), [*USERS, VICTIM], compact=i % 2 == 1)
    made.join(4_500)
    yield made
    made.store.close()
    made.table.close()


def text_of(file: Path) -> bytes:
    """Everything in a file, decompressed."""
    data = file.read_bytes()
    if file.suffix == ".parquet":
        parquet = pq.ParquetFile(file)
        bounds = [
            parquet.metadata.row_group(g).column(c).statistics
            for g in range(parquet.metadata.num_row_groups)
            for c in range(parquet.metadata.num_columns)
        ]
        return data + repr(parquet.read().to_pylist()).encode() + repr(bounds).encode()
    if file.suffix == ".log":
        start = data.index(b"\xff\xff\xff\xff")
        return data + repr(pa.ipc.open_stream(data[start:]).read_all().to_pylist()).encode()
    return data


def marked(folder: Path, mark: bytes = b"MARK") -> list[str]:
    shifted = bytes(b + 1 for b in mark)
    found = []
    for file in folder.rglob("*"):
        if file.is_file():
            text = text_of(file)
            if mark in text or shifted in text:
                found.append(file.relative_to(folder).as_posix())
    return found


def manifest_bounds(table: ExampleTable) -> list[bytes]:
    """Lower and upper bounds in every Avro manifest on disk, deleted entries included."""
    inner = table._refreshed()
    found = []
    lists = [f for f in (table.path / "warehouse").rglob("snap-*.avro")]
    manifests = {m.manifest_path: m for f in lists for m in read_manifest_list(inner.io.new_input(f"file://{f}"))}
    on_disk = {f.name for f in (table.path / "warehouse").rglob("*-m*.avro")}
    assert {Path(p).name for p in manifests} == on_disk, "every manifest on disk is named by a list on disk"
    for manifest in manifests.values():
        for entry in manifest.fetch_manifest_entry(inner.io, discard_deleted=False):
            for bounds in (entry.data_file.lower_bounds, entry.data_file.upper_bounds):
                found += list((bounds or {}).values())
    return found


def test_nothing_of_a_user_is_left_anywhere(setup: Setup, tmp_path: Path) -> None:
    assert {p.split("/")[0] for p in marked(tmp_path)} == {"store", "shown", "table"}
    assert any(b"MARK" in b for b in manifest_bounds(setup.table))
    before = setup.rows().filter(pa.compute.not_equal(setup.rows()["user_id"], VICTIM)).sort_by("request_id")
    setup.store.erase([VICTIM], also=setup.also, grace_s=0)
    assert marked(tmp_path) == []
    assert not any(b"MARK" in b for b in manifest_bounds(setup.table))
    assert setup.rows().sort_by("request_id").equals(before)
    assert [len(r) for r in setup.shown.scan()] == [3] * 4
    assert np.concatenate([r.request_id for r in setup.bought.scan()]).tolist() == [
        0,
        1,
        2,
        4,
        5,
        6,
        8,
        9,
        10,
        12,
        13,
        14,
    ]
    snapshots = setup.table._refreshed().metadata.snapshots
    assert len(snapshots) == 1
    setup.store.erase([VICTIM], also=setup.also, grace_s=0)
    assert setup.rows().num_rows == before.num_rows
    setup.round(9_000, [*USERS, VICTIM], compact=True)
    setup.join(99_000)
    assert setup.rows().num_rows == before.num_rows + 3 + 4, "who comes back is logged and joined again"
    for bucket in setup.table.buckets():
        reconstruct(setup.store.pin(), setup.table.read_bucket(bucket).batch)


def test_a_request_is_recognised_as_older_or_newer_than_the_erasure(setup: Setup) -> None:
    setup.store.erase([VICTIM], grace_s=0)
    setup.round(9_000, [*USERS, VICTIM], compact=False)
    none = as_users([], "string")
    assert requests_that_go(setup.shown, setup.store.pin(), none).tolist() == [3, 7, 11, 15]
    assert erase_from_log(setup.shown, setup.store.pin(), none).removed == 4
    assert erase_from_table(setup.table, setup.store.pin(), none).removed == 3
    assert [len(r) for r in setup.shown.scan()] == [3] * 4 + [4]


def test_rows_that_saw_an_erased_event_are_redacted(setup: Setup, tmp_path: Path) -> None:
    untouched = {p: (setup.folder / p).read_bytes() for p in ("bought/0000000000000001.log",)}
    requests = [r.snapshots for r in setup.shown.scan()]
    setup.store.erase(events=[EventsOf("user-a", arrivals=[1, 2, 12])], also=setup.also, grace_s=0)
    for records, before in zip(setup.shown.scan(), requests, strict=True):
        got = reconstruct(setup.store.pin(), records.snapshots, on_missing="shorten")
        assert got.status.tolist() == [1 if u == "user-a" else 0 for u in records.snapshots.users]
        (row,) = np.flatnonzero(records.snapshots.users == "user-a")
        version, old = records.snapshots.versions[row], before.versions[row]
        inline = [int(r.inline.lengths[row]) for r in (before, records.snapshots)]
        assert version["seq_len"] == old["seq_len"] + inline[0] - inline[1]
        shown = got.histories.select(np.array([row])).to_jagged("event_ts").to_arrow().to_pylist()[0]
        if old["seq_len"]:
            assert (version["start_ts"], version["start_ts"] > old["start_ts"]) == (
                shown[0],
                shown[0] > old["start_ts"],
            )
            assert version["checksum"] != old["checksum"]
    (bucket,) = bucket_of(as_users(["user-a"]), 2).tolist()
    examples = setup.table.read_bucket(bucket)
    with pytest.raises(Erased, match="user 'user-a'"):
        reconstruct(setup.store.pin(), examples.batch)
    assert all((setup.folder / p).read_bytes() == data for p, data in untouched.items())
    # A second erasure redacts what is redacted already.
    setup.store.erase(events=[EventsOf("user-a", arrivals=[3])], also=setup.also, grace_s=0)
    for bucket in setup.table.buckets():
        reconstruct(setup.store.pin(), setup.table.read_bucket(bucket).batch, on_missing="shorten")


def test_inline_events_that_expired_go_from_the_logs(setup: Setup) -> None:
    assert sum(len(r.snapshots.inline) for r in setup.shown.scan()) > 0
    setup.store.retain(Retention(max_events=1), also=setup.also, grace_s=0)
    held = [r.snapshots.inline.event_ts.tolist() for r in setup.shown.scan()]
    assert held == [[], [], [], [3_999] * 4], "of each user the newest event is left, by time"
    for bucket in setup.table.buckets():
        got = reconstruct(setup.store.pin(), setup.table.read_bucket(bucket).batch, on_missing="shorten")
        assert set(got.status.tolist()) <= {0, 2}


def test_a_join_that_read_the_log_before_starts_over(setup: Setup, tmp_path: Path) -> None:
    setup.round(6_000, [*USERS, VICTIM], compact=True)
    snapshot_id, _ = setup.table.join_state()
    setup.store.erase([VICTIM], also=setup.also, grace_s=0)
    assert setup.table.join_state()[0] != snapshot_id
    setup.join(99_000)
    assert marked(tmp_path) == []
    assert setup.rows().num_rows == 15


def test_readers_of_an_older_snapshot_find_the_rows_that_are_left(setup: Setup) -> None:
    before = setup.table.snapshot_id
    assert before is not None
    held = {b: setup.table.scan_bucket(b)["request_id"].to_pylist() for b in range(2)}
    setup.store.erase(["user-b"], also=setup.also, grace_s=0)
    middle = setup.table.snapshot_id
    setup.store.erase([VICTIM], also=setup.also, grace_s=0)
    for old, rows in ((before, held), (middle, None)):
        found = setup.table.successor(old)
        assert found is not None
        snapshot, gone = found
        for bucket, ids in (rows or {}).items():
            left = np.delete(np.array(ids), gone.get(bucket, []))
            assert setup.table.scan_bucket(bucket, snapshot)["request_id"].to_pylist() == left.tolist()
    assert setup.table.successor(1) is None
    with pytest.raises(StoreNotFound, match="expired"):
        setup.table.scan_bucket(0, before)


def test_gaps_are_lifted_through_two_erasures() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        gone = np.flatnonzero(rng.random(20) < 0.3)
        rest = np.delete(np.arange(20), gone)
        lost = np.flatnonzero(rng.random(len(rest)) < 0.3)
        assert _lift(gone, lost).tolist() == sorted([*gone.tolist(), *rest[lost].tolist()])
        assert _rows(_runs(gone)).tolist() == gone.tolist()
    unordered = Successors({})
    unordered.lose(0, 3, np.array([0]), in_order=False)
    assert unordered.after(5) == {ERASED: "true"}
