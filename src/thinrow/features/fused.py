"""The elementwise ops of one column in one pass.

Of ``Hash(x)``, ``Hash(x, buckets=10)`` and ``Bucketize(Log1p(x), ...)`` the column x is read once and three arrays are
written once; the hash that two share is computed once, and ``Log1p(x)``, which nobody asked for, is written nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.features.node import Elementwise
from thinrow.features.value import Entries
from thinrow.kernels import kernel
from thinrow.kernels.chain import Chain, Program


@dataclass(frozen=True, slots=True)
class Step:
    """An elementwise op in a plan: its place there, and that of its input."""

    place: int
    input: int
    op: Elementwise


@dataclass(frozen=True, slots=True)
class Pass:
    """What is done in one pass over numbers of one dtype.

    Attributes:
        program: the chain.
        outputs: of each wanted step its place, the slots of its elements, its width (0 of numbers) and its dtype.
    """

    program: Program
    outputs: tuple[tuple[int, tuple[int, ...], int, np.dtype[Any]], ...]

    @classmethod
    def of(cls, base: int, dtype: np.dtype[Any], steps: Sequence[Step], wanted: frozenset[int]) -> Pass:
        """Of all ``steps`` on the column at place ``base``, operands before those who read them."""
        chain, outputs = Chain(), []
        slots = {base: (0, dtype)}
        for step in steps:
            if step.input not in slots:
                raise InputError(f"{step.op.op} of vectors; it takes single values: make vectors last")
            source, source_dtype = slots[step.input]
            formula = step.op.formula(source_dtype)
            made = tuple(chain.add_all(source, branch) for branch in formula.branches)
            if not step.op.width:
                slots[step.place] = made[0], formula.dtype
            if step.place in wanted:
                outputs.append((step.place, made, step.op.width, formula.dtype))
        return cls(chain.program(), tuple(outputs))

    def run(self, values: npt.NDArray[Any]) -> dict[int, npt.NDArray[Any]]:
        """Place -> (n,) or (n, width) results for (n,) numbers."""
        results: dict[int, npt.NDArray[Any]] = {}
        slots: list[int] = []
        outs: list[npt.NDArray[Any]] = []
        for place, made, width, dtype in self.outputs:
            result = np.empty((len(values), width) if width else len(values), dtype)
            results[place] = result
            slots += made
            outs += [result[:, i] for i in range(width)] if width else [result]
        kernel("run_chain")(values, self.program, slots, outs)
        return results


class Fusion:
    """All elementwise ops of a plan that stand on one step, the base, which is none; its passes are made once."""

    def __init__(self, base: int, steps: Sequence[Step], wanted: frozenset[int]) -> None:
        self._base, self._steps, self._wanted = base, tuple(steps), wanted
        self._passes: dict[tuple[int, np.dtype[Any]], Pass] = {}

    @property
    def first(self) -> Elementwise:
        """The op that reads the base first."""
        return self._steps[0].op

    def run(self, entries: Entries) -> Mapping[int, Entries]:
        """Place -> results, of all that is wanted.

        Raises:
            InputError: an op does not take what its input is.
        """
        if isinstance(entries, pa.Array):
            return self._run_texts(entries)
        return self.numbers(entries.dtype).run(entries)

    def numbers(self, dtype: np.dtype[Any]) -> Pass:
        """What is done with numbers of ``dtype``. Raises as ``run``."""
        return self._pass(self._base, dtype, self._steps)

    def _pass(self, base: int, dtype: np.dtype[Any], steps: Sequence[Step]) -> Pass:
        key = base, dtype
        if key not in self._passes:
            self._passes[key] = Pass.of(base, dtype, steps, self._wanted)
        return self._passes[key]

    def _run_texts(self, entries: pa.Array) -> dict[int, Entries]:
        """Texts one op at a time; what follows each in one pass."""
        results: dict[int, Entries] = {}
        for first in (s for s in self._steps if s.input == self._base):
            made = first.op.texts(entries)
            if first.place in self._wanted:
                results[first.place] = made
            above, follow = {first.place}, []
            for step in self._steps:
                if step.input in above:
                    above.add(step.place)
                    follow.append(step)
            if follow:
                if first.op.width:
                    raise InputError(f"{follow[0].op.op} of vectors; it takes single values: make vectors last")
                results |= self._pass(first.place, made.dtype, follow).run(made)
        return results
