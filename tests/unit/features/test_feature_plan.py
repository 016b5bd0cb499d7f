"""Plans: steps computed once, dictionaries, and the round trip as data."""

import json

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.features import Bucketize, Cross, FeaturePlan, Hash, Mod, Source, Truncate
from thinrow.features.fused import Pass
from thinrow.jagged import Column, Jagged
from thinrow.kernels.chain import Op

#: As written data.
X = {"op": "source", "inputs": [], "name": "cand.x"}
DEPARTMENT, PRODUCT = Source("history.department"), Source("history.product_id")

PLAN = FeaturePlan(
    {
        "product": Hash(PRODUCT, buckets=1000),
        "small": Mod(Hash(PRODUCT), 8),
        "department": Hash(DEPARTMENT, buckets=50),
        "pair": Cross((PRODUCT, DEPARTMENT), buckets=97, seed=3),
        "price": Bucketize(Source("cand.price"), (0.5, 1, 2.5)),
        "recent": Truncate(Source("cand.price"), 1),
        "raw": Source("ctx.store"),
    }
)


def sources():
    return {
        "history.product_id": Column(np.array([3, 1, 3, 2])),
        "history.department": Column.from_arrow(pa.array(["a", None, "b", "a"]), "string"),
        "cand.price": Jagged(Column(np.array([0.1, 1.0, 3.0])), np.array([0, 2, 3])),
        "ctx.store": Column(np.array([7, 8])),
    }


@pytest.fixture
def calls(monkeypatch):
    """What was computed: of each pass over numbers the ops and the length, and the number of texts hashed."""
    made = []
    run, texts = Pass.run, Hash.texts

    def counted_run(self, values):
        made.append(([Op(o).name for o in self.program.op.tolist()], len(values)))
        return run(self, values)

    def counted_texts(self, entries):
        made.append((self.buckets, len(entries)))
        return texts(self, entries)

    monkeypatch.setattr(Pass, "run", counted_run)
    monkeypatch.setattr(Hash, "texts", counted_texts)
    return made


def test_common_steps_run_once_and_a_column_is_read_once(calls):
    PLAN.apply(sources())
    # One hash of the product serves "product", "small" and "pair"; DEPARTMENT has two distinct entries for four events.
    assert sorted(calls, key=str) == sorted(
        [(["HASH", "MOD", "MOD"], 4), (50, 2), (None, 2), (["BUCKETIZE_FLOATS"], 3)], key=str
    )


def test_only_referenced_entries_are_computed(calls):
    column = Column(np.array([4, 4, 0, 0], np.int32), np.array([True, True, True, False]), pa.array(list("abcdefgh")))
    out = FeaturePlan({"h": Hash(DEPARTMENT)}).apply({"history.department": column})["h"]
    assert calls == [(None, 2)]
    alone = FeaturePlan({"h": Hash(DEPARTMENT)}).apply(
        {"history.department": Column.from_arrow(pa.array(["e", "a"]), "string")}
    )
    assert out.values.tolist() == [*alone["h"].values[[0, 0, 1]].tolist(), 0]


def test_dictionaries_of_nothing_and_of_nulls_alone():
    plan = FeaturePlan({"h": Mod(Hash(DEPARTMENT), 3)})
    for array in (pa.array([], pa.string()), pa.array([None, None], pa.string())):
        out = plan.apply({"history.department": Column.from_arrow(array, "string")})["h"]
        assert out.to_arrow().to_pylist() == array.to_pylist()


def test_a_sliced_dictionary_hashes_its_own_entries():
    whole = pa.array(["x", "yy", "zzz", ""])
    plan = FeaturePlan({"h": Hash(DEPARTMENT)})
    sliced = plan.apply({"history.department": Column(np.array([0, 1], np.int32), None, whole.slice(1, 2))})["h"]
    plain = plan.apply({"history.department": Column.from_arrow(pa.array(["yy", "zzz"]), "string")})["h"]
    assert sliced.values.tolist() == plain.values.tolist()


def test_a_dictionary_gives_what_rows_give():
    """The entry-level path equals hashing each row by itself."""
    values = ["a", "b", "a", "ccc", "b", "ninechars"]
    column = Column.from_arrow(pa.array(values), "string")
    together = FeaturePlan({"h": Hash(DEPARTMENT, buckets=11)}).apply({"history.department": column})["h"].values
    alone = [
        FeaturePlan({"h": Hash(DEPARTMENT, buckets=11)})
        .apply({"history.department": Column.from_arrow(pa.array([v]), "string")})["h"]
        .values[0]
        for v in values
    ]
    assert together.tolist() == alone


def test_outputs_know_where_they_stand():
    assert {name: PLAN.domain(name) for name in PLAN.outputs} == {
        "product": "history",
        "small": "history",
        "department": "history",
        "pair": "history",
        "price": "cand",
        "recent": "cand",
        "raw": "ctx",
    }
    assert PLAN.history_columns == ("department", "product_id")
    assert PLAN.sources == ("cand.price", "ctx.store", "history.department", "history.product_id")


def test_plans_are_data():
    data = json.loads(json.dumps(PLAN.to_dict()))
    again = FeaturePlan.from_dict(data)
    assert again == PLAN
    assert hash(again) == hash(PLAN)
    assert again.fingerprint() == PLAN.fingerprint()
    first, second = PLAN.apply(sources()), again.apply(sources())
    for name, value in first.items():
        assert value.to_arrow().equals(second[name].to_arrow())
    steps = [(s["op"], tuple(s["inputs"]), s.get("name")) for s in data["steps"]]
    assert steps.count(("source", (), "history.product_id")) == 1


def test_equal_ops_have_equal_digests_however_their_numbers_are_spelt():
    one, two = (Bucketize(Source("ctx.x"), b) for b in ((1, 2), (np.float64(1.0), 2.0)))
    assert one.digest() == two.digest()
    assert Mod(PRODUCT, np.int64(5)).digest() == Mod(PRODUCT, 5).digest()
    assert FeaturePlan({"a": one}).to_dict() == FeaturePlan({"a": two}).to_dict()
    assert Hash(PRODUCT, seed=1).digest() != Hash(PRODUCT, seed=2).digest()


def test_a_missing_source_is_named():
    with pytest.raises(InputError, match=r"reads 'ctx\.store', which is not there; there are cand\.price"):
        PLAN.apply({n: c for n, c in sources().items() if n != "ctx.store"})


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"format": 1, "steps": [{"op": "hash", "inputs": [5]}], "outputs": {}},
        {"format": 1, "steps": [{"op": "hash", "inputs": []}], "outputs": {}},
        {"format": 1, "steps": [{"op": "hash", "inputs": [], "salt": 1}], "outputs": {}},
        {"format": 1, "steps": [], "outputs": {"a": 0}},
        {"format": 2, "steps": [], "outputs": {}},
        {"format": 1, "steps": [{"op": "exec", "inputs": []}], "outputs": {}},
        {"format": 1, "steps": [X, {"op": "mod", "inputs": [-1], "divisor": 3}], "outputs": {"a": 1}},
        {"format": 1, "steps": [X], "outputs": {"a": -1}},
        {"format": 1, "steps": [X, {"op": "dictionary_map", "inputs": [0], "entries": [[1]]}], "outputs": {"a": 1}},
    ],
)
def test_what_is_no_plan_is_refused(data):
    with pytest.raises(InputError, match=r"feature plan|no feature op 'exec'"):
        FeaturePlan.from_dict(data)


def test_a_chain_that_is_too_long_is_refused():
    node = Source("cand.x")
    for k in range(3000):
        node = Mod(node, 1000 + k)
    with pytest.raises(InputError, match="chain of hundreds of ops"):
        FeaturePlan({"a": node})


def test_an_output_must_be_a_node():
    with pytest.raises(InputError, match="output 'a' is 5"):
        FeaturePlan({"a": 5})
