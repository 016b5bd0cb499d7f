"""The OpenAPI 3.1 description of the snapshot service, with the columns and fields of its store."""

from __future__ import annotations

from typing import Any

from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema

_JSON_TYPES = {"float32": "number", "float64": "number", "string": "string", "binary": "string"}


def describe(events: EventSchema, examples: ExampleSchema | None) -> dict[str, Any]:
    """The schemas as JSON."""
    return {"events": events.to_dict(), "examples": None if examples is None else examples.to_dict()}


def openapi(events: EventSchema, examples: ExampleSchema | None, max_users: int, max_events: int) -> dict[str, Any]:
    """The document that ``/openapi.json`` serves; ``max_users`` and ``max_events`` are those of one snapshot."""
    user = {"type": "integer" if events.user_kind == "int64" else "string"}
    paths = {"/v1/snapshots": {"post": _snapshots(events, user, max_users, max_events)}}
    if examples is not None:
        paths["/v1/impressions"] = {"post": _impressions(examples)}
        paths["/v1/outcomes"] = {"post": _outcomes(examples)}
    for path, what in (
        ("/v1/schema", "Columns of events and fields of impressions"),
        ("/healthz", "The process lives"),
        ("/readyz", "It takes requests"),
        ("/metrics", "Metrics for Prometheus"),
    ):
        paths[path] = {"get": {"summary": what, "responses": {"200": {"description": what}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "thinrow snapshots", "version": "1"},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        }
    },
    "required": ["error"],
}


def _list(item: dict[str, Any], text: str = "") -> dict[str, Any]:
    return {"type": "array", "items": item, **({"description": text} if text else {})}


def _value(spec: ColumnSpec) -> dict[str, Any]:
    one: dict[str, Any] = {"type": _JSON_TYPES.get(spec.dtype, "integer")}
    if spec.dtype == "binary":
        one["contentEncoding"] = "base64"
    value = _list(one) if spec.ragged or spec.size else one
    return {"anyOf": [value, {"type": "null"}]} if spec.nullable else value


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _operation(summary: str, body: dict[str, Any], answer: dict[str, Any], status: str) -> dict[str, Any]:
    texts = {
        "400": "What was sent cannot be used",
        "413": "Too much was sent, or asked for; the message says how much may be",
        "429": "Try again later",
    }
    texts["503"] = "The store refuses, or the service drains"
    errors = {
        code: {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for code, text in texts.items()
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            status: {"description": summary, "content": {"application/json": {"schema": answer}}},
            **errors,
        },
    }


def _snapshots(events: EventSchema, user: dict[str, Any], max_users: int, max_events: int) -> dict[str, Any]:
    most = (
        f"the newest so many events of each user; an answer has at most {max_events} events, over all its requests, "
        "and stands for at most so many recent ones: 413, or 429 while a compaction is on its way"
    )
    history = {"event_ts": _list({"type": "integer"}), **{c.name: _list(_value(c)) for c in events.columns}}
    body = _object(
        ["users"],
        users={**_list(user), "maxItems": max_users},
        request_ts={
            "anyOf": [{"type": "integer"}, _list({"type": "integer"})],
            "description": "ms since 1970, one for all or one each; events before it (exclusive); default: now",
        },
        request_id=_list({}, "comes back with each request"),
        projection=_object(
            [],
            columns=_list({"type": "string"}),
            groups=_list({"type": "string"}),
            max_len={"type": "integer", "minimum": 1, "description": most},
            horizon_ms={"type": "integer", "minimum": 0},
        ),
        histories={"type": "boolean", "default": True, "description": "false: versions and token alone"},
    )
    request = _object(
        ["user", "request_ts", "version", "recent_events"],
        user=user,
        request_ts={"type": "integer"},
        request_id={},
        version={"type": "string", "contentEncoding": "base64", "description": "53 bytes"},
        recent_events={"type": "integer"},
        history={"type": "object", "properties": history},
    )
    answer = _object(
        ["generation", "schema_id", "seen", "requests"],
        generation={"type": "integer"},
        schema_id={"type": "integer"},
        seen={"type": "string", "contentEncoding": "base64", "description": "send it back with the impression"},
        requests=_list(request),
    )
    return _operation("Histories of users before a time", body, answer, "200")


def _logged() -> dict[str, Any]:
    return _object(["logged"], logged={"type": "integer"})


def _impressions(examples: ExampleSchema) -> dict[str, Any]:
    context = {f.name: _list({"type": _JSON_TYPES.get(f.dtype, "integer")}) for f in examples.context}
    shown = {f.name: _list(_list({"type": _JSON_TYPES.get(f.dtype, "integer")})) for f in examples.candidates}
    body = _object(
        ["seen", "request_id", "candidates"],
        seen={"type": "string", "contentEncoding": "base64"},
        rows=_list({"type": "integer"}, "which requests of the snapshot, from 0; default: all, in order"),
        request_id=_list({"type": "integer"}, "unique"),
        context=_object(list(context), **context),
        candidates=_object(list(shown), **shown),
        model_version={"type": "string"},
        arm={"type": "string"},
        boundary=_list(
            {"type": "integer", "minimum": 0},
            "how many of the newest visible events the model took for the recent part; default: those of the token",
        ),
    )
    return _operation("Log what was shown; durable when answered", body, _logged(), "201")


def _outcomes(examples: ExampleSchema) -> dict[str, Any]:
    name = {"type": "string", "enum": [n for n, _ in examples.outcomes]}
    many = _list({"type": "integer"})
    times = _list({"type": "integer", "minimum": 0}, "ms since 1970, at most an hour ahead of the service's clock")
    value = {"anyOf": [{"type": "integer"}, many], "default": 1}
    body = _object(
        ["request_id", "item", "name", "ts"],
        request_id=many,
        item=many,
        name={"anyOf": [name, _list(name)]},
        ts=times,
        value=value,
    )
    return _operation("Log what came of it; durable when answered", body, _logged(), "201")
