"""A plan on tensors of any device: the steps that a batch of numbers can take after it was copied.

Worked example, on a device: three candidates of two requests::

    apply_tensors(FeaturePlan({"pair": Cross((Source("cand.item"), Source("ctx.store")), buckets=1000)}),
                  {"cand.item": tensor([5, 6, 5]), "ctx.store": tensor([1, 2])}, request=tensor([0, 0, 1]))

The bits are those of ``FeaturePlan.apply``. Text stays where it is read: a device has numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thinrow.core.errors import InputError
from thinrow.features.cross import Cross
from thinrow.features.fill import Fill
from thinrow.features.node import Elementwise, Node, Source
from thinrow.features.plan import FeaturePlan
from thinrow.features.time_delta import TimeDelta
from thinrow.kernels.dispatch import device_kernel

if TYPE_CHECKING:
    from torch import Tensor


def apply_tensors(
    plan: FeaturePlan,
    sources: Mapping[str, Tensor],
    valid: Mapping[str, Tensor] | None = None,
    request: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """The outputs of a plan of flat numbers.

    Args:
        sources: (n,) integers or floats by the name of the input, all on one device; 0 where null.
        valid: (n,) bool by name, False where null; of a column without one nothing is null.
        request: (C,) int64, the row of the context that each candidate belongs to; needed where one stands beside them.

    Returns:
        By name the values, 0 where null, (n,) or (n, width), and the mask, None where nothing is null.

    Raises:
        InputError: an input is missing, or the plan has a step that is made where a batch is read (of texts, of rows,
            of windows, or of one's own).
    """
    run = _Run(plan, sources, valid or {}, request)
    return {name: run.output(place) for name, place in zip(plan.outputs, plan.graph.outputs, strict=True)}


@dataclass(frozen=True, slots=True)
class _Made:
    """``values`` as the plan's steps make them: what stands under a null says nothing."""

    values: Tensor
    valid: Tensor | None
    dtype: np.dtype[np.generic]


class _Run:
    def __init__(
        self, plan: FeaturePlan, sources: Mapping[str, Tensor], valid: Mapping[str, Tensor], request: Tensor | None
    ) -> None:
        self._graph, self._sources, self._valid, self._request = plan.graph, sources, valid, request
        self._made: dict[int, _Made] = {}

    def output(self, place: int) -> tuple[Tensor, Tensor | None]:
        made = self.make(place)
        return self._numbers(made), made.valid

    def make(self, place: int) -> _Made:
        if place in self._made:
            return self._made[place]
        node = self._graph.nodes[place]
        if isinstance(node, Source):
            made = self._source(node)
        elif isinstance(node, Elementwise):
            self._run_fused(self._graph.base[place])
            return self._made[place]
        elif isinstance(node, Fill):
            made = self._fill(node, self._single(self._graph.operands[place][0], node))
        elif isinstance(node, TimeDelta) or (isinstance(node, Cross) and not node.product):
            made = self._combine(node, place)
        else:
            raise InputError(f"{node.op} on tensors; it is made where a batch is read: apply the plan there")
        self._made[place] = made
        return made

    def _source(self, node: Source) -> _Made:
        if node.name not in self._sources:
            have = ", ".join(sorted(self._sources))
            raise InputError(f"the plan reads {node.name!r}, which is not there; there are {have}")
        values = self._sources[node.name]
        try:
            dtype = np.dtype(str(values.dtype).removeprefix("torch."))
        except TypeError as e:
            raise InputError(f"{node.name!r} is {values.dtype}; columns have a dtype of NumPy's: convert it") from e
        return _Made(values, self._valid.get(node.name), dtype)

    def _single(self, place: int, node: Node) -> _Made:
        """What ``node`` reads at ``place``. Raises InputError where these are vectors."""
        below = self.make(place)
        if below.values.ndim == 2:
            raise InputError(f"{node.op} of vectors; it takes single values: make vectors last")
        return below

    def _run_fused(self, base: int) -> None:
        fusion = self._graph.fusions[base]
        below = self._single(base, fusion.first)
        walk = fusion.numbers(below.dtype)
        slots = [s for _, made, _, _ in walk.outputs for s in made]
        tensors = iter(device_kernel("run_chain")(below.values, walk.program, slots))
        for place, made, width, dtype in walk.outputs:
            parts = [next(tensors) for _ in made]
            self._made[place] = _Made(device_kernel("as_dtype")(parts, width, dtype), below.valid, dtype)

    def _fill(self, node: Fill, below: _Made) -> _Made:
        number, values = node.number(below.dtype).item(), below.values
        if node.nan and below.dtype.kind == "f":
            values = values.where(~values.isnan(), number)
        return _Made(values if below.valid is None else values.where(below.valid, number), None, below.dtype)

    def _combine(self, node: Cross | TimeDelta, place: int) -> _Made:
        operands = self._graph.operands[place]
        parts = [self._beside(self._single(i, node), self._graph.nodes[i], node) for i in operands]
        if isinstance(node, TimeDelta):
            for part in parts:
                node.check_times(part.dtype)
        masks = [p.valid for p in parts if p.valid is not None]
        valid = masks[0] if masks else None
        for mask in masks[1:]:
            valid = mask if valid is None else valid & mask
        columns = [self._numbers(p).long() for p in parts]
        if len({len(c) for c in columns}) > 1:
            raise InputError(f"{node.op} of columns of {', '.join(str(len(c)) for c in columns)} values; "
                             "they must be as many")  # fmt: skip
        if isinstance(node, TimeDelta):
            values = (columns[1] - columns[0]).div(node.ms, rounding_mode="floor")
        else:
            values = device_kernel("hash_tuples")(columns, node.seed, node.buckets)
        return _Made(values, valid, np.dtype(np.int64))

    def _beside(self, made: _Made, below: Node, node: Node) -> _Made:
        if below.domain == node.domain:
            return made
        if self._request is None:
            raise InputError(f"{node.op} of context and candidates; give request, the row of each candidate's request")
        valid = None if made.valid is None else made.valid[self._request]
        return _Made(made.values[self._request], valid, made.dtype)

    @staticmethod
    def _numbers(made: _Made) -> Tensor:
        if made.valid is None:
            return made.values
        return made.values.where(made.valid if made.values.ndim == 1 else made.valid[:, None], 0)
