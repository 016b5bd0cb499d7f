"""The recipes: a run of each model, for any data set. ``hstu_retail_small`` is ``hstu(RETAIL)``."""

from __future__ import annotations

import dataclasses
from typing import Any

from thinrow.models import (
    ARGUSConfig,
    DLRMConfig,
    HSTUConfig,
    MTGRConfig,
    RetrievalConfig,
    SIMConfig,
    WukongConfig,
)
from thinrow.models.spec import ModelConfig
from thinrow.recipes.data import DataSet
from thinrow.recipes.fields import BUDGET, small_run
from thinrow.training import TrainConfig


def hstu(data: DataSet) -> TrainConfig:
    """Two HSTU layers of width 32 on the whole history."""
    return _run(data, HSTUConfig(width=32, layers=2, base_rate=data.rate))


def hstu_plain(data: DataSet) -> TrainConfig:
    """The same without cross features: what a sequence tells by itself."""
    return _run(data, HSTUConfig(width=32, layers=2, base_rate=data.rate, cross_features=False))


def hstu_semi_local(data: DataSet) -> TrainConfig:
    """HSTU in which a token sees the newest 64 events before it, and the oldest 16."""
    return _run(data, HSTUConfig(width=32, layers=2, base_rate=data.rate, window=64, first=16))


def hstu_sampled(data: DataSet) -> TrainConfig:
    """HSTU that learns from 64 to 1,024 of a request's newest events, as many as a draw says; each request a pass."""
    run = _run(data, HSTUConfig(width=32, layers=2, base_rate=data.rate), max_len=1_024)
    projection = dataclasses.replace(run.ranker.projection, shortest=64)
    return dataclasses.replace(run, ranker=dataclasses.replace(run.ranker, projection=projection))


def mtgr(data: DataSet) -> TrainConfig:
    """MTGR of two layers of width 32, batches by what they cost."""
    return dataclasses.replace(_run(data, MTGRConfig(base_rate=data.rate)), block=16, budget=BUDGET)


def argus(data: DataSet) -> TrainConfig:
    """ARGUS as a ranker; begin it with what ``argus_pretrain`` learned (``start``)."""
    return small_run(_argus(data), data.argus_plan, data.label)


def argus_pretrain(data: DataSet) -> TrainConfig:
    """ARGUS on the next item of each domain."""
    return dataclasses.replace(argus(data), objective="next_item")


def argus_feedback(data: DataSet) -> TrainConfig:
    """The same with contexts of two kinds, and learning what came of an item as well; begin ``argus_kinds`` with it."""
    return dataclasses.replace(argus_kinds(data), objective="next_item")


def argus_kinds(data: DataSet) -> TrainConfig:
    """ARGUS as a ranker with contexts of two kinds; begin it with what ``argus_feedback`` learned."""
    feedback, feedbacks = data.feedback
    model = dataclasses.replace(_argus(data), kind=data.kind, kinds=2, feedback=feedback, feedbacks=feedbacks)
    return small_run(model, data.kinds_plan, data.label)


def argus_1b(data: DataSet) -> TrainConfig:
    """A plan of ARGUS with a thousand million weights, for histories of 8,192 events; ``thinrow size`` prints what it
    takes, and with a smaller width and fewer layers it runs anywhere."""
    model = dataclasses.replace(
        _argus(data), width=2_048, heads=16, layers=46, time_pairs=16, position_pairs=16, cross_layers=3,
        negatives=8_192,
    )  # fmt: skip
    run = small_run(model, data.argus_plan, data.label, dim=64, max_len=8_192, align=1_024)
    return dataclasses.replace(run, objective="next_item", dense_lr=1e-4, block=16, budget=BUDGET)


def hstu_retrieval(data: DataSet) -> TrainConfig:
    """HSTU on the next item; its score of a candidate is that of a retrieval."""
    run = _run(data, RetrievalConfig(items=data.items, base_rate=data.rate))
    return dataclasses.replace(run, objective="next_item")


def recis_click(data: DataSet) -> TrainConfig:
    """The first of the two models that RecIS is shown with (arXiv 2509.20883): whether an item is clicked, by target
    attention over the newest events, whatever their category, beside a user tower."""
    return _run(data, SIMConfig(search=None, base_rate=data.rate))


def recis_next(data: DataSet) -> TrainConfig:
    """The second: which item comes next, from the history alone, by a causal model and a softmax over items."""
    run = _run(data, RetrievalConfig(items=data.items, base_rate=data.rate, cross_layers=1, cross_features=False))
    return dataclasses.replace(run, objective="next_item")


def dlrm(data: DataSet) -> TrainConfig:
    """The baseline: the same inputs, the history pooled."""
    return _run(data, DLRMConfig(hidden=(64, 32), base_rate=data.rate))


def moe(data: DataSet) -> TrainConfig:
    """DLRM with four experts on top."""
    return _run(data, DLRMConfig(hidden=(64, 32), base_rate=data.rate, experts=4))


def multi_embedding(data: DataSet) -> TrainConfig:
    """DLRM whose vectors interact in two sets."""
    return _run(data, DLRMConfig(hidden=(64, 32), base_rate=data.rate, sets=2), dim=32)


def wukong(data: DataSet) -> TrainConfig:
    """Two layers of factorisation machines, the history pooled."""
    return _run(data, WukongConfig(base_rate=data.rate))


def sim(data: DataSet) -> TrainConfig:
    """Target attention over the newest 16 events that a candidate's category (folder) finds, beside a user tower."""
    return _run(data, SIMConfig(search=data.search, base_rate=data.rate))


def _run(data: DataSet, model: ModelConfig, **more: Any) -> TrainConfig:
    return small_run(model, data.plan, data.label, **more)


def _argus(data: DataSet) -> ARGUSConfig:
    return ARGUSConfig(
        items=(*data.items, *data.argus_items),
        contexts=data.contexts,
        domain=data.domain,
        domains=2,
        base_rate=data.rate,
    )
