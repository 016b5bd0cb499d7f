"""User ids, and the one hash that maps them to buckets.

Ids are an ``int64`` array, or an ``object`` array of ``str`` (1 to 255 UTF-8 bytes each). Python orders ``str`` by
code point, which is the bytewise order of their UTF-8 forms, so one sort order serves memory, LMDB keys and files.

The hash is Iceberg's bucket transform (Iceberg spec, appendix B: murmur3_x86_32, seed 0, of the 8 little-endian
bytes of a long or of the UTF-8 bytes of a string, then ``(h & 0x7FFFFFFF) % N``), so a training table written with
``bucket[N](user_id)`` by any engine is co-partitioned with the archive::

    >>> bucket_of(np.array([34], dtype=np.int64), 16)     # the spec's test vector: hash 2017239379
    array([3])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError, UserKindError
from thinrow.core.units import MAX_USER_BYTES

UserKind = Literal["int64", "string"]
#: (n,) int64, or (n,) object of ``str``.
Users: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.object_]

_U32 = np.uint32
_I64 = np.dtype(np.int64)


def as_users(values: object, kind: UserKind | None = None) -> Users:
    """Normalise ids (scalar, sequence or array) to an int64 or object-of-str array, checking each.

    Raises:
        UserKindError: the ids are not of ``kind``, or of neither kind, or of more than one dimension.
        InputError: a string id is empty, longer than 255 UTF-8 bytes, or has no UTF-8 form.
    """
    if isinstance(values, np.ndarray) and values.dtype == _I64 and values.ndim == 1 and kind == "int64":
        return np.ascontiguousarray(values)
    if isinstance(values, (str, int, np.integer)):
        values = [values]
    array = np.atleast_1d(values if isinstance(values, np.ndarray) else _listed(values))
    if array.ndim > 1:
        raise UserKindError(f"user ids have shape {array.shape}; pass a sequence or an array of one dimension")
    if array.size == 0:
        return np.empty(0, np.int64 if kind != "string" else object)
    if array.dtype.kind in "iu" and array.dtype != np.uint64:
        found: UserKind = "int64"
    elif array.dtype.kind in "UO" and all(isinstance(v, str) for v in array):
        found = "string"
    else:
        listed = array.tolist()
        kinds = (str, int) if array.dtype == object and not isinstance(listed[0], str) else str
        first = next((v for v in listed if not isinstance(v, kinds)), listed[0])
        raise UserKindError(
            f"user id {first!r} ({array.dtype}) is neither an int64 nor a string; cast the column first"
        )
    if kind is not None and found != kind:
        raise UserKindError(
            f"user id {array.tolist()[0]!r} is of kind {found}, but this store holds {kind} ids; "
            f"cast the column to {kind}"
        )
    if found == "int64":
        return np.ascontiguousarray(array, dtype=np.int64)
    result = array.astype(object)
    for value in result:
        try:
            size = len(value.encode("utf-8"))
        except UnicodeEncodeError as e:
            raise InputError(f"user id {value[:40]!r} has no UTF-8 form ({e.reason}); pass valid Unicode") from e
        if not 1 <= size <= MAX_USER_BYTES:
            raise InputError(f"user id {value[:40]!r} has {size} UTF-8 bytes; 1 to {MAX_USER_BYTES} are allowed")
    return result


def _listed(values: object) -> npt.NDArray[Any]:
    if not isinstance(values, Sequence) or isinstance(values, bytes):
        raise UserKindError(
            f"user ids must be an int64 or string sequence, got {type(values).__name__}; pass a list or a NumPy array"
        )
    # NumPy's own string dtype drops trailing NULs: two users would become one.
    text = any(isinstance(v, str) for v in values)
    try:
        return np.array(values, object) if text else np.asarray(values)
    except ValueError as e:
        raise UserKindError("user ids are not one flat sequence; pass one id per element") from e


def plain(user: object) -> int | str:
    """One id of an array as the Python value that messages show."""
    return user if isinstance(user, str) else int(user)  # type: ignore[call-overload]


def kind_of(users: Users) -> UserKind:
    """The kind of a normalised id array."""
    return "int64" if users.dtype == np.int64 else "string"


def distinct(users: Users) -> tuple[Users, npt.NDArray[np.int64]]:
    """The distinct ids, ascending, and the row of each of ``users`` among them."""
    found, row_of = np.unique(cast(npt.NDArray[Any], users), return_inverse=True)
    return found, row_of.astype(np.int64)


def bucket_of(users: Users, n_buckets: int) -> npt.NDArray[np.int64]:
    """Iceberg's ``bucket[n_buckets]`` of each id: (n,) int64 in ``[0, n_buckets)``."""
    if users.dtype == np.int64:
        hashed = _murmur3_int64(cast(npt.NDArray[np.int64], users))
    else:
        hashed = _murmur3_str(cast(npt.NDArray[np.object_], users))
    return (hashed & _U32(0x7FFFFFFF)).astype(np.int64) % n_buckets


def _rotl(x: npt.NDArray[np.uint32], r: int) -> npt.NDArray[np.uint32]:
    return (x << _U32(r)) | (x >> _U32(32 - r))


def _mix_block(h: npt.NDArray[np.uint32], k: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    h = h ^ (_rotl(k * _U32(0xCC9E2D51), 15) * _U32(0x1B873593))
    return _rotl(h, 13) * _U32(5) + _U32(0xE6546B64)


def _finish(h: npt.NDArray[np.uint32], lengths: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    h = h ^ lengths
    h = (h ^ (h >> _U32(16))) * _U32(0x85EBCA6B)
    h = (h ^ (h >> _U32(13))) * _U32(0xC2B2AE35)
    return h ^ (h >> _U32(16))


def _murmur3_int64(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    bits = values.view(np.uint64)
    h = np.zeros(len(values), np.uint32)
    h = _mix_block(h, (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    h = _mix_block(h, (bits >> np.uint64(32)).astype(np.uint32))
    return _finish(h, np.full(len(values), 8, np.uint32))


def _murmur3_str(values: npt.NDArray[np.object_]) -> npt.NDArray[np.uint32]:
    encoded = [v.encode("utf-8") for v in values]
    lengths = np.array([len(e) for e in encoded], np.uint32)
    n_words = int(lengths.max(initial=0)) // 4 + 1
    padded = np.frombuffer(b"".join(e.ljust(n_words * 4, b"\0") for e in encoded), "<u4").reshape(-1, n_words)
    h = np.zeros(len(encoded), np.uint32)
    full = lengths // 4
    for w in range(n_words):
        word = padded[:, w].astype(np.uint32)
        mixed = _mix_block(h, word)
        tail = h ^ (_rotl(word * _U32(0xCC9E2D51), 15) * _U32(0x1B873593))
        # Zero padding makes the tail word equal to murmur3's own little-endian tail; an empty tail mixes in nothing.
        h = np.where(w < full, mixed, np.where((w == full) & (lengths % 4 > 0), tail, h))
    return _finish(h, lengths)
