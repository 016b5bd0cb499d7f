"""Keys and sealed values of the recent tier (docs/format/recent-v2.md, sections 1, 3 and 5).

Worked example: user ``-2`` is ``7F FF FF FF FF FF FF FE``, user ``"a\\0"`` is ``62 01 00``; both sort, byte by byte,
where the ids themselves sort.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import CorruptionError, InputError
from thinrow.core.ragged import offsets_of
from thinrow.core.units import MAX_USER_BYTES
from thinrow.core.users import UserKind, Users, as_users
from thinrow.jagged import Column
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]
#: The longest string event id, in UTF-8 bytes (inclusive): user key + event id fill LMDB's 511 bytes.
MAX_EVENT_ID_BYTES = 255
#: CRC-32 of key, bytes and their seal, whatever they are.
_SEAL_RESIDUE = 0x2144DF1C
_PLUS_ONE = bytes(min(b + 1, 255) for b in range(256))
_MINUS_ONE = bytes(max(b - 1, 0) for b in range(256))
_SIGN = np.uint64(1 << 63)
#: Sorts after every arrival of a user and before the next user.
AFTER_ALL = b"\xff" * 8

PAIR_DTYPE = np.dtype([("a", "<i8"), ("b", "<i8"), ("check", "<u4")])
_V8, _V16 = np.dtype("V8"), np.dtype("V16")
_PAIR_BYTES = np.dtype(f"V{PAIR_DTYPE.itemsize}")
#: In place of the pair of a user that nobody knows; no pair has this form.
UNKNOWN = b"\xff" * PAIR_DTYPE.itemsize
NO_ROWS: Ints = np.empty(0, np.int64)


def user_keys(users: Users) -> list[bytes]:
    """The key of each user."""
    if users.dtype == np.int64:
        if len(users) == 1:
            return [(int(users[0]) + (1 << 63)).to_bytes(8, "big")]
        return sortable(users.astype(np.int64, copy=False))
    return [value.encode().translate(_PLUS_ONE) + b"\0" for value in users]


def users_of_keys(keys: Sequence[bytes], kind: UserKind) -> Users:
    """Reverse of ``user_keys``."""
    if kind == "int64":
        return (np.frombuffer(b"".join(keys), ">u8").astype(np.uint64) ^ _SIGN).view(np.int64)
    out = np.empty(len(keys), object)
    out[:] = [key[:-1].translate(_MINUS_ONE).decode() for key in keys]
    return out


def sortable(values: npt.NDArray[np.int64]) -> list[bytes]:
    """Big-endian bytes of each number with its sign bit flipped."""
    flipped: npt.NDArray[np.void] = (values.view(np.uint64) ^ _SIGN).astype(">u8").view("V8")
    listed: list[bytes] = flipped.tolist()
    return listed


@dataclass(slots=True)
class Grouped:
    """Rows of a batch, brought together by user.

    Attributes:
        users: (U,) distinct users, ascending.
        keys: key of each.
        order: (n,) row numbers, by user and then as they came; None where they are in that order already.
        offsets: (U + 1,) int64 over ``order``.
    """

    users: Users
    keys: list[bytes]
    order: npt.NDArray[np.intp] | None
    offsets: npt.NDArray[np.int64]


def group_by_number(users: Users, event_ts: Ints, event_ids: Ints) -> tuple[Grouped, bool, list[bytes]]:
    """Group rows of users that are numbers, keeping their order within a user; whether all times are in bounds; and
    the key of each row's event id, in order of the groups, where ``event_ids`` are not empty.

    Raises:
        UserKindError: the ids are of the other kind.
    """
    if not (isinstance(users, np.ndarray) and users.dtype == np.int64 and users.ndim == 1):
        users = as_users(users, "int64")
    n, n_ids, order = len(users), len(event_ids), None
    # Copies, because memory that is not ours may be of a kind that the kernel was not compiled for.
    users, event_ts, event_ids = users.copy(), event_ts.copy(), event_ids.copy() if n_ids else NO_ROWS
    starts, keys = np.empty(n + 1, np.int64), np.empty(8 * n + 16 * n_ids, np.uint8)
    runs = kernel("user_runs")
    n_users, sound = runs(users, event_ts, event_ids, starts, keys, keys[8 * n :])
    if n_users < 0:
        order = np.argsort(users, kind="stable")
        users, event_ids = users[order], event_ids[order] if n_ids else event_ids
        n_users, sound = runs(users, event_ts[order], event_ids, starts, keys, keys[8 * n :])
    offsets = starts[: n_users + 1]
    listed: list[bytes] = np.ndarray((n_ids,), _V16, keys, 8 * n).tolist() if n_ids else []
    if n_users == 1:
        # What most small calls are.
        return Grouped(users[:1], [keys[:8].tobytes()], order, offsets), sound, listed
    distinct = users if n_users == n else users[offsets[:-1]]
    return Grouped(distinct, np.ndarray((n_users,), _V8, keys).tolist(), order, offsets), sound, listed


def group_by_text(users: Users) -> Grouped:
    """Group rows of users that are strings, keeping their order within a user.

    Raises:
        UserKindError: the ids are of the other kind.
        InputError: an id is empty or longer than 255 UTF-8 bytes.
    """
    encoded = _strings(users).dictionary_encode()
    by_value = pc.sort_indices(encoded.dictionary)
    rank = np.empty(len(by_value), np.uint16 if len(by_value) <= 0xFFFF else np.int64)
    rank[by_value.to_numpy()] = np.arange(len(by_value))
    codes = rank[encoded.indices.to_numpy()]
    distinct = np.empty(len(by_value), object)
    distinct[:] = encoded.dictionary.take(by_value).to_pylist()
    order = np.argsort(codes, kind="stable")
    offsets = offsets_of(np.bincount(codes, minlength=len(by_value)))
    return Grouped(distinct, user_keys(distinct), order, offsets)


def _strings(users: Users) -> pa.StringArray:
    if len(users) and isinstance(users, np.ndarray) and users.dtype == object and isinstance(users[0], str):
        try:
            array = pa.array(users, pa.string())
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return pa.array(as_users(users, "string"), pa.string())
        sizes = pc.binary_length(array)
        bounds = pc.min_max(sizes)
        if array.null_count == 0 and bounds["min"].as_py() >= 1 and bounds["max"].as_py() <= MAX_USER_BYTES:
            return array
    # as_users names the first id that cannot be used.
    return pa.array(as_users(users, "string"), pa.string())


def id_keys(ids: Column, rows: npt.NDArray[np.intp], prefixes: list[bytes]) -> list[bytes]:
    """Key in ``ids`` of each of ``rows`` (none of them null): the user's key, then the event id.

    Raises:
        InputError: a string id has more than 255 UTF-8 bytes.
    """
    if ids.dictionary is None:
        suffixes = sortable(ids.values[rows].astype(np.int64))
    else:
        suffixes = ids.dictionary.take(pa.array(ids.values[rows])).cast(pa.binary()).to_pylist()
        longest = max(suffixes, key=len, default=b"")
        if len(longest) > MAX_EVENT_ID_BYTES:
            raise InputError(
                f"event id {longest[:40].decode(errors='replace')!r}... has {len(longest)} UTF-8 bytes; at most "
                f"{MAX_EVENT_ID_BYTES} are allowed; hash longer ids"
            )
    return [a + b for a, b in zip(prefixes, suffixes, strict=True)]


def pack_pairs(a: Ints, b: Ints) -> list[bytes]:
    """Value bytes of each pair (a[i], b[i])."""
    pairs = np.empty(len(a) * PAIR_DTYPE.itemsize, np.uint8)
    kernel("pack_pairs")(a.copy(), b.copy(), pairs)
    return listed_pairs(pairs, len(a))


def listed_pairs(data: npt.NDArray[np.uint8], n: int) -> list[bytes]:
    """Value bytes of the first n packed pairs."""
    listed: list[bytes] = np.ndarray((n,), _PAIR_BYTES, data).tolist()
    return listed


def joined_pairs(values: Sequence[bytes], file: str, what: str) -> bytes:
    """Packed pairs of value bytes. Raises CorruptionError where one is of another length."""
    data = b"".join(values)
    if len(data) != PAIR_DTYPE.itemsize * len(values):
        raise CorruptionError(f"a value of {what} is not {PAIR_DTYPE.itemsize} bytes long", file=file)
    return data


def refuse_wrong(wrong: int, n: int, file: str, what: str) -> None:
    """Raises CorruptionError where some of n pairs fail their check number."""
    if wrong:
        raise CorruptionError(f"{wrong} of {n} values of {what} fail their check number", file=file)


def unpack_pairs(values: Sequence[bytes], file: str, what: str) -> tuple[Ints, Ints]:
    """Reverse of ``pack_pairs``. Raises CorruptionError where a check number is wrong."""
    n = len(values)
    a, b = np.empty(n, np.int64), np.empty(n, np.int64)
    data = np.frombuffer(joined_pairs(values, file, what), np.uint8)
    refuse_wrong(kernel("open_pairs")(data, a, b), n, file, what)
    return a, b


def seal(key: bytes, body: bytes) -> bytes:
    """``body`` followed by the CRC of key and body."""
    return body + zlib.crc32(body, zlib.crc32(key)).to_bytes(4, "little")


def is_sealed(key: bytes, value: bytes) -> bool:
    """Whether ``value`` is what ``seal`` made for ``key``."""
    return zlib.crc32(value, zlib.crc32(key)) == _SEAL_RESIDUE
