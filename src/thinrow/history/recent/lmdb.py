"""LmdbRecent: the tier in one LMDB environment on local disk (docs/format/recent-v2.md).

*Acknowledged* means: with ``sync=True`` (the default) the transaction is on disk (fdatasync) when a call returns, and
survives a killed process and a lost machine. With ``sync=False`` it survives a killed process; a power failure may
lose the newest calls, or the whole environment where the file system reorders writes.

Appends, trims and raises of counters are serialised by LMDB's writer lock, over threads and processes. Readers never
wait for them, nor they for readers, except for the moment in which a full map is made larger.

An erasure writes the environment anew, into a file of its own: LMDB's free pages, and the gaps in its live ones, keep
old bytes. The last transaction on the old file says that it has moved, so that every process that has it open goes over
to the new one before its next transaction, or, where the process that erased has died, writes it.

One process may open an environment *once*: LMDB's file locks are per process and closing one handle would drop those
of the other. A second open raises StoreError; share the first object, it is thread-safe. After ``os.fork`` the child
must open its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import lmdb
import numpy as np

from thinrow.core.errors import (
    CorruptionError,
    NewerFormatError,
    SchemaError,
    StoreError,
    ThinrowError,
    UserKindError,
)
from thinrow.core.units import EPOCH_BITS
from thinrow.history.recent.blocks import BlockTier
from thinrow.history.recent.evolution import check_evolution
from thinrow.history.recent.gate import Gate
from thinrow.history.recent.keys import AFTER_ALL, is_sealed, seal, unpack_pairs
from thinrow.history.recent.rows import FORMAT
from thinrow.history.recent.transactions import Pairs, Writing
from thinrow.schema import EventSchema
from thinrow.storage.objects import sync_directory

T = TypeVar("T")
#: Address space reserved at first; the file itself grows with the data, and the map when it is full.
MAP_BYTES = 1 << 30
_MAX_READERS = 512
_USERS_AT_ONCE = 65_536
_DATABASES = ("events", "users", "ids", "positions", "meta")
#: Key in ``meta`` of an environment that was written anew elsewhere, or is about to be.
_MOVED = b"moved"
_UNFINISHED = ".next-"
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.PanicError, lmdb.BadRslotError)

#: Number of this process: asking for it is a call of the system, and every snapshot would.
_process = os.getpid()


def _after_fork() -> None:
    global _process
    _process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

#: Environments that this process holds: (process, device, inode of the directory) -> tier.
_HELD: weakref.WeakValueDictionary[tuple[int, int, int], LmdbRecent] = weakref.WeakValueDictionary()
_HELD_LOCK = threading.Lock()


class LmdbRecent(BlockTier):
    """A RecentTier in the directory ``path``, made if it is not there."""

    _takes_ids_for_new = True

    def __init__(
        self,
        path: str | Path,
        schema: EventSchema,
        map_size: int = MAP_BYTES,
        sync: bool = True,
        floor: Callable[[], int] = lambda: 0,
    ) -> None:
        """Open ``path``.

        Args:
            path: a directory on a local disk (LMDB must not be on a network file system).
            schema: of the events; an older one may have been used before, as long as column ids keep their dtypes.
            map_size: bytes of address space at first; doubles whenever it is full.
            sync: whether a call returns only when its data is on disk.
            floor: called if the tier is new: no user's first event gets a number up to it (inclusive). A tier that
                takes the place of a lost one needs it.

        Raises:
            StoreError: this process has the environment open, or the directory holds something else.
            UserKindError, SchemaError: the tier holds ids of the other kind, or the schema contradicts a stored one.
            NewerFormatError: written by a newer thinrow.
            CorruptionError: the file is damaged.
        """
        super().__init__(schema, str(path))
        self._path = Path(path)
        self._translated = _Translated(str(path))
        self._pid = os.getpid()
        self._gate = Gate()
        self._writer = threading.RLock()
        self._schemas: dict[int, EventSchema] = {}
        self._env: Any = None
        self._sync, self._new_floor = sync, floor
        created = not self._path.exists()
        self._path.mkdir(parents=True, exist_ok=True)
        status = os.stat(self._path)
        self._identity = (self._pid, status.st_dev, status.st_ino)
        with _HELD_LOCK:
            if self._identity in _HELD:
                raise StoreError(
                    f"{path} is open in this process already; share that LmdbRecent (it is thread-safe) or close it"
                )
            _HELD[self._identity] = self
        try:
            with self._translated:
                self._open(map_size)
                if created and sync:
                    _sync_names(self._path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the environment; another one may be opened on ``path`` then."""
        with self._writer, self._gate.alone():
            if self._env is not None and self._pid == os.getpid():
                self._env.close()
            self._env = None
            with _HELD_LOCK:
                if _HELD.get(self._identity) is self:
                    del _HELD[self._identity]

    def copy(self, path: Path, still: Callable[[], bool]) -> bool:
        """Write the tier, as it is at one moment, to the new directory ``path``, durably; appends go on meanwhile.

        Args:
            still: asked just after the moment; where it says False nothing is written and False is returned.

        Raises:
            StoreError: the disk refuses.
        """
        with self._read() as view:
            if not still():
                return False
            path.mkdir(parents=True)
            into = path if self._number() == 0 else path / "data.mdb"
            self._live().copy(str(into), compact=True, txn=view.txn)
        descriptor = os.open(path / "data.mdb", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return True

    def begin_epoch(self, above: int, ahead: int = 1) -> int:
        """Count from a new epoch on, for all users, those not known yet included; returns its first number.

        A tier that was copied needs it: what its original gave out after the copy must not be given out again.

        Args:
            above: a number of the archive, or elsewhere, that the epoch must exceed too.
            ahead: by how many epochs: the original of a copy may have begun some since.
        """
        with self._read() as view:
            counters = [unpack_pairs([v], self._name, "the user counters")[0].max() for _, v in view.scan("users")]
        epoch = ((max([above, self._floor, *map(int, counters)]) >> EPOCH_BITS) + ahead) << EPOCH_BITS
        users = self.known_users()
        for part in (users[a : a + _USERS_AT_ONCE] for a in range(0, len(users), _USERS_AT_ONCE)):
            self.raise_counters(part, np.full(len(part), epoch, np.int64))
        self._write(lambda txn: txn.raise_floor(epoch))
        self._floor = epoch
        return epoch

    def _open(self, map_size: int) -> None:
        """Open the newest environment; what older ones left goes."""
        while True:
            newest = self._files()[-1]
            self._env = lmdb.open(
                str(self._path if newest == 0 else self._path / _file_name(newest)),
                subdir=newest == 0,
                map_size=map_size,
                max_dbs=8,
                max_readers=_MAX_READERS,
                sync=self._sync,
                metasync=self._sync,
            )
            # It may have been made anew, empty, in the moment after it moved.
            if self._files()[-1] == newest:
                break
            self._env.close()
        for number in self._files()[:-1]:
            names = ("data.mdb", "lock.mdb") if number == 0 else (_file_name(number), f"{_file_name(number)}-lock")
            for name in names:
                (self._path / name).unlink(missing_ok=True)
        # Slots of killed readers would keep dropped pages alive.
        self._env.reader_check()
        self._dbs = self._open_databases(self._new_floor)

    def _files(self) -> list[int]:
        """Numbers of the environments in the directory, ascending; 0 is LMDB's own name, there or to be made."""
        return [0, *sorted(int(f.stem) for f in self._path.glob("*.mdb") if f.stem.isdigit())]

    def _read(self) -> _Reading:
        return _Reading(self)

    def _begin_reading(self) -> Any:
        """A read transaction, of whoever is inside the gate."""
        txn, repair = self._begin()
        while txn is None:
            self._gate.leave()
            try:
                with self._writer:
                    repair()
            finally:
                self._gate.enter()
            txn, repair = self._begin()
        return txn

    def _begin(self) -> tuple[Any, Callable[[], None]]:
        """A read transaction; or None, and what is to be done where another process made the map larger or moved."""
        try:
            txn = self._live().begin()
        except lmdb.MapResizedError:
            return None, lambda: self._resize(0)
        if txn.get(_MOVED, None, self._dbs["meta"]) is not None:
            txn.abort()
            return None, self._move
        return txn, self._move

    def _write(self, work: Callable[[Writing], T]) -> T:
        try:
            with self._writer:
                while True:
                    try:
                        with self._live().begin(None, None, True) as txn:
                            if txn.get(_MOVED, None, self._dbs["meta"]) is None:
                                return work(_Transaction(txn, self._dbs))
                        self._move()
                    except lmdb.MapFullError:
                        self._resize(2 * self._live().info()["map_size"])
                    except lmdb.MapResizedError:
                        self._resize(0)
        except lmdb.Error as e:
            raise self._translated.of(e) from e

    def _resize(self, size: int) -> None:
        """Set the map's size (0: what another process made it) while no transaction of this process is alive."""
        with self._gate.alone():
            self._live().set_mapsize(size)

    def _rewrite(self, work: Callable[[Writing], None]) -> None:
        def work_and_mark(txn: Writing) -> None:
            work(txn)
            assert isinstance(txn, _Transaction)
            txn.mark_moved()

        self._write(work_and_mark)
        with self._translated, self._writer:
            self._move()

    def _move(self) -> None:
        """Write a marked environment anew, unless another process has, and go over to the new one."""
        with self._gate.alone():
            env = self._live()
            # Whoever has this environment open waits here for its turn, and then finds the new one.
            with env.begin(write=True) as txn:
                if txn.get(_MOVED, db=self._dbs["meta"]) is not None and self._successor() is None:
                    self._copy(txn)
            map_size = env.info()["map_size"]
            env.close()
            self._open(map_size)

    def _successor(self) -> int | None:
        newest = self._files()[-1]
        return newest if newest > self._number() else None

    def _number(self) -> int:
        name = Path(self._env.path()).name
        return int(name.removesuffix(".mdb")) if name.endswith(".mdb") else 0

    def _copy(self, txn: Any) -> None:
        """All pairs, into an environment of pages that nothing was in before."""
        for left in self._path.glob(f"{_UNFINISHED}*"):
            left.unlink(missing_ok=True)
        unfinished = self._path / f"{_UNFINISHED}{uuid.uuid4().hex}"
        size = self._env.info()["map_size"]
        new = lmdb.open(str(unfinished), subdir=False, map_size=size, max_dbs=8, max_readers=_MAX_READERS)
        try:
            with new.begin(write=True) as out:
                for name, db in self._dbs.items():
                    pairs = ((k, v) for k, v in txn.cursor(db).iternext() if name != "meta" or k != _MOVED)
                    out.cursor(new.open_db(name.encode(), txn=out)).putmulti(pairs, append=True)
            new.sync(True)
        finally:
            new.close()
        os.rename(unfinished, self._path / _file_name(self._number() + 1))
        Path(f"{unfinished}-lock").unlink(missing_ok=True)
        _sync_names(self._path)

    def _live(self) -> Any:
        if self._env is None:
            raise StoreError(f"the recent tier {self._path} is closed; open it again")
        if self._pid != _process:
            raise StoreError(f"the recent tier {self._path} was opened by process {self._pid}; open it after the fork")
        return self._env

    def _schema_of(self, schema_id: int) -> EventSchema | None:
        if schema_id not in self._schemas:
            with self._translated, self._gate.shared(), self._live().begin() as txn:
                self._load_schemas(txn, self._dbs["meta"])
        return self._schemas.get(schema_id)

    def _newest_schema(self) -> EventSchema:
        with self._translated, self._gate.shared(), self._live().begin() as txn:
            self._load_schemas(txn, self._dbs["meta"])
        return self._schemas[max(self._schemas)]

    def _learn(self, schema: EventSchema) -> None:
        def work(writing: Writing) -> None:
            txn, meta = cast(_Transaction, writing).txn, self._dbs["meta"]
            self._load_schemas(txn, meta)
            self._store_schema(txn, meta, schema)

        self._write(work)
        self._schema = self._schemas[max(self._schemas)]

    def _store_schema(self, txn: Any, meta: Any, schema: EventSchema) -> None:
        for stored in self._schemas.values():
            check_evolution(schema, stored)
        if schema.schema_id not in self._schemas:
            self._put_meta(txn, meta, f"schema:{schema.schema_id}", schema.to_json())
        self._schemas.setdefault(schema.schema_id, schema)

    def _open_databases(self, floor: Callable[[], int]) -> dict[str, Any]:
        """Check what is there, or begin a new tier."""
        with self._env.begin(write=True) as txn:
            fresh = txn.stat(self._env.open_db(txn=txn))["entries"] == 0
            if not fresh and txn.get(b"meta") is None:
                raise StoreError(
                    f"{self._path} is an LMDB environment, but not a recent tier; choose another directory"
                )
            dbs = {name: self._env.open_db(name.encode(), txn=txn) for name in _DATABASES}
            meta = dbs["meta"]
            if fresh:
                self._put_meta(txn, meta, "format", str(FORMAT))
                self._put_meta(txn, meta, "user_kind", self._schema.user_kind)
                self._put_meta(txn, meta, "floor", str(floor()))
            form = int(self._get_meta(txn, meta, "format"))
            if form > FORMAT:
                raise NewerFormatError(f"{self._path} has recent format {form}, newer than {FORMAT}; update thinrow")
            kind = self._get_meta(txn, meta, "user_kind")
            if kind != self._schema.user_kind:
                raise UserKindError(
                    f"{self._path} holds {kind} user ids, the schema says {self._schema.user_kind}; "
                    f"cast the column to {kind}"
                )
            self._floor = int(self._get_meta(txn, meta, "floor"))
            self._load_schemas(txn, meta)
            self._store_schema(txn, meta, self._schema)
            return dbs

    def _load_schemas(self, txn: Any, meta: Any) -> None:
        for key, value in txn.cursor(meta):
            if key.startswith(b"schema:"):
                try:
                    schema = EventSchema.from_dict(json.loads(self._unsealed(key, value)))
                except (ValueError, SchemaError) as e:
                    raise CorruptionError(f"{key.decode()} is not a schema: {e}", file=self._name) from e
                self._schemas[schema.schema_id] = schema

    def _put_meta(self, txn: Any, meta: Any, name: str, text: str) -> None:
        txn.put(name.encode(), seal(name.encode(), text.encode()), db=meta)

    def _get_meta(self, txn: Any, meta: Any, name: str) -> str:
        return self._unsealed(name.encode(), txn.get(name.encode(), b"", db=meta))

    def _unsealed(self, key: bytes, value: bytes) -> str:
        if not is_sealed(key, value):
            raise CorruptionError(f"{key.decode()} fails its CRC or is missing", file=self._name)
        return value[:-4].decode()


class _Reading:
    """A read transaction of a tier, as a context: one class, because every snapshot opens one."""

    def __init__(self, tier: LmdbRecent) -> None:
        self._tier = tier
        self._txn: Any = None

    def __enter__(self) -> _Transaction:
        tier = self._tier
        tier._gate.enter()
        try:
            self._txn = tier._begin_reading()
        except BaseException as e:
            self._leave()
            if isinstance(e, lmdb.Error):
                raise tier._translated.of(e) from e
            raise
        return _Transaction(self._txn, tier._dbs)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave()
        if isinstance(error, lmdb.Error):
            raise self._tier._translated.of(error) from error

    def _leave(self) -> None:
        try:
            if self._txn is not None:
                self._txn.abort()
        finally:
            self._tier._gate.leave()


class _Transaction:
    """``Reading`` and ``Writing`` over one LMDB transaction. All that it returns is copied."""

    _cursor: Any = None

    def __init__(self, txn: Any, dbs: dict[str, Any]) -> None:
        self.txn, self._dbs = txn, dbs

    @property
    def _events(self) -> Any:
        if self._cursor is None:
            self._cursor = self.txn.cursor(self._dbs["events"])
        return self._cursor

    def pairs(self, name: Pairs, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        if len(keys) == 1:
            value = self.txn.get(keys[0], None, self._dbs[name])
            return {} if value is None else {keys[0]: value}
        found: dict[bytes, bytes] = dict(self.txn.cursor(self._dbs[name]).getmulti(keys))
        return found

    def blocks(self, user_key: bytes, after: int, into_keys: list[bytes], into_values: list[bytes]) -> int:
        cursor, first = self._events, user_key + (after + 1).to_bytes(8, "big")
        found = cursor.set_range(first)
        if not found or cursor.key() != first:
            # The block before may reach beyond `after`.
            before = cursor.prev() if found else cursor.last()
            if not before:
                cursor.first()
            elif not _is_of(cursor.key(), user_key):
                cursor.next()
        n = len(into_keys)
        for key, value in cursor.iternext():
            if not _is_of(key, user_key):
                break
            into_keys.append(key)
            into_values.append(value)
        return len(into_keys) - n

    def held(self, user_key: bytes, into: list[bytes]) -> None:
        cursor = self._events
        if cursor.set_range(user_key):
            for item in cursor.iternext():
                if not _is_of(item[0], user_key):
                    break
                into += item

    def fetch(
        self,
        users: Sequence[bytes],
        ids: Sequence[bytes] = (),
        *,
        blocks: bool = False,
        through: Sequence[int] = (),
        new: bool = False,
    ) -> None:
        pass

    def holders(self) -> list[bytes]:
        found: list[bytes] = []
        more = self._events.first()
        while more:
            found.append(self._events.key()[:-8])
            more = self._events.set_range(found[-1] + AFTER_ALL)
        return found

    def scan(self, name: Pairs, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        cursor = self.txn.cursor(self._dbs[name])
        if prefix and not cursor.set_range(prefix):
            return
        for key, value in cursor.iternext():
            if not key.startswith(prefix):
                return
            yield key, value

    def add_pairs(self, name: Pairs, items: Sequence[tuple[bytes, bytes]]) -> bool:
        return bool(self.txn.cursor(self._dbs[name]).putmulti(items, overwrite=False)[1] == len(items))

    def put_blocks(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        self.put_pairs("events", items)

    def put_pairs(self, name: str, items: Iterable[tuple[bytes, bytes]]) -> None:
        listed = items if isinstance(items, list) else list(items)
        if len(listed) == 1:
            key, value = listed[0]
            self.txn.put(key, value, True, True, False, self._dbs[name])
        else:
            self.txn.cursor(self._dbs[name]).putmulti(listed)

    def pop_blocks(self, user_key: bytes, through: int) -> tuple[bytes, bytes] | None:
        found, last = None, user_key + through.to_bytes(8, "big")
        more = self._events.set_range(user_key)
        while more and self._events.key() <= last:
            found = self._events.item()
            more = self._events.delete() and bool(self._events.key())
        return found

    def drop_pairs(self, name: Pairs, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.txn.delete(key, db=self._dbs[name])

    def raise_floor(self, at_least: int) -> None:
        self.txn.put(b"floor", seal(b"floor", str(at_least).encode()), db=self._dbs["meta"])

    def mark_moved(self) -> None:
        self.txn.put(_MOVED, seal(_MOVED, b""), db=self._dbs["meta"])


class _Translated:
    """Turns errors of LMDB into ours. One serves all calls of a tier: it holds nothing of them."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lmdb.Error):
            raise self.of(error) from error

    def of(self, error: lmdb.Error) -> ThinrowError:
        """The error to raise."""
        if isinstance(error, _DAMAGE):
            return CorruptionError(f"LMDB: {error}", file=self._path)
        return StoreError(f"LMDB failed on {self._path}: {error}; check free disk space and permissions")


def _file_name(number: int) -> str:
    """The file of the environment that was written anew ``number`` times, 1 or more."""
    return f"{number:04d}.mdb"


def _is_of(event_key: bytes, user_key: bytes) -> bool:
    return event_key.startswith(user_key)


def _sync_names(path: Path) -> None:
    """Make the new names in a directory, and its own, durable. Raises StoreError."""
    for directory in (path, path.parent):
        # One that may not be read cannot be synced.
        with contextlib.suppress(PermissionError):
            sync_directory(directory)
