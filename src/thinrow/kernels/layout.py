"""AttentionLayout: jagged rows of queries and keys where a query sees a few ranges of its row's keys.

Worked example: one row of one context token (key 0), three events (keys 1 to 3) and a target (key 4). With a window of
one event before its own, the last event and the target see::

              starts   stops          keys
    event 3   0 2 4    1 4 4          0 | 2 3 |
    target    0 3 4    1 4 5          0 | 3 | 4

Such layouts are written by ``kernels.sequence``; ``kernels.prefix.PrefixLayout`` is the one with a single range that
begins at the row's first key. A layout is built once for a batch; every layer of a model uses it and the plan of the
kernel that hangs on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.kernels.cut import Plan, plan_of

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """P rows; row p has queries ``[q_offsets[p], q_offsets[p + 1])`` and keys ``[k_offsets[p], k_offsets[p + 1])``.

    The arrays are copied and read-only.

    Attributes:
        q_offsets: (P + 1,) int64, ascending from 0 to T, the number of queries.
        k_offsets: (P + 1,) int64, ascending from 0 to S, the number of keys.
        starts: (T, R) int64, where each of the R ranges of a query begins (inclusive), from the row's first key on.
        stops: (T, R) int64, where it ends (exclusive). The ranges of a query ascend and do not overlap:
            ``0 <= starts[i, 0] <= stops[i, 0] <= starts[i, 1] <= ... <= keys of the row``; equal bounds are no keys.
            Any order of queries within a row is right; the kernel is fastest where neighbours see nearly the same.

    Raises:
        InputError: an array of another shape or not of integers, offsets that do not ascend from 0 or differ in length,
            or ranges that are out of order or out of their row.
    """

    q_offsets: Ints
    k_offsets: Ints
    starts: Ints
    stops: Ints

    def __post_init__(self) -> None:
        for name, ndim in (("q_offsets", 1), ("k_offsets", 1), ("starts", 2), ("stops", 2)):
            object.__setattr__(self, name, owned(name, getattr(self, name), ndim))
        for name in ("q_offsets", "k_offsets"):
            check_offsets(name, getattr(self, name))
        if len(self.q_offsets) != len(self.k_offsets):
            raise InputError(
                f"q_offsets are of {len(self.q_offsets) - 1} rows and k_offsets of {len(self.k_offsets) - 1}; "
                "give an empty range to a row without queries or keys"
            )
        if not len(self.starts) == len(self.stops) == self.n_queries or self.starts.shape[1] != self.stops.shape[1]:
            raise InputError(
                f"q_offsets end at {self.n_queries} but starts has shape {self.starts.shape} and stops "
                f"{self.stops.shape}; pass one line a query and as many ranges in both"
            )
        if not self.starts.shape[1]:
            raise InputError("starts has no range a query; pass one at least, empty where nothing is seen")
        self._check_ranges()

    def _check_ranges(self) -> None:
        n_keys = np.repeat(np.diff(self.k_offsets), np.diff(self.q_offsets))
        bounds = self.bounds
        wrong = (bounds[:, 0] < 0) | (bounds[:, -1] > n_keys) | (np.diff(bounds, axis=1) < 0).any(axis=1)
        if wrong.any():
            i = int(np.argmax(wrong))
            ranges = [tuple(r) for r in np.stack([self.starts[i], self.stops[i]], axis=1).tolist()]
            raise InputError(
                f"query {i} sees the ranges {ranges} of a row that has {n_keys[i]} keys; they must ascend without "
                f"overlap within [0, {n_keys[i]}]"
            )

    @property
    def n_queries(self) -> int:
        """T."""
        return int(self.q_offsets[-1])

    @property
    def n_keys(self) -> int:
        """S."""
        return int(self.k_offsets[-1])

    @property
    def n_pairs(self) -> int:
        """How many (query, key) pairs there are in which the query sees the key."""
        return int((self.stops - self.starts).sum())

    @property
    def n_seen(self) -> Ints:
        """(T,) int64, how many keys each query sees: what a model divides by."""
        seen: Ints = (self.stops - self.starts).sum(axis=1)
        return seen

    @cached_property
    def bounds(self) -> Ints:
        """(T, 2 R) int64: the start and stop of the first range, of the second, and so on."""
        return np.stack([self.starts, self.stops], axis=2).reshape(len(self.starts), 2 * self.starts.shape[1])

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What backends on devices derive from the layout, by a name of theirs."""
        return {}

    @cached_property
    def plan(self) -> Plan:
        """How the compiled kernel cuts the work; built on first use and kept."""
        return plan_of(self.q_offsets, self.k_offsets, self.starts, self.stops)


def owned(name: str, values: npt.ArrayLike, ndim: int = 1) -> Ints:
    """A read-only int64 copy.

    Raises:
        InputError: not of integers, or another number of dimensions.
    """
    array = np.asarray(values)
    if array.ndim != ndim or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise InputError(
            f"{name} is {array.ndim}-dimensional of {array.dtype}; pass a {('one', 'two')[ndim - 1]}-dimensional int64 "
            "array"
        )
    array = array.astype(np.int64)
    array.flags.writeable = False
    return array


def check_offsets(name: str, offsets: Ints) -> None:
    """Hold offsets against their rule.

    Raises:
        InputError: they do not begin with 0, or descend.
    """
    if not len(offsets) or offsets[0] != 0:
        raise InputError(f"{name} begins with {offsets[:1].tolist()}; offsets begin with 0, one more than rows")
    wrong = np.flatnonzero(np.diff(offsets) < 0)
    if len(wrong):
        i = int(wrong[0])
        raise InputError(f"{name} falls from {offsets[i]} to {offsets[i + 1]} at row {i}; offsets must not descend")


def check_inputs(layout: AttentionLayout, q_THD: Any, k_SHD: Any, v_SHE: Any) -> None:
    """Hold three tensors against each other and the layout.

    Raises:
        InputError: sizes that differ, a data type that is not floating point, or several data types or devices.
    """
    for name, tensor, rows in (
        ("q", q_THD, layout.n_queries),
        ("k", k_SHD, layout.n_keys),
        ("v", v_SHE, layout.n_keys),
    ):
        if tensor.ndim != 3:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; pass (tokens, heads, width)")
        if tensor.shape[0] != rows:
            raise InputError(
                f"{name} has {tensor.shape[0]} tokens, but the offsets of the layout end at {rows}; pass the same"
            )
        if tensor.shape[1] != q_THD.shape[1]:
            raise InputError(f"{name} has {tensor.shape[1]} heads and q has {q_THD.shape[1]}; pass as many")
        if tensor.dtype != q_THD.dtype or not tensor.dtype.is_floating_point:
            raise InputError(f"{name} is {tensor.dtype} and q is {q_THD.dtype}; pass one floating-point type")
        if tensor.device != q_THD.device:
            raise InputError(f"{name} is on {tensor.device} and q on {q_THD.device}; move them to one device")
    if q_THD.shape[2] != k_SHD.shape[2]:
        raise InputError(f"q has width {q_THD.shape[2]} and k has width {k_SHD.shape[2]}; pass the same")
