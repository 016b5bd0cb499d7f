"""Node: one step of a feature plan, as data. A plan is a graph of frozen dataclasses; equal ones are computed once.

``Hash(Source("history.product_id"), buckets=1000)`` is data until ``FeaturePlan.apply`` runs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.features.value import Value
from thinrow.kernels.chain import Step

#: What a value stands beside: an event (shared by the examples of its user), a candidate, or an example.
Domain = Literal["history", "cand", "ctx"]
DOMAINS: tuple[Domain, ...] = ("history", "cand", "ctx")
#: What to do where an op cannot stand beside an event and a candidate at once.
RELATE = "use HistoryMatch to relate candidates to a history"
#: Inputs that every example has: the times of its events, and its own.
EVENT_TS, REQUEST_TS = "history.event_ts", "ctx.request_ts"


class Node(ABC):
    """A step of a plan. Subclasses are frozen dataclasses: the operands (``operand_fields``), then parameters."""

    op: ClassVar[str]
    operand_fields: ClassVar[tuple[str, ...]] = ("input", "inputs")
    #: Fields that came later, with what their absence means: left out of what is written where they say no more, so
    #: that plans written before stay what they are.
    later_fields: ClassVar[Mapping[str, Any]] = {}

    @property
    @abstractmethod
    def operands(self) -> tuple[Node, ...]:
        """The steps that this one reads."""

    @property
    def domain(self) -> Domain:
        """What the step's value stands beside."""
        return self.operands[0].domain

    @abstractmethod
    def evaluate(self, operands: Sequence[Value]) -> Value:
        """The step's value from those of its operands."""

    def parameters(self) -> dict[str, Any]:
        """The fields other than the operands, JSON-ready."""
        assert dataclasses.is_dataclass(self)
        fields = [f.name for f in dataclasses.fields(self) if f.name not in self.operand_fields]
        values = {name: getattr(self, name) for name in fields}
        said = {n: v for n, v in values.items() if n not in self.later_fields or v != self.later_fields[n]}
        return {name: int(v) if isinstance(v, np.integer) else v for name, v in said.items()}

    @classmethod
    def build(cls, inputs: Sequence[Node], parameters: Mapping[str, Any]) -> Self:
        """The step of these inputs, as a written plan has them. Raises TypeError where it takes others."""
        return cls(*inputs, **parameters)

    def digest(self) -> str:
        """16 hex digits of the step's configuration, operands included."""
        return _digest(self)


@lru_cache(maxsize=4096)
def _digest(node: Node) -> str:
    strange = [below for below in node.operands if not isinstance(below, Node)]
    if strange:
        raise InputError(f"{node.op} of {strange[0]!r}; give a Source or an op")
    text = json.dumps([node.op, node.parameters(), [_digest(i) for i in node.operands]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Source(Node):
    """A column that the plan is given: ``history.NAME``, ``cand.NAME`` or ``ctx.NAME``."""

    name: str
    op: ClassVar[str] = "source"

    def __post_init__(self) -> None:
        prefix, _, rest = self.name.partition(".")
        if prefix not in DOMAINS or not rest:
            raise InputError(f"source {self.name!r}; write history.NAME, cand.NAME or ctx.NAME")

    @property
    def operands(self) -> tuple[Node, ...]:
        return ()

    @property
    def domain(self) -> Domain:
        prefix = self.name.partition(".")[0]
        return next(d for d in DOMAINS if d == prefix)

    def evaluate(self, operands: Sequence[Value]) -> Value:
        raise AssertionError("the plan looks sources up")


@dataclass(frozen=True, slots=True)
class Formula:
    """What an elementwise step does with numbers of one dtype.

    Attributes:
        branches: the steps of the result; of a vector, those of each of its elements.
        dtype: of the result, which holds what the last step of each branch makes.
    """

    branches: tuple[tuple[Step, ...], ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Elementwise(Node):
    """A pure, stateless op of one column, so it may run once per distinct entry of a dictionary, and in one pass with
    the other ops of its column."""

    input: Node

    @property
    def operands(self) -> tuple[Node, ...]:
        return (self.input,)

    @property
    def width(self) -> int:
        """Elements of a result that is a vector; 0 where it is one number."""
        return 0

    @abstractmethod
    def formula(self, dtype: np.dtype[Any]) -> Formula:
        """The steps for numbers of ``dtype``, integers or floats. Raises InputError where the op takes others."""

    def texts(self, entries: pa.Array) -> npt.NDArray[Any]:
        """(n,) or (n, width) results for strings or bytes. Raises InputError where the op takes none."""
        raise InputError(f"{self.op} of a column of {entries.type}; it takes numbers: hash strings first")

    def evaluate(self, operands: Sequence[Value]) -> Value:
        raise AssertionError("the plan computes the elementwise ops of a column together")


def joint_domain(op: str, nodes: Sequence[Node], remedy: str) -> Domain:
    """What an op of several columns stands beside: their one domain, or candidates with context beside them.

    Raises:
        InputError: with the ``remedy``, where they are of an event and of a request, or none.
    """
    strange = [n for n in nodes if not isinstance(n, Node)]
    if strange:
        raise InputError(f"{op} of {strange[0]!r}; give a Source or an op")
    domains = {n.domain for n in nodes}
    if domains not in ({"cand"}, {"ctx"}, {"history"}, {"cand", "ctx"}):
        named = " and ".join(sorted(domains)) or "no"
        raise InputError(f"{op} of {named} columns; an event is shared by many examples: {remedy}")
    return next((d for d in domains if d != "ctx"), "ctx")


def integers(dtype: np.dtype[Any], op: str, remedy: str) -> None:
    """Raises InputError unless ``dtype`` is one of integers."""
    if dtype.kind not in "iu":
        raise InputError(f"{op} of a column of {dtype}; it takes integers: {remedy}")


def within_int64(dtype: np.dtype[Any], op: str) -> None:
    """Raises InputError where columns of ``dtype`` have integers that int64 does not hold."""
    if dtype == np.uint64:
        raise InputError(f"{op} of a column of {dtype}; it takes integers that int64 holds: convert or hash it first")


def as_integer(op: str, name: str, value: object) -> int:
    """``value`` as a plain int: equal ops are written alike. Raises InputError where it is no integer."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError as e:
        raise InputError(f"{op}: {name}={value!r}; it must be an integer") from e


def as_number(op: str, name: str, value: Any) -> int | float:
    """``value`` in one spelling, 10 for 10.0: equal ops are written alike. Raises InputError where it is no finite
    number."""
    try:
        finite = math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        finite = False
    if not finite:
        raise InputError(f"{op}: {name}={value!r:.40}; it must be finite, a number of 64 bits")
    return int(value) if value == int(value) else float(value)


def as_bucket_count(op: str, name: str, n: object) -> int | None:
    """``n`` as a plain int, or None. Raises InputError unless it is in [1, 2^63)."""
    if n is None:
        return None
    count = as_integer(op, name, n)
    if not 1 <= count < 1 << 63:
        raise InputError(f"{op}: {name}={count}; it must be in [1, 2^63)")
    return count


def as_seed(op: str, seed: object) -> int:
    """``seed`` as a plain int. Raises InputError unless it is in [0, 2^63)."""
    found = as_integer(op, "seed", seed)
    if not 0 <= found < 1 << 63:
        raise InputError(f"{op}: seed={found}; it must be in [0, 2^63)")
    return found
