"""Tensors of a batch's ragged data, sharing its memory: each user's events once, and a slice for each example.

Worked example. Two requests on one user's three events, of which they see the first two and all three::

    events       item [11, 12, 13]         embedded once each: x (3, d)
    lengths      [2, 3]
    mean(x)      [(x0 + x1) / 2, (x0 + x1 + x2) / 3]
    padded(x, 2) [[x0, x1], [x1, x2]]      the newest two

Shape letters: E events, S events of all passes, X examples, d width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError, MissingExtraError
from thinrow.core.ragged import inverse_of

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise MissingExtraError("torch", "train") from error

from thinrow.jagged.column import Column
from thinrow.jagged.jagged import Jagged
from thinrow.jagged.passes import Passes, copies_of, plan_passes
from thinrow.jagged.shared import SharedHistories


def tensor(values: npt.NDArray[Any]) -> Tensor:
    """The same numbers as a tensor that shares their memory; read-only arrays are copied."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


class Columns(Mapping[str, Tensor]):
    """Columns by name as tensors, made when asked for; a null reads as 0.

    A vector column is (n, size). Of lists ``lists`` gives elements and offsets, of a column that was read as codes
    ``codes`` gives these.

    Raises:
        InputError: on asking for a column of text, whose codes mean nothing outside their batch, or of lists.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Tensor:
        column = self._numbers(name)
        if column.offsets is not None:
            raise InputError(f"column {name!r} holds lists; take elements and offsets: columns.lists({name!r})")
        return tensor(column.values)

    def lists(self, name: str) -> JaggedTensor:
        """A column of lists: a row for each value of the others. Raises InputError where it holds no lists."""
        column = self._numbers(name)
        if column.offsets is None:
            raise InputError(f"column {name!r} holds {column.shape_name}; take columns[{name!r}]")
        return JaggedTensor(tensor(column.values), tensor(column.offsets))

    def codes(self, name: str) -> tuple[Tensor, Tensor]:
        """(n,) int32 codes of a column of integers, and the (k,) values that they stand for: what is made of each value
        once, ``f(values)``, is of the rows ``f(values)[codes]``. The code of a null says nothing.

        Raises:
            InputError: the column was not read as codes.
        """
        column = self._column(name)
        if column.dictionary is None or column.is_text:
            raise InputError(f"column {name!r} has no codes of integers; read it with Projection(codes=({name!r},))")
        return tensor(column.values), tensor(column.dictionary.to_numpy())

    def _column(self, name: str) -> Column:
        if name not in self._columns:
            raise KeyError(f"no column {name!r}; there are {', '.join(self._columns)}")
        return self._columns[name]

    def _numbers(self, name: str) -> Column:
        column = self._column(name)
        if column.is_text:
            raise InputError(f"column {name!r} is text; hash it in the loader's plan: Hash(Source('history.{name}'))")
        return column.decoded()

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


@dataclass(frozen=True, slots=True)
class JaggedTensor:
    """Rows of different lengths: ``values`` (n, ...) and ``offsets`` (rows + 1,) int64."""

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, jagged: Jagged, name: str = "values") -> JaggedTensor:
        """The same rows, sharing memory. Raises InputError for text."""
        return cls(Columns({name: jagged.column})[name], tensor(jagged.offsets))

    @property
    def lengths(self) -> Tensor:
        """(rows,) int64."""
        return self.offsets.diff()

    @property
    def row_of(self) -> Tensor:
        """(n,) int64, the row of each value."""
        return torch.repeat_interleave(self.lengths)


class TorchHistories:
    """``SharedHistories`` for a model: events once, and what each example sees of them.

    Events that no example sees (late ones, corrected ones) are left out: an optimizer would take their rows for
    touched.

    Attributes:
        columns: name -> (E,) tensor, of the unique events that some example sees.
        numpy_columns: the same as NumPy columns.
        event_ts: (E,) int64 ms.
        passes: which examples share a row of events, as positions in these; see ``thinrow.jagged.passes``.
    """

    def __init__(self, histories: SharedHistories, *, share: bool = True, static: int = 0) -> None:
        events, passes = histories.events, plan_passes(histories, share=share, static=static)
        columns, event_ts, same = events.columns, events.event_ts, copies_of(events)
        seen = np.zeros(len(events), np.bool_)
        seen[passes.index] = True
        if not seen.all():
            kept = np.flatnonzero(seen)
            columns, event_ts = {n: c.take(kept) for n, c in columns.items()}, event_ts[kept]
            same = None if same is None else same[kept]
            passes = replace(passes, index=(np.cumsum(seen) - 1)[passes.index])
        self.numpy_columns: Mapping[str, Column] = columns
        self.columns = Columns(columns)
        self.event_ts = tensor(event_ts)
        self.passes: Passes = passes if same is None else replace(passes, same=same)

    def __len__(self) -> int:
        return len(self.passes.visible)

    @property
    def lengths(self) -> Tensor:
        """(X,) int64, events that each example sees."""
        return tensor(self.passes.visible)

    def padded(self, values: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """A copy for each example, as dense models ask for: its newest ``width`` of ``values`` (E, ...), left-aligned,
        zeros after them, (X, width, ...); and the (X, width) bool mask of those that are there."""
        self._check(values)
        passes = self.passes
        stop = passes.offsets[passes.pass_of] + passes.visible
        start = np.maximum(passes.offsets[passes.pass_of], stop - width)
        at = start[:, None] + np.arange(width)
        there = at < stop[:, None]
        index = np.append(passes.index, 0)[np.where(there, at, len(passes.index))]
        mask = tensor(there)
        picked = values[tensor(index)] if len(values) else values.new_zeros((*index.shape, *values.shape[1:]))
        return torch.where(mask.reshape(*mask.shape, *(1,) * (values.dim() - 1)), picked, 0), mask

    def sum(self, values: Tensor) -> Tensor:
        """(X, d) sum of ``values`` (E, d) over the events that each example sees.

        An event is added once a pass: what lies between the ends of two requests is summed, and those sums are added up
        along the requests. So the cost does not grow with the number of requests of a user.
        """
        self._check(values)
        passes = self.passes
        order = passes.order()
        ordered_pass, ends = passes.pass_of[order], passes.offsets[passes.pass_of[order]] + passes.visible[order]
        # The first request of a pass, in order of length, that sees the event.
        first_to_see = np.searchsorted(ends, np.arange(len(passes.index)), side="right")
        between = values.new_zeros((len(order), values.shape[1]))
        between = between.index_add(0, tensor(first_to_see), values[tensor(passes.index)])
        first = np.searchsorted(ordered_pass, ordered_pass)
        total, position = between, np.arange(len(order)) - first
        # Running sums within a pass by doubling. Others are left out, not multiplied by 0: that would spread their NaN.
        step = 1
        while step <= position.max(initial=0):
            earlier = torch.cat([total.new_zeros(step, total.shape[1]), total[:-step]])
            total = total + torch.where(tensor(position >= step)[:, None], earlier, 0)
            step *= 2
        return total[tensor(inverse_of(order))]

    def _check(self, values: Tensor) -> None:
        if len(values) != len(self.event_ts):
            raise InputError(f"{len(values)} values for {len(self.event_ts)} events; give one for each unique event")

    def mean(self, values: Tensor) -> Tensor:
        """(X, d) mean of ``values`` (E, d) over the events that each example sees; zeros where it sees none."""
        return self.sum(values) / self.lengths.clamp(min=1).to(values.dtype)[:, None]
