"""The OpenAPI 3.1 description of the ranker, with the fields that its model reads."""

from __future__ import annotations

from typing import Any

from thinrow.schema import EventSchema, ExampleSchema

_TYPES = {"float32": "number", "float64": "number", "string": "string", "binary": "string"}


def openapi(events: EventSchema, requests: ExampleSchema, most_candidates: int) -> dict[str, Any]:
    """The document that ``/openapi.json`` serves; ``requests`` are the fields of one request."""
    user = {"type": "integer" if events.user_kind == "int64" else "string"}
    paths: dict[str, Any] = {
        "/v1/rank": {"post": _rank(user, requests, most_candidates)},
        "/v1/outcomes": {"post": _outcomes(requests)},
    }
    for path, what in (
        ("/v1/history", "What a user's next request would see, with its version; ?user="),
        ("/v1/users", "Some users"),
        ("/v1/model", "Release, arms and servers"),
        ("/healthz", "The process lives"),
        ("/readyz", "It takes requests"),
        ("/metrics", "Metrics for Prometheus"),
    ):
        paths[path] = {"get": {"summary": what, "responses": {"200": {"description": what}}}}
    return {"openapi": "3.1.0", "info": {"title": "thinrow ranker", "version": "1"}, "paths": paths}


def _rank(user: dict[str, Any], requests: ExampleSchema, most: int) -> dict[str, Any]:
    shown = {f.name: _list(_value(f.dtype)) | {"maxItems": most} for f in requests.candidates}
    context = {f.name: _value(f.dtype) for f in requests.context}
    body = _object(
        ["user", "candidates", *(["context"] if context else [])],
        user=user,
        candidates=_object(list(shown), **shown),
        context=_object(list(context), **context),
        k={"type": "integer", "minimum": 1, "default": 10},
        request_id={"type": "integer", "minimum": 0, "description": "unique; default: drawn"},
        request_ts={"type": "integer", "minimum": 0, "description": "ms; events before it are read; default: now"},
    )
    best = {f.name: _list(_value(f.dtype)) for f in requests.candidates}
    numbers = _object([])
    answer = _object(
        ["request_id", "user", "request_ts", "model_version", "arm", "ranked", "position", "degraded_rows"],
        request_id={"type": "integer"},
        user=user,
        request_ts={"type": "integer"},
        model_version={"type": "string"},
        arm={"type": "string"},
        ranked=_object([*best, "score"], **best, score=_list({"type": "number"})),
        position=_list({"type": "integer"}),
        degraded_rows={"type": "integer", "description": "of embeddings, for which zeros stood in"},
        ranked_with={"type": "integer", "description": "requests of its batch"},
        took_ms=numbers | {"description": "of each step and server"},
    )
    return _operation("The best candidates of a request; durable when answered", body, answer, "200")


def _outcomes(requests: ExampleSchema) -> dict[str, Any]:
    many = _list({"type": "integer"})
    body = _object(
        ["request_id", "item", "name", "ts"],
        request_id=many,
        item=many,
        name={"type": "string", "enum": [n for n, _ in requests.outcomes]},
        ts=many,
    )
    return _operation(
        "Log what came of it; durable when answered", body, _object([], logged={"type": "integer"}), "201"
    )


def _operation(summary: str, body: dict[str, Any], answer: dict[str, Any], status: str) -> dict[str, Any]:
    answers = {status: {"description": "OK", "content": {"application/json": {"schema": answer}}}}
    for code, what in (
        ("400", "what was sent cannot be used"),
        ("413", "too much was sent"),
        ("429", "more is under way than there may be; Retry-After says when to try again"),
        ("503", "embedding servers or the disk refuse"),
    ):
        answers[code] = {"description": what}
    content = {"application/json": {"schema": body}}
    return {"summary": summary, "requestBody": {"required": True, "content": content}, "responses": answers}


def _value(dtype: str) -> dict[str, Any]:
    return {"type": _TYPES.get(dtype, "integer")}


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _object(required: list[str], **fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": fields}
