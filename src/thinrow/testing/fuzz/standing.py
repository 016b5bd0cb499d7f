"""Sound stores that stay open while one file of them after another is damaged where it lies, read, and mended.

To open a store takes longer than to read a little of it. Of the index in a mapped file the reader trusts what it has
checked once; so what it knows of a damaged place is forgotten before the next read, and no more than that.

Worked example: a block of the second stripe becomes one of codec 7. The CRC of the block is made anew in the header,
that of the header in the stripe record, that of its page in the opened table; nothing needs to be opened again. One
user whose events are in that stripe is read in that column. Then the bytes are copied back.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.clock import system_clock
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.layout import SegmentInfo, stored_columns
from thinrow.history.archive.segment import Segment
from thinrow.history.archive.tables import KnownTables
from thinrow.storage.objects import MemoryObjects
from thinrow.storage.pages import PagedTable
from thinrow.testing.fuzz.damage import CHANGES, Change, copied, layout_of, meta_changed, pick, resized, scribble
from thinrow.testing.fuzz.guard import guarded
from thinrow.testing.fuzz.layout import close
from thinrow.testing.fuzz.world import Files, World

U8 = npt.NDArray[np.uint8]

#: Parts of a file: chunks of blocks, the CRCs of their headers in pages of records, what else is in pages, the CRCs of
#: pages, and what is read when the file is opened.
_CHUNKS, _LINKS, _PAGES, _CRCS, _REST = range(5)
#: What a directory has of a page, by the kind of keys, and where its CRC is in that.
_ROW_BYTES, _CRC_AT = {None: 24, "int64": 32, "string": 40}, 12


class GuardedObjects(MemoryObjects):
    """Objects between forbidden pages, each always in the same place; they can be mapped, or not, as a store over a
    network has it."""

    def __init__(self, files: Files, maps: bool) -> None:
        super().__init__()
        self.maps = maps
        self.areas: dict[str, U8] = {}
        for name, data in files.items():
            self.put(name, data)

    def _store(self, name: str, data: bytes) -> None:
        super()._store(name, b"")
        area = guarded(len(data))
        area[:] = np.frombuffer(data, np.uint8)
        self.areas[name] = area

    def get(self, name: str) -> bytes:
        """The bytes as they are now."""
        super().get(name)
        return self.areas[name].tobytes()

    def size(self, name: str) -> int:
        """Of the bytes as they are now."""
        super().get(name)
        return len(self.areas[name])

    def mapped(self, names: Sequence[str]) -> tuple[U8, ...] | None:
        """(n,) the objects themselves."""
        for name in names:
            super().get(name)
        return tuple(self.areas[name] for name in names) if self.maps else None


@dataclass(frozen=True)
class Hit:
    """What was damaged.

    Attributes:
        what: the damage in words.
        sealed: whether CRCs were made anew.
        same: whether the bytes are, by chance, the sound ones.
        users: positions of the users who have events there.
        column: whose values are there; None where it is not a column's.
    """

    what: str
    sealed: bool
    same: bool
    users: tuple[int, ...]
    column: str | None


class _File:
    """One file of a store: its parts, and who and what is in them."""

    def __init__(self, world: World, name: str, segment: Segment, tables: dict[str, PagedTable]) -> None:
        self.sound, self.tables = np.frombuffer(world.files[name], np.uint8), tables
        layout = self.layout = layout_of(world.files[name])
        self.meta = json.dumps(layout.meta)
        self.part = np.full(len(self.sound), _REST, np.uint8)
        self.crcs = {}
        for section, table in tables.items():
            at = layout.meta["sections"][f"{section}.directory"][0] + 16
            places = at + np.arange(table.n_pages) * _ROW_BYTES[table.key_kind] + _CRC_AT
            self.crcs[section] = places[:, None] + np.arange(4)
            self.part[self.crcs[section]] = _CRCS
            for offset, length in zip(table.offset.tolist(), table.length.tolist(), strict=True):
                self.part[offset : offset + length] = _PAGES
        for crc in layout.crcs:
            if self.part[crc.at] == _PAGES:
                self.part[crc.at : crc.at + 4] = _LINKS
        owners: dict[int, list[int]] = {}
        for _, records, keys in segment.pieces.scan():
            for stripe, key in zip(records["stripe"].tolist(), () if keys is None else keys.tolist(), strict=True):
                owners.setdefault(stripe, []).append(int(np.searchsorted(world.users, key)))
        marks = []
        for block in layout.blocks:
            users = tuple(sorted(set(owners.get(block.stripe, ()))))
            marks += [(block.entry, users, block.stream), (block.start, users, block.stream)]
            self.part[block.entry : block.entry + 12] = _CHUNKS
            self.part[block.start : block.stop] = _CHUNKS
        self._marks = sorted(marks)
        self._starts = [m[0] for m in self._marks]
        everybody = tuple(range(len(world.users)))
        self._anywhere = everybody, None

    def around(self, at: int) -> tuple[tuple[int, ...], str | None]:
        """Users and column of what is at byte ``at``."""
        if self.part[at] != _CHUNKS:
            return self._anywhere
        _, users, stream = self._marks[bisect.bisect_right(self._starts, at) - 1]
        return users, stream


class Standing:
    """A store that stands open.

    Attributes:
        world: what it is.
        generation: its newest one.
    """

    def __init__(self, worlds: Sequence[World], world: World, maps: bool) -> None:
        """``worlds`` are those that bytes of others may come from; ``maps``: whether the files can be mapped."""
        self.world, self._worlds = world, worlds
        self._objects = GuardedObjects(world.files, maps)
        self._archive = Archive(self._objects, system_clock)
        self.generation = self._archive.pin()
        self._segments = list(self.generation.segments)
        self.columns = {c.name: c for c in stored_columns(self.generation.schema)}
        self._files: dict[str, _File] = {}
        for number, (_, info) in enumerate(self._segments):
            segment = self.generation.segment(number)
            self._files[info.name] = _File(
                world, info.name, segment, {"pieces": segment.pieces, "stripes": segment.stripes}
            )
            for o in info.overlays:
                overlay = self.generation.overlay(number, o.column)
                assert overlay is not None
                self._files[o.name] = _File(world, o.name, segment, {"stripes": overlay.stripes})
        self._names = list(self._files)
        self._opened, self._overlays = dict(self._archive._open), dict(self._archive._overlays)
        self._areas = dict(self._objects.areas)
        self._stale = False
        self._largest = max(self._names, key=lambda n: len(world.files[n]))

    @contextmanager
    def damaged(self, rng: np.random.Generator) -> Iterator[Hit]:
        """Damage one file; it is sound again afterwards."""
        name = self._largest if rng.random() < 0.35 else pick(rng, self._names)
        try:
            share = rng.random()
            if share < 0.03:
                yield self._resized(rng, name)
            elif share < 0.33:
                yield self._raw(rng, name)
            else:
                yield self._sealed(rng, name)
        finally:
            self._restore(name)

    def _raw(self, rng: np.random.Generator, name: str) -> Hit:
        file, area = self._files[name], self._objects.areas[name]
        what = scribble(rng, area.data, file.layout)
        dirty = np.flatnonzero(area != file.sound)
        if len(dirty) and file.part[dirty].max() > _CHUNKS:
            self._forget(name if file.part[dirty].max() > _PAGES else None)
        return self._hit(name, f"raw {name}: {what}", False, dirty)

    def _resized(self, rng: np.random.Generator, name: str) -> Hit:
        data, what = resized(rng, self._worlds, self.world.files[name])
        self._lay(name, data)
        return Hit(f"raw {name}: {what}", False, data == self.world.files[name], self._files[name].around(-1)[0], None)

    def _sealed(self, rng: np.random.Generator, name: str) -> Hit:
        file, area = self._files[name], self._objects.areas[name]
        changes: list[Change] = [pick(rng, CHANGES) for _ in range(1 + int(rng.random() < 0.3))]
        meta: dict[str, Any] = json.loads(file.meta) if meta_changed in changes else file.layout.meta
        body = area.data[: file.layout.body]
        what = "; ".join(change(self._worlds, body, meta, file.layout, rng) for change in changes)
        dirty = np.flatnonzero(area != file.sound)
        hit = self._hit(name, f"sealed {name}: {what}", True, dirty)
        inside = not len(dirty) or file.part[dirty].max() <= _CRCS
        if inside and meta is file.layout.meta:
            for section, table in file.tables.items():
                table.crc[:] = area[file.crcs[section]].view("<u4")[:, 0]
            # Pages that were fetched are kept as they were then, with the CRCs of headers in them.
            if (file.part[dirty] == _PAGES).any() or not self._objects.maps:
                self._forget(None)
            return hit
        meta = copied(meta)
        data = close(bytearray(body), meta)
        self._lay(name, data, meta, bool(rng.random() < 0.5))
        return Hit(hit.what, True, data == self.world.files[name], hit.users, hit.column)

    @contextmanager
    def the_other_way(self) -> Iterator[Generation]:
        """While this lasts the same bytes are read as if over a network, or mapped where they were fetched before."""
        objects = self._objects
        self._forget(None)
        objects.maps = not objects.maps
        try:
            yield self.generation
        finally:
            objects.maps = not objects.maps
            self._forget(None)

    def _hit(self, name: str, what: str, sealed: bool, dirty: npt.NDArray[np.intp]) -> Hit:
        users, column = self._files[name].around(int(dirty[0]) if len(dirty) else -1)
        return Hit(what, sealed, not len(dirty), users, column)

    def _lay(self, name: str, data: bytes | None, meta: dict[str, Any] | None = None, told: bool = False) -> None:
        """Other bytes in place of a file; with ``meta`` under a manifest that names their size, and, where ``told``,
        their counts and digests too."""
        self._forget(name)
        if data is None:
            self._objects.delete(name)
            return
        self._objects.put(name, data)
        if meta is None:
            return
        for number, (bucket, info) in enumerate(self._segments):
            if name in info.files:
                entry = info.to_dict()
                for part in (entry, *entry.get("overlays", ())):
                    if part["name"] == name:
                        keys = [k for k in ("n_rows", "n_users", "digests", "digest") if k in part and k in meta]
                        part.update({k: meta[k] for k in keys if told}, bytes=len(data))
                # No manifest can name what is no number; that those are refused is tried with whole stores.
                with suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
                    self.generation.segments[number] = bucket, SegmentInfo.from_dict(entry)

    def _forget(self, name: str | None) -> None:
        """What was read of indexes is forgotten; with ``name`` that this file was opened, too."""
        generation, archive = self.generation, self._archive
        self._stale = True
        generation._sets.clear()
        # Those say of pages that they were checked, and where dictionaries are, which may have been read damaged.
        generation.tables = KnownTables()
        archive._pages._pages.clear()
        archive._pages.used_bytes = 0
        if name is not None:
            generation._dictionaries.clear()
            archive._overlays.clear()
            archive._open.pop(name, None)

    def _restore(self, name: str) -> None:
        file, objects = self._files[name], self._objects
        area = self._areas[name]
        area[:] = file.sound
        if self._stale:
            self._forget(None)
            self._stale = False
        if objects.areas.get(name) is not area or name not in self._archive._open or name.endswith(".ovl"):
            self._forget(name)
            objects.put(name, b"")
            objects.areas[name] = area
            self._archive._open = dict(self._opened)
            self._archive._overlays = dict(self._overlays)
            self.generation.segments[:] = self._segments
        for section, table in file.tables.items():
            table.crc[:] = file.sound[file.crcs[section]].view("<u4")[:, 0]
