"""Index pages: keys and records of several tables, found alike by every backend and by a plain search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinrow.core.errors import CorruptionError
from thinrow.kernels import BACKENDS, use
from thinrow.storage.container import Container, ContainerWriter, crc_of
from thinrow.storage.index import Index
from thinrow.storage.objects import MemoryObjects
from thinrow.storage.pages import PagedTable, write_pages

DTYPE = np.dtype([("key", "<i8"), ("value", "<i8"), ("more", "<u4", (12,))])
QUICK = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


class Unmapped(MemoryObjects):
    def mapped(self, names: Sequence[str]) -> None:
        return None


def tables(objects: MemoryObjects, keys: list[npt.NDArray[Any]], kind: Any) -> list[PagedTable]:
    found = []
    for t, own in enumerate(keys):
        rows = np.zeros(len(own), DTYPE)
        rows["value"] = np.arange(len(own)) * 10 + t
        with objects.create(f"t{t}") as writer:
            out = ContainerWriter(writer)
            write_pages(out, "rows", rows, own)
            out.finish({})
        found.append(PagedTable.open(objects, Container.open(objects, f"t{t}"), "rows", DTYPE, kind))
    return found


ints = st.integers(-5, 40) | st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.sampled_from("abÄ中😀"), min_size=1, max_size=6)


@QUICK
@given(
    st.sampled_from(["int64", "string"]),
    st.booleans(),
    st.lists(st.integers(0, 900), min_size=1, max_size=4),
    st.data(),
)
def test_every_backend_finds_what_a_plain_search_finds(
    kind: str, mapped: bool, sizes: list[int], data: st.DataObject
) -> None:
    one = ints if kind == "int64" else texts
    few = data.draw(st.lists(one, min_size=1, max_size=12))
    rng = np.random.default_rng(len(few))
    dtype = np.int64 if kind == "int64" else object
    pool = np.array(few, dtype)
    keys = [np.sort(pool[rng.integers(0, len(pool), n)]) for n in sizes]
    objects = MemoryObjects() if mapped else Unmapped()
    index = Index(objects, tables(objects, keys, kind))
    asked = np.array([*few, *data.draw(st.lists(one, max_size=6))], dtype)
    table = rng.integers(0, len(sizes), len(asked))
    numbers = [rng.integers(0, n, 20) if n else np.empty(0, np.int64) for n in sizes]
    owner = np.repeat(np.arange(len(sizes)), [len(n) for n in numbers])
    for name in BACKENDS:
        with use(name):
            first, last, total, wrong = index.find(table, asked)
            assert (total, wrong) == ((last - first).sum(), -1)
            taken = index.take(owner, np.concatenate(numbers))
            ranges = index.take_ranges(table, first, last, total)
        for t, key, a, b in zip(table.tolist(), asked.tolist(), first.tolist(), last.tolist(), strict=True):
            assert b - a == (keys[t] == key).sum()
            assert (keys[t][a:b] == key).all()
        rows = [k * 10 + t for t, a, b in zip(table.tolist(), first, last, strict=True) for k in range(a, b)]
        assert ranges["value"].tolist() == rows
        np.testing.assert_array_equal(taken["value"], np.concatenate(numbers) * 10 + owner)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_key_outside_its_heap_is_damage(backend: str) -> None:
    objects = MemoryObjects()
    (opened,) = tables(objects, [np.array(["anna", "bert", "carl"], object)], "string")
    data = bytearray(objects.get("t0"))
    at = int(opened.offset[0]) + 8 + 64 + 4
    data[at : at + 4] = (1 << 30).to_bytes(4, "little")
    # Under a right CRC, as a writer with a fault would leave it.
    page = bytes(data[int(opened.offset[0]) :][: int(opened.length[0])])
    opened.crc[0] = crc_of(page)
    objects.put("t0", bytes(data))
    with use(backend), pytest.raises(CorruptionError, match="lies outside its heap"):
        Index(objects, [opened]).find(np.zeros(1, np.int64), np.array(["bert"], object))
