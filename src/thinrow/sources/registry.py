"""Messages of a schema registry (Confluent's framing), and Avro and Protobuf without one.

Worked example: a framed value is ``00``, the schema's id in 4 bytes (big-endian), then the payload::

    00 00 00 00 07 | 0E D0 0F     Avro under schema 7: user 7, ts 1000

Schemas come from the registry by confluent-kafka's client, which keeps them. Payloads are decoded by fastavro and by
the class of the Protobuf message, as confluent-kafka's own deserializers do it, but without what these do around each
message (docs/decisions/025). A payload with bytes left over is refused, too.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from thinrow.core.errors import InputError, MissingExtraError, StoreError
from thinrow.sources.decode import Decoded, JsonDecoder
from thinrow.sources.wanted import Wanted, table_of_rows

#: ``user:password`` for the registry; never part of a URL.
USER_INFO = "THINROW_REGISTRY_USER_INFO"
_HEADER = 5
_PER_MS = {"timestamp-millis": 1, "timestamp-micros": 1_000, "timestamp-nanos": 1_000_000}


class Registry:
    """Schemas by id."""

    def __init__(self, url: str) -> None:
        """Raises MissingExtraError without confluent-kafka; InputError where the URL holds a password."""
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError
        except ImportError as e:
            raise MissingExtraError("confluent-kafka[schemaregistry]", "kafka") from e
        if "@" in url:
            raise InputError(f"the registry's URL holds a user; put user:password into {USER_INFO} instead")
        self.url = url
        self._not_there = SchemaRegistryError
        config: dict[str, Any] = {"url": url, "max.retries": 2, "timeout": 10}
        if USER_INFO in os.environ:
            config["basic.auth.user.info"] = os.environ[USER_INFO]
        self.client = SchemaRegistryClient.new_client(config)
        self._known: dict[int, str] = {}

    def schema(self, number: int) -> str:
        """The text of schema ``number``.

        Raises:
            LookupError: the registry has no such schema.
            StoreError: it does not answer.
        """
        if number not in self._known:
            try:
                self._known[number] = cast(str, self.client.get_schema(number).schema_str)
            except self._not_there as e:
                if getattr(e, "http_status_code", 0) == 404:
                    raise LookupError(f"the registry has no schema {number}") from e
                raise StoreError(f"the schema registry at {self.url} refuses: {e}") from e
            except Exception as e:
                # Of its HTTP library the client passes on whatever that raises.
                raise StoreError(f"the schema registry at {self.url} does not answer: {e}; is it up?") from e
        return self._known[number]


def framed(value: bytes) -> tuple[int, bytes]:
    """Schema id and payload of a framed value. Raises ValueError."""
    if len(value) < _HEADER or value[0]:
        raise ValueError(f"no framed message: {len(value)} bytes that begin with {value[:6]!r}")
    return int.from_bytes(value[1:_HEADER], "big"), value[_HEADER:]


class AvroDecoder:
    """Avro records, framed by a registry or of one schema that is given. Per message by nature: nothing in the bytes
    says where a field begins."""

    def __init__(self, registry: Registry | None = None, schema: str | None = None) -> None:
        """Args:
        schema: the writer's schema as JSON, of messages without a frame.

        Raises:
            MissingExtraError: without fastavro.
            InputError: neither is given, or both; or the schema is none.
        """
        try:
            import fastavro
        except ImportError as e:
            raise MissingExtraError("fastavro", "kafka") from e
        if (registry is None) == (schema is None):
            raise InputError("Avro needs a registry or a schema; give one of the two")
        self._registry, self._text = registry, schema
        self._read: Callable[..., Any] = fastavro.schemaless_reader
        self._parse: Callable[..., Any] = fastavro.parse_schema
        self._known: dict[int, tuple[Any, dict[str, int]]] = {}
        if schema is not None:
            try:
                self._known[-1] = self._parsed(schema)
            except Exception as e:
                raise InputError(f"no Avro schema: {e}") from e

    def _parsed(self, text: str) -> tuple[Any, dict[str, int]]:
        """For fastavro, times as the numbers that they are written as; and by how much to divide them for ms."""
        tree = json.loads(text)
        per_ms: dict[str, int] = {}
        for field in tree["fields"] if isinstance(tree, dict) else []:
            field["type"], unit = _as_number(field["type"])
            if unit > 1:
                per_ms[field["name"]] = unit
        return self._parse(tree), per_ms

    def decode(self, values: Sequence[bytes], wanted: Wanted | None) -> Decoded:
        """See ``Decoder``."""
        rows: list[Mapping[str, Any]] = []
        at: list[int] = []
        refused: dict[int, str] = {}
        for i, value in enumerate(values):
            try:
                rows.append(self._one(value))
                at.append(i)
            except StoreError:
                raise
            except Exception as e:
                # Hostile bytes make the reader raise almost anything.
                refused[i] = f"no Avro message: {type(e).__name__}: {str(e)[:200]}"
        return decoded(rows, at, refused, wanted)

    def _one(self, value: bytes) -> Mapping[str, Any]:
        number, payload = (-1, value) if self._registry is None else framed(value)
        known = self._known.get(number)
        if known is None:
            assert self._registry is not None
            known = self._known[number] = self._parsed(self._registry.schema(number))
        schema, per_ms = known
        stream = io.BytesIO(payload)
        row = self._read(stream, schema, None)
        if stream.tell() != len(payload):
            raise ValueError(f"{len(payload) - stream.tell()} bytes are left over")
        if not isinstance(row, dict):
            raise ValueError(f"it holds a {type(row).__name__}, and an event is a record")
        for name, unit in per_ms.items():
            if row[name] is not None:
                row[name] //= unit
        return row

    def describe(self) -> dict[str, str]:
        """See ``Decoder``."""
        if self._registry is not None:
            return {"format": "avro", "registry": self._registry.url}
        return {"format": "avro", "schema": self._text or ""}


def _as_number(kind: Any) -> tuple[Any, int]:
    """An Avro type with times (or null) read as the numbers that they are, and how many of its units a ms has."""
    if isinstance(kind, list):
        kinds = [_as_number(k) for k in kind]
        return [k for k, _ in kinds], max((unit for _, unit in kinds), default=1)
    if isinstance(kind, dict):
        unit = _PER_MS.get(str(kind.get("logicalType", "")).removeprefix("local-"))
        if unit is not None:
            return kind["type"], unit
    return kind, 1


class ProtobufDecoder:
    """Protobuf messages of one type. Fields that the message does not carry are null where they have presence
    (``optional``), else their default. Per message by nature."""

    def __init__(self, message: str, descriptors: str | Path, *, is_framed: bool) -> None:
        """Args:
        message: full name, ``shop.Click``.
        descriptors: a file of descriptors: ``protoc --include_imports --descriptor_set_out=FILE``.
        is_framed: whether values have a registry's frame.

        Raises:
            MissingExtraError: without protobuf.
            InputError: there is no such file or message.
        """
        try:
            from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
            from google.protobuf.message import DecodeError
        except ImportError as e:
            raise MissingExtraError("protobuf", "kafka") from e
        self._message, self._descriptors, self._framed = message, str(descriptors), is_framed
        pool = descriptor_pool.DescriptorPool()
        try:
            files = descriptor_pb2.FileDescriptorSet.FromString(Path(descriptors).read_bytes())
            for file in files.file:
                pool.Add(file)
            found = pool.FindMessageTypeByName(message)
        except (OSError, DecodeError, KeyError, TypeError) as e:
            raise InputError(
                f"no message {message!r} in the descriptors {descriptors}: {e}; write them with "
                "protoc --include_imports --descriptor_set_out=FILE FILES"
            ) from e
        self._class: Any = message_factory.GetMessageClass(found)
        self._fields = {f.name: f for f in found.fields}
        self._index = _index_of(found)

    def decode(self, values: Sequence[bytes], wanted: Wanted | None) -> Decoded:
        """See ``Decoder``."""
        messages: list[Any] = []
        at: list[int] = []
        refused: dict[int, str] = {}
        for i, value in enumerate(values):
            try:
                messages.append(self._class.FromString(self._payload(value)))
                at.append(i)
            except Exception as e:
                # Hostile bytes make the parser raise almost anything.
                refused[i] = f"no {self._message}: {type(e).__name__}: {str(e)[:200]}"
        names = [n for n in (wanted or self._fields) if n in self._fields]
        columns = [[_value(m, self._fields[n]) for m in messages] for n in names]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] if columns else []
        return decoded(rows, at, refused, wanted)

    def _payload(self, value: bytes) -> bytes:
        if not self._framed:
            return value
        _, rest = framed(value)
        index, start = _read_index(rest)
        if index != self._index:
            raise ValueError(f"it holds message {index} of its schema, and {self._message} is {self._index}")
        return rest[start:]

    def describe(self) -> dict[str, str]:
        """See ``Decoder``."""
        framing = {"registry": "framed"} if self._framed else {}
        return {"format": "protobuf", "message": self._message, "descriptors": self._descriptors, **framing}


def _value(message: Any, field: Any) -> Any:
    if field.is_repeated:
        return list(getattr(message, field.name))
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.message_type is None:
        return value
    if field.message_type.full_name == "google.protobuf.Timestamp":
        return value.seconds * 1_000 + value.nanos // 1_000_000
    return str(value)


def _index_of(found: Any) -> list[int]:
    """Which message of its file it is, from the outermost in."""
    path: list[int] = []
    while found is not None:
        outer = found.containing_type
        siblings = list(outer.nested_types if outer is not None else found.file.message_types_by_name.values())
        path.insert(0, [s.full_name for s in siblings].index(found.full_name))
        found = outer
    return path


def _read_index(data: bytes) -> tuple[list[int], int]:
    """The indexes of a frame (zigzag varints, their number first; none stands for [0]) and where they end."""
    varints = _varints(data)
    n, end = next(varints)
    index = []
    for _ in range(n):
        value, end = next(varints)
        index.append(value)
        if len(index) > 100:
            raise ValueError("its index names more than 100 messages")
    return index or [0], end


def _varints(data: bytes) -> Iterator[tuple[int, int]]:
    """Zigzag varints and where each ends. Raises ValueError at the end of ``data``."""
    at = 0
    while True:
        value = shift = 0
        while True:
            if at >= len(data) or shift > 28:
                raise ValueError("its index of messages is cut short")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        yield (value >> 1) ^ -(value & 1), at


class FramedJsonDecoder:
    """JSON objects behind a registry's frame; a batch at a time, as ``JsonDecoder``."""

    def __init__(self) -> None:
        self._json = JsonDecoder()

    def decode(self, values: Sequence[bytes], wanted: Wanted | None) -> Decoded:
        """See ``Decoder``."""
        whole = [v[_HEADER:] if len(v) > _HEADER and not v[0] else b"" for v in values]
        return self._json.decode(whole, wanted)

    def describe(self) -> dict[str, str]:
        """See ``Decoder``."""
        return {"format": "json", "registry": "framed"}


def decoded(
    rows: Sequence[Mapping[str, Any]], at: Sequence[int], refused: dict[int, str], wanted: Wanted | None
) -> Decoded:
    """Rows of messages ``at`` as columns."""
    if wanted is None:
        names = dict.fromkeys(name for row in rows for name in row)
        return Decoded(pa.table({n: _inferred([row.get(n) for row in rows]) for n in names}), list(at), refused)
    table, kept, bad = table_of_rows(rows, wanted)
    return Decoded(table, [at[i] for i in kept], refused | {at[i]: why for i, why in bad.items()})


def _inferred(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if v is None else str(v) for v in values])
