"""Bucketize: a number -> the count of boundaries that are <= it.

With boundaries (0, 10, 100): -5 -> 0, 0 -> 1, 9.99 -> 1, 10 -> 2, 1000 -> 3. NaN -> 3 (above all), null -> null.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.features.node import Elementwise
from thinrow.features.value import Entries
from thinrow.kernels import kernel

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Bucketize(Elementwise):
    """int32 in [0, len(boundaries)]. ``boundaries`` are finite and strictly ascending.

    Integers are compared with boundaries exactly, floats as float64.
    """

    boundaries: tuple[float, ...]
    op: ClassVar[str] = "bucketize"

    def __post_init__(self) -> None:
        if not self.boundaries or not all(math.isfinite(b) for b in self.boundaries):
            raise InputError(f"bucketize: boundaries {self.boundaries}; give one finite number or more")
        # One spelling of each number, so that equal ops have equal digests: 10.0 is written 10.
        whole = tuple(int(b) if b == int(b) else float(b) for b in self.boundaries)
        object.__setattr__(self, "boundaries", whole)
        for low, high in zip(self.boundaries[:-1], self.boundaries[1:], strict=True):
            if low >= high:
                raise InputError(f"bucketize: boundary {high} follows {low}; they must ascend strictly")

    def compute(self, entries: Entries) -> npt.NDArray[Any]:
        if isinstance(entries, pa.Array):
            raise InputError(f"bucketize of a column of {entries.type}; it takes numbers: hash strings instead")
        if entries.dtype.kind == "f":
            bounds = np.asarray(self.boundaries, np.float64)
            result = kernel("bucketize_floats")(np.ascontiguousarray(entries, np.float64), bounds)
        else:
            # For integers x >= b is x >= ceil(b); a boundary past the largest int64 is never reached.
            whole = [max(math.ceil(b), _INT64_MIN) for b in self.boundaries if math.ceil(b) <= _INT64_MAX]
            result = kernel("bucketize_ints")(np.ascontiguousarray(entries, np.int64), np.asarray(whole, np.int64))
        return np.asarray(result)
