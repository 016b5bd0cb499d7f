"""MultiHash: one integer, string or bytes -> a vector of buckets, one a seed, all in one range.

With buckets 1000 and seeds (1, 2): 5 -> [(hash of 5 under seed 1) mod 1000, (hash of 5 under seed 2) mod 1000]. The
rows of one matrix at these places, summed, are the value's embedding: two values share it only where they collide under
every seed (the unified multi-hash matrix of ARGUS, arXiv 2507.15994; Svenstrup et al., "Hash Embeddings", 2017).
Element i is ``Hash(input, buckets, seeds[i])``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.features.hash import hash_steps, hash_texts
from thinrow.features.node import Elementwise, Formula, as_bucket_count, as_integer, as_seed, integers


@dataclass(frozen=True)
class MultiHash(Elementwise):
    """int64 vectors of ``len(seeds)`` elements in [0, buckets)."""

    buckets: int
    seeds: tuple[int, ...]
    op: ClassVar[str] = "multi_hash"

    def __post_init__(self) -> None:
        seeds = self.seeds if isinstance(self.seeds, Iterable) else (self.seeds,)
        object.__setattr__(self, "seeds", tuple(as_seed("multi_hash", s) for s in seeds))
        buckets = as_integer("multi_hash", "buckets", self.buckets)
        object.__setattr__(self, "buckets", as_bucket_count("multi_hash", "buckets", buckets))
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"multi_hash: seeds {self.seeds}; give one or more, each once")

    @property
    def width(self) -> int:
        return len(self.seeds)

    def formula(self, dtype: np.dtype[Any]) -> Formula:
        integers(dtype, "multi_hash", "bucketize floats first")
        return Formula(tuple(hash_steps(s, self.buckets) for s in self.seeds), np.dtype(np.int64))

    def texts(self, entries: pa.Array) -> npt.NDArray[Any]:
        return np.stack([hash_texts(entries, s, self.buckets) for s in self.seeds], axis=1)
