"""Rankers of a git checkout (``thinrow demo --git``): which files a commit will touch, from what its author did
before."""

from __future__ import annotations

from thinrow.features import FeaturePlan
from thinrow.models import DLRMConfig, HSTUConfig
from thinrow.recipes.fields import COUNTS, DAYS, ranking_plan, small_run
from thinrow.training import TrainConfig


def git_plan() -> FeaturePlan:
    """File, folders and extension of events and candidates, how lively a file is, who asks and when."""
    return ranking_plan(
        shared={"file_id": 1, "folder": 2, "top_folder": 3, "extension": 4},
        event={"action": 5},
        candidate={"changes": 6, "days_since_change": 7},
        context={"hour": 8, "weekday": 9, "email_domain": 10},
        matched=("file_id", "folder", "top_folder", "extension"),
        seed=20,
        bucketed={"changes": COUNTS, "days_since_change": DAYS},
    )


def hstu_git_small() -> TrainConfig:
    """Two HSTU layers of width 32 on the whole history."""
    return small_run(HSTUConfig(width=32, layers=2, base_rate=0.15), git_plan(), "touched")


def dlrm_git_small() -> TrainConfig:
    """The baseline: the same inputs, the history pooled."""
    return small_run(DLRMConfig(hidden=(64, 32), base_rate=0.15), git_plan(), "touched")
