"""CRC-32C (Castagnoli): the CPU's own instruction where there is one, slicing by 8 elsewhere.

``crc32c(b"123456789") = 0xE3069283``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.core.registry import cpu_target

from thinrow.kernels.numba.jit import intrinsic, njit

Array = npt.NDArray[Any]


def _tables() -> Array:
    """(8, 256) uint32: ``T[k][b]`` advances byte b through k further zero bytes."""
    table = np.empty((8, 256), np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = (row >> np.uint32(1)) ^ np.where(row & np.uint32(1), np.uint32(0x82F63B78), np.uint32(0))
    table[0] = row
    for k in range(1, 8):
        table[k] = (table[k - 1] >> np.uint32(8)) ^ row[table[k - 1] & np.uint32(0xFF)]
    return table


TABLES = _tables()


def has_crc_instruction() -> bool:
    """Whether numba compiles for an x86-64 CPU with SSE 4.2.

    Asks the compiler's target, not the machine: with ``NUMBA_CPU_NAME`` set they differ, and an instruction that the
    target lacks would stop the process.
    """
    try:
        triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    except (AttributeError, ValueError):
        return False
    return str(triple).startswith("x86_64") and "+sse4.2" in str(features).split(",")


@intrinsic
def _step64(typingctx: Any, crc: Any, data: Any, offset: Any) -> Any:
    """crc of 8 bytes more: ``data[offset:offset + 8]`` at any alignment."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word_type = ir.IntType(64)
        base = context.make_array(signature.args[1])(context, builder, args[1]).data
        word = builder.load(builder.bitcast(builder.gep(base, [args[2]]), word_type.as_pointer()))
        word.align = 1
        step = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", (), _function(word_type, word_type))
        return builder.call(step, [args[0], word])

    return types.uint64(types.uint64, data, types.intp), emit


@intrinsic
def _step8(typingctx: Any, crc: Any, byte: Any) -> Any:
    """crc of one byte more."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(32)
        step = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.32.8", (), _function(kind, ir.IntType(8)))
        return builder.call(step, [args[0], args[1]])

    return types.uint32(types.uint32, types.uint8), emit


def _function(state: Any, data: Any) -> Any:
    return ir.FunctionType(state, [state, data])


@njit
def advance_hardware(state: Any, data: Array, start: int, stop: int) -> Any:
    """The CRC register after ``data[start:stop]`` (no initial or final xor), by the CPU's instruction."""
    wide = np.uint64(state)
    at = start
    while at + 8 <= stop:
        wide = _step64(wide, data, at)
        at += 8
    narrow = np.uint32(wide)
    while at < stop:
        narrow = _step8(narrow, data[at])
        at += 1
    return narrow


@njit
def advance_software(state: Any, data: Array, start: int, stop: int) -> Any:
    """The CRC register after ``data[start:stop]`` (no initial or final xor), by tables."""
    crc = np.uint32(state)
    at = start
    while at + 8 <= stop:
        low = crc ^ (
            np.uint32(data[at])
            | (np.uint32(data[at + 1]) << np.uint32(8))
            | (np.uint32(data[at + 2]) << np.uint32(16))
            | (np.uint32(data[at + 3]) << np.uint32(24))
        )
        crc = (
            TABLES[7, low & np.uint32(0xFF)]
            ^ TABLES[6, (low >> np.uint32(8)) & np.uint32(0xFF)]
            ^ TABLES[5, (low >> np.uint32(16)) & np.uint32(0xFF)]
            ^ TABLES[4, low >> np.uint32(24)]
            ^ TABLES[3, data[at + 4]]
            ^ TABLES[2, data[at + 5]]
            ^ TABLES[1, data[at + 6]]
            ^ TABLES[0, data[at + 7]]
        )
        at += 8
    while at < stop:
        crc = np.uint32((crc >> np.uint32(8)) ^ TABLES[0, (crc ^ np.uint32(data[at])) & np.uint32(0xFF)])
        at += 1
    return crc


_advance = advance_hardware if has_crc_instruction() else advance_software


@njit
def crc32c(data: Array, crc: int = 0) -> Any:
    """CRC of the uint8 array ``data``, continuing from ``crc`` (that of the bytes before it). Returns uint32."""
    return ~_advance(~np.uint32(crc), data, 0, len(data))


@njit
def crc32c_many(buffer: Array, offset: Array, length: Array) -> Array:
    """CRC of each range ``buffer[offset[i]:offset[i] + length[i]]``: (n,) uint32.

    ``buffer`` is uint8, the others int64. Of a range that does not lie in the buffer the result is 0.
    """
    size = len(buffer)
    out = np.zeros(len(offset), np.uint32)
    for i in range(len(offset)):
        start = offset[i]
        n = length[i]
        if 0 <= start <= size and 0 <= n <= size - start:
            out[i] = ~_advance(~np.uint32(0), buffer, start, start + n)
    return out
