"""How old an event is when a snapshot first shows it: produced to a broker, read by ``Ingest``, visible.

A process-wide load of events goes to a real broker (Tansu) at a stated rate; an ingest follows it into a store (LMDB,
every append on disk). Beside the load, probes: an event of a user of its own is produced, and snapshots of that user
are taken until one shows it. ``visible_ms`` is the time between the call that produces and the return of that snapshot.

In ``burst`` the load is ten times as high for a second, in the middle. A store that does not keep up lags, and the
probes say so. ``append_alone`` is the same without a broker: ``store.append`` of one event, then a snapshot.

``trainable_s`` is the time from an event to the batch that has it: the event is appended, a request is logged at once,
its outcome 50 ms later, its window closes after 100 ms, a join runs every 50 ms, and a session follows with blocks of
one row.
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
from thinrow.dpp import follow
from thinrow.examples import ImpressionLog, Impressions, OutcomeLog, Outcomes, SplitLog, heartbeat, join_stream
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema, ExampleSchema
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.ingest import Ingest, IngestReport
from thinrow.sources.kafka import KafkaOptions, KafkaSource
from thinrow.testing.kafka import KafkaBroker

_ARROW = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64())])
_SCHEMA = EventSchema.infer(_ARROW, user="user", time="ts")
_PROBES = 1 << 40
_TICK_S = 0.01
_PATIENCE_S = 30.0
_WINDOW_MS, _JOIN_S = 100, 0.05


def run(options: Options) -> Result:
    """Probe at each rate."""
    seconds = 2.0 if options.quick else 20.0
    loads = (500,) if options.quick else (1_000, 5_000, 10_000)
    result = Result("freshness", {"seconds": seconds, "events_per_s": list(loads), "partitions": 2})
    for rate in loads:
        result.figures[f"load_{rate}"] = _probed(rate, seconds, burst=False)
    result.figures["burst"] = _probed(loads[0], seconds, burst=True)
    result.figures["append_alone"] = _appended(50 if options.quick else 500)
    visible = dict(result.figures)
    result.figures["trainable"] = _trained(5 if options.quick else 100)
    for name, seen in visible.items():
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


def _trained(n: int) -> dict[str, Any]:
    """Seconds from an event to the batch whose history has it."""
    examples = ExampleSchema.of(context={}, candidates={"item": "int64"}, item="item", outcomes={"buy": _WINDOW_MS})
    ages, stop = [], threading.Event()
    with tempfile.TemporaryDirectory() as name, HistoryStore.create(Path(name) / "store", _SCHEMA) as store:
        logs = ImpressionLog(Path(name) / "i", _SCHEMA, examples), OutcomeLog(Path(name) / "o")
        splits = SplitLog(Path(name) / "s", _SCHEMA, examples)

        def join() -> None:
            while not stop.wait(_JOIN_S):
                join_stream(*logs, splits, 0)

        joiner = threading.Thread(target=join)
        joiner.start()
        session = follow(store, splits, base_rows=1, block=1, threads=1, poll_s=0.01)
        batches = iter(session)
        for i in range(n):
            since, now = time.perf_counter(), time.time_ns() // 1_000_000
            store.append(pa.table({"user": [i], "ts": [now], "item": [1]}, _ARROW))
            shown = Impressions.of(examples, [i], store.snapshot([i], now + 1), candidates={"item": [[1]]}, context={})
            logs[0].append(shown)
            time.sleep(_WINDOW_MS / 2_000)
            logs[1].append(Outcomes.of("buy", i, 1, now + _WINDOW_MS // 2))
            time.sleep(_WINDOW_MS / 2_000)
            logs[1].append(heartbeat(now + 1 + _WINDOW_MS))
            assert next(batches).histories.events.event_ts[-1] == now
            ages.append(time.perf_counter() - since)
        stop.set()
        joiner.join()
        session.close()
    return {"trainable_s": _spread(ages), "window_s": _WINDOW_MS / 1_000, "join_every_s": _JOIN_S, "probes": n}


def _spread(ages: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(ages, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(max(ages), 2)}
