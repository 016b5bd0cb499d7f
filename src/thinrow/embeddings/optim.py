"""Sparse optimizers: one pass over the rows that had a gradient reads it, updates their state and their vectors.

Rows without a gradient in a step are not touched (lazy semantics). One step of Adagrad, lr 0.1, on a row with the
vector [1, 2] and the gradient [2, 0]: the state becomes [4, 0], the vector [1 - 0.1 * 2 / 2, 2] = [0.9, 2].

The state of a row lives in its table, grows with it and is saved by ``DynamicTable.state``; the optimizer itself holds
only its parameters. ``lr`` may be set between steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.embeddings.table import DynamicTable
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]


class HasTable(Protocol):
    """What looks keys up in a table, as ``Embedding`` does."""

    @property
    def table(self) -> DynamicTable: ...


class _SparseOptimizer(ABC):
    def __init__(self, tables: tuple[DynamicTable | HasTable, ...], lr: float) -> None:
        found = [t if isinstance(t, DynamicTable) else t.table for t in tables]
        self.tables = list({id(table): table for table in found}.values())
        self.lr = lr
        _check_lr(lr)

    def step(self) -> None:
        """Update the rows whose gradients the tables keep, summed by row, and forget these gradients.

        Raises:
            InputError: ``lr`` is not finite and 0 or more, or gradients of one key overflow together.
        """
        _check_lr(self.lr)
        taken = [(table, table.take_gradient()) for table in self.tables]
        for table, gradient in taken:
            if gradient is not None:
                self._update(table, *gradient)

    def zero_grad(self) -> None:
        """Forget the gradients that the tables keep."""
        for table in self.tables:
            table.clear_gradient()

    @abstractmethod
    def _update(self, table: DynamicTable, rows: Ints, gradient: Floats) -> None: ...


class SparseAdagrad(_SparseOptimizer):
    """Adagrad (Duchi, Hazan, Singer 2011), as ``torch.optim.Adagrad`` on the rows of a step.

    s += g^2; vector -= lr * g / (sqrt(s) + eps), where s starts at ``initial_accumulator``.

    Attributes:
        tables: the tables that it updates.
        lr: learning rate of the next step.
    """

    def __init__(
        self, *tables: DynamicTable | HasTable, lr: float = 1e-2, eps: float = 1e-10, initial_accumulator: float = 0.0
    ) -> None:
        """Raises:
        InputError: ``lr`` or ``initial_accumulator`` is not finite and 0 or more, or ``eps`` not above 0.
        """
        super().__init__(tables, lr)
        _check_eps(eps)
        if not 0 <= initial_accumulator < float("inf"):
            raise InputError(f"initial_accumulator={initial_accumulator}; it must be finite and 0 or more")
        self.eps, self.initial_accumulator = eps, initial_accumulator

    def _update(self, table: DynamicTable, rows: Ints, gradient: Floats) -> None:
        sums = table.row_state("adagrad.sum", table.dim, fill=self.initial_accumulator)
        kernel("adagrad_rows")(table.values.blocks, sums.blocks, rows, gradient, self.lr, self.eps)


class SparseAdam(_SparseOptimizer):
    """Adam (Kingma, Ba 2015, algorithm 1), row by row: ``torch.optim.Adam`` on the steps that touch the row.

    The bias correction uses the number of steps that touched the row, not of all steps (``torch.optim.SparseAdam``):
    a key that first appears late takes the same first step as an early one. The moments do not decay in between.

    Attributes:
        tables: the tables that it updates.
        lr: learning rate of the next step.
    """

    def __init__(
        self,
        *tables: DynamicTable | HasTable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """Raises:
        InputError: ``lr`` is not finite and 0 or more, a beta not in [0, 1), or ``eps`` not above 0.
        """
        super().__init__(tables, lr)
        _check_eps(eps)
        if not all(0 <= beta < 1 for beta in betas):
            raise InputError(f"betas={betas}; both must be in [0, 1)")
        self.betas, self.eps = betas, eps

    def _update(self, table: DynamicTable, rows: Ints, gradient: Floats) -> None:
        means = table.row_state("adam.mean", table.dim)
        squares = table.row_state("adam.square", table.dim)
        steps = table.row_state("adam.steps", 1, dtype=np.int64)
        kernel("adam_rows")(
            table.values.blocks,
            means.blocks,
            squares.blocks,
            steps.blocks,
            rows,
            gradient,
            self.lr,
            *self.betas,
            self.eps,
        )


def _check_lr(lr: float) -> None:
    if not 0 <= lr < float("inf"):
        raise InputError(f"lr={lr}; it must be finite and 0 or more")


def _check_eps(eps: float) -> None:
    if not 0 < eps < float("inf"):
        raise InputError(f"eps={eps}; it must be finite and above 0: a gradient of zero would be 0 / 0")
