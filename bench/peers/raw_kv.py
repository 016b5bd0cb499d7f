"""Plain LMDB and plain Redis under an append, in two strengths.

``RowsLmdb`` and ``RowsRedis`` do the same as a tier, as one would write it by hand: from the rows of a call, each
packed with ``struct``, numbered from a counter a user, skipped where its id is known.

``ReadyLmdb`` and ``ReadyRedis`` are the floor under any tier: they store the very bytes that a tier stored, which
``recorded`` has kept, call by call. No checks, no look-ups, no numbers, no encoding.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import numpy as np

from bench.datagen.datasets import Ints
from thinrow.history.recent import LmdbRecent
from thinrow.history.recent.redis_link import RedisLink, RedisLocation, pack
from thinrow.history.recent.transactions import Pairs, Writing
from thinrow.jagged import Column
from thinrow.schema import EventSchema

T = TypeVar("T")
Items = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Call:
    """Rows of one append."""

    users: Ints
    event_ts: Ints
    columns: dict[str, Column]
    event_ids: Column | None


@dataclass(slots=True)
class Written:
    """What one call stored: counters by user key, blocks by user key and arrival, ids by user key and id."""

    users: Items = field(default_factory=list)
    blocks: Items = field(default_factory=list)
    ids: Items = field(default_factory=list)


class _Recorder:
    def __init__(self, txn: Writing, into: Written) -> None:
        self._txn, self._into = txn, into

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def put_pairs(self, name: Pairs, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep and pass on."""
        listed = list(items)
        (self._into.users if name == "users" else self._into.ids).extend(listed)
        self._txn.put_pairs(name, listed)

    def add_pairs(self, name: Pairs, items: Sequence[tuple[bytes, bytes]]) -> bool:
        """Keep and pass on; a call whose ids are not new is recorded anew."""
        self._into.ids.extend(items)
        return self._txn.add_pairs(name, items)

    def put_blocks(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep and pass on."""
        listed = list(items)
        self._into.blocks.extend(listed)
        self._txn.put_blocks(listed)


class _Recording(LmdbRecent):
    written: list[Written]

    def _write(self, work: Callable[[Writing], T]) -> T:
        self.written.append(Written())
        into: Any = self.written[-1]
        return super()._write(lambda txn: work(_Recorder(txn, into)))


def recorded(folder: Path, schema: EventSchema, calls: Sequence[Call]) -> list[Written]:
    """What the LMDB tier writes for each of ``calls``."""
    with _Recording(folder, schema, sync=False) as tier:
        tier.written = []
        for call in calls:
            tier.append(call.users, call.event_ts, call.columns, call.event_ids)
        return tier.written


class RowsLmdb:
    """One transaction a call; an event is a value under (user, number), an id one under (user, id)."""

    def __init__(self, folder: Path, sync: bool) -> None:
        folder.mkdir(parents=True)
        self._env: Any = lmdb.open(str(folder), map_size=1 << 30, max_dbs=3, sync=sync, metasync=sync)
        self._events, self._users, self._ids = (self._env.open_db(name) for name in (b"events", b"users", b"ids"))

    def write(self, call: Call) -> None:
        """One call."""
        with self._env.begin(write=True) as txn:
            for user, rows, ids in by_user(call):
                key = user.to_bytes(8, "big")
                number = int.from_bytes(txn.get(key, b"", db=self._users), "big")
                for i, row in enumerate(rows):
                    if ids is not None:
                        name = key + ids[i].to_bytes(8, "big")
                        if not txn.put(name, (number + 1).to_bytes(8, "big"), overwrite=False, db=self._ids):
                            continue
                    number += 1
                    txn.put(key + number.to_bytes(8, "big"), row, db=self._events)
                txn.put(key, number.to_bytes(8, "big"), db=self._users)

    def close(self) -> None:
        """Close it."""
        self._env.close()


#: Of KEYS counter, list, ids: how many ids, then the ids, then the rows. Each row whose id is new gets the next number.
_ROWS = """
local n, number = tonumber(ARGV[1]), tonumber(redis.call('GET', KEYS[1]) or '0')
local first = number
if n == 0 then
  number = redis.call('INCRBY', KEYS[1], #ARGV - 1)
  redis.call('RPUSH', KEYS[2], unpack(ARGV, 2))
else
  local rows = {}
  for i = 1, n do
    if redis.call('HSETNX', KEYS[3], ARGV[1 + i], number + 1) == 1 then
      number = number + 1
      rows[#rows + 1] = ARGV[1 + n + i]
    end
  end
  if number > first then
    redis.call('RPUSH', KEYS[2], unpack(rows))
    redis.call('SET', KEYS[1], number)
  end
end
return number
"""
_ROWS_SHA = hashlib.sha1(_ROWS.encode()).hexdigest().encode()


class RowsRedis:
    """One script a user, all in one pipeline a call: it numbers each row whose id is new, keeps the number under the
    id, pushes the rows and counts them, all of a user or nothing. Where no row has an id it counts and pushes."""

    def __init__(self, port: int) -> None:
        self._link = RedisLink(RedisLocation("127.0.0.1", port), [_ROWS])
        self._link.read([pack(b"SCRIPT", b"LOAD", _ROWS.encode())])

    def write(self, call: Call) -> list[int]:
        """One call; the last number of each user."""
        commands = []
        for user, rows, ids in by_user(call):
            names = [b"%d" % i for i in ids or ()]
            keys = b"{rows:%d}:u" % user, b"{rows:%d}" % user, b"{rows:%d}:i" % user
            commands.append(pack(b"EVALSHA", _ROWS_SHA, b"3", *keys, b"%d" % len(names), *names, *rows))
        return self._link.read(commands)

    def close(self) -> None:
        """Close all connections."""
        self._link.close()


def by_user(call: Call) -> Iterator[tuple[int, list[bytes], list[int] | None]]:
    """Each user of a call, the packed rows, and their ids."""
    columns = [call.event_ts, *(c.values for c in call.columns.values())]
    packer = struct.Struct("<" + "".join(v.dtype.char.replace("l", "q") for v in columns))
    rows = list(map(packer.pack, *(v.tolist() for v in columns)))
    ids = None if call.event_ids is None else call.event_ids.values.tolist()
    cuts = [0, *(np.flatnonzero(np.diff(call.users)) + 1).tolist(), len(rows)]
    for a, b in pairwise(cuts):
        yield int(call.users[a]), rows[a:b], None if ids is None else ids[a:b]


class ReadyLmdb:
    """One transaction a call, ``putmulti`` into three databases."""

    def __init__(self, folder: Path, sync: bool) -> None:
        folder.mkdir(parents=True)
        self._env: Any = lmdb.open(str(folder), map_size=1 << 30, max_dbs=3, sync=sync, metasync=sync)
        self._dbs = [self._env.open_db(name) for name in (b"events", b"users", b"ids")]

    def write(self, written: Written) -> None:
        """One call."""
        with self._env.begin(write=True) as txn:
            for db, items in zip(self._dbs, (written.blocks, written.users, written.ids), strict=True):
                txn.cursor(db).putmulti(items)

    def close(self) -> None:
        """Close it."""
        self._env.close()


class ReadyRedis:
    """One pipeline a call: of each user the record, the blocks and the ids, in the types that the tier uses."""

    def __init__(self, port: int) -> None:
        self._link = RedisLink(RedisLocation("127.0.0.1", port))

    def write(self, written: Written) -> None:
        """One call."""
        blocks: dict[bytes, list[bytes]] = {key: [] for key, _ in written.users}
        ids: dict[bytes, list[bytes]] = {}
        for key, value in written.blocks:
            blocks[key[:8]].append(key[8:] + value)
        for key, value in written.ids:
            ids.setdefault(key[:8], []).extend((key[8:], value))
        commands = []
        for user, record in written.users:
            commands.append(pack(b"SET", b"{ready:%b}:u" % user, record + bytes(32)))
            commands.append(pack(b"RPUSH", b"{ready:%b}" % user, *blocks[user]))
            if user in ids:
                commands.append(pack(b"HSET", b"{ready:%b}:i" % user, *ids[user]))
        self._link.read(commands)

    def close(self) -> None:
        """Close all connections."""
        self._link.close()
