"""Batches that are planned, and few requests that are read, in one call: as the long way does it, in either backend."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import thinrow
from thinrow.history import buckets
from thinrow.history.archive.few import FewReads
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import Window
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.kernels import use
from thinrow.schema import EventSchema, Projection

_folders = itertools.count()
#: One that sorts before the group of keys, and one that sorts after it.
_GROUPS = {"a": ("item",), "zz": ("price", "kind")}


def _table(rng: np.random.Generator, n: int, users: int, late: bool) -> pa.Table:
    """Events in order of time, or not."""
    ts = rng.integers(0, 2_000, n)
    return pa.table(
        {
            "user": rng.integers(0, users, n) * 7 - 3,
            "ts": ts if late else np.sort(ts),
            "item": rng.integers(-(2**40), 2**40, n),
            "price": pa.array(rng.random(n).astype(np.float32), mask=rng.random(n) < 0.3),
            "kind": rng.integers(0, 5, n).astype(np.int8),
        }
    )


def _same(a: Reconstruction, b: Reconstruction) -> None:
    x, y = a.histories, b.histories
    for name in ("user_of", "start", "stop", "bound", "exact"):
        np.testing.assert_array_equal(getattr(x, name), getattr(y, name), name)
    for name in ("users", "offsets", "event_ts", "arrival", "hidden_from"):
        np.testing.assert_array_equal(getattr(x.events, name), getattr(y.events, name), name)
    assert list(x.events.columns) == list(y.events.columns)
    for name, column in x.events.columns.items():
        other = y.events.columns[name]
        assert column.values.dtype == other.values.dtype
        shown = slice(None) if column.valid is None else column.valid
        assert (column.valid is None) == (other.valid is None)
        np.testing.assert_array_equal(column.values[shown], other.values[shown], name)
        if column.valid is not None and other.valid is not None:
            np.testing.assert_array_equal(column.valid, other.valid, name)
    np.testing.assert_array_equal(a.status, b.status)
    np.testing.assert_array_equal(a.kept, b.kept)


def _counts(stats: ReadStats) -> dict[str, Any]:
    """What was counted; asking for arrival numbers later counts more."""
    names = ("bytes_read", "events_decoded", "events_delivered", "pieces", "mixed_pieces", "versions_verified")
    counts = {name: getattr(stats, name) for name in names}
    return counts | {"columns": {column: size for column, size in stats.column_bytes.items() if size}}


def _ways(generation: Any, requests: RequestBatch, projection: Projection) -> tuple[list[Reconstruction], list[bool]]:
    """The long way, the plan at once, and whatever comes first; and whether the short ways did it."""
    done: list[bool] = []

    def told(call: Any) -> Any:
        def tell(*args: Any, **named: Any) -> Any:
            found = call(*args, **named)
            done.append(found is not None)
            return found

        return tell

    def rebuilt() -> Reconstruction:
        built = reconstruct(generation, requests, projection)
        counts.append(_counts(built.stats))
        if len(requests.inline):
            # The long way reads arrival numbers to merge by.
            del counts[-1]["bytes_read"], counts[-1]["columns"]
        return built

    counts: list[dict[str, Any]] = []
    no = mock.Mock(return_value=None)
    with mock.patch.object(FewReads, "read", no), mock.patch.object(Window, "at_once", no):
        found = [rebuilt()]
    with mock.patch.object(FewReads, "read", no), mock.patch.object(Window, "at_once", told(Window.at_once)):
        # The first of two finds pages that are not there yet.
        found += [rebuilt() for _ in range(2)]
    read = FewReads.read
    with mock.patch.object(FewReads, "read", lambda self, *args: told(read)(self, *args)):
        found += [rebuilt() for _ in range(2)]
    assert all(c == counts[0] for c in counts)
    return found, done


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 3_000),
    users=st.integers(1, 12),
    late=st.booleans(),
    parts=st.integers(1, 2),
    asked=st.integers(1, 15),
    max_len=st.sampled_from([None, 1, 7, 200, 2_000]),
    horizon=st.sampled_from([None, 0, 300]),
    columns=st.sampled_from([None, ("price",), ("kind", "item")]),
)
def test_every_way_reads_the_same(
    tmp_path: Path,
    seed: int,
    n: int,
    users: int,
    late: bool,
    parts: int,
    asked: int,
    max_len: int | None,
    horizon: int | None,
    columns: tuple[str, ...] | None,
) -> None:
    rng = np.random.default_rng(seed)
    schema = EventSchema.infer(_table(rng, 1, 1, False).schema, user="user", time="ts", groups=_GROUPS)
    with thinrow.create(tmp_path / str(next(_folders)), schema, 4, sync=False) as store:
        for _ in range(parts):
            store.append(_table(rng, n // parts, users, late))
            store.compact()
        ids, times = rng.integers(0, users + 1, asked) * 7 - 3, rng.integers(0, 2_200, asked)
        if rng.random() < 0.5:
            recent = _table(rng, 40, users, late)
            shift = 0 if late else 1_900
            store.append(recent.set_column(1, "ts", pa.array(recent.column("ts").to_numpy() + shift)))
        if rng.random() < 0.7:
            ids, times = ids[np.unique(ids, return_index=True)[1]], times[: len(np.unique(ids))]
            order = rng.permutation(len(ids))
            ids, times = ids[order], times[order] + 2_000
        taken = store.snapshot(ids, times)
        if rng.random() < 0.5:
            # Later events than the requests knew, which are recent to some of them.
            store.append(_table(rng, 200, users, True))
            store.compact(full=True)
        projection = Projection(columns=columns, max_len=max_len, horizon_ms=horizon)
        with use("numba" if rng.random() < 0.7 else "reference"):
            found, _ = _ways(store.pin(), taken.requests, projection)
        for other in found[1:]:
            _same(found[0], other)


def test_plain_requests_go_the_short_ways(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    table = _table(rng, 20_000, 9, False)
    schema = EventSchema.infer(table.schema, user="user", time="ts", groups=_GROUPS)
    with thinrow.create(tmp_path, schema, 4, sync=False) as store:
        store.append(table)
        store.compact(full=True)
        users = np.repeat(np.arange(9) * 7 - 3, 2)
        taken = store.snapshot(users, np.full(18, 1_500))
        for backend in ("numba", "reference"):
            with use(backend):
                found, done = _ways(store.pin(), taken.requests, Projection(max_len=50))
            assert done == [True] * 4
            for other in found[1:]:
                _same(found[0], other)


def test_recent_events_are_joined_in_one_call(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    table = _table(rng, 20_000, 9, False)
    schema = EventSchema.infer(table.schema, user="user", time="ts", groups=_GROUPS)
    with thinrow.create(tmp_path, schema, 4, sync=False) as store:
        store.append(table)
        store.compact(full=True)
        newer = _table(rng, 500, 12, False)
        store.append(newer.set_column(1, "ts", pa.array(newer.column("ts").to_numpy() + 2_000)))
        for users in (np.array([4]), np.array([11, -3, 67, 4]), np.array([74])):
            taken = store.snapshot(users, np.full(len(users), 3_500))
            for backend in ("numba", "reference"):
                with use(backend):
                    found, done = _ways(store.pin(), taken.requests, Projection(max_len=70))
                assert done[-2:] == [True] * 2
                for other in found[1:]:
                    _same(found[0], other)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    users=st.integers(1, 3),
    asked=st.integers(1, 9),
    max_len=st.sampled_from([1, 7, 2_000]),
    horizon=st.sampled_from([0, 5, 60, 1_000]),
)
def test_visits_far_apart_and_a_horizon_between_them(
    tmp_path: Path, seed: int, users: int, asked: int, max_len: int, horizon: int
) -> None:
    """Stripes end where a user goes away for long, and requests fall into such gaps: some see nothing of theirs."""
    rng = np.random.default_rng(seed)
    # Whole stripes of most visits, so that gaps lie between stripes.
    sizes = 6 * rng.integers(0, 4, users * 4) + np.where(rng.random(users * 4) < 0.2, rng.integers(0, 6, users * 4), 0)
    sizes[0] += 1
    visit = np.repeat(np.arange(users * 4), sizes)
    visit = visit[np.argsort(visit % 4, kind="stable")]
    owner, ts = visit // 4, np.sort(visit % 4 * 10_000 + rng.integers(0, 60, len(visit)))
    table = pa.table({"user": owner, "ts": ts, "item": np.arange(len(ts))})
    schema = EventSchema.infer(table.schema, user="user", time="ts")
    with (
        mock.patch.object(buckets, "STRIPE_ROWS", 6),
        thinrow.create(tmp_path / str(next(_folders)), schema, 2, sync=False) as store,
    ):
        store.append(table)
        store.compact()
        ids = rng.integers(0, users + 1, asked)
        times = np.maximum(rng.integers(0, 4, asked) * 10_000 + rng.choice([-3_000, 20, 500, 3_000], asked), 0)
        taken = store.snapshot(ids, times)
        found, _ = _ways(taken.generation, taken.requests, Projection(max_len=max_len, horizon_ms=horizon))
        for other in found[1:]:
            _same(found[0], other)
        shown = []
        for u, t in zip(ids, times, strict=True):
            shown.append(np.sort(ts[(owner == u) & (ts < t) & (ts >= t - horizon)])[-max_len:].tolist())
        assert found[-1].histories.to_jagged("event_ts").to_arrow().to_pylist() == shown
