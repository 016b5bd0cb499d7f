"""Containers: what was written is read back, and no changed byte goes unnoticed."""

from __future__ import annotations

import json

import pytest

from thinrow.core.errors import CorruptionError, InputError, NewerFormatError, ObjectNotFound
from thinrow.storage.container import MAGIC, VERSION, Container, ContainerWriter, crc_of
from thinrow.storage.objects import MemoryObjects

META = {"kind": "test", "text": "größe"}


def write(objects: MemoryObjects, name: str = "c", meta: dict[str, object] = META) -> None:
    with objects.create(name) as writer:
        out = ContainerWriter(writer)
        out.begin_section("greeting")
        assert out.append(b"hel") == 16
        assert out.append(memoryview(b"lo")) == 19
        out.end_section(crc=True)
        out.begin_section("empty")
        out.end_section(crc=True)
        out.begin_section("own")
        out.append(b"12345678")
        out.end_section(crc=False)
        assert out.offset == 29
        out.finish(dict(meta))


@pytest.fixture
def objects() -> MemoryObjects:
    store = MemoryObjects()
    write(store)
    return store


def test_round_trip(objects: MemoryObjects) -> None:
    container = Container.open(objects, "c")
    assert container.meta == META
    assert container.sections == ("greeting", "empty", "own")
    assert container.section("greeting") == (16, 5, crc_of(b"hello"))
    assert container.section("own") == (21, 8, None)
    assert container.read_section("greeting") == b"hello"
    assert container.read_section("empty") == b""
    assert container.read_section("own") == b"12345678"
    assert container.size == objects.size("c")


def test_crc_continues() -> None:
    assert crc_of(b"123456789") == crc_of(b"6789", crc_of(b"12345")) == 0xE3069283
    assert crc_of(b"") == 0


def test_meta_longer_than_the_first_read() -> None:
    objects = MemoryObjects()
    meta = {"long": "x" * 200_000}
    write(objects, "long", meta)
    container = Container.open(objects, "long")
    assert container.meta == meta
    assert container.read_section("greeting") == b"hello"


def test_every_flipped_bit_is_noticed(objects: MemoryObjects) -> None:
    good = objects.get("c")
    for at in range(len(good)):
        for bit in (0, 3, 7):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            objects.put("c", bytes(bad))
            if 21 <= at < 29:
                continue  # the section whose parts carry their own CRCs
            with pytest.raises((CorruptionError, NewerFormatError), match="c"):
                Container.open(objects, "c").read_section("greeting")


@pytest.mark.parametrize("keep", [0, 1, 47, 48, 100])
def test_cut_files(objects: MemoryObjects, keep: int) -> None:
    objects.put("c", objects.get("c")[:keep])
    with pytest.raises(CorruptionError, match="file c"):
        Container.open(objects, "c")


def test_newer_versions_are_refused_by_number(objects: MemoryObjects) -> None:
    data = bytearray(objects.get("c"))
    data[8] = data[-16] = 7
    objects.put("c", bytes(data))
    with pytest.raises(NewerFormatError, match=r"c has format version 7, this thinrow reads up to 3; update"):
        Container.open(objects, "c")


def forge(objects: MemoryObjects, meta: object) -> None:
    """The container of the fixture with another meta and a right CRC."""
    import struct

    body = objects.get("c")[:29]
    text = json.dumps(meta).encode()
    objects.put("c", body + text + struct.pack("<QIIH6x8s", 29, len(text), crc_of(text), VERSION, MAGIC))


@pytest.mark.parametrize(
    "sections",
    [
        None,
        {"a": [16, 12, None]},
        {"a": [16, 14, None]},
        {"a": [17, 12, None]},
        {"a": [16, 14, None], "b": [30, -1, None]},
        {"a": [16]},
        {"a": "text"},
        {"a": [16, 5, None], "b": [22, 7, None]},
        [1, 2],
    ],
)
def test_impossible_sections(objects: MemoryObjects, sections: object) -> None:
    forge(objects, {"sections": sections} if sections else {})
    with pytest.raises(CorruptionError, match="file c"):
        Container.open(objects, "c")


def test_meta_that_is_no_object(objects: MemoryObjects) -> None:
    forge(objects, [1])
    with pytest.raises(CorruptionError, match="not what a writer wrote"):
        Container.open(objects, "c")


def test_what_is_missing_is_named(objects: MemoryObjects) -> None:
    with pytest.raises(CorruptionError, match="no section 'other'; there are greeting, empty, own"):
        Container.open(objects, "c").section("other")
    with pytest.raises(ObjectNotFound, match="'d'"):
        Container.open(objects, "d")


def test_a_section_name_is_used_once() -> None:
    objects = MemoryObjects()
    with objects.create("c") as writer:
        out = ContainerWriter(writer)
        out.begin_section("a")
        out.end_section(crc=True)
        with pytest.raises(InputError, match="'a'"):
            out.begin_section("a")
