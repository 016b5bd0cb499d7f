"""Rankers of a git checkout (``thinrow demo --git``): which files a commit will touch, from what its author did
before."""

from __future__ import annotations

import dataclasses

from thinrow.features import BagOfWords, FeaturePlan, Hash, MultiHash, Source
from thinrow.models import (
    ARGUSConfig,
    DLRMConfig,
    HSTUConfig,
    MTGRConfig,
    RetrievalConfig,
    SIMConfig,
    WukongConfig,
)
from thinrow.recipes.fields import BUDGET, COUNTS, DAYS, ranking_plan, small_run, with_outputs
from thinrow.training import TrainConfig

_RATE = 0.15
_ITEMS = tuple((f"e_{n}", f"c_{n}") for n in ("file_id", "folder", "top_folder", "extension"))


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


def git_argus_plan() -> FeaturePlan:
    """The same, with what ARGUS reads: the hour of a commit as its context, extensions in two domains, files hashed
    twice into one range of rows, and the words of a folder."""
    beside = (("e", "history"), ("c", "cand"))
    return with_outputs(
        git_plan(),
        e_hour=Hash(Source("history.hour"), seed=8),
        **{f"{p}_domain": Hash(Source(f"{d}.extension"), 2, 41) for p, d in beside},
        **{f"{p}_file_twice": MultiHash(Source(f"{d}.file_id"), 1 << 16, (42, 43)) for p, d in beside},
        **{f"{p}_words": BagOfWords(Source(f"{d}.folder"), 1 << 16, 44) for p, d in beside},
    )


def hstu_git_small() -> TrainConfig:
    """Two HSTU layers of width 32 on the whole history."""
    return small_run(HSTUConfig(width=32, layers=2, base_rate=_RATE), git_plan(), "touched")


def hstu_plain_git_small() -> TrainConfig:
    """The same without cross features: what a sequence tells by itself."""
    model = HSTUConfig(width=32, layers=2, base_rate=_RATE, cross_features=False)
    return small_run(model, git_plan(), "touched")


def mtgr_git_small() -> TrainConfig:
    """MTGR of two layers of width 32, batches by what they cost."""
    return dataclasses.replace(small_run(MTGRConfig(base_rate=_RATE), git_plan(), "touched"), block=16, budget=BUDGET)


def argus_git_small() -> TrainConfig:
    """ARGUS as a ranker; begin it with what ``argus_git_pretrain`` learned (``start``)."""
    model = ARGUSConfig(
        items=(*_ITEMS, ("e_file_twice", "c_file_twice"), ("e_words", "c_words")),
        contexts=(("e_hour", "x_hour"),),
        domain=("e_domain", "c_domain"),
        domains=2,
        base_rate=_RATE,
    )
    return small_run(model, git_argus_plan(), "touched")


def argus_git_pretrain() -> TrainConfig:
    """ARGUS on the next item of each domain."""
    return dataclasses.replace(argus_git_small(), objective="next_item")


def hstu_retrieval_git_small() -> TrainConfig:
    """HSTU on the next item; its score of a candidate is that of a retrieval."""
    model = RetrievalConfig(items=_ITEMS, base_rate=_RATE)
    return dataclasses.replace(small_run(model, git_plan(), "touched"), objective="next_item")


def dlrm_git_small() -> TrainConfig:
    """The baseline: the same inputs, the history pooled."""
    return small_run(DLRMConfig(hidden=(64, 32), base_rate=_RATE), git_plan(), "touched")


def moe_git_small() -> TrainConfig:
    """DLRM with four experts on top."""
    return small_run(DLRMConfig(hidden=(64, 32), base_rate=_RATE, experts=4), git_plan(), "touched")


def multi_embedding_git_small() -> TrainConfig:
    """DLRM whose vectors interact in two sets."""
    return small_run(DLRMConfig(hidden=(64, 32), base_rate=_RATE, sets=2), git_plan(), "touched", dim=32)


def wukong_git_small() -> TrainConfig:
    """Two layers of factorisation machines, the history pooled."""
    return small_run(WukongConfig(base_rate=_RATE), git_plan(), "touched")


def sim_git_small() -> TrainConfig:
    """Target attention over the newest 16 changes in a candidate's folder, beside a user tower."""
    return small_run(SIMConfig(search=("e_folder", "c_folder"), base_rate=_RATE), git_plan(), "touched")
