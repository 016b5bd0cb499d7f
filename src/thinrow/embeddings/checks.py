"""What tables say of input that they cannot take, wherever they are."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from thinrow.core.errors import InputError
from thinrow.embeddings.budget import Budget


class _Rows(Protocol):
    """Rows of one width and dtype."""

    width: int
    dtype: np.dtype[np.generic]


def row_outside(row: int, position: int, n_rows: int) -> InputError:
    return InputError(f"row {row} (position {position}); rows are in [-1, {n_rows}): look keys up first")


def bounds_wrong(first: object, n: int) -> InputError:
    return InputError(f"bounds of {n} rows: {first}...; they must ascend from 0 to {n}")


def gradient_outside(row: int, n_rows: int) -> InputError:
    return InputError(f"gradient of row {row}; rows are in [0, {n_rows}): look keys up first")


def gradient_shape(dtype: object, shape: tuple[int, ...], wanted: object, wanted_shape: tuple[int, ...]) -> InputError:
    return InputError(f"gradient is {dtype} {shape}; for these rows it must be {wanted} {wanted_shape}")


def gradient_not_finite(key: int, number: float, column: int) -> InputError:
    return InputError(
        f"the gradient of key {key} is {number} in column {column}; it must be finite: look for an overflow in the "
        "loss or lower the learning rate"
    )


def budget_to_keep(budget: Budget | None) -> Budget:
    """The budget of a table that shall keep it. Raises InputError where it has none."""
    if budget is None:
        raise InputError("keep_budget=True of a table without a budget; make it with one, or leave this out")
    return budget


class _Table(Protocol):
    dim: int
    dtype: np.dtype[np.generic]


def check_loaded(loaded: _Table, own: _Table) -> None:
    """Raises InputError where a state is of a table of another width or dtype than the one that is to take it."""
    if (loaded.dim, loaded.dtype) != (own.dim, own.dtype):
        raise InputError(
            f"the state is of a {loaded.dtype} table of dim {loaded.dim}, this table is {own.dtype} of dim {own.dim}; "
            f"use {type(own).__name__}.from_state"
        )


def check_row_state(name: str, state: _Rows, width: int, dtype: np.dtype[np.generic]) -> None:
    """Raises InputError where the state is of another width or dtype than is asked for."""
    if state.width != width or state.dtype != dtype:
        raise InputError(
            f"row state {name!r} is {state.dtype} of width {state.width}, asked for was {dtype} of width {width}; "
            "use another name"
        )
