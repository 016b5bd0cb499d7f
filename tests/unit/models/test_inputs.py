"""Inputs of a ranker: what is a key, what a number, and digests that see every bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.features import FeaturePlan, Hash, Source
from thinrow.jagged import Column, Jagged
from thinrow.models import InputSpec, RankerInputs, RankerSpec
from thinrow.testing.rankers import CONFIGS, Requests, memory_spec


def test_outputs_go_where_their_domain_says() -> None:
    spec = memory_spec("hstu")
    requests = Requests.random(0)
    inputs = requests.inputs(spec)
    assert inputs.event_keys.shape == (len(np.unique(requests.histories.positions()[0])), 2)
    assert inputs.candidate_keys.shape[1] == 2
    assert inputs.candidate_numbers[:, 0].tolist() == requests.candidates["price"].values.tolist()
    assert inputs.context_keys.shape == (len(requests.histories), 1)
    assert inputs.example_of.tolist() == np.repeat(np.arange(12), requests.candidates["item"].lengths).tolist()


def test_a_null_is_key_0() -> None:
    spec = InputSpec.of(FeaturePlan({"c": Hash(Source("cand.item"))}))
    requests = Requests.random(0)
    item = requests.candidates["item"]
    valid = np.arange(len(item.values)) != 1
    rows = Jagged(Column(item.values, valid), item.offsets)
    inputs = RankerInputs(spec, requests.histories, {"c": rows}, requests.request_ts)
    assert inputs.candidate_keys[1, 0] == 0
    assert inputs.candidate_keys[0, 0] == item.values[0]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (Column(np.zeros(3, np.float32)), "'c' is float32, not an integer key"),
        (Column(np.zeros(3, np.int32), None, pa.array(["a"])), "'c' is text"),
    ],
)
def test_what_is_no_key_is_refused(column: Column, message: str) -> None:
    spec = InputSpec.of(FeaturePlan({"c": Source("cand.item")}))
    requests = Requests.random(0, n_requests=1)
    with pytest.raises(InputError, match=message):
        RankerInputs(spec, requests.histories, {"c": Jagged(column, np.array([0, 3]))}, requests.request_ts)


def test_numbers_must_be_outputs_and_candidates_are_needed() -> None:
    plan = FeaturePlan({"c": Source("cand.item")})
    with pytest.raises(InputError, match="numbers='d' is no output"):
        InputSpec.of(plan, ("d",))
    with pytest.raises(InputError, match="beside candidates"):
        InputSpec.of(FeaturePlan({"x": Source("ctx.city")}))


def test_the_fingerprint_of_a_request_changes_with_all_that_it_reads_and_with_nothing_else() -> None:
    spec = memory_spec("dlrm")
    requests = Requests.random(4, n_requests=10, late=0.3)
    before = requests.inputs(spec).fingerprints()
    assert before == requests.inputs(spec, share=False).fingerprints()
    index, offsets = requests.histories.positions()
    events = requests.histories.events
    for e in range(len(events)):
        columns = {**events.columns, "brand": _bumped(events.columns["brand"], e)}
        moved = replace(requests.histories, events=events.with_columns(columns))
        after = replace(requests, histories=moved).inputs(spec).fingerprints()
        for x in range(10):
            assert (before[x] != after[x]) == (e in index[offsets[x] : offsets[x + 1]])
    price = requests.candidates["price"]
    for i in range(len(price.values)):
        changed = {**requests.candidates, "price": Jagged(_bumped(price.column, i), price.offsets)}
        after = replace(requests, candidates=changed).inputs(spec).fingerprints()
        row = int(np.searchsorted(price.offsets, i, side="right")) - 1
        assert [x for x in range(10) if before[x] != after[x]] == [row]
    later = replace(requests, request_ts=requests.request_ts + (np.arange(10) == 3)).inputs(spec).fingerprints()
    assert [x for x in range(10) if before[x] != later[x]] == [3]


@pytest.mark.parametrize("name", ["hstu", "argus"])
def test_chosen_candidates_are_read_as_if_they_alone_had_been_asked_for(name: str) -> None:
    spec = memory_spec(name)
    requests = Requests.random(6)
    offsets = requests.candidates["item"].offsets
    rows = np.flatnonzero(np.arange(offsets[-1]) % 3 != 1)[::-1]
    rows = rows[np.argsort(np.searchsorted(offsets, rows, side="right"), kind="stable")]
    kept = np.searchsorted(np.sort(rows), offsets)
    alone = {n: Jagged(j.column.take(rows), kept) for n, j in requests.candidates.items()}
    whole = requests.inputs(spec)
    assert len(whole.example_of) == offsets[-1]
    chosen, asked = whole.with_candidates(rows, kept), replace(requests, candidates=alone).inputs(spec)
    assert chosen.fingerprints() == asked.fingerprints() != whole.fingerprints()
    assert chosen.example_of.tolist() == asked.example_of.tolist()


def test_a_specification_survives_json() -> None:
    for name in CONFIGS:
        spec = memory_spec(name)
        again = RankerSpec.from_dict(spec.to_dict())
        assert again.to_dict() == spec.to_dict()
        assert again.model == spec.model
    with pytest.raises(InputError, match="no model 'rnn'"):
        RankerSpec.from_dict({**spec.to_dict(), "model": {"name": "rnn"}})
    with pytest.raises(InputError, match="not a ranker's specification"):
        RankerSpec.from_dict({"model": {"name": "dlrm", "hiden": 3}})


def _bumped(column: Column, i: int) -> Column:
    values = column.values.copy()
    values[i] += 1
    return Column(values)
