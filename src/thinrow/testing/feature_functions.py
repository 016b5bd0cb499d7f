"""Functions that tests of custom steps name: importable, as a user's are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.features import feature_function


@feature_function(version=1, dtype="float32")
def per_unit(price: npt.NDArray[Any], units: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Price of one unit."""
    each: npt.NDArray[Any] = price / np.maximum(units, 1)
    return each


@feature_function(version=2, dtype="int64")
def letters(texts: pa.Array) -> npt.NDArray[Any]:
    """Letters of each text."""
    counts: npt.NDArray[Any] = pc.utf8_length(texts).to_numpy(zero_copy_only=False)
    return counts


@feature_function(version=1, dtype="int64")
def too_few(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One result too few: what the plan must refuse."""
    return values[1:]


def undecorated(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Not a feature function."""
    return values


@feature_function(version=1, dtype="float64")
def doubled(x: Any) -> Any:
    """Changes its input."""
    x *= 2
    return x
