"""What users did until now, read in one call: as a snapshot and its reconstruction give it, in either backend."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import thinrow
from thinrow.history import store as store_module
from thinrow.history.live import read_live
from thinrow.history.reconstruct import Reconstruction
from thinrow.history.store import HistoryStore
from thinrow.kernels import use
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

_folders = itertools.count()
_SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "a"),
        ColumnSpec(2, "price", Trait.NUMERIC, "float32", "zz", nullable=True),
        ColumnSpec(3, "kind", Trait.ID, "int8", "zz"),
        ColumnSpec(4, "place", Trait.VECTOR, "float32", "v", nullable=True, size=3),
        ColumnSpec(5, "tags", Trait.ID_LIST, "int32", "l"),
        ColumnSpec(6, "shop", Trait.CATEGORICAL, "string", "s", nullable=True),
        ColumnSpec(7, "code", Trait.ID, "int16", "zz", nullable=True),
    ),
    user_column="user",
    time_column="ts",
    event_id_column="id",
    event_id_dtype="int64",
    supersedes_column="old",
)
#: Without lists and text, which one call does not read.
_FIXED = ("item", "price", "kind", "place", "code")


def _table(rng: np.random.Generator, n: int, users: int, ts: np.ndarray, first_id: int, fixed: float = -1) -> pa.Table:
    """Events of a store with every trait; with ``fixed`` from 0 on so many of them correct an earlier one."""
    owner = rng.integers(0, users, n) * 7 - 3
    ids = np.arange(first_id, first_id + n)
    old = np.full(n, -1)
    for i in range(n):
        earlier = np.flatnonzero(owner[:i] == owner[i])
        if len(earlier) and rng.random() < fixed:
            old[i] = ids[earlier[-1]]
    return pa.table(
        {
            "user": owner,
            "ts": ts,
            "item": rng.integers(-(2**40), 2**40, n),
            "price": pa.array(rng.random(n).astype(np.float32), mask=rng.random(n) < 0.3),
            "kind": rng.integers(0, 5, n).astype(np.int8),
            "place": pa.array(
                [None if rng.random() < 0.2 else rng.random(3).astype(np.float32) for _ in range(n)],
                pa.list_(pa.float32(), 3),
            ),
            "tags": pa.array([rng.integers(0, 9, rng.integers(0, 3)) for _ in range(n)], pa.list_(pa.int32())),
            "shop": pa.array([None if rng.random() < 0.2 else f"shop {rng.integers(0, 4)}" for _ in range(n)]),
            "code": pa.array(rng.integers(0, 99, n).astype(np.int16), mask=rng.random(n) < 0.5),
            "id": ids,
            "old": pa.array(old, mask=old < 0),
        }
    )


def _fitting(table: pa.Table, store: HistoryStore) -> pa.Table:
    """The table under the schema of today."""
    for c in store.schema.columns:
        if c.name == "fresh":
            table = table.append_column("fresh", pa.array(np.arange(len(table), dtype=np.int32) - 5))
    return table


def _long(store: HistoryStore, users: Any, times: Any, projection: Projection) -> Reconstruction:
    with mock.patch.object(store_module, "read_live", mock.Mock(return_value=None)):
        return store.read(users, times, projection)


def _short(store: HistoryStore, users: Any, times: Any, projection: Projection) -> tuple[Reconstruction, list[bool]]:
    done: list[bool] = []

    def told(*args: Any) -> Any:
        found = read_live(*args)
        done.append(found is not None)
        return found

    with mock.patch.object(store_module, "read_live", told):
        return store.read(users, times, projection), done


def _same(a: Reconstruction, b: Reconstruction) -> None:
    x, y = a.histories, b.histories
    assert x.events.users[x.user_of].tolist() == y.events.users[y.user_of].tolist()
    assert x.bound.tolist() == y.bound.tolist()
    assert list(x.events.columns) == list(y.events.columns)
    for name in ("event_ts", "arrival", *x.events.columns):
        p, q = x.to_jagged(name), y.to_jagged(name)
        assert p.offsets.tolist() == q.offsets.tolist(), name
        assert p.column.values.dtype == q.column.values.dtype
        assert p.to_arrow().to_pylist() == q.to_arrow().to_pylist(), name
    index, _ = x.positions()
    other, _ = y.positions()
    assert x.events.hidden_from[index].tolist() == y.events.hidden_from[other].tolist()
    assert a.stats.events_delivered == b.stats.events_delivered
    np.testing.assert_array_equal(a.status, b.status)
    np.testing.assert_array_equal(a.kept, b.kept)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_live_read_is_a_snapshot_and_its_reconstruction(tmp_path: Path, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    users, backend = data.draw(st.integers(1, 9)), data.draw(st.sampled_from(["numba", "numba", "reference"]))
    taken, now = 0, 0
    with thinrow.create(tmp_path / str(next(_folders)), _SCHEMA, 4, sync=False) as store:
        for step in data.draw(
            st.lists(
                st.sampled_from(["append", "late", "again", "correct", "compact", "evolve", "erase", "retain"]),
                min_size=2, max_size=7,
            )
        ):  # fmt: skip
            n = int(rng.integers(1, 60))
            ts = np.sort(rng.integers(now, now + 500, n))
            if step == "late":
                ts = rng.integers(0, now + 400, n)
            if step in ("append", "late", "correct"):
                table = _table(rng, n, users, ts, taken, 0.2 if step == "correct" else -1)
                store.append(_fitting(table, store))
                taken, now, last = taken + n, max(now, int(ts.max())), table
            elif step == "again" and taken:
                store.append(_fitting(last, store))
            elif step == "compact":
                store.compact(full=bool(rng.random() < 0.5))
            elif step == "evolve" and "fresh" not in [c.name for c in store.schema.columns]:
                store.evolve(
                    add={"fresh": {"trait": "id", "dtype": "int32", "group": "zz"}},
                    widen={"code": "int32"} if rng.random() < 0.5 else None,
                )
            elif step == "erase":
                store.erase(users=[int(rng.integers(0, users)) * 7 - 3], grace_s=0)
            elif step == "retain" and rng.random() < 0.5:
                store.retain(thinrow.Retention(max_events=10), grace_s=0)
        names = (*_FIXED, *(["fresh"] if "fresh" in [c.name for c in store.schema.columns] else []))
        for _ in range(3):
            asked = rng.permutation(users + 1)[: rng.integers(1, users + 2)] * 7 - 3
            times = rng.integers(0, now + 900, len(asked))
            columns = data.draw(st.sampled_from([None, (), names, ("price",), ("kind", "item")]))
            projection = Projection(
                columns=columns,
                max_len=data.draw(st.sampled_from([1, 7, 64, 2_000])),
                horizon_ms=data.draw(st.sampled_from([None, 0, 300])),
            )
            with use(backend):
                _same(_long(store, asked, times, projection), _short(store, asked, times, projection)[0])


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_what_is_in_order_or_late_is_read_in_one_call(tmp_path: Path, backend: str) -> None:
    rng = np.random.default_rng(5)
    with thinrow.create(tmp_path, _SCHEMA, 4, sync=False) as store, use(backend):
        store.append(_table(rng, 8_000, 9, np.sort(rng.integers(0, 10_000, 8_000)), 0))
        store.compact(full=True)
        store.append(_table(rng, 300, 12, np.sort(rng.integers(10_000, 11_000, 300)), 8_000))
        asked = (np.array([4]), np.array([11, -3, 67, 4]), np.array([74]), np.array([-999, 18]))
        for late in (False, True):
            if late:
                store.append(_table(rng, 200, 12, rng.integers(9_000, 12_000, 200), 9_000))
                store.evolve(add={"fresh": {"trait": "id", "dtype": "int32", "group": "zz"}})
            for users, max_len, horizon in itertools.product(asked, (1, 70, 3_000), (None, 1_500)):
                names = (*_FIXED, "fresh") if late else _FIXED
                projection = Projection(columns=names, max_len=max_len, horizon_ms=horizon)
                for times in (np.full(len(users), 20_000), np.full(len(users), 9_700)):
                    found, done = _short(store, users, times, projection)
                    assert done == [True]
                    _same(_long(store, users, times, projection), found)


def _fill(store: HistoryStore, rng: np.random.Generator) -> None:
    """Events of the same users in both tiers."""
    store.append(_table(rng, 900, 3, np.sort(rng.integers(0, 1_000, 900)), 0))
    store.compact(full=True)
    store.append(_table(rng, 90, 3, np.sort(rng.integers(1_000, 2_000, 90)), 900))


def test_a_generation_that_the_tier_is_ahead_of_is_pinned_again(tmp_path: Path) -> None:
    with thinrow.create(tmp_path, _SCHEMA, 2, sync=False) as store:
        _fill(store, np.random.default_rng(6))
        old = store.pin()
        projection, users, times = Projection(columns=_FIXED, max_len=500), np.array([4, -3]), np.full(2, 3_000)
        pins = [old, old]
        before = read_live(lambda: pins.pop(0), store.recent, users, times, projection)
        store.compact(full=True)
        again = [old, store.pin()]
        after = read_live(lambda: again.pop(0), store.recent, users, times, projection)
        assert before is not None
        assert after is not None
        assert not again
        _same(before, after)
        # The tier has dropped what only a newer generation holds.
        assert read_live(lambda: old, store.recent, users, times, projection) is None


def test_damage_of_the_tier_is_named_by_the_long_way(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    with thinrow.create(tmp_path, _SCHEMA, 2, sync=False) as store:
        _fill(store, rng)
        users, times, projection = np.array([4]), np.array([3_000]), Projection(columns=_FIXED, max_len=50)
        whole = store.recent.held(users)
        assert read_live(store.pin, store.recent, users, times, projection) is not None
        for at in rng.integers(0, len(whole) - 8, 60).tolist():
            broken = bytearray(whole)
            broken[at] ^= 1 << int(rng.integers(0, 8))
            for data in (bytes(broken), whole[:at] + bytes(8)):
                for backend in ("numba", "reference"):
                    with use(backend), mock.patch.object(store.recent, "held", lambda _, data=data: data):
                        assert read_live(store.pin, store.recent, users, times, projection) is None


def test_an_erasure_sends_only_its_own_users_the_long_way(tmp_path: Path) -> None:
    with thinrow.create(tmp_path, _SCHEMA, 2, sync=False) as store:
        _fill(store, np.random.default_rng(8))
        store.erase(users=[4], grace_s=0)
        projection, times = Projection(columns=_FIXED, max_len=50), np.array([3_000])
        for user, short in ((4, False), (-3, True), (11, True)):
            found, done = _short(store, [user], times, projection)
            assert done == [short]
            _same(_long(store, [user], times, projection), found)
