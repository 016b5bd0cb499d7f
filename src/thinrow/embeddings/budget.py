"""Budget: how many rows a table may have, which keys get one, and which lose theirs.

With ``Budget(max_rows=1000, min_count=2)`` a key gets a row when it is seen for the second time; when more than 950
rows are taken, a step ends by removing those that were used longest ago until 900 are left. A key without a row reads
as zeros and learns nothing; one that lost its row starts again from its first vector.

A row is bound to be used or lost, so nothing here runs in evaluation or serving, where a table is only read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.named import imported
from thinrow.core.wrap import mix64_words

Ints = npt.NDArray[np.int64]

#: Row state of a table with a budget: count and last step of use.
USAGE = "usage"


@dataclass(frozen=True, slots=True)
class Usage:
    """How rows were used, what a score is made of.

    Attributes:
        keys: (n,) int64.
        counts: (n,) int64, how often the key was looked up in training, once a position; halved at evictions by count.
        last: (n,) int64, the step in which it last was.
        step: the step that ends now; a row that it used has it as ``last``.
    """

    keys: Ints
    counts: Ints
    last: Ints
    step: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Attributes:
    max_rows: rows that the table never exceeds; or None, where ``max_bytes`` says it.
    max_bytes: memory of vectors, optimizer state, usage and index together.
    evict: which rows go when room is needed, those of the lowest score: ``lru``, the step of the last use; ``lfu``, the
        count of uses, halved at each eviction so that old fame fades; or ``module:name`` of a function that gives the
        scores (n,) for a ``Usage``. Ties are broken by a hash of the key.
    max_age: rows that were not used in the last so many steps go as well, the one that ends included: 1 keeps what this
        step used, and no more. None for no such limit.
    keep: share of the rows that stay when room is made. The rest is room for the keys of the next steps; those that
        find none wait for the step after.
    min_count: how often a key must be seen before it gets a row.
    sketch_cells: counters of keys without a row, a byte each, in two rows; a power of two. A count is never too low,
        and too high for few keys while there are fewer keys than cells (a count-min sketch with conservative update:
        Estan and Varghese 2002; Cormode and Muthukrishnan 2005). They are halved after eight sightings a cell.
    """

    max_rows: int | None = None
    max_bytes: int | None = None
    evict: str = "lru"
    max_age: int | None = None
    keep: float = 0.9
    min_count: int = 1
    sketch_cells: int = 1 << 20

    def __post_init__(self) -> None:
        if (self.max_rows is None) == (self.max_bytes is None):
            raise InputError(f"budget: max_rows={self.max_rows}, max_bytes={self.max_bytes}; give one of the two")
        for name in ("max_rows", "max_bytes", "max_age", "min_count", "sketch_cells"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InputError(f"budget: {name}={value!r}; it must be an integer, 1 or more")
        if not self.min_count < 256:
            raise InputError(f"budget: min_count={self.min_count}; counters of a byte hold 255 at most")
        if not 0 < self.keep < 1:
            raise InputError(f"budget: keep={self.keep}; it must be above 0 and below 1")
        if not 1 <= self.sketch_cells <= 1 << 32 or self.sketch_cells & (self.sketch_cells - 1):
            raise InputError(f"budget: sketch_cells={self.sketch_cells}; it must be a power of two, 2^32 at most")
        if self.evict not in ("lru", "lfu") and self.evict.count(":") != 1:
            raise InputError(f"budget: evict={self.evict!r}; it must be 'lru', 'lfu' or 'module:name' of a function")

    def share(self, n_shards: int) -> Budget:
        """That of each of ``n_shards`` equal shards of a table: together they have no more than this.

        Raises:
            InputError: it is too small to share.
        """
        smallest = next(v for v in (self.max_rows, self.max_bytes) if v is not None)
        if not 1 <= n_shards <= smallest:
            raise InputError(f"n_shards={n_shards}; it must be in [1, {smallest}] for {self}")
        return dataclasses.replace(
            self,
            max_rows=None if self.max_rows is None else self.max_rows // n_shards,
            max_bytes=None if self.max_bytes is None else self.max_bytes // n_shards,
            sketch_cells=max(1, self.sketch_cells >> (n_shards.bit_length() - 1)),
        )

    def put_in(self, state: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """The state of a table with this budget in place of its own, say where another number of ranks loads it.

        What was counted of keys without a row stays where the sketch is as large as it was; else it starts anew.
        """
        names = ("budget", "sketch", "sketch_sightings")
        out = {name: array for name, array in state.items() if name not in names}
        out |= {"budget": self.to_bytes(), "step": state.get("step", np.array(0))}
        if self.min_count > 1:
            shape = (2, self.sketch_cells)
            kept = "sketch" in state and state["sketch"].shape == shape
            out["sketch"] = state["sketch"] if kept else np.zeros(shape, np.uint8)
            out["sketch_sightings"] = state["sketch_sightings"] if kept else np.array(0)
        return out

    def rows(self, row_bytes: int) -> int:
        """Rows at most, of ``row_bytes`` each. Raises InputError where there is no room for one."""
        most = self.max_rows if self.max_rows is not None else int(self.max_bytes or 0) // row_bytes
        if most < 1:
            raise InputError(f"budget: max_bytes={self.max_bytes}; a row of the table with its state is {row_bytes}")
        return most

    def too_many(self, n: int, most: int) -> int:
        """How many of ``n`` rows must go, where there may be ``most``: none while half of the room is there, and one at
        least where there is none."""
        kept = min(max(1, int(most * self.keep)), most - 1)
        return n - kept if n > (kept + most) // 2 else 0

    def leaving(self, usage: Usage, count: int) -> npt.NDArray[np.bool_]:
        """(n,) which rows go: the aged ones, and of the others those of the lowest scores, ``count`` in all at least.

        Raises:
            InputError: the function of one's own cannot be imported, or gives other than n numbers.
        """
        gone = np.zeros(len(usage.keys), np.bool_)
        if self.max_age is not None:
            gone = usage.step - usage.last >= self.max_age
        count -= int(gone.sum())
        if count <= 0:
            return gone
        others = np.flatnonzero(~gone)
        scores = self._scores(usage)[others]
        bound = np.partition(scores, count - 1)[count - 1]
        below = scores < bound
        gone[others[below]] = True
        tied = others[scores == bound]
        order = np.argsort(mix64_words(usage.keys[tied].view(np.uint64)), kind="stable")
        gone[tied[order[: count - int(below.sum())]]] = True
        return gone

    def _scores(self, usage: Usage) -> npt.NDArray[Any]:
        if self.evict == "lru":
            return usage.last
        if self.evict == "lfu":
            return usage.counts
        scores = np.asarray(imported(self.evict, f"budget: evict={self.evict!r}")(usage))
        if scores.shape != usage.keys.shape or scores.dtype.kind not in "iuf" or np.isnan(scores).any():
            raise InputError(
                f"budget: {self.evict} gave {scores.dtype} of shape {scores.shape}; it must give "
                f"{len(usage.keys)} numbers, none of them NaN"
            )
        return scores

    def to_bytes(self) -> npt.NDArray[np.uint8]:
        """As it is saved with a table."""
        return np.frombuffer(json.dumps(dataclasses.asdict(self), sort_keys=True).encode(), np.uint8)

    @classmethod
    def from_bytes(cls, saved: npt.NDArray[np.uint8]) -> Budget:
        """Reverse of ``to_bytes``. Raises InputError on anything else."""
        try:
            return cls(**json.loads(saved.tobytes()))
        except (TypeError, ValueError) as e:
            raise InputError(f"the state's budget is none ({e}); pass DynamicTable.state()") from e
