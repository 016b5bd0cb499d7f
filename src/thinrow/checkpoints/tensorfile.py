"""safetensors files, written with their CRC in one pass and read, copied or mapped, without the library.

The library's NumPy half maps no file, holds the interpreter's lock while it reads (0.3 s for 520 MB, in which training
stands still), and leaves the CRC of what it writes to a second pass. The layout is the library's, byte for byte: u64
length of a JSON header, the header with spaces up to a multiple of 8, the tensors' bytes, large items first.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError
from thinrow.storage.container import crc_of

Arrays = dict[str, npt.NDArray[Any]]

#: What both NumPy and safetensors hold, under its name. Tensors lie in this order of their types, then by name.
_CODES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}
DTYPES = tuple(_CODES)
#: safetensors keeps this key of its header for itself.
RESERVED = "__metadata__"
_CHUNK_BYTES = 1 << 23


def write(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
    """Make the file ``path``, which must not exist, durable but for its name; its ``bytes`` and ``crc32c``.

    Args:
        arrays: in C order and the machine's byte order, of ``DTYPES``.
    """
    ordered = sorted(arrays.items(), key=lambda item: (DTYPES.index(item[1].dtype.name), item[0]))
    return write_bytes(path, _chunks(ordered))


def write_bytes(path: Path, chunks: Iterable[memoryview | bytes]) -> dict[str, int]:
    """The same of plain bytes."""
    size = crc = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for chunk in chunks:
            crc = crc_of(chunk, crc)
            size += len(chunk)
            view = memoryview(chunk)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "crc32c": crc}


def crc_of_file(path: Path) -> int:
    """CRC-32C of a file's bytes, read in pieces: the file may be as large as the memory."""
    crc = 0
    with open(path, "rb", buffering=0) as source:
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, os.fstat(source.fileno()).st_size)))
        while n := source.readinto(buffer):
            crc = crc_of(buffer[:n], crc)
    return crc


def read(path: Path) -> Arrays:
    """Name -> writable copy of each tensor. Raises CorruptionError where it is no such file."""
    out: Arrays = {}
    with open(path, "rb", buffering=0) as file:
        for name, dtype, shape, at in _layout(path, file.read):
            out[name] = np.empty(shape, dtype)
            file.seek(at)
            view = out[name].reshape(-1).view(np.uint8).data
            while view:
                n = file.readinto(view)
                if not n:
                    raise CorruptionError(f"it ends within tensor {name!r}", file=str(path))
                view = view[n:]
    return out


def mapped(path: Path) -> Arrays:
    """Name -> read-only view of each tensor, of the mapped file. Raises CorruptionError where it is no such file."""
    with open(path, "rb", buffering=0) as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as e:
            raise CorruptionError("it is empty", file=str(path)) from e
        layout = _layout(path, file.read)
    return {n: np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape) for n, dtype, shape, at in layout}


def _layout(path: Path, take: Callable[[int], bytes | None]) -> list[tuple[str, np.dtype[Any], tuple[int, ...], int]]:
    """(name, dtype, shape, position of the first byte) of each tensor; ``take`` reads from the file's start."""
    size = path.stat().st_size
    out, spans = [], []
    try:
        head = take(8) or b""
        n = int.from_bytes(head, "little")
        if len(head) < 8 or n > size - 8:
            raise ValueError(f"{size} bytes cannot hold a header of {n}")
        header = json.loads(take(n) or b"")
        for name, about in header.items():
            if name == RESERVED:
                continue
            dtype, shape = np.dtype(_NAMES[about["dtype"]]), tuple(about["shape"])
            first, end = about["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, first, end)):
                raise ValueError(f"tensor {name!r} of {shape} at {first} to {end}")
            if end - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"tensor {name!r} of {shape} is said to have {end - first} bytes")
            if 8 + n + end > size:
                raise ValueError(f"it ends within tensor {name!r}")
            # NumPy knows which shapes no array has.
            np.empty(shape, dtype)
            out.append((name, dtype, shape, 8 + n + first))
            spans.append((first, end))
        # Byte for byte in one tensor: a small file must not be a large one in memory.
        at = 0
        for first, end in [*sorted(spans), (size - 8 - n, size)]:
            if first != at:
                raise ValueError(f"bytes {min(first, at)} to {max(first, at)} are of no tensor or of several")
            at = end
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise CorruptionError(f"it is no safetensors file: {e!r}", file=str(path)) from e
    return out


def _chunks(ordered: list[tuple[str, npt.NDArray[Any]]]) -> Iterator[memoryview | bytes]:
    header, at = {}, 0
    for name, array in ordered:
        place = [at, at + array.nbytes]
        header[name] = {"dtype": _CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, array in ordered:
        flat = array.reshape(-1).view(np.uint8).data
        yield from (flat[first : first + _CHUNK_BYTES] for first in range(0, len(flat), _CHUNK_BYTES))
