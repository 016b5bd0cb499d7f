"""Paged tables: records by number and by key, within pages and across them, under damage and under threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from thinrow.core.errors import CorruptionError, InputError
from thinrow.storage.container import Container, ContainerWriter
from thinrow.storage.index import Index
from thinrow.storage.objects import MemoryObjects
from thinrow.storage.pages import PAGE_BYTES, KeyKind, PageCache, PagedTable, write_pages

DTYPE = np.dtype([("key", "<i8"), ("value", "<i8"), ("more", "<u4", (12,))])
PLAIN = np.dtype([("value", "<i8"), ("length", "<u4")])


class Unmapped(MemoryObjects):
    """Objects that cannot be mapped, like those of an object store: pages go through the cache."""

    def mapped(self, names: Sequence[str]) -> None:
        return None


def take(table: PagedTable, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return Index(table.objects, [table]).take(np.zeros(len(numbers), np.int64), numbers)


def find(table: PagedTable, keys: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return Index(table.objects, [table]).find(np.zeros(len(keys), np.int64), keys)[:2]


def records(n: int, dtype: np.dtype[Any] = DTYPE) -> npt.NDArray[Any]:
    out = np.zeros(n, dtype)
    out["value"] = np.arange(n) * 3
    return out


def int_keys(n: int, repeats: int, seed: int = 0) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(rng.integers(-(2**62), 2**62, max(1, n // repeats)), n))


def text_keys(n: int, repeats: int, seed: int = 0) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    alphabet = np.array(list("abzÄ中😀"), object)
    names = ["".join(rng.choice(alphabet, rng.integers(1, 40))) for _ in range(max(1, n // repeats))]
    return np.sort(np.array(names, object)[rng.integers(0, len(names), n)])


def table(
    rows: npt.NDArray[Any], keys: npt.NDArray[Any] | None, kind: KeyKind | None, cache: PageCache | None = None
) -> tuple[MemoryObjects, PagedTable]:
    objects = MemoryObjects() if cache is None else Unmapped()
    with objects.create("t") as writer:
        out = ContainerWriter(writer)
        write_pages(out, "rows", rows, keys)
        out.finish({})
    return objects, PagedTable.open(objects, Container.open(objects, "t"), "rows", rows.dtype, kind, cache)


@pytest.mark.parametrize("n", [0, 1, 5, 1365, 10_000])
def test_records_by_number_without_keys(n: int) -> None:
    rows = records(n, PLAIN)
    _, opened = table(rows, None, None)
    assert opened.n_records == n
    assert opened.n_pages == -(-n // ((PAGE_BYTES - 8) // PLAIN.itemsize))
    numbers = np.random.default_rng(n).integers(0, n, 300) if n else np.empty(0, np.int64)
    np.testing.assert_array_equal(take(opened, numbers), rows[numbers])
    scanned = list(opened.scan())
    assert [first for first, _, _ in scanned] == [sum(len(r) for _, r, _ in scanned[:i]) for i in range(len(scanned))]
    assert n == 0 or np.array_equal(np.concatenate([r for _, r, _ in scanned]), rows)


@pytest.mark.parametrize("n", [0, 1, 204, 205, 5000])
@pytest.mark.parametrize("repeats", [1, 7, 2000])
@pytest.mark.parametrize("kind", ["int64", "string"])
def test_find_agrees_with_a_search_of_all_keys(n: int, repeats: int, kind: KeyKind) -> None:
    keys = int_keys(n, repeats) if kind == "int64" else text_keys(n, repeats)
    _, opened = table(records(n), keys, kind)
    absent: list[Any] = [-(2**63), 0, 2**63 - 1] if kind == "int64" else ["", "b", "\U0010ffff"]
    near = [k + 1 for k in keys[:20]] if kind == "int64" else [k + "a" for k in keys[:20]]
    queries = np.array([*keys[:: max(1, n // 50)], *absent, *near], keys.dtype)
    np.random.default_rng(1).shuffle(queries)
    first, last = find(opened, queries)
    np.testing.assert_array_equal(last - first, [(keys == q).sum() for q in queries])
    for q, a, b in zip(queries, first, last, strict=True):
        assert (keys[a:b] == q).all()


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_keys_come_back(kind: KeyKind) -> None:
    keys = int_keys(3000, 5) if kind == "int64" else text_keys(3000, 5)
    _, opened = table(records(3000), keys, kind)
    numbers = np.random.default_rng(2).integers(0, 3000, 500)
    np.testing.assert_array_equal(opened.keys(), keys)
    np.testing.assert_array_equal(take(opened, numbers)["value"], numbers * 3)
    scanned = [k for _, _, k in opened.scan() if k is not None]
    np.testing.assert_array_equal(np.concatenate(scanned), keys)


def test_no_page_is_too_long_and_every_record_is_written_once() -> None:
    """The longest keys the store allows, all different, and one that spans pages."""
    keys = np.array([f"{i:05d}" + "x" * 250 for i in range(500)] + ["z" * 255] * 600, object)
    objects, opened = table(records(len(keys)), keys, "string")
    container = Container.open(objects, "t")
    _, length, _ = container.section("rows")
    assert length <= opened.n_pages * PAGE_BYTES
    assert len(keys) // opened.n_pages > 40
    first, last = find(opened, np.array(["z" * 255], object))
    assert (first[0], last[0]) == (500, 1100)
    np.testing.assert_array_equal(take(opened, np.arange(1100))["value"], np.arange(1100) * 3)


def test_input_is_checked() -> None:
    with pytest.raises(InputError, match="not ascending"):
        table(records(2), np.array([2, 1]), "int64")
    wide = np.zeros(1, np.dtype([("value", "u1", (PAGE_BYTES,))]))
    with pytest.raises(InputError, match="exceed a page"):
        table(wide, None, None)


def test_numbers_that_the_table_does_not_have() -> None:
    _, opened = table(records(10, PLAIN), None, None)
    for number in (-1, 10):
        with pytest.raises(CorruptionError, match=rf"record {number} of 'rows', which has 10"):
            take(opened, np.array([0, number]))


@pytest.mark.parametrize("kind", [None, "int64", "string"])
def test_every_flipped_byte_is_noticed(kind: KeyKind | None) -> None:
    n = 400
    keys = None if kind is None else int_keys(n, 3) if kind == "int64" else text_keys(n, 3)
    objects, opened = table(records(n), keys, kind)
    good = objects.get("t")
    container = Container.open(objects, "t")
    offset, length, _ = container.section("rows")
    directory_offset, directory_length, _ = container.section("rows.directory")
    places = [*range(offset, offset + length, 97), *range(directory_offset, directory_offset + directory_length)]
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 0x10
        objects.put("t", bytes(bad))
        with pytest.raises(CorruptionError, match="file t"):
            take(PagedTable.open(objects, Container.open(objects, "t"), "rows", DTYPE, kind), np.arange(n))
    del opened


def test_damage_is_named_by_page() -> None:
    objects, _ = table(records(1000), int_keys(1000, 1), "int64")
    data = bytearray(objects.get("t"))
    data[16 + 16_384 + 100] ^= 1
    objects.put("t", bytes(data))
    opened = PagedTable.open(objects, Container.open(objects, "t"), "rows", DTYPE, "int64")
    take(opened, np.arange(100))
    with pytest.raises(CorruptionError, match="the CRC of page 1 of 'rows'"):
        take(opened, np.arange(1000))
    with pytest.raises(CorruptionError, match="page 1"):
        list(opened.scan())


def test_pages_are_read_once_and_the_cache_keeps_its_bound() -> None:
    cache = PageCache(capacity_bytes=5 * 17_000)
    objects, opened = table(records(5000), int_keys(5000, 1), "int64", cache)
    reads: list[int] = []
    whole = objects.read_into

    def count(name: str, offsets: Any, *args: Any, **named: Any) -> None:
        reads.append(len(offsets))
        whole(name, offsets, *args, **named)

    objects.read_into = count  # type: ignore[method-assign]
    take(opened, np.arange(500))
    take(opened, np.arange(500))
    assert reads == [2]
    take(opened, np.arange(5000))
    assert sum(reads) == opened.n_pages
    assert 0 < cache.used_bytes <= cache.capacity_bytes
    assert len(cache._pages) in (4, 5)
    take(opened, np.arange(4990, 5000))
    assert sum(reads) == opened.n_pages


def test_one_cache_serves_several_tables() -> None:
    cache = PageCache()
    _, a = table(records(10, PLAIN), None, None, cache)
    other = records(10, PLAIN)
    other["value"] = 7
    _, b = table(other, None, None, cache)
    assert take(a, np.array([1]))["value"].tolist() == [3]
    assert take(b, np.array([1]))["value"].tolist() == [7]


def test_threads_share_a_table() -> None:
    keys = int_keys(20_000, 4)
    _, opened = table(records(20_000), keys, "int64", PageCache(200_000))
    wrong: list[str] = []

    def look(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            queries = rng.choice(keys, 50)
            first, last = find(opened, queries)
            if not np.array_equal(keys[first], queries) or not np.array_equal(keys[last - 1], queries):
                wrong.append(f"{seed}")

    threads = [threading.Thread(target=look, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
