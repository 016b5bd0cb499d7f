"""Graph: the distinct steps of a plan, numbered, operands before those who read them.

Of the outputs ``Mod(Hash(x), 8)`` and ``Hash(x)`` the steps are x (0), ``Hash(x)`` (1) and ``Mod(Hash(x), 8)`` (2):
equal steps are one, by the digest of their configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thinrow.features.fused import Fusion, Step
from thinrow.features.node import Elementwise, Node


@dataclass(frozen=True, slots=True)
class Graph:
    """Attributes:
    nodes: the steps.
    operands: of each step, the places of those that it reads.
    outputs: the places of a plan's outputs.
    base: place of an elementwise step -> that of the first step below it that is none.
    fusions: place of a base -> the elementwise steps on it.
    """

    nodes: tuple[Node, ...]
    operands: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    base: Mapping[int, int]
    fusions: Mapping[int, Fusion]

    @classmethod
    def of(cls, outputs: Mapping[str, Node]) -> Graph:
        """The graph of named outputs."""
        nodes: list[Node] = []
        operands: list[tuple[int, ...]] = []
        places: dict[str, int] = {}

        def add(node: Node) -> int:
            key = node.digest()
            if key not in places:
                below = tuple(add(o) for o in node.operands)
                places[key] = len(nodes)
                nodes.append(node)
                operands.append(below)
            return places[key]

        ends = tuple(add(node) for node in outputs.values())
        read = {
            o for node, below in zip(nodes, operands, strict=True) if not isinstance(node, Elementwise) for o in below
        }
        base: dict[int, int] = {}
        steps: dict[int, list[Step]] = {}
        for place, node in enumerate(nodes):
            if isinstance(node, Elementwise):
                (below,) = operands[place]
                base[place] = base.get(below, below)
                steps.setdefault(base[place], []).append(Step(place, below, node))
        wanted = frozenset(ends) | read
        fusions = {b: Fusion(b, s, wanted) for b, s in steps.items()}
        return cls(tuple(nodes), tuple(operands), ends, base, fusions)
