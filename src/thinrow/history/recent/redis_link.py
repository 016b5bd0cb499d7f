"""The wire to a Redis server: where it is, commands packed as bytes, whole pipelines on a connection, and its errors.

Worked example: ``pack(b"GET", b"a")`` is ``*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\na\\r\\n``. A pipeline of 300 such commands
is one write and 300 replies read in order: one round trip. A reply that is an error stands in its place in the list.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from thinrow.core.errors import InputError, MissingExtraError, Overloaded, StoreError

#: Of one write; the replies to a part are read before the next is sent.
PART_COMMANDS, PART_BYTES = 1_024, 4 << 20
DURABILITIES = ("always", "everysec", "none")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OPTIONS = {"name", "durability", "replicas", "timeout_s", "patience_s"}
_SHAPE = "it must be redis[s]://HOST[:PORT][/DB][?name=NAME&durability=always|everysec|none&replicas=N&timeout_s=5]"
#: Replies of a server that is about to be itself again: nothing was done, and the same may work a moment later.
_PASSING = ("LOADING", "BUSY ", "UNBLOCKED")
#: Replies of a server that takes nothing: nothing was done.
_FULL = ("OOM", "MISCONF", "NOREPLICAS")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """Where a recent tier is, and what its calls wait for.

    Attributes:
        host, port, db, tls: of the server.
        name: of the store; all keys begin with ``{thinrow:<name>``. Empty where nobody has chosen one yet.
        durability: ``always`` (on the server's disk), ``everysec`` (at most a second later) or ``none``.
        replicas: that must have a call before it returns; on top of ``durability``.
        timeout_s: of one answer.
        patience_s: for how long a call goes on trying while the server is away, or changes.
    """

    host: str
    port: int = 6379
    db: int = 0
    tls: bool = False
    name: str = ""
    durability: str = "everysec"
    replicas: int = 0
    timeout_s: float = 5.0
    patience_s: float = 15.0

    @classmethod
    def parse(cls, url: str) -> RedisLocation:
        """Raises InputError on anything else, credentials in it included."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.fragment:
            raise InputError(f"{url!r} is no Redis server: {_SHAPE}")
        if "@" in parts.netloc:
            raise InputError(
                f"the URL of {parts.hostname!r} holds credentials; set REDIS_USERNAME and REDIS_PASSWORD in their place"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = set(options) - _OPTIONS
        if unknown:
            raise InputError(f"unknown option {min(unknown)!r} in {url!r}; {_SHAPE}")
        try:
            found = cls(
                parts.hostname,
                parts.port or 6379,
                int(parts.path.strip("/") or 0),
                parts.scheme == "rediss",
                options.get("name", ""),
                options.get("durability", "everysec"),
                int(options.get("replicas", 0)),
                float(options.get("timeout_s", 5)),
                float(options.get("patience_s", 15)),
            )
        except ValueError as e:
            raise InputError(f"{url!r} has a number that is none: {e}; {_SHAPE}") from e
        found.check()
        return found

    def check(self) -> None:
        """Raises InputError where a value is out of bounds."""
        if self.durability not in DURABILITIES:
            raise InputError(f"durability {self.durability!r}; it is one of {', '.join(DURABILITIES)}")
        if self.name and not _NAME.fullmatch(self.name):
            raise InputError(f"store name {self.name!r}; use 1 to 64 letters, digits, '.', '_' and '-'")
        if min(self.replicas, self.db, self.patience_s) < 0 or not 0 < self.timeout_s < 3_600:
            raise InputError(
                f"replicas {self.replicas}, db {self.db} and patience_s {self.patience_s} are 0 or more, timeout_s "
                f"{self.timeout_s} is above 0 and under an hour"
            )

    def __str__(self) -> str:
        """The URL again, with the options that are not the usual ones."""
        usual = RedisLocation(self.host)
        named = [(o, getattr(self, o)) for o in sorted(_OPTIONS) if getattr(self, o) != getattr(usual, o)]
        where = f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.db}"
        return f"{where}{'?' * bool(named)}{urlencode(named)}"

    @property
    def tier(self) -> str:
        """What the tier there is called in errors and reports."""
        return f"redis {self.server} {self.name}"

    @property
    def server(self) -> str:
        """Host and port, for messages."""
        return f"{self.host}:{self.port}"


#: What ``reign_of`` reads.
REPLICATION = b"*2\r\n$4\r\nINFO\r\n$11\r\nreplication\r\n"


def reign_of(replication: bytes) -> str:
    """What is the same for as long as one server is master without a break: its replication id."""
    at = replication.index(b"master_replid:") + len(b"master_replid:")
    return replication[at : at + 40].decode()


class Elsewhere(Exception):
    """The connection is none on which the reign was seen; nothing was sent."""


def pack(*arguments: bytes) -> bytes:
    """A command as RESP bytes."""
    return b"*%d\r\n" % len(arguments) + b"".join([b"$%d\r\n%b\r\n" % (len(a), a) for a in arguments])


class RedisLink:
    """Connections to one server; safe over threads, and after a fork."""

    def __init__(self, location: RedisLocation, scripts: Sequence[str] = ()) -> None:
        """Opens nothing yet. The server is given ``scripts`` whenever it has not got one.

        Raises:
            MissingExtraError: redis-py is not installed.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingExtraError("redis", "redis") from None
        self.location, self._scripts = location, [pack(b"SCRIPT", b"LOAD", s.encode()) for s in scripts]
        self._lost: tuple[type[Exception], ...] = (redis.ConnectionError, redis.TimeoutError, OSError)
        self._no_connection = (*self._lost, redis.ResponseError)
        self._unknown_script = redis.exceptions.NoScriptError
        kind = redis.SSLConnection if location.tls else redis.Connection
        #: Connection -> its socket, and the reign of the server behind that.
        self._met: weakref.WeakKeyDictionary[Any, tuple[object, str]] = weakref.WeakKeyDictionary()
        self._pool = redis.ConnectionPool(
            connection_class=kind,
            host=location.host,
            port=location.port,
            db=location.db,
            username=os.environ.get("REDIS_USERNAME") or None,
            password=os.environ.get("REDIS_PASSWORD") or None,
            socket_timeout=location.timeout_s,
            socket_connect_timeout=location.timeout_s,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )

    def close(self) -> None:
        """Close all connections."""
        self._pool.disconnect()

    def pipeline(self, commands: Sequence[bytes], under: str = "") -> tuple[list[Any], Exception | None]:
        """Replies in order; fewer, and why, where the connection was lost: the server may have done the rest too.

        ``under``: a reign; where it is not the one that this very connection met, ``Elsewhere``. A server that was
        restarted, or another one, is not reached by the same connection.
        """
        replies: list[Any] = []
        try:
            connection: Any = self._pool.get_connection()
        except self._no_connection as e:
            return replies, e
        try:
            if under and self._met.get(connection) != (connection._sock, under):
                return replies, Elsewhere()
            for part in _parts(commands):
                connection.send_packed_command([b"".join(part)], check_health=False)
                # Errors are returned by the parser; the connection's own method would raise each, at twice the time.
                read = connection._parser.read_response
                replies += [read(disable_decoding=True) for _ in part]
            if commands and commands[-1] is REPLICATION and isinstance(replies[-1], bytes):
                self._met[connection] = connection._sock, reign_of(replies[-1])
        except self._lost as e:
            connection.disconnect()
            return replies, e
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)
        if self._scripts and any(isinstance(r, self._unknown_script) for r in replies):
            self.pipeline(self._scripts)
        return replies, None

    def read(self, commands: Sequence[bytes]) -> list[Any]:
        """Replies to commands that may be given twice; errors that pass are waited for.

        Raises:
            StoreError: the server does not answer, or refuses.
            Overloaded: it is full.
        """
        patience = Patience(self.location)
        while True:
            replies, lost = self.pipeline(commands)
            error = next((r for r in replies if isinstance(r, Exception)), None)
            if error is None and lost is None:
                return replies
            patience.after(lost or error)

    def ask(self, *arguments: bytes) -> Any:
        """Reply to one command that may be given twice. Raises as ``read``."""
        return self.read([pack(*arguments)])[0]


class Patience:
    """Pauses that grow, until the patience of a location is over."""

    def __init__(self, location: RedisLocation) -> None:
        self._location, self._pause = location, _FIRST_PAUSE_S
        self._until = time.monotonic() + location.patience_s

    def after(self, error: Exception | None) -> None:
        """Wait a little, if waiting may help. Raises what ``refusal`` says else."""
        if not passes(error) or time.monotonic() + self._pause > self._until:
            raise refusal(error, self._location) from error
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)


def passes(error: Exception | None) -> bool:
    """Whether the same call may work a moment later, with nothing done by anybody."""
    from redis import exceptions

    if isinstance(error, exceptions.AuthenticationError):
        return False
    passing = (
        exceptions.ReadOnlyError,
        exceptions.MasterDownError,
        exceptions.ClusterDownError,
        exceptions.TryAgainError,
        exceptions.NoScriptError,
    )
    return not isinstance(error, exceptions.ResponseError) or isinstance(error, passing) or _starts(error, _PASSING)


def _starts(error: object, codes: tuple[str, ...]) -> bool:
    return str(error).startswith(codes)


def refusal(error: Exception | None, location: RedisLocation) -> StoreError:
    """What a server's error means to a caller."""
    text = str(error)
    if text.startswith("OOM") or "'maxmemory'" in text:
        return Overloaded(
            f"Redis at {location.server} is full (maxmemory): compact, so that what is archived leaves it, or give it "
            "more: CONFIG SET maxmemory BYTES; then append again"
        )
    if text.startswith(_FULL):
        return Overloaded(f"Redis at {location.server} takes no writes: {text}; then append again")
    if passes(error):
        return StoreError(
            f"Redis at {location.server} did not answer within {location.patience_s:g} s: {text}; start it, or wait, "
            "and run the call again"
        )
    return StoreError(f"Redis at {location.server} refuses: {text}; check its ACL, REDIS_USERNAME and REDIS_PASSWORD")


def _parts(commands: Sequence[bytes]) -> list[list[bytes]]:
    parts: list[list[bytes]] = []
    size = PART_BYTES
    for command in commands:
        if size >= PART_BYTES or len(parts[-1]) >= PART_COMMANDS:
            parts.append([])
            size = 0
        parts[-1].append(command)
        size += len(command)
    return parts
