"""DataSet: what the recipes of all models ask of a data set, so that each is written once (``recipes.rankers``)."""

from __future__ import annotations

from dataclasses import dataclass

from thinrow.features import FeaturePlan

#: Names of outputs of a plan, beside events and beside candidates (contexts: requests), that mean the same.
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Attributes:
    name: within the names of its recipes.
    label: the outcome that is learned.
    rate: of the label, about.
    plan: what all models read.
    items: describe an item; the first says which it is.
    search: by which SIM finds events.
    argus_plan: what ARGUS reads.
    argus_items: describe an item to it, beside ``items``.
    contexts: describe a context.
    domain: of an item, one of two.
    kinds_plan: what ARGUS with kinds of contexts and feedback reads.
    kind: of a context, one of two.
    feedback: the output beside events that says what came of one, and how many there are.
    """

    name: str
    label: str
    rate: float
    plan: FeaturePlan
    items: tuple[Pair, ...]
    search: Pair
    argus_plan: FeaturePlan
    argus_items: tuple[Pair, ...]
    contexts: tuple[Pair, ...]
    domain: Pair
    kinds_plan: FeaturePlan
    kind: Pair
    feedback: tuple[str, int]
