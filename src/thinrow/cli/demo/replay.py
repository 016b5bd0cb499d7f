"""The data again: requests, events and compactions in the order in which they became known.

A step (a day of shopping, say) is cut into rounds, so that each user has at most one request in a round, with the first
of its bundles there. In a round all requests are answered before any event is appended, as each user's own order asks;
users do not see each other. Worked example: households 7 and 9 shop on Monday, 7 three times, and the second of these
is no request. Round 0 answers both, then appends both first baskets and 7's second; round 1 answers 7, whose first two
baskets are recent by now, and appends its third.

The replay goes in two parts, before the cut and from it on, so that a model can be trained on what was known at the cut
and asked for every request after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from thinrow.cli.demo.data import DemoData
from thinrow.cli.demo.fat_rows import FatRowSource, FatRowWriter
from thinrow.cli.demo.stages import Stages
from thinrow.core.ragged import ranges_index
from thinrow.core.users import distinct
from thinrow.examples.joiner import join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.outcomes import JoinCounts, last_window_ms
from thinrow.examples.records import Impressions, Outcomes, take_rows, text_column
from thinrow.examples.table import ExampleTable
from thinrow.features.history_cross import history_candidate_cross
from thinrow.history.archive.generation import Generation
from thinrow.history.intake import CheckedEvents
from thinrow.history.reconstruct import reconstruct
from thinrow.history.snapshot import Snapshot
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column, Jagged
from thinrow.schema import Projection

_JOIN_EVERY_STEPS = 28
#: Called with the requests of a round (rows of ``DemoData.requests``) and what they see, before their events arrive.
OnRequests = Callable[[npt.NDArray[np.int64], Snapshot], None]


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


def empty_cross(data: DemoData) -> dict[str, Jagged]:
    """Cross features of every candidate of every request, zeros; the replay fills them in place."""
    offsets = data.requests.candidate_offsets
    dtypes = {f.name: f.dtype for f in data.example_schema.candidates}
    return {n: Jagged(Column(np.zeros(offsets[-1], dtypes[n])), offsets) for n in data.cross}


@dataclass(frozen=True, slots=True)
class Step:
    """``end_ms`` (exclusive), whether it ``is_held_out`` (begins at the cut or later), and its bundles by round."""

    end_ms: int
    is_held_out: bool
    rounds: list[npt.NDArray[np.int64]]

    @property
    def bundles(self) -> npt.NDArray[np.int64]:
        """All bundles of the step."""
        return np.concatenate(self.rounds)


def steps_of(data: DemoData) -> list[Step]:
    """The steps in which a bundle arrives, in order. A step that the cut divides is two."""
    number, held_out = data.arrival_ts // data.step_ms, data.arrival_ts >= data.cut_ms
    step = 2 * number + held_out
    _, user = distinct(data.users[data.bundle_offsets[:-1]])
    bundle = np.arange(len(step))
    order = np.lexsort((bundle, user, step))
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (step[order][1:] != step[order][:-1]) | (user[order][1:] != user[order][:-1])
    starts = np.flatnonzero(fresh)
    # A user's round in a step: the requests that it made in it after its first bundle.
    asks = np.cumsum(np.isin(order, data.requests.bundle))
    rank = np.empty(len(order), np.int64)
    rank[order] = asks - np.repeat(asks[starts], np.diff(np.append(starts, len(order))))
    by_round = np.lexsort((bundle, rank, step))
    found = []
    for part in np.split(by_round, np.flatnonzero(np.diff(step[by_round])) + 1) if len(step) else []:
        end_ms, late = int(number[part[0]] + 1) * data.step_ms, bool(held_out[part[0]])
        end_ms = end_ms if late else min(end_ms, data.cut_ms)
        found.append(Step(end_ms, late, np.split(part, np.flatnonzero(np.diff(rank[part])) + 1)))
    return found


class Replay:
    """Runs the data through a store, its logs and its table, and streams the rival's fat rows beside it.

    Call ``run_until`` and then ``finish``, once each.
    """

    def __init__(
        self,
        data: DemoData,
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
        self._request_of = np.full(len(data.bundle_offsets) - 1, -1, np.int64)
        self._request_of[data.requests.bundle] = np.arange(len(data.requests))
        self._ids = data.requests.request_id
        self._by_id = np.argsort(self._ids)
        self._view = Projection(columns=(data.item, data.group))
        self._unlogged: list[Impressions] = []
        self._segments: set[str] = set()
        self._generation = -1
        self._steps = steps_of(data)
        self._n_done = 0
        self._on_requests: OnRequests | None = None
        self._model_version = "demo"
        self.counts = ReplayCounts()

    def run_until(self, fat: FatRowWriter) -> None:
        """What comes before the cut; its events are in the archive afterwards, its requests in the table."""
        self._run([s for s in self._steps if not s.is_held_out], "replaying to the cut", fat)

    def finish(
        self, fat: FatRowWriter, on_requests: OnRequests | None = None, model_version: str = "demo"
    ) -> ReplayCounts:
        """The rest; ends with every event in the archive and every request in the table.

        Args:
            on_requests: called for the requests of each round when their histories, candidates and cross features
                stand, before anything that follows them is known; booked to the stage ``on_requests``.
            model_version: what the impressions say ranked their candidates.
        """
        self._on_requests, self._model_version = on_requests, model_version
        self._run([s for s in self._steps if s.is_held_out], "replaying the rest", fat)
        return self.counts

    def _run(self, steps: Sequence[Step], title: str, fat: FatRowWriter) -> None:
        with self._stages.bar(f"{title} ({self._data.words.steps})", len(steps)) as advance:
            for step in steps:
                for bundles in step.rounds:
                    self._round(bundles)
                self._log()
                asked = self._request_of[step.bundles]
                with self._stages.stage("fat_rows_arrival_order"):
                    fat.append(np.sort(asked[asked >= 0]))
                self._compact()
                self._n_done += 1
                if self._n_done % _JOIN_EVERY_STEPS == 0:
                    self._join(step.end_ms)
                advance()
        if steps:
            # Outcomes follow at once here: nothing is still to come of the last window's requests.
            self._join(steps[-1].end_ms + last_window_ms(self._data.example_schema))

    def _round(self, bundles: npt.NDArray[np.int64]) -> None:
        asked = self._request_of[bundles]
        asked = asked[asked >= 0]
        if len(asked):
            self._answer(asked)
        offsets = self._data.bundle_offsets
        rows, _ = ranges_index(offsets[:-1][bundles], offsets[1:][bundles])
        with self._stages.stage("append"):
            columns = {n: c.take(rows) for n, c in self._data.columns.items()}
            self._store.append_checked(
                CheckedEvents(self._data.users[rows], self._data.event_ts[rows], columns, None, None)
            )

    def _answer(self, asked: npt.NDArray[np.int64]) -> None:
        """Snapshot, cross features of the visible history, impression."""
        data, r, stage = self._data, self._data.requests, self._stages.stage
        users, request_ts = r.users[asked], r.request_ts[asked]
        with stage("snapshot"):
            taken = self._store.snapshot(users, request_ts)
        # A snapshot compacts where a user has too many recent events.
        self._count_segments(taken.generation)
        with stage("history_view"):
            view = reconstruct(taken.generation, taken.requests, self._view).histories
        candidates = take_rows(r.candidates, asked)
        item, group = candidates[data.item], candidates[data.group]
        with stage("cross_features"):
            found = history_candidate_cross(view, data.item, item, request_ts, group=(data.group, group))
        assert found.group_count is not None
        crossed = (found.seen_before, found.days_since, found.count, found.group_count)
        rows, _ = ranges_index(r.candidate_offsets[:-1][asked], r.candidate_offsets[1:][asked])
        for name, values in zip(data.cross, crossed, strict=True):
            self._cross[name].values[rows] = values.values
            candidates[name] = Jagged(values.column, item.offsets)
        if self._on_requests is not None:
            with stage("on_requests"):
                self._on_requests(asked, taken)
        n = len(asked)
        impressions = Impressions(
            r.request_id[asked],
            taken.requests,
            {name: c.take(asked) for name, c in r.context.items()},
            candidates,
            text_column(self._model_version, n),
            text_column("all", n),
            taken.requests.inline.lengths,
        )
        self._unlogged.append(impressions)
        self.counts.requests += n
        self.counts.inline_events += len(taken.requests.inline)

    def _log(self) -> None:
        """Write the step's impressions, and then the outcomes of what they showed: they followed at once."""
        if not self._unlogged:
            return
        with self._stages.stage("impression_log"):
            shown = Impressions.concat(self._unlogged)
            self._impressions.append(shown)
            asked = np.searchsorted(self._ids, shown.request_id, sorter=self._by_id)
            outcome = self._data.outcome
            labels = self._data.requests.labels[outcome].take(self._by_id[asked])
            positive = np.flatnonzero(labels.values)
            request = np.repeat(np.arange(len(shown)), labels.lengths)[positive]
            items = shown.candidates[self._data.item].values[positive]
            times = shown.snapshots.request_ts[request]
            self._outcomes.append(Outcomes.of(outcome, shown.request_id[request], items, times))
        self._unlogged = []

    def _compact(self) -> None:
        with self._stages.stage("compact"):
            self._store.compact()
        self._count_segments(self._store.pin())

    def _count_segments(self, generation: Generation) -> None:
        if generation.number == self._generation:
            return
        self._generation = generation.number
        for _, info in generation.segments:
            if info.name not in self._segments:
                self.counts.archive_bytes += info.bytes
        self._segments = {info.name for _, info in generation.segments}

    def _join(self, now_ms: int) -> None:
        with self._stages.stage("outcome_join"):
            report = join_logs(self._impressions, self._outcomes, self._table, now_ms)
        self.counts.join = report.totals
