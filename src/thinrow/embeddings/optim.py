"""Sparse optimizers: one pass over the rows that had a gradient reads it, updates their state and their vectors.

Rows without a gradient in a step are not touched (lazy semantics). One step of Adagrad, lr 0.1, on a row with the
vector [1, 2] and the gradient [2, 0]: the state becomes [4, 0], the vector [1 - 0.1 * 2 / 2, 2] = [0.9, 2].

The state of a row lives in its table, grows with it and is saved by ``DynamicTable.state``; the optimizer itself holds
only its parameters. ``lr`` may be set between steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.embeddings.blocks import RowBlocks
from thinrow.embeddings.shards import Shard, exchange_gradients, same_ranks
from thinrow.embeddings.table import DynamicTable
from thinrow.kernels import kernel
from thinrow.kernels.dispatch import device_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from thinrow.embeddings.device import DeviceTable
    from thinrow.embeddings.tensor_rows import RowTensor

    Table = DynamicTable | DeviceTable

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]


class HasTable(Protocol):
    """What looks keys up in a table, as ``Embedding`` does."""

    @property
    def table(self) -> Table: ...


class _SparseOptimizer(ABC):
    """Attributes:
    tables: the tables that it updates.
    shards: those of ``ShardedEmbedding``, whose gradients ranks exchange when they step: all ranks must.
    lr: learning rate of the next step.
    """

    #: The kernel that updates rows: of the vectors, what ``_states`` gives, rows, gradients and ``_parameters``.
    _kernel: ClassVar[str]

    def __init__(
        self, tables: tuple[Table | HasTable, ...], lr: float, weight_decay: float, clip_norm: float | None
    ) -> None:
        found = [pair for given in tables for pair in _tables_of(type(self).__name__, given)]
        if not found:
            raise InputError(
                f"{type(self).__name__} of no table; give one or more, or modules that look keys up in one"
            )
        self.tables = list({id(table): table for table, _ in found}.values())
        self.shards = list({id(shard): shard for _, shard in found if shard is not None}.values())
        if self.shards and len(self.shards) != len(self.tables):
            raise InputError("tables of ranks and others in one optimizer; make one for each kind")
        self._ranks = same_ranks(self.shards) if self.shards else None
        self.lr, self.weight_decay, self.clip_norm = lr, weight_decay, clip_norm
        _check_at_least_0("lr", lr)
        _check_at_least_0("weight_decay", weight_decay)
        if clip_norm is not None and not 0 < clip_norm < float("inf"):
            raise InputError(f"clip_norm={clip_norm}; it must be finite and above 0, or None for no clipping")

    def _make_states(self) -> None:
        """Make the row states before there are rows: a budget in bytes counts them from the first row on."""
        for table in self.tables:
            self._states(table)

    def step(self) -> None:
        """Update the rows whose gradients the tables keep, summed by row over all calls since the last step, and forget
        these gradients; then tables with a budget make room (``DynamicTable.make_room``).

        With ``clip_norm`` gradients are scaled first, where the norm of all of them together, of all tables on all
        ranks, is above it: by ``clip_norm / (norm + 1e-6)``, as ``torch.nn.utils.clip_grad_norm_``.

        Raises:
            InputError: ``lr`` is not finite and 0 or more, or gradients of one key overflow together, on any rank; no
                table of any is updated then, and their gradients stay. Or as ``DynamicTable.make_room``, after the
                update.
            RankLost: a rank is lost.
        """
        _check_at_least_0("lr", self.lr)
        if self.shards:
            exchange_gradients(self.shards)
        # What may fail comes before the first table changes.
        work = [(table, self._states(table), table.sum_gradient()) for table in self.tables]
        norm = None if self.clip_norm is None else self._norm([(table, found) for table, _, found in work])
        for table, states, found in work:
            if found is not None:
                rows, gradient = found
                table.take_gradient()
                if norm is not None and self.clip_norm is not None and norm > self.clip_norm:
                    gradient *= self.clip_norm / (norm + 1e-6)
                _update_rows(table, self._kernel, states, rows, gradient, *self._parameters())
                table.traffic.update += 3 * gradient.nbytes + 2 * len(rows) * _row_bytes(states)
        for table in self.tables:
            table.make_room()

    def _norm(self, taken: Sequence[tuple[Table, Any]]) -> float:
        """Of all gradients. In a fixed order, in float64: the same bits for any number of threads, and on all ranks."""
        # Whole tables have the same gradients on all ranks: they count once, as the first rank has them.
        copies = {id(shard.table) for shard in self.shards if shard.whole}
        squares = {True: 0.0, False: 0.0}
        for table, found in taken:
            if found is not None:
                squares[id(table) in copies] += _square(found[1])
        if self._ranks is None:
            return math.sqrt(squares[False])
        sums = self._ranks.gather("norm", np.array([squares[False], squares[True]]))
        return math.sqrt(sum(s[0] for s in sums) + sums[0][1])

    def zero_grad(self) -> None:
        """Forget the gradients that the tables keep."""
        for table in self.tables:
            table.clear_gradient()
        for shard in self.shards:
            shard.clear_gradient()

    def _states(self, table: Table) -> tuple[RowBlocks | RowTensor, ...]:
        """The states of the table's rows, made where they are not there."""
        return ()

    @abstractmethod
    def _parameters(self) -> tuple[float, ...]: ...


class SparseSGD(_SparseOptimizer):
    """Gradient descent: g += weight_decay * vector; vector -= lr * g. No state."""

    _kernel = "sgd_rows"

    def __init__(
        self,
        *tables: Table | HasTable,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        """Raises:
        InputError: a parameter is out of its range.
        """
        super().__init__(tables, lr, weight_decay, clip_norm)

    def _parameters(self) -> tuple[float, ...]:
        return self.lr, self.weight_decay


class SparseAdagrad(_SparseOptimizer):
    """Adagrad (Duchi, Hazan, Singer 2011), as ``torch.optim.Adagrad`` on the rows of a step.

    g += weight_decay * vector; s += g^2; vector -= lr * g / (sqrt(s) + eps), where s starts at ``initial_accumulator``.
    """

    _state, _kernel = "adagrad.sum", "adagrad_rows"

    def __init__(
        self,
        *tables: Table | HasTable,
        lr: float = 1e-2,
        eps: float = 1e-10,
        initial_accumulator: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        """Raises:
        InputError: ``lr``, ``initial_accumulator`` or ``weight_decay`` is not finite and 0 or more, or ``eps`` not
            above 0.
        """
        super().__init__(tables, lr, weight_decay, clip_norm)
        _check_eps(eps)
        _check_at_least_0("initial_accumulator", initial_accumulator)
        self.eps, self.initial_accumulator = eps, initial_accumulator
        self._make_states()

    def _states(self, table: Table) -> tuple[RowBlocks | RowTensor, ...]:
        return (table.row_state(self._state, self._width(table), fill=self.initial_accumulator),)

    def _parameters(self) -> tuple[float, ...]:
        return self.lr, self.eps, self.weight_decay

    def _width(self, table: Table) -> int:
        return table.dim


class SparseRowWiseAdagrad(SparseAdagrad):
    """Adagrad with one sum a row, that of the mean of g^2 over the row: a table of dim 64 needs a 64th of the state,
    and every element of a row has one rate (FBGEMM's exact row-wise Adagrad; parameters as ``SparseAdagrad``)."""

    _state, _kernel = "rowwise_adagrad.sum", "rowwise_adagrad_rows"

    def _width(self, table: Table) -> int:
        return 1


class SparseAdam(_SparseOptimizer):
    """Adam (Kingma, Ba 2015, algorithm 1), row by row: ``torch.optim.Adam`` on the steps that touch the row.

    The bias correction uses the number of steps that touched the row, not of all steps (``torch.optim.SparseAdam``):
    a key that first appears late takes the same first step as an early one. The moments do not decay in between.
    ``weight_decay`` adds to the gradient.
    """

    _kernel = "adam_rows"

    def __init__(
        self,
        *tables: Table | HasTable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        """Raises:
        InputError: ``lr`` or ``weight_decay`` is not finite and 0 or more, a beta not in [0, 1), or ``eps`` not
            above 0.
        """
        super().__init__(tables, lr, weight_decay, clip_norm)
        _check_eps(eps)
        if not all(0 <= beta < 1 for beta in betas):
            raise InputError(f"betas={betas}; both must be in [0, 1)")
        self.betas, self.eps = betas, eps
        self._make_states()

    def _states(self, table: Table) -> tuple[RowBlocks | RowTensor, ...]:
        moments = (table.row_state(name, table.dim) for name in ("adam.mean", "adam.square"))
        return *moments, table.row_state("adam.steps", 1, dtype=np.int64)

    def _parameters(self) -> tuple[float, ...]:
        return self.lr, *self.betas, self.eps, *self._decays()

    def _decays(self) -> tuple[float, float]:
        """What is added to the gradient and what the vector loses, times the vector."""
        return self.weight_decay, 0.0


class SparseAdamW(SparseAdam):
    """AdamW (Loshchilov, Hutter 2019, algorithm 2), row by row as ``SparseAdam``: ``weight_decay`` shrinks the vector
    by ``lr * weight_decay`` in each step that touches the row, and in no other."""

    def _decays(self) -> tuple[float, float]:
        return 0.0, self.weight_decay


def _tables_of(optimizer: str, given: object) -> list[tuple[Table, Shard | None]]:
    """The tables of what an optimizer is given, each with its shard where it is of ranks."""
    several = getattr(given, "embeddings", ())
    if not hasattr(given, "table") and isinstance(several, Iterable) and (found := list(several)):
        return [pair for one in found for pair in _tables_of(optimizer, one)]
    table = getattr(given, "table", given)
    if not (hasattr(table, "row_state") and hasattr(table, "sum_gradient")):
        raise InputError(
            f"{optimizer} of a {type(given).__name__}; give tables, or modules that look keys up in one, each as an "
            "argument of its own"
        )
    shard = given if isinstance(given, Shard) else getattr(given, "shard", None)
    if shard is None and getattr(table, "of_ranks", False):
        raise InputError(
            f"{optimizer} of a table that ranks share; give its ShardedEmbedding or Shard, where gradients wait"
        )
    return [(cast("Table", table), shard)]


def _update_rows(
    table: Table,
    name: str,
    states: tuple[RowBlocks | RowTensor, ...],
    rows: Ints | Tensor,
    gradient: Floats | Tensor,
    *parameters: float,
) -> None:
    """Run the update ``name`` where the table is."""
    update = kernel(name) if isinstance(table, DynamicTable) else device_kernel(name)
    update(table.values.blocks, *(state.blocks for state in states), rows, gradient, *parameters)


def _row_bytes(states: Iterable[RowBlocks | RowTensor]) -> int:
    return sum(state.width * state.dtype.itemsize for state in states)


def _square(gradient: Floats | Tensor) -> float:
    """The square of its norm, in float64."""
    if isinstance(gradient, np.ndarray):
        return float(np.einsum("ij,ij->", gradient, gradient, dtype=np.float64))
    return float(gradient.double().square().sum())


def _check_at_least_0(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise InputError(f"{name}={value}; it must be finite and 0 or more")


def _check_eps(eps: float) -> None:
    if not 0 < eps < float("inf"):
        raise InputError(f"eps={eps}; it must be finite and above 0: a gradient of zero would be 0 / 0")
