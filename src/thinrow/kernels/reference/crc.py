"""CRC-32C, bit by bit of its definition through one table of 256 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
