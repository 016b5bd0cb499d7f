"""Events handed over by this process: durable when the ticket says so; a full queue makes the caller wait."""

import threading
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from thinrow.core.errors import StoreError
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.calls import CallSource
from thinrow.sources.ingest import Ingest

SCHEMA = EventSchema.infer(
    pa.schema({"user": pa.int64(), "ts": pa.int64(), "item": pa.int64()}), user="user", time="ts"
)


@pytest.fixture
def store(tmp_path):
    with HistoryStore.create(tmp_path / "store", SCHEMA, 4, sync=False) as opened:
        yield opened


def test_tickets_tell_when_events_are_durable(store):
    source, stop = CallSource(), threading.Event()
    ingest = Ingest(store, source)
    reader = threading.Thread(target=lambda: ingest.run(follow=True, stop=stop))
    reader.start()
    source.put([{"user": 7, "ts": 1, "item": 1}, {"user": "x", "ts": 1, "item": 2}]).wait(120)
    source.put(pa.table({"user": [7], "ts": [2], "item": [3]})).wait(120)
    assert store.read([7], 100).histories.to_jagged("item").values.tolist() == [1, 3]
    assert [x.payload for x in store.dead_letters.read()] == [b'{"user": "x", "ts": 1, "item": 2}']
    stop.set()
    reader.join()
    waiting = source.put([{"user": 7, "ts": 1, "item": 1}])
    source.close()
    with pytest.raises(StoreError, match="closed"):
        waiting.wait(1)
    with pytest.raises(StoreError, match="closed"):
        source.put([{"user": 7, "ts": 1, "item": 1}])


def test_a_full_queue_makes_the_caller_wait_and_loses_nothing(store):
    source = CallSource(max_events=10)
    source.put([{"user": 7, "ts": i, "item": i} for i in range(10)])
    with pytest.raises(StoreError, match="10 events wait"):
        source.put([{"user": 7, "ts": 1, "item": 1}], timeout_s=0.05)
    late = threading.Thread(target=lambda: source.put([{"user": 7, "ts": 10, "item": 10}]))
    late.start()
    stop = threading.Event()
    ingest = Ingest(store, source, progress=lambda r: stop.set() if r.events == 11 else None)
    ingest.run(follow=True, stop=stop)
    late.join()
    assert store.read([7], 100).histories.to_jagged("item").values.tolist() == list(range(11))


def test_an_append_that_fails_is_told_by_the_ticket(store):
    source = CallSource()
    ticket = source.put([{"user": 7, "ts": 1, "item": 1}])
    ingest = Ingest(store, source)
    store.recent.append = lambda *a, **k: (_ for _ in ()).throw(StoreError("full"))
    with pytest.raises(StoreError, match="full"):
        ingest.run()
    source.close()
    with pytest.raises(StoreError, match="put them again"):
        ticket.wait(1)


def test_times_may_be_texts_and_datetimes(store):
    source = CallSource()
    source.put([{"user": 7, "ts": "1970-01-01T00:00:05Z", "item": 1}, {"user": 7, "ts": "yesterday", "item": 2}])
    source.put([{"user": 7, "ts": datetime(1970, 1, 1, 0, 0, 6, tzinfo=UTC), "item": 3}])
    assert Ingest(store, source).run().refused == 1
    assert store.read([7], 10_000).histories.to_jagged("item").values.tolist() == [1, 3]
