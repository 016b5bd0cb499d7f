"""Tables spread over ranks against one table in one process, to rounding; over gloo and over threads, bit for bit."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinrow.checkpoints import commit, load_shard, save_shard
from thinrow.core.errors import InputError, RankLost
from thinrow.core.routing import Routing
from thinrow.embeddings import (
    Budget,
    DynamicTable,
    Embedding,
    EmbeddingBag,
    GroupEmbedding,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    ShardedEmbeddings,
    SparseSGD,
    TableGroup,
)
from thinrow.embeddings.states import prefixed, tables_of
from thinrow.testing.ranks import PATIENCE_S, GlooProcesses, run_threads
from thinrow.testing.sharded import OPTIMIZERS, Batch, Settings, by_key, keep_training, make_ranks, send_much, train

PROBE = np.array([*range(-4, 12), -(2**63), 2**63 - 1])


def drawn(n_ranks, seed, n_steps=3, most=6):
    """Batches of few keys, so that ranks ask for the same; some ranks have none."""
    random = np.random.default_rng(seed)

    def batch():
        n = int(random.integers(0, most))
        users, items = random.choice(PROBE, (n, 2)), random.integers(-3, 60, (n, 2))
        return Batch(users, items, random.integers(0, 2, n).astype(np.float32))

    return [[batch() for _ in range(n_ranks)] for _ in range(n_steps)]


def union(parts, whole):
    """key -> row over the tables of all ranks, which have no key in common unless they are whole."""
    found = [by_key(part) for part in parts]
    if whole:
        for other in found:
            assert other.keys() == found[0].keys()
            assert all(other[k].tobytes() == row.tobytes() for k, row in found[0].items())
        return found[0]
    together = {k: v for part in found for k, v in part.items()}
    assert len(together) == sum(map(len, found))
    return together


def hold(steps, chosen, got, close):
    """What ranks trained is what one process trains."""
    one = train(None, steps, chosen, PROBE)
    assert close(one.losses, got[0].losses)
    for rank in got:
        assert rank.losses == got[0].losses
        assert close(one.probed, rank.probed)
        assert rank.probed.tobytes() == got[0].probed.tobytes()
    if chosen.passes == 1:
        for t, vectors in enumerate(one.vectors):
            assert close(vectors, np.concatenate([rank.vectors[t] for rank in got]))
    for i, table in enumerate(one.tables):
        expected, found = by_key(table), union([r.tables[i] for r in got], chosen.whole_users and i == 0)
        assert expected.keys() == found.keys()
        assert all(close(row, found[key]) for key, row in expected.items())


def to_rounding(a, b):
    return np.allclose(a, b, rtol=1e-5, atol=2e-6)


chosen_settings = st.builds(
    Settings,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    clip_norm=st.sampled_from([None, 0.05, 100.0]),
    whole_users=st.booleans(),
    prefetch=st.booleans(),
    together=st.booleans(),
    passes=st.sampled_from([1, 1, 2]),
)


@given(st.integers(1, 4), st.integers(0, 2**32), chosen_settings)
@example(3, 0, Settings(clip_norm=0.05, whole_users=True, prefetch=True))
@settings(max_examples=15)
def test_ranks_train_as_one_process(n_ranks, seed, chosen):
    steps = drawn(n_ranks, seed)
    hold(steps, chosen, run_threads(n_ranks, train, steps, chosen, PROBE), to_rounding)


@pytest.mark.parametrize("numbers", [(4, 3, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_from_a_checkpoint(numbers, tmp_path):
    batches, chosen = drawn(1, 11, n_steps=2 * len(numbers), most=60), Settings("adam", 0.05, whole_users=True)
    one, start = train(None, batches, chosen, PROBE), None
    for i, n_ranks in enumerate(numbers):
        steps = [step[0].split(n_ranks) for step in batches[2 * i : 2 * i + 2]]
        got = run_threads(n_ranks, train, steps, chosen, PROBE, start)
        for rank, trained in enumerate(got):
            save_shard(tmp_path, i, rank, Routing.even(n_ranks), tensors=prefixed("items.", trained.tables[1]))
        whole = {**prefixed("users.", got[-1].tables[0]), "weights": got[0].weights}
        commit(tmp_path, i, Routing.even(n_ranks), tensors=whole)
        assert to_rounding(one.losses[2 * i : 2 * i + 2], got[0].losses)
        if i + 1 < len(numbers):
            n_next = numbers[i + 1]
            loaded = [load_shard(tmp_path, rank, Routing.even(n_next)).tensors for rank in range(n_next)]
            tables = [tables_of(tensors) for tensors in loaded]
            start = [((t["users."], t["items."]), all_of["weights"]) for t, all_of in zip(tables, loaded, strict=True)]
    assert to_rounding(one.probed, got[0].probed)


def test_a_group_of_tables_is_spread_as_one():
    keys = {"item": torch.tensor([[7, 8], [9, 7]]), "store": torch.tensor([7])}

    def trained(ranks):
        table = DynamicTable(4)
        group = GroupEmbedding(
            TableGroup(("item", "store")), ShardedEmbedding(table, ranks) if ranks else Embedding(table)
        )
        optimizer = SparseSGD(group, lr=0.5)
        for _ in range(2):
            found = group(keys)
            (sum(v.square().sum() for v in found.values()) / (ranks.size if ranks else 1)).backward()
            optimizer.step()
        return {name: v.detach() for name, v in group.eval()(keys).items()}

    one, got = trained(None), run_threads(3, trained)
    assert all(torch.allclose(one[name], found[name], atol=1e-7) for found in got for name in keys)


@given(st.integers(1, 3), st.integers(0, 2**32), st.sampled_from(["sum", "mean"]), st.booleans())
@settings(max_examples=8)
def test_bags_over_ranks_are_those_of_one_process(n_ranks, seed, mode, whole):
    random = np.random.default_rng(seed)

    def bags():
        sizes = random.integers(0, 4, random.integers(0, 4))
        weights = random.normal(size=(len(sizes), 3)).astype(np.float32)
        return random.choice(PROBE, sizes.sum()), np.cumsum([0, *sizes]), weights

    steps = [[bags() for _ in range(n_ranks)] for _ in range(3)]

    def trained(ranks):
        table = DynamicTable(3, seed=5, init_scale=0.5)
        bag = EmbeddingBag(table, mode) if ranks is None else ShardedEmbeddingBag(table, ranks, mode, whole=whole)
        optimizer, seen = OPTIMIZERS["adagrad"](bag, lr=0.1), []
        for step in steps:
            pooled = []
            for keys, bounds, weights in step if ranks is None else [step[ranks.rank]]:
                if ranks is not None and seed % 2:
                    bag.prefetch(torch.from_numpy(keys))
                out = bag(torch.from_numpy(keys), torch.from_numpy(bounds))
                assert out.shape == (len(weights), 3)
                (out.sin() * torch.from_numpy(weights)).sum().backward()
                pooled.append(out.detach().numpy())
            optimizer.step()
            seen.append(np.concatenate(pooled))
        ends = torch.arange(0, len(PROBE) + 1, 3)
        probed = bag.eval()(torch.from_numpy(PROBE), torch.cat([ends, torch.tensor([len(PROBE)] * 2)]))
        return seen, probed.numpy(), table.state()

    seen, probed, state = trained(None)
    got = run_threads(n_ranks, trained)
    for t, pooled in enumerate(seen):
        assert to_rounding(pooled, np.concatenate([vectors[t] for vectors, _, _ in got]))
    assert all(to_rounding(probed, found) for _, found, _ in got)
    expected, found = by_key(state), union([s for _, _, s in got], whole)
    assert expected.keys() == found.keys()
    assert all(to_rounding(row, found[key]) for key, row in expected.items())


def test_bags_of_wrong_bounds_are_refused_before_anything_is_sent():
    def job(ranks):
        bag = ShardedEmbeddingBag(DynamicTable(3), ranks)
        for keys, bounds in (([5, 6], [0, 1]), ([5], [])):
            with pytest.raises(InputError, match="they must ascend from 0 to"):
                bag(torch.tensor(keys), torch.tensor(bounds, dtype=torch.int64))
        with pytest.raises(InputError, match="it must be 'sum' or 'mean'"):
            ShardedEmbeddingBag.over(bag.shard, "max")
        return ranks.sent_bytes, len(bag.table)

    assert run_threads(2, job) == [(0, 0)] * 2


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_an_overflow_at_one_rank_ends_the_step_on_all(whole, twice):
    """``twice``: on the rank that sends, in two calls; else where the gradients of all ranks meet."""

    def job(ranks):
        items, plain = (ShardedEmbedding(DynamicTable(2, seed=s), ranks, whole=w) for s, w in ((1, whole), (2, False)))
        optimizer, keys = SparseSGD(items, plain, lr=1.0), torch.arange(40)

        def backward(scale):
            weights = torch.ones(40, 1)
            weights[0] = scale
            (items(keys) * weights).sum().backward()
            plain(keys).sum().backward()

        def fails():
            with pytest.raises(InputError, match="the gradient of key 0 is inf") as caught:
                optimizer.step()
            return str(caught.value)

        for _ in range(2 if twice else 1):
            backward(2e38 if not twice or ranks.rank == 1 else 1.0)
        before = items.table.state(), plain.table.state()
        said = fails()
        # Nothing was used, so it fails again.
        assert fails() == said
        for table, state in zip((items.table, plain.table), before, strict=True):
            after = table.state()
            assert {n: a.tobytes() for n, a in after.items()} == {n: a.tobytes() for n, a in state.items()}
        optimizer.zero_grad()
        start = items(keys).detach().clone()
        backward(1.0)
        optimizer.step()
        assert torch.equal(items(keys), start - ranks.size)
        return said

    texts = run_threads(3, job)
    if whole and not twice:
        # Each rank has the copy, and finds it.
        assert len(set(texts)) == 1
    else:
        assert [text.startswith("rank ") for text in texts].count(False) == 1


def test_prefetch_and_one_exchange_change_no_bit():
    steps, plain = drawn(3, 7), Settings(optimizer="adam", passes=2)
    expected = run_threads(3, train, steps, plain, PROBE)
    for ahead, together in ((True, False), (False, True), (True, True)):
        got = run_threads(3, train, steps, replace(plain, prefetch=ahead, together=together), PROBE)
        same_bits(expected, got)


def same_bits(expected, got):
    for a, b in zip(expected, got, strict=True):
        assert a.losses == b.losses
        assert a.probed.tobytes() == b.probed.tobytes()
        for x, y in zip(a.tables, b.tables, strict=True):
            assert {n: v.tobytes() for n, v in x.items()} == {n: v.tobytes() for n, v in y.items()}


@given(st.integers(1, 4), st.integers(0, 2**32), st.booleans())
@settings(max_examples=10)
def test_half_the_bytes_are_near(n_ranks, seed, whole):
    steps, chosen = drawn(n_ranks, seed), Settings("sgd", wire="bfloat16", whole_users=whole)
    hold(steps, chosen, run_threads(n_ranks, train, steps, chosen, PROBE), lambda a, b: np.allclose(a, b, atol=0.02))


@given(st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=10)
def test_admission_counts_positions_on_all_ranks(n_ranks, seed):
    steps, chosen = drawn(n_ranks, seed), Settings(budget=Budget(max_rows=4_000, min_count=3))
    got = run_threads(n_ranks, train, steps, chosen, PROBE)
    hold(steps, chosen, got, to_rounding)
    one = train(None, steps, chosen, PROBE)
    for i, table in enumerate(one.tables):
        used = [dict(zip(r["keys"].tolist(), r["row_state.usage"].tolist(), strict=True)) for r in [table]]
        parts = [r.tables[i] for r in got]
        of_all = {k: v for p in parts for k, v in zip(p["keys"].tolist(), p["row_state.usage"].tolist(), strict=True)}
        assert of_all == used[0]


def test_each_shard_keeps_its_share_of_a_budget():
    budget = Budget(max_rows=30)
    steps = drawn(3, 1, n_steps=6, most=40)
    got = run_threads(3, train, steps, Settings(budget=budget), PROBE)
    assert all(0 < len(r.tables[1]["keys"]) <= 10 for r in got)
    assert budget.share(3) == replace(budget, max_rows=10, sketch_cells=budget.sketch_cells // 2)
    assert Budget(max_bytes=1000).share(3).max_bytes == 333
    with pytest.raises(InputError, match=r"n_shards=31; it must be in \[1, 30\]"):
        budget.share(31)


def test_gloo_gives_the_bits_of_threads():
    all_at_once = Settings(optimizer="adam", clip_norm=0.05, prefetch=True, together=True, whole_users=True)
    with GlooProcesses(2) as processes:
        for chosen in (all_at_once, Settings(prefetch=True, wire="bfloat16", passes=2)):
            steps = drawn(2, 2)
            same_bits(run_threads(2, train, steps, chosen, PROBE), processes.run(2, train, steps, chosen, PROBE))


@pytest.fixture(scope="module")
def processes():
    with GlooProcesses(4) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_gloo_trains_as_one_process(processes, n_ranks):
    for i, name in enumerate(sorted(OPTIMIZERS)):
        for flag in (False, True):
            steps = drawn(n_ranks, i, n_steps=5, most=30)
            chosen = Settings(name, 0.05 if flag else None, whole_users=flag, prefetch=flag, together=not flag)
            hold(steps, chosen, processes.run(n_ranks, train, steps, chosen, PROBE), to_rounding)


def lost(processes, rank, how):
    """What the ranks say when one of them is hit in the middle of a step."""
    n = len(processes.processes)
    assert processes.run(n, keep_training, 2) == [2] * n
    processes.start(n, keep_training, 10**9)
    os.kill(processes.processes[rank].pid, how)
    return [processes.result(other) for other in range(n) if other != rank]


# The store of the process group is in the first process.
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_by_all(rank):
    with GlooProcesses(3) as three:
        since = time.monotonic()
        for error in lost(three, rank, signal.SIGKILL):
            assert isinstance(error, RankLost)
            assert error.rank == rank
            assert f"rank {rank} ended in the middle of a run" in str(error)
        # Connections that close tell; nobody waits for the end of the patience.
        assert time.monotonic() - since < PATIENCE_S


@pytest.mark.slow
def test_a_rank_that_does_not_connect_is_named():
    with GlooProcesses(2) as two:
        with pytest.raises(
            RankLost, match=r"rank 1 did not connect to the first channel within 3 s; every rank of \[0, 1"
        ):
            two.run(1, make_ranks, [0, 1], 3.0)
        with pytest.raises(InputError, match=r"members=\[1\]; rank 0, this one, is not among them"):
            two.run(1, make_ranks, [1], 3.0)
        with pytest.raises(InputError, match="timeout_s=0; it must be above 0"):
            two.run(1, make_ranks, [0], 0)
        assert two.run(1, make_ranks, [0], 3.0) == [1]
    with pytest.raises(InputError, match="there is no process group"):
        make_ranks(None, [0], 3.0)


@pytest.mark.slow
def test_a_part_is_larger_than_32_bits_count():
    n_bytes = (1 << 31) + 16
    with GlooProcesses(2) as two:
        assert two.run(2, send_much, n_bytes) == [(0, 0), (n_bytes, 35)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_silent_rank_is_named_by_all_within_the_timeout(rank):
    with GlooProcesses(3, timeout_s=10) as three:
        since = time.monotonic()
        for error in lost(three, rank, signal.SIGSTOP):
            assert isinstance(error, RankLost)
            assert error.rank == rank
            assert f"rank {rank} did not answer within 10 s" in str(error)
        assert time.monotonic() - since < PATIENCE_S
        os.kill(three.processes[rank].pid, signal.SIGCONT)
        error = three.result(rank)
        assert isinstance(error, RankLost)
        if rank:
            assert error.rank == rank
            assert f"the other ranks gave rank {rank}, this one, up" in str(error)


@given(st.integers(1, 4), st.lists(st.integers(0, 5), max_size=2).map(tuple), st.sampled_from([np.float32, np.int64]))
@settings(max_examples=20)
def test_sums_and_parts_of_all_ranks(n_ranks, shape, dtype):
    numbers = np.random.default_rng(n_ranks).normal(size=(n_ranks, *shape)).astype(dtype)

    def both(ranks):
        mine = numbers[ranks.rank]
        return ranks.add(mine), ranks.gather("parts", mine.reshape(-1)[: ranks.rank])

    for total, parts in run_threads(n_ranks, both):
        expected = numbers[0].copy()
        for other in numbers[1:]:
            expected += other
        assert (total.dtype, total.shape, total.tobytes()) == (expected.dtype, shape, expected.tobytes())
        assert [p.tolist() for p in parts] == [n.reshape(-1)[:r].tolist() for r, n in enumerate(numbers)]


def test_keys_have_any_shape_and_gradients_can_be_forgotten():
    def job(ranks):
        table = DynamicTable(2, seed=4)
        items = ShardedEmbedding(table, ranks)
        optimizer = SparseSGD(items, lr=1.0)
        shapes = [tuple(items(torch.full(shape, 7)).shape) for shape in ((), (0, 3), (2, 1, 2))]
        before = items(torch.tensor(7))
        items(torch.tensor([7])).sum().backward()
        optimizer.zero_grad()
        optimizer.step()
        return shapes, before.detach(), items(torch.tensor(7)).detach(), repr(items)

    (owner,) = Routing.even(2).shards(np.array([7]))
    for rank, (shapes, before, after, text) in enumerate(run_threads(2, job)):
        assert shapes == [(2,), (0, 3, 2), (2, 1, 2, 2)]
        assert torch.equal(before, after)
        assert text == f"ShardedEmbedding(dim=2, rows={int(rank == owner)} on rank {rank} of 2, row-wise)"


def other_calls(ranks):
    items = ShardedEmbedding(DynamicTable(2), ranks)
    if ranks.rank == 1:
        SparseSGD(items).step()
    else:
        items(torch.tensor([1]))


def test_ranks_that_differ_are_told():
    with pytest.raises(InputError, match=r"rank [01] is at call 1, '(gradients|ids) [0-9a-f]{8}', this rank"):
        run_threads(2, other_calls)

    def other_tables(ranks):
        ShardedEmbedding(DynamicTable(2, seed=ranks.rank), ranks)(torch.tensor([1]))

    with pytest.raises(InputError, match="all ranks must look up, prefetch and step the same tables"):
        run_threads(2, other_tables)

    def other_modes(ranks):
        ShardedEmbedding(DynamicTable(2), ranks).train(ranks.rank == 0)(torch.tensor([1]))

    with pytest.raises(InputError, match=r"'(training|reading) vectors"):
        run_threads(2, other_modes)


def test_what_is_refused():
    def refusals(ranks):
        table = DynamicTable(2)
        with pytest.raises(InputError, match="wire='float16'; it must be one of float32, float64, bfloat16"):
            ShardedEmbedding(table, ranks, wire="float16")
        with pytest.raises(InputError, match="a whole table has no budget"):
            ShardedEmbedding(DynamicTable(2, budget=Budget(max_rows=9)), ranks, whole=True)
        items = ShardedEmbedding(table, ranks)
        with pytest.raises(InputError, match=r"keys: torch.int32 on cpu; they must be int64"):
            items(torch.zeros(3, dtype=torch.int32))
        items.prefetch(torch.tensor([1]))
        with pytest.raises(InputError, match="prefetch twice"):
            items.prefetch(torch.tensor([1]))
        with pytest.raises(InputError, match="other keys were prefetched than are looked up"):
            items(torch.tensor([2]))
        with pytest.raises(InputError, match="tables of ranks and others in one optimizer"):
            SparseSGD(items, Embedding(DynamicTable(2)))
        with pytest.raises(InputError, match="the gradient of key 5 is nan in column"):
            (items(torch.tensor([5])) * float("nan")).sum().backward()
        table.rows(np.arange(9), insert=True)
        with pytest.raises(InputError, match=f"the table of rank {ranks.rank} of 2 holds key ., which is rank"):
            ShardedEmbedding(table, ranks)
        return items

    one, two = run_threads(2, refusals)
    with pytest.raises(InputError, match="tables of 2 groups of ranks"):
        ShardedEmbeddings(one, two)
