"""The plan of tables over ranks: what it costs, what fits, what it prints; and all ranks measure the same rates."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError
from thinrow.embeddings import Plan, Rates, TableLoad, placement, plan_tables
from thinrow.testing.ranks import run_threads

RATES = Rates(exchange_bytes=1e9, exchanges=2_000, keys=2e7, moved_bytes=4e9, spread_tables=3_000, whole_tables=9_000)
ITEMS = TableLoad(name="items", rows=50_000_000, dim=64, lookups=100_000, distinct=30_000)
STORES = TableLoad(name="stores", rows=40, dim=16, lookups=2_000)


def test_a_large_table_is_spread_and_a_small_one_whole():
    plan = plan_tables([ITEMS, STORES], ranks=4, memory_bytes=12 << 30, rates=RATES)
    assert not plan["items"].whole
    assert plan["stores"].whole
    # 12.5 M rows of 64 floats, as many of Adagrad, and their index.
    assert plan["items"].bytes_a_rank == 12_500_000 * (2 * 256 + 60)
    # Three quarters of 30,000 ids and vectors, and as many ids and gradients.
    assert plan["items"].exchange_ms == pytest.approx(22_500 * 2 * 264 / 1e9 * 1e3)
    assert plan["stores"].exchange_ms == pytest.approx(40 * 3 * 72 / 1e9 * 1e3)
    assert plan.waiting_ms == pytest.approx(1.5)
    assert plan.ms == pytest.approx(1.5 + plan["items"].ms + plan["stores"].ms)
    half = plan_tables([ITEMS], ranks=4, memory_bytes=12 << 30, rates=RATES, wire="bfloat16")
    assert half["items"].exchange_ms == pytest.approx(22_500 * 2 * 136 / 1e9 * 1e3)
    with pytest.raises(InputError, match="no table 'shops' in the plan, only items, stores"):
        plan["shops"]


def test_it_prints_its_estimate():
    plan = plan_tables([ITEMS, STORES], ranks=4, memory_bytes=12 << 30, rates=RATES)
    assert str(plan).splitlines() == [
        "4 ranks, float32 on the wire, 7,150 of 12,885 MB a rank, 72.60 ms a step",
        "table             rows   dim  placed           MB  exchange   look-up    update ms",
        "items       50,000,000    64  row-wise    7,150.0    11.880    32.653    26.224",
        "stores              40    16  whole           0.0     0.009     0.286     0.045",
        "waiting                                                1.500",
    ]


loads = st.lists(
    st.builds(
        TableLoad,
        name=st.uuids().map(str),
        rows=st.integers(1, 100_000),
        dim=st.integers(1, 64),
        lookups=st.integers(1, 10_000),
        optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw"]),
    ),
    min_size=1,
    max_size=4,
)


@given(loads, st.integers(1, 6), st.floats(0, 2))
@settings(max_examples=40)
def test_no_placement_that_fits_is_faster(tables, ranks, spare):
    everything = sum(t.rows * t.row_bytes for t in tables)
    memory = int(everything * (1 / ranks + spare)) + sum(t.row_bytes for t in tables)
    plan = plan_tables(tables, ranks=ranks, memory_bytes=memory, rates=RATES)
    assert plan.bytes_a_rank <= memory
    possible = []
    for whole in itertools.product([False, True], repeat=len(tables)):
        places = tuple(placement._place(t, w, ranks, RATES, "float32") for t, w in zip(tables, whole, strict=True))
        waiting_ms = 0.0 if ranks == 1 else (1 if all(whole) else 3) / RATES.exchanges * 1e3
        possible.append(Plan(ranks, memory, "float32", places, waiting_ms))
    if memory >= everything:
        assert plan.ms == pytest.approx(min(p.ms for p in possible))
    # Where memory is short, no single table that would gain by it could be whole beside those that are.
    for table, place in zip(tables, plan.tables, strict=True):
        copy = placement._place(table, True, ranks, RATES, "float32")
        if not place.whole and copy.ms < place.ms:
            assert plan.bytes_a_rank - place.bytes_a_rank + copy.bytes_a_rank > memory


def test_more_ranks_touch_more_keys_but_no_more_than_there_are():
    tail = replace(ITEMS, rows=60_000)
    assert tail.touched(1) == pytest.approx(30_000)
    assert 30_000 < tail.touched(2) < 60_000
    assert tail.touched(100) == 60_000
    assert 39 < STORES.touched(1) <= 40


def test_what_is_refused():
    with pytest.raises(InputError, match=r"memory_bytes=1,000: spread over 4 ranks.*take about 28600008 ranks"):
        plan_tables([ITEMS, STORES], ranks=4, memory_bytes=1000, rates=RATES)
    with pytest.raises(InputError, match="wire='float8'; it must be one of float32, float64, bfloat16"):
        plan_tables([ITEMS], ranks=4, memory_bytes=12 << 30, rates=RATES, wire="float8")
    with pytest.raises(InputError, match="no name twice"):
        plan_tables([ITEMS, ITEMS], ranks=4, memory_bytes=12 << 30, rates=RATES)
    with pytest.raises(InputError, match="table 'items': dim=0; it must be 1 or more"):
        replace(ITEMS, dim=0)
    with pytest.raises(InputError, match=r"distinct=100001; it must be in \[1, 100000\]"):
        replace(ITEMS, distinct=100_001)
    with pytest.raises(InputError, match="optimizer='lion'; it must be one of sgd"):
        replace(ITEMS, optimizer="lion")
    with pytest.raises(InputError, match="keys=0; it must be finite and above 0"):
        replace(RATES, keys=0)


def test_all_ranks_measure_the_same(monkeypatch):
    monkeypatch.setattr(placement, "_MEASURED_ROWS", 2_000)
    monkeypatch.setattr(placement, "_MEASURED_BYTES", 1 << 16)
    one, two = run_threads(2, Rates.measure)
    assert one == two
