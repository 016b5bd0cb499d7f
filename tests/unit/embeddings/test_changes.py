"""Changes through long runs: many evictions, moves and returns between two marks, uses that no gradient follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from thinrow.core.errors import InputError
from thinrow.embeddings import Budget, DynamicTable, SparseAdagrad, SparseSGD
from thinrow.embeddings.states import join, pick, replay


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[n].tobytes() == right[n].tobytes() for n in right)


@pytest.mark.parametrize("evict", ["lru", "lfu"])
@pytest.mark.parametrize("seed", range(6))
def test_a_delta_leads_from_the_mark_to_now(evict: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = DynamicTable(2, block_rows=8, budget=Budget(max_rows=40, evict=evict, keep=0.6))
    optimizer = SparseAdagrad(table, lr=0.1)
    often, seldom = table.track(), table.track()
    marked = {id(often): table.state(), id(seldom): table.state()}
    lost = 0
    for step in range(120):
        keys = np.minimum(rng.geometric(0.06, 12), 90) + step // 3
        rows = table.rows(keys, insert=True)
        if rng.random() < 0.5:
            table.add_gradient(rows, np.ones((12, 2), np.float32))
        if rng.random() < 0.8:
            optimizer.step()
        for changes in (often, seldom):
            before, now = marked[id(changes)], table.state()
            delta = table.delta(changes)
            assert same(replay(before, delta), now)
            gone = sorted({*before["keys"].tolist()} - {*now["keys"].tolist()})
            assert delta["delta.gone"].tolist() == gone
            lost = max(lost, len(gone))
            if (changes is often and step % 7 == 6) or step == 60:
                changes.mark()
                marked[id(changes)] = now
    assert lost > 15


def test_nothing_is_noted_where_nothing_is_written() -> None:
    table = DynamicTable(2)
    table.rows(np.arange(5000), insert=True)
    changes = table.track()
    table.read(table.rows(np.arange(6000), insert=False))
    table.add_gradient(table.rows(np.array([7, 7, 4999]), insert=True), np.ones((3, 2), np.float32))
    assert len(table.delta(changes)["keys"]) == 0
    SparseAdagrad(table).step()
    assert table.delta(changes)["keys"].tolist() == [7, 4999]


def test_counters_of_joined_shards_are_never_too_low() -> None:
    states = []
    for shard in range(2):
        table = DynamicTable(2, budget=Budget(max_rows=50, min_count=3, sketch_cells=64))
        for keys in (np.arange(shard, 40, 2), np.arange(shard, 20, 2)):
            table.rows(keys, insert=True)
            table.make_room()
        states.append(table.state())
    joined = DynamicTable.from_state(join(states))
    assert joined.step == 2
    # Keys below 20 were seen twice: the third time they have a row.
    joined.rows(np.arange(20), insert=True)
    assert {*range(20)} <= {*joined.keys().tolist()}
    assert same(join([joined.state()]), joined.state())
    assert len(pick(joined.state(), np.array([3, 1]))["keys"]) == 2


def test_deltas_are_replayed_in_their_order_on_the_table_that_they_are_of() -> None:
    table, states, deltas = DynamicTable(2), [], []
    optimizer = SparseSGD(table, lr=1.0)
    table.rows(np.arange(9), insert=True)
    changes = table.track()
    for step in range(4):
        states.append(table.state())
        # No key comes in any step but the last: numbers of rows are alike.
        rows = table.rows(np.array([step, 3 + 9 * (step == 3)]), insert=True)
        table.add_gradient(rows, np.ones((2, 2), np.float32))
        optimizer.step()
        deltas.append(table.delta(changes))
        changes.mark()
    for first in range(4):
        assert same(replay(states[first], *deltas[first:]), table.state())
    for some in ((1, 0), (0, 2), (1, 1)):
        with pytest.raises(InputError, match=f"since mark {some[1]} does not follow one since mark {some[0]}"):
            replay(states[0], *(deltas[k] for k in some))
    # Early deltas say neither, and are taken as they come.
    early = [{n: a for n, a in d.items() if n not in ("delta.marks", "delta.from_places")} for d in deltas]
    assert same(replay(states[0], *early), table.state())
    assert replay(states[0], early[1], early[0])["keys"].tolist() == list(range(9))
    other = DynamicTable(2)
    other.rows(np.array([0, 1, 2, 3, 4, 5, 6, 8, 7]), insert=True)
    with pytest.raises(InputError, match="had other keys, or in other rows"):
        replay(other.state(), *deltas)
