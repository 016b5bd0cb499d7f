"""A store whose archive is in a bucket of a real S3 server does what a local one does, over a bad network too."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

import thinrow
from thinrow.cli.main import cli
from thinrow.core.errors import (
    CommitConflict,
    CorruptionError,
    InputError,
    StoreExists,
    StoreNotFound,
)
from thinrow.dpp import loader
from thinrow.history.archive.generation import Archive
from thinrow.history.place import archive_objects, remembered
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.storage.cache import _key
from thinrow.storage.meter import Meter, metering
from thinrow.storage.s3 import S3Objects
from thinrow.testing.faults import Fault, FaultProxy, Request
from thinrow.testing.s3 import S3Server
from thinrow.testing.world import make_world

_buckets = itertools.count()
USERS = np.arange(20) * 3


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as s:
        yield s


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.endpoint) as p:
        yield p


@pytest.fixture
def url(server: S3Server, proxy: FaultProxy) -> str:
    return server.make_bucket(f"store-{next(_buckets)}", proxy.endpoint).replace("?", "/shop?")


def events(seed: int, n: int = 400) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "user": rng.choice(USERS, n),
            "ts": np.sort(rng.integers(0, 1000, n)) + 1000 * seed,
            "item": rng.integers(0, 1 << 40, n),
            "shop": [f"shop {k}" for k in rng.integers(0, 9, n)],
        }
    )


SCHEMA = EventSchema.infer(events(0).schema, user="user", time="ts")


def fill(store: HistoryStore) -> None:
    store.append(events(0))
    store.compact()
    store.append(events(1))
    store.compact()
    store.bulk_load(events(2))


def histories(store: HistoryStore) -> list[object]:
    rebuilt = store.read(USERS, 10_000_000).histories
    found = rebuilt.events
    return [found.offsets.tolist(), found.event_ts.tolist(), found.arrival.tolist()] + [
        c.to_arrow().to_pylist() for c in found.columns.values()
    ]


@pytest.fixture
def expected(tmp_path: Path) -> list[object]:
    with HistoryStore.create(tmp_path / "local", SCHEMA, 4) as store:
        fill(store)
        return histories(store)


def test_a_bucket_holds_what_a_folder_would(tmp_path: Path, url: str, expected: list[object]) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        fill(store)
        old = store.snapshot(USERS, 5_000)
        assert histories(store) == expected
    held = {p.name for p in (tmp_path / "s").iterdir()}
    assert {"archive.json", "cache", "recent"} <= held
    assert "archive" not in held
    assert "KEY" not in (tmp_path / "s" / "archive.json").read_text().upper()
    with thinrow.open_store(tmp_path / "s") as store:
        assert histories(store) == expected
        store.append(events(3))
        store.compact(full=True)
        again = reconstruct(store.pin(), old.requests)
        before = reconstruct(old.generation, old.requests)
        assert again.histories.lengths().tolist() == before.histories.lengths().tolist()
        assert again.stats.versions_verified == len(USERS)
    done = CliRunner().invoke(cli, ["verify", "--store", str(tmp_path / "s"), "--all-generations"])
    assert done.exit_code == 0, done.output
    assert "no damage" in done.output


def test_the_loader_reads_from_a_bucket_and_says_what_it_asked(tmp_path: Path, url: str) -> None:
    local, distant = (
        make_world(tmp_path / "a", users=6, days=6),
        make_world(tmp_path / "b", users=6, days=6, archive=url),
    )
    seen = []
    for world in (local, distant):
        with world.store() as store, world.table() as table, loader(store, table, batch_rows=8, epochs=2) as reader:
            seen.append([(b.histories.events.arrival.tolist(), b.histories.lengths().tolist()) for b in reader])
            stats = reader.stats
            assert stats.io.bytes_fetched > 0
            assert (stats.io.requests > 0) == (world is distant)
    assert seen[0] == seen[1]
    assert stats.io.cache_hits > 2 * stats.io.cache_misses > 0


def test_a_cached_batch_costs_no_request_and_a_cold_one_few(tmp_path: Path, url: str) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        fill(store)
        asked = store.snapshot(USERS, 100_000).requests
    with HistoryStore.open(tmp_path / "s") as store:
        warm = reconstruct(store.pin(), asked).stats
        assert warm.io.requests == 0 < warm.io.cache_hits
        assert warm.io.cache_misses == 0
    with HistoryStore.open(tmp_path / "s", cache_bytes=0) as store:
        generation = store.pin()
        cold = reconstruct(generation, asked).stats
        again = reconstruct(generation, asked).stats
        # Index and dictionaries are in memory by now; what is left are the blocks, a request a small file.
        assert again.io.requests == len(generation.segments) < cold.io.requests
        assert 0 < again.io.bytes_fetched < generation.bytes


def test_a_pin_costs_one_small_request(tmp_path: Path, url: str, proxy: FaultProxy) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        fill(store)
        store.pin()
        proxy.requests.clear()
        store.pin()
        assert len(proxy.requests) == 1


def test_of_two_writers_one_wins_and_the_other_tries_again(
    tmp_path: Path, url: str, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        rival = Archive(archive_objects(tmp_path / "s"))
        base = rival.pin()
        store.append(events(0))
        commit, meddled = store.archive.commit, []

        def meddle(*args: object, **named: object) -> object:
            if len(meddled) < 3:
                meddled.append(rival.commit(rival.pin(), {}, "rival").number)
            return commit(*args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(store.archive, "commit", meddle)
        assert store.compact().generation == 5
        assert meddled == [2, 3, 4]
        named = {info.name for _, info in store.pin().segments}
        assert set(store.archive.objects.list("segments/")) == named
        store.append(events(1))
        store.compact()
        store.bulk_load(events(2))
        assert histories(store) == expected
        with pytest.raises(CommitConflict, match="exists already"):
            rival.commit(base, {}, "late")


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path, url: str) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url):
        pass
    program = """
import sys
import numpy as np, pyarrow as pa
from thinrow.history.store import HistoryStore
k = int(sys.argv[2])
with HistoryStore.open(sys.argv[1]) as store:
    for i in range(3):
        user = np.arange(30) % 10 * 2 + k
        one = {"user": user, "ts": np.arange(30) + 100 * i, "item": np.arange(30), "shop": ["s"] * 30}
        store.append(pa.table(one))
        store.compact()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "s")]
    runs = [subprocess.Popen([*command, str(k)], stderr=subprocess.PIPE, text=True) for k in range(2)]
    assert [run.communicate()[1] for run in runs] == ["", ""]
    with HistoryStore.open(tmp_path / "s") as store:
        held = store.read(np.arange(20), 100_000).histories
        assert held.lengths().tolist() == [9] * 20
        assert store.compact(full=True).events == 0
        assert store.read(np.arange(20), 100_000).histories.lengths().tolist() == [9] * 20


def test_a_bad_network_gives_the_same_histories(
    tmp_path: Path, url: str, proxy: FaultProxy, expected: list[object]
) -> None:
    rng = random.Random(3)
    kinds = [Fault("drop"), Fault("drop_answer"), Fault("truncate"), Fault("status", 503)]

    def fail(request: Request) -> Fault | None:
        # How long an object is, only its server knows; of a range we know it too.
        able = [*kinds, Fault("shorten")] if request.range else kinds
        return rng.choice(able) if rng.random() < 0.15 else None

    proxy.fault = fail
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        fill(store)
    with HistoryStore.open(tmp_path / "s", cache_bytes=0) as store, metering(Meter()):
        assert histories(store) == expected


def test_wrong_bytes_are_damage_never_data(tmp_path: Path, url: str, proxy: FaultProxy, expected: list[object]) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        fill(store)
    rng = random.Random(4)

    def flip(request: Request) -> Fault | None:
        return (
            Fault("flip")
            if request.method == "GET" and "list-type" not in request.path and rng.random() < 0.1
            else None
        )

    outcomes = set()
    for _ in range(12):
        proxy.fault = lambda request: None
        with HistoryStore.open(tmp_path / "s", cache_bytes=0) as store:
            proxy.fault = flip
            try:
                assert histories(store) == expected
                outcomes.add("right")
            except CorruptionError:
                outcomes.add("damage")
    assert "damage" in outcomes


def test_deleted_segments_leave_no_byte_in_the_cache(tmp_path: Path, url: str) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        fill(store)
        histories(store)
        cached = tmp_path / "s" / "cache"
        assert any(p.name.isdigit() for p in cached.rglob("*"))
        for _, info in store.pin().segments:
            store.archive.objects.delete(info.name)
        for name in store.archive.objects.list("segments/"):
            store.archive.objects.delete(name)
        assert [p for p in cached.rglob("*") if p.name.isdigit() or p.name == "size"] == []


def test_what_is_erased_is_in_no_object_and_no_cached_block(tmp_path: Path, url: str) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        fill(store)
        kept = histories(store)
        held = {info.name for _, info in store.pin().segments}
        store.erase(USERS[3:6].tolist(), grace_s=0.0)
        left = set(store.archive.objects.list("segments/"))
        assert left == {info.name for _, info in store.pin().segments}
        live = {_key(n) for n in store.archive.objects.list("")}
        cached = [p for p in (tmp_path / "s" / "cache").glob("*/*") if p.parent.name != "purged"]
        assert {p.parent.name for p in cached} <= live
        gone = held - left
        assert gone
        assert not {_key(n) for n in gone} & {p.parent.name for p in cached}
        assert store.read(USERS[3:6], 10_000_000).histories.lengths().tolist() == [0, 0, 0]
        assert histories(store) != kept


def test_overlays_of_a_bucket_are_read_with_their_segments(tmp_path: Path, url: str) -> None:
    def changed(store: HistoryStore) -> list[object]:
        fill(store)
        city = {"trait": "categorical", "dtype": "string", "group": "place", "nullable": True}
        store.evolve(add={"city": city}, rename={"shop": "store"})
        found = store.read(USERS[:7], 10_000_000).histories.events
        owner = np.repeat(found.users, np.diff(found.offsets))
        keys = {"user_id": owner, "event_ts": found.event_ts, "arrival": found.arrival}
        store.backfill("city", pa.table({**keys, "city": [f"city {a % 5}" for a in found.arrival.tolist()]}))
        return histories(store)

    with HistoryStore.create(tmp_path / "local", SCHEMA, 4) as store:
        wanted = changed(store)
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        assert changed(store) == wanted
    assert "city 3" in wanted[-1]  # type: ignore[operator]
    for cache_bytes in (0, 1 << 20):
        with HistoryStore.open(tmp_path / "s", cache_bytes=cache_bytes) as store:
            assert histories(store) == wanted
    assert S3Objects(url).list("overlays/")


def test_a_backup_holds_the_archive_itself(tmp_path: Path, url: str) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url) as store:
        fill(store)
        kept = histories(store)
        store.backup(tmp_path / "copy")
        for name in store.archive.objects.list(""):
            store.archive.objects.delete(name)
    assert not HistoryStore.exists(tmp_path / "s")
    HistoryStore.restore(tmp_path / "copy", tmp_path / "again")
    with HistoryStore.open(tmp_path / "again") as store:
        assert histories(store) == kept
    assert sorted(p.name for p in (tmp_path / "again").iterdir())[:2] == ["archive", "recent"]


def test_a_new_folder_takes_over_the_archive_of_a_lost_one(tmp_path: Path, url: str, proxy: FaultProxy) -> None:
    with HistoryStore.create(tmp_path / "lost", SCHEMA, 4, archive=url) as store:
        fill(store)
        kept = histories(store)
        highest = int(store.read(USERS, 100_000).histories.events.arrival.max())
    with pytest.raises(StoreExists, match="open it from here"):
        HistoryStore.create(tmp_path / "new", SCHEMA, 4, archive=url)
    assert not HistoryStore.exists(tmp_path / "new")
    with HistoryStore.open(tmp_path / "new", archive=url) as store:
        assert histories(store) == kept
        store.append(events(3))
        assert int(store.read(USERS, 100_000).histories.events.arrival.max()) > highest
    # The bucket moves to another address; the folder follows.
    direct = S3Objects(url).location
    moved = f"s3://{direct.bucket}/{direct.prefix}?endpoint={proxy.endpoint}&region=us-east-1"
    with HistoryStore.open(tmp_path / "new", archive=moved):
        assert str(remembered(tmp_path / "new")) == moved
    other = url.replace("/shop", "/other")
    with pytest.raises(InputError, match=r"has its archive at .*/shop.*not at .*/other"):
        HistoryStore.open(tmp_path / "new", archive=other)
    with pytest.raises(StoreNotFound, match="no archive at"):
        HistoryStore.open(tmp_path / "third", archive=other)
    with HistoryStore.create(tmp_path / "local", SCHEMA, 4):
        pass
    with pytest.raises(InputError, match="in its own folder"):
        HistoryStore.open(tmp_path / "local", archive=url)


def test_a_damaged_place_is_named(tmp_path: Path, url: str) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, archive=url):
        pass
    place = tmp_path / "s" / "archive.json"
    place.write_bytes(place.read_bytes().replace(b"shop", b"ship"))
    with pytest.raises(CorruptionError, match=r"archive\.json"):
        HistoryStore.open(tmp_path / "s")


def test_ingest_into_a_bucket(tmp_path: Path, url: str) -> None:
    import pyarrow.parquet as pq

    pq.write_table(events(0), tmp_path / "e.parquet")
    store = ["--store", str(tmp_path / "s")]
    named = ["--create", "--user", "user", "--time", "ts", "--archive", url, "--compact"]
    done = CliRunner().invoke(cli, ["ingest", str(tmp_path / "e.parquet"), *store, *named])
    assert done.exit_code == 0, done.output
    assert S3Objects(url).list("segments/")
    done = CliRunner().invoke(cli, ["read", *store, "--all-users", "--newest", "1", "--stats"])
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == len(USERS)
    # The snapshot has read the small files whole.
    said = re.search(r"20 events delivered.*; 0 requests .*; (\d+) blocks from the cache, 0 not", done.stderr)
    assert said is not None
    assert int(said[1]) > 0
