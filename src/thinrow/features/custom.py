"""Custom: a function of one's own as a step of a plan.

In a module that trainers, workers and rankers can all import::

    @feature_function(version=1, dtype="float32")
    def per_unit(price, units):
        return price / np.maximum(units, 1)

    Custom((Source("cand.price"), Source("cand.units")), per_unit)

The plan names the function as ``module:name`` with its version, so that a plan that was trained with version 1 is
refused where version 2 is installed. The function must be pure and elementwise: element i of the result from element i
of each input and nothing else; a function of one column runs once per distinct entry of a dictionary. To run a plan is
to trust the modules that it names, as with a pickle: they are imported then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.core.named import imported
from thinrow.features.node import RELATE, Domain, Node, as_integer, joint_domain
from thinrow.features.value import Value, aligned, united_mask

_DTYPES = ("int8", "int16", "int32", "int64", "float32", "float64")


@dataclass(frozen=True)
class FeatureFunction:
    """A function that plans can name.

    Attributes:
        function: of (n,) arrays that it cannot change, one an input, 0 where null: numbers, or an Arrow array of
            strings or bytes; gives (n,) numbers.
        version: raised when results change.
        dtype: of the results, which it must hold; floats are rounded to it.
    """

    function: Callable[..., npt.NDArray[Any]]
    version: int
    dtype: str

    @property
    def name(self) -> str:
        """``module:name``."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    def __call__(self, *arrays: Any) -> npt.NDArray[Any]:
        return self.function(*arrays)


def feature_function(*, version: int, dtype: str) -> Callable[[Callable[..., npt.NDArray[Any]]], FeatureFunction]:
    """Make a function one that plans can name.

    Raises:
        InputError: it is no function of a module's top level, or the dtype is none of numbers.
    """
    if dtype not in _DTYPES:
        raise InputError(f"feature_function: dtype={dtype!r}; it must be one of {', '.join(_DTYPES)}")

    def decorate(function: Callable[..., npt.NDArray[Any]]) -> FeatureFunction:
        if "<" in function.__qualname__ or "." in function.__qualname__:
            raise InputError(
                f"feature_function: {function.__qualname__} cannot be imported; define it at a module's top"
            )
        return FeatureFunction(function, version, dtype)

    return decorate


@dataclass(frozen=True)
class Custom(Node):
    """What the function gives, null where an input is null.

    Attributes:
        inputs: one column or more of one domain, aligned; context columns stand beside every candidate.
        function: a ``feature_function``, or its ``module:name``.
        version: that of the function.
    """

    inputs: tuple[Node, ...]
    function: str
    version: int = -1
    op: ClassVar[str] = "custom"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        if isinstance(self.function, FeatureFunction):
            object.__setattr__(self, "version", self.function.version)
            object.__setattr__(self, "function", self.function.name)
        object.__setattr__(self, "version", as_integer("custom", "version", self.version))
        if not isinstance(self.function, str) or self.function.count(":") != 1 or self.version < 0:
            raise InputError(f"custom: function={self.function!r} is no feature_function; decorate it with one")
        joint_domain("custom", self.inputs, RELATE)

    @property
    def operands(self) -> tuple[Node, ...]:
        return self.inputs

    @classmethod
    def build(cls, inputs: Sequence[Node], parameters: Mapping[str, Any]) -> Self:
        return cls(tuple(inputs), **parameters)

    @property
    def domain(self) -> Domain:
        return joint_domain("custom", self.inputs, RELATE)

    def evaluate(self, operands: Sequence[Value]) -> Value:
        function = self._resolve()
        if len(operands) == 1:
            (value,) = operands
            # What stands under a null says nothing; entries of a dictionary are all of some row.
            valid = value.valid if value.codes is None else None
            return replace(value, entries=self._call(function, [value.entries], len(value.entries), valid))
        parts, offsets = aligned(operands, "custom")
        rows = [p.numbers() if isinstance(p.entries, np.ndarray) else p.entries.take(pa.array(p.codes)) for p in parts]
        valid = united_mask(parts)
        return Value(self._call(function, rows, len(parts[0]), valid), None, valid, offsets)

    def _call(
        self, function: FeatureFunction, arrays: list[Any], n: int, valid: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[Any]:
        result = np.asarray(function(*map(_read_only, arrays)))
        if result.shape != (n,) or result.dtype.kind not in "biuf":
            raise InputError(
                f"custom: {self.function} gave {result.dtype} of shape {result.shape}; it must give {n} numbers"
            )
        with np.errstate(all="ignore"):
            made = result.astype(function.dtype, copy=not result.flags.writeable)
            # Floats are rounded to the dtype, no more.
            same = np.isfinite(made) == np.isfinite(result) if made.dtype.kind == "f" else made == result
        wrong = np.flatnonzero(~same if valid is None else ~same & valid)
        if len(wrong):
            raise InputError(
                f"custom: {self.function} gave {result[wrong[0]]}, which is no {function.dtype}; name the dtype of its "
                "results, or round them there"
            )
        return made

    def _resolve(self) -> FeatureFunction:
        found = imported(self.function, f"custom: {self.function}")
        if not isinstance(found, FeatureFunction):
            raise InputError(f"custom: {self.function} is no feature_function; decorate it with one")
        if found.version != self.version:
            raise InputError(
                f"custom: {self.function} is of version {found.version}, the plan of version {self.version}; "
                "install the module that it was made with, or make the plan again"
            )
        return found


def _read_only(array: Any) -> Any:
    """The same numbers, which other steps read too."""
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view
