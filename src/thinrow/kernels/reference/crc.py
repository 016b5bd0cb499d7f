"""CRC-32C, bit by bit of its definition through one table of 256 bytes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.buffers import Buffers

Array = npt.NDArray[Any]


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def crc32c(data: Array, crc: int = 0) -> int:
    """CRC of the uint8 array ``data``, continuing from ``crc`` (that of the bytes before it)."""
    state = int(crc) ^ 0xFFFFFFFF
    for byte in data.tobytes():
        state = (state >> 8) ^ _TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def crc32c_many(buffer: Array, offset: Array, length: Array) -> Array:
    """CRC of each range ``buffer[offset[i]:offset[i] + length[i]]``: (n,) uint32; 0 for one outside the buffer."""
    out = np.zeros(len(offset), np.uint32)
    for i, (start, n) in enumerate(zip(offset.tolist(), length.tolist(), strict=True)):
        if 0 <= start <= len(buffer) and 0 <= n <= len(buffer) - start:
            out[i] = crc32c(buffer[start : start + n])
    return out


def _data(buffers: Buffers, where: int, start: int, n: int) -> Array | None:
    if not 0 <= where < len(buffers.arrays):
        return None
    buffer = buffers.arrays[where]
    return buffer[start : start + n] if 0 <= start <= len(buffer) and 0 <= n <= len(buffer) - start else None


def check_crcs(buffers: Buffers, source: Array, offset: Array, length: Array, crc: Array) -> int:
    """As ``thinrow.kernels.numba.crc.check_crcs``."""
    for i, where in enumerate(source.tolist()):
        data = _data(buffers, where, int(offset[i]), int(length[i]))
        if data is None or crc32c(data) != crc[i]:
            return i
    return -1


def open_chunks(
    buffers: Buffers, source: Array, offset: Array, length: Array, n_streams: Array, header_crc: Array
) -> tuple[int, int, Array, Array, Array, Array, Array]:
    """As ``thinrow.kernels.numba.crc.open_chunks``."""
    shape = int(n_streams.max(initial=1)), len(offset)
    codec, width = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    block_off, block_len = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    crc = np.zeros(shape, np.uint32)
    found = codec, width, block_off, block_len, crc
    for i, (where, n) in enumerate(zip(source.tolist(), n_streams.tolist(), strict=True)):
        data = _data(buffers, where, int(offset[i]), int(length[i]))
        head = (n * 12 + 7) // 8 * 8
        if data is None or n < 0 or len(data) < head:
            return i, 1, *found
        if crc32c(data[:head]) != header_crc[i]:
            return i, 2, *found
        at = int(offset[i]) + head
        for k in range(n):
            codec[k, i], width[k, i], _, size, crc[k, i] = struct.unpack_from("<BBHII", data.data, 12 * k)
            if size % 8:
                return i, 3, *found
            block_off[k, i], block_len[k, i] = at, size
            at += size
        if at != int(offset[i]) + len(data):
            return i, 4, *found
    return -1, 0, *found
