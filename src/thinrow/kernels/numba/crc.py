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
from numba.np.numpy_support import carray

from thinrow.core.buffers import Buffers
from thinrow.kernels.numba.intrinsics import pointer, prefetch
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


#: Chunks whose headers are asked for ahead of their turn: each is a line of a file far from the last.
_AHEAD = 8


@njit
def _range(address: Array, size: Array, source: Array, offset: Array, length: Array, i: int) -> Any:
    """Whether range i lies in its buffer, and the range (empty where it does not)."""
    where, start, n = source[i], offset[i], length[i]
    inside = 0 <= where < len(address) and n >= 0 and start >= 0
    if not inside or start > size[where] or n > size[where] - start:
        return False, carray(pointer(0), (0,), np.uint8)
    return True, carray(pointer(address[where] + start), (n,), np.uint8)


@njit
def _wrong_one_by_one(address: Array, size: Array, source: Array, offset: Array, length: Array, crc: Array) -> int:
    for i in range(len(offset)):
        inside, data = _range(address, size, source, offset, length, i)
        if not inside or ~_advance(~np.uint32(0), data, 0, len(data)) != crc[i]:
            return i
    return -1


@njit
def _wrong_by_threes(address: Array, size: Array, source: Array, offset: Array, length: Array, crc: Array) -> int:
    """Three ranges at a time: an instruction takes three steps, and their chains do not wait for each other."""
    n = len(offset) // 3 * 3
    for i in range(0, n, 3):
        for ahead in range(i + 6, min(i + 9, len(offset))):
            if 0 <= source[ahead] < len(address):
                prefetch(address[source[ahead]] + offset[ahead])
                prefetch(address[source[ahead]] + offset[ahead] + 64)
        inside_a, a = _range(address, size, source, offset, length, i)
        inside_b, b = _range(address, size, source, offset, length, i + 1)
        inside_c, c = _range(address, size, source, offset, length, i + 2)
        both = min(len(a), len(b), len(c)) // 8 * 8
        x, y, z = np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFF)
        for at in range(0, both, 8):
            x, y, z = _step64(x, a, at), _step64(y, b, at), _step64(z, c, at)
        if not inside_a or ~advance_hardware(np.uint32(x), a, both, len(a)) != crc[i]:
            return i
        if not inside_b or ~advance_hardware(np.uint32(y), b, both, len(b)) != crc[i + 1]:
            return i + 1
        if not inside_c or ~advance_hardware(np.uint32(z), c, both, len(c)) != crc[i + 2]:
            return i + 2
    for i in range(n, len(offset)):
        inside, data = _range(address, size, source, offset, length, i)
        if not inside or ~advance_hardware(~np.uint32(0), data, 0, len(data)) != crc[i]:
            return i
    return -1


_first_wrong = _wrong_by_threes if has_crc_instruction() else _wrong_one_by_one


def check_crcs(buffers: Buffers, source: Array, offset: Array, length: Array, crc: Array) -> int:
    """Index of the first range that is not in its buffer or whose CRC is not ``crc[i]``; -1 where all match.

    Args:
        buffers: what holds the ranges.
        source: (n,) int64, which of them range i is in.
        offset, length: (n,) int64 bytes.
        crc: (n,) uint32.
    """
    found: int = _first_wrong(buffers.address, buffers.size, source, offset, length, crc)
    return found


@njit
def _open_chunks(
    address: Array,
    size: Array,
    source: Array,
    offset: Array,
    length: Array,
    n_streams: Array,
    header_crc: Array,
    codec: Array,
    width: Array,
    block_off: Array,
    block_len: Array,
    crc: Array,
) -> Any:
    for i in range(len(offset)):
        ahead = i + _AHEAD
        if ahead < len(offset) and 0 <= source[ahead] < len(address):
            prefetch(address[source[ahead]] + offset[ahead])
        inside, data = _range(address, size, source, offset, length, i)
        streams = n_streams[i]
        head = (streams * 12 + 7) // 8 * 8
        if not inside or streams < 0 or len(data) < head:
            return i, 1
        if ~_advance(~np.uint32(0), data, 0, head) != header_crc[i]:
            return i, 2
        at = offset[i] + head
        for k in range(streams):
            entry = data[k * 12 : k * 12 + 12]
            codec[k, i], width[k, i] = entry[0], entry[1]
            n = entry[4:8].view(np.uint32)[0]
            if n % 8 != 0:
                return i, 3
            block_off[k, i], block_len[k, i] = at, n
            crc[k, i] = entry[8:12].view(np.uint32)[0]
            at += n
        if at != offset[i] + len(data):
            return i, 4
    return -1, 0


def open_chunks(
    buffers: Buffers, source: Array, offset: Array, length: Array, n_streams: Array, header_crc: Array
) -> tuple[int, int, Array, Array, Array, Array, Array]:
    """Headers of stripe chunks (docs/format/archive-v2.md, section 3) that lie in ``buffers``.

    Args:
        source: (n,) int64, which buffer chunk i is in.
        offset, length: (n,) int64 bytes of each chunk.
        n_streams: (n,) int64 blocks in each chunk.
        header_crc: (n,) uint32.

    Returns:
        the first bad chunk and what is wrong with it (-1, 0 where all are sound; 1 not in its buffer or shorter than
        its header, 2 the CRC, 3 a block length that is no multiple of 8, 4 lengths that do not add up); then, for n
        chunks of at most S streams, codec and width (S, n) uint8, offset and length of each block (S, n) int64, its CRC
        (S, n) uint32. Those of streams that a chunk does not have are 0.
    """
    shape = int(n_streams.max(initial=1)), len(offset)
    codec, width = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    block_off, block_len = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    crc = np.zeros(shape, np.uint32)
    bad, why = _open_chunks(
        buffers.address,
        buffers.size,
        source,
        offset,
        length,
        n_streams,
        header_crc,
        codec,
        width,
        block_off,
        block_len,
        crc,
    )
    return bad, why, codec, width, block_off, block_len, crc
