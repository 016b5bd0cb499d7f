"""What a store is given: request times, and things that are no table."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.history.intake import check_table, request_times
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        (5, [5, 5]),
        ([5, 6], [5, 6]),
        (np.array([5, 6], np.int32), [5, 6]),
        (np.datetime64("1970-01-02"), [86_400_000, 86_400_000]),
        (np.array(["1970-01-01T00:00:01", "1970-01-01T00:00:02"], "datetime64[s]"), [1000, 2000]),
    ],
)
def test_request_times(given: object, ms: list[int]) -> None:
    assert request_times(given, 2).tolist() == ms


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5.5, "request time .*5.5.* is of float64; pass integer milliseconds"),
        (datetime(2020, 1, 1), "is of object; pass integer milliseconds"),
        ([np.datetime64("NaT")] * 2, "pass integer milliseconds"),
        ([1, 2, 3], "3 request times for 2 users; give one for all, or one for each"),
    ],
)
def test_request_times_refused(given: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        request_times(given, 2)


def test_a_table_is_a_table() -> None:
    schema = EventSchema.infer(pa.schema([("u", pa.int64()), ("t", pa.int64())]), user="u", time="t")
    with pytest.raises(InputError, match=r"events are a dict; pass a pyarrow\.Table"):
        check_table({"u": [1], "t": [1]}, schema)


def test_a_store_takes_dates(tmp_path: Path) -> None:
    events = pa.table({"u": [7, 7], "t": pa.array([999, 1000], pa.timestamp("ms")), "item": [1, 2]})
    schema = EventSchema.infer(events.schema, user="u", time="t")
    with HistoryStore.create(tmp_path, schema, 1) as store:
        store.append(events)
        assert store.snapshot([7], np.datetime64("1970-01-01T00:00:01")).requests.request_ts.tolist() == [1000]
        assert store.read([7], np.datetime64("1970-01-01T00:00:01", "s")).histories.lengths().tolist() == [1]
        with pytest.raises(InputError, match="pass integer milliseconds"):
            store.snapshot([7], 1000.0)
