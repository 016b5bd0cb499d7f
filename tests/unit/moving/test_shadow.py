"""Every difference between a pipeline's fat rows and thinrow's histories is found, under the cause that was planted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import InputError
from thinrow.history.reconstruct import Reconstruction, reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.jagged import Events
from thinrow.moving import CAUSES, FatLayout, FatRows, ShadowReport, compare, evidence
from thinrow.schema import EventSchema, Projection

LAYOUT = FatLayout(user="user", request_ts="request_ts", event_ts="event_ts", events={"item": "item"}, request_id="id")
T = 100


class Side:
    """A store with users 0 to 4; events at 10, 20, ..., 90, items as times; the event at 50 arrives after the first
    request, one at 70 corrects that of 60 after the first request too."""

    def __init__(self, folder: Path) -> None:
        user = np.repeat(np.arange(5), 9)
        ts = np.tile(np.arange(10, 100, 10), 5)
        table = pa.table(
            {"user": user, "event_ts": ts, "item": ts, "id": [f"{u}/{t}" for u, t in zip(user, ts, strict=True)]}
        )
        table = table.append_column("fixes", pa.nulls(len(table), pa.string()))
        self.schema = EventSchema.infer(table.schema, user="user", time="event_ts", event_id="id", supersedes="fixes")
        self.store = HistoryStore.create(folder, self.schema, 2, sync=False)
        late = table.filter(pa.array(ts == 50))
        self.store.append(table.filter(pa.array(ts != 50)))
        first = self.store.snapshot(np.arange(5), T)
        self.store.append(late)
        fixed = pa.table(
            {"user": np.arange(5), "event_ts": [60] * 5, "item": [61] * 5, "id": [f"{u}/f" for u in range(5)]}
        )
        self.store.append(fixed.append_column("fixes", pa.array([f"{u}/60" for u in range(5)])))
        second = self.store.snapshot(np.arange(5), T)
        self.store.compact()
        self.requests = [first.requests, second.requests]

    def rows(self, *lists: list[tuple[int, int]], users: list[int] | None = None, at: int = T) -> FatRows:
        n = len(lists)
        table = pa.table(
            {
                "user": users or list(range(n)),
                "request_ts": [at] * n,
                "id": list(range(n)),
                "event_ts": pa.array([[t for t, _ in r] for r in lists], pa.list_(pa.int64())),
                "item": pa.array([[i for _, i in r] for r in lists], pa.list_(pa.int64())),
            }
        )
        bare = EventSchema.infer(
            table.select(["user", "request_ts"]).append_column("item", pa.array([1] * n)).schema,
            user="user",
            time="request_ts",
        )
        return FatRows.from_arrow(table, LAYOUT, bare)

    def built(self, requests: RequestBatch, n: int, newest: int | None = None) -> Reconstruction:
        return reconstruct(self.store.pin(), requests.take(np.arange(n)), Projection(max_len=newest))

    def known(self) -> Events:
        return evidence(self.store.pin(), self.store.users(), ["item"])

    def compare(self, which: int, *lists: list[tuple[int, int]], newest: int | None = None) -> ShadowReport:
        rows = self.rows(*lists)
        return compare(rows, self.built(self.requests[which], len(lists), newest), known=self.known())


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path / "s")


def e(*times: int) -> list[tuple[int, int]]:
    return [(t, t) for t in times]


BEFORE = e(10, 20, 30, 40, 60, 70, 80, 90)
AFTER = [*e(10, 20, 30, 40, 50), (60, 61), *e(70, 80, 90)]


def test_equal_rows(side: Side) -> None:
    report = side.compare(0, BEFORE, BEFORE)
    assert report.equal.all()
    assert side.compare(1, AFTER).equal.all()
    assert all(v == {"rows": 0, "theirs": 0, "ours": 0} for v in report.summary().values())


def test_what_only_theirs_has(side: Side) -> None:
    report = side.compare(
        0,
        sorted([*BEFORE, (50, 50)]),  # late to thinrow
        [*BEFORE[:4], (60, 61), *BEFORE[5:]],  # they know the correction already
        [*BEFORE, (100, 1)],
        [*BEFORE, (101, 1)],
        sorted([*BEFORE, (55, 1)]),
    )
    assert [report.causes(i) for i in range(5)] == [
        {"late": (1, 0)},
        {"restated": (1, 1)},
        {"boundary": (1, 0)},
        {"future": (1, 0)},
        {"unknown": (1, 0)},
    ]
    assert report.summary()["late"] == {"rows": 1, "theirs": 1, "ours": 0}


def test_a_correction_that_they_lack(side: Side) -> None:
    assert side.compare(1, [*e(10, 20, 30, 40, 50, 60), *e(70, 80, 90)]).causes(0) == {"restated": (1, 1)}


def test_truncation_on_either_side(side: Side) -> None:
    assert side.compare(0, BEFORE[-3:], BEFORE[-3:]).causes(1) == {"truncated": (0, 5)}
    assert side.compare(0, BEFORE, newest=3).causes(0) == {"truncated": (5, 0)}


def test_what_they_learn_later(side: Side) -> None:
    rows = side.rows(BEFORE, BEFORE[:3] + BEFORE[4:], users=[0, 1])
    later = side.rows(BEFORE, BEFORE, users=[0, 1], at=T + 1)
    table = FatRows(
        *(np.concatenate([getattr(rows, n), getattr(later, n)]) for n in ("request_id", "users", "request_ts")),
        np.concatenate([rows.offsets, later.offsets[1:] + rows.offsets[-1]]),
        np.concatenate([rows.event_ts, later.event_ts]),
        {
            "item": type(rows.columns["item"])(
                np.concatenate([rows.columns["item"].values, later.columns["item"].values])
            )
        },
        np.zeros(4, np.bool_),
        {},
        {},
        {},
    )
    both = side.requests[0].take(np.array([0, 1, 0, 1]))
    report = compare(table, reconstruct(side.store.pin(), both), known=side.known(), newest=99)
    assert [report.causes(i) for i in range(4)] == [{}, {"late": (0, 1)}, {}, {}]


def test_order_of_ties(tmp_path: Path) -> None:
    table = pa.table({"user": [1, 1, 1], "event_ts": [5, 5, 5], "item": [1, 2, 3]})
    with HistoryStore.create(tmp_path / "s", EventSchema.infer(table.schema, user="user", time="event_ts"), 1) as store:
        store.append(table)
        rows = pa.table({"user": [1], "request_ts": [9], "id": [0], "event_ts": [[5, 5, 5]], "item": [[3, 1, 2]]})
        report = compare(FatRows.from_arrow(rows, LAYOUT, store.schema), store.read([1], 9))
        assert report.causes(0) == {"order": (2, 0)}


def test_report_as_json(side: Side) -> None:
    report = side.compare(0, BEFORE, BEFORE[1:])
    body = json.loads(report.to_json())
    assert (body["requests"], body["equal"], body["events"]) == (2, 1, 15)
    assert set(body["causes"]) == set(CAUSES)
    assert body["differences"] == [
        {"request_id": 1, "user": 1, "request_ts": T, "causes": {"truncated": {"theirs": 0, "ours": 1}}}
    ]
    joined = ShadowReport.concat([report, report])
    assert joined.equal.tolist() == [True, False, True, False]


def test_other_requests_are_refused(side: Side) -> None:
    with pytest.raises(InputError, match="2 fat rows but 1"):
        compare(side.rows(BEFORE, BEFORE), side.built(side.requests[0], 1))
    with pytest.raises(InputError, match="other users"):
        compare(side.rows(BEFORE, users=[4]), side.built(side.requests[0], 1))
