"""One read of an archive that gives more than 2^31 elements: positions are int64 from the file to the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

pytestmark = pytest.mark.slow

BEYOND, SIZE, EVENTS = 1 << 31, 4_096, 640
#: Requests that see all of user 1, so that their elements are more than 2^31; user 2 comes behind them.
REPEATS = BEYOND // (SIZE * EVENTS) + 3
SCHEMA = EventSchema(
    (
        ColumnSpec(1, "spot", Trait.VECTOR, "int8", "a", size=SIZE),
        ColumnSpec(2, "seen", Trait.ID_LIST, "int8", "a"),
    )
)


def elements(events: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """(n, SIZE) what the events have, no two alike."""
    return (events[:, None] * 31 + np.arange(SIZE) * (events[:, None] % 5 + 1)).astype(np.int8)


def kept(event: int) -> int:
    """How many of its elements are in the event's list."""
    return SIZE - event % 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HistoryStore]:
    path: Path = tmp_path_factory.mktemp("beyond") / "store"
    with HistoryStore.create(path, SCHEMA, n_buckets=1) as opened:
        for user, n in ((1, EVENTS), (2, 40)):
            held = elements(np.arange(n) + 1_000 * user)
            spot = pa.FixedSizeListArray.from_arrays(pa.array(held.ravel()), SIZE)
            seen = pa.array([row[: kept(i)] for i, row in enumerate(held)], pa.list_(pa.int8()))
            columns = {"user_id": np.full(n, user), "event_ts": np.arange(n) * 10, "spot": spot, "seen": seen}
            opened.append(pa.table(columns))
        opened.compact()
        yield opened


@pytest.fixture(scope="module")
def requests(store: HistoryStore) -> RequestBatch:
    users = np.append(np.full(REPEATS, 1), [2, 1])
    snapshot = store.snapshot(users, np.append(np.full(REPEATS, EVENTS * 10), [10_000, 25]))
    assert snapshot.requests.versions["seq_len"][[0, -2, -1]].tolist() == [EVENTS, 40, 3]
    return snapshot.requests


def check(row: Any, events: npt.NDArray[np.int64]) -> None:
    """Whether the events' elements are what was written of them."""
    np.testing.assert_array_equal(np.asarray(row).reshape(len(events), SIZE), elements(events))


def test_vectors_of_one_batch(store: HistoryStore, requests: RequestBatch) -> None:
    histories = reconstruct(store.pin(), requests, Projection(columns=("spot",))).histories
    jagged = histories.to_jagged("spot")
    values = jagged.column.values.reshape(-1)
    assert values.dtype == np.int8
    assert jagged.offsets.dtype == np.int64
    assert len(values) == (REPEATS * EVENTS + 43) * SIZE > BEYOND
    for request in (0, 1, REPEATS // 2, REPEATS - 1):
        start = int(jagged.offsets[request]) * SIZE
        check(values[start : start + EVENTS * SIZE], np.arange(EVENTS) + 1_000)
    # The events around element 2^31, and the last ones of all.
    event = BEYOND // SIZE
    check(values[(event - 2) * SIZE : (event + 2) * SIZE], (np.arange(event - 2, event + 2) % EVENTS) + 1_000)
    check(values[-43 * SIZE : -3 * SIZE], np.arange(40) + 2_000)
    check(values[-3 * SIZE :], np.arange(3) + 1_000)


def test_lists_of_one_batch(store: HistoryStore, requests: RequestBatch) -> None:
    histories = reconstruct(store.pin(), requests, Projection(columns=("seen",))).histories
    jagged = histories.to_jagged("seen")
    column = jagged.column
    assert column.offsets is not None
    assert (column.offsets.dtype, jagged.offsets.dtype) == (np.int64, np.int64)
    lengths = np.array([kept(i) for i in range(EVENTS)])
    wanted = np.concatenate([np.tile(lengths, REPEATS), lengths[:40], lengths[:3]])
    np.testing.assert_array_equal(np.diff(column.offsets), wanted)
    assert len(column.values) == column.offsets[-1] > BEYOND
    around = int(np.searchsorted(column.offsets, BEYOND))
    total = len(column.offsets) - 1
    for place in (0, around - 1, around, total - 44, total - 43, total - 4, total - 1):
        event = place % EVENTS + 1_000 if place < total - 43 else place - (total - 43) + 2_000
        event = place - (total - 3) + 1_000 if place >= total - 3 else event
        found = column.values[column.offsets[place] : column.offsets[place + 1]]
        np.testing.assert_array_equal(found, elements(np.array([event]))[0, : kept(event % 1_000)])
