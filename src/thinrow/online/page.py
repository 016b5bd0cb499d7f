"""The OpenAPI description as one page for people: no script, nothing fetched from elsewhere.

Worked example: ``{"type": "array", "items": {"type": "integer"}}`` of ``users``, at most 1,024, is the row
``users | integer[] | required | at most 1024``.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top;"
    "border-bottom:1px solid #8884}code,pre{font:13px/1.4 ui-monospace,monospace}pre{overflow-x:auto}"
)


def page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document as ``openapi`` makes it."""
    title = escape(document["info"]["title"])
    calls = [_call(how.upper(), path, call) for path, by in document["paths"].items() for how, call in by.items()]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    body = f'<h1>{title}</h1><p>The same for machines: <a href="openapi.json">openapi.json</a>.</p>{"".join(calls)}'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _call(how: str, path: str, call: dict[str, Any]) -> str:
    parts = [f"<h2><code>{how} {escape(path)}</code></h2><p>{escape(call['summary'])}</p>"]
    body = call.get("requestBody")
    if body is not None:
        schema = body["content"]["application/json"]["schema"]
        parts.append(f"<h3>Body</h3>{_table(schema)}")
    parts.append("<h3>Answers</h3>")
    for status, answer in call["responses"].items():
        parts.append(f"<p><code>{status}</code> {escape(answer['description'])}</p>")
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        if "properties" in schema:
            parts.append(_table(schema))
    return "".join(parts)


def _table(schema: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td><code>{escape(kind)}</code></td><td>{need}</td>"
        f"<td>{escape(text)}</td></tr>"
        for name, kind, need, text in _fields(schema, "")
    )
    return f"<table><tr><th>field</th><th>type</th><th></th><th></th></tr>{rows}</table>"


def _fields(schema: dict[str, Any], before: str) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, whether required, more) of all fields of an object, those of objects within after it."""
    for name, field in schema.get("properties", {}).items():
        need = "required" if name in schema.get("required", ()) else ""
        notes = [field.get("description", "")]
        if "maxItems" in field:
            notes.append(f"at most {field['maxItems']}")
        if "minimum" in field:
            notes.append(f"{field['minimum']} or more")
        if "default" in field:
            notes.append(f"default: {str(field['default']).lower()}")
        if "contentEncoding" in field:
            notes.append(field["contentEncoding"])
        yield before + name, _kind(field), need, "; ".join(n for n in notes if n)
        inner, marks = field, ""
        while inner.get("type") == "array":
            inner, marks = inner["items"], f"{marks}[]"
        yield from _fields(inner, f"{before}{name}{marks}.")


def _kind(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " | ".join(repr(v) for v in field["enum"])
    if "anyOf" in field:
        return " | ".join(_kind(f) for f in field["anyOf"])
    if field.get("type") == "array":
        inner = _kind(field["items"])
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    return str(field.get("type", "any"))
