"""What the snapshot service says and hears: JSON for people, Arrow streams for machines.

A snapshot's answer has, for each request, the version (53 bytes) and the events asked for, and one *token*, ``seen``:
what the impression log needs of the snapshot. A caller sends the token back with the candidates it showed; so the
service keeps no state between the two calls, and any replica may take the second.

Token: ``TRS1``, CRC-32 of the rest, an Arrow stream (zstd) of the request columns of docs/format/examples-v1.md.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from thinrow.core.errors import InputError
from thinrow.core.users import plain
from thinrow.examples.records import Impressions, Outcomes
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import Snapshot
from thinrow.jagged import Column, Jagged, SharedHistories
from thinrow.jagged.column import concat_columns
from thinrow.schema import VERSION_DTYPE, EventSchema, ExampleSchema, FieldSpec, Projection

ARROW = "application/vnd.apache.arrow.stream"
#: Key of an Arrow schema's metadata that holds the token.
SEEN = b"thinrow.seen"
VERSION_BYTES = 53
_MAGIC = b"TRS1"
_BARE = ExampleSchema(context=(), candidates=(FieldSpec("item", "int64"),), item="item", outcomes=())
_PACKED = np.dtype([("form", "u1"), *((n, VERSION_DTYPE[n]) for n in VERSION_DTYPE.names or ())])


def encode_versions(versions: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """(X,) of 53 bytes each: ``HistoryVersion.encode`` of every version."""
    packed = np.empty(len(versions), _PACKED)
    packed["form"] = 1
    for name in VERSION_DTYPE.names or ():
        packed[name] = versions[name]
    return packed.view(f"V{VERSION_BYTES}")


def encode_seen(requests: RequestBatch, events: EventSchema) -> bytes:
    """The token of a snapshot."""
    n = len(requests)
    nothing = Jagged(Column(np.empty(0, np.int64)), np.zeros(n + 1, np.int64))
    bare = Impressions.of(_BARE, np.arange(n), requests, candidates={"item": nothing})
    body = _ipc(bare.to_arrow(events, _BARE), "zstd")
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def decode_seen(token: bytes, events: EventSchema) -> RequestBatch:
    """Reverse of ``encode_seen``. Raises InputError where the token is none, or of another store."""
    body = token[8:]
    if token[:4] != _MAGIC or zlib.crc32(body) != int.from_bytes(token[4:8], "little"):
        raise InputError(f"`seen` ({len(token)} bytes) is not a token of this service; send back what a snapshot gave")
    return Impressions.from_arrow(_table(body), events, _BARE).snapshots


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in a request's body. Raises InputError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise InputError(f"the body is no JSON ({e}); send an object, in UTF-8") from e
    if not isinstance(found, dict):
        raise InputError(f"the body is a {type(found).__name__}; send an object")
    return found


def field_of(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """A field of a body. Raises InputError where it is missing or of another type."""
    if name not in body or body[name] is None:
        if default is ...:
            raise InputError(f"the body lacks {name!r}; see /openapi.json")
        return default
    value = body[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{name!r} is {value!r:.60}; see /openapi.json for its type")
    return value


def projection_of(body: Mapping[str, Any]) -> Projection:
    """The projection that a body asks for."""
    asked = field_of(body, "projection", dict, {})
    unknown = asked.keys() - {"columns", "groups", "max_len", "horizon_ms"}
    if unknown:
        raise InputError(f"unknown key {sorted(unknown)[0]!r} of the projection; see /openapi.json")
    columns, groups = (field_of(asked, k, list, None) for k in ("columns", "groups"))
    return Projection(
        None if columns is None else tuple(map(str, columns)),
        None if groups is None else tuple(map(str, groups)),
        field_of(asked, "max_len", int, None),
        field_of(asked, "horizon_ms", int, None),
    )


def snapshot_json(
    taken: Snapshot,
    seen: bytes,
    histories: SharedHistories | None,
    request_id: Sequence[Any] | None,
    columns: Sequence[str],
) -> bytes:
    """The answer for people: an object a request. ``seen`` is the token."""
    r = taken.requests
    versions = encode_versions(r.versions)
    requests: list[dict[str, Any]] = [
        {
            "user": plain(r.users[i]),
            "request_ts": int(r.request_ts[i]),
            "version": base64.b64encode(versions[i].tobytes()).decode(),
            "recent_events": int(r.inline.offsets[i + 1] - r.inline.offsets[i]),
        }
        for i in range(len(r))
    ]
    if request_id is not None:
        for one, name in zip(requests, request_id, strict=True):
            one["request_id"] = name
    if histories is not None:
        for name in ("event_ts", *columns):
            for one, row in zip(requests, histories.to_jagged(name).to_arrow().to_pylist(), strict=True):
                one.setdefault("history", {})[name] = [_plain(v) for v in row]
    answer = {
        "generation": taken.generation.number,
        "schema_id": taken.generation.schema.schema_id,
        "seen": base64.b64encode(seen).decode(),
        "requests": requests,
    }
    return json.dumps(answer, allow_nan=False).encode()


def snapshot_arrow(
    taken: Snapshot,
    seen: bytes,
    histories: SharedHistories | None,
    request_id: Sequence[Any] | None,
    columns: Sequence[str],
) -> bytes:
    """The answer for machines: an Arrow stream, a row a request, the token in the schema's metadata."""
    r, kind = taken.requests, taken.generation.schema.user_kind
    versions = pa.array([v.tobytes() for v in encode_versions(r.versions)], pa.binary(VERSION_BYTES))
    arrays: dict[str, Any] = {
        "user_id": pa.array(r.users, pa.int64() if kind == "int64" else pa.string()),
        "request_ts": pa.array(r.request_ts),
        "version": versions,
    }
    if request_id is not None:
        arrays["request_id"] = pa.array(request_id)
    if histories is not None:
        arrays |= {name: histories.to_jagged(name).to_arrow() for name in ("event_ts", *columns)}
    table = pa.table(arrays)
    return _ipc(table.replace_schema_metadata({SEEN: seen}), None)


def impressions_json(body: Mapping[str, Any], events: EventSchema, examples: ExampleSchema) -> Impressions:
    """Impressions from JSON: the token, ids, and columns by name."""
    try:
        token = base64.b64decode(field_of(body, "seen", str), validate=True)
    except ValueError as e:
        raise InputError(f"`seen` is no base64: {e}; send back what a snapshot gave") from e
    seen = _chosen(decode_seen(token, events), field_of(body, "rows", list, None))
    ids = _ids(field_of(body, "request_id", list))
    rows = {n: _lists(n, v) for n, v in field_of(body, "candidates", dict).items()}
    boundary = field_of(body, "boundary", list, None)
    return Impressions.of(
        examples,
        ids,
        seen,
        candidates=rows,
        context=field_of(body, "context", dict, {}),
        model_version=field_of(body, "model_version", str, ""),
        arm=field_of(body, "arm", str, ""),
        boundary=None if boundary is None else _ids(boundary),
    )


def impressions_arrow(body: bytes, events: EventSchema, examples: ExampleSchema) -> Impressions:
    """Impressions from an Arrow stream: ``request_id``, ``ctx_*``, ``cand_*``; texts ``model_version`` and ``arm`` in
    the schema's metadata, and the token under ``thinrow.seen``."""
    table = _table(body)
    said = table.schema.metadata or {}
    if SEEN not in said:
        raise InputError("the stream's metadata lacks thinrow.seen; send back what a snapshot gave")
    fields = {f"ctx_{f.name}": f for f in examples.context} | {f"cand_{f.name}": f for f in examples.candidates}
    missing = [n for n in ("request_id", *fields) if n not in table.column_names]
    if missing:
        raise InputError(f"no column {missing[0]!r}; the stream has {', '.join(table.column_names)}")
    rows: dict[str, Any] = {n: _lists(n, table[n]) if n.startswith("cand_") else table[n] for n in fields}
    return Impressions.of(
        examples,
        Column.from_arrow(table["request_id"], "int64").values,
        _chosen(decode_seen(said[SEEN], events), None),
        candidates={f.name: Jagged.from_arrow(rows[n], f.dtype) for n, f in fields.items() if n.startswith("cand_")},
        context={f.name: Column.from_arrow(rows[n], f.dtype) for n, f in fields.items() if n.startswith("ctx_")},
        model_version=said.get(b"model_version", b"").decode(),
        arm=said.get(b"arm", b"").decode(),
    )


def outcomes_json(body: Mapping[str, Any]) -> Outcomes:
    """Outcomes from JSON: lists of one length; ``name`` a text for all, or one each; ``value`` 1 by default."""
    ids = _ids(field_of(body, "request_id", list))
    item, ts = (_ids(field_of(body, n, list)) for n in ("item", "ts"))
    value = body.get("value", 1)
    values = _ids(value) if isinstance(value, list) else field_of(body, "value", int, 1)
    name = field_of(body, "name", (str, list))
    if {len(item), len(ts)} != {len(ids)} or np.size(values) not in (1, len(ids)):
        raise InputError(f"{len(ids)} request ids, but {len(item)} items and {len(ts)} times; give one each")
    if isinstance(name, str):
        return Outcomes.of(name, ids, item, ts, values)
    if len(name) != len(ids) or not all(isinstance(n, str) for n in name):
        raise InputError(f"{len(name)} names for {len(ids)} outcomes; give one text for all, or one each")
    made = Outcomes.of("", ids, item, ts, values)
    return Outcomes(
        ids, item, concat_columns([Column.from_arrow(pa.array(name, pa.string()), "string")]), ts, made.value
    )


def _chosen(seen: RequestBatch, rows: Sequence[Any] | None) -> RequestBatch:
    if rows is None:
        return seen
    index = _ids(rows)
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < len(seen)):
        raise InputError(f"`rows` are of {len(seen)} requests that the token holds, counted from 0")
    return seen.take(index)


def _ids(values: Sequence[Any]) -> npt.NDArray[np.int64]:
    if not all(type(v) is int and -(1 << 63) <= v < 1 << 63 for v in values):
        wrong = next(v for v in values if type(v) is not int or not -(1 << 63) <= v < 1 << 63)
        raise InputError(f"{wrong!r:.60} is no 64-bit integer")
    return np.array(values, np.int64)


def _lists(name: str, values: Any) -> Any:
    if isinstance(values, list) and not all(isinstance(v, list) for v in values):
        raise InputError(f"candidates {name!r} are not a list of lists; give one list a request")
    if isinstance(values, pa.ChunkedArray) and (values.null_count or not pa.types.is_nested(values.type)):
        raise InputError(f"column {name!r} has type {values.type} and {values.null_count} nulls; give lists, none null")
    return values


def _plain(value: Any) -> Any:
    """What JSON can say: bytes in base64, what is no number as null."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and value - value != 0 else value


def _ipc(table: pa.Table, compression: str | None) -> bytes:
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _table(body: bytes) -> pa.Table:
    try:
        with ipc.open_stream(pa.py_buffer(body)) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as e:
        raise InputError(f"the body is no Arrow stream: {e}; send one, whole") from e
    return table
