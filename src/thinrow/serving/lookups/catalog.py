"""Served tables as numbers: where in memory each lies, for loops that run without the interpreter.

Worked example: an export of ``item.`` and ``user.`` of which the version before is kept is four tables, the newest two
sorted by the hash of their names; ``item.`` with one delta on a full export has two parts, the delta first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import ServingTable
from thinrow.kernels import kernel
from thinrow.kernels import lookups as places
from thinrow.serving.lookups.messages import DTYPES

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """Attributes:
    tables, parts: (n, fields) int64, as ``kernels.lookups`` says.
    names: uint8, one behind the other.
    span: (2,) uint64, the first and the last mixed key that is answered for.
    n_newest: how many of the tables, the first, are of the newest versions, sorted by hash.
    n_exports: how many.
    held: keeps what the addresses name.
    """

    tables: Ints
    parts: Ints
    names: npt.NDArray[np.uint8]
    span: npt.NDArray[np.uint64]
    n_newest: int
    n_exports: int
    held: tuple[Any, ...]


def catalog_of(exports: Sequence[Sequence[tuple[Any, Mapping[str, ServingTable]]]], low: int, end: int) -> Catalog:
    """Of each export its versions, the newest first, each with its tables."""
    rows: list[tuple[int, str, list[int]]] = []
    parts: list[list[int]] = []
    held: list[Any] = []
    names, name_at = bytearray(), dict[str, int]()
    for number, versions in enumerate(exports):
        for depth, (version, tables) in enumerate(versions):
            for name, table in tables.items():
                raw = name.encode()
                if name not in name_at:
                    name_at[name] = len(names)
                    names += raw
                first = len(parts)
                parts += [_part(*found) for found in table.mapped_parts()]
                default = table.default if table.default.any() else np.zeros_like(table.default)
                with np.errstate(over="ignore"):
                    half = default.astype(np.float16)
                held += [table, default, half]
                row = [0] * places.T_FIELDS
                row[places.T_HASH] = int(kernel("crc32c")(np.frombuffer(bytearray(raw), np.uint8), 0))
                row[places.T_NAME], row[places.T_NAME_BYTES] = name_at[name], len(raw)
                row[places.T_EXPORT], row[places.T_DEPTH], row[places.T_DIM] = number, depth, table.dim
                row[places.T_FIRST], row[places.T_END] = first, len(parts)
                row[places.T_DEFAULT], row[places.T_DEFAULT16] = default.ctypes.data, half.ctypes.data
                row[places.T_STEP], row[places.T_CRC] = version.step, version.crc32c
                row[places.T_HALF], row[places.T_BEFORE] = int(table.holds_float16), -1
                rows.append((depth, name, row))
    # The newest first, by hash; older ones are found from the one before them.
    rows.sort(key=lambda one: (one[0] > 0, one[2][places.T_HASH]))
    at = {(depth, name): i for i, (depth, name, _) in enumerate(rows)}
    newest = sum(depth == 0 for depth, _, _ in rows)
    for depth, name, row in rows:
        row[places.T_BEFORE] = at.get((depth + 1, name), -1)
    numbers = np.array([row for _, _, row in rows], np.int64).reshape(-1, places.T_FIELDS)
    span = np.array([low, end - 1], np.uint64)
    return Catalog(numbers, _ints(parts, places.P_FIELDS), _bytes(names), span, newest, len(exports), tuple(held))


def _part(first: int, last: int, part: Any) -> list[int]:
    row = [0] * places.P_FIELDS
    row[places.P_LOW], row[places.P_LAST], row[places.P_SHIFT] = _signed(first), _signed(last), part.shift
    row[places.P_WORDS], row[places.P_INDEX] = part.words.ctypes.data, part.index.ctypes.data
    row[places.P_BUCKETS], row[places.P_VALUES] = len(part.index) - 1, part.values.ctypes.data
    row[places.P_KIND] = DTYPES.index(part.values.dtype.name)
    row[places.P_SCALES] = 0 if part.scales is None else part.scales.ctypes.data
    row[places.P_GONE] = 0 if part.gone is None else part.gone.ctypes.data
    row[places.P_N_GONE] = -1 if part.gone is None else len(part.gone)
    return row


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _ints(rows: list[list[int]], width: int) -> Ints:
    return np.array(rows, np.int64).reshape(-1, width)


def _bytes(names: bytearray) -> npt.NDArray[np.uint8]:
    # Of tables without a name at all there still is an address.
    return np.frombuffer(names or bytearray(1), np.uint8)
