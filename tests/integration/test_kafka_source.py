"""A real broker (Tansu) as the source of a store: whatever happens to it, an event enters once, or it is told."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition

from thinrow.core.errors import InputError, StoreError
from thinrow.history.recent.redis import RedisRecent
from thinrow.history.recent.tier import Advance
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.ingest import Ingest, IngestOptions, set_positions
from thinrow.sources.kafka import KafkaOptions, KafkaSource
from thinrow.testing.kafka import KafkaBroker
from thinrow.testing.redis_server import RedisServer
from thinrow.testing.servers import needs_redis

ARROW = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64())])
SCHEMA = EventSchema.infer(ARROW, user="user", time="ts")


@pytest.fixture(scope="module")
def shared():
    with KafkaBroker() as broker:
        yield broker


@pytest.fixture
def store(tmp_path):
    with HistoryStore.create(tmp_path / "store", SCHEMA, 4, sync=False) as opened:
        yield opened


def message(i):
    return str(i % 7).encode(), json.dumps({"user": i % 7, "ts": 1000 + i, "item": i}).encode()


def source_of(broker, topic, **options):
    return KafkaSource(topic, KafkaOptions(broker.address, topic, **options), JsonDecoder())


def ingest_all(store, broker, topic, partitions=(0, 1), **options):
    source = source_of(broker, topic, partitions=partitions)
    try:
        return Ingest(store, source, IngestOptions(**options)).run()
    finally:
        source.close()


def items(store):
    read = store.read(list(range(7)), 1 << 60).histories
    return sorted(read.to_jagged("item").values.tolist())


def until(holds, seconds=120):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def test_messages_of_several_partitions_enter_once(shared, store):
    shared.create_topic("once", 2)
    shared.produce("once", [message(i) for i in range(1000)])
    report = ingest_all(store, shared, "once", batch_events=170)
    assert (report.events, report.refused, report.lag) == (1000, 0, 0)
    assert items(store) == list(range(1000))
    # Another run, or a broker that would begin at the first message again, adds nothing.
    assert ingest_all(store, shared, "once").events == 0
    shared.produce("once", [message(i) for i in range(1000, 1100)])
    assert ingest_all(store, shared, "once").events == 100
    assert items(store) == list(range(1100))


def test_poison_and_tombstones(shared, store):
    shared.create_topic("poison", 2)
    bad = [
        b"",
        b"{",
        b"null",
        b'{"user":1}',
        b'{"user":null,"ts":1,"item":1}',
        b'{"user":1,"ts":-1,"item":1}',
        b"\xff\x00",
    ]
    good = [message(i) for i in range(100)]
    mixed = [*good[:50], *((b"k", b) for b in bad), (b"1", None), *good[50:]]
    shared.produce("poison", mixed)
    report = ingest_all(store, shared, "poison")
    assert (report.events, report.refused, report.skipped) == (100, len(bad), 1)
    letters = store.dead_letters.read()
    assert sorted(x.payload for x in letters) == sorted(bad)
    assert {x.key for x in letters} == {b"k"}
    assert {json.loads(x.where)["offset"] >= 0 for x in letters} == {True}


def test_an_event_is_named_by_its_place_where_it_has_no_id(shared, tmp_path):
    arrow = pa.schema([*ARROW, ("source_id", pa.string()), ("source_key", pa.string()), ("source_ts", pa.int64())])
    schema = EventSchema.infer(arrow, user="user", time="ts", event_id="source_id")
    shared.create_topic("named", 1)
    shared.produce("named", [message(i) for i in range(10)])
    with HistoryStore.create(tmp_path / "s", schema, 4, sync=False) as store:
        assert ingest_all(store, shared, "named", (0,)).events == 10
        read = store.read([1], 1 << 60).histories
        assert len(read.to_jagged("source_key").values) == 2


def test_a_broker_that_comes_back_empty_is_a_new_topic(store):
    with KafkaBroker() as broker:
        broker.create_topic("gone", 1)
        broker.produce("gone", [message(i) for i in range(100)])
        stop = threading.Event()
        source = source_of(broker, "gone", partitions=(0,))
        reader = threading.Thread(target=lambda: Ingest(store, source).run(follow=True, stop=stop))
        reader.start()
        try:
            until(lambda: items(store) == list(range(100)))
            broker.kill()
            time.sleep(0.5)
            broker.start()
            broker.create_topic("gone", 1)
            # More than were read before: who goes on at offset 100 would miss a hundred events.
            broker.produce("gone", [message(i) for i in range(100, 400)])
            until(lambda: items(store) == list(range(400)))
        finally:
            stop.set()
            reader.join()
            source.close()
        # A new process finds the same.
        assert ingest_all(store, broker, "gone", (0,)).events == 0
        broker.kill()
        broker.start()
        broker.create_topic("gone", 1)
        broker.produce("gone", [message(i) for i in range(400, 410)])
        assert ingest_all(store, broker, "gone", (0,)).events == 10
        assert items(store) == list(range(410))


def test_without_a_broker_or_a_topic_it_says_so(shared, store):
    with pytest.raises(StoreError, match="nothing-here"):
        ingest_all(store, shared, "nothing-here", (0,))


def test_two_members_of_a_group_share_and_hand_over(shared, store):
    shared.create_topic("group", 4)
    shared.produce("group", [message(i) for i in range(500)])
    stops = [threading.Event(), threading.Event()]
    sources = [source_of(shared, "group", group="g1", config={"session.timeout.ms": "6000"}) for _ in stops]
    ingests = [Ingest(store, s, IngestOptions(batch_events=50)) for s in sources]

    def work(i):
        ingests[i].run(follow=True, stop=stops[i])
        sources[i].close()

    readers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    readers[0].start()
    until(lambda: items(store) == list(range(500)))
    readers[1].start()
    for i in range(500, 3000, 100):
        shared.produce("group", [message(j) for j in range(i, i + 100)])
        time.sleep(0.3)
    until(lambda: items(store) == list(range(3000)))
    stops[0].set()
    readers[0].join()
    shared.produce("group", [message(j) for j in range(3000, 3300)])
    until(lambda: items(store) == list(range(3300)))
    stops[1].set()
    readers[1].join()
    assert ingests[0].report.events + ingests[1].report.events == 3300
    assert ingests[1].report.events > 0


PROGRAM = """
import sys
from pathlib import Path
from thinrow.history.store import HistoryStore
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.ingest import Ingest, IngestOptions
from thinrow.sources.kafka import KafkaOptions, KafkaSource
store = HistoryStore.open(sys.argv[1])
source = KafkaSource("killed", KafkaOptions(sys.argv[2], "killed", partitions=(0, 1)), JsonDecoder())
print("ready", flush=True)
Ingest(store, source, IngestOptions(batch_events=97, linger_s=0.02)).run(follow=True)
"""


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_killed_consumer_loses_and_doubles_nothing(shared, tmp_path, rounds):
    topic_broker = KafkaBroker()
    topic_broker.create_topic("killed", 2)
    HistoryStore.create(tmp_path / "store", SCHEMA, 4).close()
    rng = random.Random(rounds)
    produced = bad = 0
    try:
        for _ in range(rounds):
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), topic_broker.address],
                stdout=subprocess.PIPE,
                env={**os.environ},
            )
            process.stdout.readline()
            end = time.monotonic() + rng.random() * 1.2
            while time.monotonic() < end:
                n = rng.randrange(50, 500)
                batch = [message(i) for i in range(produced, produced + n)]
                if rng.random() < 0.3:
                    batch.insert(rng.randrange(n), (None, b"poison %d" % bad))
                    bad += 1
                topic_broker.produce("killed", batch)
                produced += n
            process.send_signal(signal.SIGKILL)
            process.wait()
        with HistoryStore.open(tmp_path / "store") as store:
            source = source_of(topic_broker, "killed", partitions=(0, 1))
            Ingest(store, source).run()
            source.close()
            assert items(store) == list(range(produced))
            assert sorted(x.payload for x in store.dead_letters.read()) == sorted(b"poison %d" % i for i in range(bad))
            assert store.verify_recent() == []
            store.compact()
            assert items(store) == list(range(produced))
    finally:
        topic_broker.close()


def test_offsets_that_the_broker_does_not_have_are_an_error_and_no_gap(shared, store):
    shared.create_topic("short", 1)
    shared.produce("short", [message(i) for i in range(10)])
    source = source_of(shared, "short", partitions=(0,))
    ingest = Ingest(store, source)
    ingest.run()
    held = store.recent.positions("short")["0"]
    far = json.dumps({**json.loads(held), "offset": 1_000}, sort_keys=True)
    set_positions(store, [Advance("short", "0", held, far)])
    with pytest.raises(StoreError, match="is not there: the broker has 0 to 9"):
        ingest.run()
    source.close()


def test_a_broker_that_redelivers_everything_adds_nothing(shared, store):
    shared.create_topic("again", 2)
    shared.produce("again", [message(i) for i in range(500)])
    source = source_of(shared, "again", partitions=(0, 1))
    assert Ingest(store, source, IngestOptions(batch_events=64)).run().events == 500
    # The client begins at the first message again, and nobody told the source.
    source._consumer.assign([TopicPartition("again", p, 0) for p in (0, 1)])
    shared.produce("again", [message(i) for i in range(500, 600)])
    seen = []
    while len(seen) < 100:
        batch = source.read(64, 0.2)
        seen += [] if batch is None else batch.table["item"].to_pylist()
    assert sorted(seen) == list(range(500, 600))
    source.close()
    # One that forgets where it stands is refused by the store.
    stale = source_of(shared, "again", partitions=(0, 1))
    ingest = Ingest(store, stale, IngestOptions(batch_events=64))
    positions, asked = ingest._positions, []
    ingest._positions = lambda: {} if not asked and not asked.append(1) else positions()
    report = ingest.run()
    assert (report.conflicts, report.events) == (1, 100)
    assert items(store) == list(range(600))
    stale.close()


@needs_redis
def test_a_full_server_makes_the_reader_wait_and_loses_nothing(shared, tmp_path):
    """Redis at its maxmemory, which holds a part of what the topic has: each time that it is full it is compacted."""
    arrow = pa.schema([*ARROW, ("note", pa.string()), ("source_id", pa.string())])
    schema = EventSchema.infer(arrow, user="user", time="ts", event_id="source_id")
    shared.create_topic("full", 1)
    n = 12_000
    note = "".join(random.Random(1).choices("abcdefgh", k=400))
    bodies = ({"user": i % 7, "ts": 1_000 + i, "item": i, "note": note} for i in range(n))
    shared.produce("full", [(None, json.dumps(b).encode()) for b in bodies])
    with RedisServer("--maxmemory", "5mb") as server:
        recent = f"redis://127.0.0.1:{server.port}/0?name=full"
        with HistoryStore.create(tmp_path / "s", schema, 2, recent=recent) as opened:
            source, stood = source_of(shared, "full", partitions=(0,)), []

            def relieve():
                # Nothing was evicted, nothing is there twice, and the offset stands at what is whole: of the batch that
                # was refused some users may be there, for a call is atomic for each user alone.
                at = json.loads(opened.recent.positions("full")["0"])["offset"]
                held = items(opened)
                assert held[:at] == list(range(at))
                assert len(set(held)) == len(held) <= at + 500
                stood.append(at)
                opened.compact()

            ingest = Ingest(opened, source, IngestOptions(batch_events=500), relieve=relieve)
            report = ingest.run()
            source.close()
            # What was there of a batch that was cut half way is known when it comes again.
            assert (report.events + report.duplicates, report.refused) == (n, 0)
            assert len(set(stood)) >= 2
            assert stood == sorted(stood), "each compaction made room"
            assert report.waited_s > 0
            assert items(opened) == list(range(n))
            assert opened.verify_recent() == []


def test_events_of_a_clock_that_was_set_back_are_late_ones(shared, store):
    """The producer's clock goes back by a second half way, and the reader's with every batch."""
    shared.create_topic("clock", 1)
    times = [*range(2_000, 2_050), *range(1_000, 1_050)]
    sent = [(b"1", json.dumps({"user": 1, "ts": ts, "item": i}).encode()) for i, ts in enumerate(times)]
    clock = iter([5_000, 1_001, 4_000, 1_002] * 100)
    source = source_of(shared, "clock", partitions=(0,))
    ingest = Ingest(store, source, IngestOptions(batch_events=10, max_future_ms=2_000), clock=lambda: next(clock))
    shared.produce("clock", sent[:50])
    ingest.run()
    asked = store.snapshot([1], 3_000)
    store.compact()
    shared.produce("clock", sent[50:])
    report = ingest.run()
    source.close()
    assert (report.events, report.refused) == (100, 0)
    found = store.read([1], 3_000).histories
    assert found.to_jagged("item").values.tolist() == [*range(50, 100), *range(50)]
    assert found.to_jagged("arrival").values.tolist() == [*range(51, 101), *range(1, 51)]
    # What was asked before is as it was.
    store.compact()
    logged = reconstruct(store.pin(), asked.requests).histories
    assert logged.to_jagged("item").values.tolist() == list(range(50))


@needs_redis
def test_a_killed_consumer_over_redis_doubles_nothing(shared, tmp_path):
    """A crash between events and positions: what comes again is dropped by its derived id."""
    arrow = pa.schema([*ARROW, ("source_id", pa.string())])
    schema = EventSchema.infer(arrow, user="user", time="ts", event_id="source_id")
    shared.create_topic("redis", 2)
    shared.produce("redis", [message(i) for i in range(1000)])
    with RedisServer() as server, HistoryStore.create(tmp_path / "s", schema, 4, sync=False) as store:
        store.recent.close()
        store.recent = RedisRecent(f"redis://127.0.0.1:{server.port}/0?name=t", schema, lambda above: above, new=True)
        append = store.recent.append
        for n, cut in enumerate((True, False, True, False)):
            shared.produce("redis", [message(i) for i in range(1000 + 200 * n, 1200 + 200 * n)])
            source = source_of(shared, "redis", partitions=(0, 1))
            ingest = Ingest(store, source, IngestOptions(batch_events=150))

            def halved(*args, cut=cut, **kwargs):
                if cut:
                    # The events are there, the positions are not.
                    append(*args, **{**kwargs, "advances": ()})
                    raise StoreError("killed")
                return append(*args, **kwargs)

            store.recent.append = lambda *a, **k: halved(*a[:7], advances=a[7] if len(a) > 7 else k["advances"])
            if cut:
                with pytest.raises(StoreError, match="killed"):
                    ingest.run()
            else:
                ingest.run()
            source.close()
        assert items(store) == list(range(1800))
        plain = HistoryStore.create(tmp_path / "p", SCHEMA, 4, sync=False)
        plain.recent.close()
        plain.recent = RedisRecent(f"redis://127.0.0.1:{server.port}/0?name=p", SCHEMA, lambda above: above, new=True)
        with plain, pytest.raises(InputError, match="source_id"):
            Ingest(plain, source_of(shared, "redis"))
