"""What a caller passes is held to its type where it enters, so that a mistake is named there and not far inside.

Worked example::

    @checked(keep=integer(1), folder=path)
    def backup(folder, keep=None): ...

    backup("copies", keep=0)      # InputError: keep=0; it must be 1 or more
    backup(7)                     # InputError: folder is 7; give a path: a str that is not empty, or a pathlib.Path
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
_LONGEST_S, _MOST = 1 << 40, 1 << 62
#: What a URL begins with, but for a drive's letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
#: Of a value and the name of its argument: the value, or InputError.
Check = Callable[[Any, str], Any]


def checked(**checks: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that holds arguments of those names, where they are given, to their checks before the call."""

    def around(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        assert set(checks) <= set(signature.parameters), f"{function.__qualname__} lacks arguments of those names"

        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> R:
            given = signature.bind(*args, **named).arguments
            for name in checks.keys() & given.keys():
                if given[name] is not signature.parameters[name].default:
                    checks[name](given[name], name)
            return function(*args, **named)

        return call

    return around


def shown(value: object) -> str:
    """A value and its type, short enough for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = "a value"
    if isinstance(value, (int, float, str, type(None))):
        return text[:60]
    return f"{text[:57]}..., a {type(value).__name__}" if len(text) > 60 else f"{text}, a {type(value).__name__}"


def path(value: Any, name: str) -> Path:
    """A path of this machine: a non-empty ``str`` or a path object, without a NUL, no URL. Raises InputError."""
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        # A path object makes one slash of two.
        if isinstance(text, str) and _URL.match(text):
            raise InputError(
                f"{name} is {shown(text)}, a URL; it must be a path of this machine. What can lie in a bucket is "
                "said in docs/object-stores.md"
            )
        if isinstance(text, str) and text and "\0" not in text:
            return Path(text)
    raise InputError(f"{name} is {shown(value)}; give a path: a str that is not empty, or a pathlib.Path")


def whole(value: Any, name: str) -> Any:
    """An integer. Raises InputError."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise InputError(f"{name}={shown(value)}; it must be an integer")
    if not -_MOST <= value <= _MOST:
        raise InputError(f"{name}={shown(value)}; it must be an integer of -2^62 to 2^62")
    return value


def integer(least: int, most: int = _MOST) -> Check:
    """A check for an integer of ``least`` to ``most`` (inclusive both)."""

    def check(value: Any, name: str) -> Any:
        if not least <= whole(value, name) <= most:
            bound = f"{least} or more" if most == _MOST else f"{least} to {most}"
            raise InputError(f"{name}={value}; it must be {bound}")
        return value

    return check


def seconds(value: Any, name: str) -> Any:
    """A time in seconds, 0 or more, and finite. Raises InputError."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0 <= value <= _LONGEST_S:
        raise InputError(f"{name}={shown(value)}; it must be a number of seconds, 0 or more")
    return value


def flag(value: Any, name: str) -> Any:
    """True or False. Raises InputError."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name}={shown(value)}; it must be True or False")
    return value


def instance(kind: type[Any] | tuple[type[Any], ...], remedy: str) -> Check:
    """A check for an object of ``kind``; ``remedy`` says how to get one."""

    def check(value: Any, name: str) -> Any:
        if not isinstance(value, kind):
            raise InputError(f"{name} is {shown(value)}; {remedy}")
        return value

    return check


def sequence(kind: type[Any] | tuple[type[Any], ...], remedy: str) -> Check:
    """A check for a sequence of objects of ``kind``; ``remedy`` says how to get one."""

    def check(value: Any, name: str) -> Any:
        if (
            isinstance(value, (str, bytes))
            or not isinstance(value, Sequence)
            or not all(isinstance(v, kind) for v in value)
        ):
            raise InputError(f"{name} is {shown(value)}; {remedy} in a list")
        return value

    return check


def function(value: Any, name: str) -> Any:
    """What can be called. Raises InputError."""
    if not callable(value):
        raise InputError(f"{name} is {shown(value)}; give a function, or leave it out")
    return value


def names(value: Any, name: str) -> Any:
    """A sequence of ``str``, which one ``str`` is not. Raises InputError."""
    if isinstance(value, str):
        raise InputError(f"{name}={value!r} is one string; give a tuple of names: {name}=({value!r},)")
    if not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise InputError(f"{name} is {shown(value)}; give a tuple of names, each a str")
    return value


def mapping(value: Any, name: str) -> Any:
    """A dict whose keys are ``str``. Raises InputError."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise InputError(f"{name} is {shown(value)}; give a dict by name")
    return value


def as_rows(rows: Any, n: int) -> npt.NDArray[np.intp]:
    """(k,) positions, each from ``-n`` to ``n - 1``, of integers, in any order and repeated or not; or a mask of (n,).

    Raises:
        InputError: they are of another type or shape, or beyond what there is.
    """
    found = np.asarray(rows) if isinstance(rows, (np.ndarray, list, tuple, range)) else None
    if found is not None and found.dtype == np.bool_ and found.shape == (n,):
        return np.flatnonzero(found)
    if found is None or found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        raise InputError(f"rows is {shown(rows)}; give positions: a list or array of integers of one dimension")
    if found.size and not -n <= int(found.min()) <= int(found.max()) < n:
        raise InputError(f"rows go from {found.min()} to {found.max()}, but there are {n}; give positions below {n}")
    return found.astype(np.intp, copy=False)
