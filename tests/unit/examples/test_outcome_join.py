"""The outcome join against a loop over outcomes, and the worked example of its module."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.examples.outcomes import JoinCounts, join
from thinrow.examples.records import Impressions, Outcomes
from thinrow.schema.example_schema import ExampleSchema, FieldSpec
from thinrow.testing.examples import event_schema, example_schema, random_impressions, random_outcomes, same_records

ES, XS = event_schema(), example_schema()
WINDOWS = dict(XS.outcomes)
LAST = max(WINDOWS.values())


def _oracle(
    impressions: Impressions, outcomes: Outcomes, now: int, written: set[int]
) -> tuple[list[int], dict[tuple[int, str, int], int], Counter[str], int]:
    """Ids of the examples, labels by (id, name, position), counts by kind, outcomes that stay."""
    first: dict[int, int] = {}
    counts: Counter[str] = Counter()
    for row, request in enumerate(impressions.request_id.tolist()):
        if request in first or request in written:
            counts["repeated_requests"] += 1
        else:
            first[request] = row
    ts_of = {r: int(impressions.snapshots.request_ts[row]) for r, row in first.items()}
    closed = [r for r in first if ts_of[r] + LAST <= now]
    names = [None if v is None else v for v in outcomes.name.to_arrow().to_pylist()]
    rows = zip(outcomes.request_id, outcomes.item, names, outcomes.ts, outcomes.value, strict=True)
    best: dict[tuple[int, str, int], tuple[int, int]] = {}
    stay = 0
    for request, item, name, ts, value in rows:
        if name not in WINDOWS:
            counts["unknown_name"] += 1
        elif request in closed:
            shown = impressions.candidates["item"].row(first[request]).tolist()
            if ts < ts_of[request]:
                counts["early"] += 1
            elif item not in shown:
                counts["unknown_item"] += 1
            elif ts >= ts_of[request] + WINDOWS[name]:
                counts["late"] += 1
            else:
                slot = (request, name, shown.index(item))
                counts["repeated" if slot in best else "labelled"] += 1
                best[slot] = min(best.get(slot, (ts, value)), (ts, value))
        elif request in written:
            counts["after_write"] += 1
        elif ts + LAST <= now:
            counts["early" if request in first else "unknown_request"] += 1
        else:
            stay += 1
    return closed, {slot: value for slot, (_, value) in best.items()}, counts, stay


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(0, 8), st.integers(0, 30), st.integers(0, 300), st.booleans())
def test_join_is_the_loop(seed: int, n: int, m: int, now: int, repeat: bool) -> None:
    rng = np.random.default_rng(seed)
    impressions = random_impressions(rng, n, ES, XS)
    if repeat and n:
        impressions = Impressions.concat([impressions, impressions.take(rng.integers(0, n, 3))])
    outcomes = random_outcomes(rng, m, n)
    written = set(rng.integers(0, n + 2, 2).tolist())
    closed, labels, counts, stay = _oracle(impressions, outcomes, now, written)

    joined = join(impressions, outcomes, XS, now, written=np.array(sorted(written), np.int64))
    assert joined.examples.request_id.tolist() == closed
    assert joined.counts == JoinCounts(**counts)
    assert len(joined.pending_outcomes) == stay
    found = {}
    for name, rows in joined.examples.labels.items():
        assert np.array_equal(rows.offsets, joined.examples.candidates["item"].offsets)
        assert rows.values.dtype == np.int32
        for row, request in enumerate(joined.examples.request_id.tolist()):
            found |= {(request, name, p): v for p, v in enumerate(rows.row(row).tolist()) if v}
    assert found == {slot: v for slot, v in labels.items() if v}

    shuffled = join(
        impressions, outcomes.take(rng.permutation(m)), XS, now, written=np.array(sorted(written), np.int64)
    )
    assert same_records(shuffled.examples, joined.examples)
    assert shuffled.counts == joined.counts


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 350), min_size=1, max_size=6))
def test_joining_in_steps_writes_what_one_join_writes(seed: int, times: list[int]) -> None:
    rng = np.random.default_rng(seed)
    whole, all_outcomes = random_impressions(rng, 10, ES, XS), random_outcomes(rng, 40, 10)
    once = join(whole, all_outcomes, XS, 1000)
    pending, outcomes, counts, parts = whole, all_outcomes, JoinCounts(), []
    written = np.empty(0, np.int64)
    for now in (*sorted(times), 1000):
        joined = join(pending, outcomes, XS, now, written=written)
        pending, outcomes, counts = joined.pending, joined.pending_outcomes, counts + joined.counts
        written = np.concatenate([written, joined.examples.request_id])
        parts.append(joined.examples)
    rows = np.argsort(np.concatenate([p.request_id for p in parts]))
    assert same_records(type(parts[0]).concat(parts).take(rows), once.examples)
    assert counts == once.counts
    assert not len(pending)
    assert not len(outcomes)


def _one_request() -> Impressions:
    impressions = random_impressions(np.random.default_rng(0), 30, ES, XS, first_id=0)
    row = int(np.flatnonzero(impressions.candidates["item"].lengths >= 2)[0])
    one = impressions.take(np.array([row]))
    one.snapshots.request_ts[0], one.request_id[0] = 100, 7
    one.candidates["item"].values[:2] = [3, 5]
    one.candidates["item"].values[2:] = 6
    return one


@pytest.mark.parametrize(
    ("name", "item", "ts", "kind"),
    [
        ("click", 3, 99, "early"),
        ("click", 3, 100, "labelled"),
        ("click", 3, 109, "labelled"),
        ("click", 3, 110, "late"),
        ("buy", 5, 149, "labelled"),
        ("buy", 5, 150, "late"),
        ("buy", 9, 120, "unknown_item"),
        ("view", 3, 120, "unknown_name"),
    ],
)
def test_window_is_half_open(name: str, item: int, ts: int, kind: str) -> None:
    request = _one_request()
    waits = join(request, Outcomes.of(name, [7], [item], [ts]), XS, 149)
    assert len(waits.examples) == 0
    written = join(request, Outcomes.of(name, [7], [item], [ts]), XS, 150)
    assert written.examples.request_id.tolist() == [7]
    assert written.counts == JoinCounts(**{kind: 1})
    assert sum(written.examples.labels["click"].values) + sum(written.examples.labels["buy"].values) == (
        kind == "labelled"
    )


def test_without_outcomes_a_request_closes_at_once() -> None:
    schema = ExampleSchema((), (FieldSpec("item", "int64"),), "item", ())
    request = random_impressions(np.random.default_rng(0), 3, ES, schema)
    joined = join(request, Outcomes.empty(), schema, 200)
    assert len(joined.examples) == 3
    assert joined.examples.labels == {}
