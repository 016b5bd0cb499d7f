"""DeviceTable: ``DynamicTable`` as tensors of any device, in plain torch operations.

    table = DeviceTable(dim=2, device="cpu")             # or "cuda"
    table.rows(torch.tensor([7, -1, 7]), insert=True)    # [0, 1, 0]
    table.read(torch.tensor([1, -1]))                    # the vector of key -1, then zeros

Rows, vectors, updates and states are those of ``DynamicTable``: what either saves the other opens. On the CPU they are
the same bits, and ``DynamicTable`` is the faster; elsewhere the same to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinrow.core.errors import InputError
from thinrow.embeddings.budget import USAGE, Budget, Usage
from thinrow.embeddings.checks import (
    bounds_wrong,
    budget_to_keep,
    check_loaded,
    check_row_state,
    gradient_not_finite,
    gradient_outside,
    gradient_shape,
    row_outside,
)
from thinrow.embeddings.states import ROW_FILL, ROW_STATE
from thinrow.embeddings.table import DynamicTable
from thinrow.embeddings.tensor_index import TensorIndex
from thinrow.embeddings.tensor_rows import RowTensor
from thinrow.embeddings.traffic import LOOK_UP_BYTES, Traffic
from thinrow.embeddings.waiting import with_part
from thinrow.kernels.dispatch import device_kernel


class DeviceTable:
    """One embedding table on one device; it grows by doubling, which copies its rows.

    The host waits for the device where the data decide how much memory is needed, or whether there is an error: in
    ``rows`` with ``insert`` (how many keys are new), ``read`` with ``check``, ``pool`` (bounds), ``add_gradient`` (how
    many rows, whether finite, whether ``of`` is in range), a clipped step, and at evictions, whose scores are made on
    the host. Nowhere else.

    Attributes:
        device: where it is.
        dim, seed, init, init_scale, dtype, values, budget, step, moves, traffic: as those of ``DynamicTable``.
    """

    def __init__(
        self,
        dim: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        init: str = "uniform",
        init_scale: float = 0.05,
        dtype: npt.DTypeLike = np.float32,
        budget: Budget | None = None,
    ) -> None:
        """As ``DynamicTable``; functions of one's own (``init``, ``budget.evict``) run on the host.

        Raises:
            InputError: as ``DynamicTable``; or a budget in bytes or with admission by count, which need the host.
        """
        if budget is not None and (budget.max_rows is None or budget.min_count > 1):
            raise InputError(f"{budget}; on a device a budget has max_rows and min_count=1")
        #: Without rows: checks the parameters, and has them as they are saved.
        self._empty = DynamicTable(dim, seed=seed, init=init, init_scale=init_scale, dtype=dtype, budget=budget)
        self.dim, self.seed, self.dtype = dim, seed, self._empty.dtype
        self.init, self.init_scale = init, self._empty.init_scale
        self.device = torch.empty(0, device=device).device
        self._most = None if budget is None else budget.max_rows
        self._index = TensorIndex(self.device, self._most)
        self.values = self._rows_of(dim, self.dtype, self.init_scale if init == "constant" else None)
        self._row_state: dict[str, RowTensor] = {}
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self.budget, self.step, self.moves = budget, 0, 0
        self.traffic = Traffic()

    def __len__(self) -> int:
        return len(self._index)

    def _rows_of(self, width: int, dtype: npt.DTypeLike, fill: float | None) -> RowTensor:
        return RowTensor(width, dtype, self.device, fill, self._most)

    def keys(self) -> Tensor:
        """(n,) int64 copy: the key of each row."""
        return self._index.keys.clone()

    def rows(self, keys: Tensor, *, insert: bool) -> Tensor:
        """(n,) int64 row of each of ``keys`` (n,) int64, as ``DynamicTable.rows``.

        Raises:
            InputError: ``keys`` is not one-dimensional int64 on the table's device.
        """
        self._check_ints("keys", keys)
        self.traffic.look_up += len(keys) * LOOK_UP_BYTES
        if not insert:
            return self._index.rows(keys, insert=False)
        # What is made in inference mode could not be updated outside of it.
        with torch.inference_mode(False):
            before = len(self)
            rows = self._index.rows(keys, insert=True)
            if len(self) > before:
                self._start(before)
                for state in self._row_state.values():
                    state.grow(len(self))
                self.traffic.start += (len(self) - before) * self._stored_bytes
            if self.budget is not None:
                usage = self.row_state(USAGE, 2, dtype=np.int64)
                device_kernel("touch_rows")(usage.blocks, rows, self.step)
        return rows

    def _start(self, before: int) -> None:
        """Make the vectors of the rows from ``before`` on."""
        keys = self._index.keys[before:]
        if self.init in ("uniform", "normal"):
            self.values.grow(len(self))
            drawn = self.seed, self.init_scale, self.init == "normal"
            device_kernel("start_rows")(self.values.blocks, before, keys, *drawn)
        elif self.init == "constant":
            self.values.grow(len(self))
        else:
            host = DynamicTable(self.dim, seed=self.seed, init=self.init, dtype=self.dtype)
            try:
                host.rows(keys.cpu().numpy(), insert=True)
            except BaseException:
                self._index.drop(torch.arange(len(self), device=self.device) >= before)
                raise
            self.values.append(host.values.to_array())

    @property
    def _stored_bytes(self) -> int:
        """Bytes of a row's vector and states."""
        return sum(r.width * r.dtype.itemsize for r in (self.values, *self._row_state.values()))

    def make_room(self) -> int:
        """End a step, as ``DynamicTable.make_room``. Scores are made on the host, from a copy of keys and usage, when
        rows must go; with ``max_age`` in every step.

        Raises:
            InputError: gradients are kept for the next step; further as ``Budget.leaving``.
        """
        if self.budget is None or self._most is None:
            return 0
        if self._gradients:
            raise InputError("make_room before a step used its gradients; step the optimizer first")
        before, too_many = len(self), self.budget.too_many(len(self), self._most)
        usage = self.row_state(USAGE, 2, dtype=np.int64)
        gone = np.zeros(0, np.bool_)
        if before and (too_many or self.budget.max_age is not None):
            counts, last = usage.to_array().T
            gone = self.budget.leaving(Usage(self._index.keys.cpu().numpy(), counts, last, self.step), too_many)
        self.step += 1
        if not gone.any():
            return 0
        self.moves += 1
        source, target = self._index.drop(torch.from_numpy(gone).to(self.device))
        for rows in (self.values, *self._row_state.values()):
            rows.move(source, target, len(self))
        if too_many and self.budget.evict == "lfu":
            usage.rows[:, 0] -= usage.rows[:, 0] >> 1
        return before - len(self)

    def read(self, rows: Tensor, *, check: bool = True) -> Tensor:
        """(n, dim) vectors of ``rows`` (n,) int64 in the table's dtype; row -1 reads as zeros.

        ``check``: False where the table itself gave the rows, which saves waiting for the device.

        Raises:
            InputError: a row is not in [-1, len).
        """
        self._check_ints("rows", rows)
        if check and bool(((rows < -1) | (rows >= len(self))).any()):
            raise self._outside(rows)
        self.traffic.read += 2 * len(rows) * self.dim * self.dtype.itemsize
        vectors: Tensor = device_kernel("gather_rows")(self.values.blocks, rows)
        return vectors

    def pool(self, rows: Tensor, bounds: Tensor, *, check: bool = True) -> Tensor:
        """(b, dim): of every bag the sum of the vectors of its rows, as ``DynamicTable.pool``.

        ``check``: False where the table itself gave the rows, and checked the bounds.

        Raises:
            InputError: a row is not in [-1, len), or ``bounds`` (b + 1,) int64 do not ascend from 0 to n.
        """
        self._check_ints("rows", rows)
        if check:
            self.check_bounds(bounds, len(rows))
            if bool(((rows < -1) | (rows >= len(self))).any()):
                raise self._outside(rows)
        self.traffic.read += (len(rows) + len(bounds) - 1) * self.dim * self.dtype.itemsize
        pooled: Tensor = device_kernel("pool_rows")(self.values.blocks, rows, bounds)
        return pooled

    def check_bounds(self, bounds: Tensor, n: int) -> None:
        """Raises InputError where ``bounds`` of bags are not (b + 1,) int64 ascending from 0 to ``n``."""
        self._check_ints("bounds", bounds)
        ends = torch.cat([bounds.new_zeros(1), bounds, bounds.new_full((1,), n)])
        # No differences: those of forged bounds wrap.
        wrong = (ends[1:] < ends[:-1]).any() | (ends[1] != 0) | (ends[-2] != n)
        if not len(bounds) or bool(wrong):
            raise bounds_wrong(bounds[:3].cpu().numpy(), n)

    def row_state(self, name: str, width: int, *, fill: float = 0.0, dtype: npt.DTypeLike | None = None) -> RowTensor:
        """The optimizer state ``name``: (n, width) numbers that grow and are saved with the rows, as
        ``DynamicTable.row_state``.

        Raises:
            InputError: it is there with another width or dtype.
        """
        wanted = np.dtype(dtype) if dtype is not None else self.dtype
        state = self._row_state.get(name)
        if state is None:
            state = self._row_state[name] = self._rows_of(width, wanted, fill)
            state.grow(len(self))
        check_row_state(name, state, width, wanted)
        return state

    def add_gradient(self, rows: Tensor, gradient: Tensor, of: Tensor | None = None) -> None:
        """Keep ``gradient`` (n, dim) of ``rows`` (n,), summed by row in the order given, for the next step, as
        ``DynamicTable.add_gradient``.

        Raises:
            InputError: a row is not in [0, len), or with a budget -1; shape or dtype are not the table's; or a sum is
                NaN or infinite (names the key). Nothing is kept then.
        """
        self._check_ints("rows", rows)
        shape, dtype = tuple(gradient.shape), self.values.blocks.dtype
        if shape != (len(rows) if of is None else len(gradient), self.dim) or gradient.dtype != dtype:
            raise gradient_shape(gradient.dtype, shape, dtype, (len(rows), self.dim))
        if of is not None and (of.shape != rows.shape or bool(((of < 0) | (of >= len(gradient))).any())):
            raise InputError(f"of {tuple(of.shape)}; it must be {tuple(rows.shape)}, each in [0, {len(gradient)})")
        if len(rows):
            distinct, sums = self._summed(rows, gradient.detach(), of)
            if len(distinct):
                self._gradients = with_part(self._gradients, (distinct, sums), self._merged)

    def sum_gradient(self) -> tuple[Tensor, Tensor] | None:
        """What ``take_gradient`` would give, which stays. Raises as that."""
        if len(self._gradients) > 1:
            self._gradients = [self._merged(self._gradients)]
        return self._gradients[0] if self._gradients else None

    def take_gradient(self) -> tuple[Tensor, Tensor] | None:
        """Distinct rows (d,) ascending and their summed gradients (d, dim), kept no longer; None if there are none.

        Raises:
            InputError: a sum of several calls overflows (names the key); all stays as it was.
        """
        found = self.sum_gradient()
        self.clear_gradient()
        return found

    def clear_gradient(self) -> None:
        """Forget the gradients kept for the next step."""
        self._gradients.clear()

    def _merged(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        rows, gradients = (torch.cat(side) for side in zip(*parts, strict=True))
        return self._summed(rows, gradients)

    def _summed(self, rows: Tensor, gradient: Tensor, of: Tensor | None = None) -> tuple[Tensor, Tensor]:
        distinct, counts, order = device_kernel("group_rows")(rows)
        sums = device_kernel("sum_groups")(gradient, order if of is None else of[order], counts)
        self.traffic.sum += (len(rows) + len(distinct)) * self.dim * self.dtype.itemsize
        # Of row -1 nothing counts, so neither what it sums to.
        bad = ~sums.isfinite().all(1) & (distinct >= 0)
        first, last, some_bad = torch.stack([distinct[0], distinct[-1], bad.any().long()]).tolist()
        if first < (0 if self.budget is None else -1) or last >= len(self):
            raise gradient_outside(first if first < 0 else last, len(self))
        if some_bad:
            group = int(bad.nonzero()[0])
            column = int((~sums[group].isfinite()).nonzero()[0])
            raise gradient_not_finite(int(self._index.keys[distinct[group]]), float(sums[group, column]), column)
        nobody = int(first == -1)
        return distinct[nobody:], sums[nobody:]

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all that the table needs to go on, as ``DynamicTable.state``: either kind opens it."""
        state = self._empty.state() | {"keys": self._index.keys.cpu().numpy().copy(), "values": self.values.to_array()}
        if self.budget is not None:
            state["step"] = np.array(self.step)
        for name, rows in self._row_state.items():
            state |= {ROW_STATE + name: rows.to_array(), ROW_FILL + name: np.array(rows.fill, np.float64)}
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]], *, device: torch.device | str = "cpu") -> DeviceTable:
        """A table as it was when ``state`` was taken, of this kind or of ``DynamicTable``.

        Raises:
            InputError: ``state`` is not what ``state`` returns, or has a budget that a device cannot keep.
        """
        host = DynamicTable.from_state(state)
        table = cls(
            host.dim,
            device=device,
            seed=host.seed,
            init=host.init,
            init_scale=host.init_scale,
            dtype=host.dtype,
            budget=host.budget,
        )
        table.step = host.step
        table._index.fill(torch.from_numpy(host.keys()).to(table.device))
        table.values.append(host.values.to_array())
        for full in state:
            if full.startswith(ROW_STATE):
                name, rows = full.removeprefix(ROW_STATE), state[full]
                fill = float(state[ROW_FILL + name])
                table._row_state[name] = table._rows_of(rows.shape[1], rows.dtype, fill)
                table._row_state[name].append(rows)
        return table

    def load_state(self, state: Mapping[str, npt.NDArray[Any]], *, keep_budget: bool = False) -> None:
        """Become what the table was when ``state`` was taken, seed and optimizer state included. With ``keep_budget``
        the table's own budget stays (``Budget.put_in``).

        Raises:
            InputError: as ``from_state``, or ``state`` is of another dim or dtype, or there is no budget to keep;
                nothing is changed then.
        """
        if keep_budget:
            state = budget_to_keep(self.budget).put_in(state)
        loaded = DeviceTable.from_state(state, device=self.device)
        check_loaded(loaded, self)
        vars(self).update(vars(loaded) | {"traffic": self.traffic, "moves": self.moves + 1})

    def _outside(self, rows: Tensor) -> InputError:
        at = int(((rows < -1) | (rows >= len(self))).nonzero()[0])
        return row_outside(int(rows[at]), at, len(self))

    def _check_ints(self, what: str, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise InputError(f"{what}: {type(tensor).__name__}; it must be a tensor on {self.device}")
        if tensor.dtype != torch.int64 or tensor.ndim != 1 or tensor.device != self.device:
            raise InputError(
                f"{what}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; it must be one-dimensional int64 "
                f"on {self.device}"
            )
