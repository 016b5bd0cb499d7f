"""What the snapshot service says and hears: JSON for people, Arrow streams for machines.

A snapshot's answer has, for each request, the version (53 bytes) and the events asked for, and one *token*, ``seen``:
what the impression log needs of the snapshot. A caller sends the token back with the candidates it showed; so the
service keeps no state between the two calls, and any replica may take the second.

Token: ``TRS1``, CRC-32 of the rest, an Arrow stream (zstd) of the request columns of docs/format/examples-v1.md.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from thinrow.core.errors import InputError, SchemaError, UserKindError
from thinrow.core.users import kind_of, plain
from thinrow.examples.records import Impressions, Outcomes, holds
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import Snapshot
from thinrow.jagged import Column, Jagged, SharedHistories
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
    """Reverse of ``encode_seen``. Raises InputError where the token is none, or one of another store."""
    body = token[8:]
    if token[:4] != _MAGIC or zlib.crc32(body) != int.from_bytes(token[4:8], "little"):
        raise InputError(f"`seen` ({len(token)} bytes) is not a token of this service; send back what a snapshot gave")
    table = _table(body)
    strange = f"`seen` ({len(token)} bytes) is the token of another store"
    remedy = "send back what a snapshot of this one gave"
    try:
        # Histories may hold nulls, the rest of a request none.
        if any(table[n].null_count for n in table.column_names if not n.startswith("recent_")):
            raise ValueError("it holds nulls")
        seen = Impressions.from_arrow(table, events, _BARE).snapshots
        if (seen.versions["seq_len"] < 0).any():
            raise ValueError("it counts fewer than 0 events")
    except SchemaError as e:
        raise SchemaError(f"{strange}: {e}; {remedy}") from e
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        raise InputError(f"{strange}: {e!r}; {remedy}") from e
    kinds = {kind_of(seen.users), (seen.schema or events).user_kind}
    if len(seen) and kinds != {events.user_kind}:
        raise UserKindError(f"{strange}: its users are of kind {(kinds - {events.user_kind}).pop()}; {remedy}")
    return seen


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


def only(body: Mapping[str, Any], what: str, *names: str) -> None:
    """Raises InputError where a body has another key: what nobody reads is a mistake of its sender."""
    unknown = body.keys() - set(names)
    if unknown:
        raise InputError(f"unknown key {min(unknown)!r} of {what}, which takes {', '.join(names)}")


def times_of(body: Mapping[str, Any], default: int) -> int | npt.NDArray[np.int64]:
    """``request_ts`` of a body: one for all, or one each."""
    times = field_of(body, "request_ts", (int, list), default)
    return _ids(times) if isinstance(times, list) else int(_ids([times])[0])


def request_ids_of(body: Mapping[str, Any], n: int, *, arrow: bool) -> list[Any] | None:
    """``request_id`` of a body, which comes back as it is: any JSON, and of one type where it becomes a column."""
    ids: list[Any] | None = field_of(body, "request_id", list, None)
    if ids is None:
        return None
    if len(ids) != n:
        raise InputError(f"{len(ids)} request ids for {n} users; give one each")
    try:
        if arrow:
            pa.array(ids)
        else:
            json.dumps(ids, allow_nan=False)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError) as e:
        raise InputError(f"request ids cannot be given back ({e}); give integers, or texts") from e
    return ids


def projection_of(body: Mapping[str, Any]) -> Projection:
    """The projection that a body asks for."""
    asked = field_of(body, "projection", dict, {})
    only(asked, "the projection", "columns", "groups", "max_len", "horizon_ms")
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
    labels = "model_version", "arm"
    only(body, "an impression", "seen", "rows", "request_id", "candidates", "context", "boundary", *labels)
    try:
        token = base64.b64decode(field_of(body, "seen", str), validate=True)
    except ValueError as e:
        raise InputError(f"`seen` is no base64: {e}; send back what a snapshot gave") from e
    seen = _chosen(decode_seen(token, events), field_of(body, "rows", list, None))
    ids = _ids(field_of(body, "request_id", list))
    rows = {n: _lists(n, v) for n, v in field_of(body, "candidates", dict).items()}
    context = {n: _values(n, v) for n, v in field_of(body, "context", dict, {}).items()}
    boundary = field_of(body, "boundary", list, None)
    return Impressions.of(
        examples,
        ids,
        seen,
        candidates=rows,
        context=context,
        model_version=field_of(body, "model_version", str, ""),
        arm=field_of(body, "arm", str, ""),
        boundary=None if boundary is None else _boundary(boundary, seen),
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
    only(dict.fromkeys(table.column_names), "the stream's columns", "request_id", *fields)
    ids = table["request_id"]
    if ids.null_count or not holds(ids.type, "int64"):
        raise InputError(f"request_id has type {ids.type} and {ids.null_count} nulls; give integers, none null")
    try:
        labels = {n: said.get(n.encode(), b"").decode() for n in ("model_version", "arm")}
    except UnicodeDecodeError as e:
        raise InputError(f"model_version or arm in the stream's metadata has no UTF-8 form ({e.reason})") from e
    return Impressions.of(
        examples,
        Column.from_arrow(ids, "int64").values,
        decode_seen(said[SEEN], events),
        candidates={f.name: table[n] for n, f in fields.items() if n.startswith("cand_")},
        context={f.name: table[n] for n, f in fields.items() if n.startswith("ctx_")},
        **labels,
    )


def outcomes_json(body: Mapping[str, Any]) -> Outcomes:
    """Outcomes from JSON: lists of one length; ``name`` a text for all, or one each; ``value`` 1 by default."""
    only(body, "an outcome", "request_id", "item", "name", "ts", "value")
    ids = _ids(field_of(body, "request_id", list))
    item, ts = (_ids(field_of(body, n, list)) for n in ("item", "ts"))
    value = field_of(body, "value", (int, list), 1)
    values = _ids(value if isinstance(value, list) else [value])
    name = field_of(body, "name", (str, list))
    if {len(item), len(ts)} != {len(ids)} or len(values) not in (1, len(ids)):
        raise InputError(f"{len(ids)} request ids, but {len(item)} items and {len(ts)} times; give one each")
    if isinstance(name, str):
        return Outcomes.of(name, ids, item, ts, values)
    if len(name) != len(ids) or not all(isinstance(n, str) for n in name):
        raise InputError(f"{len(name)} names for {len(ids)} outcomes; give one text for all, or one each")
    made = Outcomes.of("", ids, item, ts, values)
    try:
        return replace(made, name=Column.from_arrow(pa.array(name, pa.string()), "string"))
    except UnicodeEncodeError as e:
        raise InputError(f"a name of an outcome has no UTF-8 form ({e.reason}); pass valid Unicode") from e


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


def _lists(name: str, values: Any) -> list[list[Any]]:
    if not isinstance(values, list) or not all(isinstance(v, list) for v in values):
        raise InputError(f"candidates {name!r} are not a list of lists; give one list a request")
    refuse_booleans(name, itertools.chain.from_iterable(values))
    return values


def _values(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise InputError(f"context {name!r} is {values!r:.60}; give a list of one value a request")
    refuse_booleans(name, values)
    return values


def refuse_booleans(name: str, values: Iterable[Any]) -> None:
    """Raises InputError: no field takes them, and among numbers Arrow would take them for 0 and 1."""
    if bool in set(map(type, values)):
        raise InputError(f"{name!r} holds true or false, which no field takes; send 0 and 1")


def _boundary(values: Sequence[Any], seen: RequestBatch) -> npt.NDArray[np.int64]:
    boundary = _ids(values)
    visible = seen.versions["seq_len"].astype(np.int64) + seen.inline.lengths
    if len(boundary) != len(seen):
        raise InputError(f"boundary has {len(boundary)} values for {len(seen)} requests; give one each")
    wrong = np.flatnonzero((boundary < 0) | (boundary > visible))
    if len(wrong):
        raise InputError(
            f"boundary is {boundary[wrong[0]]} in row {wrong[0]}, of {visible[wrong[0]]} visible events; give how many "
            "of the newest the model took for the recent part"
        )
    return boundary


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
