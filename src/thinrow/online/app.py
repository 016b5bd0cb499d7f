"""The snapshot service over HTTP: histories out, impressions and outcomes in.

=====================  ==============================================================================
``POST /v1/snapshots``    histories of users before a time, their versions, and the token of an impression
``POST /v1/impressions``  what was shown, with that token; answered when it is durable
``POST /v1/outcomes``     what came of it; answered when it is durable
``GET /v1/schema``        columns of events and fields of impressions
``GET /openapi.json``     all of this, for machines
``GET /docs``             the same for people
``GET /healthz``          the process lives
``GET /readyz``           it takes requests (503 while it warms up or drains, or where the disk refuses)
``GET /metrics``          for Prometheus
=====================  ==============================================================================

Errors are JSON: ``{"error": {"type": "InputError", "message": "..."}}``, 400 for what a caller sent, 413 for too much
of it or asked for, 410 for what was erased, 429 where more is under way than there may be, 503 where the store or its
disk refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import (
    CorruptionError,
    Gone,
    InputError,
    MissingExtraError,
    Overloaded,
    StoreError,
    ThinrowError,
    Unavailable,
)
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.online import wire
from thinrow.online.journal import Journal
from thinrow.online.openapi import describe, openapi
from thinrow.online.page import page
from thinrow.online.snapshots import AsyncSnapshots, TooLarge, some_users
from thinrow.online.tables import TableWriter
from thinrow.schema import ExampleSchema, Projection

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ImportError as e:  # pragma: no cover
    raise MissingExtraError(e.name or "starlette", "serve") from e

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Attributes:
    body_bytes: of one request.
    users: of one snapshot.
    events: of the histories of one snapshot, each cut to the projection's ``max_len``, and of its recent events.
    threads, waiting: snapshots that run, and that wait, at once; more are answered 429.
    writes: impressions and outcomes under way at once.
    body_s: for which a body may come in. Bodies of as many calls as may run and wait are read at once.
    """

    body_bytes: int = 8 << 20
    users: int = 1_024
    events: int = 1 << 18
    threads: int = 4
    waiting: int = 64
    writes: int = 512
    body_s: float = 60.0


class _Service:
    def __init__(
        self,
        store: HistoryStore,
        journal: Journal | None,
        examples: ExampleSchema | None,
        limits: Limits,
        clock: Clock,
    ) -> None:
        self.store, self.journal, self.examples, self.limits, self.clock = store, journal, examples, limits, clock
        self.snapshots = AsyncSnapshots(store, threads=limits.threads, waiting=limits.waiting, max_events=limits.events)
        self.draining = self.warming = False
        self.writes = self.reading = 0
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "thinrow_requests", "Requests answered, by path and status.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "thinrow_request_seconds",
            "Time to answer, by path.",
            ["path"],
            registry=self.registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
        )
        self.logged = Counter("thinrow_logged", "Records acknowledged, by kind.", ["kind"], registry=self.registry)
        inside = Gauge("thinrow_snapshots_inside", "Snapshots that run or wait.", registry=self.registry)
        inside.set_function(lambda: self.snapshots.inside)
        waiting = Gauge("thinrow_journal_waiting_bytes", "Bytes that wait for the disk.", registry=self.registry)
        waiting.set_function(lambda: 0 if journal is None else journal.waiting_bytes)

    async def warm_up(self) -> None:
        """The calls of a snapshot, so that kernels are compiled, and files open, before ``/readyz`` says so: a first
        call would wait minutes for that on a busy machine."""
        try:
            await asyncio.to_thread(self._try_once)
        except Exception:
            # What is wrong the callers hear.
            log.exception("warming up failed")
        finally:
            self.warming = False

    def _try_once(self) -> None:
        users = some_users(self.store)
        projection = Projection(max_len=16)
        taken = self.store.peek(users, self.clock())
        histories = reconstruct(taken.generation, taken.requests, projection).histories
        seen = wire.encode_seen(taken.requests, taken.generation.schema)
        wire.snapshot_json(taken, seen, histories, None, [c.name for c in projection.resolve(self.store.schema)])

    async def _body(self, request: Request) -> bytes:
        """The body. Connections are not counted, for idle ones cost little; bodies are in memory while they come."""
        limits = self.limits
        most = limits.threads + limits.waiting + limits.writes
        if self.reading >= most:
            raise Overloaded(f"{self.reading} bodies come in, which is all there may be; try again later")
        self.reading += 1
        try:
            async with asyncio.timeout(limits.body_s):
                return await read_body(request, limits.body_bytes)
        except TimeoutError:
            raise InputError(f"the body was not there after {limits.body_s} s; send it at once") from None
        finally:
            self.reading -= 1

    async def snapshot(self, request: Request) -> Response:
        body = wire.parse_json(await self._body(request))
        wire.only(body, "a snapshot", "users", "request_ts", "request_id", "projection", "histories")
        users = wire.field_of(body, "users", list)
        if bool in set(map(type, users)):
            raise InputError("a user is true or false; give ids of users")
        if len(users) > self.limits.users:
            raise TooLarge(f"{len(users)} users; at most {self.limits.users} a call")
        times = wire.times_of(body, self.clock())
        accepts_arrow = wire.ARROW in request.headers.get("accept", "")
        ids = wire.request_ids_of(body, len(users), arrow=accepts_arrow)
        projection = wire.projection_of(body)
        names = [c.name for c in projection.resolve(self.store.schema)]
        say = wire.snapshot_arrow if accepts_arrow else wire.snapshot_json
        if wire.field_of(body, "histories", bool, True):
            taken, built = await self.snapshots.read(users, times, projection)
            histories = built.histories
        else:
            taken, histories = await self.snapshots.snapshot(users, times), None
        seen = await asyncio.to_thread(wire.encode_seen, taken.requests, taken.generation.schema)
        self._refuse_token(seen, int(taken.requests.inline.lengths.sum()))
        answer = await asyncio.to_thread(say, taken, seen, histories, ids, names)
        return Response(answer, media_type=wire.ARROW if accepts_arrow else "application/json")

    async def impressions(self, request: Request) -> Response:
        journal, examples = self._writable()
        body = await self._body(request)
        async with self._writing():
            if wire.ARROW in request.headers.get("content-type", ""):
                records = await asyncio.to_thread(wire.impressions_arrow, body, self.store.schema, examples)
            else:
                records = await asyncio.to_thread(
                    lambda: wire.impressions_json(wire.parse_json(body), self.store.schema, examples)
                )
            n = await asyncio.wrap_future(journal.impressions(records))
        self.logged.labels("impressions").inc(n)
        return JSONResponse({"logged": n}, 201)

    async def outcomes(self, request: Request) -> Response:
        journal, _ = self._writable()
        body = await self._body(request)
        async with self._writing():
            records = wire.outcomes_json(wire.parse_json(body))
            n = await asyncio.wrap_future(journal.outcomes(records))
        self.logged.labels("outcomes").inc(n)
        return JSONResponse({"logged": n}, 201)

    async def schema(self, request: Request) -> Response:
        return JSONResponse(describe(self.store.schema, self.examples))

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._description())

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page(self._description()))

    def _description(self) -> dict[str, Any]:
        return openapi(self.store.schema, self.examples, self.limits.users, self.limits.events)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        broken = None if self.journal is None else self.journal.broken
        for status, is_so in (("draining", self.draining), ("warming up", self.warming), (str(broken), broken)):
            if is_so:
                return JSONResponse({"status": status}, 503)
        await asyncio.to_thread(self.store.pin)
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    def _refuse_token(self, seen: bytes, events: int) -> None:
        """A token that no impression could bring back is not given."""
        size, most = 4 * len(seen) // 3, self.limits.body_bytes
        if self.journal is not None and size > most:
            raise Overloaded(
                f"the token of {events} recent events has {size} bytes in base64; an impression has at most {most}: "
                "try again when the compaction that was asked for has ended, or ask for fewer users a call"
            )

    def _writable(self) -> tuple[Journal, ExampleSchema]:
        if self.journal is None or self.examples is None:
            raise StoreError("this service has no log; start it with --log")
        return self.journal, self.examples

    @contextlib.asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        if self.writes >= self.limits.writes:
            raise Overloaded(f"{self.writes} writes are under way, which is all there may be; try again later")
        self.writes += 1
        try:
            yield
        finally:
            self.writes -= 1

    def answering(self, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Callable[..., Any]:
        """``answer`` with errors as JSON, counted and timed."""

        async def endpoint(request: Request) -> Response:
            since = time.perf_counter()
            try:
                response = await answer(request)
            except Exception as e:
                response = error_response(e, path)
            self.requests.labels(path, response.status_code).inc()
            self.seconds.labels(path).observe(time.perf_counter() - since)
            return response

        return endpoint


async def read_body(request: Request, most: int) -> bytes:
    """The body, never more than ``most`` bytes of it in memory. Raises TooLarge; InputError where it ends early."""
    said = request.headers.get("content-length", "0")
    if said.isdigit() and int(said) > most:
        raise TooLarge(f"a body of {said} bytes; at most {most}")
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise TooLarge(f"a body of more than {most} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise InputError(f"the caller went away after {size} bytes of a body") from None
    return b"".join(parts)


def error_response(error: Exception, path: str) -> Response:
    """The answer that tells a caller of ``error``; what no error of thinrow's says is a fault of ours, and logged."""
    status = 500
    if not isinstance(error, ThinrowError):
        log.error("%s failed", path, exc_info=error)
        said = {"type": "InternalError", "message": "the service failed, not the call; its log says why"}
        return JSONResponse({"error": said}, status)
    for kind, code in (
        (TooLarge, 413),
        (InputError, 400),
        (Overloaded, 429),
        (Gone, 410),
        (StoreError, 503),
        (Unavailable, 503),
        (CorruptionError, 500),
    ):
        if isinstance(error, kind):
            status = code
            break
    headers = {"retry-after": "1"} if status in (429, 503) else None
    name = "InputError" if isinstance(error, TooLarge) else type(error).__name__
    # What a caller sent may be quoted there, and have no UTF-8 form.
    message = str(error).encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"error": {"type": name, "message": message}}, status, headers)


def create_app(
    store: HistoryStore,
    *,
    journal: Journal | None = None,
    examples: ExampleSchema | None = None,
    limits: Limits | None = None,
    table: TableWriter | None = None,
    clock: Clock = system_clock,
) -> Starlette:
    """The service as an ASGI application; ``app.state.service`` has it.

    Args:
        store: whose histories are served. It stays open until the caller closes it.
        journal: where impressions and outcomes go; None to serve snapshots alone.
        examples: the schema of the impressions; needed with ``journal``.
        table: what joins the logs, for the metrics.
    """
    service = _Service(store, journal, examples, limits or Limits(), clock)
    if table is not None:
        failing = Gauge("thinrow_join_failing", "1 where the last join failed.", registry=service.registry)
        failing.set_function(lambda: float(table.error is not None))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.warming = True
        warming_up = asyncio.create_task(service.warm_up())
        yield
        await warming_up
        await asyncio.to_thread(service.snapshots.close)

    paths: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("POST", "/v1/snapshots", service.snapshot),
        ("POST", "/v1/impressions", service.impressions),
        ("POST", "/v1/outcomes", service.outcomes),
        ("GET", "/v1/schema", service.schema),
        ("GET", "/openapi.json", service.openapi),
        ("GET", "/docs", service.page),
        ("GET", "/healthz", service.health),
        ("GET", "/readyz", service.ready),
        ("GET", "/metrics", service.metrics),
    ]
    app = Starlette(
        routes=[Route(path, service.answering(path, answer), methods=[how]) for how, path, answer in paths],
        lifespan=lifespan,
    )
    app.state.service = service
    return app


__all__ = ["Limits", "create_app", "error_response", "read_body"]
