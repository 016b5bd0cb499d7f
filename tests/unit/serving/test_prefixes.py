"""States of histories that are kept between requests: a hit has the bits of a miss, and both the scores of one pass."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import InputError
from thinrow.models import RankerInputs, RankerSpec, SavedRanker
from thinrow.serving.prefixes import Prefixes, bytes_of
from thinrow.serving.rows import Fetched, FetchedRows, Ints
from thinrow.serving.scoring import Model
from thinrow.testing.rankers import Requests, memory_spec
from thinrow.testing.world import EXAMPLES

KINDS = ("hstu", "mtgr", "mtgr_one_norm")
MOST = 1 << 24


class Table:
    """Rows of any key, as a hash of it; keys that end in a set are lost."""

    def __init__(self, dim: int) -> None:
        self.dim, self.asked, self.lost = dim, list[int](), False

    def fetch(self, keys: Ints) -> Fetched:
        self.asked.append(len(keys))
        scale = np.arange(1, self.dim + 1, dtype=np.float32)
        vectors = np.sin((keys % 1009).astype(np.float32)[:, None] * scale)
        lost = (keys % 5 == 0) & self.lost
        return Fetched(keys, np.where(lost[:, None], np.float32(0), vectors), lost)


def models(kind: str) -> tuple[RankerSpec, Table, Model, Model]:
    """One that keeps states, and one that does not, of the same weights."""
    spec = memory_spec(kind)
    module, _ = spec.build(seed=3)
    saved = SavedRanker(spec, None, EXAMPLES, module.eval(), None)  # type: ignore[arg-type]
    fetched, table = FetchedRows(spec.dim), Table(spec.dim)
    fetched.stand_in(module)
    return spec, table, Model(saved, "m", table, fetched, Prefixes(MOST)), Model(saved, "m", table, fetched)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from(KINDS))
def test_kept_states_give_the_scores_of_one_pass(seed: int, kind: str) -> None:
    spec, _, kept, plain = models(kind)
    inputs = Requests.random(seed).inputs(spec)
    first, again, one_pass = kept.score(inputs), kept.score(inputs), plain.score(inputs)
    np.testing.assert_allclose(first.probability, one_pass.probability, atol=1e-5)
    assert first.probability.tobytes() == again.probability.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_looks_up_candidates_alone_and_other_events_miss(kind: str) -> None:
    spec, table, model, _ = models(kind)
    requests = Requests.random(5)
    model.score(requests.inputs(spec))
    whole = table.asked.pop()
    assert model.prefixes is not None
    misses = model.prefixes.misses
    model.score(requests.inputs(spec))
    assert table.asked.pop() < whole
    assert model.prefixes.misses == misses
    # One event at another time: its pass is made anew.
    events = copy.copy(requests.histories.events)
    events.event_ts = events.event_ts.copy()
    events.event_ts[0] -= 1
    moved = dataclasses.replace(requests.histories, events=events)
    model.score(dataclasses.replace(requests, histories=moved).inputs(spec))
    assert model.prefixes.misses > misses


def test_states_of_rows_that_were_missing_are_not_kept_and_are_counted() -> None:
    spec, table, model, plain = models("hstu")
    inputs = Requests.random(8).inputs(spec)
    table.lost = True
    found = model.score(inputs)
    assert found.degraded.any()
    assert ((found.degraded > 0) >= (plain.score(inputs).degraded > 0)).all()
    table.lost = False
    whole = model.score(inputs)
    assert not whole.degraded.any()
    np.testing.assert_allclose(whole.probability, plain.score(inputs).probability, atol=1e-5)


def test_the_least_recently_used_go() -> None:
    def states(rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.zeros(rows, 1, 4), torch.zeros(rows, 1, 4))]

    each = bytes_of(states(2))
    kept = Prefixes(3 * each)
    for name in "abc":
        kept.put(name, states(2))
    assert kept.get("a") is not None
    kept.put("d", states(2))
    assert [kept.get(n) is not None for n in "abcd"] == [True, False, True, True]
    kept.put("larger than all", states(7))
    assert kept.read() == {"hits": 4, "misses": 1, "entries": 3, "bytes": 3 * each}
    with pytest.raises(InputError, match="most_bytes=0"):
        Prefixes(0)


def test_inputs_of_a_pass_hold_its_events_alone() -> None:
    spec = memory_spec("argus")
    inputs = Requests.random(4).inputs(spec)
    passes = inputs.histories.passes
    for p in range(len(passes)):
        part = inputs.of_pass(p)
        rows = passes.index[passes.offsets[p] : passes.offsets[p + 1]]
        assert torch.equal(part.event_keys, inputs.event_keys[rows])
        assert torch.equal(part.event_bags.keys, inputs.event_bags.take(rows).keys)
        assert len(part) == len(part.candidate_keys) == len(part.context_keys) == 0
    assert isinstance(inputs.without_events(), RankerInputs)
