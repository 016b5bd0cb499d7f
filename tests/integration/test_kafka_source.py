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

from thinrow.core.errors import StoreError
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.ingest import Ingest, IngestOptions
from thinrow.sources.kafka import KafkaOptions, KafkaSource
from thinrow.testing.kafka import KafkaBroker

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


def until(holds, seconds=40):
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
