"""The outcome join: impressions whose attribution windows have all closed become labelled examples, once.

Worked example: outcomes ``click`` (window 10 ms) and ``buy`` (window 50 ms); request 7 at 100 ms showed items 3 and 5::

    click item 3 at 105    labels click [1, 0]
    click item 5 at 110    late: the window is [100, 110)
    buy   item 5 at 149    labels buy [0, 1]
    buy   item 5 at 149    repeated: one outcome a candidate and name counts, the earliest
    buy   item 9 at 120    unknown_item
    the join at 149 ms     request 7 waits: its last window is open until 150
    the join at 150 ms     writes request 7
    buy   item 3 at 140, arriving after that join: after_write
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.examples.records import ExampleBatch, Impressions, Outcomes
from thinrow.jagged.column import Column
from thinrow.jagged.jagged import Jagged
from thinrow.schema.example_schema import ExampleSchema

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class JoinCounts:
    """What became of outcomes (and of requests logged twice). Every outcome ends in exactly one of the first eight.

    Attributes:
        labelled: became a label.
        repeated: a further outcome of a candidate and name that has its label.
        early: before its request.
        late: at or after the end of its window.
        unknown_name: not an outcome of the schema.
        unknown_item: the request did not show the item.
        unknown_request: no such request was logged by the time that no request could match any more.
        after_write: arrived after its example was written.
        repeated_requests: impressions of a request id that was logged before.
        late_requests: logged after the watermark had passed the end of their last window; they are not written.
    """

    labelled: int = 0
    repeated: int = 0
    early: int = 0
    late: int = 0
    unknown_name: int = 0
    unknown_item: int = 0
    unknown_request: int = 0
    after_write: int = 0
    repeated_requests: int = 0
    late_requests: int = 0

    def __add__(self, other: JoinCounts) -> JoinCounts:
        return JoinCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_dict(self) -> dict[str, int]:
        """Kind -> count."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Joined:
    """Attributes:
    examples: requests that closed, in the order given.
    pending: requests with an open window; pass them again.
    pending_outcomes: outcomes that may still find their request, or whose request is pending; pass them again.
    counts: the outcomes settled by this call, by kind.
    """

    examples: ExampleBatch
    pending: Impressions
    pending_outcomes: Outcomes
    counts: JoinCounts


def last_window_ms(schema: ExampleSchema) -> int:
    """The longest attribution window, ms: a request closes at ``request_ts + last_window_ms`` (0 without outcomes)."""
    return max((w for _, w in schema.outcomes), default=0)


def join(
    impressions: Impressions,
    outcomes: Outcomes,
    schema: ExampleSchema,
    now_ms: int,
    *,
    written: npt.NDArray[np.int64] = _NONE,
    waiting: npt.NDArray[np.int64] = _NONE,
) -> Joined:
    """Join the requests that have closed by ``now_ms`` (``now_ms >= request_ts + last_window_ms``).

    An outcome of an item counts when ``request_ts <= ts < request_ts + window``. Of an item shown twice by one request
    the first position gets the label. The result does not depend on the order of outcomes.

    Args:
        written: ids of requests that are examples already; impressions of them are dropped and counted.
        waiting: ids of further pending requests that are not passed.
    """
    ids = impressions.request_id
    unique, first = np.unique(ids, return_index=True)
    first = np.sort(first[~np.isin(unique, written)])
    repeated_requests = len(ids) - len(first)
    window = last_window_ms(schema)
    is_closed = impressions.snapshots.request_ts[first] <= now_ms - window
    closed = impressions.take(first[is_closed])
    pending = impressions.take(first[~is_closed])

    known = _name_codes(outcomes.name, schema)
    of_closed, row = _lookup(closed.request_id, outcomes.request_id)
    of_written = np.isin(outcomes.request_id, written)
    of_pending = np.isin(outcomes.request_id, pending.request_id) | np.isin(outcomes.request_id, waiting)
    # No request at or after the outcome can have it, and one before it closed: only an earlier cause is left.
    expired = outcomes.ts <= now_ms - window
    named = known >= 0
    undecided = named & ~of_closed & ~of_written
    taken = np.flatnonzero(named & of_closed)
    labels, counts = _label(closed, schema, outcomes.take(taken), row[taken], known[taken])
    counts += JoinCounts(
        unknown_name=int((~named).sum()),
        after_write=int((named & of_written).sum()),
        early=int((undecided & expired & of_pending).sum()),
        unknown_request=int((undecided & expired & ~of_pending).sum()),
        repeated_requests=repeated_requests,
    )
    return Joined(ExampleBatch.label(closed, labels), pending, outcomes.take(undecided & ~expired), counts)


def known_names(outcomes: Outcomes, schema: ExampleSchema) -> npt.NDArray[np.bool_]:
    """(m,) whether each outcome's name is one of the schema."""
    return _name_codes(outcomes.name, schema) >= 0


def _label(
    closed: Impressions,
    schema: ExampleSchema,
    outcomes: Outcomes,
    row: npt.NDArray[np.intp],
    name: npt.NDArray[np.int64],
) -> tuple[dict[str, Jagged], JoinCounts]:
    """Labels of closed requests from the outcomes that name them; ``row`` is each outcome's request, ``name`` its
    position in ``schema.outcomes``."""
    items = closed.candidates[schema.item]
    shown, position = _find_items(items, row, outcomes.item)
    request_ts = closed.snapshots.request_ts[row]
    windows = np.array([w for _, w in schema.outcomes], np.int64)
    # Early before all else: a request that is still open counts it so without looking at its items.
    early = outcomes.ts < request_ts
    late = shown & ~early & (outcomes.ts - windows[name] >= request_ts)
    good = np.flatnonzero(shown & ~early & ~late)
    # Earliest first; the value decides between equal times, so that delivery order never shows in a label.
    order = good[np.lexsort((outcomes.value[good], outcomes.ts[good], name[good], position[good]))]
    slot = position[order] * max(len(windows), 1) + name[order]
    winners = order[np.r_[True, slot[1:] != slot[:-1]]] if len(order) else order
    labels = {}
    for code, (label, _) in enumerate(schema.outcomes):
        values = np.zeros(len(items.column), np.int32)
        mine = winners[name[winners] == code]
        values[position[mine]] = outcomes.value[mine]
        labels[label] = Jagged(Column(values), items.offsets)
    counts = JoinCounts(
        labelled=len(winners),
        repeated=len(good) - len(winners),
        early=int(early.sum()),
        late=int(late.sum()),
        unknown_item=int((~shown & ~early).sum()),
    )
    return labels, counts


def _find_items(
    items: Jagged, row: npt.NDArray[np.intp], item: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Whether request ``row[i]`` showed ``item[i]``, and at which flat position first (0 where it did not)."""
    if not len(row) or not len(items.column):
        return np.zeros(len(row), np.bool_), np.zeros(len(row), np.int64)
    distinct, code = np.unique(items.values, return_inverse=True)
    candidate_row = np.repeat(np.arange(len(items)), items.lengths)
    keys, first = np.unique(candidate_row * len(distinct) + code, return_index=True)
    known, item_code = _lookup(distinct, item)
    found, at = _lookup(keys, row * len(distinct) + item_code)
    shown = known & found
    return shown, np.where(shown, first[at], 0)


def _lookup(
    unique: npt.NDArray[np.int64], wanted: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Whether each wanted value is in ``unique`` (distinct, any order), and where (0 where it is not)."""
    if not len(unique):
        return np.zeros(len(wanted), np.bool_), np.zeros(len(wanted), np.intp)
    order = np.argsort(unique, kind="stable")
    at = order[np.minimum(np.searchsorted(unique, wanted, sorter=order), len(unique) - 1)]
    found = unique[at] == wanted
    return found, np.where(found, at, 0)


def _name_codes(name: Column, schema: ExampleSchema) -> npt.NDArray[np.int64]:
    """(m,) position of each name in ``schema.outcomes``, -1 where it is not there."""
    code_of = {n: i for i, (n, _) in enumerate(schema.outcomes)}
    texts = [] if name.dictionary is None else name.dictionary.to_pylist()
    codes = np.array([code_of.get(t, -1) for t in texts], np.int64)
    return codes[name.values] if len(codes) else np.full(len(name), -1, np.int64)
