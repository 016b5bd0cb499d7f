"""Requests and candidates against the raw files, by plain loops."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from thinrow.cli.demo.data import DemoData
from thinrow.cli.demo.promotions import LOCATIONS
from thinrow.cli.demo.retail import MIN_CANDIDATES, MIN_OTHERS, data_folder, load_retail
from thinrow.core.errors import InputError
from thinrow.core.units import DAY_MS

WEEKS, HOUSEHOLDS = 9, 30


@pytest.fixture(scope="module")
def data() -> DemoData:
    return load_retail(weeks=WEEKS, households=HOUSEHOLDS, seed=3)


@pytest.fixture(scope="module")
def promoted() -> dict[tuple[int, int], dict[int, tuple[str, str]]]:
    """(store, week) -> product -> highest (display, mailer)."""
    table = pq.read_table(data_folder() / "promotions.parquet", filters=pc.field("week").isin([8, 9]))
    result: dict[tuple[int, int], dict[int, tuple[str, str]]] = {}
    names = ("store_id", "week", "product_id", "display_location", "mailer_location")
    for store, week, product, display, mailer in zip(*(table[n].to_pylist() for n in names), strict=True):
        shown = result.setdefault((store, week), {})
        shown[product] = max(shown.get(product, ("", "")), (display, mailer))
    return result


def test_events_are_the_purchases_in_time_order(data: DemoData) -> None:
    raw = pq.read_table(data_folder() / "transactions.parquet", filters=pc.field("week") <= WEEKS)
    first = sorted(set(raw["household_id"].to_pylist()))[:HOUSEHOLDS]
    raw = raw.filter(pc.field("household_id").isin(first))
    assert len(data) == raw.num_rows
    assert np.all(np.diff(data.event_ts) >= 0)
    table = data.to_arrow()
    order = [("transaction_timestamp", "ascending"), ("basket_id", "ascending"), ("product_id", "ascending")]
    ours, theirs = table.sort_by(order), raw.sort_by(order)
    for name in ("household_id", "store_id", "basket_id", "product_id", "week"):
        assert ours[name].to_pylist() == theirs[name].to_pylist()
    products = pq.read_table(data_folder() / "products.parquet")
    department = dict(zip(products["product_id"].to_pylist(), products["department"].to_pylist(), strict=True))
    assert table["department"].to_pylist() == [department.get(p) for p in table["product_id"].to_pylist()]


def test_a_request_is_a_basket_that_bought_a_promoted_product(
    data: DemoData, promoted: dict[tuple[int, int], dict[int, tuple[str, str]]]
) -> None:
    table = data.to_arrow()
    bought: dict[int, set[int]] = {}
    names = ("basket_id", "store_id", "week", "product_id")
    for basket, store, week, product in zip(*(table[n].to_pylist() for n in names), strict=True):
        if product in promoted.get((store, week), {}):
            bought.setdefault(basket, set()).add(product)
    r = data.requests
    assert len(r) > 20
    assert sorted(r.request_id.tolist()) == sorted(bought)
    assert np.array_equal(data.event_ts[data.bundle_offsets[r.bundle]], r.request_ts)
    products, labels = r.candidates["product_id"], r.labels["bought"]
    display, mailer = r.candidates["display_location"], r.candidates["mailer_location"]
    for i, request in enumerate(r.request_id.tolist()):
        row = products.row(i).tolist()
        shown = promoted[int(r.context["store_id"].values[i]), int(r.context["week"].values[i])]
        assert row == sorted(set(row))
        assert {p for p, y in zip(row, labels.row(i), strict=True) if y} == bought[request]
        assert len(row) == max(MIN_CANDIDATES, len(bought[request]) + MIN_OTHERS)
        places = [(LOCATIONS[d], LOCATIONS[m]) for d, m in zip(display.row(i), mailer.row(i), strict=True)]
        assert places == [shown[p] for p in row]


def test_a_sample_depends_on_seed_and_request_alone(data: DemoData) -> None:
    fewer = load_retail(weeks=WEEKS, households=10, seed=3).requests
    rows = np.flatnonzero(np.isin(data.requests.request_id, fewer.request_id))
    for name, jagged in fewer.candidates.items():
        assert data.requests.candidates[name].take(rows).column.to_arrow().equals(jagged.column.to_arrow())
    other = load_retail(weeks=WEEKS, households=10, seed=4).requests
    assert not np.array_equal(other.candidates["product_id"].values, fewer.candidates["product_id"].values)


def test_no_requests_before_the_first_week() -> None:
    assert len(load_retail(weeks=2, households=3).requests) == 0


def test_limits_are_checked() -> None:
    with pytest.raises(InputError, match="weeks=0; it must be 1 or more"):
        load_retail(weeks=0)


def test_the_last_requests_are_held_out(data: DemoData) -> None:
    assert data.cut_ms % DAY_MS == 0
    assert np.array_equal(data.held_out, data.requests.request_ts >= data.cut_ms)
    assert 0.1 < data.held_out.mean() < 0.5


def test_of_a_year_the_last_six_weeks_are_held_out() -> None:
    data = load_retail(households=12)
    week = data.columns["week"].values
    assert np.array_equal(np.unique(week[data.event_ts >= data.cut_ms + DAY_MS]), np.arange(48, 54))
    assert np.all(week[data.event_ts < data.cut_ms] <= 47)
    assert 0.08 < data.held_out.mean() < 0.2
