"""Erasure and retention of a store: what is gone, what is left, what old requests get, and nothing told as another."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError, Erased, Expired, InputError, StoreError, VersionMismatch
from thinrow.history.archive.tombstones import (
    ERASED,
    EXPIRED,
    TOMBSTONE_DTYPE,
    WHOLE,
    Tombstones,
    intervals,
    unite,
    write_tombstones,
)
from thinrow.history.archive.verify import verify_generation, verify_tombstones
from thinrow.history.bury import Doomed, bury_bucket
from thinrow.history.erase import EventsOf, Retention
from thinrow.history.erasure import purge
from thinrow.history.missing import COMPLETE, STATUS_ERASED, STATUS_EXPIRED
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.history.tiers import next_epoch
from thinrow.schema import EventSchema, Projection
from thinrow.storage.container import Container
from thinrow.storage.objects import MemoryObjects

COLUMNS = pa.schema(
    [("user", pa.string()), ("ts", pa.int64()), ("id", pa.string()), ("text", pa.string()), ("n", pa.int64())]
)
SCHEMA = EventSchema.infer(COLUMNS, user="user", time="ts", event_id="id")


def table(user: str, times: range, tag: str = "keep") -> pa.Table:
    """Events whose ids and texts begin with ``tag`` and cannot be compressed away."""
    rows = [(user, t, f"{tag}{secrets.token_hex(8)}", f"{tag}{secrets.token_hex(8)}", t) for t in times]
    return pa.table([pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), COLUMNS, strict=True)], COLUMNS)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 2, sync=False) as opened:
        for user in "abcd":
            opened.append(table(f"user-{user}", range(20)))
        opened.compact()
        yield opened


def files_with(folder: Path, *marks: str) -> list[str]:
    """Files with one of the marks in any form that the store writes: as it is, or as LMDB keys of users."""
    wanted = [m.encode() for m in marks]
    wanted += [bytes(b + 1 for b in w) for w in wanted]
    files = [f for f in folder.rglob("*") if f.is_file()]
    return [f.name for f in files if any(w in f.read_bytes() for w in wanted)]


def seen(store: HistoryStore, requests: Any, **options: Any) -> tuple[list[int], list[int], list[list[int]]]:
    """Status, kept requests and the times of what each saw."""
    got = reconstruct(store.pin(), requests, **options)
    return got.status.tolist(), got.kept.tolist(), got.histories.to_jagged("event_ts").to_arrow().to_pylist()


def test_no_file_holds_an_erased_user(store: HistoryStore, tmp_path: Path) -> None:
    store.append(table("victim", range(40), "MARK"))
    store.compact()
    store.append(table("victim", range(100, 105), "MARK"))
    assert len(files_with(tmp_path, "MARK")) > 1
    assert store.erase(["victim"], dry_run=True).events == 45
    assert len(files_with(tmp_path, "MARK")) > 1
    report = store.erase(["victim"], grace_s=0)
    assert (report.events, report.users) == (45, 1)
    assert files_with(tmp_path, "MARK", "victim") == []
    assert verify_generation(store.pin()) == []
    assert store.verify_recent() == []
    assert store.users().tolist() == [f"user-{u}" for u in "abcd"]
    assert store.archive.numbers() == [store.pin().number]
    assert store.pending_erasures() == []


def test_old_requests_resolve_by_policy(store: HistoryStore) -> None:
    store.append(table("user-a", range(30, 33)))
    requests = store.snapshot([f"user-{u}" for u in "abc"], 1_000).requests
    early = store.snapshot(["user-b"], 3).requests
    store.erase(["user-a"], [EventsOf("user-b", arrivals=[5, 6]), EventsOf("user-b", start_ts=18)], grace_s=0)
    with pytest.raises(Erased, match="request 0 of user 'user-a' at 1000 ms saw 23 events") as told:
        reconstruct(store.pin(), requests)
    assert (told.value.user, told.value.request) == ("user-a", 0)
    left = [t for t in range(20) if t not in (4, 5, 18, 19)]
    status = [STATUS_ERASED, STATUS_ERASED, COMPLETE]
    assert seen(store, requests, on_missing="skip") == (status, [2], [list(range(20))])
    assert seen(store, requests, on_missing="shorten") == (status, [0, 1, 2], [[], left, list(range(20))])
    newest = Projection(max_len=3)
    assert seen(store, requests, projection=newest, on_missing="shorten")[2] == [[], [15, 16, 17], [17, 18, 19]]
    # What this request saw is all there.
    assert seen(store, early) == ([COMPLETE], [0], [[0, 1, 2]])
    with pytest.raises(InputError, match="on_missing='ignore'; it must be one of"):
        reconstruct(store.pin(), requests, on_missing="ignore")  # type: ignore[arg-type]


def test_inline_events_of_a_request_go_too(store: HistoryStore) -> None:
    store.append(table("user-a", range(30, 33)))
    requests = store.snapshot(["user-a"], 1_000).requests
    assert len(requests.inline) == 3
    store.erase(events=[EventsOf("user-a", arrivals=[22])], grace_s=0)
    assert seen(store, requests, on_missing="shorten") == ([STATUS_ERASED], [0], [[*range(20), 30, 32]])
    with pytest.raises(Erased, match="saw 1 events that were erased"):
        reconstruct(store.pin(), requests)


def test_an_erased_user_is_served_an_empty_history_and_may_come_back(store: HistoryStore) -> None:
    store.erase(["user-a"], grace_s=0)
    requests = store.snapshot(["user-a"], 1_000).requests
    version = requests.versions[0]
    assert (version["seq_len"], version["checksum"], version["last_arrival"]) == (0, 0, 21)
    assert store.append(table("user-a", range(2))).arrivals.tolist() == [22, 23]
    store.compact()
    assert seen(store, requests) == ([COMPLETE], [0], [[]])
    later = store.snapshot(["user-a"], 1_000).requests
    store.erase(["user-a"], grace_s=0)
    assert seen(store, later, on_missing="shorten") == ([STATUS_ERASED], [0], [[]])
    number = store.pin().number
    store.erase(["user-a"], grace_s=0)
    assert store.pin().number == number, "nothing came since: nothing is written"


def test_numbers_go_on_after_the_newest_archived_events_were_erased(store: HistoryStore) -> None:
    store.erase(events=[EventsOf("user-a", arrivals=[19, 20])], grace_s=0)
    assert store.append(table("user-a", range(50, 51))).arrivals.tolist() == [21]
    requests = store.snapshot(["user-a"], 1_000).requests
    assert requests.versions["last_arrival"].tolist() == [20]
    assert requests.inline.arrival.tolist() == [21]
    store.compact()
    assert seen(store, requests) == ([COMPLETE], [0], [[*range(18), 50]])
    store.erase(events=[EventsOf("user-a", arrivals=[21])], grace_s=0)
    assert store.snapshot(["user-a"], 1_000).requests.versions["last_arrival"].tolist() == [21]
    assert store.verify_recent() == []


def test_a_tier_that_replaces_a_lost_one_counts_beyond_tombstones(store: HistoryStore) -> None:
    before = next_epoch(store.pin())
    store.recent.raise_counters(np.array(["user-a"], object), np.array([before + 5]))
    store.erase(["user-a"], grace_s=0)
    assert next_epoch(store.pin()) > before + 6


def test_bulk_load_after_an_erasure(tmp_path: Path) -> None:
    schema = EventSchema.infer(COLUMNS.remove(2), user="user", time="ts")
    with HistoryStore.create(tmp_path, schema, 2, sync=False) as store:
        store.bulk_load(table("user-a", range(5)).drop_columns(["id"]))
        store.erase(["user-a"], grace_s=0)
        store.bulk_load(table("user-a", range(3)).drop_columns(["id"]))
        requests = store.snapshot(["user-a"], 9).requests
        assert requests.versions["last_arrival"].tolist() == [9]
        assert seen(store, requests) == ([COMPLETE], [0], [[0, 1, 2]])


def test_corruption_is_no_erasure(store: HistoryStore) -> None:
    requests = store.snapshot(["user-a", "user-b"], 1_000).requests
    store.erase(events=[EventsOf("user-a", arrivals=[1, 2])], grace_s=0)
    short = requests.take(np.array([1]))
    short.versions["seq_len"] += 1
    with pytest.raises(VersionMismatch):
        reconstruct(store.pin(), short, on_missing="shorten")
    for change in (1, 3):  # more is missing than was erased; or there is more than the request saw
        wrong = requests.take(np.array([0]))
        wrong.versions["seq_len"] += change if change == 1 else -change
        with pytest.raises(VersionMismatch, match="user 'user-a'"):
            reconstruct(store.pin(), wrong, on_missing="shorten")
    others = requests.take(np.array([0]))
    others.versions["seq_len"] -= 2
    with pytest.raises(VersionMismatch, match="others"):
        reconstruct(store.pin(), others, on_missing="skip")


@pytest.mark.parametrize("section", ["pieces", "group:keys", "group:main"])
def test_damage_of_a_user_with_a_tombstone_is_told_as_damage(store: HistoryStore, tmp_path: Path, section: str) -> None:
    requests = store.snapshot(["user-a"], 10).requests
    store.erase(events=[EventsOf("user-a", arrivals=[1, 2])], grace_s=0)
    for file in (tmp_path / "s" / "archive" / "segments").rglob("*.seg"):
        name = str(file.relative_to(tmp_path / "s" / "archive"))
        start, length, _ = Container.open(store.archive.objects, name).section(section)
        held = np.fromfile(file, np.uint8)
        held[start : start + length] ^= 1
        held.tofile(file)
    # What is not read is not damaged: who leaves the request out reads no values.
    policies = ("shorten",) if section == "group:main" else ("fail", "skip", "shorten")
    with _reopened(store) as again:
        for policy in policies:
            with pytest.raises(CorruptionError):
                reconstruct(again.pin(), requests, on_missing=policy)  # type: ignore[arg-type]
        with pytest.raises(CorruptionError):
            again.erase(events=[EventsOf("user-a", arrivals=[3])], grace_s=0)


def _reopened(store: HistoryStore) -> HistoryStore:
    store.close()
    return HistoryStore.open(store.path, sync=False)


def test_a_damaged_tombstone_file_is_damage(store: HistoryStore, tmp_path: Path) -> None:
    requests = store.snapshot(["user-a"], 1_000).requests
    store.erase(["user-a"], grace_s=0)
    (file,) = (tmp_path / "s" / "archive" / "tombstones").rglob("*.tmb")
    file.write_bytes(bytes([*file.read_bytes()[:20], file.read_bytes()[20] ^ 1, *file.read_bytes()[21:]]))
    with _reopened(store) as again, pytest.raises(CorruptionError, match="tombstones"):
        reconstruct(again.pin(), requests, on_missing="skip")


def test_the_tombstones_of_another_store_are_damage(store: HistoryStore, tmp_path: Path) -> None:
    """The same number of records and bytes, of the same bucket, in a sound file: only the manifest tells them apart."""
    requests = store.snapshot(["user-a"], 1_000).requests
    store.erase(["user-a"], grace_s=0)
    (file,) = (tmp_path / "s" / "archive" / "tombstones").rglob("*.tmb")
    others, bucket = MemoryObjects(), int(file.parent.name)
    while True:
        other = write_tombstones(others, bucket, _records((secrets.token_bytes(16), WHOLE, 1, 21, 20)))
        if other.bytes == file.stat().st_size:
            break
    file.write_bytes(others.get(other.name))
    with _reopened(store) as again:
        with pytest.raises(CorruptionError, match="not those of the manifest"):
            reconstruct(again.pin(), requests, on_missing="skip")
        assert [d.file for d in verify_tombstones(again.pin())] == [f"tombstones/{file.parent.name}/{file.name}"]


def test_a_reader_of_an_old_generation_gets_erased(store: HistoryStore) -> None:
    taken = store.snapshot(["user-a"], 1_000)
    with store.archive.hold(taken.generation):
        store.erase(["user-b"], grace_s=0.2)
        with pytest.raises(Erased, match="generation 2 was revoked"):
            reconstruct(taken.generation, taken.requests)
    assert seen(store, taken.requests)[2] == [list(range(20))]


def test_retention_by_age_and_number(store: HistoryStore, tmp_path: Path) -> None:
    store.append(table("user-a", range(30, 32)))
    requests = store.snapshot(["user-a", "user-b"], 1_000).requests
    store._clock = lambda: 115
    report = store.retain(Retention(max_age_ms=100), grace_s=0)
    assert (report.events, report.users) == (4 * 15, 4)
    status = [STATUS_EXPIRED, STATUS_EXPIRED]
    assert seen(store, requests, on_missing="shorten") == (status, [0, 1], [[*range(15, 20), 30, 31], [*range(15, 20)]])
    with pytest.raises(Expired, match="request 0 of user 'user-a' at 1000 ms saw 15 events that have expired"):
        reconstruct(store.pin(), requests)
    store.retain(Retention(max_age_ms=100, max_events=3), grace_s=0)
    assert seen(store, requests, on_missing="shorten")[2] == [[19, 30, 31], [17, 18, 19]]
    assert store.retain(grace_s=0).events == 0
    store._clock = lambda: 119
    store.erase(events=[EventsOf("user-b", start_ts=19)], grace_s=0)
    assert seen(store, requests, on_missing="skip")[0] == [STATUS_EXPIRED, STATUS_ERASED]
    assert verify_generation(store.pin()) == []


def test_compaction_applies_the_policy_where_it_is_worth_it(store: HistoryStore) -> None:
    store.retain(Retention(max_events=25), grace_s=0)
    store.append(table("user-a", range(100, 108)))
    store.compact(full=True)
    assert store.read(["user-a"], 1_000).histories.lengths().tolist() == [28], "3 of 48 are less than a fifth"
    store.append(table("user-a", range(200, 225)))
    store.compact(full=True)
    assert store.read(["user-a"], 1_000).histories.lengths().tolist() == [25]


def test_hidden_events_count_for_no_limit(tmp_path: Path) -> None:
    ids = pa.schema([*COLUMNS, ("corrects", pa.string())])
    schema = EventSchema.infer(COLUMNS, user="user", time="ts", event_id="id")
    schema = EventSchema(
        schema.columns,
        user_kind="string",
        user_column="user",
        time_column="ts",
        event_id_column="id",
        event_id_dtype="string",
        supersedes_column="corrects",
    )
    rows = [("u", t, f"i{t}", "x", t, f"i{t - 1}" if t in (3, 5) else None) for t in range(8)]
    data = pa.table([pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), ids, strict=True)], ids)
    with HistoryStore.create(tmp_path, schema, 1, sync=False) as store:
        store.append(data)
        before = store.snapshot(["u"], 100).requests
        store.retain(Retention(max_events=4), grace_s=0)
        assert seen(store, before, on_missing="shorten")[2] == [[3, 5, 6, 7]]
        assert store.read(["u"], 100).histories.to_jagged("event_ts").to_arrow().to_pylist() == [[3, 5, 6, 7]]
        # A correction that goes leaves hidden what it hid.
        store.erase(events=[EventsOf("u", event_ids=["i5"])], grace_s=0)
        assert store.read(["u"], 100).histories.to_jagged("event_ts").to_arrow().to_pylist() == [[3, 6, 7]]


def test_what_is_asked_for_is_checked(store: HistoryStore) -> None:
    with pytest.raises(InputError, match="nothing is named"):
        store.erase()
    with pytest.raises(InputError, match="no events of user 'u' are named"):
        EventsOf("u")
    with pytest.raises(InputError, match="named whole and with single events"):
        store.erase(["user-a"], [EventsOf("user-a", arrivals=[1])])
    with pytest.raises(InputError, match="max_age_ms=0; it must be an integer, 1 or more"):
        Retention(max_age_ms=0)
    with pytest.raises(InputError, match="max_events='3'; it must be an integer"):
        Retention(max_events="3")  # type: ignore[arg-type]
    assert store.erase(events=[EventsOf("user-a", event_ids=["no such id"])], grace_s=0).events == 0
    assert store.erase(["nobody"], grace_s=0).events == 0


def test_unaffected_segments_stay_as_they_are(store: HistoryStore) -> None:
    before = {info.name for _, info in store.pin().segments}
    store.erase(events=[EventsOf("user-a", arrivals=[1])], grace_s=0)
    after = {info.name for _, info in store.pin().segments}
    assert len(before & after) == 1
    assert len(after) == 2
    assert purge(store.archive, 0) == (0, 0)


def _records(*rows: tuple[bytes, int, int, int, int]) -> np.ndarray[Any, Any]:
    records = np.zeros(len(rows), TOMBSTONE_DTYPE)
    for i, (key, kind, first, last, n) in enumerate(rows):
        records[i] = (key, 0, kind, first, last, n)
    return records


def _plain(records: np.ndarray[Any, Any]) -> list[tuple[Any, ...]]:
    return [tuple(r)[:1] + tuple(r)[2:] for r in records.tolist()]


def test_tombstones_unite() -> None:
    held = _records((b"a", EXPIRED, 1, 2, 2), (b"a", ERASED, 5, 5, 1), (b"b", ERASED, 1, 1, 1))
    new = _records((b"a", EXPIRED, 3, 4, 2), (b"b", WHOLE, 1, 9, 4))
    assert _plain(unite(held, new)) == [
        (b"a", EXPIRED, 1, 4, 4),
        (b"a", ERASED, 5, 5, 1),
        (b"b", WHOLE, 1, 9, 5),
    ]
    once = unite(held, new)
    assert _plain(unite(once, _records((b"b", WHOLE, 1, 12, 2)))) == [*_plain(once)[:2], (b"b", WHOLE, 1, 12, 7)]


def test_records_of_arrivals() -> None:
    graves = Tombstones(np.array([0, 2, 2, 3]), _records((b"a", 1, 2, 4, 3), (b"a", 1, 8, 8, 1), (b"c", 3, 1, 5, 2)))
    owner = np.array([0, 0, 0, 0, 1, 2, 2, 0])
    arrival = np.array([1, 2, 4, 5, 3, 5, 6, 8])
    assert graves.record_of(owner, arrival).tolist() == [-1, 0, 0, -1, -1, 2, -1, 1]
    assert graves.removed(np.array([0, 0, 1, 2]), np.array([3, 99, 9, 9])).tolist() == [2, 4, 0, 2]
    assert graves.watermark().tolist() == [8, 0, 5]
    assert graves.whole().tolist() == [0, 0, 5]
    found = intervals(np.array([1, 0, 0, 0]), np.array([4, 7, 5, 6]))
    assert [f.tolist() for f in found] == [[0, 1], [5, 4], [7, 4]]


def test_nothing_to_bury_writes_nothing(store: HistoryStore) -> None:
    none = Tombstones(np.zeros(1, np.int64), np.empty(0, TOMBSTONE_DTYPE))
    burial = bury_bucket(store.pin(), 0, Doomed(np.empty(0, object), none))
    assert burial.written == []


def test_an_erasure_that_was_cut_short_is_not_finished_without_what_it_was_to_clean(store: HistoryStore) -> None:
    cleaned: list[object] = []

    def cut_short(*_: object) -> None:
        raise OSError("killed")

    with pytest.raises(InputError, match="the kinds are impressions"):
        store.erase(["a"], also=cut_short, paths={"logs": ["shown"]}, grace_s=0)
    for paths in ({}, {"tables": ["examples"]}):
        with pytest.raises(OSError, match="killed"):
            store.erase(["a"], also=cut_short, paths=paths, grace_s=0)
        with pytest.raises(StoreError, match="cut short is to clean"):
            store.erase(["b"], grace_s=0)
        with pytest.raises(StoreError, match="cut short is to clean"):
            store.erase(["b"], also=lambda *_: None, paths={"tables": ["others"]}, grace_s=0)
        with pytest.raises(StoreError, match="finish_erasures"):
            store.finish_erasures(grace_s=0)
        cleaned.clear()
        assert len(store.finish_erasures(lambda p: lambda *_: cleaned.append(p.paths), grace_s=0)) == 1
        assert cleaned == [paths]
        assert store.pending_erasures() == []


@pytest.mark.parametrize("user", ["other", "it"])
def test_what_an_erased_correction_hid_stays_hidden_through_compactions(tmp_path: Path, user: str) -> None:
    schema = EventSchema.infer(
        COLUMNS.append(pa.field("fixes", pa.string())), user="user", time="ts", event_id="id", supersedes="fixes"
    )
    with HistoryStore.create(tmp_path / "s", schema, 1, sync=False) as store:
        first = table("it", range(40))
        store.append(first.append_column("fixes", pa.nulls(40, pa.string())))
        store.compact()
        store.append(table("it", range(50, 51)).append_column("fixes", first["id"].slice(7, 1)))
        store.compact()
        store.erase(events=[EventsOf("it", arrivals=[41])], grace_s=0)
        for full in (False, True):
            store.append(table(user, range(60, 61)).append_column("fixes", pa.nulls(1, pa.string())))
            store.compact(full=full)
            assert seen(store, store.snapshot(["it"], 60).requests)[2] == [[t for t in range(40) if t != 7]]
