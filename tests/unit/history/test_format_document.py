"""A reader written from docs/format/archive-v2.md alone: the document says what the files hold.

It shares no code with thinrow: ``struct``, ``json`` and ``zstandard``, one value at a time.
"""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema

MASK = (1 << 64) - 1
NEVER = (1 << 63) - 1
HEAD, TAIL = struct.Struct("<8sH6s"), struct.Struct("<QIIH6s8s")


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def mix64(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def fold(value: bytes) -> int:
    h, padded = len(value), value + bytes(-len(value) % 8)
    for at in range(0, len(padded), 8):
        h = mix64(h ^ int.from_bytes(padded[at : at + 8], "little"))
    return h


def packed_bytes(n: int, width: int) -> int:
    if width & 128:
        return ((n + 7) // 8 * (width - 128) + 63) // 64 * 64
    return ((n * width + 63) // 64 + 1) * 8


def unpack(data: bytes, n: int, width: int) -> list[int]:
    if width == 255:
        return unpack_patched(data, n)
    if width & 128:
        return unpack_lanes(data, n, width - 128)
    bits = int.from_bytes(data, "little")
    assert len(data) == (8 * -(-n * width // 64) + 8 if n * width else 8) or width == 0
    return [bits >> i * width & (1 << width) - 1 for i in range(n)]


def unpack_patched(data: bytes, n: int) -> list[int]:
    own, low, high, form = struct.unpack_from("<IBBH", data)
    if form == 1:
        at = 8 + (n + 63) // 64 * 8
        bits = int.from_bytes(data[8:at], "little")
        assert (high, bits >> n, bits.bit_count()) == (0, 0, own)
        marked = iter(unpack(data[at:], own, low))
        return [next(marked) if bits >> i & 1 else 0 for i in range(n)]
    assert form == 0
    groups = (n + 255) // 256
    ends = struct.unpack_from(f"<{groups}H", data, 8)
    places = data[8 + 2 * groups : 8 + 2 * groups + own]
    highs_at = 8 + (2 * groups + own + 7) // 8 * 8
    lanes_at = highs_at + (own * high + 63) // 64 * 8
    highs = int.from_bytes(data[highs_at:lanes_at], "little")
    found = unpack(data[lanes_at:], n, low | 128)
    assert (ends[-1], list(ends)) == (own, sorted(ends))
    for k, place in enumerate(places):
        group = sum(end <= k for end in ends)
        found[256 * group + place] += (highs >> k * high & (1 << high) - 1) << low
    return found


def unpack_lanes(data: bytes, n: int, width: int) -> list[int]:
    words = len(data) // 64
    assert len(data) == 64 * words
    assert words == ((n + 7) // 8 * width + 63) // 64
    lanes = [sum(u64s(data, 8 * (8 * k + lane), 1)[0] << 64 * k for k in range(words)) for lane in range(8)]
    return [lanes[i % 8] >> (i // 8) * width & (1 << width) - 1 for i in range(n)]


def u64s(data: bytes, at: int, n: int) -> list[int]:
    return list(struct.unpack_from(f"<{n}Q", data, at))


class Document:
    """One segment file, decoded: ``rows`` in file order, each (user, {column: value})."""

    def __init__(self, path: Path) -> None:
        self.data = data = path.read_bytes()
        magic, version, zeros = HEAD.unpack_from(data)
        assert (magic, version, zeros) == (b"THINROW\0", 3, bytes(6))
        at, length, crc, version, zeros, magic = TAIL.unpack_from(data, len(data) - TAIL.size)
        assert (version, zeros, magic, at + length + TAIL.size) == (3, bytes(6), b"THINROW\0", len(data))
        text = data[at : at + length]
        assert crc32c(text) == crc
        self.meta: dict[str, Any] = json.loads(text)
        self.sections: dict[str, list[int | None]] = self.meta["sections"]
        self._no_gaps(at)
        self.traits = {c["id"]: (c["trait"], c.get("size", 0)) for c in self.meta["schema"]["columns"]}
        self.codecs: set[int] = set()
        self.widths: set[int] = set()
        self.stripes = self._records("stripes", 8 + 16 * len(self.meta["groups"]))
        self.pieces = self._records("pieces", 64)
        self.dictionaries = {c["id"]: self._dictionary(c) for c in self.meta["columns"]}
        self.values = self._columns()
        self.rows = self._rows()

    def _no_gaps(self, meta_at: int) -> None:
        names = [f"group:{g['name']}" for g in self.meta["groups"]]
        names += ["dictionaries", "hides", "pieces", "pieces.directory", "stripes", "stripes.directory"]
        assert list(self.sections) == names
        place = HEAD.size
        for offset, length, crc in self.sections.values():
            assert offset == place
            assert length is not None
            assert crc is None or crc32c(self.data[offset : offset + length]) == crc
            place += length
        assert place == meta_at

    def section(self, name: str) -> bytes:
        offset, length, _ = self.sections[name]
        assert offset is not None
        assert length is not None
        return self.data[offset : offset + length]

    def _records(self, name: str, size: int) -> list[tuple[bytes, bytes, Any]]:
        """(record, heap of its page, first key of the page) of every record."""
        directory = self.section(f"{name}.directory")
        n_pages, n_records = u64s(directory, 0, 2)
        keyed = name == "pieces"
        text = keyed and self.meta["user_kind"] == "string"
        row_bytes = 24 + (16 if text else 8 if keyed else 0)
        found = []
        for p in range(n_pages):
            row = directory[16 + p * row_bytes : 16 + (p + 1) * row_bytes]
            offset, length, crc, first = struct.unpack_from("<QIIQ", row)
            assert first == len(found)
            assert length <= 16_384
            assert length % 8 == 0
            page = self.data[offset : offset + length]
            assert crc32c(page) == crc
            n, heap_bytes = struct.unpack_from("<II", page)
            heap = page[8 + n * size : 8 + n * size + heap_bytes]
            key: Any = None
            if text:
                start, size_of_key = struct.unpack_from("<QQ", row, 24)
                keys = directory[16 + n_pages * row_bytes :]
                key = keys[start : start + size_of_key].decode()
            elif keyed:
                (key,) = struct.unpack_from("<q", row, 24)
            found += [(page[8 + i * size : 8 + (i + 1) * size], heap, key if i == 0 else None) for i in range(n)]
        assert len(found) == n_records
        return found

    def _dictionary(self, column: dict[str, Any]) -> list[Any] | None:
        where = column["dictionary"]
        if not where:
            return None
        data = self.section("dictionaries")[where["offset"] : where["offset"] + where["length"]]
        assert crc32c(data) == where["crc"]
        if column["dtype"] not in ("string", "binary"):
            return u64s(data, 0, where["n"])
        bounds, heap = u64s(data, 0, where["n"] + 1), data[8 * (where["n"] + 1) :]
        return [heap[a:b] for a, b in itertools.pairwise(bounds)]

    def _columns(self) -> dict[int, list[Any]]:
        """Column id -> words, bytes or None, in file order."""
        by_id = {c["id"]: c for c in self.meta["columns"]}
        values: dict[int, list[Any]] = {i: [] for i in by_id}
        for record, _, _ in self.stripes:
            n_rows, reserved = struct.unpack_from("<II", record)
            assert reserved == 0
            for g, group in enumerate(self.meta["groups"]):
                offset, length, header_crc = struct.unpack_from("<QII", record, 8 + 16 * g)
                streams = [s for i in group["columns"] for s in self._streams_of(by_id[i])]
                chunk = self.data[offset : offset + length]
                blocks = self._blocks(chunk, len(streams), header_crc)
                nulls: list[int] = []
                lengths: list[int] = []
                for k, (column, what) in enumerate(streams):
                    self.codecs.add(blocks[k][0])
                    self.widths.add(blocks[k][1])
                    if what == "nulls":
                        nulls = self._nulls(blocks[k], blocks[k + 1], n_rows)
                    elif what == "lengths":
                        lengths = self._decode(*blocks[k], n_rows, None, 4)
                    else:
                        values[column["id"]] += self._rows_of(blocks[k], column, n_rows, nulls, lengths)
                        nulls, lengths = [], []
        return values

    def _streams_of(self, column: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
        lists = self.traits.get(column["id"], ("", 0))[0] == "id_list"
        names = ["nulls"] * column["nullable"] + ["lengths"] * lists + ["values"]
        return [(column, name) for name in names]

    def _nulls(self, block: tuple[int, int, bytes], following: tuple[int, int, bytes], n_rows: int) -> list[int]:
        if block[0] != 10:
            return self._decode(*block, n_rows, None, 1)
        assert (following[0], block[2]) == (9, b"")
        bits = int.from_bytes(following[2][16 : 16 + (n_rows + 63) // 64 * 8], "little")
        return [1 - (bits >> i & 1) for i in range(n_rows)]

    def _rows_of(
        self, block: tuple[int, int, bytes], column: dict[str, Any], n_rows: int, nulls: list[int], lengths: list[int]
    ) -> list[Any]:
        """Values of rows; of a list or vector a list of them."""
        trait, size = self.traits.get(column["id"], ("", 0))
        if trait not in ("id_list", "vector"):
            return self._values(block, column, n_rows, nulls)
        lengths = lengths or [size] * n_rows
        flat = self._values(block, column, sum(lengths), [])
        bounds = list(itertools.accumulate(lengths, initial=0))
        rows: list[Any] = [flat[a:b] for a, b in itertools.pairwise(bounds)]
        assert all(not any(row) for row, null in zip(rows, nulls, strict=False) if null)
        return [None if nulls and nulls[i] else row for i, row in enumerate(rows)]

    def _blocks(self, chunk: bytes, n: int, header_crc: int) -> list[tuple[int, int, bytes]]:
        header = chunk[: (12 * n + 7) // 8 * 8]
        assert crc32c(header) == header_crc
        at, found = len(header), []
        for k in range(n):
            codec, width, reserved, length, crc = struct.unpack_from("<BBHII", header, 12 * k)
            block = chunk[at : at + length]
            assert reserved == 0
            assert length % 8 == 0
            assert crc32c(block) == crc
            found.append((codec, width, block))
            at += length
        assert at == len(chunk)
        return found

    def _values(
        self, block: tuple[int, int, bytes], column: dict[str, Any], n_rows: int, nulls: list[int]
    ) -> list[Any]:
        dictionary, dtype = self.dictionaries[column["id"]], column["dtype"]
        if dtype in ("string", "binary"):
            if block[0] == 7:
                found = self._strings(block, n_rows)
            else:
                assert dictionary is not None
                found = [dictionary[code] for code in self._decode(*block, n_rows, None, 4)]
        else:
            found = self._decode(*block, n_rows, dictionary, np.dtype(dtype).itemsize, dtype.startswith("int"))
        return [None if nulls and nulls[i] else v for i, v in enumerate(found)]

    @staticmethod
    def _strings(block: tuple[int, int, bytes], n_rows: int) -> list[bytes]:
        codec, _, data = block
        assert codec == 7
        raw_length, frame_length = u64s(data, 0, 2)
        raw = zstandard.decompress(data[16 : 16 + frame_length])
        assert len(raw) == raw_length
        lengths, at, found = struct.unpack_from(f"<{n_rows}I", raw), 4 * n_rows, []
        for length in lengths:
            found.append(raw[at : at + length])
            at += length
        assert at == len(raw)
        return found

    @classmethod
    def _decode(
        cls,
        codec: int,
        width: int,
        block: bytes,
        n: int,
        dictionary: list[int] | None,
        itemsize: int,
        signed: bool = False,
    ) -> list[int]:
        if codec == 0:
            return [0] * n
        if codec == 1:
            return u64s(block, 0, 1) * n
        if codec == 2:
            base, scale = u64s(block, 0, 2)
            return [(base + q * scale) & MASK for q in unpack(block[16:], n, width)]
        if codec == 3:
            step, scale = u64s(block, 0, 2)
            n_restarts, zero = struct.unpack_from("<II", block, 16)
            assert zero == 0
            at = 24 + (4 * n_restarts + 7) // 8 * 8
            restart = dict(
                zip(struct.unpack_from(f"<{n_restarts}I", block, 24), u64s(block, at, n_restarts), strict=True)
            )
            found: list[int] = []
            for r, q in enumerate(unpack(block[at + 8 * n_restarts :], n, width)):
                found.append(restart[r] if r in restart else (found[-1] + step + q * scale) & MASK)
            return found
        if codec == 4:
            assert dictionary is not None
            return [dictionary[code] for code in unpack(block, n, width)]
        if codec == 5:
            m, zero = struct.unpack_from("<II", block)
            local = u64s(block, 8, m)
            assert zero == 0
            assert local == sorted(local)
            return [local[code] for code in unpack(block[8 + 8 * m :], n, width)]
        if codec >= 8:
            return cls._decode_more(codec, width, block, n, dictionary, itemsize, signed)
        assert codec == 6
        assert width == 8 * itemsize
        plain = [int.from_bytes(block[i * itemsize : (i + 1) * itemsize], "little") for i in range(n)]
        top = 1 << 8 * itemsize - 1
        return [v - 2 * top & MASK if signed and v >= top else v for v in plain]

    @classmethod
    def _decode_more(
        cls, codec: int, width: int, block: bytes, n: int, dictionary: list[int] | None, itemsize: int, signed: bool
    ) -> list[int]:
        if codec == 8:
            m, inner, inner_width, w, zero = struct.unpack_from("<IBBBB", block)
            at = 8 + packed_bytes(m, w)
            last = unpack(block[8:at], m, w)
            assert (zero, last[-1], last) == (0, n - 1, sorted(set(last)))
            values = cls._decode(inner, inner_width, block[at:], m, dictionary, itemsize, signed)
            return [v for v, a, b in zip(values, [-1, *last], last, strict=False) for _ in range(b - a)]
        if codec == 9:
            fill, m, inner, inner_width, zero = struct.unpack_from("<QIBBH", block)
            at = 16 + (n + 63) // 64 * 8
            bits = int.from_bytes(block[16:at], "little")
            assert (zero, bits >> n, bits.bit_count()) == (0, 0, m)
            present = iter(cls._decode(inner, inner_width, block[at:], m, dictionary, itemsize, signed))
            return [next(present) if bits >> i & 1 else fill for i in range(n)]
        if codec == 11:
            base, e, float_bits = struct.unpack_from("<qBB6x", block)
            whole = [base + q for q in unpack(block[16:], n, width)]
            if float_bits == 64:
                return [struct.unpack("<Q", struct.pack("<d", v / 10.0**e))[0] for v in whole]
            return [struct.unpack("<I", struct.pack("<f", v / 10.0**e))[0] for v in whole]
        if codec == 13:
            own, own_width, zero, base = struct.unpack_from("<IB3sQ", block)
            at = 16 + (n + 63) // 64 * 8
            bits = int.from_bytes(block[16:at], "little")
            assert (zero, bits >> n, bits.bit_count()) == (bytes(3), 0, own)
            end = at + packed_bytes(own, own_width)
            mine = iter(base + q & MASK for q in unpack(block[at:end], own, own_width))
            codes = iter(unpack(block[end:], n - own, width))
            return [next(mine) if bits >> i & 1 else (dictionary or [])[next(codes)] for i in range(n)]
        assert codec == 12
        hot, own, base, own_width = struct.unpack_from("<IIQB7x", block)
        at = 24 + packed_bytes(own, own_width)
        table = [*(dictionary or [])[:hot], *((base + q) & MASK for q in unpack(block[24:at], own, own_width))]
        return [table[code] for code in unpack(block[at:], n, width)]

    def _rows(self) -> list[tuple[Any, dict[int, Any]]]:
        starts = np.cumsum([0, *(struct.unpack_from("<I", r)[0] for r, _, _ in self.stripes)])
        rows: list[tuple[Any, dict[int, Any]]] = []
        ends = []
        for record, heap, page_key in self.pieces:
            first_ts, last_ts, max_arrival, min_hidden, digest = struct.unpack_from("<qqqqQ", record, 8)
            stripe, row, n_rows, flags = struct.unpack_from("<IIII", record, 48)
            user: Any = struct.unpack_from("<q", record)[0]
            if self.meta["user_kind"] == "string":
                offset, length = struct.unpack_from("<II", record)
                user = heap[offset : offset + length].decode()
            assert flags == 0
            assert page_key in (None, user)
            at = int(starts[stripe]) + row
            assert at == len(rows)
            piece = [{i: v[k] for i, v in self.values.items()} for k in range(at, at + n_rows)]
            assert (piece[0][-1], piece[-1][-1]) == (first_ts, last_ts)
            assert max(e[-2] for e in piece) == max_arrival
            assert min(e[-3] for e in piece) == min_hidden
            assert sum(identity(e) for e in piece) & MASK == digest
            rows += [(user, e) for e in piece]
            ends.append((user, first_ts))
        assert ends == sorted(ends)
        assert len(rows) == self.meta["n_rows"] == starts[-1]
        return rows


def identity(event: dict[int, Any]) -> int:
    return mix64((mix64((event[-1] + 0x9E3779B97F4A7C15) & MASK) + event[-2]) & MASK)


def word_of(value: Any) -> int:
    """Of a null, a string, a list or vector, or a word itself."""
    if value is None:
        return 0xA5A5A5A5A5A5A5A5
    if isinstance(value, list):
        return fold(b"".join(word_of(v).to_bytes(8, "little") for v in value))
    return fold(value) if isinstance(value, bytes) else int(value)


def content_digest(rows: list[tuple[Any, dict[int, Any]]], column_id: int) -> int:
    total = 0
    for _, event in rows:
        value = event[column_id]
        word = word_of(value)
        total += mix64(identity(event) ^ mix64((column_id * 0x9E3779B97F4A7C15 + word) & MASK))
    return total & MASK


def _later_codecs(rng: np.random.Generator, n: int) -> dict[str, pa.Array]:
    """Columns for codecs 8 to 13, patches, lists and vectors."""
    common = rng.integers(0, 1 << 40, 40)
    return {
        "runs": pa.array(np.repeat(rng.integers(0, 1 << 60, n), 40)[:n]),
        "rare": pa.array(np.where(rng.random(n) < 0.9, 77, rng.integers(0, 1 << 60, n))),
        "scarce": pa.array(rng.integers(0, 1 << 60, n), mask=rng.random(n) < 0.9),
        "cents": pa.array(np.round(rng.random(n) * 100, 2)),
        "cents32": pa.array(np.round(rng.random(n) * 100, 2).astype(np.float32)),
        "zipf": pa.array(np.where(rng.random(n) < 0.7, rng.choice(common, n), rng.integers(0, 1 << 40, n))),
        "tails": pa.array(rng.integers(0, 1 << np.minimum(rng.geometric(0.4, n) + 3, 40))),
        "ties": pa.array(np.cumsum(np.where(rng.random(n) < 0.5, 0, rng.integers(0, 1 << 20, n)))),
        "tails_and_ties": pa.array(np.where(rng.random(n) < 0.5, 0, 1 << np.minimum(rng.geometric(0.3, n) + 4, 50))),
        "popular": pa.array(
            np.where(rng.random(n) < 0.8, common[np.minimum(rng.geometric(0.2, n), 39)], rng.integers(0, 1 << 40, n))
        ),
        "seen": pa.array([None if i % 9 == 0 else list(range(i % 4)) for i in range(n)], pa.list_(pa.int16())),
        "tags": pa.array([["", "é", f"tag {i % 11}"][: i % 4] for i in range(n)], pa.list_(pa.string())),
        "spot": pa.array([None if i % 5 == 0 else [i, -i] for i in range(n)], pa.list_(pa.int32(), 2)),
    }


def _events(kind: str, n: int, corrects: bool) -> pa.Table:
    """Events that draw on every codec: constants, steps, few and many distinct values, nulls, long strings."""
    rng = np.random.default_rng(5)
    users = np.concatenate([np.full(n // 2, 3), rng.integers(-4, 4, n - n // 2)])
    ts = np.cumsum(rng.integers(0, 3, n)) * 1000
    texts = [f"{x:032x}" * 2 for x in rng.integers(0, 1 << 62, n)]
    return pa.table(
        {
            "user": pa.array([f"user {u}é" for u in users] if kind == "string" else users),
            "ts": np.where(rng.random(n) < 0.05, ts // 2, ts),
            "id": [f"e{i}" for i in range(n)],
            "corrects": [
                f"e{i - 1}" if corrects and i and users[i] == users[i - 1] and i % 50 == 0 else None for i in range(n)
            ],
            "constant": np.full(n, -7, np.int16),
            "zero": np.zeros(n, np.int32),
            "steps": np.arange(n, dtype=np.int64) * 10 + 5,
            "few": rng.choice(rng.integers(-(1 << 62), 1 << 62, 6), n),
            "some": rng.choice(rng.integers(-(1 << 62), 1 << 62, 300), n),
            "wide": rng.integers(-(1 << 63), 1 << 63, n),
            "small": rng.integers(-128, 128, n).astype(np.int8),
            "price": pa.array(rng.random(n).astype(np.float32), mask=rng.random(n) < 0.2),
            "city": pa.array(rng.choice(["Oslo", "Rome", "São Paulo", ""], n), mask=rng.random(n) < 0.1),
            "text": pa.array([None if i % 7 == 0 else t for i, t in enumerate(texts)]),
            **_later_codecs(rng, n),
        }
    )


def expected_of(value: Any, dtype: str) -> Any:
    """A Python value as the document's reader gives it."""
    if isinstance(value, list):
        return [expected_of(v, dtype) for v in value]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float):
        kind = np.dtype(dtype)
        return int(np.array([value], kind).view(f"u{kind.itemsize}")[0])
    return None if value is None else value & MASK


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_the_document_describes_the_files(tmp_path: Path, kind: str) -> None:
    table = _events(kind, 2_400, corrects=True)
    schema = EventSchema.infer(
        table.schema,
        user="user",
        time="ts",
        event_id="id",
        supersedes="corrects",
        groups={"numbers": ["constant", "zero", "steps", "few", "some", "wide", "small"], "others": ["city", "text"]},
    )
    with HistoryStore.create(tmp_path, schema, 2) as store:
        arrivals = store.append(table).arrivals
        store.compact(full=True)
        infos = store.pin().segments
    events = table.to_pylist()
    hidden = {(e["user"], e["corrects"]): int(a) for e, a in zip(events, arrivals, strict=True) if e["corrects"]}
    expected = sorted(
        (e["user"], e["ts"], int(a), hidden.get((e["user"], e["id"]), NEVER), e)
        for e, a in zip(events, arrivals, strict=True)
    )
    read: list[Any] = []
    codecs: set[int] = set()
    widths: set[int] = set()
    for _, info in infos:
        document = Document(tmp_path / "archive" / info.name)
        assert document.meta["digests"] == {k: str(v) for k, v in info.digests.items()}
        assert document.meta["digests"]["identity"] == str(sum(identity(e) for _, e in document.rows) & MASK)
        for column in document.meta["columns"]:
            assert column["codec_counts"].keys() == column["codec_bytes"].keys()
            inner = column.get("inner_counts", {})
            assert {k: sum(v.values()) for k, v in inner.items()} == {
                k: n for k, n in column["codec_counts"].items() if k in ("8", "9")
            }
            assert document.meta["digests"][str(column["id"])] == str(content_digest(document.rows, column["id"]))
        read += document.rows
        codecs |= document.codecs
        widths |= document.widths
    # A local dictionary is smaller than a mixed one only where the segment has no dictionary at all.
    assert codecs | {5} == set(range(14))
    assert 255 in widths
    read.sort(key=lambda r: (r[0], r[1][-1], r[1][-2]))
    for (user, got), (want_user, ts, arrival, hidden_from, event) in zip(read, expected, strict=True):
        assert (user, got[-1], got[-2], got[-3], got[-4]) == (want_user, ts, arrival, hidden_from, event["id"].encode())
        for column in schema.columns:
            value = event[column.name]
            assert got[column.id] == expected_of(value, column.dtype), column.name


def test_the_manifest_is_as_documented(tmp_path: Path) -> None:
    table = _events("int64", 40, corrects=False)
    schema = EventSchema.infer(table.drop_columns(["corrects"]).schema, user="user", time="ts", event_id="id")
    with HistoryStore.create(tmp_path, schema, 2) as store:
        store.append(table)
        store.compact()
    path = tmp_path / "archive" / "manifests" / "00000000000000000002.json"
    envelope = json.loads(path.read_text())
    body = envelope["body"]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    assert (envelope["format"], envelope["crc32c"]) == (2, crc32c(canonical))
    assert set(body) == {"generation", "n_buckets", "schema", "created_ms", "segments", "note"}
    assert (body["generation"], body["n_buckets"], len(body["segments"])) == (2, 2, 2)
    assert set(body["segments"][0][0]) == {"name", "bytes", "n_rows", "n_users", "digests"}
    assert sum(s["n_rows"] for bucket in body["segments"] for s in bucket) == 40
