"""The loader over a source in memory: order, resume, ranks, plans, statistics, errors.

In that source example r of split s is request 1000 s + r of user 1000 s + r // 3, who has seven events.
"""

import json
import threading
from itertools import chain

import numpy as np
import pytest

from thinrow.core.errors import InputError
from thinrow.dpp import Loader, RowFilter, SessionSpec
from thinrow.dpp.merge import BatchMaker
from thinrow.dpp.worker import Worker
from thinrow.features import Cross, FeaturePlan, Hash, HistoryMatch
from thinrow.features import Source as Col
from thinrow.schema import Projection
from thinrow.testing.source import ROWS, SPLIT, FakeSource, digest

SMALL = {"base_rows": 4, "block": 3, "batch_rows": 7, "interleave": 2}


def make(source=None, rank=0, n_ranks=1, **changes):
    spec = SessionSpec(**{"table": "examples", "snapshot_id": 5, "generation": 1, **SMALL, "epochs": 2, **changes})
    return Loader(spec, source or FakeSource(ROWS), rank=rank, n_ranks=n_ranks)


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("thinrow-dpp")]


def test_every_example_once_an_epoch_with_its_own_values():
    batches = list(make())
    assert [b.t for b in batches] == list(range(14))
    assert [len(b) for b in batches] == [7] * 13 + [1]
    ids = np.concatenate([b.request_id for b in batches])
    expected = [s * SPLIT + r for s, n in enumerate(ROWS) for r in range(n)]
    assert sorted(ids.tolist()) == sorted(expected * 2)
    for b in batches:
        assert b.users.tolist() == [i // SPLIT * SPLIT + i % SPLIT // 3 for i in b.request_id.tolist()]
        assert b.request_ts.tolist() == (100 + b.request_id).tolist()
        for i, request in enumerate(b.request_id.tolist()):
            user = int(b.users[i])
            n = 1 + (100 + request) % 7
            assert b.histories.to_jagged("item").row(i).tolist() == [user + k for k in range(n)]
            assert set(b.candidates["item"].row(i).tolist()) == {request}
            assert b.labels["click"].lengths[i] == b.candidates["price"].lengths[i] == 1 + request % 3
            assert b.context["hour"].values[i] == request % 24


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_do_not_change_a_batch(workers):
    assert [digest(b) for b in make(workers=workers)] == [digest(b) for b in make(workers=1)]


def test_reading_ahead_overlaps_base_batches_and_changes_nothing():
    meet = threading.Barrier(3)

    class Met(FakeSource):
        def rebuild(self, *args):
            meet.wait(timeout=120)  # three are read at a time
            return super().rebuild(*args)

    plain = [digest(b) for b in make(workers=1, batch_rows=None)]
    assert [digest(b) for b in make(workers=1, prefetch=2, batch_rows=None)] == plain
    spec = make(batch_rows=None, prefetch=2).spec
    source = Met(ROWS)
    order = spec.order(source.split_rows)
    maker = BatchMaker(Worker(spec, order, source), order, 0, 1, spec.prefetch)
    whole = [t for t in range(order.n_batches) if len(order.bases_of(t)) == 3]
    assert [digest(maker.make(t).batch) for t in whole] == [plain[t] for t in whole]
    with pytest.raises(InputError, match="prefetch=-1"):
        make(prefetch=-1)


def test_restored_at_every_step_with_other_threads():
    whole = [digest(b) for b in make()]
    for t in range(len(whole) + 1):
        first = make()
        walk = iter(first)
        for _ in range(t):
            next(walk)
        state = json.loads(json.dumps(first.state_dict()))
        walk.close()
        second = make(workers=1 + t % 3)
        second.load_state_dict(state)
        assert [digest(b) for b in second] == whole[t:]
    assert not workers()


def test_iterating_again_goes_on_after_the_last_batch_yielded():
    one = make()
    seen = []
    for batch in one:
        seen.append(digest(batch))
        if len(seen) == 5:
            break
    seen += [digest(b) for b in one]
    assert seen == [digest(b) for b in make()]
    assert list(one) == []
    assert len(one) == 14


def test_a_block_is_shared_and_windows_differ():
    """By default a batch is a block: a user's examples in one base batch share one copy of the events."""
    (batch,) = make(FakeSource([12]), base_rows=12, block=1, batch_rows=None, epochs=1)
    assert len(batch) == 12
    assert len(batch.histories.events) == 4 * 7
    assert len(set(batch.histories.lengths().tolist())) > 1


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 8])
def test_ranks_partition_each_global_batch(n_ranks):
    whole = [b.request_id.tolist() for b in make()]
    parts = [[b.request_id.tolist() for b in make(rank=r, n_ranks=n_ranks)] for r in range(n_ranks)]
    assert [list(chain.from_iterable(ranks)) for ranks in zip(*parts, strict=True)] == whole


def test_a_state_of_one_rank_fits_another_number_of_ranks():
    one = make(rank=1, n_ranks=2)
    walk = iter(one)
    next(walk)
    next(walk)
    other = make(rank=0, n_ranks=1)
    other.load_state_dict(one.state_dict())
    assert next(iter(other)).t == 2


def test_state_is_small():
    assert len(json.dumps(make().state_dict())) < 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed=0, this loader seed=1"),
        ({"batch_rows": 8}, "batch_rows=7, this loader batch_rows=8"),
        ({"block": 2}, "block=3, this loader block=2"),
        ({"base_rows": 5}, "base_rows=4, this loader base_rows=5"),
        ({"interleave": 1}, "interleave=2, this loader interleave=1"),
        ({"epochs": 3}, "epochs=2, this loader epochs=3"),
        ({"table": "others"}, "table='examples', this loader table='others'"),
        ({"snapshot_id": 6}, "snapshot_id=5, this loader snapshot_id=6"),
        ({"rows": RowFilter(since_ms=4)}, "since_ms=None, this loader since_ms=4"),
        ({"rows": RowFilter(until_ms=4)}, "until_ms=None, this loader until_ms=4"),
        ({"rows": RowFilter(user_share=0.5)}, "user_share=None, this loader user_share=0.5"),
        ({"source": FakeSource((23, 0, 9, 15))}, "rows=46, this loader rows=47"),
        ({"source": FakeSource((23, 0, 10, 13))}, "manifest="),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(changes, message):
    other = make(**changes)
    with pytest.raises(InputError, match=message):
        other.load_state_dict(make().state_dict())


def test_a_state_without_a_filter_is_one_of_every_row():
    old = {n: v for n, v in make().state_dict().items() if n not in ("since_ms", "until_ms", "user_share", "user_seed")}
    make().load_state_dict(old)
    with pytest.raises(InputError, match="since_ms=None, this loader since_ms=4"):
        make(rows=RowFilter(since_ms=4)).load_state_dict(old)


def test_projection_plan_and_threads_may_change_on_resume():
    other = make(
        projection=Projection(max_len=2), plan=FeaturePlan({"h": Hash(Col("cand.item"))}), workers=3, generation=9
    )
    other.load_state_dict(make().state_dict())


@pytest.mark.parametrize("change", [{"t": 14}, {"t": -2}, {"t": "0"}, {"t": None}])
def test_a_state_out_of_bounds_is_refused(change):
    with pytest.raises(InputError, match=r"the state has t=.*; this run has batches 0 to 13"):
        make().load_state_dict({**make().state_dict(), **change})
    with pytest.raises(InputError, match="not a reader state: it lacks 'format'"):
        make().load_state_dict({})


def test_an_error_of_a_worker_comes_after_the_batches_before_it():
    loader = make(FakeSource(ROWS, broken=11), workers=3)
    good, seen = [digest(b) for b in make()], []
    with pytest.raises(RuntimeError, match="request 11 cannot be read"):
        seen.extend(digest(b) for b in loader)
    assert seen == good[: len(seen)]
    assert 0 < len(seen) < 14
    assert loader.state_dict()["t"] == len(seen) - 1
    assert not workers()


def test_leaving_early_ends_the_threads():
    loader = make()
    walk = iter(loader)
    next(walk)
    assert workers()
    loader.close()
    assert not workers()
    assert list(walk) == []
    with make() as other:
        next(iter(other))
    assert not workers()


def test_no_more_is_read_ahead_than_the_window():
    source = FakeSource([4000])
    loader = make(source, workers=1)
    next(iter(loader))
    loader.close()
    assert len(source.read) <= loader.spec.window + loader.spec.block


def test_a_plan_gives_shared_history_columns_and_rows():
    item, shop = Col("history.item"), Col("history.shop")
    plan = FeaturePlan(
        {
            "pair": Cross((item, shop), buckets=1000),
            "bucket": Hash(Col("cand.item"), buckets=50),
            "at_hour": Cross((Col("cand.item"), Col("ctx.hour"))),
            "hour": Hash(Col("ctx.hour"), buckets=7),
        }
    )
    for batch in make(plan=plan):
        events = batch.histories.events
        shops = events.columns["shop"].to_arrow()
        sources = {
            "history.item": events.columns["item"],
            "history.shop": type(events.columns["shop"]).from_arrow(shops, "string"),
        }
        sources |= {"cand.item": batch.candidates["item"], "ctx.hour": batch.context["hour"]}
        again = plan.apply(sources)
        assert np.array_equal(events.columns["pair"].values, again["pair"].values)
        assert set(batch.features) == {"bucket", "at_hour", "hour"}
        for name, value in batch.features.items():
            assert value.to_arrow().equals(again[name].to_arrow())
        assert batch.histories.to_jagged("pair").lengths.tolist() == batch.histories.lengths().tolist()


def test_a_plan_that_does_not_fit_is_refused_at_once():
    with pytest.raises(InputError, match=r"the plan reads 'history\.price', but projection and table have cand\.item"):
        make(plan=FeaturePlan({"a": Col("history.price")}))
    with pytest.raises(InputError, match=r"the plan reads 'history\.price'"):
        make(plan=FeaturePlan({"a": HistoryMatch(Col("history.price"), Col("cand.item"))}))
    with pytest.raises(InputError, match="output 'item' of the plan is also a history column"):
        make(plan=FeaturePlan({"item": Hash(Col("history.item"))}))


def test_statistics_add_up():
    loader = make(epochs=1)
    batches = list(loader)
    s = loader.stats
    assert (s.batches, s.examples, s.versions_verified) == (len(batches), sum(ROWS), sum(ROWS))
    assert s.bytes_read == 10 * len(range(0, 23, 4)) + 10 * len(range(0, 9, 4)) + 10 * len(range(0, 14, 4))
    assert s.events_decoded > 0
    assert {"examples", "features", "batch"} <= set(s.seconds)
    assert s.waited_s >= 0


def test_an_empty_table_yields_nothing():
    for epochs in (1, None):
        loader = make(FakeSource(()), epochs=epochs)
        assert list(loader) == []
        assert len(loader) == 0


def test_a_run_without_end_has_no_length():
    loader = make(epochs=None)
    with pytest.raises(TypeError, match="epochs=None"):
        len(loader)
    walk = iter(loader)
    assert [next(walk).t for _ in range(20)] == list(range(20))
    walk.close()


def test_bad_sizes_and_ranks_are_named():
    for name in ("base_rows", "block", "batch_rows", "interleave", "workers", "epochs"):
        with pytest.raises(InputError, match=f"{name}=0"):
            make(**{name: 0})
    for rank, n_ranks in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(InputError, match=f"rank={rank} of n_ranks={n_ranks}"):
            make(rank=rank, n_ranks=n_ranks)
