"""The year again: requests, purchases and compactions in the order in which they happened.

A day is cut into rounds, so that each household has at most one basket in a round: its first of the day in round 0, its
second in round 1. In a round all requests are answered before any purchase is appended, as each household's own order
asks; households do not see each other. Worked example: households 7 and 9 shop on Monday, 7 twice. Round 0 answers
both, then appends both baskets; round 1 answers 7, whose first basket is recent by now, and appends its second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from thinrow.cli.demo.fat_rows import FatRowSource, FatRowWriter
from thinrow.cli.demo.retail import CROSS_FIELDS, RetailData
from thinrow.cli.demo.stages import Stages
from thinrow.core.ragged import ranges_index
from thinrow.core.units import DAY_MS
from thinrow.examples.joiner import join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.outcomes import JoinCounts, last_window_ms
from thinrow.examples.records import Impressions, Outcomes, take_rows, text_column
from thinrow.examples.table import ExampleTable
from thinrow.features.history_cross import history_candidate_cross
from thinrow.history.intake import CheckedEvents
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column, Jagged
from thinrow.schema import Projection

_JOIN_EVERY_DAYS = 28
_VIEW = Projection(columns=("product_id", "product_category"))


@dataclass(slots=True)
class ReplayCounts:
    """Attributes:
    requests: requests answered.
    inline_events: recent events that they logged.
    archive_bytes: bytes of all segment files ever written.
    join: what became of the outcomes.
    """

    requests: int = 0
    inline_events: int = 0
    archive_bytes: int = 0
    join: JoinCounts = field(default_factory=JoinCounts)


def empty_cross(data: RetailData) -> dict[str, Jagged]:
    """Cross features of every candidate of every request, zeros; the replay fills them in place."""
    offsets = data.requests.candidates["product_id"].offsets
    return {f.name: Jagged(Column(np.zeros(offsets[-1], f.dtype)), offsets) for f in CROSS_FIELDS}


def rounds(data: RetailData) -> Iterator[tuple[int, list[npt.NDArray[np.int64]]]]:
    """For each day with a basket: its number since 1970 (UTC), and the baskets of each round."""
    first = data.basket_offsets[:-1]
    day, users = data.event_ts[first] // DAY_MS, data.users[first]
    order = np.lexsort((np.arange(len(first)), users, day))
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (day[order][1:] != day[order][:-1]) | (users[order][1:] != users[order][:-1])
    starts = np.flatnonzero(fresh)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    by_round = np.lexsort((np.arange(len(first)), rank, day))
    for today in np.split(by_round, np.flatnonzero(np.diff(day[by_round])) + 1):
        yield int(day[today[0]]), np.split(today, np.flatnonzero(np.diff(rank[today])) + 1)


class Replay:
    """Runs the year through a store, its logs and its table, and streams the rival's fat rows beside it."""

    def __init__(
        self,
        data: RetailData,
        source: FatRowSource,
        cross: dict[str, Jagged],
        store: HistoryStore,
        logs: tuple[ImpressionLog, OutcomeLog],
        table: ExampleTable,
        stages: Stages,
    ) -> None:
        self._data, self._source, self._cross = data, source, cross
        self._store, self._table, self._stages = store, table, stages
        self._impressions, self._outcomes = logs
        self._request_of = np.full(len(data.basket_offsets) - 1, -1, np.int64)
        self._request_of[data.requests.basket] = np.arange(len(data.requests))
        self._ids = data.requests.request_id
        self._by_id = np.argsort(self._ids)
        self._unlogged: list[Impressions] = []
        self._segments: set[str] = set()
        self.counts = ReplayCounts()

    def run(self, fat: FatRowWriter) -> ReplayCounts:
        """The whole year; ends with every purchase in the archive and every request in the table."""
        days = list(rounds(self._data))
        window = last_window_ms(self._data.example_schema)
        with self._stages.bar("replaying the year (days)", len(days)) as advance:
            for i, (day, parts) in enumerate(days):
                for baskets in parts:
                    self._round(baskets)
                self._log()
                asked = self._request_of[np.concatenate(parts)]
                with self._stages.stage("fat_rows_arrival_order"):
                    fat.append(np.sort(asked[asked >= 0]))
                self._compact()
                if i % _JOIN_EVERY_DAYS == _JOIN_EVERY_DAYS - 1:
                    self._join((day + 1) * DAY_MS)
                advance()
        if days:
            self._join((days[-1][0] + 1) * DAY_MS + window)
        return self.counts

    def _round(self, baskets: npt.NDArray[np.int64]) -> None:
        asked = self._request_of[baskets]
        asked = asked[asked >= 0]
        if len(asked):
            self._answer(asked)
        offsets = self._data.basket_offsets
        rows, _ = ranges_index(offsets[:-1][baskets], offsets[1:][baskets])
        with self._stages.stage("append"):
            columns = {n: c.take(rows) for n, c in self._data.columns.items()}
            self._store.append_checked(
                CheckedEvents(self._data.users[rows], self._data.event_ts[rows], columns, None, None)
            )

    def _answer(self, asked: npt.NDArray[np.int64]) -> None:
        """Snapshot, cross features of the visible history, impression."""
        r, stage = self._data.requests, self._stages.stage
        users, request_ts = r.users[asked], r.request_ts[asked]
        with stage("snapshot"):
            taken = self._store.snapshot(users, request_ts)
        with stage("history_view"):
            view = reconstruct(taken.generation, taken.requests, _VIEW).histories
        candidates = take_rows(r.candidates, asked)
        with stage("cross_features"):
            category = ("product_category", candidates["product_category"])
            found = history_candidate_cross(view, "product_id", candidates["product_id"], request_ts, group=category)
        assert found.group_count is not None
        crossed = (found.seen_before, found.days_since, found.count, found.group_count)
        rows, _ = ranges_index(candidates_of(r.candidates)[:-1][asked], candidates_of(r.candidates)[1:][asked])
        for spec, values in zip(CROSS_FIELDS, crossed, strict=True):
            self._cross[spec.name].values[rows] = values.values
            candidates[spec.name] = Jagged(values.column, candidates["product_id"].offsets)
        n = len(asked)
        impressions = Impressions(
            r.request_id[asked],
            taken.requests,
            {name: c.take(asked) for name, c in r.context.items()},
            candidates,
            text_column("demo", n),
            text_column("all", n),
            taken.requests.inline.lengths,
        )
        self._unlogged.append(impressions)
        self.counts.requests += n
        self.counts.inline_events += len(taken.requests.inline)

    def _log(self) -> None:
        """Write the day's impressions, and then what was bought of what they showed: it followed at once."""
        if not self._unlogged:
            return
        with self._stages.stage("impression_log"):
            shown = Impressions.concat(self._unlogged)
            self._impressions.append(shown)
            asked = np.searchsorted(self._ids, shown.request_id, sorter=self._by_id)
            labels = self._data.requests.labels["bought"].take(self._by_id[asked])
            bought = np.flatnonzero(labels.values)
            request = np.repeat(np.arange(len(shown)), labels.lengths)[bought]
            items = shown.candidates["product_id"].values[bought]
            times = shown.snapshots.request_ts[request]
            self._outcomes.append(Outcomes.of("bought", shown.request_id[request], items, times))
        self._unlogged = []

    def _compact(self) -> None:
        with self._stages.stage("compact"):
            self._store.compact()
        generation = self._store.pin()
        for _, info in generation.segments:
            if info.name not in self._segments:
                self.counts.archive_bytes += info.bytes
        self._segments = {info.name for _, info in generation.segments}

    def _join(self, now_ms: int) -> None:
        with self._stages.stage("outcome_join"):
            report = join_logs(self._impressions, self._outcomes, self._table, now_ms)
        self.counts.join = report.totals


def candidates_of(candidates: dict[str, Jagged]) -> npt.NDArray[np.int64]:
    """The offsets that all candidate fields share."""
    return candidates["product_id"].offsets
