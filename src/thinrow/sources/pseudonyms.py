"""Keyed pseudonyms of user ids: the store never learns the ids that the source knows.

HMAC-SHA256 (RFC 2104, FIPS 180-4) of the id's text, under a key that stays outside. For a store of string ids it is
128 bits in hex, for one of int64 ids 63 bits, so that two of n users share one with a chance of about n^2 / 2^64:
5e-8 for a million, 5e-4 for a hundred million, 5% for a billion. Use string ids beyond that.

Worked example, under the key of sixteen zero bytes::

    >>> Pseudonyms(bytes(16)).of(["7"], "int64").tolist()
    [1744944827902622075]
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import InputError, UserKindError
from thinrow.core.users import UserKind

MIN_KEY_BYTES = 16
_CHECK = b"thinrow pseudonym key"


class Pseudonyms:
    """Pseudonyms under one key."""

    def __init__(self, key: bytes) -> None:
        """Raises InputError where the key is shorter than 16 bytes."""
        if len(key) < MIN_KEY_BYTES:
            raise InputError(
                f"the key of the pseudonyms has {len(key)} bytes; use {MIN_KEY_BYTES} or more that nobody can guess: "
                "head -c 32 /dev/urandom > key"
            )
        self._key = key

    @classmethod
    def load(cls, place: str) -> Pseudonyms:
        """Key in the environment variable NAME of ``env:NAME``, or in a file, all its bytes.

        Raises:
            InputError: it is not there, or too short.
        """
        if place.startswith("env:"):
            text = os.environ.get(place[4:])
            if text is None:
                raise InputError(f"no environment variable {place[4:]!r} with the key of the pseudonyms; set it")
            return cls(text.encode())
        try:
            return cls(Path(place).read_bytes())
        except OSError as e:
            raise InputError(f"the key of the pseudonyms is not at {place}: {e.strerror}; name its file") from e

    @property
    def check(self) -> str:
        """What tells this key from another, and nothing of it."""
        return hmac.new(self._key, _CHECK, hashlib.sha256).hexdigest()[:16]

    def of(self, ids: Sequence[str], kind: UserKind) -> pa.Array:
        """(n,) pseudonyms of the texts of ids."""
        digests = [hmac.digest(self._key, text.encode(), "sha256") for text in ids]
        if kind == "string":
            return pa.array([d[:16].hex() for d in digests], pa.string())
        words = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 4)[:, 0] if digests else np.empty(0, ">u8")
        return pa.array((words >> np.uint64(1)).astype(np.int64))

    def apply(self, table: pa.Table, column: str, kind: UserKind) -> pa.Table:
        """``table`` with pseudonyms of ``kind`` in place of the ids in ``column``; nulls stay null.

        Of an integer the text is its decimal form: 5 and "5" are one user.

        Raises:
            UserKindError: the ids are neither integers nor texts.
        """
        if column not in table.column_names:
            return table
        at = table.column_names.index(column)
        of = table.schema.field(at).type
        plain = of.value_type if pa.types.is_dictionary(of) else of
        kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_null)
        if not any(is_kind(plain) for is_kind in kinds):
            raise UserKindError(
                f"user column {column!r} is {of}; pseudonyms are made of integers and texts, which have one form a user"
            )
        ids = pc.cast(table.column(column), pa.string()).combine_chunks().dictionary_encode()
        names = self.of(ids.dictionary.to_pylist(), kind)
        return table.set_column(at, column, names.take(ids.indices))
