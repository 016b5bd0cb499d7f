"""RowFilter: bounds, shares of users, and one spelling of each filter."""

import json
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.core.units import DAY_MS
from thinrow.dpp import RowFilter
from thinrow.dpp.row_filter import in_share
from thinrow.features import FeaturePlan, Hash, Source
from thinrow.jagged import Column

IDS = pa.array(range(-5000, 5000))
NAMES = pa.array([f"user {i} é" for i in range(10_000)], pa.large_string())


def table(users, times):
    return pa.table({"user_id": users, "request_ts": pa.array(times, pa.int64())})


def test_the_worked_example():
    rows = RowFilter(since_ms=3 * DAY_MS, until_ms=5 * DAY_MS, user_share=0.5, user_seed=1)
    times = np.array([3 * DAY_MS - 1, 3 * DAY_MS, 5 * DAY_MS - 1, 5 * DAY_MS])
    (inside,) = in_share(pa.array([7]), 0.5, 1)
    assert rows.keep(table([7] * 4, times)).tolist() == [False, inside, inside, False]
    without = RowFilter(since_ms=3 * DAY_MS, until_ms=5 * DAY_MS)
    assert without.keep(table([7] * 4, times)).tolist() == [False, True, True, False]
    assert RowFilter(since_ms=3 * DAY_MS).keep(table([7] * 4, times)).tolist() == [False, True, True, True]
    assert RowFilter(until_ms=3 * DAY_MS).keep(table([7] * 4, times)).tolist() == [True, False, False, False]


def test_only_columns_that_are_needed_are_read():
    assert RowFilter().columns == ()
    assert RowFilter(user_share=1.0).columns == ()
    assert RowFilter(until_ms=1).columns == ("request_ts",)
    assert RowFilter(user_share=0.1).columns == ("user_id",)
    assert RowFilter(since_ms=1, user_share=0.1).columns == ("user_id", "request_ts")


@pytest.mark.parametrize("users", [IDS, NAMES], ids=["int64", "string"])
def test_shares_are_as_large_as_asked_and_nested(users):
    kept = {share: in_share(users, share, 5) for share in (0.01, 0.1, 0.5, 0.9, 1.0)}
    for share, mask in kept.items():
        # Five standard deviations of a binomial count.
        assert abs(mask.mean() - share) <= 5 * (share * (1 - share) / len(users)) ** 0.5
    masks = list(kept.values())
    for smaller, larger in pairwise(masks):
        assert not (smaller & ~larger).any()
    other = in_share(users, 0.5, 6)
    assert 0.2 < (other & kept[0.5]).mean() < 0.3


@pytest.mark.parametrize("users", [IDS, NAMES], ids=["int64", "string"])
def test_a_share_is_a_function_of_id_and_seed_alone(users):
    whole = in_share(users, 0.3, 9)
    assert in_share(users.slice(17, 100), 0.3, 9).tolist() == whole[17:117].tolist()
    order = np.random.default_rng(0).permutation(len(users))
    assert in_share(users.take(pa.array(order)), 0.3, 9).tolist() == whole[order].tolist()
    chunked = pa.chunked_array([users.slice(0, 10), users.slice(10, 0), users.slice(10)])
    rows = RowFilter(user_share=0.3, user_seed=9)
    assert rows.keep(pa.table({"user_id": chunked})).tolist() == whole.tolist()
    assert rows.keep(pa.table({"user_id": chunked.slice(0, 0)})).tolist() == []


def test_the_hash_is_the_named_one():
    # Pinned: another hash would give resumed runs other users.
    assert np.flatnonzero(in_share(pa.array(range(40)), 0.25, 0)).tolist() == [
        2,
        4,
        7,
        8,
        10,
        14,
        15,
        17,
        19,
        27,
        36,
        37,
    ]
    assert np.flatnonzero(in_share(pa.array([f"u{i}" for i in range(40)]), 0.25, 0)).tolist() == [
        0,
        7,
        15,
        21,
        25,
        26,
        27,
        32,
        34,
        38,
    ]
    hashed = FeaturePlan({"h": Hash(Source("ctx.u"), seed=3)}).apply({"ctx.u": Column(np.arange(40))})["h"].values
    below = hashed.view(np.uint64) < np.uint64(1 << 62)
    assert in_share(pa.array(range(40)), 0.25, 3).tolist() == below.tolist()


def test_equal_filters_have_one_spelling_that_survives_json():
    assert RowFilter(user_share=1) == RowFilter(user_seed=8) == RowFilter()
    rows = RowFilter(np.int64(5), np.int32(9), np.float64(0.1), np.int64(7))
    assert RowFilter(**json.loads(json.dumps(asdict(rows)))) == rows == RowFilter(5, 9, 0.1, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"user_share": 0}, "user_share=0; it must be above 0 and at most 1"),
        ({"user_share": 1.01}, r"user_share=1\.01"),
        ({"user_share": float("nan")}, "user_share=nan"),
        ({"user_seed": -1}, r"user_seed=-1; it must be in \[0, 2\^63\)"),
        ({"user_seed": 1 << 63}, "user_seed=9223372036854775808"),
        ({"since_ms": 5, "until_ms": 4}, "since_ms=5 is after until_ms=4; exchange them"),
        ({"since_ms": 0.5}, r"since_ms=0\.5; give whole milliseconds"),
        ({"until_ms": "2017-01-01"}, "until_ms='2017-01-01'; give whole milliseconds"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(InputError, match=message):
        RowFilter(**fields)
