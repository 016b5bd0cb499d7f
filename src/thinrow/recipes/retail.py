"""Rankers of the Complete Journey, the data of ``thinrow demo``: which promoted products a basket will hold.

Cross features are computed from the window that the model reads, so that a shorter history knows less of what was
bought before; those that the demo logs with its impressions see the whole history and are not read.
"""

from __future__ import annotations

from thinrow.features import BagOfWords, Bucketize, FeaturePlan, Hash, MultiHash, Source
from thinrow.recipes.data import DataSet
from thinrow.recipes.fields import COUNTS, ranking_plan, with_outputs


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


def retail_kinds_plan() -> FeaturePlan:
    """The same, with contexts of two kinds (the data names none, so by a hash of the store), and the quantity as
    feedback: one, two or more."""
    return with_outputs(
        retail_argus_plan(),
        e_feedback=Bucketize(Source("history.quantity"), (2, 3)),
        e_kind=Hash(Source("history.store_id"), 2, 45),
        x_kind=Hash(Source("ctx.store_id"), 2, 45),
    )


RETAIL = DataSet(
    name="retail",
    label="bought",
    rate=0.17,
    plan=retail_plan(),
    items=(
        ("e_product_id", "c_product_id"),
        ("e_department", "c_department"),
        ("e_product_category", "c_product_category"),
    ),
    search=("e_product_category", "c_product_category"),
    argus_plan=retail_argus_plan(),
    argus_items=(("e_product_twice", "c_product_twice"), ("e_words", "c_words")),
    contexts=(("e_store_id", "x_store_id"),),
    domain=("e_domain", "c_domain"),
    kinds_plan=retail_kinds_plan(),
    kind=("e_kind", "x_kind"),
    feedback=("e_feedback", 3),
)
