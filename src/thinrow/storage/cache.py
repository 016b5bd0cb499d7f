"""A cache of blocks on local disk before a distant object store; shared by threads, processes and restarts.

Worked example, blocks of 64 KiB: a read of bytes 100,000 to 140,000 of an object touches blocks 1 and 2. Neither is
cached: both are fetched by one request, stored as files of their own and counted as 2 misses. The same read again is
2 hits and no request.

::

    folder/
      <name's hash>/<block>     a head of 40 bytes with CRCs, then the bytes of the block
      <name's hash>/size        the same without bytes
      purged/<name's hash>      whose blocks must not come back
      lock                      shared by writers, exclusive to purges and evictions

A block is checked when it is read: a damaged one is fetched again, never served. The operating system keeps hot blocks
in memory. Only objects that never change are cached.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from thinrow.core.errors import InputError, StoreError
from thinrow.core.ragged import ranges_index
from thinrow.kernels import kernel
from thinrow.storage.meter import count
from thinrow.storage.objects import (
    I64,
    U8,
    Entries,
    ObjectStore,
    Writer,
    by_object,
    check_name,
    each,
    is_there,
    read_one,
)
from thinrow.storage.ranges import check_ranges, plan_requests

DEFAULT_CACHE_BYTES = 1 << 30
BLOCK_BYTES = 1 << 16
#: Blocks that one read holds in memory at once.
_STAGED_BYTES = 32 << 20
#: Magic, CRC of the rest of the head and the name's hash, CRC of the bytes, bytes, block number, size of the object.
_HEAD = struct.Struct("<8sIIIxxxxQQ")
_MAGIC = b"TRBLOCK\1"
_SIZE = (1 << 64) - 1
#: A gap that joins no two ranges, however much they overlap.
_APART = -(1 << 62)
#: A process looks at the whole folder after adding this share of the bound; so far may several together exceed it.
_SCAN_SHARE = 0.05
#: Blocks fetched longer ago are not stored, and marks of purged objects are kept twice as long.
_STALE_S = 1800.0


class CachedObjects:
    """An ``ObjectStore`` that keeps what is read of another one's immutable objects.

    Many processes may share a folder. Its size stays at most ``max_bytes``, and for each further process that fills it
    at the same moment 5% more; blocks that were not read for longest go first.
    """

    def __init__(
        self,
        objects: ObjectStore,
        folder: str | Path,
        immutable: tuple[str, ...],
        *,
        max_bytes: int = DEFAULT_CACHE_BYTES,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Args:
        objects: where objects are fetched from, and everything is written to.
        folder: on a local disk, made if absent; of this cache alone.
        immutable: prefixes of the names of objects that never change once they are there; only these are cached.
        max_bytes: of all files in ``folder``.
        block_bytes: of one block; a folder holds blocks of one size.

        Raises:
            InputError: a size is not positive, or the folder has blocks of another size.
            StoreError: the folder cannot be made.
        """
        if block_bytes < 1 or max_bytes < block_bytes:
            raise InputError(f"max_bytes={max_bytes} of blocks of {block_bytes}; allow at least one block of 1 byte")
        self._objects, self._immutable = objects, immutable
        self.folder, self.max_bytes, self.block_bytes = Path(folder), max_bytes, block_bytes
        try:
            (self.folder / "purged").mkdir(parents=True, exist_ok=True)
            with self._locked(fcntl.LOCK_EX):
                self._require_block_size()
        except OSError as e:
            raise StoreError(f"no cache at {folder}: {e.strerror}; choose another folder or free space") from e
        self._added = max_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """The same folder before the same store, both opened anew."""
        arguments = self._objects, self.folder, self._immutable
        return partial(CachedObjects, max_bytes=self.max_bytes, block_bytes=self.block_bytes), arguments

    @property
    def concurrency(self) -> int:
        return self._objects.concurrency

    def put_if_absent(self, name: str, data: bytes) -> None:
        self._objects.put_if_absent(name, data)

    def put(self, name: str, data: bytes) -> None:
        self._objects.put(name, data)
        self.forget(name)

    def get(self, name: str) -> bytes:
        return self._objects.get(name)

    def size(self, name: str) -> int:
        if not self._cacheable(check_name(name)):
            return self._objects.size(name)
        key, since = _key(name), time.time()
        found = self._load(key, _SIZE, 0, None)
        if found is None:
            found = self._objects.size(name)
            self._store(key, {_SIZE: np.empty(0, np.uint8)}, found, since)
        return found

    def has(self, name: str) -> bool:
        return is_there(self, name)

    def list(self, prefix: str, after: str = "") -> list[str]:
        return self._objects.list(prefix, after)

    def entries(self, prefix: str) -> Entries:
        return self._objects.entries(prefix)

    def sweep(self, before_ms: int) -> int:
        return self._objects.sweep(before_ms)

    def mapped(self, names: Sequence[str]) -> tuple[U8, ...] | None:
        return None

    def delete(self, name: str) -> None:
        self._objects.delete(name)
        self.purge([name])

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        with self._objects.create(name) as writer:
            yield writer
        self.forget(name)

    def forget(self, name: str) -> None:
        """Drop what is cached of an object; it may be cached again."""
        with self._locked(fcntl.LOCK_EX):
            shutil.rmtree(self.folder / _key(name), ignore_errors=True)

    def purge(self, names: Iterable[str]) -> None:
        """Drop what is cached of objects, in all processes, for good: what is being fetched now is not stored either.

        Delete an object from its store first; while it is there, it is read past the cache.

        Raises:
            StoreError: a cached byte may be left.
        """
        with self._locked(fcntl.LOCK_EX):
            for name in names:
                try:
                    (self.folder / "purged" / _key(name)).touch()
                    with suppress(FileNotFoundError):
                        shutil.rmtree(self.folder / _key(name))
                except OSError as e:
                    raise StoreError(
                        f"cannot purge {name} from the cache {self.folder}: {e.strerror}; delete the folder"
                    ) from e

    def cached_bytes(self) -> int:
        """Bytes of all files of the cache."""
        return sum(size for _, size, _ in self._files())

    read_into = read_one

    def read_many(
        self,
        names: Sequence[str],
        which: I64,
        offsets: I64,
        lengths: I64,
        out: U8,
        out_offsets: I64,
        gap: int | None = None,
    ) -> None:
        asked = list(by_object(names, which))
        cached = np.array([self._cacheable(check_name(n)) for n in names], np.bool_)
        past = np.flatnonzero(~cached[which])
        if len(past):
            self._objects.read_many(names, which[past], offsets[past], lengths[past], out, out_offsets[past], gap)
            if len(past) == len(which):
                return
        used = [(name, mine) for name, mine in asked if cached[which[mine[0]]]]
        sizes = np.zeros(len(names), np.int64)
        for (name, mine), size in zip(used, each(self, self.size, [n for n, _ in used]), strict=True):
            check_ranges(name, size, offsets[mine], lengths[mine], out, out_offsets[mine])
            sizes[which[mine[0]]] = size
        mine = np.flatnonzero(cached[which])
        # In order, long ones cut, none joined: its blocks are what is fetched.
        plan = plan_requests(which[mine], offsets[mine], lengths[mine], out_offsets[mine], _APART, _STAGED_BYTES)
        first, last = plan.start // self.block_bytes, (plan.stop - 1) // self.block_bytes
        staged = np.cumsum(last - first + 1) * self.block_bytes // _STAGED_BYTES
        for part in np.split(np.arange(len(first)), np.flatnonzero(np.diff(staged)) + 1):
            if len(part):
                buffer, places = self._staged(names, sizes, plan.which[part], first[part], last[part], gap)
                places += plan.start[part] - first[part] * self.block_bytes
                bad = kernel("copy_ranges")(buffer, places, plan.lengths[part], out, plan.out_offsets[part])
                assert bad < 0, "ranges were checked"

    def _staged(
        self, names: Sequence[str], sizes: I64, which: I64, first: I64, last: I64, gap: int | None
    ) -> tuple[U8, I64]:
        """All blocks that some ranges touch, neighbours side by side; and where each range's first block is."""
        block, spans = ranges_index(first, last + 1)
        n_blocks = int(last.max()) + 1
        distinct, slot = np.unique(np.repeat(which, np.diff(spans)) * n_blocks + block, return_inverse=True)
        owner, block = np.divmod(distinct, n_blocks)
        length = np.minimum(sizes[owner] - block * self.block_bytes, self.block_bytes)
        place = np.arange(len(block)) * self.block_bytes
        buffer = np.empty(len(block) * self.block_bytes, np.uint8)
        keys = {w: _key(names[w]) for w in np.unique(owner).tolist()}
        missing = []
        rows = zip(owner.tolist(), block.tolist(), place.tolist(), length.tolist(), strict=True)
        for i, (w, b, p, n) in enumerate(rows):
            if self._load(keys[w], b, n, buffer[p : p + n]) != sizes[w]:
                missing.append(i)
        count(cache_hits=len(block) - len(missing), cache_misses=len(missing))
        if missing:
            m, since = np.array(missing, np.int64), time.time()
            self._objects.read_many(names, owner[m], block[m] * self.block_bytes, length[m], buffer, place[m], gap)
            for w in np.unique(owner[m]).tolist():
                fresh = {int(block[i]): buffer[place[i] : place[i] + length[i]] for i in m[owner[m] == w]}
                self._store(keys[w], fresh, int(sizes[w]), since)
        return buffer, place[slot[spans[:-1]]]

    def _cacheable(self, name: str) -> bool:
        return name.startswith(self._immutable) and not os.path.exists(self.folder / "purged" / _key(name))

    def _load(self, key: str, block: int, length: int, into: U8 | None) -> int | None:
        """Read a block; the size of its object, or None where it is not cached, or not whole."""
        path = f"{self.folder}/{key}/{_file(block)}"
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            head = bytearray(_HEAD.size)
            done = os.readv(file, [head] if into is None else [head, into.data])
            os.utime(file)
        except OSError:
            return None
        finally:
            os.close(file)
        if done == _HEAD.size + length:
            magic, crc, data_crc, n, number, size = _HEAD.unpack(head)
            if (
                (magic, n, number) == (_MAGIC, length, block)
                and crc == _head_crc(key, head)
                and (into is None or int(kernel("crc32c")(into, 0)) == data_crc)
            ):
                return int(size)
        with suppress(OSError):
            os.unlink(path)
        return None

    def _store(self, key: str, blocks: dict[int, U8], size: int, since: float) -> None:
        """Keep blocks fetched at ``since``. A disk that refuses costs the caching, not the read."""
        with suppress(OSError), self._locked(fcntl.LOCK_SH):
            purged = os.path.exists(self.folder / "purged" / key)
            if purged or not 0 <= time.time() - since < _STALE_S:
                return
            os.makedirs(self.folder / key, exist_ok=True)
            for block, data in blocks.items():
                self._write(f"{self.folder}/{key}", key, block, data, size)
                self._added += _HEAD.size + len(data)
        if self._added > self.max_bytes * _SCAN_SHARE:
            with suppress(OSError):
                self._evict()

    def _write(self, folder: str, key: str, block: int, data: U8, size: int) -> None:
        data_crc = int(kernel("crc32c")(data, 0)) if len(data) else 0
        head = bytearray(_HEAD.pack(_MAGIC, 0, data_crc, len(data), block, size))
        struct.pack_into("<I", head, 8, _head_crc(key, head))
        temporary = f"{folder}/.tmp-{uuid.uuid4().hex}"
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.writev(file, [head, data.data])
            finally:
                os.close(file)
            os.replace(temporary, f"{folder}/{_file(block)}")
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def _evict(self) -> None:
        """Delete the blocks that were not read for longest, until the folder is within its bound."""
        with self._locked(fcntl.LOCK_EX):
            self._added = 0
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total <= self.max_bytes * (1 - _SCAN_SHARE):
                    break
                os.unlink(path)
                total -= size
            for mark in os.scandir(self.folder / "purged"):
                if time.time() - mark.stat().st_mtime > 2 * _STALE_S:
                    os.unlink(mark.path)

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """(last read in ns, bytes, path) of every file of a block."""
        for folder in os.scandir(self.folder):
            if folder.is_dir() and folder.name != "purged":
                for file in os.scandir(folder.path):
                    with suppress(FileNotFoundError):
                        status = file.stat()
                        yield status.st_mtime_ns, status.st_size, file.path

    def _require_block_size(self) -> None:
        path = self.folder / "block_bytes"
        if path.exists():
            held = path.read_text()
            if held != str(self.block_bytes):
                raise InputError(
                    f"the cache {self.folder} has blocks of {held} bytes, not {self.block_bytes}; choose another folder"
                )
        else:
            part = path.with_name(f"block_bytes-{uuid.uuid4().hex}")
            part.write_text(str(self.block_bytes))
            part.replace(path)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, how)
            yield
        finally:
            os.close(file)


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:40]


def _file(block: int) -> str:
    return "size" if block == _SIZE else str(block)


def _head_crc(key: str, head: bytearray) -> int:
    """Of the head but its magic and this CRC, and of whose block it is: one moved elsewhere is no other's."""
    return zlib.crc32(key.encode(), zlib.crc32(head[12:]))
