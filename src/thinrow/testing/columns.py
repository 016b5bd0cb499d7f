"""Random columns of every trait in the shapes that data has: constant, in runs, sparse, decimal, growing, with long
tails, anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.ragged import offsets_of
from thinrow.jagged import Column
from thinrow.schema import ColumnSpec, Trait
from thinrow.schema.event_schema import DType

#: How the values of a column go together.
STYLES = ("constant", "runs", "sparse", "decimal", "growing", "few", "tails", "any")
_INTEGERS: tuple[DType, ...] = ("int8", "int16", "int32", "int64")
#: Every trait with every dtype that it may have.
TRAITS: tuple[tuple[Trait, DType], ...] = (
    (Trait.TIMESTAMP, "int64"),
    (Trait.ID, "string"),
    (Trait.TEXT, "string"),
    (Trait.TEXT, "binary"),
    (Trait.ID_LIST, "string"),
    *((t, d) for t in (Trait.ID, Trait.BITMAP, Trait.ID_LIST) for d in _INTEGERS),
    *((t, d) for t in (Trait.NUMERIC, Trait.VECTOR) for d in (*_INTEGERS, "float32", "float64")),
)


def spec_of(number: int, trait: Trait, dtype: DType, nullable: bool) -> ColumnSpec:
    """Column ``c<number>``; vectors have 1 to 3 elements, by number."""
    size = 1 + number % 3 if trait is Trait.VECTOR else 0
    return ColumnSpec(number, f"c{number}", trait, dtype, "ab"[number % 2], nullable, size)


def styled_column(rng: np.random.Generator, n: int, spec: ColumnSpec, style: str) -> Column:
    """(n,) values of the column; where ``style`` is sparse most are null (or zero, where none may be)."""
    absent = {"sparse": 0.9, "constant": 0.0}.get(style, 0.2)
    valid = rng.random(n) >= absent if spec.nullable else np.ones(n, np.bool_)
    if spec.ragged:
        lengths = np.where(valid, rng.integers(0, 5 if style != "sparse" else 2, n), 0)
    else:
        lengths = np.full(n, max(spec.size, 1))
    values = _elements(rng, int(lengths.sum()), spec.dtype, style)
    offsets = offsets_of(lengths) if spec.ragged else None
    dictionary = None
    if spec.is_bytes:
        texts = [f"{'é' * (i % 3)}text {i}" if i else "" for i in range(int(values.max(initial=0)) + 1)]
        dictionary = pa.array(texts) if spec.dtype == "string" else pa.array([t.encode("utf-16") for t in texts])
    if spec.size:
        values = values.reshape(n, spec.size)
    if not spec.ragged:
        values = np.where(valid.reshape(-1, *(1,) * (values.ndim - 1)), values, values.dtype.type(0))
    return Column(values, valid if spec.nullable else None, dictionary, offsets)


def bits(column: Column) -> list[Any]:
    """The rows as Python values, floats by their bits, so that NaN equals itself and -0.0 does not equal 0.0."""
    values = column.values
    if values.dtype.kind == "f":
        values = np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}")
    rows: list[Any] = Column(values, column.valid, column.dictionary, column.offsets).to_arrow().to_pylist()
    return rows


def _elements(rng: np.random.Generator, n: int, dtype: str, style: str) -> npt.NDArray[Any]:
    textual = dtype in ("string", "binary")
    kind = np.dtype(np.int32 if textual else dtype)
    low, high = (0, 40) if textual else (-100, 100)
    if style == "constant":
        return np.full(n, rng.integers(low, high), kind)
    if style == "runs":
        return np.repeat(rng.integers(low, high, n), rng.integers(1, 60, n))[:n].astype(kind)
    if style == "sparse":
        return np.where(rng.random(n) < 0.9, 0, rng.integers(low, high, n)).astype(kind)
    if style == "growing":
        return (np.cumsum(rng.integers(0, 3, n)) % high).astype(kind)
    if style == "few" or textual:
        return rng.choice(rng.integers(low, high, 6), n).astype(kind)
    if style == "tails":
        return _tails(rng, n, kind)
    if kind.kind == "f":
        cents = rng.integers(-100_000, 100_000, n) / 10.0 ** rng.integers(0, 4)
        strange = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-310, 1e300])
        odd = rng.random(n) < 0.1
        with np.errstate(over="ignore"):
            return np.where(odd & (style == "any"), rng.choice(strange, n), cents).astype(kind)
    info = np.iinfo(kind)
    return rng.integers(info.min, info.max, n, dtype=kind, endpoint=True)


def _tails(rng: np.random.Generator, n: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Small numbers for the most part, few long ones: counts, cents, or ids that are frequent or met once."""
    few = np.minimum(rng.geometric(0.1, n), 99)
    if kind.kind == "f":
        return (np.where(rng.random(n) < 0.05, rng.integers(0, 1 << 20, n), few) / 100).astype(kind)
    if kind.itemsize < 8:
        return np.where(rng.random(n) < 0.05, rng.integers(0, np.iinfo(kind).max, n), few).astype(kind)
    ids = rng.integers(0, 1 << 40, 100)
    return np.where(rng.random(n) < 0.2, rng.integers(0, 1 << 40, n), ids[few]).astype(kind)
