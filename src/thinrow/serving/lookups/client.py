"""EmbeddingClient: vectors from embedding servers, all of them asked at once, before a deadline.

Worked example, two shards of which the second has two replicas::

    client = EmbeddingClient([["tcp:a:7000"], ["tcp:b:7000", "tcp:c:7000"]], deadline_s=0.05, hedge_s=0.01)
    answer = client.read({"user.": keys, "item.": Bags(items, bounds, "mean")})
    answer["user."].vectors, answer["item."].found, answer.degraded, answer.versions["user."]

Any number of threads may read; each has its own connections, and they share counters alone. All rows of
a table, and all tables of one export, are of one version: where servers come to a new one at different times, those
that are ahead are asked again for the older one.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinrow.checkpoints import Version
from thinrow.core.errors import InputError, ProtocolError, ThinrowError, Unavailable
from thinrow.core.routing import Routing
from thinrow.serving.lookups.compiled import CompiledLink, first_ready, link_to, prepare
from thinrow.serving.lookups.frames import URGENCIES, Frame, Status
from thinrow.serving.lookups.links import Known, Link, Links, Server, said
from thinrow.serving.lookups.messages import DTYPES, MOST_TABLES, Ask, Ints, Request, Rows, encode_request, parse_reply
from thinrow.serving.lookups.routed import Bags, Vectors, Wanted, cut, joined
from thinrow.serving.lookups.stats import Stats
from thinrow.serving.lookups.streams import wait

POLICIES = ("default", "fail")
#: Statuses that say that the caller is wrong; after the others another replica is asked.
_WRONG = (Status.UNKNOWN_TABLE, Status.MISROUTED, Status.INVALID)


@dataclass(frozen=True, slots=True, eq=False)
class Answer(Mapping[str, Vectors]):
    """What was looked up, by table.

    Attributes:
        versions: of the export that each table was read from; None where no server answered for it.
        missing: shards that did not answer; their keys read as the table's default.
        seconds: of each shard that answered, from the request to the answer.
    """

    tables: dict[str, Vectors]
    versions: dict[str, Version | None]
    missing: tuple[int, ...]
    seconds: Mapping[int, float]

    @property
    def degraded(self) -> bool:
        """A default stands for what a server did not answer."""
        return bool(self.missing)

    def __getitem__(self, table: str) -> Vectors:
        return self.tables[table]

    def __iter__(self) -> Any:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)


class _Call:
    """What is asked of one shard.

    Attributes:
        flight: links that have the request, and its id there.
        left: replicas that have not been asked.
        retried: those that were asked once more, on a new connection.
        rows: the answer, once it is there; its arrays lie in ``body``.
        before: this call's answer of another version, which stands where it has none.
    """

    def __init__(self, shard: int, asks: list[Ask], replicas: list[Server]) -> None:
        self.shard, self.asks, self.left = shard, asks, replicas
        self.flight: dict[Link, int] = {}
        self.retried: set[Server] = set()
        self.rows: list[Rows] | None = None
        self.body: tuple[Link, Any] | None = None
        self.before: _Call | None = None
        self.why, self.other_version = "no server is usable", False
        self.hedge_at: float | None = None
        self.since, self.seconds = time.monotonic(), 0.0

    @property
    def open(self) -> bool:
        return self.rows is None and not self.other_version and bool(self.flight)


class EmbeddingClient:
    """Attributes:
    stats: what it counted: ``requests`` by kind (``whole``, ``degraded``, ``failed``), ``hedges``, ``again`` (shards
        asked twice for one version), ``lost`` connections, ``statuses`` other than OK, ``bytes_in`` and ``bytes_out``.
    """

    def __init__(
        self,
        servers: Sequence[Sequence[str]],
        *,
        routing: Routing | None = None,
        deadline_s: float = 0.1,
        hedge_s: float | None = None,
        policy: str = "default",
        dtype: str = "float32",
        urgency: str = "interactive",
    ) -> None:
        """Nothing is connected yet.

        Args:
            servers: of each shard the addresses of its replicas.
            routing: of the shards; equal ranges where it is None.
            deadline_s: of a read that names none.
            hedge_s: a replica is asked, too, where the first has not answered within it; None for never.
            policy: where a shard does not answer, ``default`` has its keys read as the table's default, and says so;
                ``fail`` raises.
            dtype: of rows and sums on the wire.
            urgency: of its reads, one of ``URGENCIES``: servers answer the more urgent first, and keep room for them.

        Raises:
            InputError: an argument that cannot be used.
        """
        if not servers or not all(servers):
            raise InputError("each shard needs at least one server")
        self._routing = Routing.even(len(servers)) if routing is None else routing
        if len(self._routing) != len(servers):
            raise InputError(f"servers of {len(servers)} shards for a routing of {len(self._routing)}; give as many")
        if policy not in POLICIES:
            raise InputError(f"policy={policy!r}; it must be one of {', '.join(POLICIES)}")
        if dtype not in DTYPES:
            raise InputError(f"dtype={dtype!r}; it must be one of {', '.join(DTYPES)}")
        if urgency not in URGENCIES:
            raise InputError(f"urgency={urgency!r}; it must be one of {', '.join(URGENCIES)}")
        self._rank = URGENCIES.index(urgency)
        _check_seconds("deadline_s", deadline_s)
        if hedge_s is not None:
            _check_seconds("hedge_s", hedge_s)
        self._deadline_s, self._hedge_s, self._policy, self._dtype = deadline_s, hedge_s, policy, dtype
        self._servers = [[Server(address) for address in replicas] for replicas in servers]
        self._known = Known()
        self.stats = Stats()
        self._links = Links(self._known, self.stats, link_to)
        self._numbers, self._turn = _ids(), itertools.count()
        prepare()
        _clients.add(self)

    def __enter__(self) -> EmbeddingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections of all threads; a read that is under way in another fails."""
        self._links.close()

    def after_fork(self) -> None:
        """In a child process, by itself: connections of its own, for the parent reads from those that there were."""
        self.stats.after_fork()
        inherited, self._links = self._links, Links(self._known, self.stats, link_to)
        inherited.after_fork()
        self._numbers = _ids()

    def read(
        self,
        wanted: Mapping[str, Ints | Bags],
        *,
        deadline_s: float | None = None,
        pins: Mapping[str, Version] | None = None,
    ) -> Answer:
        """Look up keys (n,) int64, or bags of them, in some tables.

        Args:
            pins: table -> the version to answer from, for tables that are wanted in one that the caller has rows or
                weights of; a server that has not got it is as one that does not answer.

        Raises:
            InputError: keys, bounds or weights that cannot be used; a table that servers do not have; a value beyond
                the dtype on the wire; a routing that is not that of the servers.
            Unavailable: policy ``fail`` and a shard that did not answer; or no server has ever said what tables there
                are, so that there is no default to take.
        """
        if not wanted:
            raise InputError("no table; name at least one")
        if len(wanted) > MOST_TABLES:
            raise InputError(f"{len(wanted)} tables; a read has at most {MOST_TABLES}")
        seconds = self._deadline_s if deadline_s is None else deadline_s
        _check_seconds("deadline_s", seconds)
        since = time.monotonic()
        try:
            parts = [cut(table, what, self._routing) for table, what in wanted.items()]
            answer = self._read(parts, since + seconds, pins or {})
        except ThinrowError:
            self.stats.add("requests", "failed")
            raise
        self.stats.add("requests", "degraded" if answer.degraded else "whole")
        self.stats.took(time.monotonic() - since)
        return answer

    def _read(self, parts: list[Wanted], until: float, pins: Mapping[str, Version]) -> Answer:
        shards = sorted({shard for part in parts for shard in part.asks})
        for part in parts if pins else ():
            part.asks = {shard: replace(ask, pin=pins.get(part.table)) for shard, ask in part.asks.items()}
        calls = {shard: self._call(shard, [p.asks[shard] for p in parts if shard in p.asks]) for shard in shards}
        self._ask(list(calls.values()), until)
        if not self._agree(calls):
            self._settle(calls, until)
        missing = tuple(shard for shard, call in calls.items() if call.rows is None)
        if missing and self._policy == "fail":
            why = "; ".join(f"shard {shard}: {calls[shard].why}" for shard in missing)
            raise Unavailable(f"no answer before the deadline ({why})", shards=missing)
        answer = self._joined(parts, calls, missing)
        for call in calls.values():
            if call.body is not None:
                call.body[0].give_back(call.body[1])
        return answer

    def _agree(self, calls: dict[int, _Call]) -> bool:
        """All tables of each export are of one version."""
        seen: dict[str, Version] = {}
        pairs = (pair for call in calls.values() for pair in self._versions(call))
        return all(seen.setdefault(export, version) == version for export, version in pairs)

    def _settle(self, calls: dict[int, _Call], until: float) -> None:
        """Have all tables of an export of one version."""
        # Once for the oldest version that was seen; where a server no longer has that, for the newest of all; and, as
        # they may have come to it at different times again, for the oldest of these. Then what agrees counts.
        for pinned in (True, False, True):
            again = self._again(calls, pinned) if time.monotonic() < until else []
            if not again:
                break
            self._ask(again, until)
            for shard, call in calls.items():
                if call.rows is None and call.before is not None:
                    calls[shard] = call.before
        self._vote(calls)

    def _call(self, shard: int, asks: list[Ask]) -> _Call:
        replicas = self._servers[shard]
        first = next(self._turn) % len(replicas)
        order = replicas[first:] + replicas[:first]
        # One that seems to be gone is asked when its pause is over; where all do, the one whose pause ends first.
        usable = [server for server in order if server.usable()]
        return _Call(shard, asks, usable or [min(order, key=lambda server: server.again_at)])

    def _again(self, calls: dict[int, _Call], pinned: bool) -> list[_Call]:
        """Calls to be made once more, where tables of an export are of several versions: of shards that are ahead of
        the oldest, for that; or, without ``pinned``, of all, for their newest."""
        pins: dict[str, Version] = {}
        found = [(shard, pair) for shard, call in calls.items() for pair in self._versions(call)]
        for _, (export, version) in found:
            pins[export] = min(pins.get(export, version), version, key=_order)
        ahead = sorted({shard for shard, (export, version) in found if pins[export] != version})
        if ahead and not pinned:
            return [self._renew(calls, shard, {}) for shard in sorted({shard for shard, _ in found})]
        return [self._renew(calls, shard, pins) for shard in ahead]

    def _renew(self, calls: dict[int, _Call], shard: int, pins: dict[str, Version]) -> _Call:
        self.stats.add("again")
        before = calls[shard]
        asks = [replace(ask, pin=pins.get(self._known.export_of(ask.table))) for ask in before.asks]
        calls[shard] = self._call(shard, asks)
        calls[shard].before = before
        return calls[shard]

    def _versions(self, call: _Call) -> list[tuple[str, Version]]:
        """Export and version of each table that ``call`` has an answer for."""
        pairs = zip(call.asks, call.rows or (), strict=call.rows is not None)
        return [(self._known.export_of(ask.table), rows.version) for ask, rows in pairs]

    def _vote(self, calls: dict[int, _Call]) -> None:
        """Of each export the version that most shards answered from counts, the newer of two; an answer of another is
        as if there were none."""
        votes = Counter(pair for call in calls.values() for pair in self._versions(call))
        agreed: dict[str, Version] = {}
        for (export, version), _ in sorted(votes.items(), key=lambda vote: (vote[1], _order(vote[0][1]))):
            agreed[export] = version
        for call in calls.values():
            if any(agreed[export] != version for export, version in self._versions(call)):
                call.rows, call.why = None, "it answered from another version"

    def _joined(self, parts: list[Wanted], calls: dict[int, _Call], missing: tuple[int, ...]) -> Answer:
        tables: dict[str, Vectors] = {}
        versions: dict[str, Version | None] = {}
        for part in parts:
            default = self._known.defaults.get(part.table)
            if default is None:
                if part.asks and all(calls[shard].rows is not None for shard in part.asks):
                    raise ProtocolError(f"servers answered for table {part.table!r} without saying that they have it")
                raise Unavailable(
                    f"no server has yet said what table {part.table!r} is like, so it has no default", shards=missing
                )
            answers: dict[int, Rows | None] = {}
            for shard in part.asks:
                call = calls[shard]
                at = next(i for i, ask in enumerate(call.asks) if ask.table == part.table)
                answers[shard] = None if call.rows is None else call.rows[at]
            found = [rows.version for rows in answers.values() if rows is not None]
            tables[part.table] = joined(part, default, answers)
            versions[part.table] = found[0] if found else None
        seconds = {shard: call.seconds for shard, call in calls.items() if call.rows is not None}
        return Answer(tables, versions, missing, seconds)

    def _ask(self, calls: list[_Call], until: float) -> None:
        """Ask all, and wait until each has an answer or nobody left to give one, or it is ``until``."""
        try:
            for call in calls:
                self._launch(call, until)
            while waiting := [call for call in calls if call.open]:
                now = time.monotonic()
                if now >= until:
                    break
                self._hedge(waiting, now, until)
                self._go_on(waiting, until)
        finally:
            for call in calls:
                self._end(call, time.monotonic() >= until)

    def _hedge(self, waiting: list[_Call], now: float, until: float) -> None:
        """Ask a replica, too, where it is time."""
        for call in waiting:
            if call.hedge_at is not None and call.hedge_at <= now:
                call.hedge_at = None
                if self._launch(call, until):
                    self.stats.add("hedges")

    def _go_on(self, waiting: list[_Call], until: float) -> None:
        """Wait for bytes, room, or the next hedge, and go on with what there is."""
        links = {link: call for call in waiting for link in call.flight}
        at = min([until, *(call.hedge_at for call in waiting if call.hedge_at is not None)])
        compiled = [link for link in links if isinstance(link, CompiledLink)]
        if len(compiled) == len(links):
            found = first_ready(compiled, int(at * 1e9))
            if found is not None:
                self._serve(found, links[found], until, readable=True)
            return
        by_stream: dict[Any, Link] = {link.stream: link for link in links}
        writers = [link.stream for link in links if link.stuck]
        readable, writable = wait(by_stream, writers, max(0.0, at - time.monotonic()))
        for stream in readable | writable:
            link = by_stream[stream]
            self._serve(link, links[link], until, stream in readable)

    def _launch(self, call: _Call, until: float) -> bool:
        """Ask the next replica. Returns whether there was one."""
        while call.left:
            server = call.left.pop(0)
            link = self._links.of(server)
            if link is None:
                call.why = f"{server.address} cannot be reached"
                continue
            if link.full or link.stuck:
                call.why = f"{server.address} has not taken earlier requests"
                server.late()
                link.close()
                continue
            left_us = max(1, int((until - time.monotonic()) * 1e6))
            body = encode_request(Request(call.asks, self._dtype, left_us))
            size = sum(memoryview(part).nbytes for part in body)
            if size > server.request_bytes:
                raise InputError(
                    f"a request of {size} bytes; {server.address} takes at most {server.request_bytes}: ask for less"
                )
            number = next(self._numbers)
            call.flight[link] = number
            call.why = f"{server.address} did not answer in time"
            if self._hedge_s is not None and call.left:
                call.hedge_at = time.monotonic() + self._hedge_s
            try:
                link.ask(number, body, self._rank)
            except OSError as error:
                call.why = f"{server.address} cannot be reached: {error}"
                self._lost(link, call)
                continue
            return True
        return False

    def _serve(self, link: Link, call: _Call, until: float, readable: bool) -> None:
        """Go on with what one link has."""
        try:
            link.flush()
            if readable:
                for reply in link.replies():
                    if reply.header.id == call.flight.get(link):
                        del call.flight[link]
                        self._take(reply, link, call, until)
                        link.has_answered = True
                    if call.body is None or call.body[1] is not reply.body:
                        link.give_back(reply.body)
        except (OSError, EOFError, ProtocolError) as error:
            call.why = f"{link.server.address}: {error or 'the connection ended'}"
            # What sends no frames of ours will not do so on a new connection.
            self._lost(link, call, again=not isinstance(error, ProtocolError))
            if call.rows is None and not call.flight:
                self._launch(call, until)

    def _take(self, reply: Frame, link: Link, call: _Call, until: float) -> None:
        assert reply.body is not None
        status = reply.header.status
        if status == Status.OK:
            rows = parse_reply(reply.body)
            if len(rows) != len(call.asks):
                raise ProtocolError(f"{len(rows)} tables in an answer to {len(call.asks)}")
            for ask, one in zip(call.asks, rows, strict=True):
                default = self._known.defaults.get(ask.table)
                if default is not None and one.values.shape[1] != len(default):
                    # Of a newer export; the first frame of a new connection has its default.
                    raise ConnectionResetError(f"table {ask.table!r} has another width than the server said")
            link.server.answered()
            call.rows, call.body = rows, (link, reply.body)
            call.seconds = time.monotonic() - call.since
            return
        link.server.answered()
        text = said(reply.body)
        name = Status(status).name if status in Status._value2member_map_ else str(status)
        self.stats.add("statuses", name)
        call.why = f"{link.server.address} {name.lower()}: {text}"
        if status == Status.OTHER_VERSION:
            call.other_version = True
        elif status in _WRONG:
            raise InputError(f"{link.server.address}: {text}")
        elif not call.flight:
            self._launch(call, until)

    def _lost(self, link: Link, call: _Call, again: bool = True) -> None:
        link.close()
        self.stats.add("lost", link.server.address)
        call.flight.pop(link, None)
        if again and link.has_answered and link.server not in call.retried:
            # It may have ended long ago, and its server been started again: a new one is tried first, once.
            call.retried.add(link.server)
            call.left.insert(0, link.server)
        else:
            link.server.failed()

    def _end(self, call: _Call, passed: bool) -> None:
        """Nobody waits any longer for what is still under way: the deadline has passed, a replica has answered, or the
        read has failed."""
        for link, number in call.flight.items():
            # Half a request cannot be taken back, and its arrays are the caller's.
            stuck = bool(link.stuck)
            if passed or call.rows is not None:
                stuck |= link.server.late()
            try:
                if not stuck:
                    link.cancel(number)
            except OSError:
                stuck = True
            if stuck or link.stuck:
                link.close()
        call.flight.clear()


def _order(version: Version) -> tuple[int, int]:
    return version.step, version.crc32c


def _ids() -> itertools.count[int]:
    """Of requests: others in each process, and never 0."""
    return itertools.count(1 + secrets.randbits(62))


_clients = weakref.WeakSet[EmbeddingClient]()


def _after_fork() -> None:
    for client in list(_clients):
        client.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 < seconds <= 3600:
        raise InputError(f"{name}={seconds!r}; it must be above 0 and at most 3600 seconds")
