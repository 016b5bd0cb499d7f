"""Rankers of the Complete Journey, the data of ``thinrow demo``: which promoted products a basket will hold.

Cross features are computed from the window that the model reads, so that a shorter history knows less of what was
bought before; those that the demo logs with its impressions see the whole history and are not read.
"""

from __future__ import annotations

import dataclasses

from thinrow.features import BagOfWords, Bucketize, FeaturePlan, Hash, MultiHash, Source
from thinrow.models import (
    ARGUSConfig,
    DLRMConfig,
    HSTUConfig,
    MTGRConfig,
    RetrievalConfig,
    SIMConfig,
    WukongConfig,
)
from thinrow.recipes.fields import BUDGET, COUNTS, ranking_plan, small_run, with_outputs
from thinrow.training import TrainConfig

_RATE = 0.17
_ITEMS = (
    ("e_product_id", "c_product_id"),
    ("e_department", "c_department"),
    ("e_product_category", "c_product_category"),
)
_ARGUS = ARGUSConfig(
    items=(*_ITEMS, ("e_product_twice", "c_product_twice"), ("e_words", "c_words")),
    contexts=(("e_store_id", "x_store_id"),),
    domain=("e_domain", "c_domain"),
    domains=2,
    base_rate=_RATE,
)


def retail_plan() -> FeaturePlan:
    """Product, department and category of events and candidates, where and how a product is promoted, the household."""
    return ranking_plan(
        shared={"product_id": 1, "department": 2, "product_category": 3},
        candidate={"brand": 4, "manufacturer_id": 5, "display_location": 6, "mailer_location": 7},
        context={"store_id": 8, "age": 9, "income": 10, "household_size": 11},
        matched=("product_id", "product_category", "department"),
        seed=20,
    )


def retail_argus_plan() -> FeaturePlan:
    """The same, with what ARGUS reads: the store of an event as its context, the quantity as its action, departments in
    two domains, products hashed twice into one range of rows, and the words of a category."""
    event, shown = "history", "cand"
    return with_outputs(
        retail_plan(),
        e_store_id=Hash(Source("history.store_id"), seed=8),
        e_quantity=Hash(Bucketize(Source("history.quantity"), COUNTS), seed=40),
        **{f"{p}_domain": Hash(Source(f"{d}.department"), 2, 41) for p, d in (("e", event), ("c", shown))},
        **{
            f"{p}_product_twice": MultiHash(Source(f"{d}.product_id"), 1 << 16, (42, 43))
            for p, d in (("e", event), ("c", shown))
        },
        **{
            f"{p}_words": BagOfWords(Source(f"{d}.product_category"), 1 << 16, 44)
            for p, d in (("e", event), ("c", shown))
        },
    )


def hstu_retail_small() -> TrainConfig:
    """Two HSTU layers of width 32 on the whole history."""
    return small_run(HSTUConfig(width=32, layers=2, base_rate=_RATE), retail_plan(), "bought")


def hstu_plain_retail_small() -> TrainConfig:
    """The same without cross features: what a sequence tells by itself."""
    model = HSTUConfig(width=32, layers=2, base_rate=_RATE, cross_features=False)
    return small_run(model, retail_plan(), "bought")


def mtgr_retail_small() -> TrainConfig:
    """MTGR of two layers of width 32, batches by what they cost."""
    return dataclasses.replace(small_run(MTGRConfig(base_rate=_RATE), retail_plan(), "bought"), block=16, budget=BUDGET)


def argus_retail_small() -> TrainConfig:
    """ARGUS as a ranker; begin it with what ``argus_retail_pretrain`` learned (``start``)."""
    return small_run(_ARGUS, retail_argus_plan(), "bought")


def argus_retail_pretrain() -> TrainConfig:
    """ARGUS on the next item of each domain."""
    return dataclasses.replace(argus_retail_small(), objective="next_item")


def argus_retail_1b() -> TrainConfig:
    """A plan of ARGUS with a thousand million weights, for histories of 8,192 events; ``thinrow size`` prints what it
    takes, and with a smaller width and fewer layers it runs anywhere."""
    model = dataclasses.replace(
        _ARGUS, width=2_048, heads=16, layers=46, time_pairs=16, position_pairs=16, cross_layers=3, negatives=8_192
    )
    run = small_run(model, retail_argus_plan(), "bought", dim=64, max_len=8_192, align=1_024)
    return dataclasses.replace(run, objective="next_item", dense_lr=1e-4, block=16, budget=BUDGET)


def hstu_retrieval_retail_small() -> TrainConfig:
    """HSTU on the next item; its score of a candidate is that of a retrieval."""
    model = RetrievalConfig(items=_ITEMS, base_rate=_RATE)
    return dataclasses.replace(small_run(model, retail_plan(), "bought"), objective="next_item")


def dlrm_retail_small() -> TrainConfig:
    """The baseline: the same inputs, the history pooled."""
    return small_run(DLRMConfig(hidden=(64, 32), base_rate=_RATE), retail_plan(), "bought")


def moe_retail_small() -> TrainConfig:
    """DLRM with four experts on top."""
    return small_run(DLRMConfig(hidden=(64, 32), base_rate=_RATE, experts=4), retail_plan(), "bought")


def multi_embedding_retail_small() -> TrainConfig:
    """DLRM whose vectors interact in two sets."""
    return small_run(DLRMConfig(hidden=(64, 32), base_rate=_RATE, sets=2), retail_plan(), "bought", dim=32)


def wukong_retail_small() -> TrainConfig:
    """Two layers of factorisation machines, the history pooled."""
    return small_run(WukongConfig(base_rate=_RATE), retail_plan(), "bought")


def sim_retail_small() -> TrainConfig:
    """Target attention over the newest 16 purchases of a candidate's category, beside a user tower."""
    model = SIMConfig(search=("e_product_category", "c_product_category"), base_rate=_RATE)
    return small_run(model, retail_plan(), "bought")
