"""RedisRecent: the tier on a Redis server, for many machines that append for one store (docs/recent-tier.md).

*Acknowledged* means what the location says: with ``durability=always`` a call is on the server's disk when it returns;
with ``everysec`` (the default) it survives a killed client, and a server that dies may lose the last two seconds; with
``replicas=N`` that many replicas have it too. What the server is set to is checked at open.

Users are atomic each, calls are not (``atomic_over_users``). Numbers are never given twice: whenever the server is not
the one that gave the last numbers (restarted, failed over, emptied), a new epoch begins before the next one is given.

Worked example, two users, one call: two round trips. The first reads the records and ids of both and how the server is;
the second runs one script for each, which writes blocks, ids and record if the record is still the same.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import (
    CorruptionError,
    NewerFormatError,
    SchemaError,
    StoreError,
    StoreExists,
    ThinrowError,
    Unacknowledged,
    UserKindError,
)
from thinrow.core.users import Users, as_users
from thinrow.history.recent.blocks import BlockTier, held_bytes
from thinrow.history.recent.evolution import check_evolution
from thinrow.history.recent.keys import PAIR_DTYPE, is_sealed, seal, user_keys, users_of_keys
from thinrow.history.recent.redis_guess import Remembered, Standing
from thinrow.history.recent.redis_link import REPLICATION, Patience, RedisLink, RedisLocation, pack, reign_of
from thinrow.history.recent.redis_scripts import BEGIN, RAISE, SCRIPTS, call_of
from thinrow.history.recent.redis_stored import parts_on_server
from thinrow.history.recent.redis_transaction import Moved, RedisKeys, RedisTransaction, TooFewReplicas, Torn
from thinrow.history.recent.rows import FORMAT
from thinrow.history.recent.stored import Stored
from thinrow.history.recent.tier import Advance, AppendResult, Resolve
from thinrow.history.recent.transactions import Reading, Writing
from thinrow.jagged import Column
from thinrow.schema import EventSchema

T = TypeVar("T")
#: Gives the number above which a new epoch counts: the argument or more, and never one that it gave before.
Claim = Callable[[int], int]
#: Rewriting what the server keeps on disk may take this long.
_REWRITE_S = 3_600.0
#: Field of a tier that a restore fills, or has filled: the restore's name.
_RESTORING, _RESTORED = b"restoring", b"restored"
_BUSY = ("rdb_bgsave_in_progress", "aof_rewrite_in_progress", "aof_rewrite_scheduled")


class RedisRecent(BlockTier):
    """A RecentTier on the server at ``location``. Any number of processes may open it at once."""

    def __init__(
        self,
        location: RedisLocation | str,
        schema: EventSchema,
        claim: Claim,
        *,
        new: bool = False,
        restoring: bytes = b"",
    ) -> None:
        """Open it, or begin a new one.

        Args:
            location: or its URL; it must name the store.
            schema: of the events; an older one may have been used before, as long as column ids keep their dtypes.
            claim: called where numbers must begin in a new epoch: for a new tier, one that was lost, and a server that
                may have lost the last numbers.
            new: refuse a tier that is there.
            restoring: name of a restore that is about to ``fill`` a new tier, which is open to nobody else until
                ``restored``; what a killed run of this restore left is removed.

        Raises:
            StoreError: the server does not answer, or is not set to what the location says; or a restore is filling it.
            StoreExists: ``new``, and it is there.
            UserKindError, SchemaError: the tier holds ids of the other kind, or the schema contradicts a stored one.
            NewerFormatError: written by a newer thinrow.
            MissingExtraError: redis-py is not installed.
        """
        location = RedisLocation.parse(location) if isinstance(location, str) else location
        if not location.name:
            raise StoreError(f"{location} names no store; add ?name=NAME")
        super().__init__(schema, location.tier)
        self.location = location
        self._claim, self._restoring = claim, restoring
        self._link: RedisLink | None = RedisLink(location, SCRIPTS)
        self._keys = RedisKeys(location.name, schema.user_kind)
        self._schemas: dict[int, EventSchema] = {schema.schema_id: schema}
        self._reigns: set[str] = set()
        self._lock = threading.RLock()
        try:
            self.remembered = Remembered(not check_server(self._link))
            asked = pack(b"HMGET", self._keys.meta, b"tier", _RESTORING, _RESTORED)
            meta, info = self._link.read([asked, REPLICATION])
            if restoring and restoring in meta[1:]:
                self._wipe()
                meta = [None]
            if (new or restoring) and meta[0] is not None:
                raise StoreExists(
                    f"{location} holds events of a store already; open that, or choose another name, or delete its keys"
                )
            if meta[0] is None:
                self._begin(reign_of(info))
            self._learn(schema)
        except BaseException:
            self.close()
            raise

    @property
    def atomic_over_users(self) -> bool:
        """Users may be on different servers of a cluster: see ``RecentTier.atomic_over_users``."""
        return False

    def close(self) -> None:
        """Close all connections; what is there stays."""
        if self._link is not None:
            self._link.close()
        self._link = None

    def destroy(self) -> None:
        """Delete all keys of the store, and close."""
        self._wipe()
        self.close()

    def _wipe(self) -> None:
        link = self._live()
        txn = RedisTransaction(link, self._keys, self)
        for some in txn.everything():
            link.read([pack(b"DEL", key) for key in some])

    def restored(self) -> None:
        """Open the tier to everybody, after a restore has filled it."""
        name = self._restoring
        self._live().read([pack(b"HSET", self._keys.meta, _RESTORED, name), pack(b"HDEL", self._keys.meta, _RESTORING)])

    def stored(self) -> Iterator[Stored]:
        """See ``BlockTier.stored``: each user as of a moment of its own; no position is beyond the events.

        Raises:
            StoreError: the server does not answer, or was emptied meanwhile.
        """
        with self._one_life("copied of it is not whole: append again what was lost, then copy"):
            txn = RedisTransaction(self._live(), self._keys, self)
            yield from parts_on_server(self._live(), self._keys, txn, self._name)

    def fill(self, source: BlockTier) -> None:
        """See ``BlockTier.fill``. Raises StoreError where the server does not answer, or was emptied meanwhile."""
        with self._one_life("written there is not whole: run it again"):
            super().fill(source)

    @contextmanager
    def _one_life(self, consequence: str) -> Iterator[None]:
        before = self._live().ask(b"HGET", self._keys.meta, b"tier")
        yield
        if before is None or self._live().ask(b"HGET", self._keys.meta, b"tier") != before:
            raise StoreError(
                f"Redis at {self.location.server} has lost the recent tier {self.location.name!r} meanwhile; what was "
                f"{consequence}"
            )

    def _put_stored(self, part: Stored) -> None:
        # A server takes a million arguments in one call, of one user.
        for piece in part.pieces():
            super()._put_stored(piece)

    def append(
        self,
        users: Users,
        event_ts: npt.NDArray[np.int64] | Column,
        columns: dict[str, Column],
        event_ids: Column | None = None,
        supersedes: Column | None = None,
        resolve: Resolve | None = None,
        schema: EventSchema | None = None,
        advances: Sequence[Advance] = (),
    ) -> AppendResult:
        """See ``RecentTier.append``."""
        try:
            return super().append(users, event_ts, columns, event_ids, supersedes, resolve, schema, advances)
        except Torn as e:
            keys = user_keys(as_users(users, self._schema.user_kind))
            appended = np.array([k in e.done for k in keys], np.bool_)
            unknown = np.array([k in e.unknown for k in keys], np.bool_)
            raise Unacknowledged(
                f"{e}; of {len(keys)} rows {int(appended.sum())} are there and {int(unknown.sum())} may be: append "
                "those that are not again, or all of them where they have event ids",
                appended,
                unknown,
            ) from e.__cause__

    def known_users(self, limit: int | None = None) -> Users:
        """See ``RecentTier.known_users``."""
        with self._read() as txn:
            return users_of_keys(txn.known()[:limit], self._schema.user_kind)

    # --- what BlockTier asks for -------------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """See ``redis_transaction.Server``."""
        return self._floor

    def _floors(self, txn: Reading, keys: list[bytes]) -> npt.NDArray[np.int64]:
        # Of a user who is written already, that of the time: its numbers are given.
        assert isinstance(txn, RedisTransaction)
        return np.array([txn.views[key].floor for key in keys], np.int64)

    @contextmanager
    def _read(self) -> Iterator[RedisTransaction]:
        yield RedisTransaction(self._live(), self._keys, self)

    def held(self, users: Users) -> bytes:
        """See ``BlockTier.held``: one round trip, and none of what a call needs that may write."""
        names = user_keys(users)
        commands = [pack(b"LRANGE", key, b"0", b"-1") for key in self._keys.users(names)]
        *lists, meta = self._live().read([*commands, pack(b"HMGET", self._keys.meta, b"tier", b"floor")])
        self.settle(meta)
        parts: list[bytes] = []
        for name, listed in zip(names, lists, strict=True):
            for element in listed[1:]:
                parts += (name, element)
        return held_bytes([listed[0][: PAIR_DTYPE.itemsize] if listed else b"" for listed in lists], parts, self.name)

    def _write(self, work: Callable[[Writing], T]) -> T:
        txn = RedisTransaction(self._live(), self._keys, self)
        patience = Patience(self.location)
        while True:
            txn.start()
            try:
                result = work(txn)
                error = txn.commit()
                if error is None:
                    return result
                if isinstance(error, TooFewReplicas):
                    why = f"fewer than {self.location.replicas} replicas of Redis at {self.location.server} have it"
                    raise Torn(why, txn.done(), set())
                if not isinstance(error, Moved):
                    patience.after(error)
            except ThinrowError as e:
                if not txn.done():
                    raise
                raise Torn(str(e), txn.done(), set()) from e

    def _rewrite(self, work: Callable[[Writing], None]) -> None:
        self._write(work)
        rewrite_files(self._live())

    def _schema_of(self, schema_id: int) -> EventSchema | None:
        if schema_id not in self._schemas:
            self._load()
        return self._schemas.get(schema_id)

    def _newest_schema(self) -> EventSchema:
        self._load()
        return self._schemas[max(self._schemas)]

    def _learn(self, schema: EventSchema) -> None:
        self._load()
        for stored in self._schemas.values():
            check_evolution(schema, stored)
        name, body = _sealed_schema(schema)
        self._live().ask(b"HSETNX", self._keys.meta, name, body)
        self._schemas.setdefault(schema.schema_id, schema)
        self._load()
        # Another process may have stored another schema of this id just before.
        check_evolution(schema, self._schemas[schema.schema_id])
        self._schema = self._schemas[max(self._schemas)]

    # --- what a transaction asks for ---------------------------------------------------------------------------

    def settle(self, meta: Sequence[Any], reign: str | None = None, at: float = 0.0) -> None:
        """See ``redis_transaction.Server``."""
        tier, floor = meta
        if tier is None:
            self.remembered.met(None)
            warnings.warn(
                f"Redis at {self.location.server} has lost the recent tier {self.location.name!r}, and with it what "
                "was not compacted; append that again from its source",
                RuntimeWarning,
                stacklevel=2,
            )
            if reign is not None:
                self._begin(reign)
                self._load()
        elif reign is not None and reign not in self._reigns:
            self._enter(reign)
        if floor is not None:
            self._floor = max(self._floor, int(floor))
            if reign is not None and tier is not None and self._floor == int(floor):
                self.remembered.met(Standing(reign, tier, floor, at))

    def begin_above(self, number: int) -> None:
        """See ``redis_transaction.Server``."""
        self._raise_floor(number, "")

    def _enter(self, reign: str) -> None:
        """Serve under a server that this process has not met: new to all, it may lack the last numbers."""
        with self._lock:
            if reign in self._reigns:
                return
            link, name = self._live(), f"reign:{reign}"
            known = link.ask(b"HEXISTS", self._keys.meta, name.encode())
            self._raise_floor(0 if known else self._claim(self._floor + 1), "" if known else name)
            self._reigns.add(reign)

    def _raise_floor(self, number: int, reign: str) -> None:
        reply = self._live().read([call_of(RAISE, [self._keys.meta], b"%d" % number, reign.encode())])[0]
        self._floor = max(self._floor, int(reply))

    def _begin(self, reign: str) -> None:
        """Write what a new tier begins with, unless another process has."""
        with self._lock:
            fields = {
                b"tier": secrets.token_hex(8).encode(),
                b"format": b"%d" % FORMAT,
                b"user_kind": self._schema.user_kind.encode(),
                b"floor": b"%d" % self._claim(self._floor and self._floor + 1),
                f"reign:{reign}".encode(): b"1",
                **({_RESTORING: self._restoring} if self._restoring else {}),
                **dict(_sealed_schema(s) for s in self._schemas.values()),
            }
            flat = [part for pair in fields.items() for part in pair]
            self._live().read([call_of(BEGIN, [self._keys.meta], *flat)])

    def _load(self) -> None:
        """Read and check what the tier says of itself."""
        flat = self._live().ask(b"HGETALL", self._keys.meta)
        meta = dict(zip(flat[::2], flat[1::2], strict=True))
        if meta.get(_RESTORING, self._restoring) != self._restoring:
            raise StoreError(
                f"{self._name} is being filled by a restore, or by one that was killed: run thinrow restore again, to "
                "the same folder"
            )
        form, kind = int(meta.get(b"format", b"0")), meta.get(b"user_kind", b"").decode()
        if form > FORMAT:
            raise NewerFormatError(f"{self._name} has recent format {form}, newer than {FORMAT}; update thinrow")
        if kind and kind != self._schema.user_kind:
            raise UserKindError(
                f"{self._name} holds {kind} user ids, the schema says {self._schema.user_kind}; "
                f"cast the column to {kind}"
            )
        self._floor = max(self._floor, int(meta.get(b"floor", b"0")))
        self._reigns |= {name[6:].decode() for name in meta if name.startswith(b"reign:")}
        for name, value in meta.items():
            if name.startswith(b"schema:"):
                if not is_sealed(name, value):
                    raise CorruptionError(f"{name.decode()} fails its CRC", file=self._name)
                try:
                    schema = EventSchema.from_dict(json.loads(value[:-4]))
                except (ValueError, SchemaError) as e:
                    raise CorruptionError(f"{name.decode()} is not a schema: {e}", file=self._name) from e
                self._schemas[schema.schema_id] = schema

    def _live(self) -> RedisLink:
        if self._link is None:
            raise StoreError(f"the recent tier {self._name} is closed; open it again")
        return self._link


def check_server(link: RedisLink) -> bool:
    """Hold a server's settings to what its location promises; whether it is a cluster's.

    Raises:
        StoreError: it may drop events, or does not keep them as durably as was asked; names the command that helps. Or
            it has only a part of a cluster's keys.
    """
    clustered = fields_of(link.ask(b"INFO", b"cluster")).get("cluster_enabled") == "1"
    if clustered:
        masters = int(fields_of(link.ask(b"CLUSTER", b"INFO")).get("cluster_size", "0"))
        if masters > 1:
            raise StoreError(
                f"Redis at {link.location.server} is one of {masters} masters of a cluster and has a part of the keys; "
                "name a server that is in no cluster (with replicas, if it may fail), or a proxy before the cluster"
            )
    _check_durability(link)
    return clustered


def _check_durability(link: RedisLink) -> None:
    location = link.location
    info, patience = _memory_and_files(link), Patience(location)
    while info.get("loading") == "1":
        # While it reads its log it says that it keeps none.
        patience.after(StoreError("it is loading its files"))
        info = _memory_and_files(link)
    if info.get("maxmemory_policy", "noeviction") != "noeviction":
        raise StoreError(
            f"Redis at {location.server} has maxmemory-policy {info['maxmemory_policy']} and would drop events to make "
            "room; run: CONFIG SET maxmemory-policy noeviction"
        )
    if location.durability == "none":
        return
    if info.get("aof_enabled") != "1":
        raise StoreError(
            f"Redis at {location.server} keeps no log of writes, but durability={location.durability} is asked for; "
            "run: CONFIG SET appendonly yes, or name durability=none in the URL"
        )
    replies, lost = link.pipeline([pack(b"CONFIG", b"GET", b"appendfsync")])
    if lost is not None or isinstance(replies[0], Exception):
        warnings.warn(
            f"Redis at {location.server} does not tell its appendfsync ({lost or replies[0]}); durability="
            f"{location.durability} is taken on trust",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    fsync = replies[0][1].decode()
    if fsync != "always" and fsync != location.durability:
        raise StoreError(
            f"Redis at {location.server} has appendfsync {fsync}, but durability={location.durability} is asked for; "
            f"run: CONFIG SET appendfsync {location.durability}"
        )


def _memory_and_files(link: RedisLink) -> dict[str, str]:
    return {**fields_of(link.ask(b"INFO", b"memory")), **fields_of(link.ask(b"INFO", b"persistence"))}


def rewrite_files(link: RedisLink) -> None:
    """Let the server write its files anew, so that they hold nothing of what was dropped; waits until it has.

    Raises:
        StoreError: it may not, or cannot; what was dropped is then still in its files.
    """
    info = fields_of(link.ask(b"INFO", b"persistence"))
    saves = int(info.get("rdb_saves", "1")) > 0
    if not saves:
        replies, lost = link.pipeline([pack(b"CONFIG", b"GET", b"save")])
        saves = lost is not None or isinstance(replies[0], Exception) or bool(replies[0][1])
    if info.get("aof_enabled") == "1":
        _in_background(link, b"BGREWRITEAOF", "aof_last_bgrewrite")
    if saves:
        _in_background(link, b"BGSAVE", "rdb_last_bgsave")


def _in_background(link: RedisLink, command: bytes, last: str) -> None:
    remedy = (
        f"erased from memory, but the files of Redis at {link.location.server} may still hold it; run "
        f"{command.decode()} there, then thinrow erase --resume"
    )
    _wait(link, remedy)
    reply = link.pipeline([pack(command)])[0]
    if not reply or isinstance(reply[0], Exception):
        raise StoreError(f"{reply[0] if reply else 'no answer'}; {remedy}")
    info = _wait(link, remedy)
    if info.get(f"{last}_status") != "ok":
        raise StoreError(f"{command.decode()} failed; {remedy}")


def _wait(link: RedisLink, remedy: str) -> dict[str, str]:
    until, pause = time.monotonic() + _REWRITE_S, 0.002
    while True:
        info = fields_of(link.ask(b"INFO", b"persistence"))
        if all(info.get(name, "0") == "0" for name in _BUSY):
            return info
        if time.monotonic() > until:
            raise StoreError(f"the server was busy for {_REWRITE_S:g} s; {remedy}")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def fields_of(info: bytes) -> dict[str, str]:
    """The fields of an INFO reply."""
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _sealed_schema(schema: EventSchema) -> tuple[bytes, bytes]:
    name = f"schema:{schema.schema_id}".encode()
    return name, seal(name, schema.to_json().encode())
