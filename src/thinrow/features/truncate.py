"""Truncate: each row of a jagged column cut to its newest n elements.

With n 2: [[1, 2, 3], [], [4]] -> [[2, 3], [], [4]]. Histories ascend in time, so the *last* n are the newest; a row of
candidates is in the order in which it was logged, and ``keep="first"`` keeps its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from thinrow.core.errors import InputError
from thinrow.features.node import Node, as_integer
from thinrow.features.value import Value


@dataclass(frozen=True)
class Truncate(Node):
    """The rows of ``input``, of ``n`` elements at most, dtype as it was."""

    input: Node
    n: int
    keep: Literal["last", "first"] = "last"
    op: ClassVar[str] = "truncate"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", as_integer("truncate", "n", self.n))
        if self.n < 0:
            raise InputError(f"truncate: n={self.n}; it must be 0 or more")
        if self.keep not in ("last", "first"):
            raise InputError(f"truncate: keep={self.keep!r}; it must be 'last' or 'first'")

    @property
    def operands(self) -> tuple[Node, ...]:
        return (self.input,)

    def evaluate(self, operands: Sequence[Value]) -> Value:
        (value,) = operands
        if value.offsets is None:
            raise InputError(
                f"truncate of {self.domain}, a flat column; for shared histories set Projection(max_len={self.n})"
            )
        start, stop = value.offsets[:-1], value.offsets[1:]
        if self.keep == "last":
            start = np.maximum(start, stop - self.n)
        else:
            stop = np.minimum(stop, start + self.n)
        return value.take_ranges(start, stop)
