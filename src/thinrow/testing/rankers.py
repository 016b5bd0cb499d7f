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
from thinrow.features import Bucketize, FeaturePlan, Hash, HistoryMatch, Source
from thinrow.features.featurize import featurize
from thinrow.jagged import Column, Jagged, SharedHistories
from thinrow.models import DLRMConfig, HSTUConfig, RankerInputs, RankerSpec, weights_of
from thinrow.schema import Projection
from thinrow.testing.histories import random_candidates, random_histories
from thinrow.testing.world import World
from thinrow.training import TrainConfig, Trainer, TrainResult
from thinrow.training.loop import begin

EVENT_VALUES, CANDIDATE_VALUES = {"item": 9, "brand": 3}, {"item": 9, "brand": 3, "price": 50}

CONFIGS: Mapping[str, HSTUConfig | DLRMConfig] = {
    "hstu": HSTUConfig(width=8, heads=2, layers=2, time_pairs=1, position_pairs=1),
    "dlrm": DLRMConfig(hidden=(8, 4)),
}


def world_spec(model: str, max_len: int | None = None, align: int = 1) -> RankerSpec:
    """A ranker of ``thinrow.testing.world``."""
    item, shown = Source("history.item"), Source("cand.item")
    plan = FeaturePlan(
        {
            "e_item": Hash(item, seed=1),
            "e_brand": Hash(Source("history.brand"), seed=2),
            "c_item": Hash(shown, seed=1),
            "c_brand": Hash(Source("cand.brand"), seed=2),
            "c_count": Hash(Bucketize(HistoryMatch(item, shown, "count"), (1, 2, 4)), seed=3),
            "x_city": Hash(Source("ctx.city"), seed=4),
        }
    )
    columns = ("item", "brand")
    projection = Projection(columns=columns, max_len=max_len, align=align)
    return RankerSpec(model=CONFIGS[model], plan=plan, projection=projection, label="buy", dim=4)


def world_config(model: str, **changes: object) -> TrainConfig:
    """A run on the world, 16 requests a step."""
    return dataclasses.replace(TrainConfig(ranker=world_spec(model), base_rows=8, block=2), **changes)  # type: ignore[arg-type]


def memory_spec(model: str) -> RankerSpec:
    """A ranker of ``random_histories`` and ``random_candidates``, with a dense number beside candidates."""
    item, shown = Source("history.item"), Source("cand.item")
    plan = FeaturePlan(
        {
            "e_item": Hash(item, seed=1),
            "e_brand": Hash(Source("history.brand"), seed=2),
            "c_item": Hash(shown, seed=1),
            "c_count": Hash(HistoryMatch(item, shown, "count"), seed=3),
            "c_price": Source("cand.price"),
            "x_city": Hash(Source("ctx.city"), seed=4),
        }
    )
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
    die_at: int | None = None,
) -> tuple[TrainResult, dict[str, npt.NDArray[Any]]]:
    """A job for ``thinrow.testing.ranks``: train on the world; the result, and the weights. ``die_at``: the step before
    which the last rank is killed."""

    def on_step(step: int, *_: object) -> None:
        if ranks is not None and ranks.rank == ranks.size - 1 and step + 1 == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with world.store() as store, world.table() as table:
        trainer = Trainer(config, store, table, threads=1, ranks=ranks)
        result = trainer.run(begin(trainer, out, resume), stop_after=stop_after, on_step=on_step)
    return result, weights_of(trainer.module)
