"""Small JSON bodies that carry their format and their CRC, in one layout byte for byte: manifests, checkpoints.

Worked example, ``seal({"n": 1}, 1, "manifest")``, keys sorted and one space of indentation a level::

    {
     "body": {
      "n": 1
     },
     "crc32c": 2733035711,
     "format": 1
    }

``unseal`` of those bytes is ``{"n": 1}`` again; of any others it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from thinrow.core.errors import CorruptionError, InputError, NewerFormatError
from thinrow.storage.container import crc_of


def seal(body: Mapping[str, Any], version: int, what: str) -> bytes:
    """All bytes of the file that holds ``body``.

    Args:
        version: of the format, 1 or more.
        what: the kind of file, for messages.

    Raises:
        InputError: the body is not JSON (NaN is not), or would not read back equal.
    """
    body = dict(body)
    try:
        text = _canonical(body)
    except (ValueError, TypeError) as e:
        raise InputError(f"{what} body is not JSON: {e}; use dicts, lists, strings, numbers and null") from e
    if json.loads(text) != body:
        raise InputError(f"{what} body changes when read back; use string keys, and lists in place of tuples")
    return _file(version, crc_of(text), body)


def unseal(data: bytes, version: int, what: str, name: str) -> dict[str, Any]:
    """The body that ``data``, the bytes of the file ``name``, holds.

    Raises:
        NewerFormatError: a newer thinrow wrote it: its format is above ``version``.
        CorruptionError: one byte or more is not as ``seal`` wrote it.
    """
    try:
        envelope = json.loads(data)
        found, crc, body = envelope["format"], envelope.get("crc32c"), envelope.get("body")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptionError(f"it is no {what}: {e}", file=name) from e
    if isinstance(found, int) and found > version:
        raise NewerFormatError(f"{name} has format {found}, this thinrow reads up to {version}; update thinrow")
    if type(found) is not int or found < 1 or not isinstance(body, dict):
        raise CorruptionError(f"it is no {what} of format 1 to {version}", file=name)
    if crc_of_body(body) != crc:
        raise CorruptionError(f"the CRC of the {what} does not match", file=name)
    if data != _file(found, crc, body):
        raise CorruptionError("its layout is not the one that a writer gives it", file=name)
    return body


def crc_of_body(body: Mapping[str, Any]) -> int:
    """CRC-32C of a body, as its file states it."""
    return crc_of(_canonical(dict(body)))


def _file(version: int, crc: int, body: dict[str, Any]) -> bytes:
    """The CRC speaks of the values alone, so spaces and escapes are held to this form."""
    return json.dumps({"format": version, "crc32c": crc, "body": body}, sort_keys=True, indent=1).encode()


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
