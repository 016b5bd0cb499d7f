"""Events from a source into a store, against the same by hand, and against reading and decoding without storing.

Kafka protocol (a real broker, Tansu, of two partitions, its log in memory; the same messages for all):

- ``thinrow.<format>``: ``Ingest``, each event checked, stored and acknowledged (LMDB, every append on disk), and the
  position with it. ``one_thread.<format>``: the same without reading ahead.
- ``by_hand.<format>``: what one would write: confluent-kafka's consumer and deserializers as below, each event packed
  with ``struct`` under its user and a number, put into plain LMDB with the offsets, one transaction on disk a batch.
  Nothing is checked and nothing refused; an event cannot be late, has no CRC, and nobody compacts what is there.
- ``consume_decode.<format>``: confluent-kafka, its batches of messages decoded to rows and dropped. JSON by
  ``json.loads``; Avro and Protobuf by confluent-kafka's deserializers and a schema registry.
- ``arrow_decode.json``: the same, a batch parsed by pyarrow in one call: the fastest that we know.

Files: ``thinrow.parquet|jsonl|csv`` against polars (``polars_read``) and pyarrow (``pyarrow_read``), which read the
same file into columns and drop it. ``append_alone`` is ``store.append`` of tables in memory: the store's own share.

Units are events a second. Ratios are ours over theirs: over ``consume_decode`` and the readers of files they say what
storing costs.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from bench.harness import Options, Result, Work, rates
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.files import FileSource
from thinrow.sources.ingest import Ingest, IngestOptions
from thinrow.sources.kafka import KafkaOptions, KafkaSource
from thinrow.sources.places import make_decoder
from thinrow.sources.wanted import wanted_of
from thinrow.testing.kafka import KafkaBroker
from thinrow.testing.registry import SchemaRegistry

ARROW = pa.schema(
    [("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64()), ("price", pa.float64()), ("shop", pa.string())]
)
SCHEMA = EventSchema.infer(ARROW, user="user", time="ts")
AVRO = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user", "type": "long"},
        {"name": "ts", "type": "long"},
        {"name": "item", "type": "long"},
        {"name": "price", "type": "double"},
        {"name": "shop", "type": "string"},
    ],
}
FORMATS = ("json", "avro", "protobuf")
_PARTITIONS = (0, 1)
_BATCH = 16_384


def run(options: Options) -> Result:
    """Produce once, then read in interleaved rounds."""
    n = 20_000 if options.quick else 200_000
    rounds = options.rounds or (1 if options.quick else 5)
    result = Result("ingest", {"events": n, "users": n // 10, "rounds": rounds, "batch_events": _BATCH})
    table = events(n)
    with tempfile.TemporaryDirectory() as name, KafkaBroker() as broker, SchemaRegistry() as registry:
        folder = Path(name)
        works = _of_broker(folder, broker, registry, table) | _of_files(folder, table)
        works["append_alone"] = lambda: _appended(folder, table)
        seen = rates(works, rounds)
    result.figures = {"events_per_s": seen}

    def ratio(ours: str, theirs: str) -> float:
        return seen[ours]["median"] / seen[theirs]["median"]

    for kind in FORMATS:
        result.ratios[f"vs_by_hand.{kind}"] = ratio(f"thinrow.{kind}", f"by_hand.{kind}")
        result.ratios[f"vs_one_thread.{kind}"] = ratio(f"thinrow.{kind}", f"one_thread.{kind}")
        result.ratios[f"vs_consume_decode.{kind}"] = ratio(f"thinrow.{kind}", f"consume_decode.{kind}")
    result.ratios["vs_arrow_decode.json"] = ratio("thinrow.json", "arrow_decode.json")
    for kind in ("parquet", "jsonl", "csv"):
        for peer in ("polars_read", "pyarrow_read"):
            result.ratios[f"vs_{peer}.{kind}"] = ratio(f"thinrow.{kind}", f"{peer}.{kind}")
    for kind in ("json", "parquet"):
        result.ratios[f"vs_append_alone.{kind}"] = ratio(f"thinrow.{kind}", "append_alone")
    return result


def events(n: int, seed: int = 3) -> pa.Table:
    """``n`` events of n / 10 users, in order of time."""
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "user": rng.integers(0, n // 10, n),
            "ts": 1_700_000_000_000 + np.arange(n) * 20,
            "item": rng.zipf(1.2, n) % 1_000_000,
            "price": np.round(rng.lognormal(2, 1, n), 2),
            "shop": [f"shop{i}" for i in rng.integers(0, 50, n)],
        },
        ARROW,
    )


def _of_broker(folder: Path, broker: KafkaBroker, registry: SchemaRegistry, table: pa.Table) -> dict[str, Work]:
    rows = table.to_pylist()
    works: dict[str, Work] = {}
    for kind, (values, how, peer) in _formats(folder, registry, rows).items():
        broker.create_topic(kind, len(_PARTITIONS))
        for p in _PARTITIONS:
            broker.produce(kind, [(None, v) for v in values[p :: len(_PARTITIONS)]], partition=p)

        def ours(read_ahead: bool, kind: str = kind, how: dict[str, str] = how) -> int:
            options = KafkaOptions(broker.address, kind, partitions=_PARTITIONS)
            source = KafkaSource(kind, options, make_decoder(how))
            return _ingested(folder, source, IngestOptions(read_ahead=read_ahead))

        works[f"thinrow.{kind}"] = partial(ours, True)
        works[f"by_hand.{kind}"] = partial(_by_hand, folder, broker, kind, len(rows), peer)
        works[f"one_thread.{kind}"] = partial(ours, False)
        works[f"consume_decode.{kind}"] = _consumer(broker, kind, len(rows), partial(_each, peer))
    wanted = wanted_of(SCHEMA)
    works["arrow_decode.json"] = _consumer(broker, "json", len(rows), lambda some: JsonDecoder().decode(some, wanted))
    return works


def _formats(
    folder: Path, registry: SchemaRegistry, rows: list[dict[str, Any]]
) -> dict[str, tuple[list[bytes], dict[str, str], Callable[[bytes], Any]]]:
    """Messages of each format, how we decode them, and how confluent-kafka does."""
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
    from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    client = SchemaRegistryClient({"url": registry.url})
    to_avro, of_avro = AvroSerializer(client, json.dumps(AVRO)), AvroDeserializer(client)
    click = _click(folder / "click.desc")
    plain = {"use.deprecated.format": False}
    to_protobuf, of_protobuf = ProtobufSerializer(click, client, plain), ProtobufDeserializer(click, plain)

    def context(topic: str) -> SerializationContext:
        return SerializationContext(topic, MessageField.VALUE)

    in_avro, in_protobuf = context("avro"), context("protobuf")
    protobuf = {"format": "protobuf", "message": "shop.Click", "descriptors": str(folder / "click.desc")}
    return {
        "json": ([json.dumps(r).encode() for r in rows], {"format": "json"}, json.loads),
        "avro": (
            [to_avro(r, in_avro) for r in rows],
            {"format": "avro", "registry": registry.url},
            lambda v: of_avro(v, in_avro),
        ),
        "protobuf": (
            [to_protobuf(click(**r), in_protobuf) for r in rows],
            {**protobuf, "registry": registry.url},
            lambda v: of_protobuf(v, in_protobuf),
        ),
    }


def _click(path: Path) -> Any:
    """The class of a message of our columns; its descriptors are written to ``path``."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="click.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Click")
    for i, (name, kind) in enumerate(zip(ARROW.names, (3, 3, 3, 1, 9), strict=True)):
        message.field.add(name=name, number=i + 1, type=kind, label=1)
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Click"))


def _opened(broker: KafkaBroker, topic: str) -> Any:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": "peer",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 50,
        }
    )
    consumer.assign([TopicPartition(topic, p, 0) for p in _PARTITIONS])
    return consumer


def _by_hand(folder: Path, broker: KafkaBroker, topic: str, n: int, decode: Callable[[bytes], Any]) -> int:
    """Into LMDB: under ``e`` events by user and number, under ``n`` the next number of a user, under ``o`` offsets."""
    consumer, done = _opened(broker, topic), 0
    with tempfile.TemporaryDirectory(dir=folder) as name, lmdb.open(name, map_size=1 << 30) as env:
        while done < n:
            messages = [m for m in consumer.consume(_BATCH, 0.05) if m.error() is None]
            if not messages:
                continue
            with env.begin(write=True) as txn:
                for message in messages:
                    event = decode(message.value() or b"")
                    _put(txn, event if isinstance(event, dict) else _plain(event))
                for message in {m.partition(): m for m in messages}.values():
                    txn.put(b"o%d" % message.partition(), b"%d" % (message.offset() + 1))
            done += len(messages)
    consumer.close()
    return done


def _put(txn: Any, event: dict[str, Any]) -> None:
    user = event["user"].to_bytes(8, "big")
    number = int.from_bytes(txn.get(b"n" + user, b""), "big")
    row = struct.pack("<qqd", event["ts"], event["item"], event["price"]) + event["shop"].encode()
    txn.put(b"e" + user + number.to_bytes(8, "big"), row)
    txn.put(b"n" + user, (number + 1).to_bytes(8, "big"))


def _plain(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in ARROW.names}


def _consumer(broker: KafkaBroker, topic: str, n: int, decode: Callable[[list[bytes]], Any]) -> Work:
    def work() -> int:
        consumer, done = _opened(broker, topic), 0
        while done < n:
            values = [m.value() or b"" for m in consumer.consume(_BATCH, 0.05) if m.error() is None]
            if values:
                decode(values)
            done += len(values)
        consumer.close()
        return done

    return work


def _of_files(folder: Path, table: pa.Table) -> dict[str, Work]:
    import polars as pl

    paths = {kind: folder / f"events.{kind}" for kind in ("parquet", "jsonl", "csv")}
    pq.write_table(table, paths["parquet"], row_group_size=_BATCH)
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    frame.write_ndjson(paths["jsonl"])
    frame.write_csv(paths["csv"])
    reads: dict[str, Callable[[Path], Any]] = {
        "polars_read.parquet": pl.read_parquet,
        "polars_read.jsonl": pl.read_ndjson,
        "polars_read.csv": pl.read_csv,
        "pyarrow_read.parquet": pq.read_table,
        "pyarrow_read.jsonl": pa_json.read_json,
        "pyarrow_read.csv": pa_csv.read_csv,
    }
    works: dict[str, Work] = {}
    for kind, path in paths.items():
        works[f"thinrow.{kind}"] = partial(_ingested_file, folder, path)
    for name, read in reads.items():
        path = paths[name.rpartition(".")[2]]
        works[name] = partial(_read, read, path)
    return works


def _each(decode: Callable[[bytes], Any], values: list[bytes]) -> list[Any]:
    return [decode(v) for v in values]


def _read(read: Callable[[Path], Any], path: Path) -> int:
    return len(read(path))


def _ingested_file(folder: Path, path: Path) -> int:
    return _ingested(folder, FileSource("files", [path]))


def _ingested(folder: Path, source: Any, options: IngestOptions | None = None) -> int:
    with tempfile.TemporaryDirectory(dir=folder) as name, HistoryStore.create(Path(name) / "store", SCHEMA) as store:
        report = Ingest(store, source, options).run()
        source.close()
        assert not report.refused, report
        return report.events


def _appended(folder: Path, table: pa.Table) -> int:
    with tempfile.TemporaryDirectory(dir=folder) as name, HistoryStore.create(Path(name) / "store", SCHEMA) as store:
        for first in range(0, table.num_rows, _BATCH):
            store.append(table.slice(first, _BATCH))
        return len(table)
