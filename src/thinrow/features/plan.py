"""FeaturePlan: named outputs of a graph of ops, as data, run with each distinct step computed once.

Worked example::

    product = Source("history.product_id")
    plan = FeaturePlan({"product": Hash(product, buckets=1000), "pair": Cross((product, Source("history.department")))})
    plan.apply({"history.product_id": Column(...), "history.department": Column(...)})

computes ``Hash(product)`` (Cross needs it), ``Hash(product, buckets=1000)`` and the hash of each distinct department.
``featurize`` gives a plan all that examples have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.features.bag_of_words import BagOfWords
from thinrow.features.bucketize import Bucketize
from thinrow.features.clip import Clip
from thinrow.features.cross import Cross
from thinrow.features.custom import Custom
from thinrow.features.dictionary_map import DictionaryMap
from thinrow.features.fill import Fill
from thinrow.features.graph import Graph
from thinrow.features.hash import Hash
from thinrow.features.history_cross import HistoryCross, history_candidate_cross
from thinrow.features.history_match import HistoryMatch
from thinrow.features.log1p import Log1p
from thinrow.features.mod import Mod
from thinrow.features.multi_hash import MultiHash
from thinrow.features.node import Domain, Elementwise, Node, Source
from thinrow.features.time_delta import TimeDelta
from thinrow.features.truncate import Truncate
from thinrow.features.value import Value, finish, start
from thinrow.jagged import Column, Jagged, SharedHistories

OPS: dict[str, type[Node]] = {
    op.op: op
    for op in (
        Source,
        BagOfWords,
        Bucketize,
        Clip,
        Cross,
        Custom,
        DictionaryMap,
        Fill,
        Hash,
        HistoryMatch,
        Log1p,
        Mod,
        MultiHash,
        TimeDelta,
        Truncate,
    )
}

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
        try:
            object.__setattr__(self, "_graph", Graph.of(self.outputs))
        except RecursionError as e:
            raise InputError("a plan with a chain of hundreds of ops; make fewer of them") from e

    def __reduce__(self) -> tuple[type[FeaturePlan], tuple[dict[str, Node]]]:
        return FeaturePlan, (dict(self.outputs),)

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the inputs, sorted."""
        return tuple(sorted({n.name for n in self.graph.nodes if isinstance(n, Source)}))

    @property
    def graph(self) -> Graph:
        """The distinct steps, numbered."""
        return self._graph  # type: ignore[attr-defined,no-any-return]

    @property
    def history_columns(self) -> tuple[str, ...]:
        """Names of the history columns that the plan reads, sorted: what a projection must have."""
        return tuple(s.partition(".")[2] for s in self.sources if s.startswith("history."))

    def domain(self, output: str) -> Domain:
        """What an output stands beside: an event, a candidate or an example."""
        return self.outputs[output].domain

    def apply(
        self,
        sources: Mapping[str, Column | Jagged],
        histories: SharedHistories | None = None,
        request_ts: npt.NDArray[np.int64] | None = None,
    ) -> dict[str, Column | Jagged]:
        """The outputs: Column for a flat input, Jagged for a jagged one.

        Args:
            sources: the inputs by name. A history column may be the shared events (Column), or a copy per example
                (Jagged).
            histories: X windows, what a HistoryMatch looks candidates up in; None for a plan without one.
            request_ts: (X,) ms, of the same examples.

        Raises:
            InputError: an input is missing or of a type that an op does not take.
        """
        run = _Run(self.graph, sources, histories, request_ts)
        return {
            name: run.source(node) if isinstance(node, Source) else finish(run.value(place))
            for (name, node), place in zip(self.outputs.items(), self.graph.outputs, strict=True)
        }

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
                inputs = [_at(steps, i) for i in step["inputs"]]
                steps.append(_build(step["op"], inputs, {k: v for k, v in step.items() if k not in ("op", "inputs")}))
            return cls({name: _at(steps, i) for name, i in data["outputs"].items()})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            if isinstance(e, InputError):
                raise
            raise InputError(f"not a feature plan: {e!r}; write it with FeaturePlan.to_dict") from e

    def fingerprint(self) -> str:
        """16 hex digits; equal plans have equal ones."""
        text = json.dumps({name: node.digest() for name, node in self.outputs.items()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _at(steps: list[Node], number: int) -> Node:
    """Step ``number``. Raises IndexError where there is none before."""
    if number < 0:
        raise IndexError(f"step {number}")
    return steps[number]


def _written_inputs(node: Node) -> tuple[Node, ...]:
    return node.inputs if isinstance(node, Cross) else node.operands


def _build(op: str, inputs: list[Node], parameters: dict[str, Any]) -> Node:
    if op not in OPS:
        raise InputError(f"no feature op {op!r}; there are {', '.join(OPS)}")
    return OPS[op].build(inputs, parameters)


class _Run:
    """One application of a plan: what it is given, and what is computed so far."""

    def __init__(
        self,
        graph: Graph,
        sources: Mapping[str, Column | Jagged],
        histories: SharedHistories | None,
        request_ts: npt.NDArray[np.int64] | None,
    ) -> None:
        self._graph, self._sources = graph, sources
        self._histories, self._request_ts = histories, request_ts
        self._values: dict[int, Value] = {}
        self._crosses: dict[tuple[str, str], HistoryCross] = {}

    def source(self, node: Source) -> Column | Jagged:
        if node.name not in self._sources:
            have = ", ".join(sorted(self._sources))
            raise InputError(f"the plan reads {node.name!r}, which is not there; there are {have}")
        return self._sources[node.name]

    def value(self, place: int) -> Value:
        if place in self._values:
            return self._values[place]
        node = self._graph.nodes[place]
        if isinstance(node, Source):
            made = start(self.source(node))
        elif isinstance(node, HistoryMatch):
            made = node.pick(self._cross(node))
        elif isinstance(node, Elementwise):
            self._run_fused(self._graph.base[place])
            return self._values[place]
        else:
            operands = [self.value(i) for i in self._graph.operands[place]]
            if not isinstance(node, Truncate):
                for operand in operands:
                    _check_single(operand, node)
            made = node.evaluate(operands)
        self._values[place] = made
        return made

    def _run_fused(self, base: int) -> None:
        value, fusion = self.value(base), self._graph.fusions[base]
        _check_single(value, fusion.first)
        for place, entries in fusion.run(value.entries).items():
            self._values[place] = replace(value, entries=entries)

    def _cross(self, node: HistoryMatch) -> HistoryCross:
        key = (node.history.name, node.candidate.name)
        if key not in self._crosses:
            if self._histories is None or self._request_ts is None:
                raise InputError(
                    f"the plan relates {key[1]!r} to {key[0]!r}, but histories or request times are not given; "
                    "call FeaturePlan.apply(sources, histories, request_ts), or featurize"
                )
            candidates = self.source(node.candidate)
            if not isinstance(candidates, Jagged):
                raise InputError(f"{key[1]!r} is a flat column; candidates are rows, one an example: give a Jagged")
            self._crosses[key] = history_candidate_cross(self._histories, node.column, candidates, self._request_ts)
        return self._crosses[key]


def _check_single(value: Value, node: Node) -> None:
    """Raises InputError where an op is given lists or vectors."""
    if value.lists is not None or (isinstance(value.entries, np.ndarray) and value.entries.ndim == 2):
        found = "vectors" if value.lists is None else "lists"
        raise InputError(f"{node.op} of {found}; it takes single values: make {found} last")
