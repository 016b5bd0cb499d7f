"""What requests and replies hold, as arrays, and as bodies of frames (docs/format/frames-v1.md).

Worked example: rows of keys 5 and 9 of table ``user.``, and sums of two bags of one and two keys of ``item.``::

    Request([Ask("user.", keys=[5, 9]), Ask("item.", keys=[1, 2, 3], pooling=Pooling.SUM, lengths=[1, 2])], "float16")

is a body of 8 + 2 * 24 bytes, the names, then keys, lengths and weights of each table. The reply has two rows of
``user.`` and two sums of ``item.``, with what was found: a bit a row, a number a bag.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import Version
from thinrow.core.errors import InputError, ProtocolError
from thinrow.core.pool import empty
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

DTYPES = ("float32", "float16", "int8")
_TYPES = tuple(np.dtype(name) for name in DTYPES)
_FLOAT32, _UINT32, _UINT8, _INT64 = (np.dtype(name) for name in ("float32", "uint32", "uint8", "int64"))
MOST_TABLES = 1 << 10
MOST_NAME_BYTES = 1 << 9
#: Bytes, a request's or a reply's, before the records of its tables.
_REQUEST = struct.Struct("<BBHI")
#: Bytes of a name, pooling, whether a version is asked for, keys, bags, and that version's CRC and step.
_ASK = struct.Struct("<HBBIIIQ")
#: Rows, width, CRC and step of the version, pooling.
_ROWS = struct.Struct("<IIIIQ")


class Pooling(IntEnum):
    """How a server answers: a row a key, or a sum a bag; a mean is a sum that the asker divides."""

    NONE = 0
    SUM = 1
    WEIGHTED = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """Look-ups in one table.

    Attributes:
        keys: (n,) int64.
        lengths: (b,) uint32 keys of each bag, in order; None without pooling.
        weights: (n,) float32, with ``WEIGHTED`` only.
        pin: the version to answer from; None for the newest.
    """

    table: str
    keys: Ints
    pooling: Pooling = Pooling.NONE
    lengths: npt.NDArray[np.uint32] | None = None
    weights: Floats | None = None
    pin: Version | None = None

    @property
    def rows(self) -> int:
        """Of the answer."""
        return len(self.keys) if self.lengths is None else len(self.lengths)


@dataclass(frozen=True, slots=True)
class Request:
    """Attributes:
    dtype: of the rows of the answer.
    left_us: microseconds until nobody waits for the answer any longer; 0 for no such time.
    """

    asks: Sequence[Ask]
    dtype: str = "float32"
    left_us: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Answer to one ``Ask``.

    Attributes:
        values: (r, dim) of the reply's dtype.
        scales: (r,) float32 with int8, by which its values are to be multiplied.
        found: (r,) bool without pooling, else (r,) uint32: how many keys of each bag.
        version: that answered.
    """

    values: npt.NDArray[Any]
    scales: Floats | None
    found: npt.NDArray[Any]
    version: Version

    def as_float(self) -> npt.NDArray[Any]:
        """(r, dim) float32; servers send finite numbers alone."""
        if self.scales is not None:
            return self.values * self.scales[:, None]
        if self.values.dtype != np.float16:
            return self.values
        out: Floats = empty(self.values.size, np.float32).reshape(self.values.shape)
        kernel("widen_half")(self.values, out)
        return out


def encode_request(request: Request) -> list[Any]:
    """The parts of a body; keys, lengths and weights are not copied."""
    names = [ask.table.encode() for ask in request.asks]
    dtype = DTYPES.index(request.dtype)
    head = [_REQUEST.pack(dtype, 0, len(names), min(request.left_us, (1 << 32) - 1))]
    parts: list[Any] = []
    for ask, name in zip(request.asks, names, strict=True):
        pin = ask.pin or Version(0, 0)
        bags = 0 if ask.lengths is None else len(ask.lengths)
        head.append(_ASK.pack(len(name), ask.pooling, ask.pin is not None, len(ask.keys), bags, pin.crc32c, pin.step))
        for array in (ask.keys, ask.lengths, ask.weights):
            parts += [] if array is None else _padded(array)
    return [_aligned(b"".join(head + names)), *parts]


def parse_request(body: npt.NDArray[np.uint8]) -> Request:
    """What ``encode_request`` wrote; its arrays lie in ``body``.

    Raises:
        ProtocolError: lengths do not fit the body, or a number is none of those that it may be.
    """
    at = _Cursor(body)
    dtype, zero, n, left_us = at.unpack(_REQUEST)
    _hold(dtype < len(DTYPES) and zero == 0 and 0 < n <= MOST_TABLES, f"a request with {n} tables and dtype {dtype}")
    records = [at.unpack(_ASK) for _ in range(n)]
    names = [_name(at.take(length, _UINT8)) for length, *_ in records]
    at.align()
    asks = []
    for name, (_, pooling, pinned, n_keys, n_bags, crc, step) in zip(names, records, strict=True):
        _hold(pooling <= Pooling.WEIGHTED and pinned <= 1, f"a request with pooling {pooling}")
        _hold(pooling != Pooling.NONE or n_bags == 0, "bags without pooling")
        keys = at.section(n_keys, _INT64)
        lengths = at.section(n_bags, _UINT32) if pooling else None
        _hold(lengths is None or int(lengths.sum(dtype=np.uint64)) == n_keys, "bags that do not add up to their keys")
        weights = at.section(n_keys, _FLOAT32) if pooling == Pooling.WEIGHTED else None
        asks.append(Ask(name, keys, Pooling(pooling), lengths, weights, Version(step, crc) if pinned else None))
    at.end()
    return Request(asks, DTYPES[dtype], left_us)


def encode_reply(rows: Sequence[Rows], dtype: str) -> list[Any]:
    """The parts of a body; values are not copied."""
    head = [_REQUEST.pack(DTYPES.index(dtype), 0, len(rows), 0)]
    parts: list[Any] = []
    for one in rows:
        pooled = one.found.dtype != np.bool_
        head.append(_ROWS.pack(*one.values.shape, one.version.crc32c, pooled, one.version.step))
        found = one.found.astype(np.uint32, copy=False) if pooled else np.packbits(one.found, bitorder="little")
        for array in (one.values, one.scales, found):
            parts += [] if array is None else _padded(array)
    return [b"".join(head), *parts]


def parse_reply(body: npt.NDArray[np.uint8]) -> list[Rows]:
    """What ``encode_reply`` wrote; its arrays lie in ``body``, so they live no longer than that does.

    Raises:
        ProtocolError: as ``parse_request``.
    """
    at = _Cursor(body)
    number, zero, n, _ = at.unpack(_REQUEST)
    _hold(number < len(DTYPES) and zero == 0 and n <= MOST_TABLES, f"a reply with {n} tables and dtype {number}")
    dtype = _TYPES[number]
    out = []
    for rows, dim, crc, pooled, step in [at.unpack(_ROWS) for _ in range(n)]:
        values = at.section(rows * dim, dtype).reshape(rows, dim)
        scales = at.section(rows, _FLOAT32) if number == 2 else None
        if pooled:
            found = at.section(rows, _UINT32)
        else:
            bits = at.section(-(-rows // 8), _UINT8)
            found = np.unpackbits(bits, count=rows, bitorder="little").view(np.bool_)
        out.append(Rows(values, scales, found, Version(step, crc)))
    at.end()
    return out


def encoded(values: Floats, dtype: str) -> tuple[npt.NDArray[Any], Floats | None]:
    """``values`` (r, dim) as ``dtype``, and the scales (r,) of int8, as exports have them.

    Raises:
        InputError: a value is beyond float16, or a sum was beyond float32.
    """
    if not np.isfinite(values).all():
        raise InputError(
            "a value is not finite: a sum beyond float32, which ends at 3.4e38; ask for smaller bags or weights"
        )
    if dtype == "float32":
        return values, None
    if dtype == "float16":
        try:
            with np.errstate(over="raise"):
                return values.astype(np.float16), None
        except FloatingPointError:
            raise InputError("a value is beyond float16, which ends at 65504; ask for float32") from None
    scales = (np.abs(values).max(axis=1, initial=0) / 127).astype(np.float32)
    steps = np.divide(values, scales[:, None], out=np.zeros_like(values), where=scales[:, None] > 0)
    return np.clip(np.rint(steps), -127, 127).astype(np.int8), scales


class _Cursor:
    """Reads a body from its start; whatever does not fit is a ProtocolError."""

    def __init__(self, body: npt.NDArray[np.uint8]) -> None:
        self._body, self._at = body, 0

    def unpack(self, what: struct.Struct) -> tuple[Any, ...]:
        self._fits(what.size)
        found = what.unpack_from(self._body.data, self._at)
        self._at += what.size
        return found

    def take(self, n: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        end = self._at + n * dtype.itemsize
        if end > len(self._body):
            self._fits(end - self._at)
        found: npt.NDArray[Any] = self._body[self._at : end].view(dtype)
        self._at = end
        return found

    def align(self) -> None:
        self._fits(-self._at % 8)
        self._at += -self._at % 8

    def section(self, n: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self.take(n, dtype)
        if self._at & 7:
            self.align()
        return found

    def end(self) -> None:
        _hold(self._at == len(self._body), f"{len(self._body) - self._at} bytes behind the end of a body")

    def _fits(self, size: int) -> None:
        _hold(size <= len(self._body) - self._at, f"a body of {len(self._body)} bytes that names more")


def _hold(sound: bool, what: str) -> None:
    if not sound:
        raise ProtocolError(f"{what} is not of this protocol")


def _name(raw: npt.NDArray[np.uint8]) -> str:
    _hold(len(raw) <= MOST_NAME_BYTES, f"a table's name of {len(raw)} bytes")
    try:
        return raw.tobytes().decode()
    except UnicodeDecodeError:
        raise ProtocolError("a table's name that is no UTF-8") from None


def _aligned(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 8)


def _padded(array: npt.NDArray[Any]) -> list[Any]:
    """``array`` and what brings it to a multiple of eight bytes."""
    short = -array.nbytes % 8
    return [array, bytes(short)] if short else [array]
