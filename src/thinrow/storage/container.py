"""Containers: one file of named sections with a checked table of contents at its end (docs/format/archive-v2.md, 1).

Worked example, a file of one 5-byte section: bytes 0 to 16 head, 16 to 21 ``hello``, then the JSON
``{"sections":{"greeting":[16,5,2591144780]}}``, then 32 bytes of tail that say where the JSON is and what its CRC is.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from thinrow.core.errors import CorruptionError, InputError, NewerFormatError
from thinrow.kernels import kernel
from thinrow.storage.objects import BytesLike, ObjectStore, Writer, as_bytes

MAGIC = b"THINROW\0"
VERSION = 3
_HEAD = struct.Struct("<8sH6x")
_TAIL = struct.Struct("<QIIH6x8s")
#: Read from the end in the first go; the meta of most files fits.
_GUESS_BYTES = 1 << 16


def crc_of(data: BytesLike, crc: int = 0) -> int:
    """CRC-32C of ``data``, continuing from ``crc``."""
    view = as_bytes(data)
    return int(kernel("crc32c")(np.frombuffer(view, np.uint8), crc)) if len(view) else crc


class ContainerWriter:
    """Writes head, sections and meta to ``writer``, in order; a call out of order is a bug of the caller.

    Attributes:
        offset: bytes written so far, so the position in the file of the next append.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._sections: dict[str, list[int | None]] = {}
        self._name: str | None = None
        self._start = 0
        self._crc = 0
        self.offset = 0
        self._put(_HEAD.pack(MAGIC, VERSION))

    def begin_section(self, name: str) -> None:
        """Start the section ``name``. Raises InputError where the file has one of that name."""
        assert self._name is None, f"section {self._name!r} is open"
        if name in self._sections:
            raise InputError(f"section {name!r} is there already; a name is used once a file")
        self._name, self._start, self._crc = name, self.offset, 0

    def append(self, data: BytesLike) -> int:
        """Add bytes to the open section; returns their position in the file."""
        assert self._name is not None, "no section is open"
        place = self.offset
        self._crc = crc_of(data, self._crc)
        self._put(data)
        return place

    def end_section(self, crc: bool) -> None:
        """Close the open section; ``crc`` False leaves its CRC out, where its parts carry their own."""
        assert self._name is not None, "no section is open"
        self._sections[self._name] = [self._start, self.offset - self._start, self._crc if crc else None]
        self._name = None

    def finish(self, meta: dict[str, Any]) -> None:
        """Write ``meta`` (JSON-ready, without "sections") and the tail; nothing may follow."""
        assert self._name is None, f"section {self._name!r} is open"
        place = self.offset
        text = json.dumps({**meta, "sections": self._sections}, separators=(",", ":"), allow_nan=False).encode()
        self._put(text)
        self._put(_TAIL.pack(place, len(text), crc_of(text), VERSION, MAGIC))

    def _put(self, data: BytesLike) -> None:
        self._writer.write(data)
        self.offset += len(as_bytes(data))


class Container:
    """A container open for reading.

    Attributes:
        objects: the store.
        name: the object's name.
        size: bytes of the file.
        meta: the meta dict, without "sections".
    """

    def __init__(
        self,
        objects: ObjectStore,
        name: str,
        size: int,
        meta: dict[str, Any],
        sections: dict[str, tuple[int, int, int | None]],
    ) -> None:
        self.objects, self.name, self.size, self.meta = objects, name, size, meta
        self._sections = sections

    @classmethod
    def open(cls, objects: ObjectStore, name: str) -> Container:
        """Read and check head, tail and meta.

        Raises:
            ObjectNotFound: no such object.
            NewerFormatError: a newer thinrow wrote it.
            CorruptionError: no container, or a damaged one.
        """
        size = objects.size(name)
        if size < _HEAD.size + _TAIL.size:
            raise CorruptionError(f"{size} bytes are too few for a container", file=name)
        guess = min(size, _GUESS_BYTES)
        data = _read(objects, name, (0, _HEAD.size), (size - guess, guess))
        head, end = data[: _HEAD.size], data[_HEAD.size :]
        tail = end[-_TAIL.size :]
        place, length, crc, version, magic = _TAIL.unpack(tail)
        _check_frame(name, head, tail, version, magic)
        if place < _HEAD.size or place + length + _TAIL.size != size:
            raise CorruptionError(
                f"meta of {length} bytes at {place} does not end at the tail of {size} bytes", file=name
            )
        if length + _TAIL.size <= guess:
            text = end[-_TAIL.size - length : -_TAIL.size]
        else:
            text = _read(objects, name, (place, length))
        if crc_of(text) != crc:
            raise CorruptionError("the CRC of the meta does not match", file=name)
        meta, sections = _parse(name, text, place)
        return cls(objects, name, size, meta, sections)

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the sections, in file order."""
        return tuple(self._sections)

    def section(self, name: str) -> tuple[int, int, int | None]:
        """(offset in the file, length, CRC or None). Raises CorruptionError where the file has no such section."""
        try:
            return self._sections[name]
        except KeyError:
            raise CorruptionError(
                f"no section {name!r}; there are {', '.join(self._sections)}", file=self.name
            ) from None

    def read_section(self, name: str) -> bytes:
        """The bytes of a section. Raises CorruptionError where its CRC does not match."""
        offset, length, crc = self.section(name)
        data = _read(self.objects, self.name, (offset, length))
        if crc is not None and crc_of(data) != crc:
            raise CorruptionError(f"the CRC of section {name!r} does not match", file=self.name)
        return data


def _read(objects: ObjectStore, name: str, *ranges: tuple[int, int]) -> bytes:
    offsets, lengths = np.array(ranges, np.int64).T
    places = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    objects.read_into(name, offsets, lengths, out, places)
    return out.tobytes()


def _check_frame(name: str, head: bytes, tail: bytes, version: int, magic: bytes) -> None:
    head_magic, head_version = _HEAD.unpack(head)
    if head_magic != MAGIC or magic != MAGIC:
        raise CorruptionError("it does not begin and end as a thinrow container", file=name)
    if head_version != version:
        raise CorruptionError(f"format version {head_version} at its start, {version} at its end", file=name)
    if version > VERSION:
        raise NewerFormatError(
            f"{name} has format version {version}, this thinrow reads up to {VERSION}; update thinrow"
        )
    # Packed again, the fields must give the bytes back: padding that is not zero is damage.
    if version < 1 or head != _HEAD.pack(MAGIC, version) or tail != _TAIL.pack(*_TAIL.unpack(tail)):
        raise CorruptionError(f"format version {version} or bytes that should be zero are not", file=name)


def _parse(name: str, text: bytes, meta_offset: int) -> tuple[dict[str, Any], dict[str, tuple[int, int, int | None]]]:
    try:
        meta = json.loads(text)
        found = {n: (int(o), int(s), None if c is None else int(c)) for n, (o, s, c) in meta.pop("sections").items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise CorruptionError(f"the meta is not what a writer wrote: {e}", file=name) from e
    at = _HEAD.size
    for section, (offset, length, _) in found.items():
        if offset != at or length < 0:
            raise CorruptionError(f"section {section!r} is at {offset} of {length} bytes, not at {at}", file=name)
        at += length
    if at != meta_offset:
        raise CorruptionError(f"the sections end at {at}, the meta begins at {meta_offset}", file=name)
    return meta, found
