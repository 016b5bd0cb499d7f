"""Rankers of a git checkout (``thinrow demo --git``): which files a commit will touch, from what its author did
before."""

from __future__ import annotations

from thinrow.features import BagOfWords, Bucketize, FeaturePlan, Hash, MultiHash, Source
from thinrow.recipes.data import DataSet
from thinrow.recipes.fields import COUNTS, DAYS, ranking_plan, with_outputs


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


def git_kinds_plan() -> FeaturePlan:
    """The same, with contexts of two kinds, by day and by night, and the action as feedback."""
    return with_outputs(
        git_argus_plan(),
        e_feedback=Hash(Source("history.action"), 4, 45),
        e_kind=Bucketize(Source("history.hour"), (8, 18)),
        x_kind=Bucketize(Source("ctx.hour"), (8, 18)),
    )


GIT = DataSet(
    name="git",
    label="touched",
    rate=0.15,
    plan=git_plan(),
    items=tuple((f"e_{n}", f"c_{n}") for n in ("file_id", "folder", "top_folder", "extension")),
    search=("e_folder", "c_folder"),
    argus_plan=git_argus_plan(),
    argus_items=(("e_file_twice", "c_file_twice"), ("e_words", "c_words")),
    contexts=(("e_hour", "x_hour"),),
    domain=("e_domain", "c_domain"),
    kinds_plan=git_kinds_plan(),
    kind=("e_kind", "x_kind"),
    feedback=("e_feedback", 4),
)
