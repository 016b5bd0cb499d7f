"""Featurize: a plan applied to examples, the same code where batches are read and where requests are ranked.

Worked example, one request of a user with two events and three candidates::

    plan = FeaturePlan({"item_key": Hash(Source("history.item")), "shown_key": Hash(Source("cand.item")),
                        "bought": HistoryMatch(Source("history.item"), Source("cand.item"))})
    histories, features = featurize(plan, histories, context, candidates, request_ts)
    histories.events.columns["item_key"]    2 values: beside the events, shared by all requests of the user
    features["shown_key"], features["bought"]    one row of 3 values each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from thinrow.features.node import EVENT_TS, REQUEST_TS
from thinrow.features.plan import FeaturePlan
from thinrow.jagged import Column, Jagged, SharedHistories


def featurize(
    plan: FeaturePlan | None,
    histories: SharedHistories,
    context: Mapping[str, Column],
    candidates: Mapping[str, Jagged],
    request_ts: npt.NDArray[np.int64],
) -> tuple[SharedHistories, dict[str, Column | Jagged]]:
    """Apply a plan to X examples.

    Args:
        plan: what to compute; None for nothing.
        histories: X windows on shared events; the plan's ``history.NAME``, and ``history.event_ts``.
        context: name -> (X,) values; the plan's ``ctx.NAME``.
        candidates: name -> X rows; the plan's ``cand.NAME``.
        request_ts: (X,) ms.

    Returns:
        The histories with the outputs that stand beside events as further event columns, and all other outputs by name:
        (X,) Column or X rows.

    Raises:
        InputError: an input of the plan is missing, of a type that an op does not take, or of another number of rows.
    """
    if plan is None:
        return histories, {}
    events = histories.events
    sources: dict[str, Column | Jagged] = {f"history.{n}": c for n, c in events.columns.items()}
    sources |= {f"ctx.{n}": c for n, c in context.items()}
    sources |= {EVENT_TS: Column(events.event_ts), REQUEST_TS: Column(request_ts)}
    sources |= {f"cand.{n}": c for n, c in candidates.items()}
    outputs = plan.apply(sources, histories, request_ts)
    derived = {n: c for n, c in outputs.items() if plan.domain(n) == "history" and isinstance(c, Column)}
    with_derived = replace(histories, events=events.with_columns({**events.columns, **derived}))
    return with_derived, {n: c for n, c in outputs.items() if n not in derived}
