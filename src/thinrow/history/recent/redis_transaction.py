"""One call of the recent tier on Redis: what it reads, what it writes, and how that becomes atomic for each user.

A user is two keys under one hash tag, so that one script may touch both on a cluster too::

    {thinrow:shop:42}      list: the record, then the blocks, each after the 8 bytes of its first arrival
    {thinrow:shop:42}:i    hash: event id -> pair (arrival, event_ts)

The record is the user's pair (counter, trimmed_through) and four tokens. Every write of a user puts the token of its
call in place of the oldest of them, so that no two records of a user are ever the same. A script writes only if the
record is still the one that the call has read: so a call that was sent twice, or comes late, cannot be done twice, and
one whose answer was lost finds its token in the record if it was done.

Worked example: user 42 has counter 7. Two processes read the record at once, both number an event 8 and both send it.
The second script finds another record, writes nothing, and its process reads counter 8 and numbers its event 9.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from thinrow.core.errors import StoreError
from thinrow.core.users import UserKind
from thinrow.history.recent.keys import PAIR_DTYPE, users_of_keys
from thinrow.history.recent.redis_link import RedisLink, pack

_PAIR = PAIR_DTYPE.itemsize
_TOKEN = 8
_SCAN_COUNT = b"2000"
#: What was read so long ago may be of a server that has been replaced since.
_STALE_S = 0.2

#: Of KEYS list and ids: the record's last token ("" where there is no record), the new pair ("" forgets the user), the
#: call's token, blocks to drop from the front, how many blocks follow, how many of these go to the front, how many
#: fields of ids are dropped; then blocks, dropped fields, new pairs. 1 where it was done, 2 where it had been, 0 where
#: the record is another. What frees memory comes first: a full server lets a script go on that has begun to write.
WRITE = """
local list, ids = KEYS[1], KEYS[2]
local now = redis.call('LINDEX', list, 0) or ''
if string.sub(now, -8) ~= ARGV[1] then return string.find(now, ARGV[3], 21, true) and 2 or 0 end
local record = ARGV[2] .. (now == '' and string.rep('\\0', 24) or string.sub(now, 29)) .. ARGV[3]
local drop, blocks, front, gone = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local function each(first, last, call)
  for a = first, last, 4000 do call(unpack(ARGV, a, math.min(a + 3999, last))) end
end
local at = 8 + blocks
each(at, at + gone - 1, function(...) redis.call('HDEL', ids, ...) end)
if ARGV[2] == '' then
  redis.call('DEL', list)
elseif drop > 0 then
  redis.call('LTRIM', list, drop + 1, -1)
  each(8, 7 + front, function(...) redis.call('LPUSH', list, ...) end)
  redis.call('LPUSH', list, record)
elseif now == '' then
  redis.call('RPUSH', list, record)
else
  redis.call('LSET', list, 0, record)
end
each(8 + front, 7 + blocks, function(...) redis.call('RPUSH', list, ...) end)
each(at + gone, #ARGV, function(...) redis.call('HSET', ids, ...) end)
return 1
"""

#: ``WRITE`` of blocks alone, which is most of what is written. Of KEYS list: last token, new pair, token, blocks.
APPEND = """
local list = KEYS[1]
local now = redis.call('LINDEX', list, 0) or ''
if string.sub(now, -8) ~= ARGV[1] then return string.find(now, ARGV[3], 21, true) and 2 or 0 end
if now == '' then
  redis.call('RPUSH', list, ARGV[2] .. string.rep('\\0', 24) .. ARGV[3], ARGV[4])
else
  redis.call('LSET', list, 0, ARGV[2] .. string.sub(now, 29) .. ARGV[3])
  redis.call('RPUSH', list, ARGV[4])
end
for i = 5, #ARGV do redis.call('RPUSH', list, ARGV[i]) end
return 1
"""

#: Of KEYS list: through as 8 bytes. The record, how many blocks begin at it or before, and the last of these.
BEGINNING = """
local function above(a, b)
  for i = 1, 8 do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x > y end
  end
  return false
end
local low, high = 0, redis.call('LLEN', KEYS[1]) - 1
local last = ''
while low < high do
  local middle = math.ceil((low + high) / 2)
  local block = redis.call('LINDEX', KEYS[1], middle)
  if above(block, ARGV[1]) then high = middle - 1 else low, last = middle, block end
end
return {redis.call('LINDEX', KEYS[1], 0), math.max(low, 0), last}
"""

#: Of KEYS hash: pairs of a field and what it must hold ("" for nothing) and then holds. 1, or 0 where one does not.
ADVANCE = """
for i = 1, #ARGV, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '') ~= ARGV[i + 1] then
    return redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 2] and 2 or 0
  end
end
for i = 1, #ARGV, 3 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
return 1
"""
#: Of KEYS meta: a floor in decimal digits, and a field to set or "". The larger of this floor and the one held.
RAISE = """
local held = redis.call('HGET', KEYS[1], 'floor') or '0'
if #ARGV[1] > #held or (#ARGV[1] == #held and ARGV[1] > held) then
  held = ARGV[1]
  redis.call('HSET', KEYS[1], 'floor', held)
end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], ARGV[2], '1') end
return held
"""

#: Of KEYS meta: fields and values of a new tier. 1, or 0 where there is one.
BEGIN = """
if redis.call('HEXISTS', KEYS[1], 'tier') == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
"""
SCRIPTS = (APPEND, WRITE, BEGINNING, ADVANCE, RAISE, BEGIN)
_SHA = {script: hashlib.sha1(script.encode()).hexdigest().encode() for script in SCRIPTS}


_CALL_APPEND = (
    b"*%%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n" % _SHA[APPEND]
    + b"$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$8\r\n%b\r\n"
)
_RECORD = b"*3\r\n$6\r\nLINDEX\r\n$%d\r\n%b\r\n$1\r\n0\r\n"


def call_of(script: str, keys: Sequence[bytes], *arguments: bytes) -> bytes:
    """The command that runs one of ``SCRIPTS``."""
    return pack(b"EVALSHA", _SHA[script], b"%d" % len(keys), *keys, *arguments)


class RedisKeys:
    """Names of a store's keys. ``user_key`` is that of ``recent.keys``."""

    def __init__(self, name: str, kind: UserKind) -> None:
        self._prefix, self._kind = f"{{thinrow:{name}:".encode(), kind
        self.meta = f"{{thinrow:{name}}}".encode()
        self.positions = self.meta + b":positions"
        self.pattern = self._prefix + b"*"

    def users(self, user_keys: Sequence[bytes]) -> list[bytes]:
        """The list of each user."""
        prefix = self._prefix
        if self._kind == "int64":
            return [b"%b%d}" % (prefix, user) for user in users_of_keys(user_keys, "int64").tolist()]
        return [b"%b%b}" % (prefix, user.encode()) for user in users_of_keys(user_keys, "string")]

    def user_keys(self, found: Iterable[bytes], suffix: bytes = b"}") -> Iterator[tuple[bytes, bytes]]:
        """(user key, key) of the user's keys that end so, among keys of the store."""
        for key in found:
            if key.startswith(self._prefix) and key.endswith(suffix):
                name = key[len(self._prefix) : -len(suffix)]
                yield self._encoded(name), key

    def _encoded(self, name: bytes) -> bytes:
        if self._kind == "int64":
            return ((int(name) + (1 << 63)) & ((1 << 64) - 1)).to_bytes(8, "big")
        return bytes(b + 1 for b in name) + b"\0"

    def by_user(self, ids: Iterable[bytes]) -> dict[bytes, list[bytes]]:
        """Keys in ``ids`` by user key."""
        found: dict[bytes, list[bytes]] = {}
        mine: list[bytes] | None
        fixed, last, mine = self._kind == "int64", b"", None
        for key in ids:
            # Most are sorted by user; no user's key begins another's.
            if mine is None or not key.startswith(last):
                last = key[: 8 if fixed else key.index(0) + 1]
                mine = found.setdefault(last, [])
            mine.append(key)
        return found


@dataclass(slots=True)
class View:
    """What a call knows of a user, and what it will write.

    Attributes:
        key: of the list.
        record: as read; empty where the user is unknown, None where it has not been read.
        listed: the blocks, where they were read: elements of the list.
        begun: how many blocks begin at or before a trim, and the last of them.
        ids: new ones, each with its pair, packed.
        pair: the new one; empty forgets the user.
        floor: no number up to it (inclusive) is given to the user.
        done: whether it is written.
        sent: whether it may be.
    """

    key: bytes
    record: bytes | None = None
    listed: list[bytes] | None = None
    begun: tuple[int, bytes] | None = None
    pair: bytes | None = None
    drop: int = 0
    front: list[bytes] = field(default_factory=list)
    blocks: list[bytes] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    dropped_ids: list[bytes] = field(default_factory=list)
    floor: int = 0
    done: bool = False
    sent: bool = False

    def unread(self) -> None:
        """Forget what was read, but not that it may be written."""
        self.record, self.listed, self.begun = None, None, None

    def unwritten(self) -> None:
        """Forget what was to be written."""
        self.pair, self.drop = None, 0
        self.front, self.blocks, self.ids, self.dropped_ids = [], [], [], []


class Server(Protocol):
    """What a call asks of the tier."""

    @property
    def floor(self) -> int:
        """The number up to which none is given."""
        ...

    def settle(self, meta: Sequence[Any], reign: str | None = None) -> None:
        """Look at the state of the server; where numbers are about to be given, by the server of that reign, see that
        they begin above all that were given before."""
        ...

    def begin_above(self, number: int) -> None:
        """Let unknown users begin above a number."""
        ...


class Torn(Exception):
    """A call ends with some users written, or perhaps written. ``done`` and ``unknown`` are user keys."""

    def __init__(self, why: str, done: set[bytes], unknown: set[bytes]) -> None:
        self.done, self.unknown = done, unknown
        super().__init__(why)


class RedisTransaction:
    """``Reading`` and ``Writing``. All of a user's writes hold or none; users are written one after another."""

    def __init__(self, link: RedisLink, keys: RedisKeys, server: Server) -> None:
        self._link, self._keys, self._server = link, keys, server
        self.views: dict[bytes, View] = {}
        self._ids: dict[bytes, bytes] = {}
        self._token = secrets.token_bytes(_TOKEN)
        self._positions: dict[bytes, bytes] = {}
        self._advances: list[tuple[bytes, bytes]] = []
        self._reign, self._read_at = "", 0.0
        self._reading = [pack(b"HMGET", keys.meta, b"tier", b"floor")]
        self._numbering = [*self._reading, pack(b"INFO", b"replication")]

    # --- reading -----------------------------------------------------------------------------------------------

    def fetch(
        self, users: Sequence[bytes], ids: Sequence[bytes] = (), *, blocks: bool = False, through: Sequence[int] = ()
    ) -> None:
        """Read what the call is about to ask for, in one round trip."""
        wanted = self._keys.by_user(k for k in ids if k not in self._ids) if ids else {}
        new = [user for user in users if user not in self.views]
        if new:
            self.views.update(zip(new, map(View, self._keys.users(new)), strict=True))
        commands: list[bytes] = []
        takers: list[tuple[View, Callable[..., None], list[bytes]]] = []
        for i, user in enumerate(users):
            view = self.views[user]
            if view.done:
                continue
            if through:
                commands.append(call_of(BEGINNING, [view.key], through[i].to_bytes(8, "big")))
                takers.append((view, _take_beginning, []))
            elif blocks:
                commands.append(pack(b"LRANGE", view.key, b"0", b"-1"))
                takers.append((view, _take_list, []))
            elif view.record is None:
                commands.append(_RECORD % (len(view.key), view.key))
                takers.append((view, _take_record, []))
            if user in wanted:
                names, at = wanted[user], len(user)
                commands.append(
                    b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n%b:i\r\n" % (2 + len(names), len(view.key) + 2, view.key)
                    + b"".join([b"$%d\r\n%b\r\n" % (len(n) - at, n[at:]) for n in names])
                )
                takers.append((view, self._take_ids, names))
        # Who gives no numbers need not know which server gives them, nor begin an epoch.
        commands += self._reading if blocks else self._numbering
        replies = self._link.read(commands)
        for (view, take, names), reply in zip(takers, replies, strict=False):
            take(view, reply, names)
        if blocks:
            self._server.settle(replies[-1])
        else:
            self._server.settle(replies[-2], reign_of(replies[-1]))
            self._reign, self._read_at = reign_of(replies[-1]), time.monotonic()
        for view, _, _ in takers:
            view.floor = self._server.floor

    def pairs(self, name: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """See ``Reading``."""
        if name == "positions":
            if keys:
                found = self._link.ask(b"HMGET", self._keys.positions, *keys)
                self._positions = {k: v for k, v in zip(keys, found, strict=True) if v is not None}
            return self._positions
        if name == "ids":
            missing = [k for k in keys if k not in self._ids]
            if missing:
                self.fetch(list(self._keys.by_user(missing)), missing)
            return {k: v for k in keys if (v := self._ids[k])}
        missing = [k for k in keys if self._view(k).record is None]
        if missing:
            self.fetch(missing)
        return {k: r[:_PAIR] for k in keys if (r := self.views[k].record)}

    def _take_ids(self, _: View, reply: list[bytes | None], names: list[bytes]) -> None:
        self._ids.update(zip(names, [r or b"" for r in reply], strict=True))

    def blocks(self, user_key: bytes, after: int, into_keys: list[bytes], into_values: list[bytes]) -> int:
        """See ``Reading``."""
        listed = self._view(user_key).listed
        if listed is None:
            self.fetch([user_key], blocks=True)
            listed = self.views[user_key].listed or []
        first = 0
        if listed and listed[0][:8] <= (wanted := (after + 1).to_bytes(8, "big")):
            first = bisect_right(listed, wanted, key=lambda e: e[:8]) - 1
        shown = listed[first:]
        into_keys += [user_key + e[:8] for e in shown]
        into_values += [e[8:] for e in shown]
        return len(shown)

    def holders(self) -> list[bytes]:
        """See ``Reading``."""
        found: list[bytes] = []
        for some in self._lists():
            lengths = self._link.read([pack(b"LLEN", key) for _, key in some])
            found += [user for (user, _), n in zip(some, lengths, strict=True) if n > 1]
        return sorted(set(found))

    def known(self) -> list[bytes]:
        """Keys of all users that are known, ascending."""
        return sorted({user for some in self._lists() for user, _ in some})

    def scan(self, name: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """See ``Reading``."""
        if name == "positions":
            held = _as_pairs(self._link.ask(b"HGETALL", self._keys.positions))
            yield from sorted((k, v) for k, v in held if k.startswith(prefix))
        elif name == "users":
            for user in self.known():
                record = self._link.ask(b"LINDEX", self._view(user).key, b"0")
                if record:
                    yield user, record[:_PAIR]
        elif prefix:
            yield from self._ids_of(prefix, self._view(prefix).key + b":i")
        else:
            for some in self._lists(b"}:i"):
                for user, key in some:
                    yield from self._ids_of(user, key)

    def _ids_of(self, user: bytes, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        for name, pair in sorted(_as_pairs(self._link.ask(b"HGETALL", key))):
            yield user + name, pair

    def everything(self) -> Iterator[list[bytes]]:
        """All keys of the store, some perhaps more than once; those of users first."""
        cursor = b"0"
        while True:
            cursor, keys = self._link.ask(b"SCAN", cursor, b"MATCH", self._keys.pattern, b"COUNT", _SCAN_COUNT)
            if keys:
                yield keys
            if cursor == b"0":
                break
        yield [self._keys.positions, self._keys.meta]

    def _lists(self, suffix: bytes = b"}") -> Iterator[list[tuple[bytes, bytes]]]:
        for keys in self.everything():
            some = list(self._keys.user_keys(keys, suffix))
            if some:
                yield some

    def _view(self, user_key: bytes) -> View:
        view = self.views.get(user_key)
        if view is None:
            view = self.views[user_key] = View(self._keys.users([user_key])[0])
        return view

    # --- writing -----------------------------------------------------------------------------------------------

    def put_pairs(self, name: str, items: Iterable[tuple[bytes, bytes]]) -> None:
        """See ``Writing``."""
        if name == "positions":
            self._advances = list(items)
            return
        if name == "users":
            for user, value in items:
                if not (view := self._view(user)).done:
                    view.pair = value
            return
        pairs = dict(items)
        for user, names in self._keys.by_user(pairs).items():
            view, at = self._view(user), len(user)
            if not view.done:
                view.ids = [b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(n) - at, n[at:], _PAIR, pairs[n]) for n in names]

    def put_blocks(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """See ``Writing``."""
        for key, value in items:
            view = self._view(key[:-8])
            if not view.done:
                (view.front if view.drop else view.blocks).append(key[-8:] + value)

    def pop_blocks(self, user_key: bytes, through: int) -> tuple[bytes, bytes] | None:
        """See ``Writing``."""
        view = self._view(user_key)
        if view.begun is None:
            self.fetch([user_key], through=[through])
        assert view.begun is not None
        view.drop, last = view.begun
        return (user_key + last[:8], last[8:]) if view.drop else None

    def drop_pairs(self, name: str, keys: Sequence[bytes]) -> None:
        """See ``Writing``."""
        for user, names in ({k: [] for k in keys} if name == "users" else self._keys.by_user(keys)).items():
            view = self._view(user)
            if view.done:
                continue
            if name == "users":
                view.pair = b""
            else:
                view.dropped_ids += [n[len(user) :] for n in names]

    def raise_floor(self, at_least: int) -> None:
        """See ``Writing``; at once, for it must hold before a user is forgotten."""
        self._server.begin_above(at_least)

    def start(self) -> None:
        """Before the work is done, for the first time or again: then the server may be another one."""
        again = {user: view for user, view in self.views.items() if not view.done}
        for view in again.values():
            view.unread()
            view.unwritten()
        if again:
            mine = self._keys.by_user(self._ids)
            self._ids = {k: self._ids[k] for user in mine.keys() - again.keys() for k in mine[user]}
        self._advances = []

    def done(self) -> set[bytes]:
        """Keys of the users that are written."""
        return {u for u, v in self.views.items() if v.done}

    def commit(self) -> Exception | None:
        """Write what is not written of each user. None where all is there; else why not, and the work is to be done
        again: it then sees those that are written as they were before, and nothing of them is written twice.

        Raises:
            Torn: it cannot be known whether rows are there.
        """
        todo = {u: v for u, v in self.views.items() if not v.done and _writes(v)}
        stale = todo and time.monotonic() - self._read_at > _STALE_S
        if stale and reign_of(self._link.ask(b"INFO", b"replication")) != self._reign:
            return Moved("another server took over")
        commands = [self._command(v) for v in todo.values()]
        waits = self._link.location.replicas
        if waits:
            if not commands:
                commands.append(pack(b"HINCRBY", self._keys.meta, b"waits", b"0"))
            commands.append(pack(b"WAIT", b"%d" % waits, b"%d" % int(1_000 * self._link.location.timeout_s)))
        replies, lost = self._link.pipeline(commands) if commands else ([], None)
        error: Exception | None = lost
        for (_, view), reply in zip(todo.items(), replies, strict=False):
            if isinstance(reply, Exception):
                error = error or reply
            elif reply:
                view.done = True
            else:
                error = error or Moved("a record is not the one that was read")
        if lost is not None:
            for view in list(todo.values())[len(replies) :]:
                view.sent = True
            self._resolve({u: v for u, v in todo.items() if v.sent and not v.done})
            error = lost if any(not v.done for v in todo.values()) else (TooFewReplicas() if waits else None)
        if error is None and waits and (not replies or replies[-1] < waits):
            return TooFewReplicas()
        if error is None and self._advances:
            error = self._advance()
        return error

    def _command(self, view: View) -> bytes:
        assert view.record is not None
        before = view.record[-_TOKEN:]
        pair = view.record[:_PAIR] if view.pair is None else view.pair
        if view.blocks and not (view.drop or view.ids or view.dropped_ids):
            key, blocks = view.key, view.blocks
            sizes = len(key), key, len(before), before, len(pair), pair
            return _CALL_APPEND % (7 + len(blocks), *sizes, self._token) + b"".join(
                [b"$%d\r\n%b\r\n" % (len(b), b) for b in blocks]
            )
        counts = view.drop, len(view.front) + len(view.blocks), len(view.front), len(view.dropped_ids)
        parts = [*[b"%d" % c for c in counts], *view.front, *view.blocks, *view.dropped_ids]
        n = 5 + 3 + len(parts) + 2 * len(view.ids)
        head = [b"EVALSHA", _SHA[WRITE], b"2", view.key, view.key + b":i", before, pair, self._token, *parts]
        return b"*%d\r\n" % n + b"".join([b"$%d\r\n%b\r\n" % (len(a), a) for a in head]) + b"".join(view.ids)

    def _resolve(self, doubtful: dict[bytes, View]) -> None:
        """Find out what a lost connection left of users that it may have written."""
        if not doubtful:
            return
        try:
            records = self._link.read([pack(b"LINDEX", v.key, b"0") for v in doubtful.values()])
        except StoreError as e:
            raise Torn(str(e), self.done(), set(doubtful)) from e
        unknown = set()
        for (user, view), record in zip(doubtful.items(), records, strict=True):
            tokens, before = (record or b"")[_PAIR:], view.record or b""
            if self._token in tokens:
                view.done = True
            elif (record or b"") != before:
                # Ours would stand right behind the one that it has seen.
                follows = before[-_TOKEN:] in tokens if before else tokens[:_TOKEN] == bytes(_TOKEN)
                if not follows and record and view.blocks and not _named(view):
                    unknown.add(user)
            view.sent = False
        if unknown:
            raise Torn("the answer was lost, and others have written since", self.done(), unknown)

    def _advance(self) -> Exception | None:
        arguments = [part for key, value in self._advances for part in (key, self._positions.get(key, b""), value)]
        replies, lost = self._link.pipeline([call_of(ADVANCE, [self._keys.positions], *arguments)])
        if lost is not None:
            return lost
        if isinstance(replies[0], Exception):
            return replies[0]
        return None if replies[0] else Moved("a position is not the one that was read")


def reign_of(replication: bytes) -> str:
    """What is the same for as long as one server is master without a break: its replication id."""
    at = replication.index(b"master_replid:") + len(b"master_replid:")
    return replication[at : at + 40].decode()


class Moved(Exception):
    """Somebody else wrote between reading and writing: nothing was written."""


class TooFewReplicas(Exception):
    """All is written, but not on as many replicas as were asked for."""


def _writes(view: View) -> bool:
    return view.pair is not None or bool(view.blocks or view.drop or view.ids or view.dropped_ids)


def _named(view: View) -> bool:
    """Whether every new row has an event id, so that it may be appended again."""
    return len(view.ids) == sum(int.from_bytes(b[16:20], "little") for b in view.blocks)


def _take_record(view: View, reply: bytes | None, _: list[bytes]) -> None:
    view.record = reply or b""


def _take_list(view: View, reply: list[bytes], _: list[bytes]) -> None:
    view.record, view.listed = (reply[0], reply[1:]) if reply else (b"", [])


def _take_beginning(view: View, reply: list[Any], _: list[bytes]) -> None:
    view.record, view.begun = reply[0] or b"", (reply[1], reply[2])


def _as_pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
