"""The loader over a real store and table: equal to the fat rows, once an epoch, any threads, from any step."""

import hashlib
import json
import threading
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError, InputError, SchemaError, StoreError
from thinrow.dpp import BatchBudget, RowFilter, client, loader, worker
from thinrow.dpp.row_filter import in_share
from thinrow.examples.records import ExampleBatch, text_column
from thinrow.examples.table import ExampleTable
from thinrow.features import (
    Bucketize,
    Cross,
    FeaturePlan,
    Hash,
    HistoryMatch,
    Source,
    history_candidate_cross,
)
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column, Jagged
from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema, FieldSpec, Projection, Trait
from thinrow.storage.objects import LocalObjects

N_USERS, STEPS, STEP_MS = 37, 40, 1_000
COLUMNS = ("item", "shop", "price")
SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "shop", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(3, "price", Trait.NUMERIC, "float32", "price"),
    )
)
EXAMPLES = ExampleSchema(
    context=(FieldSpec("hour", "int8"),),
    candidates=(FieldSpec("product", "int64"), FieldSpec("count", "int32")),
    item="product",
    outcomes=(("click", 10),),
)
SMALL = {"base_rows": 16, "block": 3, "seed": 4}
PLAN = FeaturePlan(
    {
        "item_bucket": Hash(Source("history.item"), buckets=100),
        "item_shop": Cross((Source("history.item"), Source("history.shop")), buckets=1000),
        "price_bucket": Bucketize(Source("history.price"), (1, 2, 5)),
        "product_bucket": Hash(Source("cand.product"), buckets=100),
    }
)


def some_events(rng, step, n):
    shops = [None if rng.random() < 0.1 else f"shop {rng.integers(0, 5)}" for _ in range(n)]
    # One event in ten is late: it happened some steps ago and arrives now.
    late = np.where(rng.random(n) < 0.1, rng.integers(0, 6, n), 0)
    return pa.table(
        {
            "user_id": rng.integers(0, N_USERS, n),
            "event_ts": np.maximum((step - late) * STEP_MS + rng.integers(0, STEP_MS, n), 0),
            "item": rng.integers(0, 30, n),
            "shop": pa.array(shops, pa.string()),
            "price": rng.random(n).astype(np.float32) * 8,
        }
    )


def some_requests(rng, store, step, first_id, fat):
    """Examples of some users at the end of a step; what each saw is kept in ``fat``."""
    users = np.sort(rng.permutation(N_USERS + 3)[:15])
    n, request_ts = len(users), (step + 1) * STEP_MS + rng.integers(0, 3, len(users))
    taken = store.snapshot(users, request_ts)
    histories = store.read(users, request_ts).histories
    rows = {c: histories.to_jagged(c).to_arrow().to_pylist() for c in ("event_ts", *COLUMNS)}
    request_id = np.arange(first_id, first_id + n)
    for i, r in enumerate(request_id.tolist()):
        fat[r] = {c: rows[c][i] for c in rows} | {"user": int(users[i]), "ts": int(request_ts[i])}
    lengths = rng.integers(0, 5, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    product = Jagged(Column(rng.integers(0, 30, int(offsets[-1]))), offsets)
    count = history_candidate_cross(histories, "item", product, request_ts).count
    label = Jagged(Column(rng.integers(0, 2, int(offsets[-1])).astype(np.int32)), offsets)
    return ExampleBatch(
        request_id,
        taken.requests,
        {"hour": Column((request_id % 24).astype(np.int8))},
        {"product": product, "count": count},
        {"click": label},
        text_column("model", n),
        text_column("a", n),
        np.zeros(n, np.int64),
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(store, table, fat rows) after forty steps of events, requests and compactions, and more of them afterwards."""
    rng = np.random.default_rng(8)
    path = tmp_path_factory.mktemp("world")
    fat, parts = {}, []
    with HistoryStore.create(path / "store", SCHEMA, n_buckets=4, sync=False) as store:
        for step in range(STEPS):
            store.append(some_events(rng, step, 40))
            if step % 7 == 3:
                store.compact(full=step % 2 == 0)
            parts.append(some_requests(rng, store, step, 100 * step, fat))
        store.append(some_events(rng, STEPS // 2, 200))
        store.compact()
        table = ExampleTable.create(path / "table", event_schema=SCHEMA, example_schema=EXAMPLES, n_buckets=4)
        for half in (parts[::2], parts[1::2]):
            table.append(ExampleBatch.concat(half))
        table.cluster()
        yield store, table, fat
        table.close()


def digest(batch):
    h = hashlib.sha256()
    rows = {n: batch.histories.to_jagged(n) for n in ("event_ts", *batch.histories.events.columns)}
    for group in (rows, batch.context, batch.candidates, batch.labels, batch.features):
        h.update(repr([(n, c.to_arrow().to_pylist()) for n, c in sorted(group.items())]).encode())
    h.update(repr((batch.t, batch.request_id.tolist(), batch.request_ts.tolist(), batch.users.tolist())).encode())
    return h.hexdigest()


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("thinrow-dpp")]


def test_every_example_once_an_epoch_equal_to_its_fat_row(world):
    store, table, fat = world
    for max_len in (None, 1, 5):
        one = loader(store, table, max_len=max_len, threads=2, **SMALL)
        seen = []
        for batch in one:
            seen += batch.request_id.tolist()
            rows = {c: batch.histories.to_jagged(c).to_arrow().to_pylist() for c in ("event_ts", *COLUMNS)}
            for i, request in enumerate(batch.request_id.tolist()):
                assert (int(batch.users[i]), int(batch.request_ts[i])) == (fat[request]["user"], fat[request]["ts"])
                for c, values in rows.items():
                    assert values[i] == fat[request][c][-(max_len or 10**6) :]
        assert sorted(seen) == sorted(fat)
        assert seen != sorted(seen)
        assert one.stats.versions_verified == one.stats.examples == len(fat)
        assert one.stats.bytes_read > 0
        assert one.stats.events_delivered >= sum(len(f["item"][-(max_len or 10**6) :]) for f in fat.values())
    assert not workers()


def test_cross_features_rebuilt_are_those_that_were_logged(world):
    store, table, _ = world
    for batch in loader(store, table, **SMALL):
        found = history_candidate_cross(batch.histories, "item", batch.candidates["product"], batch.request_ts)
        assert found.count.to_arrow().equals(batch.candidates["count"].to_arrow())


def test_a_plan_matches_candidates_with_the_window_that_the_model_sees(world):
    store, table, fat = world
    match = HistoryMatch(Source("history.item"), Source("cand.product"))
    plan = FeaturePlan({"match": match, "key": Hash(Bucketize(match, (1, 2, 4)), seed=5)})
    for batch in loader(store, table, plan=plan, **SMALL):
        assert batch.features["match"].to_arrow().equals(batch.candidates["count"].to_arrow())
    for batch in loader(store, table, plan=plan, max_len=5, threads=2, **SMALL):
        for i, request in enumerate(batch.request_id.tolist()):
            newest = fat[request]["item"][-5:]
            counts = [newest.count(p) for p in batch.candidates["product"].row(i).tolist()]
            assert batch.features["match"].row(i).tolist() == counts


def test_threads_do_not_change_a_batch(world):
    store, table, _ = world
    runs = [[digest(b) for b in loader(store, table, plan=PLAN, epochs=2, threads=n, **SMALL)] for n in (1, 2, 5)]
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == len(runs[0])


@pytest.mark.parametrize("batch_rows", [None, 50])
def test_restored_at_every_step_from_a_later_generation(world, batch_rows):
    store, table, _ = world
    settings = {**SMALL, "batch_rows": batch_rows, "max_len": 6, "plan": PLAN}
    first_generation = store.pin()
    states, whole = [], []
    one = loader(first_generation, table, threads=2, **settings)
    states.append(one.state_dict())
    for batch in one:
        whole.append(digest(batch))
        states.append(json.loads(json.dumps(one.state_dict())))
    rng = np.random.default_rng(9)
    store.append(some_events(rng, STEPS, 50))
    store.compact(full=True)
    assert store.pin().number > first_generation.number
    for t, state in enumerate(states):
        other = loader(store, table, threads=1 + t % 2, **settings)
        other.load_state_dict(state)
        assert [digest(b) for b in other] == whole[t:]


def test_ranks_partition_each_batch(world):
    store, table, _ = world
    whole = [b.request_id.tolist() for b in loader(store, table, **SMALL)]
    parts = [[b.request_id.tolist() for b in loader(store, table, rank=r, n_ranks=3, **SMALL)] for r in range(3)]
    assert [list(chain.from_iterable(ranks)) for ranks in zip(*parts, strict=True)] == whole


def test_a_state_of_another_snapshot_is_refused_until_its_snapshot_is_named(world):
    store, table, fat = world
    old, before = table.snapshot_id, set(fat)
    one = loader(store, table, **SMALL)
    next(iter(one))
    state = one.state_dict()
    one.close()
    table.append(some_requests(np.random.default_rng(1), store, STEPS, 10**6, fat))
    with pytest.raises(InputError, match=f"snapshot_id={old}, this loader snapshot_id="):
        loader(store, table, **SMALL).load_state_dict(state)
    pinned = loader(store, table, snapshot_id=old, **SMALL)
    pinned.load_state_dict(state)
    rest = list(pinned)
    assert rest[0].t == 1
    assert set(chain.from_iterable(b.request_id.tolist() for b in rest)) < before


def test_a_time_range_is_half_open_and_batches_stay_full(world):
    store, table, fat = world
    times = sorted({f["ts"] for f in fat.values()})
    since, until = times[len(times) // 4], times[len(times) // 2]
    one = loader(store, table, since_ms=since, until_ms=until, batch_rows=20, **SMALL)
    batches = list(one)
    seen = [r for b in batches for r in b.request_id.tolist()]
    assert sorted(seen) == sorted(r for r, f in fat.items() if since <= f["ts"] < until)
    assert {fat[r]["ts"] for r in seen} >= {since}
    assert [len(b) for b in batches[:-1]] == [20] * (len(one) - 1)
    for batch in batches:
        rows = batch.histories.to_jagged("item").to_arrow().to_pylist()
        assert rows == [fat[r]["item"] for r in batch.request_id.tolist()]


def test_a_share_of_the_users_is_whole_users(world):
    store, table, fat = world
    everyone = {f["user"] for f in fat.values()}
    shares = []
    for share in (0.2, 0.5, 1.0):
        seen = [r for b in loader(store, table, user_share=share, user_seed=3, **SMALL) for r in b.request_id.tolist()]
        users = {fat[r]["user"] for r in seen}
        assert sorted(seen) == sorted(r for r, f in fat.items() if f["user"] in users)
        ids = sorted(everyone)
        assert users == {u for u, kept in zip(ids, in_share(pa.array(ids), share, 3).tolist(), strict=True) if kept}
        shares.append(users)
    assert shares[0] < shares[1] < shares[2] == everyone


@pytest.mark.parametrize("group_rows", [4, 16, 4096])
@pytest.mark.parametrize("filters", [{}, {"since_ms": 9_500, "until_ms": 31_000, "user_share": 0.4}])
def test_each_kept_row_is_decoded_once_an_epoch(world, monkeypatch, group_rows, filters):
    store, table, _ = world
    for module in (client, worker):
        monkeypatch.setattr(module, "ROW_GROUP_ROWS", group_rows)
    decoded = []
    original = ExampleTable.read_bucket

    def counted(self, bucket, snapshot_id=None, **ranges):
        examples = original(self, bucket, snapshot_id, **ranges)
        decoded.extend(examples.request_id.tolist())
        return examples

    settings = {**SMALL, "base_rows": 7, "interleave": 2, "threads": 1, **filters}
    whole = [b.request_id.tolist() for b in loader(store, table, **settings)]
    monkeypatch.setattr(ExampleTable, "read_bucket", counted)
    again = [b.request_id.tolist() for b in loader(store, table, **settings)]
    assert again == whole
    assert sorted(decoded) == sorted(chain.from_iterable(whole))


def test_a_filtered_run_resumes_at_every_step_and_under_no_other_filter(world):
    store, table, _ = world
    settings = {**SMALL, "since_ms": 5_000, "user_share": 0.6, "user_seed": 1, "max_len": 3}
    one = loader(store, table, threads=1, **settings)
    states, whole = [one.state_dict()], []
    for batch in one:
        whole.append(digest(batch))
        states.append(json.loads(json.dumps(one.state_dict())))
    assert 2 <= len(whole) < len(loader(store, table, **SMALL))
    for t, state in enumerate(states):
        other = loader(store, table, threads=2, **settings)
        other.load_state_dict(state)
        assert [digest(b) for b in other] == whole[t:]
    for name, value in (("since_ms", None), ("until_ms", 10**12), ("user_share", 0.5), ("user_seed", 2)):
        with pytest.raises(
            InputError, match=f"the state has {name}=.*, this loader {name}={value}: batches would differ"
        ):
            loader(store, table, **{**settings, name: value}).load_state_dict(states[1])


def test_a_filter_that_leaves_nothing_is_a_loader_without_batches(world):
    store, table, _ = world
    for filters in ({"since_ms": 10**9}, {"until_ms": 0}, {"since_ms": 7, "until_ms": 7}, {"user_share": 1e-30}):
        one = loader(store, table, epochs=None, **filters)
        assert len(one) == 0
        assert list(one) == []


def test_projection_reads_less_and_sharing_holds(world):
    store, table, _ = world
    small = loader(store, table, projection=Projection(columns=("price",), max_len=2), **SMALL)
    large = loader(store, table, **SMALL)
    for batch in small:
        assert list(batch.histories.events.columns) == ["price"]
        assert len(batch.histories.events.users) < len(batch)
    list(large)
    assert small.stats.bytes_read < large.stats.bytes_read


def test_the_generation_that_is_read_is_held_meanwhile(world, monkeypatch, caplog):
    store, table, _ = world
    reader = loader(store, table, threads=2, **SMALL)
    batches = iter(reader)
    next(batches)
    assert [n for n, _, _ in store.archive.holders()] == [store.pin().number]
    reader.close()
    batches.close()
    assert store.archive.holders() == []

    def refuse(*_):
        raise StoreError("read-only file system")

    monkeypatch.setattr(LocalObjects, "put", refuse)
    assert len(list(reader)) > 0
    assert "read without holding it" in caplog.text


def test_damage_reaches_the_reader_as_it_is(world, tmp_path):
    _, table, _ = world
    with HistoryStore.create(tmp_path / "other", SCHEMA, n_buckets=4, sync=False) as other:
        rng = np.random.default_rng(0)
        for step in range(STEPS):
            other.append(some_events(rng, step, 60))
        other.compact()
        # Histories of another store: versions do not fit, and the error names a user.
        with pytest.raises((CorruptionError, InputError), match="user"):
            list(loader(other, table, threads=2, **SMALL))
        assert len(list(loader(other, table, threads=2, verify=False, **SMALL))) > 0
    assert not workers()


def test_bad_arguments_are_named(world, tmp_path):
    store, table, _ = world
    with pytest.raises(InputError, match=r"table='examples' is a str; open it first: ExampleTable.open\('examples'\)"):
        loader(store, "examples")
    with pytest.raises(InputError, match="both projection and max_len=3"):
        loader(store, table, projection=Projection(), max_len=3)
    with pytest.raises(InputError, match=r"both rows=RowFilter\(since_ms=3.* and RowFilter\(.*user_share=0.5"):
        loader(store, table, rows=RowFilter(since_ms=3), user_share=0.5)
    with pytest.raises(InputError, match="user_share=2"):
        loader(store, table, user_share=2)
    with (
        HistoryStore.create(tmp_path / "six", SCHEMA, n_buckets=6) as six,
        pytest.raises(SchemaError, match=r"bucket\[4\].*no multiple"),
    ):
        loader(six, table)
    with ExampleTable.create(tmp_path / "empty", event_schema=SCHEMA, example_schema=EXAMPLES, n_buckets=4) as empty:
        assert list(loader(store, empty)) == []


def test_a_table_is_read_as_before_when_its_store_has_twice_the_buckets(world):
    store, table, _ = world
    before = [digest(b) for b in loader(store, table, plan=PLAN, threads=2, **SMALL)]
    store.rebucket()
    assert store.pin().n_buckets == 2 * table.n_buckets
    assert [digest(b) for b in loader(store, table, plan=PLAN, threads=2, **SMALL)] == before


BUDGET = BatchBudget(limit=400, pair=1 / 64, max_events=350)


@pytest.mark.parametrize("shared", [True, False])
def test_a_budget_counts_the_lengths_that_were_drawn(world, shared):
    budget = BatchBudget(limit=60, shared=shared)
    store, table = world[:2]
    settings = {**SMALL, "block": 6, "budget": budget}
    drawn = list(loader(store, table, **settings, projection=Projection(max_len=30, shortest=2)))
    longest = list(loader(store, table, **settings, projection=Projection(max_len=30)))
    assert len(drawn) < len(longest)
    assert sorted(i for b in drawn for i in b.request_id) == sorted(i for b in longest for i in b.request_id)
    if not shared:
        assert all(b.histories.lengths().sum() <= budget.limit or len(b) == 1 for b in drawn)


@pytest.mark.parametrize(
    "budget", [BUDGET, BatchBudget(limit=150), BatchBudget(limit=60, by_length=True, shared=False)]
)
def test_a_budget_bounds_what_batches_hold(world, budget):
    store, table, fat = world
    settings = {**SMALL, "block": 6, "budget": budget, "epochs": 2}
    one = loader(store, table, threads=2, **settings)
    batches = list(one)
    assert len(batches) == len(one) > 20
    if budget.by_length:
        spread = [np.ptp(b.histories.lengths()) for b in batches]
        every = [len(f["item"]) for f in fat.values()]
        assert np.mean(spread) < 0.2 * np.ptp(every)
    assert sorted(r for b in batches for r in b.request_id.tolist()) == sorted([*fat, *fat])
    for batch in batches:
        rows = batch.histories.to_jagged("item").to_arrow().to_pylist()
        assert rows == [fat[r]["item"] for r in batch.request_id.tolist()]
        longest = {}
        for i, (user, row) in enumerate(zip(batch.users.tolist(), rows, strict=True)):
            key = user if budget.shared else i
            longest[key] = max(longest.get(key, 0), len(row))
        assert sum(n + budget.pair * n * n for n in longest.values()) <= budget.limit or len(longest) == 1
    if budget.by_length:
        spread = [np.ptp([len(fat[r]["item"]) for r in b.request_id.tolist()]) for b in batches]
        every = [len(f["item"]) for f in fat.values()]
        assert np.mean(spread) < 0.5 * np.ptp(every)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_budget_run_is_the_same_with_any_workers_and_from_any_step(world, engine):
    store, table, _ = world
    settings = {**SMALL, "block": 6, "budget": BUDGET, "max_len": 9, "plan": PLAN, "since_ms": 3_000}
    one = loader(store, table, threads=1, **settings)
    states, whole = [one.state_dict()], []
    for batch in one:
        whole.append(digest(batch))
        states.append(json.loads(json.dumps(one.state_dict())))
    steps = range(len(states)) if engine == "threads" else (0, 3, len(whole) - 1, len(whole))
    for t in steps:
        other = loader(store, table, engine=engine, workers=1 + t % 3, **settings)
        other.load_state_dict(states[t])
        assert [digest(b) for b in other] == whole[t:]
    for changes in ({"budget": None}, {"budget": BatchBudget(limit=399)}, {"max_len": 8}):
        with pytest.raises(InputError, match=r"the state has budget=.*batches would differ"):
            loader(store, table, **{**settings, **changes}).load_state_dict(states[1])


def test_ranks_of_a_budget_have_users_of_their_own_and_rebuild_only_these(world):
    store, table, _ = world
    settings = {**SMALL, "block": 6, "budget": BatchBudget(limit=2_000)}
    whole = [set(b.request_id.tolist()) for b in loader(store, table, **settings)]
    for engine in ("threads", "processes"):
        ranks = [loader(store, table, rank=r, n_ranks=3, engine=engine, workers=2, **settings) for r in range(3)]
        for t, parts in enumerate(zip(*ranks, strict=True)):
            rows = [b.request_id.tolist() for b in parts]
            assert sorted(chain.from_iterable(rows)) == sorted(whole[t])
            users = [set(b.users.tolist()) for b in parts]
            assert sum(map(len, users)) == len(set().union(*users))
        assert sum(r.stats.versions_verified for r in ranks) == sum(map(len, whole))


def test_a_batch_of_fewer_users_than_ranks_leaves_some_ranks_an_empty_part(world):
    store, table, _ = world
    settings = {**SMALL, "block": 1, "budget": BatchBudget(limit=1), "plan": PLAN}
    whole = [b.request_id.tolist() for b in loader(store, table, **settings)]
    parts = [loader(store, table, rank=r, n_ranks=2, **settings) for r in range(2)]
    for expected, first, second in zip(whole, *parts, strict=True):
        assert sorted(first.request_id.tolist() + second.request_id.tolist()) == sorted(expected)
        assert len(second) == 0
        assert set(second.features) == set(first.features)
