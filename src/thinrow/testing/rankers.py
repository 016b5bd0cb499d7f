"""Small rankers and inputs for tests of models, training and serving."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.embeddings import Ranks
from thinrow.features import Bucketize, FeaturePlan, Hash, HistoryMatch, Mod, MultiHash, Source
from thinrow.features.featurize import featurize
from thinrow.features.node import Node
from thinrow.jagged import Column, Jagged, SharedHistories
from thinrow.models import (
    ARGUSConfig,
    DLRMConfig,
    HSTUConfig,
    MTGRConfig,
    RankerInputs,
    RankerSpec,
    RetrievalConfig,
    SIMConfig,
    WukongConfig,
    weights_of,
)
from thinrow.models.spec import ModelConfig
from thinrow.schema import Projection
from thinrow.testing.histories import random_candidates, random_histories
from thinrow.testing.world import World
from thinrow.training import TrainConfig, Trainer, TrainResult
from thinrow.training.loop import begin

EVENT_VALUES, CANDIDATE_VALUES = {"item": 9, "brand": 3}, {"item": 9, "brand": 3, "price": 50}

_SEQUENCE: dict[str, Any] = {"width": 8, "heads": 2, "layers": 2, "time_pairs": 1, "position_pairs": 1}
_ITEMS = (("e_item", "c_item"), ("e_brand", "c_brand"))
_ARGUS: dict[str, Any] = {
    **_SEQUENCE,
    "items": (*_ITEMS, ("e_twice", "c_twice")),
    "contexts": (("e_where", "x_city"),),
    "domain": ("e_kind", "c_kind"),
    "domains": 2,
    "negatives": 8,
}

#: Every model, and the variants of one that run other code. The first two stand for all where a test is of the loop or
#: of serving, and not of the model.
CONFIGS: Mapping[str, ModelConfig] = {
    "hstu": HSTUConfig(**_SEQUENCE),
    "dlrm": DLRMConfig(hidden=(8, 4)),
    "mtgr": MTGRConfig(**_SEQUENCE, static_events=4, dropout=0.2),
    "mtgr_one_norm": MTGRConfig(**_SEQUENCE, static_events=4, group_norm=False, cross_features=False),
    "hstu_semi_local": HSTUConfig(**_SEQUENCE, window=5, first=1),
    "argus": ARGUSConfig(**_ARGUS),
    "argus_feedback": ARGUSConfig(
        **_ARGUS, kind=("e_sort", "x_sort"), kinds=3, feedback="e_came", feedbacks=3, feedback_weight=0.5
    ),
    "argus_late": ARGUSConfig(**_ARGUS, early=False),
    "hstu_retrieval": RetrievalConfig(**_SEQUENCE, items=_ITEMS, negatives=8),
    "moe": DLRMConfig(hidden=(8, 4), experts=3),
    "multi_embedding": DLRMConfig(hidden=(8, 4), sets=2),
    "wukong": WukongConfig(fm_vectors=3, linear_vectors=2, rank=2, inner=8, hidden=(8,)),
    "sim": SIMConfig(search=("e_brand", "c_brand"), found=3, width=8, hidden=(8,)),
}
PAIR = ("dlrm", "hstu")
#: Those that are trained on the next item.
NEXT_ITEM = ("argus", "argus_feedback", "argus_late", "hstu_retrieval")


def world_spec(model: str, max_len: int | None = None, align: int = 1) -> RankerSpec:
    """A ranker of ``thinrow.testing.world``."""
    more = model.startswith("argus")
    item, shown = Source("history.item"), Source("cand.item")
    plan = FeaturePlan(
        {
            "e_item": Hash(item, seed=1),
            "e_brand": Hash(Source("history.brand"), seed=2),
            "c_item": Hash(shown, seed=1),
            "c_brand": Hash(Source("cand.brand"), seed=2),
            "c_count": Hash(Bucketize(HistoryMatch(item, shown, "count"), (1, 2, 4)), seed=3),
            "x_city": Hash(Source("ctx.city"), seed=4),
            **(_argus_outputs(Hash(Source("history.brand"), 2), Hash(Source("cand.brand"), 2)) if more else {}),
            **(_feedback_outputs(Hash(Source("history.brand"), 3, 6)) if model == "argus_feedback" else {}),
        }
    )
    columns = ("item", "brand")
    projection = Projection(columns=columns, max_len=max_len, align=align)
    return RankerSpec(model=CONFIGS[model], plan=plan, projection=projection, label="buy", dim=4)


def world_config(model: str, **changes: object) -> TrainConfig:
    """A run on the world, 16 requests a step."""
    return dataclasses.replace(TrainConfig(ranker=world_spec(model), base_rows=8, block=2), **changes)  # type: ignore[arg-type]


def _argus_outputs(e_kind: Node, c_kind: Node) -> dict[str, Node]:
    """Domains, a context of events, and items hashed twice into one range of rows."""
    return {
        "e_kind": e_kind,
        "c_kind": c_kind,
        "e_where": Hash(Source("history.brand"), seed=5),
        "e_twice": MultiHash(Source("history.item"), 50, (7, 8)),
        "c_twice": MultiHash(Source("cand.item"), 50, (7, 8)),
    }


def _feedback_outputs(e_came: Node) -> dict[str, Node]:
    """What came of an event, and kinds of contexts."""
    return {"e_came": e_came, "e_sort": Hash(Source("history.brand"), 3, 9), "x_sort": Hash(Source("ctx.city"), 3, 9)}


def memory_spec(model: str) -> RankerSpec:
    """A ranker of ``random_histories`` and ``random_candidates``, with a dense number beside candidates."""
    item, shown = Source("history.item"), Source("cand.item")
    outputs: dict[str, Node] = {
        "e_item": Hash(item, seed=1),
        "e_brand": Hash(Source("history.brand"), seed=2),
        "c_item": Hash(shown, seed=1),
        "c_count": Hash(HistoryMatch(item, shown, "count"), seed=3),
        "c_price": Source("cand.price"),
        "x_city": Hash(Source("ctx.city"), seed=4),
    }
    if model not in PAIR:
        outputs["c_brand"] = Hash(Source("cand.brand"), seed=2)
    if model.startswith("argus"):
        # Of two values, whose remainders tests that add even numbers leave alone.
        outputs |= _argus_outputs(Mod(Source("history.brand"), 2), Mod(Source("cand.brand"), 2))
    if model == "argus_feedback":
        outputs |= _feedback_outputs(Mod(Source("history.brand"), 3))
    plan = FeaturePlan(outputs)
    return RankerSpec(
        model=CONFIGS[model], plan=plan, projection=Projection(), label="buy", numbers=("c_price",), dim=4
    )


@dataclasses.dataclass(slots=True)
class Requests:
    """Requests in memory, from which inputs are made again after a change."""

    histories: SharedHistories
    request_ts: npt.NDArray[np.int64]
    context: dict[str, Column]
    candidates: dict[str, Jagged]

    @classmethod
    def random(cls, seed: int, **arguments: object) -> Requests:
        """Random requests; ``arguments`` go to ``random_histories``."""
        rng = np.random.default_rng(seed)
        histories, request_ts = random_histories(rng, columns=EVENT_VALUES, **arguments)  # type: ignore[arg-type]
        context = {"city": Column(rng.integers(1, 4, len(histories)))}
        return cls(histories, request_ts, context, random_candidates(rng, len(histories), CANDIDATE_VALUES))

    def inputs(self, spec: RankerSpec, *, share: bool = True) -> RankerInputs:
        """What a model reads of them."""
        read = featurize(spec.plan, self.histories, self.context, self.candidates, self.request_ts)
        return RankerInputs(spec.inputs, *read, self.request_ts, share=share)


def train_world(
    ranks: Ranks | None,
    world: World,
    config: TrainConfig,
    *,
    out: Path | None = None,
    resume: bool = False,
    stop_after: int | None = None,
    overlap: bool = True,
    shard_dense: bool = False,
    die_at: int | None = None,
) -> tuple[TrainResult, dict[str, npt.NDArray[Any]]]:
    """A job for ``thinrow.testing.ranks``: train on the world; the result, and the weights. ``die_at``: the step before
    which the last rank is killed."""

    def on_step(step: int, *_: object) -> None:
        if ranks is not None and ranks.rank == ranks.size - 1 and step + 1 == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with world.store() as store, world.table() as table:
        trainer = Trainer(config, store, table, threads=1, overlap=overlap, ranks=ranks, shard_dense=shard_dense)
        result = trainer.run(begin(trainer, out, resume), stop_after=stop_after, on_step=on_step)
    return result, weights_of(trainer.module)
