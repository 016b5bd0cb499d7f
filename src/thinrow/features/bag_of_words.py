"""BagOfWords: a text -> the list of its words' buckets.

"Red shoes, RED" -> [bucket of "red", bucket of "shoes", bucket of "red"], each ``Hash(word, buckets, seed)``. A word is
a run of ASCII letters and digits and of bytes above 127, letters of ASCII in lower case; everything else divides. So
"naïve" is one word, and no table of Unicode decides which. Words keep their order and their repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.features.hash import byte_runs
from thinrow.features.node import Node, as_bucket_count, as_seed
from thinrow.features.value import Value
from thinrow.kernels import kernel


@dataclass(frozen=True)
class BagOfWords(Node):
    """Lists of int64 in [0, buckets), as many as there are words; of a null an empty one."""

    input: Node
    buckets: int
    seed: int = 0
    op: ClassVar[str] = "bag_of_words"

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", as_bucket_count("bag_of_words", "buckets", self.buckets))
        object.__setattr__(self, "seed", as_seed("bag_of_words", self.seed))

    @property
    def operands(self) -> tuple[Node, ...]:
        return (self.input,)

    def evaluate(self, operands: Sequence[Value]) -> Value:
        (value,) = operands
        if not isinstance(value.entries, pa.Array):
            raise InputError(f"bag_of_words of a column of {value.entries.dtype}; it takes strings or bytes")
        lists, hashed = kernel("hash_words")(*byte_runs(value.entries), self.seed)
        buckets = np.asarray(kernel("mod_unsigned")(hashed, self.buckets))
        return Value(buckets, value.codes, value.valid, value.offsets, lists)
