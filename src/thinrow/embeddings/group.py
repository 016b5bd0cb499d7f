"""TableGroup: logical tables of one width and one optimizer that share one physical table.

    group = TableGroup(("item", "store"))
    group.keys("item", np.array([5]))       # [578557196290245364]: the place of key 5 of "item" in the table
    group.keys("store", np.array([5]))      # [7867173449534061665]

A step over many small tables is as many look-ups, sorts, sums and updates; over a group it is one (RecIS and MTGenRec
merge tables so). What checkpoints, shards and servers see is one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.kernels import kernel
from thinrow.kernels.dispatch import device_kernel

if TYPE_CHECKING:
    from torch import Tensor

Ints = npt.NDArray[np.int64]

_SEEDS = (1 << 63) - 1


@dataclass(frozen=True)
class TableGroup:
    """Attributes:
    names: of the logical tables.
    """

    names: tuple[str, ...]
    _seeds: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.names, str):
            raise InputError(f"names={self.names!r}; give a tuple of names, ({self.names!r},) for one")
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names or len(set(self.names)) < len(self.names):
            raise InputError(f"names={self.names}; give one or more, each once")
        encoded = [name.encode() for name in self.names]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        hashes = kernel("hash_bytes")(offsets, np.frombuffer(b"".join(encoded), np.uint8), 0)
        object.__setattr__(self, "_seeds", dict(zip(self.names, (hashes & _SEEDS).tolist(), strict=True)))

    def keys(self, name: str, keys: Ints) -> Ints:
        """(n,) int64: what ``keys`` (n,) int64 of the logical table are in the physical one.

        Two keys of one table never meet. Those of two tables do by chance, and then share a vector: of a hundred
        million keys in all, two do with a chance of one in 3,700. A table's place hangs on its name alone; others may
        be added later.

        Raises:
            InputError: there is no such table, or ``keys`` are not such.
        """
        return self.keys_of_parts((name,), keys, np.array([0, np.size(keys)]))

    def keys_of_parts(self, names: Sequence[str], keys: Ints, bounds: Ints) -> Ints:
        """``keys`` of several tables at once: ``keys[bounds[k]:bounds[k + 1]]`` are of the table ``names[k]``.

        Raises:
            InputError: there is no such table, or ``keys`` are not (n,) int64.
        """
        if not isinstance(keys, np.ndarray) or keys.dtype != np.int64 or keys.ndim != 1:
            given = f"{keys.dtype} {keys.shape}" if isinstance(keys, np.ndarray) else f"a {type(keys).__name__}"
            raise InputError(f"keys of {', '.join(names)}: {given}; they must be a one-dimensional int64 array")
        found: Ints = kernel("hash_parts")(keys, bounds, self._seeds_of(names))
        return found

    def keys_of_tensors(self, names: Sequence[str], keys: Sequence[Tensor]) -> Tensor:
        """``keys`` of several tables at once, on whatever device they are: ``keys[k]`` (n_k,) int64 are of the table
        ``names[k]``. Results are side by side.

        Raises:
            InputError: there is no such table.
        """
        found: Tensor = device_kernel("hash_parts")(list(keys), self._seeds_of(names))
        return found

    def _seeds_of(self, names: Sequence[str]) -> list[int]:
        strange = [name for name in names if name not in self._seeds]
        if strange:
            raise InputError(f"no table {strange[0]!r} in the group; there are {', '.join(self.names)}")
        return [self._seeds[name] for name in names]
