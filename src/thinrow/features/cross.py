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
from thinrow.features.hash import Hash
from thinrow.features.node import Domain, Node, check_bucket_count, check_seed
from thinrow.features.value import Value
from thinrow.kernels import kernel


@dataclass(frozen=True)
class Cross(Node):
    """int64: the hash of the tuple, or, with ``buckets``, the unsigned hash modulo ``buckets``."""

    inputs: tuple[Node, ...]
    buckets: int | None = None
    seed: int = 0
    op: ClassVar[str] = "cross"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        check_bucket_count("cross", "buckets", self.buckets)
        check_seed("cross", self.seed)
        if len(self.inputs) < 2:
            raise InputError(f"cross of {len(self.inputs)} columns; give two or more")
        domains = sorted({i.domain for i in self.inputs})
        if domains not in (["cand"], ["ctx"], ["history"], ["cand", "ctx"]):
            raise InputError(
                f"cross of {' and '.join(domains)} columns; an event is shared by many examples: "
                "use HistoryMatch to relate candidates to a history"
            )

    @property
    def operands(self) -> tuple[Node, ...]:
        return tuple(Hash(i) for i in self.inputs)

    @classmethod
    def build(cls, inputs: Sequence[Node], parameters: Mapping[str, Any]) -> Self:
        return cls(tuple(inputs), **parameters)

    @property
    def domain(self) -> Domain:
        return next((i.domain for i in self.inputs if i.domain != "ctx"), "ctx")

    def evaluate(self, operands: Sequence[Value]) -> Value:
        offsets = next((v.offsets for v in operands if v.offsets is not None), None)
        parts = [_spread(v, offsets) for v in operands]
        if len({len(p) for p in parts}) > 1:
            raise InputError(
                f"cross of columns of {', '.join(str(len(p)) for p in parts)} values; they must be as many"
            )
        elements = np.stack([np.asarray(p.numbers(), np.int64) for p in parts])
        hashed = kernel("hash_tuples")(elements, self.seed)
        if self.buckets is not None:
            hashed = kernel("mod_unsigned")(hashed, self.buckets)
        masks = [p.valid for p in parts if p.valid is not None]
        return Value(np.asarray(hashed), None, np.logical_and.reduce(masks) if masks else None, offsets)


def _spread(value: Value, offsets: npt.NDArray[np.int64] | None) -> Value:
    """``value`` with one element for each of the jagged rows of ``offsets``."""
    if offsets is None or value.offsets is offsets:
        return value
    rows = (len(value) if value.offsets is None else len(value.offsets) - 1), len(offsets) - 1
    if rows[0] != rows[1]:
        raise InputError(f"cross of a column of {rows[0]} rows with one of {rows[1]}; they must be as many")
    if value.offsets is None:
        return value.take(np.repeat(np.arange(rows[0]), np.diff(offsets)), offsets)
    if not np.array_equal(value.offsets, offsets):
        raise InputError("cross of jagged columns whose rows differ in length; truncate both alike, or neither")
    return value
