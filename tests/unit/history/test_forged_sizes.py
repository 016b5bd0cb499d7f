"""Files under right CRCs that name more than they hold: they are refused before memory is taken for it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import thinrow
from thinrow.core.errors import CorruptionError, StoreError
from thinrow.core.stripes import PIECE_DTYPE
from thinrow.history import buckets
from thinrow.history.archive import window
from thinrow.history.archive.generation import Archive
from thinrow.history.reconstruct import reconstruct
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.storage.container import crc_of
from thinrow.storage.manifest import FORMAT, ManifestLog
from thinrow.storage.objects import LocalObjects
from thinrow.storage.sealed import seal
from thinrow.testing.fuzz.layout import Layout, close, mend, read_layout

_ENTRY = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc", "<u4"), ("first", "<u8"), ("key", "<i8")])


class Far(LocalObjects):
    """As in a bucket: nothing can be mapped."""

    def mapped(self, names: Any) -> None:
        return None


def forged(root: Path, table: pa.Table, schema: EventSchema, forge: Callable[[bytearray, Layout], bytes]) -> Path:
    """The archive of a store of one segment, which ``forge`` wrote anew."""
    with thinrow.create(root, schema, n_buckets=1, sync=False) as store:
        store.append(table)
        store.compact()
    (path,) = (root / "archive").rglob("*.seg")
    layout = read_layout(path.read_bytes())
    data = forge(bytearray(path.read_bytes()[: layout.body]), layout)
    path.write_bytes(data)
    objects = LocalObjects(root / "archive")
    log = ManifestLog(objects)
    number, body = log.latest()
    for entries in body["segments"]:
        for entry in entries:
            entry["bytes"] = len(data)
    objects.put(log.name_of(number), seal(body, FORMAT, "manifest"))
    return root / "archive"


def put(body: bytearray, layout: Layout, kind: str, value: int, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Put ``value`` into all fields of the names; what was changed."""
    found = [f for f in layout.fields if f.what in names]
    assert found
    for field in found:
        struct.pack_into(kind, body, field.start, value)
    return [(f.start, f.stop) for f in found]


def read(archive: Path, users: list[int], objects: type[LocalObjects] = LocalObjects) -> int:
    return int(Archive(objects(archive)).pin().to_arrow(users).read_all().num_rows)


def users_of(n: int) -> tuple[pa.Table, EventSchema]:
    table = pa.table({"user": np.arange(n), "ts": np.full(n, 1000), "item": np.arange(n)})
    return table, EventSchema.infer(table.schema, user="user", time="ts")


def entries_of(body: bytearray, layout: Layout) -> Any:
    at, _, _ = layout.meta["sections"]["pieces.directory"]
    pages, _ = struct.unpack_from("<QQ", body, at)
    return np.frombuffer(body, np.uint8)[at + 16 : at + 16 + 32 * pages].view(_ENTRY)


def test_first_keys_of_index_pages_that_descend(tmp_path: Path) -> None:
    """Ranges of different users would overlap, each as long as the table."""

    def forge(body: bytearray, layout: Layout) -> bytes:
        keys = entries_of(body, layout)["key"]
        keys[1:] = keys[:0:-1].copy()
        return close(body, layout.meta)

    archive = forged(tmp_path, *users_of(2_000), forge)
    with pytest.raises(CorruptionError, match="does not describe its pages"):
        read(archive, [5])


@pytest.mark.parametrize("same_user", [True, False])
def test_index_entries_that_name_one_stripe_again_and_again(tmp_path: Path, same_user: bool) -> None:
    n = 4_000

    def forge(body: bytearray, layout: Layout) -> bytes:
        entries = entries_of(body, layout)
        (rows,) = struct.unpack_from("<I", body, layout.meta["sections"]["stripes"][0] + 8)
        for e in entries:
            begin, end = int(e["offset"]), int(e["offset"]) + int(e["length"])
            (count,) = struct.unpack_from("<I", body, begin)
            records = np.frombuffer(body, np.uint8)[begin + 8 : begin + 8 + PIECE_DTYPE.itemsize * count].view(
                PIECE_DTYPE
            )
            records["stripe"], records["row"], records["n_rows"] = 0, 0, rows
            if same_user:
                records["key"], e["key"] = 7, 7
            e["crc"] = crc_of(bytes(body[begin:end]))
        return close(body, layout.meta)

    archive = forged(tmp_path, *users_of(n), forge)
    message = "overlap" if same_user else f"users have more rows than its {n}"
    with pytest.raises(CorruptionError, match=message):
        read(archive, [7] if same_user else list(range(n)))


def test_chunks_that_overlap_in_a_bucket(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    table = pa.table({"user": np.full(20_000, 7), "ts": np.arange(20_000), "item": rng.integers(0, 2**60, 20_000)})

    def forge(body: bytearray, layout: Layout) -> bytes:
        dirty = put(body, layout, "<Q", 16, ("stripes.chunk.offset",))
        dirty += put(body, layout, "<I", (len(body) - 64) // 8 * 8, ("stripes.chunk.length",))
        mend(body, layout, dirty, set())
        return close(body, layout.meta)

    archive = forged(tmp_path, table, EventSchema.infer(table.schema, user="user", time="ts"), forge)
    with pytest.raises(CorruptionError, match=r"chunks of \d+ bytes in a file of \d+"):
        read(archive, [7], Far)


def test_a_stripe_in_a_bucket_that_runs_come_back_to_is_no_overlap(tmp_path: Path) -> None:
    """Two segments of one stripe each, and users who have events in both: a read goes to and fro between them."""
    item = np.random.default_rng(1).integers(0, 2**60, 40)
    table = pa.table({"user": np.arange(40) % 20, "ts": np.arange(40), "item": item})
    schema = EventSchema.infer(table.schema, user="user", time="ts")
    with thinrow.create(tmp_path / "s", schema, n_buckets=1, sync=False) as store:
        for half in (table.slice(0, 20), table.slice(20)):
            store.append(half)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(buckets, "GROWTH", 0)
                store.compact()
        logged, wanted = store.snapshot(np.arange(20), 10**6).requests, store.read(np.arange(20), 10**6)
        assert len(store.pin().segments) == 2
    far = reconstruct(Archive(Far(tmp_path / "s" / "archive")).pin(), logged)
    assert far.histories.to_jagged("item").values.tolist() == wanted.histories.to_jagged("item").values.tolist()


def test_lists_of_more_elements_than_a_stripe_may_have(tmp_path: Path) -> None:
    schema = EventSchema((ColumnSpec(1, "tags", Trait.ID_LIST, "int64", "a"),))
    table = pa.table({"user_id": [7], "event_ts": [1000], "tags": pa.array([[5, 5]], pa.list_(pa.int64()))})

    def forge(body: bytearray, layout: Layout) -> bytes:
        dirty = put(body, layout, "<I", 65_536, ("pieces.n_rows", "stripes.n_rows"))
        (lengths, *_) = (b for b in layout.blocks if b.stream == "tags")
        struct.pack_into("<Q", body, lengths.start, 32_768)
        mend(body, layout, [*dirty, (lengths.start, lengths.stop)], set())
        return close(body, layout.meta)

    archive = forged(tmp_path, table, schema, forge)
    with pytest.raises(CorruptionError, match="lists of 2147483648 elements in one stripe; 16777216 at most"):
        read(archive, [7])


def test_histories_that_do_not_fit_are_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, schema = users_of(10)
    with thinrow.create(tmp_path, schema, n_buckets=1, sync=False) as store:
        store.append(table)
        store.compact()
        taken = store.snapshot([1, 2], [5000, 5000])

        def full(*_: Any) -> None:
            raise MemoryError

        monkeypatch.setattr(window.Window, "read", full)
        with pytest.raises(StoreError, match="the histories of 2 requests take more memory than there is"):
            reconstruct(taken.generation, taken.requests)
