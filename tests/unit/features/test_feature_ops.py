"""Each op on values worked out by hand."""

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.features import Bucketize, Cross, FeaturePlan, Hash, Mod, Source, Truncate
from thinrow.jagged import Column, Jagged

X, Y = Source("ctx.x"), Source("ctx.y")


def strings(*values):
    return Column.from_arrow(pa.array(values, pa.string()), "string")


def ints(*values, dtype="int64"):
    return Column.from_arrow(pa.array(values), dtype)


def run(node, **sources):
    return FeaturePlan({"out": node}).apply({f"ctx.{name}": c for name, c in sources.items()})["out"]


def listed(column):
    return column.to_arrow().to_pylist()


@pytest.mark.parametrize("dtype", ["int8", "int64", "float32", "float64"])
def test_bucketize_counts_the_boundaries_at_or_below(dtype):
    out = run(Bucketize(X, (0, 10, 100)), x=ints(-5, 0, 9, 10, None, 127, dtype=dtype))
    assert listed(out) == [0, 1, 1, 2, None, 3]
    assert out.values.dtype == np.int32


def test_bucketize_of_integers_is_exact_at_fractions_and_far_boundaries():
    big = 2**53 + 1
    assert listed(run(Bucketize(X, (0.5, big)), x=ints(0, 1, big - 1, big))) == [0, 1, 1, 2]
    assert listed(run(Bucketize(X, (-1e300, 1e300)), x=ints(-(2**63), 2**63 - 1))) == [1, 1]


def test_bucketize_puts_nan_above_all():
    assert listed(run(Bucketize(X, (0.0, 1.0)), x=Column(np.array([np.nan, np.inf, -np.inf])))) == [2, 2, 0]


@pytest.mark.parametrize("boundaries", [(), (1, 1), (2, 1), (float("nan"),), (0, float("inf"))])
def test_bucketize_refuses_bad_boundaries(boundaries):
    with pytest.raises(InputError, match="bucketize"):
        Bucketize(X, boundaries)


def test_mod_is_unsigned():
    assert listed(run(Mod(X, 10), x=ints(7, 25, -1, None))) == [7, 5, 5, None]
    assert listed(run(Mod(X, 10), x=ints(-1, dtype="int8"))) == [5]


def test_hash_is_pinned_and_five_is_not_the_string_five():
    # The named hash may never change: models are trained on its buckets.
    assert listed(run(Hash(X), x=ints(5, None, 0, -1))) == [
        -5233069316186871543,
        None,
        5197578548964807871,
        -954060565643939712,
    ]
    assert listed(run(Hash(X), x=strings("5", None, "", "a long string of bytes"))) == [
        -8733482803633890400,
        None,
        5662737076530584639,
        7016268413688697919,
    ]


def test_hash_ignores_the_width_and_follows_the_seed():
    narrow, wide = run(Hash(X), x=ints(5, -3, dtype="int8")), run(Hash(X), x=ints(5, -3))
    assert listed(narrow) == listed(wide)
    assert listed(run(Hash(X, seed=1), x=ints(5))) != listed(run(Hash(X), x=ints(5)))


def test_hash_buckets_are_unsigned_remainders():
    column = ints(*range(1000))
    whole, bucket = run(Hash(X), x=column), run(Hash(X, buckets=7), x=column)
    assert listed(bucket) == [h % 2**64 % 7 for h in listed(whole)]
    assert min(np.bincount(bucket.values, minlength=7)) > 100


def test_bytes_and_strings_of_the_same_bytes_hash_alike():
    raw = Column.from_arrow(pa.array([b"5", b"abc"]), "binary")
    assert listed(run(Hash(X), x=raw)) == listed(run(Hash(X), x=strings("5", "abc")))


@pytest.mark.parametrize("node", [Mod(X, 3), Hash(X)])
def test_integer_ops_refuse_floats(node):
    with pytest.raises(InputError, match=r"of a column of float64; it takes integers"):
        run(node, x=Column(np.array([1.5])))


def test_number_ops_refuse_strings():
    with pytest.raises(InputError, match="mod of a column of string"):
        run(Mod(X, 3), x=strings("a"))
    with pytest.raises(InputError, match="bucketize of a column of string"):
        run(Bucketize(X, (1,)), x=strings("a"))


def test_parameters_out_of_bounds_are_named():
    for make in (lambda: Mod(X, 0), lambda: Hash(X, buckets=0), lambda: Cross((X, Y), buckets=2**63)):
        with pytest.raises(InputError, match=r"must be in \[1, 2\^63\)"):
            make()
    with pytest.raises(InputError, match="seed=-1"):
        Hash(X, seed=-1)
    with pytest.raises(InputError, match="n=-1"):
        Truncate(X, -1)
    with pytest.raises(InputError, match="give two or more"):
        Cross((X,))
    with pytest.raises(InputError, match=r"source 'x'; write history\.NAME"):
        Source("x")


def test_truncate_keeps_the_newest():
    rows = Jagged(ints(1, 2, 3, 4), np.array([0, 3, 3, 4]))
    for keep, expected in (("last", [[2, 3], [], [4]]), ("first", [[1, 2], [], [4]])):
        out = FeaturePlan({"out": Truncate(Source("cand.c"), 2, keep)}).apply({"cand.c": rows})["out"]
        assert out.to_arrow().to_pylist() == expected


def test_truncate_keeps_strings_and_their_nulls():
    rows = Jagged(strings("a", "b", None, "c"), np.array([0, 3, 4]))
    out = FeaturePlan({"out": Truncate(Source("cand.c"), 2)}).apply({"cand.c": rows})["out"]
    assert out.to_arrow().to_pylist() == [["b", None], ["c"]]


def test_truncate_of_shared_events_names_the_remedy():
    with pytest.raises(InputError, match=r"set Projection\(max_len=2\)"):
        FeaturePlan({"out": Truncate(Source("history.h"), 2)}).apply({"history.h": ints(1, 2)})


def test_cross_depends_on_order_and_is_null_where_a_part_is():
    out = run(Cross((X, Y)), x=ints(1, 2, None), y=ints(2, 1, 1))
    assert out.valid.tolist() == [True, True, False]
    assert out.values[0] != out.values[1]
    swapped = run(Cross((Y, X)), x=ints(1, 2, None), y=ints(2, 1, 1))
    assert out.values[0] == swapped.values[1]
    assert run(Cross((X, Y), buckets=5), x=ints(1), y=ints(2)).values[0] == int(out.values[0]) % 2**64 % 5


def test_cross_is_no_hash_of_its_parts():
    """(5, "5"), (5, 5) and ("5", 5) are three things."""
    parts = [(ints(5), strings("5")), (ints(5), ints(5)), (strings("5"), ints(5))]
    assert len({int(run(Cross((X, Y)), x=x, y=y).values[0]) for x, y in parts}) == 3


def test_cross_spreads_context_over_candidates():
    item, store = Source("cand.item"), Source("ctx.store")
    plan = FeaturePlan({"pair": Cross((item, store))})
    items = Jagged(ints(1, 2, 1), np.array([0, 2, 2, 3]))
    pair = plan.apply({"cand.item": items, "ctx.store": ints(7, 8, 7)})["pair"]
    assert pair.lengths.tolist() == [2, 0, 1]
    assert pair.values[0] == pair.values[2] != pair.values[1]


def test_cross_refuses_what_cannot_stand_side_by_side():
    with pytest.raises(InputError, match="cand and history columns"):
        Cross((Source("cand.a"), Source("history.b")))
    with pytest.raises(InputError, match="ctx and history columns"):
        Cross((Source("ctx.a"), Source("history.b")))
    plan = FeaturePlan({"pair": Cross((Source("cand.a"), Source("cand.b")))})
    a, b = (Jagged(ints(1, 2), np.array(o)) for o in ([0, 2, 2], [0, 1, 2]))
    with pytest.raises(InputError, match="rows differ in length"):
        plan.apply({"cand.a": a, "cand.b": b})
    with pytest.raises(InputError, match=r"of 2, 3 values"):
        run(Cross((X, Y)), x=ints(1, 2), y=ints(1, 2, 3))
