"""Rankers of the Complete Journey, the data of ``thinrow demo``: which promoted products a basket will hold.

Cross features are computed from the window that the model reads, so that a shorter history knows less of what was
bought before; those that the demo logs with its impressions see the whole history and are not read.
"""

from __future__ import annotations

from thinrow.features import FeaturePlan
from thinrow.models import DLRMConfig, HSTUConfig
from thinrow.recipes.fields import ranking_plan, small_run
from thinrow.training import TrainConfig


def retail_plan() -> FeaturePlan:
    """Product, department and category of events and candidates, where and how a product is promoted, the household."""
    return ranking_plan(
        shared={"product_id": 1, "department": 2, "product_category": 3},
        candidate={"brand": 4, "manufacturer_id": 5, "display_location": 6, "mailer_location": 7},
        context={"store_id": 8, "age": 9, "income": 10, "household_size": 11},
        matched=("product_id", "product_category", "department"),
        seed=20,
    )


def hstu_retail_small() -> TrainConfig:
    """Two HSTU layers of width 32 on the whole history."""
    return small_run(HSTUConfig(width=32, layers=2, base_rate=0.17), retail_plan(), "bought")


def dlrm_retail_small() -> TrainConfig:
    """The baseline: the same inputs, the history pooled."""
    return small_run(DLRMConfig(hidden=(64, 32), base_rate=0.17), retail_plan(), "bought")
