"""Routing: which shard of a table has a key. Training, checkpoints and serving share this one definition.

A shard has a range of the mixed key, ``mix64(key)`` as an unsigned word, so that keys of any kind spread evenly and a
table of any size is routed by one number a shard. With four equal shards, key 0 mixes to 0 and is in shard 0, key 1
mixes to 0x5692161d100b05e5 and is in shard 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.wrap import mix64_words

_WORDS = 1 << 64


@dataclass(frozen=True, slots=True)
class Routing:
    """Attributes:
    starts: for each shard the first mixed key of its range, ascending, the first 0; a range ends before the next
        begins, the last at 2^64.
    """

    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in pairwise(self.starts))
        if not self.starts or self.starts[0] != 0 or not ascending or self.starts[-1] >= _WORDS:
            raise InputError(f"starts={self.starts}; they must ascend from 0 and be below 2^64")

    @classmethod
    def even(cls, n_shards: int) -> Routing:
        """``n_shards`` equal ranges. Raises InputError where there are fewer than one."""
        if n_shards < 1:
            raise InputError(f"n_shards={n_shards}; it must be 1 or more")
        return cls(tuple(-(-shard * _WORDS // n_shards) for shard in range(n_shards)))

    def __len__(self) -> int:
        return len(self.starts)

    def bounds(self, shard: int) -> tuple[int, int]:
        """The first mixed key of the shard's range and the first after it."""
        return self.starts[shard], (*self.starts, _WORDS)[shard + 1]

    def shards(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(n,) shard of each of ``keys`` (n,) int64."""
        starts = np.array(self.starts, np.uint64)
        return np.searchsorted(starts, mix64_words(keys.view(np.uint64)), side="right") - 1
