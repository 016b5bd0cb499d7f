"""A reader written from docs/format/recent-v2.md alone; it shares no code with thinrow."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow as pa
import pytest

from thinrow.history.recent import LmdbRecent
from thinrow.jagged import Column
from thinrow.schema import EventSchema

MASK = (1 << 64) - 1
FORMATS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "float32": "f", "float64": "d"}


def mix64(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def user_of(key: bytes, kind: str) -> Any:
    if kind == "int64":
        (value,) = struct.unpack(">Q", key)
        return struct.unpack(">q", struct.pack(">Q", value ^ 1 << 63))[0]
    assert key.endswith(b"\0")
    return bytes(b - 1 for b in key[:-1]).decode()


def pair(value: bytes) -> tuple[int, int]:
    a, b, check = struct.unpack("<qqI", value)
    assert check == mix64((mix64((a + 0x9E3779B97F4A7C15) & MASK) + b) & MASK) & 0xFFFFFFFF
    return a, b


def unsealed(key: bytes, value: bytes) -> bytes:
    assert zlib.crc32(key + value) == 0x2144DF1C
    assert zlib.crc32(key + value[:-4]) == int.from_bytes(value[-4:], "little")
    return value[:-4]


def block(key: bytes, value: bytes, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a block: arrival, event_ts, target, event_id and the columns by name."""
    data = unsealed(key, value)
    form, flags, zero, schema_id, n, heap_bytes, first = struct.unpack_from("<BBHIIIq", data)
    shaped = any(c["trait"] in ("id_list", "vector") for c in schema["columns"])
    assert (form, zero, schema_id) == (2 if shaped else 1, 0, schema["schema_id"])
    assert flags in (0, 1)
    assert key[-8:] == struct.pack(">Q", first)
    heap, at = data[len(data) - heap_bytes :], 24
    heap_at, found = 0, []
    columns = [(c["name"], c["dtype"], c["nullable"], c["trait"], c.get("size", 1)) for c in schema["columns"]]
    if schema["event_id_dtype"]:
        columns.insert(0, ("event_id", schema["event_id_dtype"], True, "id", 1))
    n_null = sum(nullable for _, _, nullable, _, _ in columns)
    for r in range(n):
        event: dict[str, Any] = {"arrival": first + r, "target": (0, 0)}
        (event["event_ts"],) = struct.unpack_from("<q", data, at)
        at += 8
        if flags & 1:
            event["target"] = struct.unpack_from("<qq", data, at)
            at += 16
        bits = int.from_bytes(data[at : at + (n_null + 7) // 8], "little")
        at += (n_null + 7) // 8
        lengths = []
        for name, dtype, nullable, trait, size in columns:
            text, listed = dtype in ("string", "binary"), trait == "id_list"
            form_of = "<II" if text and listed else "<I" if text or listed else f"<{size}{FORMATS[dtype]}"
            value = struct.unpack_from(form_of, data, at)
            at += struct.calcsize(form_of)
            null = nullable and bits & 1
            bits >>= nullable
            if null:
                assert not any(value)
                event[name] = None
            elif text or listed:
                lengths.append((name, dtype, listed, value))
            else:
                event[name] = list(value) if trait == "vector" else value[0]
        for name, dtype, listed, sizes in lengths:
            parts = []
            for size in sizes:
                parts.append(heap[heap_at : heap_at + size])
                heap_at += size
            if not listed:
                event[name] = parts[0].decode()
            elif dtype != "string":
                event[name] = [v for (v,) in struct.iter_unpack("<" + FORMATS[dtype], parts[0])]
            else:
                event[name] = []
                for (size,) in struct.iter_unpack("<I", parts[0]):
                    event[name].append(parts[1][:size].decode())
                    parts[1] = parts[1][size:]
                assert not parts[1]
        found.append(event)
    assert (at + heap_bytes, heap_at) == (len(data), heap_bytes)
    return found


def stored_in(path: Path) -> dict[str, list[tuple[bytes, bytes]]]:
    """The pairs of each database."""
    stored = {}
    with lmdb.open(str(path), max_dbs=4, readonly=True, lock=False) as env:
        for name in ("events", "users", "ids", "meta"):
            db = env.open_db(name.encode(), create=False)
            with env.begin(db=db) as tx:
                stored[name] = [(bytes(k), bytes(v)) for k, v in tx.cursor()]
    return stored


def shapes(rng: np.random.Generator, n: int) -> dict[str, pa.Array]:
    """Columns of lists and vectors."""
    numbers = [None if i % 7 == 0 else list(range(-i, -i + i % 5)) for i in range(n)]
    words = [None if i % 6 == 0 else ["", "é", f"w{i}"][: i % 4] for i in range(n)]
    pairs = [None if i % 5 == 0 else [i / 2, -i / 4] for i in range(n)]
    return {
        "numbers": pa.array(numbers, pa.list_(pa.int16())),
        "words": pa.array(words, pa.list_(pa.string())),
        "pairs": pa.array(pairs, pa.list_(pa.float64(), 2)),
    }


@pytest.mark.parametrize(("kind", "shaped"), [("int64", False), ("string", False), ("int64", True)])
def test_the_document_describes_the_environment(tmp_path: Path, kind: str, shaped: bool) -> None:
    n = 700
    rng = np.random.default_rng(2)
    number = np.where(rng.random(n) < 0.5, -5, rng.integers(-3, 40, n))
    users: Any = number if kind == "int64" else np.array([f"\0ü{u}" for u in number], object)
    ts = rng.integers(0, 1000, n)
    id_of = [f"e{i}" if i % 3 else None for i in range(n)]
    corrects = [None] * n
    seen: dict[Any, str] = {}
    for i, u in enumerate(users.tolist()):
        corrects[i] = seen.get(u) if i % 40 == 7 else None
        if id_of[i]:
            seen[u] = id_of[i]
    price = pa.array(rng.random(n).astype(np.float32), mask=rng.random(n) < 0.3)
    shop = pa.array(rng.choice(["", "Oslo", "São Paulo"], n), mask=rng.random(n) < 0.3)
    small = rng.integers(-128, 128, n).astype(np.int8)
    arrow = pa.schema(
        [
            pa.field("u", pa.int64() if kind == "int64" else pa.string()),
            pa.field("t", pa.int64()),
            pa.field("id", pa.string()),
            pa.field("fixes", pa.string()),
            pa.field("small", pa.int8(), nullable=False),
            pa.field("price", pa.float32()),
            pa.field("shop", pa.string()),
        ]
    )
    more = shapes(rng, n) if shaped else {}
    for name, array in more.items():
        arrow = arrow.append(pa.field(name, array.type))
    schema = EventSchema.infer(arrow, user="u", time="t", event_id="id", supersedes="fixes")
    tier = LmdbRecent(tmp_path / "recent", schema)
    columns = {
        "small": Column(small),
        "price": Column.from_arrow(price, "float32"),
        "shop": Column.from_arrow(shop, "string"),
    }
    for name, array in more.items():
        spec = schema.column(name)
        columns[name] = Column.from_arrow(array, spec.dtype, ragged=spec.ragged, size=spec.size)
    ids, fixes = (Column.from_arrow(pa.array(v, pa.string()), "string") for v in (id_of, corrects))
    arrivals = tier.append(users, ts, columns, ids, fixes).arrivals
    trimmed = users[:1]
    tier.trim(trimmed, np.array([2]))
    tier.close()

    expected: dict[Any, list[dict[str, Any]]] = {}
    place = {(u, i): (int(t), int(a)) for u, i, t, a in zip(users.tolist(), id_of, ts, arrivals, strict=True)}
    rows = zip(
        users.tolist(), ts.tolist(), arrivals.tolist(), small.tolist(), price.to_pylist(), shop.to_pylist(), strict=True
    )
    for i, (u, t, arrival, s, p, c) in enumerate(rows):
        target = (0, 0) if corrects[i] is None else place[u, corrects[i]]
        event = {"arrival": arrival, "target": target, "event_ts": t, "event_id": id_of[i]}
        event |= {name: array[i].as_py() for name, array in more.items()}
        expected.setdefault(u, []).append(event | {"small": s, "price": p, "shop": c})

    stored = stored_in(tmp_path / "recent")
    meta = {k: unsealed(k, v) for k, v in stored["meta"]}
    assert meta[b"format"] == b"2"
    assert meta[b"user_kind"] == kind.encode()
    written = json.loads(meta[b"schema:1"])
    assert {user_of(k, kind): pair(v) for k, v in stored["users"]} == {
        u: (len(events), 2 if u == trimmed[0] else 0) for u, events in expected.items()
    }
    found: dict[Any, list[dict[str, Any]]] = {}
    for key, value in stored["events"]:
        found.setdefault(user_of(key[:-8], kind), []).extend(block(key, value, written))
    for u, events in expected.items():
        assert found.get(u, []) == events[2 if u == trimmed[0] else 0 :]
    ids_found = {}
    for key, value in stored["ids"]:
        end = 8 if kind == "int64" else key.index(b"\0") + 1
        ids_found[user_of(key[:end], kind), key[end:].decode()] = pair(value)
    assert ids_found == {(u, i): (a, t) for (u, i), (t, a) in place.items() if i is not None}
