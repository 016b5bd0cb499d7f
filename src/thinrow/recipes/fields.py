"""Build the plan of a ranker from lists of fields, as the recipes do.

Worked example: ``ranking_plan(shared={"item": 1}, candidate={"place": 2}, context={"store": 3}, matched=("item",),
seed=10)`` has the outputs ``e_item``, ``c_item``, ``c_place``, ``x_store``, ``m_item_count`` and ``m_item_days``. Each
field is hashed under a seed of its own, the same for events and candidates: an item of the history and an item that is
shown share a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinrow.dpp import BatchBudget
from thinrow.features import Bucketize, FeaturePlan, Hash, HistoryMatch, Source
from thinrow.features.node import Node
from thinrow.models import RankerSpec
from thinrow.models.spec import ModelConfig
from thinrow.schema import Projection
from thinrow.training import TrainConfig

#: Of a batch of a sequence model: linear and attention cost, in events, and a bound on memory.
BUDGET = BatchBudget(limit=16_384, event=1, pair=1 / 2_048, max_events=65_536)
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
DAYS = (0, 1, 2, 3, 5, 7, 10, 14, 21, 28, 42, 56, 84, 112, 168, 252)


def ranking_plan(
    *,
    shared: Mapping[str, int],
    candidate: Mapping[str, int],
    context: Mapping[str, int],
    matched: Sequence[str],
    seed: int,
    event: Mapping[str, int] | None = None,
    bucketed: Mapping[str, tuple[int, ...]] | None = None,
) -> FeaturePlan:
    """Outputs ``e_*`` beside events, ``c_*`` beside candidates, ``x_*`` beside requests, and ``m_*``: how often, and
    how many days ago, the window that the model reads has what a candidate has.

    Args:
        shared: field of events and candidates -> seed.
        candidate, context, event: field -> seed.
        matched: shared fields to look up in the window.
        seed: of the first match; each takes two.
        bucketed: candidate field of numbers -> the boundaries that it is cut at before it is hashed.
    """
    outputs: dict[str, Node] = {}
    for name, s in {**shared, **(event or {})}.items():
        outputs[f"e_{name}"] = Hash(Source(f"history.{name}"), seed=s)
    for name, s in {**shared, **candidate}.items():
        source: Node = Source(f"cand.{name}")
        if name in (bucketed or {}):
            source = Bucketize(source, (bucketed or {})[name])
        outputs[f"c_{name}"] = Hash(source, seed=s)
    for name, s in context.items():
        outputs[f"x_{name}"] = Hash(Source(f"ctx.{name}"), seed=s)
    for i, name in enumerate(matched):
        pair = Source(f"history.{name}"), Source(f"cand.{name}")
        outputs[f"m_{name}_count"] = Hash(Bucketize(HistoryMatch(*pair, "count"), COUNTS), seed=seed + 2 * i)
        outputs[f"m_{name}_days"] = Hash(Bucketize(HistoryMatch(*pair, "days_since"), DAYS), seed=seed + 2 * i + 1)
    return FeaturePlan(outputs)


def with_outputs(plan: FeaturePlan, **outputs: Node) -> FeaturePlan:
    """The plan with further outputs."""
    return FeaturePlan({**plan.outputs, **outputs})


def small_run(
    model: ModelConfig, plan: FeaturePlan, label: str, *, dim: int = 16, max_len: int | None = None, align: int = 1
) -> TrainConfig:
    """A run on the columns that the plan reads, of whole histories unless ``max_len`` says less."""
    projection = Projection(columns=plan.history_columns, max_len=max_len, align=align)
    ranker = RankerSpec(model=model, plan=plan, projection=projection, label=label, dim=dim)
    return TrainConfig(ranker=ranker, base_rows=64, block=1, sparse_lr=0.3)
