"""Framed messages: what confluent-kafka's serializers write is read, hostile bytes are refused, a dead registry is no
fault of a message."""

import json
import struct
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError, StoreError
from thinrow.schema import EventSchema
from thinrow.sources.places import make_decoder
from thinrow.sources.registry import AvroDecoder, ProtobufDecoder, Registry
from thinrow.sources.wanted import wanted_of
from thinrow.testing.registry import SchemaRegistry

AVRO = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user", "type": "long"},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "item", "type": ["null", "long"], "default": None},
        {"name": "shop", "type": "string"},
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": []},
    ],
}
ARROW = pa.schema(
    [
        ("user", pa.int64()),
        ("ts", pa.int64()),
        ("item", pa.int64()),
        ("shop", pa.string()),
        ("tags", pa.list_(pa.string())),
    ]
)
WANTED = wanted_of(EventSchema.infer(ARROW, user="user", time="ts"))
CONTEXT = SerializationContext("clicks", MessageField.VALUE)
EVENTS = [{"user": i, "ts": 1000 + i, "item": i or None, "shop": f"s{i}", "tags": ["a"] * i} for i in range(5)]


@pytest.fixture
def registry():
    with SchemaRegistry() as server:
        yield server


def avro_values(url, events=EVENTS):
    write = AvroSerializer(SchemaRegistryClient({"url": url}), json.dumps(AVRO))
    return [write({**e, "ts": datetime.fromtimestamp(e["ts"] / 1000, UTC)}, CONTEXT) for e in events]


def test_avro_of_a_registry(registry):
    values = avro_values(registry.url)
    decoder = make_decoder({"format": "avro", "registry": registry.url})
    registry.requests.clear()
    for _ in range(3):
        assert decoder.decode(values, WANTED).table.to_pylist() == EVENTS
    assert len(registry.requests) == 1
    assert decoder.describe() == {"format": "avro", "registry": registry.url}
    assert set(decoder.decode(values, None).table.column_names) == set(ARROW.names)


def test_avro_of_two_schemas_in_one_batch(registry):
    newer = {**AVRO, "fields": [*AVRO["fields"][:2], {"name": "price", "type": "double"}]}
    values = avro_values(registry.url)
    write = AvroSerializer(SchemaRegistryClient({"url": registry.url}), json.dumps(newer))
    values.insert(2, write({"user": 9, "ts": datetime.fromtimestamp(5, UTC), "price": 0.5}, CONTEXT))
    found = AvroDecoder(Registry(registry.url)).decode(values, WANTED).table.to_pylist()
    assert found[2] == {"user": 9, "ts": 5000, "item": None, "shop": None, "tags": None}
    assert found[:2] + found[3:] == EVENTS


def test_hostile_avro_is_refused_and_the_rest_decoded(registry):
    values = avro_values(registry.url)
    bad = [
        b"",
        b"\0",
        b"\1" + values[0][1:],
        values[1][:-1],
        values[1] + b"x",
        b"\0\0\0\0\x63abc",
        b"\0\0\0\0\1" + b"\xff" * 40,
    ]
    mixed = [v for pair in zip(bad, [*values, *values], strict=False) for v in pair]
    found = AvroDecoder(Registry(registry.url)).decode(mixed, WANTED)
    assert found.rows == list(range(1, 14, 2))
    assert sorted(found.refused) == list(range(0, 14, 2))
    assert "no schema 99" in found.refused[10]
    assert "left over" in found.refused[8]


def test_a_registry_that_fails_is_no_fault_of_a_message(registry):
    values = avro_values(registry.url)
    registry.fails = 500
    with pytest.raises(StoreError, match="registry"):
        AvroDecoder(Registry(registry.url)).decode(values, WANTED)
    registry.close()
    with pytest.raises(StoreError, match="does not answer"):
        AvroDecoder(Registry(registry.url)).decode(values, WANTED)
    # It is closed twice when the fixture ends.
    registry.__init__()


def test_avro_of_a_schema_that_is_given(tmp_path):
    import io

    import fastavro

    plain = {**AVRO, "fields": [{"name": "user", "type": "long"}, {"name": "ts", "type": "long"}]}
    out = io.BytesIO()
    fastavro.schemaless_writer(out, plain, {"user": 7, "ts": 8})
    (tmp_path / "s.avsc").write_text(json.dumps(plain))
    decoder = make_decoder({"format": "avro", "schema": str(tmp_path / "s.avsc")})
    assert decoder.decode([out.getvalue()], WANTED).table.select(["user", "ts"]).to_pylist() == [{"user": 7, "ts": 8}]
    again = make_decoder(decoder.describe())
    assert again.decode([out.getvalue()], WANTED).rows == [0]
    for options in ({"format": "avro"}, {"format": "avro", "schema": "{}"}, {"format": "xml"}, {"format": "protobuf"}):
        with pytest.raises(InputError):
            make_decoder(options)


def clicks():
    """The descriptors of a file with two messages, as protoc writes them, and the class of the second."""
    file = descriptor_pb2.FileDescriptorProto(name="click.proto", package="shop", syntax="proto3")
    other = file.message_type.add(name="Other")
    other.field.add(name="x", number=1, type=3, label=1)
    click = file.message_type.add(name="Click")
    click.field.add(name="user", number=1, type=3, label=1)
    click.field.add(name="ts", number=2, type=3, label=1)
    click.oneof_decl.add(name="_item")
    click.field.add(name="item", number=3, type=3, label=1, proto3_optional=True, oneof_index=0)
    click.field.add(name="shop", number=4, type=9, label=1)
    click.field.add(name="tags", number=5, type=9, label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{n}")) for n in ("Click", "Other")]
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString(), *found


def message_of(kind, event):
    message = kind(user=event["user"], ts=event["ts"], shop=event["shop"], tags=event["tags"])
    if event["item"] is not None:
        message.item = event["item"]
    return message


@pytest.mark.parametrize("with_registry", [True, False])
def test_protobuf(registry, tmp_path, with_registry):
    data, click, other = clicks()
    (tmp_path / "click.desc").write_bytes(data)
    messages = [message_of(click, e) for e in EVENTS]
    options = {"format": "protobuf", "message": "shop.Click", "descriptors": str(tmp_path / "click.desc")}
    if with_registry:
        options["registry"] = registry.url
        client = SchemaRegistryClient({"url": registry.url})
        write = ProtobufSerializer(click, client, {"use.deprecated.format": False})
        values = [write(m, CONTEXT) for m in messages]
        wrong = ProtobufSerializer(other, client, {"use.deprecated.format": False})(other(x=1), CONTEXT)
        bad = [b"", values[0][:5], values[3][:-2], wrong, b"\0\0\0\0\1\xff\xff\xff\xff\xff\xff"]
    else:
        values = [m.SerializeToString() for m in messages]
        bad = [values[3][:-2], b"\xff\xff"]
    decoder = make_decoder(options)
    found = decoder.decode([*bad, *values], WANTED)
    assert found.table.to_pylist() == EVENTS
    assert sorted(found.refused) == list(range(len(bad)))
    assert make_decoder(decoder.describe()).decode(values, WANTED).table.to_pylist() == EVENTS
    assert decoder.decode(values, None).table.num_rows == 5


def test_descriptors_that_do_not_fit(tmp_path):
    (tmp_path / "a").write_bytes(clicks()[0])
    for path, name in (("a", "shop.Nothing"), ("b", "shop.Click")):
        with pytest.raises(InputError, match="protoc"):
            ProtobufDecoder(name, tmp_path / path, is_framed=False)


def test_framed_json():
    decoder = make_decoder({"format": "json", "registry": "any"})
    values = [struct.pack(">BI", 0, 7) + json.dumps(e).encode() for e in EVENTS]
    found = decoder.decode([b"\0", *values, b'{"user":1}'], WANTED)
    assert found.table.to_pylist() == EVENTS
    assert sorted(found.refused) == [0, 6]


@pytest.fixture(scope="module")
def avro_bytes():
    with SchemaRegistry() as server:
        values = avro_values(server.url)
        decoder = AvroDecoder(Registry(server.url))
        decoder.decode(values, WANTED)
        return values, decoder


@settings(max_examples=200)
@given(data=st.data())
def test_any_change_of_bytes_is_decoded_or_refused(avro_bytes, tmp_path_factory, data):
    values, avro = avro_bytes
    value = bytearray(data.draw(st.sampled_from(values)))
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(5, len(value) - 1))] = data.draw(st.integers(0, 255))
    found = avro.decode([values[0], bytes(value), values[2]], WANTED)
    assert {0, 2} <= set(found.rows) or found.table.num_rows == 2
    assert len(found.rows) + len(found.refused) == 3
