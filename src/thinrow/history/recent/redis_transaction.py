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

import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from thinrow.core.errors import StoreError
from thinrow.core.users import UserKind
from thinrow.history.recent.keys import PAIR_DTYPE, users_of_keys
from thinrow.history.recent.redis_guess import Remembered, Standing
from thinrow.history.recent.redis_link import REPLICATION, Elsewhere, RedisLink, pack, reign_of
from thinrow.history.recent.redis_scripts import ADVANCE, APPEND, BEGINNING, GUESS, SHA, WRITE, call_of

_PAIR = PAIR_DTYPE.itemsize
_TOKEN = 8
_SCAN_COUNT = b"2000"
#: What was read so long ago may be of a server that has been replaced since.
_STALE_S = 0.2
#: Ids or blocks of a user that a guess may have: a script takes 8,000 arguments at once.
_MOST_GUESSED = 2_000

_CALL_APPEND = (
    b"*%%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n" % SHA[APPEND]
    + b"$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$8\r\n%b\r\n"
)
_CALL_GUESS = b"*%%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n3\r\n" % SHA[GUESS]
_RECORD = b"*3\r\n$6\r\nLINDEX\r\n$%d\r\n%b\r\n$1\r\n0\r\n"


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
        names: the ids of these.
        pair: the new one; empty forgets the user.
        floor: no number up to it (inclusive) is given to the user.
        guessed: whether the record is none that was read in this call, and its ids are taken for new.
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
    names: list[bytes] = field(default_factory=list)
    dropped_ids: list[bytes] = field(default_factory=list)
    floor: int = 0
    guessed: bool = False
    done: bool = False
    sent: bool = False

    def unread(self) -> None:
        """Forget what was read, but not that it may be written."""
        self.record, self.listed, self.begun, self.guessed = None, None, None, False

    def unwritten(self) -> None:
        """Forget what was to be written."""
        self.pair, self.drop = None, 0
        self.front, self.blocks, self.ids, self.names, self.dropped_ids = [], [], [], [], []


class Server(Protocol):
    """What a call asks of the tier."""

    @property
    def remembered(self) -> Remembered:
        """What it knows of users that it has written."""
        ...

    @property
    def floor(self) -> int:
        """The number up to which none is given."""
        ...

    def settle(self, meta: Sequence[Any], reign: str | None = None, at: float = 0.0) -> None:
        """Look at the state of the server, asked for at ``at``; where numbers are about to be given, by the server of
        that reign, see that they begin above all that were given before."""
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
        self._numbering = [*self._reading, REPLICATION]
        #: What a wrong guess was told instead, by user: the record, and pairs of ids.
        self._told: dict[bytes, tuple[bytes, dict[bytes, bytes]]] = {}
        self._guesses = True
        self._under: Standing | None = None

    # --- reading -----------------------------------------------------------------------------------------------

    def fetch(
        self,
        users: Sequence[bytes],
        ids: Sequence[bytes] = (),
        *,
        blocks: bool = False,
        through: Sequence[int] = (),
        new: bool = False,
    ) -> None:
        """Read what the call is about to ask for, in one round trip; or guess it."""
        if new and self._guess(users, ids):
            return
        wanted = self._keys.by_user(k for k in ids if k not in self._ids) if ids else {}
        unmet = [user for user in users if user not in self.views]
        if unmet:
            self.views.update(zip(unmet, map(View, self._keys.users(unmet)), strict=True))
        commands: list[bytes] = []
        takers: list[tuple[View, Callable[..., None], list[bytes]]] = []
        for i, user in enumerate(users):
            view = self.views[user]
            if view.done:
                continue
            told = self._told.pop(user, None)
            if told is not None:
                view.record, view.floor = told[0], self._server.floor
                self._ids.update(told[1])
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
        if new and not commands:
            return
        # Who gives no numbers need not know which server gives them, nor begin an epoch.
        since = time.monotonic()
        commands += self._reading if blocks else self._numbering
        replies = self._link.read(commands)
        for (view, take, names), reply in zip(takers, replies, strict=False):
            take(view, reply, names)
        if blocks:
            self._server.settle(replies[-1])
        else:
            self._reign, self._read_at = reign_of(replies[-1]), since
            self._server.settle(replies[-2], self._reign, since)
        for view, _, _ in takers:
            view.floor = self._server.floor

    def _guess(self, users: Sequence[bytes], ids: Sequence[bytes]) -> bool:
        """Take users for what this process left them as, or for unknown, and their ids for new, where the server was
        met just before: the script that writes sees whether it is so. Once a call."""
        known, self._guesses, tries = self._server.remembered, False, self._guesses
        standing = known.standing
        if not tries or self._link.location.replicas or standing is None:
            return False
        if time.monotonic() - standing.at > _STALE_S or not known.takes_a_guess():
            return False
        self._under, self._reign, self._read_at = standing, standing.reign, standing.at
        records, floor = known.records, int(standing.floor)
        for user, key in zip(users, self._keys.users(users), strict=True):
            self.views[user] = View(key, records.get(user, b""), floor=floor, guessed=True)
        self._ids = dict.fromkeys(ids, b"")
        return True

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

    def _listed(self, user_key: bytes) -> list[bytes]:
        listed = self._view(user_key).listed
        if listed is None:
            self.fetch([user_key], blocks=True)
            listed = self.views[user_key].listed or []
        return listed

    def held(self, user_key: bytes, into: list[bytes]) -> None:
        """See ``Reading``."""
        for element in self._listed(user_key):
            into += (user_key, element)

    def blocks(self, user_key: bytes, after: int, into_keys: list[bytes], into_values: list[bytes]) -> int:
        """See ``Reading``."""
        listed, first = self._listed(user_key), 0
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

    def add_pairs(self, name: str, items: Sequence[tuple[bytes, bytes]]) -> bool:
        """See ``Writing``."""
        there = self.pairs(name, [key for key, _ in items])
        self.put_pairs(name, items)
        return not there

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
                view.names = names
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
        guesses = [v for v in todo.values() if v.guessed]
        if any(max(len(v.ids), len(v.blocks)) > _MOST_GUESSED for v in guesses):
            return Moved("too much for a guess")
        commands = [self._command(v) for v in todo.values()]
        waits, under = self._link.location.replicas, ""
        if self._under is not None and guesses:
            under = self._under.reign
            if time.monotonic() - self._read_at > _STALE_S / 2:
                # So that the next call may guess, too.
                commands += self._numbering
        if waits:
            if not commands:
                commands.append(pack(b"HINCRBY", self._keys.meta, b"waits", b"0"))
            commands.append(pack(b"WAIT", b"%d" % waits, b"%d" % int(1_000 * self._link.location.timeout_s)))
        since = time.monotonic()
        replies, lost = self._link.pipeline(commands, under) if commands else ([], None)
        if isinstance(lost, Elsewhere):
            return Moved("another connection")
        error: Exception | None = lost
        written: dict[bytes, bytes] = {}
        wrong = 0
        for (user, view), reply in zip(todo.items(), replies, strict=False):
            if isinstance(reply, Exception):
                error = error or self._refused(view, reply)
            elif isinstance(reply, list):
                wrong += 1
                self._wrong_guess(user, view, reply)
                error = error or Moved("a guess was wrong")
            elif reply:
                view.done = True
                if reply == 1:
                    written[user] = self._record(view)
            else:
                error = error or Moved("a record is not the one that was read")
        self._server.remembered.keep(written, todo.keys() - written.keys())
        if 4 * wrong > len(guesses):
            self._server.remembered.was_wrong()
        if under and len(replies) == len(todo) + 2 and not any(isinstance(r, Exception) for r in replies[-2:]):
            self._server.settle(replies[-2], reign_of(replies[-1]), since)
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

    def _record(self, view: View) -> bytes:
        """What a script has made of a user's record."""
        before = view.record or bytes(_PAIR + 4 * _TOKEN)
        pair = before[:_PAIR] if view.pair is None else view.pair
        return pair and pair + before[_PAIR + _TOKEN :] + self._token

    def _refused(self, view: View, error: Exception) -> Exception:
        if view.guessed and str(error).startswith("CROSSSLOT"):
            # A cluster behind a proxy: the user and what the tier says of itself are on different servers.
            self._server.remembered.give_up()
            return Moved(str(error))
        return error

    def _wrong_guess(self, user: bytes, view: View, reply: list[Any]) -> None:
        record, tier, floor, held = reply
        if self._under is not None and (tier, floor) == (self._under.tier, self._under.floor):
            self._told[user] = record, {n: h or b"" for n, h in zip(view.names, held[::2], strict=True)}

    def _command(self, view: View) -> bytes:
        assert view.record is not None
        before = view.record[-_TOKEN:]
        pair = view.record[:_PAIR] if view.pair is None else view.pair
        if view.guessed and self._under is not None:
            head = [view.key, view.key + b":i", self._keys.meta, before, pair, self._token, self._under.tier]
            head += [self._under.floor, b"%d" % len(view.ids)]
            return b"".join([
                _CALL_GUESS % (3 + len(head) + 2 * len(view.ids) + len(view.blocks)),
                *[b"$%d\r\n%b\r\n" % (len(a), a) for a in head],
                *view.ids,
                *[b"$%d\r\n%b\r\n" % (len(b), b) for b in view.blocks],
            ])  # fmt: skip
        if view.blocks and not (view.drop or view.ids or view.dropped_ids):
            key, blocks = view.key, view.blocks
            sizes = len(key), key, len(before), before, len(pair), pair
            return _CALL_APPEND % (7 + len(blocks), *sizes, self._token) + b"".join(
                [b"$%d\r\n%b\r\n" % (len(b), b) for b in blocks]
            )
        counts = view.drop, len(view.front) + len(view.blocks), len(view.front), len(view.dropped_ids)
        parts = [*[b"%d" % c for c in counts], *view.front, *view.blocks, *view.dropped_ids]
        n = 5 + 3 + len(parts) + 2 * len(view.ids)
        head = [b"EVALSHA", SHA[WRITE], b"2", view.key, view.key + b":i", before, pair, self._token, *parts]
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
