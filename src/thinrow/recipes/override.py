"""Change one value of a configuration by its dotted name, from text; a typo fails and names what there is.

Worked example: ``override(hstu_retail_small(), "ranker.model.layers", "3")`` is the same run with three layers.
"""

from __future__ import annotations

import dataclasses
import json
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from thinrow.core.errors import InputError

T = TypeVar("T")


def override(config: T, name: str, text: str) -> T:
    """``config`` (nested frozen dataclasses) with one value changed.

    Args:
        name: dotted, as ``ranker.projection.max_len``.
        text: JSON, or a bare word where the value is text: ``3``, ``null``, ``[64, 32]``, ``adam``.

    Raises:
        InputError: there is no such value, or the text is not of its type.
    """
    changed: T = _replace(config, name.split("."), name, text)
    return changed


def _replace(config: Any, path: list[str], name: str, text: str) -> Any:
    fields = [f.name for f in dataclasses.fields(config)]
    if path[0] not in fields:
        raise InputError(f"no value {name!r} in the configuration; {type(config).__name__} has {', '.join(fields)}")
    value = getattr(config, path[0])
    if len(path) > 1:
        if not dataclasses.is_dataclass(value):
            raise InputError(f"{name!r} goes into {path[0]!r}, which is {value!r} and holds no further values")
        return dataclasses.replace(config, **{path[0]: _replace(value, path[1:], name, text)})
    if dataclasses.is_dataclass(value) or hasattr(value, "to_dict"):
        raise InputError(f"{name!r} is a {type(value).__name__}; set one of its values, or write a recipe of your own")
    kind = get_type_hints(type(config))[path[0]]
    return dataclasses.replace(config, **{path[0]: _parse(kind, name, text)})


def _parse(kind: Any, name: str, text: str) -> Any:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        parsed = text
    parsed = _tuples(parsed)
    if type(parsed) is int and not _fits(parsed, kind):
        parsed = float(parsed)
    if not _fits(parsed, kind):
        wanted = getattr(kind, "__name__", str(kind)) if not get_args(kind) else str(kind)
        raise InputError(f"{name}={text} is of type {type(parsed).__name__}; it must be of type {wanted}")
    return parsed


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fits(value: Any, kind: Any) -> bool:
    """Whether a parsed value is of an annotated type: plain types, unions, and tuples."""
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, k) for k in arguments)
    if get_origin(kind) is tuple:
        if arguments[-1] is Ellipsis:
            return isinstance(value, tuple) and all(_fits(v, arguments[0]) for v in value)
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    return type(value) is kind
