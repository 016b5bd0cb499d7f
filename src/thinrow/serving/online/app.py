"""The ranker over HTTP.

=====================  ==============================================================================
``POST /v1/rank``         the best of a request's candidates; answered when its impression is durable
``POST /v1/outcomes``     what came of it; answered when it is durable
``GET /v1/history``       what a user's next request would see, with its version
``GET /v1/users``         some users
``GET /v1/model``         release, arms and servers
``GET /``                 a page to try it
``GET /openapi.json``     all of this, for machines
``GET /docs``             the same for people
``GET /healthz``          the process lives
``GET /readyz``           it takes requests (503 while it drains, the disk refuses, or a server does not answer)
``GET /metrics``          for Prometheus
=====================  ==============================================================================

Errors are those of the snapshot service (``thinrow.online.app``): 400, 413, 429 with ``Retry-After``, 503.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import InputError, MissingExtraError, StoreError
from thinrow.core.users import plain
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.online import wire
from thinrow.online.app import error_response, read_body
from thinrow.online.journal import MAX_FUTURE_MS, Journal
from thinrow.online.page import page
from thinrow.schema import Projection
from thinrow.serving.lookups.stats import prometheus_text
from thinrow.serving.online.batcher import Batcher, RankAnswer, RankRequest
from thinrow.serving.online.live import Arms
from thinrow.serving.online.openapi import openapi
from thinrow.serving.online.try_page import try_page

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ImportError as e:  # pragma: no cover
    raise MissingExtraError(e.name or "starlette", "serve") from e

_MOST_SHOWN, _MOST_USERS = 200, 100


@dataclass(frozen=True, slots=True)
class WebLimits:
    """Attributes:
    body_bytes: of one call.
    candidates: of one request.
    """

    body_bytes: int = 4 << 20
    candidates: int = 4096


class RankService:
    """Attributes:
    draining: it is about to end; requests are still answered.
    """

    def __init__(
        self,
        store: HistoryStore,
        arms: Arms,
        batcher: Batcher,
        *,
        journal: Journal | None = None,
        limits: WebLimits | None = None,
        say: Callable[..., None] | None = None,
        clock: Clock = system_clock,
    ) -> None:
        self.store, self.arms, self.batcher, self.journal = store, arms, batcher, journal
        self.limits, self.clock, self.draining = limits or WebLimits(), clock, False
        self._say = say
        #: Of the last request that was ranked, for the page.
        self._last: dict[str, Any] = {}

    async def rank(self, request: Request) -> Response:
        body = wire.parse_json(await read_body(request, self.limits.body_bytes))
        asked = self._asked(body)
        answer = await asyncio.wrap_future(self.batcher.submit(asked))
        self._last = {"candidates": body["candidates"], "context": body.get("context", {})}
        said = rank_json(answer)
        if self._say is not None:
            plainly = {n: said[n] for n in ("request_id", "user", "model_version", "arm", "degraded_rows", "took_ms")}
            self._say("ranked", **plainly, candidates=len(next(iter(asked.candidates.values()), ())))
        return JSONResponse(said)

    def _asked(self, body: Mapping[str, Any]) -> RankRequest:
        wire.only(body, "a request", "user", "candidates", "context", "request_id", "request_ts", "k")
        user = wire.field_of(body, "user", (int, str))
        ranker = self.arms.choose(user)
        candidates = wire.field_of(body, "candidates", dict)
        context = wire.field_of(body, "context", dict, {})
        _same("candidates", candidates, [f.name for f in ranker.request_schema.candidates])
        _same("context", context, [f.name for f in ranker.request_schema.context])
        # Alone the ranker refuses them; among numbers of a batch they would be numbers.
        wire.refuse_booleans("context", context.values())
        for name in candidates:
            wire.refuse_booleans(name, wire.field_of(candidates, name, list))
        lengths = {name: len(wire.field_of(candidates, name, list)) for name in candidates}
        if len(set(lengths.values())) > 1:
            raise InputError(f"candidates have {lengths} values; give each field one a candidate")
        if max(lengths.values(), default=0) > self.limits.candidates:
            raise InputError(f"{max(lengths.values())} candidates; at most {self.limits.candidates} a request")
        # 53 bits: what every reader of JSON has.
        number = wire.field_of(body, "request_id", int, secrets.randbits(53))
        at = wire.field_of(body, "request_ts", int, self.clock())
        k = wire.field_of(body, "k", int, 10)
        if not 0 <= number < 1 << 63 or not 0 <= at < 1 << 62 or k < 1:
            raise InputError(f"request_id={number}, request_ts={at}, k={k}; ids and times are 0 or more, k 1 or more")
        if self.journal is not None and at > (latest := self.clock() + MAX_FUTURE_MS):
            # Refused here, for the log takes the requests of a batch together, or none.
            raise InputError(f"request_ts={at}; the log takes times up to {latest} by now: look at the sender's clock")
        return RankRequest(number, user, at, candidates, context, k)

    async def outcomes(self, request: Request) -> Response:
        if self.journal is None:
            raise StoreError("this ranker has no log; start it with --log")
        records = wire.outcomes_json(wire.parse_json(await read_body(request, self.limits.body_bytes)))
        return JSONResponse({"logged": await asyncio.wrap_future(self.journal.outcomes(records))}, 201)

    async def history(self, request: Request) -> Response:
        user: int | str = request.query_params.get("user", "")
        if self.store.schema.user_kind == "int64":
            try:
                user = int(user)
            except ValueError:
                raise InputError(f"user={user!r}; the ids of this store are integers") from None
        return JSONResponse(await asyncio.to_thread(self._history, user))

    def _history(self, user: int | str) -> dict[str, Any]:
        now = self.clock()
        ranker = self.arms.choose(user)
        seen = self.store.peek([user], now)
        columns = ranker.spec.projection.columns
        shown = reconstruct(seen.generation, seen.requests, Projection(columns=columns, max_len=_MOST_SHOWN)).histories
        names = ["event_ts", *(c.name for c in Projection(columns=columns).resolve(seen.generation.schema))]
        rows = {name: shown.to_jagged(name).to_arrow().to_pylist()[0] for name in names}
        stated = seen.requests.versions[0]
        version = {name: int(stated[name]) for name in stated.dtype.names or ()}
        recent = int(seen.requests.inline.lengths[0])
        return {
            "user": user,
            "request_ts": now,
            "events": version["seq_len"] + recent,
            "recent_events": recent,
            "version": version | {"bytes": wire.encode_versions(seen.requests.versions)[0].tobytes().hex()},
            "history": {name: [_say_json(v) for v in values] for name, values in rows.items()},
            "arm": ranker.arm,
        }

    async def users(self, request: Request) -> Response:
        users = await asyncio.to_thread(self.store.users)
        return JSONResponse({"users": [plain(u) for u in users[:_MOST_USERS]], "of": len(users)})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self.state())

    def state(self) -> dict[str, Any]:
        """Release, arms and servers."""
        arms = [
            {
                "arm": live.spec.name,
                "share": live.spec.share,
                "release": live.ranker.model_version,
                "newer": None if live.behind is None else dict(zip(("release", "why"), live.behind, strict=True)),
                "servers": [list(replicas) for replicas in live.spec.servers],
                "prefixes": None if live.ranker.model.prefixes is None else live.ranker.model.prefixes.read(),
                "cache": None if live.caches is None or live.caches.live is None else live.caches.live.read(),
                "reads": {} if live.client is None else live.client.stats.read().get("requests", {}),
            }
            for live in self.arms.lives
        ]
        schema = self.arms.lives[0].ranker.request_schema
        fields = {
            "context": {f.name: f.dtype for f in schema.context},
            "candidates": {f.name: f.dtype for f in schema.candidates},
        }
        return {"arms": arms, "fields": fields, "last": self._last}

    async def page(self, request: Request) -> Response:
        return HTMLResponse(try_page())

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._description())

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(page(self._description()))

    def _description(self) -> dict[str, Any]:
        return openapi(self.store.schema, self.arms.lives[0].ranker.request_schema, self.limits.candidates)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        broken = None if self.journal is None else self.journal.broken
        why = "draining" if self.draining else None if broken is None else str(broken)
        for live in self.arms.lives if why is None else ():
            why = why or await asyncio.to_thread(live.has, live.release)
        releases = {live.spec.name: live.ranker.model_version for live in self.arms.lives}
        return JSONResponse({"status": why or "ready", "releases": releases}, 200 if why is None else 503)

    async def metrics(self, request: Request) -> Response:
        text = prometheus_text(self.batcher.stats, "thinrow_ranker")
        for live in self.arms.lives:
            if live.client is not None:
                text += prometheus_text(live.client.stats, f"thinrow_ranker_lookups{_suffix(live.spec.name)}")
        return Response(text, media_type="text/plain; version=0.0.4")

    def answering(self, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Callable[..., Any]:
        """``answer`` with errors as JSON."""

        async def endpoint(request: Request) -> Response:
            since = time.monotonic()
            try:
                return await answer(request)
            except Exception as error:
                response = error_response(error, path)
                if self._say is not None:
                    seconds = round(time.monotonic() - since, 6)
                    self._say("refused", path=path, status=response.status_code, why=str(error), seconds=seconds)
                return response

        return endpoint


def rank_json(answer: RankAnswer) -> dict[str, Any]:
    """What a caller gets."""
    return {
        "request_id": answer.request.request_id,
        "user": answer.request.user,
        "request_ts": answer.request.request_ts,
        "model_version": answer.model_version,
        "arm": answer.arm,
        "ranked": {**{n: [_say_json(v) for v in c] for n, c in answer.candidates.items()}, "score": answer.scores},
        "position": answer.position,
        "degraded_rows": answer.degraded,
        "ranked_with": answer.ranked_with,
        "took_ms": {name: round(ms, 3) for name, ms in answer.took_ms.items()},
    }


def _say_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_say_json(v) for v in value]
    return None if isinstance(value, float) and value - value != 0 else value


def _same(what: str, given: Mapping[str, Any], wanted: list[str]) -> None:
    for name in wanted:
        if name not in given:
            raise InputError(f"{what} lack {name!r}; the model reads {', '.join(wanted) or 'none'}")
    for name in given:
        if name not in wanted:
            raise InputError(
                f"{what} have {name!r}, which the model does not read; it reads {', '.join(wanted) or 'none'}"
            )


def _suffix(arm: str) -> str:
    return "_" + "".join(c if c.isalnum() else "_" for c in arm) if arm else ""


def create_app(service: RankService) -> Starlette:
    """The service as an ASGI application; ``app.state.service`` has it."""
    paths: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("POST", "/v1/rank", service.rank),
        ("POST", "/v1/outcomes", service.outcomes),
        ("GET", "/v1/history", service.history),
        ("GET", "/v1/users", service.users),
        ("GET", "/v1/model", service.model),
        ("GET", "/", service.page),
        ("GET", "/openapi.json", service.openapi),
        ("GET", "/docs", service.docs),
        ("GET", "/healthz", service.health),
        ("GET", "/readyz", service.ready),
        ("GET", "/metrics", service.metrics),
    ]
    app = Starlette(routes=[Route(path, service.answering(path, answer), methods=[how]) for how, path, answer in paths])
    app.state.service = service
    return app


__all__ = ["RankService", "WebLimits", "create_app", "rank_json"]
