"""Cross: several columns -> one id of their combination, by the named hash of the tuple.

``Cross((Source("cand.product_id"), Source("ctx.store_id")), buckets=1000)`` gives each candidate one id of
(product, store): the context value stands beside every candidate of its example. Order matters; null where any part is
null. A string column is hashed once per distinct entry, and that work is shared with a ``Hash`` of the same column.

What a candidate has to do with the user's history is ``HistoryMatch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.features.hash import Hash
from thinrow.features.node import RELATE, Domain, Node, as_bucket_count, as_seed, joint_domain
from thinrow.features.value import Value, aligned, united_mask
from thinrow.kernels import kernel

#: Values that one cross of every combination may give.
_MOST = 1 << 31


@dataclass(frozen=True)
class Cross(Node):
    """int64: the hash of the tuple, or, with ``buckets``, the unsigned hash modulo ``buckets``.

    Rows are aligned: the i-th elements of a row stand together. With ``product`` every element of a row of one column
    meets every one of the same row of the others, the last column's changing fastest: rows [1, 2] and [7, 8, 9] give
    six values, those of (1, 7), (1, 8), (1, 9), (2, 7), (2, 8) and (2, 9).
    """

    inputs: tuple[Node, ...]
    buckets: int | None = None
    seed: int = 0
    product: bool = False
    op: ClassVar[str] = "cross"
    later_fields: ClassVar[Mapping[str, Any]] = {"product": False}

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "buckets", as_bucket_count("cross", "buckets", self.buckets))
        object.__setattr__(self, "seed", as_seed("cross", self.seed))
        object.__setattr__(self, "product", bool(self.product))
        if len(self.inputs) < 2:
            raise InputError(f"cross of {len(self.inputs)} columns; give two or more")
        joint_domain("cross", self.inputs, RELATE)

    @property
    def operands(self) -> tuple[Node, ...]:
        return tuple(Hash(i) for i in self.inputs)

    @classmethod
    def build(cls, inputs: Sequence[Node], parameters: Mapping[str, Any]) -> Self:
        return cls(tuple(inputs), **parameters)

    @property
    def domain(self) -> Domain:
        return joint_domain("cross", self.inputs, RELATE)

    def evaluate(self, operands: Sequence[Value]) -> Value:
        parts, offsets = _every_combination(operands) if self.product else aligned(operands, "cross")
        elements = np.stack([np.asarray(p.numbers(), np.int64) for p in parts])
        hashed = kernel("hash_tuples")(elements, self.seed)
        if self.buckets is not None:
            hashed = kernel("mod_unsigned")(hashed, self.buckets)
        return Value(np.asarray(hashed), None, united_mask(parts), offsets)


def _every_combination(sides: Sequence[Value]) -> tuple[list[Value], npt.NDArray[np.int64]]:
    """Each side's element of every combination of a row's elements, the last side's changing fastest."""
    bounds = [np.arange(len(v) + 1) if v.offsets is None else v.offsets for v in sides]
    if len({len(b) for b in bounds}) > 1:
        rows = ", ".join(str(len(b) - 1) for b in bounds)
        raise InputError(f"cross of columns of {rows} rows; they must be as many")
    lengths = [np.diff(b) for b in bounds]
    total = int(np.prod([n.astype(np.float64) for n in lengths], axis=0).sum())
    if total > _MOST:
        raise InputError(f"cross of every combination gives {total} values; {_MOST} at most: truncate the sides first")
    offsets = offsets_of(np.prod(lengths, axis=0))
    row = np.repeat(np.arange(len(lengths[0])), np.diff(offsets))
    left = np.arange(len(row)) - offsets[row]
    parts = []
    for side, bound, n in reversed(list(zip(sides, bounds, lengths, strict=True))):
        left, at = np.divmod(left, n[row])
        parts.append(side.take(bound[row] + at, offsets))
    return parts[::-1], offsets
