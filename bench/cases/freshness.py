"""How old an event is when a snapshot first shows it: produced to a broker, read by ``Ingest``, visible.

A process-wide load of events goes to a real broker (Tansu) at a stated rate; an ingest follows it into a store (LMDB,
every append on disk). Beside the load, probes: an event of a user of its own is produced, and snapshots of that user
are taken until one shows it. ``visible_ms`` is the time between the call that produces and the return of that snapshot.

In ``burst`` the load is ten times as high for a second, in the middle. A store that does not keep up lags, and the
probes say so. ``append_alone`` is the same without a broker: ``store.append`` of one event, then a snapshot.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.harness import Options, Result
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.ingest import Ingest, IngestReport
from thinrow.sources.kafka import KafkaOptions, KafkaSource
from thinrow.testing.kafka import KafkaBroker

_ARROW = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64())])
_SCHEMA = EventSchema.infer(_ARROW, user="user", time="ts")
_PROBES = 1 << 40
_TICK_S = 0.01
_PATIENCE_S = 30.0


def run(options: Options) -> Result:
    """Probe at each rate."""
    seconds = 2.0 if options.quick else 20.0
    loads = (500,) if options.quick else (1_000, 5_000, 10_000)
    result = Result("freshness", {"seconds": seconds, "events_per_s": list(loads), "partitions": 2})
    for rate in loads:
        result.figures[f"load_{rate}"] = _probed(rate, seconds, burst=False)
    result.figures["burst"] = _probed(loads[0], seconds, burst=True)
    result.figures["append_alone"] = _appended(50 if options.quick else 500)
    for name, seen in result.figures.items():
        result.ratios[f"vs_a_second_share.{name}"] = seen["visible_ms"]["p99"] / 1_000
    return result


def _probed(rate: int, seconds: float, *, burst: bool) -> dict[str, Any]:
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory() as name,
        KafkaBroker() as broker,
        HistoryStore.create(Path(name) / "store", _SCHEMA) as store,
    ):
        broker.create_topic("clicks", 2)
        source = KafkaSource("clicks", KafkaOptions(broker.address, "clicks", partitions=(0, 1)), JsonDecoder())
        lag = [0]

        def follow(report: IngestReport) -> None:
            lag[0] = max(lag[0], report.lag or 0)

        ingest = Ingest(store, source, progress=follow)
        reader = threading.Thread(target=lambda: ingest.run(follow=True, stop=stop))
        loader = threading.Thread(target=_load, args=(broker, rate, stop, seconds / 2 if burst else None))
        reader.start()
        loader.start()
        ages = _probe(broker, store, seconds)
        stop.set()
        loader.join()
        reader.join()
        source.close()
        return {"visible_ms": _spread(ages), "probes": len(ages), "lag_events": lag[0], "events": ingest.report.events}


def _load(broker: KafkaBroker, rate: int, stop: threading.Event, burst_at: float | None) -> None:
    """``rate`` events a second until ``stop``, a hundredth every tick."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 5, "queue.buffering.max.messages": 10**6})
    began, sent = time.monotonic(), 0
    while not stop.wait(_TICK_S):
        past = time.monotonic() - began
        due = rate * past
        if burst_at is not None:
            due += 9 * rate * min(max(past - burst_at, 0.0), 1.0)
        for i in range(sent, int(due)):
            event = {"user": i % 5_000, "ts": time.time_ns() // 1_000_000, "item": i}
            producer.produce("clicks", json.dumps(event).encode(), str(i % 5_000))
        sent = int(due)
        producer.poll(0)
    producer.flush(10)


def _probe(broker: KafkaBroker, store: HistoryStore, seconds: float) -> list[float]:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 0})
    # The first probe finds connections that are not made yet.
    _age(producer, store, 0)
    ages: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not ages:
        time.sleep(0.02)
        ages.append(_age(producer, store, len(ages) + 1))
    producer.flush(10)
    return ages


def _age(producer: Any, store: HistoryStore, number: int) -> float:
    """Milliseconds until an event of a new user is visible."""
    event = {"user": _PROBES + number, "ts": time.time_ns() // 1_000_000, "item": number}
    since = time.perf_counter()
    producer.produce("clicks", json.dumps(event).encode())
    producer.poll(0)
    while not len(store.peek([_PROBES + number], 1 << 60).requests.inline):
        if time.perf_counter() - since > _PATIENCE_S:
            raise RuntimeError(f"an event was not visible after {_PATIENCE_S} s")
        time.sleep(0.001)
    return 1_000 * (time.perf_counter() - since)


def _appended(n: int) -> dict[str, Any]:
    ages = []
    with tempfile.TemporaryDirectory() as name, HistoryStore.create(Path(name) / "store", _SCHEMA) as store:
        for i in range(n):
            since = time.perf_counter()
            store.append(pa.table({"user": [i], "ts": [1], "item": [1]}, _ARROW))
            assert len(store.peek([i], 1 << 60).requests.inline)
            ages.append(1_000 * (time.perf_counter() - since))
    return {"visible_ms": _spread(ages), "probes": n}


def _spread(ages: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(ages, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(max(ages), 2)}
