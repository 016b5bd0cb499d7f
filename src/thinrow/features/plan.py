"""FeaturePlan: named outputs of a graph of ops, as data, run with each distinct step computed once.

Worked example::

    product = Source("history.product_id")
    plan = FeaturePlan({"product": Hash(product, buckets=1000), "pair": Cross((product, Source("history.department")))})
    plan.apply({"history.product_id": Column(...), "history.department": Column(...)})

computes ``Hash(product)`` (Cross needs it), ``Hash(product, buckets=1000)`` and the hash of each distinct department.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinrow.core.errors import InputError
from thinrow.features.bucketize import Bucketize
from thinrow.features.cross import Cross
from thinrow.features.hash import Hash
from thinrow.features.mod import Mod
from thinrow.features.node import Domain, Node, Source
from thinrow.features.truncate import Truncate
from thinrow.features.value import Value, finish, start
from thinrow.jagged import Column, Jagged

OPS: dict[str, type[Node]] = {op.op: op for op in (Source, Bucketize, Mod, Hash, Truncate, Cross)}

_FORMAT = 1


@dataclass(frozen=True)
class FeaturePlan:
    """Attributes:
    outputs: name -> the step whose value it is.
    """

    outputs: Mapping[str, Node]

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", dict(self.outputs))
        for name, node in self.outputs.items():
            if not isinstance(node, Node):
                raise InputError(f"output {name!r} is {node!r}; give a Source or an op")

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the inputs, sorted."""
        found: set[str] = set()
        pending: list[Node] = list(self.outputs.values())
        while pending:
            node = pending.pop()
            if isinstance(node, Source):
                found.add(node.name)
            pending.extend(node.operands)
        return tuple(sorted(found))

    @property
    def history_columns(self) -> tuple[str, ...]:
        """Names of the history columns that the plan reads, sorted: what a projection must have."""
        return tuple(s.partition(".")[2] for s in self.sources if s.startswith("history."))

    def domain(self, output: str) -> Domain:
        """What an output stands beside: an event, a candidate or an example."""
        return self.outputs[output].domain

    def apply(self, sources: Mapping[str, Column | Jagged]) -> dict[str, Column | Jagged]:
        """The outputs: Column for a flat input, Jagged for a jagged one.

        Args:
            sources: the inputs by name. A history column may be the shared events (Column), or a copy per example
                (Jagged).

        Raises:
            InputError: an input is missing or of a type that an op does not take.
        """
        done: dict[str, Value] = {}
        result: dict[str, Column | Jagged] = {}
        for name, node in self.outputs.items():
            if isinstance(node, Source):
                result[name] = _look_up(node, sources)
            else:
                result[name] = finish(_evaluate(node, sources, done))
        return result

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict in which each distinct step stands once; ``from_dict`` reverses it."""
        steps: list[dict[str, Any]] = []
        number: dict[str, int] = {}

        def add(node: Node) -> int:
            key = node.digest()
            if key not in number:
                inputs = [add(i) for i in _written_inputs(node)]
                number[key] = len(steps)
                steps.append({"op": node.op, "inputs": inputs, **node.parameters()})
            return number[key]

        outputs = {name: add(node) for name, node in self.outputs.items()}
        return {"format": _FORMAT, "steps": steps, "outputs": outputs}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FeaturePlan:
        """Reverse of ``to_dict``. Raises InputError on anything else."""
        try:
            if data["format"] != _FORMAT:
                raise InputError(f"feature plan of format {data['format']}; this thinrow reads {_FORMAT}: update it")
            steps: list[Node] = []
            for step in data["steps"]:
                inputs = [steps[i] for i in step["inputs"]]
                steps.append(_build(step["op"], inputs, {k: v for k, v in step.items() if k not in ("op", "inputs")}))
            return cls({name: steps[i] for name, i in data["outputs"].items()})
        except (KeyError, TypeError, IndexError, AttributeError) as e:
            raise InputError(f"not a feature plan: {e!r}; write it with FeaturePlan.to_dict") from e

    def fingerprint(self) -> str:
        """16 hex digits; equal plans have equal ones."""
        text = json.dumps({name: node.digest() for name, node in self.outputs.items()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _written_inputs(node: Node) -> tuple[Node, ...]:
    return node.inputs if isinstance(node, Cross) else node.operands


def _build(op: str, inputs: list[Node], parameters: dict[str, Any]) -> Node:
    if op not in OPS:
        raise InputError(f"no feature op {op!r}; there are {', '.join(OPS)}")
    make: Any = OPS[op]
    operands: tuple[Any, ...] = (inputs[0],) if len(inputs) == 1 else ()
    if op == Cross.op:
        operands = (tuple(inputs),)
    made = make(*operands, **parameters)
    assert isinstance(made, Node)
    return made


def _look_up(node: Source, sources: Mapping[str, Column | Jagged]) -> Column | Jagged:
    if node.name not in sources:
        raise InputError(f"the plan reads {node.name!r}, which is not there; there are {', '.join(sorted(sources))}")
    return sources[node.name]


def _evaluate(node: Node, sources: Mapping[str, Column | Jagged], done: dict[str, Value]) -> Value:
    key = node.digest()
    if key not in done:
        if isinstance(node, Source):
            done[key] = start(_look_up(node, sources))
        else:
            done[key] = node.evaluate([_evaluate(i, sources, done) for i in node.operands])
    return done[key]
