"""Chains in compiled loops: a column goes through all steps in blocks that stay in the first cache.

``_BLOCK`` values of every slot lie in scratch memory; a block is read once and each wanted slot of it is written once,
so that a chain of any length costs one pass over memory. The definitions are ``kernels.reference.chain``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.np.numpy_support import carray

from thinrow.kernels.chain import LN2_HIGH, LN2_LOW, LOG_TERMS, SQRT_HALF, Op, Program
from thinrow.kernels.numba.intrinsics import pointer
from thinrow.kernels.numba.jit import intrinsic, njit
from thinrow.kernels.numba.scalar import mix

I64Array = npt.NDArray[np.int64]

_BLOCK = 512
#: Entries that are compared with every value, many values at once: faster than a search that depends on the value.
_COUNTED = 64
_DTYPES = {np.dtype(name): i for i, name in enumerate(("i1", "i2", "i4", "i8", "f4", "f8"))}

_HASH, _MOD, _INTS, _FLOATS, _CLIP_INTS, _CLIP_FLOATS, _LOG1P, _LOOK_UP, _TO_FLOAT = (int(op) for op in Op)
_T1, _T2, _T3, _T4, _T5, _T6, _T7 = LOG_TERMS
_ONE = np.uint64(1)
_SIGN = np.uint64(1 << 63)


@intrinsic
def _high_product(typingctx: Any, a: Any, b: Any) -> Any:
    """The upper 64 bits of the product of two uint64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(a, wide) for a in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), emit


@intrinsic
def _bits(typingctx: Any, value: Any) -> Any:
    """A float64 as the int64 of its bits."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), emit


@intrinsic
def _float(typingctx: Any, value: Any) -> Any:
    """Reverse of ``_bits``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), emit


@njit
def _log1p(v: Any) -> Any:
    u = 1.0 + v
    if u == 1.0 or v == np.inf:
        return np.float64(np.float32(v))
    if u == 0.0:
        return -np.inf
    if not u > 0.0:
        return np.nan
    # frexp; above 0, u is 2^-53 or more, so never subnormal.
    word = _bits(u)
    exponent = (word >> 52) - 1022
    mantissa = _float((word & 0xFFFFFFFFFFFFF) | (1022 << 52))
    if mantissa < SQRT_HALF:
        mantissa = 2.0 * mantissa
        exponent -= 1
    f = mantissa - 1.0
    e = np.float64(exponent)
    s = f / (2.0 + f)
    z = s * s
    r = z * (_T1 + z * (_T2 + z * (_T3 + z * (_T4 + z * (_T5 + z * (_T6 + z * _T7))))))
    half = 0.5 * f * f
    log = e * LN2_HIGH - ((half - (s * (half + r) + e * LN2_LOW)) - f)
    return np.float64(np.float32(log * (v / (u - 1.0))))


@njit
def _modulo(a: I64Array, b: I64Array, n: int, divisor: Any, magic: Any, shift: Any) -> None:
    if magic == 0:
        for i in range(n):
            b[i] = np.int64(np.uint64(a[i]) & shift)
        return
    for i in range(n):
        v = np.uint64(a[i])
        q = _high_product(magic, v)
        b[i] = np.int64(v - ((((v - q) >> _ONE) + q) >> shift) * divisor)


@njit
def _bucketize(a: npt.NDArray[Any], b: I64Array, n: int, entries: npt.NDArray[Any], left: bool) -> None:
    # Comparisons are written so that NaN, which compares false with everything, ends above all entries.
    if len(entries) <= _COUNTED:
        for i in range(n):
            b[i] = 0
        for entry in entries:
            if left:
                for i in range(n):
                    b[i] += not a[i] <= entry
            else:
                for i in range(n):
                    b[i] += not a[i] < entry
        return
    for i in range(n):
        low, high = 0, len(entries)
        while low < high:
            middle = (low + high) >> 1
            entry = entries[middle]
            if a[i] <= entry if left else a[i] < entry:
                high = middle
            else:
                low = middle + 1
        b[i] = low


@njit
def _look_up(a: I64Array, b: I64Array, n: int, entries: I64Array, other: Any) -> None:
    count = len(entries) // 2
    for i in range(n):
        low, high = 0, count
        while low < high:
            middle = (low + high) >> 1
            if entries[middle] < a[i]:
                low = middle + 1
            else:
                high = middle
        b[i] = entries[count + low] if low < count and entries[low] == a[i] else other


@njit
def _step(
    op: int,
    a: I64Array,
    b: I64Array,
    n: int,
    words: npt.NDArray[np.uint64],
    entries: I64Array,
) -> None:
    af, bf = a.view(np.float64), b.view(np.float64)
    if op == _HASH:
        start = words[0]
        for i in range(n):
            b[i] = np.int64(mix(start ^ np.uint64(a[i])))
    elif op == _MOD:
        _modulo(a, b, n, words[0], words[1], words[2])
    elif op == _INTS:
        _bucketize(a, b, n, entries, False)
    elif op == _FLOATS:
        _bucketize(af, b, n, entries.view(np.float64), words[0] != 0)
    elif op == _CLIP_INTS:
        least, most = np.int64(words[0]), np.int64(words[1])
        for i in range(n):
            b[i] = min(max(a[i], least), most)
    elif op == _CLIP_FLOATS:
        low, high = _float(np.int64(words[0])), _float(np.int64(words[1]))
        for i in range(n):
            bf[i] = low if af[i] < low else (high if af[i] > high else af[i])
    elif op == _LOG1P:
        for i in range(n):
            bf[i] = _log1p(af[i])
    elif op == _LOOK_UP:
        _look_up(a, b, n, entries, np.int64(words[0]))
    else:
        for i in range(n):
            bf[i] = np.float64(a[i])


@njit
def _load(address: int, kind: int, n: int, a: I64Array) -> None:
    af = a.view(np.float64)
    if kind == 0:
        narrow = carray(pointer(address), n, np.int8)
        for i in range(n):
            a[i] = narrow[i]
    elif kind == 1:
        short = carray(pointer(address), n, np.int16)
        for i in range(n):
            a[i] = short[i]
    elif kind == 2:
        half = carray(pointer(address), n, np.int32)
        for i in range(n):
            a[i] = half[i]
    elif kind == 4:
        single = carray(pointer(address), n, np.float32)
        for i in range(n):
            af[i] = single[i]
    else:
        a[:n] = carray(pointer(address), n, np.int64)


@njit
def _store(address: int, kind: int, n: int, stride: int, a: I64Array) -> None:
    af = a.view(np.float64)
    most = (n - 1) * stride + 1
    if kind == 0:
        narrow = carray(pointer(address), most, np.int8)
        for i in range(n):
            narrow[i * stride] = np.int8(a[i])
    elif kind == 1:
        short = carray(pointer(address), most, np.int16)
        for i in range(n):
            short[i * stride] = np.int16(a[i])
    elif kind == 2:
        half = carray(pointer(address), most, np.int32)
        for i in range(n):
            half[i * stride] = np.int32(a[i])
    elif kind == 4:
        single = carray(pointer(address), most, np.float32)
        for i in range(n):
            single[i * stride] = np.float32(af[i])
    else:
        whole = carray(pointer(address), most, np.int64)
        for i in range(n):
            whole[i * stride] = a[i]


@njit
def _run(
    count: int,
    column: I64Array,
    op: I64Array,
    source: I64Array,
    words: npt.NDArray[np.uint64],
    table: I64Array,
    entries: I64Array,
    outs: I64Array,
) -> None:
    """``column``: address, kind and width; ``outs``: slot, address, kind, width and stride in items of each."""
    scratch = np.empty((len(op) + 1, _BLOCK), np.int64)
    for at in range(0, count, _BLOCK):
        n = min(_BLOCK, count - at)
        _load(column[0] + at * column[2], column[1], n, scratch[0])
        for s in range(len(op)):
            _step(op[s], scratch[source[s]], scratch[s + 1], n, words[s], entries[table[s] : table[s + 1]])
        for w in range(len(outs)):
            _store(outs[w, 1] + at * outs[w, 3] * outs[w, 4], outs[w, 2], n, outs[w, 4], scratch[outs[w, 0]])


def run_chain(
    values: npt.NDArray[Any], program: Program, slots: Sequence[int], outs: Sequence[npt.NDArray[Any]]
) -> None:
    if not len(values):
        return
    if values.dtype not in _DTYPES or not values.flags.c_contiguous:
        values = np.ascontiguousarray(values, np.float64 if values.dtype.kind == "f" else np.int64)
    column = np.array([values.ctypes.data, _DTYPES[values.dtype], values.itemsize], np.int64)
    written = np.empty((len(outs), 5), np.int64)
    for i, (slot, out) in enumerate(zip(slots, outs, strict=True)):
        assert out.shape == values.shape
        written[i] = slot, out.ctypes.data, _DTYPES[out.dtype], out.itemsize, out.strides[0] // out.itemsize
    _run(len(values), column, program.op, program.source, program.words, program.table, program.entries, written)
