"""Functions of one's own in a plan."""

import pickle
import re

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.features import Bucketize, Custom, FeaturePlan, Source, feature_function
from thinrow.jagged import Column, Jagged
from thinrow.testing import feature_functions
from thinrow.testing.feature_functions import letters, per_unit, too_few

PRICE, UNITS = Source("cand.price"), Source("cand.units")


def test_a_function_of_two_columns_feeds_other_ops():
    each = Custom((PRICE, UNITS), per_unit)
    plan = FeaturePlan({"each": each, "bucket": Bucketize(each, (1, 2))})
    rows = np.array([0, 2, 3])
    sources = {
        "cand.price": Jagged(Column(np.array([3.0, 1.0, 9.0])), rows),
        "cand.units": Jagged(Column(np.array([2, 0, 1]), np.array([True, True, False])), rows),
    }
    for again in (plan, FeaturePlan.from_dict(plan.to_dict()), pickle.loads(pickle.dumps(plan))):
        out = again.apply(sources)
        assert out["each"].values.dtype == np.float32
        assert out["each"].column.to_arrow().to_pylist() == [1.5, 1.0, None]
        assert out["bucket"].column.to_arrow().to_pylist() == [1, 1, None]


def test_a_function_of_texts_runs_on_entries(monkeypatch):
    seen = []
    plan = FeaturePlan({"n": Custom((Source("history.name"),), letters)})
    column = Column.from_arrow(pa.array(["ab", "c", "ab", None]), "string")
    original = letters.function
    monkeypatch.setattr(
        feature_functions, "letters", type(letters)(lambda t: seen.append(len(t)) or original(t), 2, "int64")
    )
    assert plan.apply({"history.name": column})["n"].to_arrow().to_pylist() == [2, 1, 2, None]
    assert seen == [2]


def test_a_context_stands_beside_every_candidate():
    plan = FeaturePlan({"each": Custom((PRICE, Source("ctx.units")), per_unit)})
    price = Jagged(Column(np.array([3.0, 1.0, 9.0])), np.array([0, 2, 3]))
    out = plan.apply({"cand.price": price, "ctx.units": Column(np.array([2, 3]))})["each"]
    assert out.values.tolist() == [1.5, 0.5, 3.0]


@pytest.mark.parametrize(
    ("function", "version", "message"),
    [
        ("thinrow.testing.feature_functions:letters", 1, "is of version 2, the plan of version 1"),
        ("thinrow.testing.feature_functions:gone", 1, "cannot be imported"),
        ("no.such.module:gone", 1, "cannot be imported"),
        ("thinrow.testing.feature_functions:undecorated", 1, "is no feature_function"),
        ("thinrow.testing.feature_functions:too_few", 1, "gave int64 of shape (1,); it must give 2 numbers"),
    ],
)
def test_what_cannot_run_is_named(function, version, message):
    plan = FeaturePlan({"x": Custom((Source("ctx.x"),), function, version)})
    with pytest.raises(InputError, match=re.escape(message)):
        plan.apply({"ctx.x": Column(np.array([1, 2]))})


def test_what_is_no_feature_function_is_refused():
    with pytest.raises(InputError, match="decorate it with one"):
        Custom((PRICE,), lambda v: v)
    with pytest.raises(InputError, match="decorate it with one"):
        Custom((PRICE,), "module:name")
    with pytest.raises(InputError, match="an event is shared by many examples"):
        Custom((PRICE, Source("history.price")), too_few)
    with pytest.raises(InputError, match="of no columns"):
        Custom((), too_few)
    with pytest.raises(InputError, match="cannot be imported; define it at a module's top"):
        feature_function(version=1, dtype="int64")(lambda v: v)
    with pytest.raises(InputError, match="dtype='text'"):
        feature_function(version=1, dtype="text")
    with pytest.raises(InputError, match="custom of columns of 2, 1 values"):
        FeaturePlan({"x": Custom((PRICE, UNITS), per_unit)}).apply(
            {"cand.price": Column(np.ones(2)), "cand.units": Column(np.ones(1))}
        )


def test_a_function_changes_none_of_its_inputs():
    plan = FeaturePlan({"x": Custom((PRICE,), "thinrow.testing.feature_functions:doubled", 1)})
    price = np.array([1.0, 2.0])
    with pytest.raises(ValueError, match="read-only"):
        plan.apply({"cand.price": Column(price)})
    assert price.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("dtype", "result", "fits"),
    [
        ("int64", [1.0, -2.0], True),
        ("int64", [1.0, 2.5], False),
        ("int64", [1.0, np.nan], False),
        ("int64", [1.0, 2.0**63], False),
        ("int8", [1, 127], True),
        ("int8", [1, 128], False),
        ("float32", [0.1, np.nan], True),
        ("float32", [1.0, np.inf], True),
        ("float32", [1.0, 1e300], False),
    ],
)
def test_results_that_the_dtype_does_not_hold_are_refused(monkeypatch, dtype, result, fits):
    made = type(letters)(lambda x: np.array(result), 1, dtype)
    monkeypatch.setattr(feature_functions, "letters", made)
    plan = FeaturePlan({"x": Custom((PRICE,), "thinrow.testing.feature_functions:letters", 1)})
    # What stands under a null is nobody's.
    under_null = plan.apply({"cand.price": Column(np.ones(2), np.array([True, False]))})["x"]
    assert under_null.to_arrow().to_pylist() == [pytest.approx(result[0]), None]
    if fits:
        out = plan.apply({"cand.price": Column(np.ones(2))})["x"].values
        np.testing.assert_array_equal(out, np.array(result, dtype))
    else:
        with pytest.raises(InputError, match=f"which is no {dtype}"):
            plan.apply({"cand.price": Column(np.ones(2))})
