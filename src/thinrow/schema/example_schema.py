"""The schema of impressions and examples beside the history: profile and context, candidates, outcomes.

An impression is one *request*: its user, time and version, all visible recent events inline, profile and context
features, the candidates with item and cross features as the model saw them, model version and experiment arm. An
example is an impression joined with its outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinrow.core.errors import SchemaError
from thinrow.schema.event_schema import DTYPES, DType


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A named value of one dtype (of ``DTYPES``), never null."""

    name: str
    dtype: DType

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise SchemaError(f"field name {self.name!r} is not an identifier; rename it")
        if self.dtype not in DTYPES:
            raise SchemaError(f"field {self.name!r} has dtype {self.dtype!r}; allowed: {', '.join(DTYPES)}")


@dataclass(frozen=True, slots=True)
class ExampleSchema:
    """Attributes:
    context: one value a request (profile and context features).
    candidates: one value a candidate (item and cross features); ``item`` names the field that identifies it.
    outcomes: labels, one a candidate, filled by the outcome join (0 where none came), name -> attribution window in
        ms: an outcome counts when ``request_ts <= outcome_ts < request_ts + window``.
    """

    context: tuple[FieldSpec, ...]
    candidates: tuple[FieldSpec, ...]
    item: str
    outcomes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [f.name for f in self.context] + [f.name for f in self.candidates] + [n for n, _ in self.outcomes]
        twice = {n for n in names if names.count(n) > 1}
        if twice:
            raise SchemaError(f"field {sorted(twice)[0]!r} appears twice; each must be unique")
        items = [f for f in self.candidates if f.name == self.item]
        if not items or items[0].dtype != "int64":
            raise SchemaError(f"item {self.item!r} must be a candidate field of dtype int64; number or hash text ids")
        for name, window in self.outcomes:
            if window <= 0:
                raise SchemaError(f"outcome {name!r} has a window of {window} ms; it must be 1 or more")

    @classmethod
    def of(
        cls,
        *,
        candidates: Mapping[str, DType],
        item: str,
        outcomes: Mapping[str, int],
        context: Mapping[str, DType] | None = None,
    ) -> ExampleSchema:
        """The same from plain mappings: name -> dtype, and outcome -> attribution window in ms.

        ``ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 60_000})``

        Raises:
            SchemaError: as the constructor.
        """
        return cls(
            context=tuple(FieldSpec(n, d) for n, d in (context or {}).items()),
            candidates=tuple(FieldSpec(n, d) for n, d in candidates.items()),
            item=item,
            outcomes=tuple(outcomes.items()),
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_dict`` reverses it."""
        return {
            "context": {f.name: f.dtype for f in self.context},
            "candidates": {f.name: f.dtype for f in self.candidates},
            "item": self.item,
            "outcomes": dict(self.outcomes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExampleSchema:
        """Reverse of ``to_dict``. Raises SchemaError on anything else."""
        try:
            return cls(
                context=tuple(FieldSpec(n, d) for n, d in data["context"].items()),
                candidates=tuple(FieldSpec(n, d) for n, d in data["candidates"].items()),
                item=data["item"],
                outcomes=tuple((n, int(w)) for n, w in data["outcomes"].items()),
            )
        except SchemaError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise SchemaError(f"not an example schema: {e}") from e
