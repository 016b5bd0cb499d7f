"""Each op on values worked out by hand."""

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.features import (
    BagOfWords,
    Bucketize,
    Clip,
    Cross,
    DictionaryMap,
    FeaturePlan,
    Fill,
    Hash,
    Log1p,
    Mod,
    MultiHash,
    Source,
    TimeDelta,
    Truncate,
)
from thinrow.features.tensors import apply_tensors
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


def test_bucketize_from_the_left_puts_a_boundary_below_itself():
    assert listed(run(Bucketize(X, (0, 10.5), side="left"), x=ints(-1, 0, 1, 10, 11, None))) == [0, 0, 1, 1, 2, None]
    assert listed(run(Bucketize(X, (0.0, 10.5), side="left"), x=ints(0, 10.5, 10.6, dtype="float64"))) == [0, 1, 2]
    with pytest.raises(InputError, match="side='middle'; it must be 'right' or 'left'"):
        Bucketize(X, (1,), side="middle")


def test_a_plan_written_before_a_field_came_is_the_same_plan():
    # Digests name stored plans: a new field that says nothing may not change them.
    assert Bucketize(X, (1,)).parameters() == {"boundaries": (1,)}
    assert Cross((X, Y)).parameters() == {"buckets": None, "seed": 0}
    assert FeaturePlan({"a": Bucketize(X, (1,)), "b": Cross((X, Y))}).fingerprint() == "83c45a558115a7bd"


def test_clip_keeps_the_dtype():
    assert listed(run(Clip(X, 0, 10), x=ints(-5, 7, 11, None))) == [0, 7, 10, None]
    out = run(Clip(X, -1.5, 1000), x=ints(-128, -1, 127, dtype="int8"))
    assert out.values.dtype == np.int8
    assert listed(out) == [-1, -1, 127]
    floats = run(Clip(X, high=0.1), x=Column(np.array([0.05, 1, np.nan], np.float32)))
    assert floats.values.dtype == np.float32
    assert np.array_equal(floats.values, np.array([0.05, 0.1, np.nan], np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [((None, None), "without bounds"), ((2, 1), "low=2 is above high=1"), ((float("nan"), 1), "low=nan")],
)
def test_clip_refuses_bad_bounds(bounds, message):
    with pytest.raises(InputError, match=message):
        Clip(X, *bounds)


def test_clip_to_nothing_is_refused():
    with pytest.raises(InputError, match="int8 between 200 and 300; it holds no such value"):
        run(Clip(X, 200, 300), x=ints(1, dtype="int8"))


def test_log1p_is_pinned():
    out = run(Log1p(X), x=ints(0, 1, 1000, None))
    assert out.values.dtype == np.float32
    assert out.values.view(np.int32).tolist() == [0, 1060205080, 1088230533, 0]
    assert listed(out)[3] is None
    ends = run(Log1p(X), x=Column(np.array([-1.0, np.inf, 1e-30]))).values
    assert ends.tolist() == [-np.inf, np.inf, np.float32(1e-30)]
    assert np.isnan(run(Log1p(X), x=Column(np.array([-1.5, np.nan]))).values).all()


def test_fill_leaves_no_null():
    out = run(Fill(X, -1), x=ints(5, None, 7))
    assert out.valid is None
    assert listed(out) == [5, -1, 7]
    column = Column(np.array([1, np.nan, 0]), np.array([True, True, False]))
    assert listed(run(Fill(X, 0.5, nan=True), x=column)) == [1.0, 0.5, 0.5]
    assert listed(run(Hash(Fill(X, "none")), x=strings("a", None))) == listed(run(Hash(X), x=strings("a", "none")))


def test_fill_of_text_keeps_entries_distinct():
    out = run(Fill(X, "b"), x=strings("a", "b", None))
    assert listed(out) == ["a", "b", "b"]
    assert out.dictionary.to_pylist() == ["a", "b"]
    assert listed(run(Fill(X, "c"), x=strings("a", None))) == ["a", "c"]


@pytest.mark.parametrize(
    ("value", "column"), [(300, ints(1, dtype="int8")), (0.5, ints(1)), ("a", ints(1)), (1, strings("a"))]
)
def test_fill_refuses_what_the_column_cannot_hold(value, column):
    with pytest.raises(InputError, match="fill of a column of"):
        run(Fill(X, value), x=column)


def test_a_dictionary_maps_texts_and_integers():
    shelves = {"shoes": 1, "hats": 2}
    assert listed(run(DictionaryMap(X, shelves, 9), x=strings("hats", "socks", None, "shoes"))) == [2, 9, None, 1]
    assert listed(run(DictionaryMap(X, {5: 50, -1: 10}), x=ints(5, -1, 4, None))) == [50, 10, 0, None]
    node = DictionaryMap(X, shelves)
    assert node == DictionaryMap(X, (("hats", 2), ("shoes", 1)))
    assert FeaturePlan.from_dict(FeaturePlan({"a": node}).to_dict()).outputs["a"].entries == node.entries


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "no type"),
        ({"a": 1, 2: 3}, "int, str"),
        ((("a", 1), ("a", 2)), "'a' is there twice"),
        ({1: 2**63}, "int64"),
    ],
)
def test_a_dictionary_must_be_one(entries, message):
    with pytest.raises(InputError, match=message):
        DictionaryMap(X, entries)


def test_a_dictionary_of_the_other_kind_is_refused():
    with pytest.raises(InputError, match="by strings; give integers as keys"):
        run(DictionaryMap(X, {"a": 1}), x=ints(1))
    with pytest.raises(InputError, match="by integers; give strings as keys"):
        run(DictionaryMap(X, {1: 1}), x=strings("a"))


@pytest.mark.parametrize("column", [strings("a", None, "b", "a"), ints(5, None, -1, 5)])
def test_a_multi_hash_is_one_hash_a_seed(column):
    out = run(MultiHash(X, 100, (3, 4, 9)), x=column)
    assert out.values.shape == (4, 3)
    for i, seed in enumerate((3, 4, 9)):
        alone = run(Hash(X, 100, seed), x=column)
        assert out.values[:, i].tolist() == alone.values.tolist()
    assert out.to_arrow().to_pylist()[1] is None


def test_nothing_follows_vectors_and_lists():
    vectors, lists = MultiHash(X, 10, (1,)), BagOfWords(X, 10)
    for node, column in ((vectors, ints(1)), (vectors, strings("a")), (lists, strings("a"))):
        for above in (Mod(node, 3), Cross((node, Source("ctx.x"))), Fill(node, 1)):
            with pytest.raises(InputError, match=r"of (vectors|lists); it takes single values"):
                run(above, x=column)


def test_words_of_a_text_in_order():
    out = run(BagOfWords(X, 1000, 4), x=strings("Red shoes, RED", None, "", "naïve", "Red shoes, RED"))
    words = run(Hash(X, 1000, 4), x=strings("red", "shoes", "naïve")).values.tolist()
    red, shoes, naive = words
    assert listed(out) == [[red, shoes, red], None, [], [naive], [red, shoes, red]]
    with pytest.raises(InputError, match="bag_of_words of a column of int64"):
        run(BagOfWords(X, 10), x=ints(1))


def test_words_of_rows_can_be_truncated():
    rows = Jagged(strings("a b", "c", "d e f"), np.array([0, 1, 3]))
    plan = FeaturePlan({"w": Truncate(BagOfWords(Source("cand.t"), 1000), 1)})
    out = plan.apply({"cand.t": rows})["w"]
    hashes = run(Hash(X, 1000), x=strings("a", "b", "d", "e", "f")).values.tolist()
    assert out.to_arrow().to_pylist() == [[hashes[:2]], [hashes[2:]]]


def test_times_between_a_candidate_and_its_request():
    published = Jagged(Column(np.array([1000, 9000, 0]), np.array([True, True, False])), np.array([0, 2, 3]))
    node = TimeDelta(Source("cand.published"), Source("ctx.request_ts"), "s")
    out = FeaturePlan({"age": node}).apply({"cand.published": published, "ctx.request_ts": ints(4500, 100)})["age"]
    assert out.column.to_arrow().to_pylist() == [3, -5, None]
    assert out.offsets.tolist() == [0, 2, 3]


def test_times_must_be_times_of_one_side():
    with pytest.raises(InputError, match="an event is shared by many examples"):
        TimeDelta(Source("history.event_ts"), Source("ctx.request_ts"))
    with pytest.raises(InputError, match="unit='week'; it must be one of ms, s, m, h, d"):
        TimeDelta(X, Y, "week")
    with pytest.raises(InputError, match="times are integers"):
        run(TimeDelta(X, Y), x=ints(1), y=strings("a"))
    with pytest.raises(InputError, match="time_delta of columns of 2, 1 values"):
        run(TimeDelta(X, Y), x=ints(1, 2), y=ints(1))


def test_every_combination_of_two_ragged_sides():
    left, right = Source("cand.a"), Source("cand.b")
    a = Jagged(ints(1, 2, 3), np.array([0, 2, 3, 3]))
    b = Jagged(strings("x", "y", "z", None), np.array([0, 2, 2, 4]))
    out = FeaturePlan({"p": Cross((left, right), product=True)}).apply({"cand.a": a, "cand.b": b})["p"]
    assert out.offsets.tolist() == [0, 4, 4, 4]
    beside = FeaturePlan({"p": Cross((X, Y))}).apply({"ctx.x": ints(1, 1, 2, 2), "ctx.y": strings("x", "y", "x", "y")})
    assert out.values.tolist() == beside["p"].values.tolist()


def test_every_combination_with_context_and_nulls():
    a = Jagged(ints(1, None), np.array([0, 2]))
    out = FeaturePlan({"p": Cross((Source("cand.a"), X), product=True)}).apply({"cand.a": a, "ctx.x": ints(5)})["p"]
    assert out.column.valid.tolist() == [True, False]
    assert out.values[0] == run(Cross((X, Y)), x=ints(1), y=ints(5)).values[0]


def test_too_many_combinations_are_refused():
    wide = Jagged(Column(np.zeros(1 << 16, np.int64)), np.array([0, 1 << 16]))
    with pytest.raises(InputError, match="gives 4294967296 values; 2147483648 at most: truncate the sides first"):
        FeaturePlan({"p": Cross((Source("cand.a"), Source("cand.b")), product=True)}).apply(
            {"cand.a": wide, "cand.b": wide}
        )


def test_equal_ops_are_written_alike():
    x = Source("cand.x")
    for one, other in (
        (Fill(x, 0, nan=1), Fill(x, 0, nan=True)),
        (Hash(x, np.int64(10), True), Hash(x, 10, 1)),
        (Cross((x, x), product=1), Cross((x, x), product=True)),
        (Truncate(x, np.int32(2)), Truncate(x, 2)),
        (MultiHash(x, True, (True,)), MultiHash(x, 1, (1,))),
        (DictionaryMap(x, {1: True}, False), DictionaryMap(x, {1: 1}, 0)),
        (Clip(x, low=True), Clip(x, low=1.0)),
    ):
        assert one == other
        assert repr(one) == repr(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Hash(x, buckets=10.0),
        lambda x: Hash(x, seed=1.0),
        lambda x: Mod(x, 3.0),
        lambda x: Mod(x, None),
        lambda x: Truncate(x, 2.0),
        lambda x: MultiHash(x, 10, ("a",)),
        lambda x: MultiHash(x, None, (1,)),
        lambda x: DictionaryMap(x, {1: 2.7}),
        lambda x: DictionaryMap(x, {1: 2}, 0.5),
        lambda x: Bucketize(x, (10**400,)),
        lambda x: Bucketize(x, ("a",)),
        lambda x: Clip(x, high=10**400),
        lambda x: Fill(x, None),
        lambda x: Cross((x, "cand.y")),
        lambda x: FeaturePlan({"o": Hash("cand.y")}),
        lambda x: TimeDelta(x, x, ["s"]),
    ],
)
def test_parameters_of_another_type_are_refused(make):
    with pytest.raises(InputError, match=r"integer|finite|give a Source|one of ms"):
        make(Source("cand.x"))


def test_columns_whose_numbers_an_op_would_misread_are_refused():
    x = Source("cand.x")
    for op in (Bucketize(x, (1,)), Log1p(x), DictionaryMap(x, {-1: 2}), Clip(x, high=10)):
        with pytest.raises(InputError, match=f"{op.op} of a column of uint64"):
            FeaturePlan({"o": op}).apply({"cand.x": Column(np.array([2**64 - 1], np.uint64))})
    for dtype in (np.bool_, np.uint8, np.float16):
        with pytest.raises(InputError, match="it takes signed integers, float32 and float64"):
            FeaturePlan({"o": Clip(x, low=0)}).apply({"cand.x": Column(np.array([1], dtype))})
    flags = Column(np.array([True, False]), np.array([True, False]))
    assert FeaturePlan({"o": Fill(x, 1)}).apply({"cand.x": flags})["o"].values.tolist() == [True, True]
    with pytest.raises(InputError, match="fill of a column of bool with 2"):
        FeaturePlan({"o": Fill(x, 2)}).apply({"cand.x": flags})


def test_tensors_are_refused_where_columns_are():
    torch = pytest.importorskip("torch")
    x = Source("cand.x")
    vectors, whole = MultiHash(x, 10, (1, 2)), torch.tensor([5, 6])
    for plan, tensor, message in (
        ({"o": TimeDelta(x, x)}, torch.tensor([1.5, 2.5]), "times are integers"),
        ({"o": Fill(vectors, 1)}, whole, "fill of vectors"),
        ({"o": Hash(vectors)}, whole, "hash of vectors"),
        ({"o": TimeDelta(x, vectors)}, whole, "time_delta of vectors"),
        ({"o": Hash(x)}, torch.tensor([1.5]).bfloat16(), "convert it"),
    ):
        with pytest.raises(InputError, match=message):
            apply_tensors(FeaturePlan(plan), {"cand.x": tensor})
