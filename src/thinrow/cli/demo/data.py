"""What the main job runs on, whichever data it came from: events in order of arrival, requests, and their names.

Events arrive in *bundles* (a basket, a commit): the events of a bundle share their user and become known together. A
request belongs to a bundle and precedes its events. Worked example, three bundles of two users::

    bundle_offsets  [0, 2, 3, 6]        bundle 2 holds the events 3, 4 and 5
    arrival_ts      [10, 15, 40]        when each became known, ascending
    event_ts        [10, 10, 15, 12, 12, 12]    the last three happened at 12: they are late

The request of bundle 2 is at 12 ms. It sees what its user did before 12 ms and was known when bundle 2 arrived, so of
user A's bundles the first, at 10 ms, and nothing of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.ragged import ranges_index
from thinrow.core.users import Users, distinct
from thinrow.examples.records import take_rows
from thinrow.jagged import Column, Jagged
from thinrow.schema import EventSchema, ExampleSchema, FieldSpec

#: The share of requests, the last by arrival, that is held out where the data does not say better.
HELD_OUT_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in order of arrival.

    Attributes:
        request_id: (R,) int64, unique, 0 or more.
        users: (R,) ids of the kind of the events' users.
        request_ts: (R,) int64 ms; a request sees events before it (exclusive).
        bundle: (R,) int64, ascending; the bundle that follows the request.
        context: name -> (R,) Column.
        candidates: name -> R rows; every field has the same offsets. Cross features are not among them.
        labels: outcome -> R rows of int8.
    """

    request_id: npt.NDArray[np.int64]
    users: Users
    request_ts: npt.NDArray[np.int64]
    bundle: npt.NDArray[np.int64]
    context: dict[str, Column]
    candidates: dict[str, Jagged]
    labels: dict[str, Jagged]

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def candidate_offsets(self) -> npt.NDArray[np.int64]:
        """(R + 1,) int64 offsets that all candidate fields and labels share."""
        return next(iter(self.candidates.values())).offsets

    def take(self, rows: npt.NDArray[np.int64]) -> Requests:
        """The requests at ``rows``, in that order."""
        return Requests(
            self.request_id[rows],
            self.users[rows],
            self.request_ts[rows],
            self.bundle[rows],
            {n: c.take(rows) for n, c in self.context.items()},
            take_rows(self.candidates, rows),
            take_rows(self.labels, rows),
        )


@dataclass(frozen=True, slots=True)
class Words:
    """What the console and the page call things.

    Attributes:
        source: where the data is from, in brackets after the number of users.
        events: plural noun of the events.
        users: plural noun of the users.
        steps: plural noun of the periods after each of which the store is compacted.
        notes: whole sentences about this data, for the end of the page.
    """

    source: str
    events: str
    users: str
    steps: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoData:
    """E events in B bundles, and requests.

    Attributes:
        event_schema: schema of the events.
        example_schema: schema of the requests, cross features included.
        users: (E,) int64, or object of ``str``; in order of arrival.
        event_ts: (E,) int64 ms, when each happened; one time a bundle.
        columns: name -> (E,) Column, the columns of ``event_schema``.
        bundle_offsets: (B + 1,) int64; bundle b is ``[bundle_offsets[b], bundle_offsets[b + 1])``.
        arrival_ts: (B,) int64 ms, ascending, when each bundle became known; at or after its ``event_ts``.
        requests: the requests, at most one a bundle.
        item: name of the event column and the candidate field that say which item.
        group: name of the column and the field by which items are grouped.
        cross: names of the candidate fields that the replay fills in from the visible history: whether the item is in
            it, days since, how often, and how many of its events are of the item's group.
        outcome: name of the outcome.
        step_ms: the store is compacted after every period of so many ms.
        cut_ms: requests that arrive at or after it are held out.
        words: names for people.
    """

    event_schema: EventSchema
    example_schema: ExampleSchema
    users: Users
    event_ts: npt.NDArray[np.int64]
    columns: dict[str, Column]
    bundle_offsets: npt.NDArray[np.int64]
    arrival_ts: npt.NDArray[np.int64]
    requests: Requests
    item: str
    group: str
    cross: tuple[str, str, str, str]
    outcome: str
    step_ms: int
    cut_ms: int
    words: Words

    def __len__(self) -> int:
        return len(self.event_ts)

    @property
    def request_arrival_ts(self) -> npt.NDArray[np.int64]:
        """(R,) int64 ms, when each request was made: its bundle's arrival."""
        return self.arrival_ts[self.requests.bundle]

    @property
    def held_out(self) -> npt.NDArray[np.bool_]:
        """(R,) whether each request is held out."""
        return self.request_arrival_ts >= self.cut_ms

    def to_arrow(self) -> pa.Table:
        """The events as a table whose columns are the input columns that ``event_schema`` names."""
        names = (self.event_schema.user_column, self.event_schema.time_column)
        arrays = {names[0]: pa.array(self.users), names[1]: pa.array(self.event_ts).cast(pa.timestamp("ms", "UTC"))}
        return pa.table(arrays | {n: c.to_arrow() for n, c in self.columns.items()})

    def small_part(self, n_users: int, n_bundles: int) -> DemoData:
        """The first ``n_bundles`` bundles of those ``n_users`` users who have the most requests among theirs; of the
        same types throughout, and cut in the middle."""
        everyone, code = distinct(self.users[self.bundle_offsets[:-1]])
        order = np.argsort(code, kind="stable")
        starts = np.searchsorted(code[order], np.arange(len(everyone)))
        rank = np.empty(len(code), np.int64)
        rank[order] = np.arange(len(code)) - starts[code[order]]
        early = rank < n_bundles
        asks = np.zeros(len(code), np.bool_)
        asks[self.requests.bundle] = True
        n_requests = np.bincount(code[asks & early], minlength=len(everyone))
        chosen = np.argsort(-n_requests, kind="stable")[: min(n_users, np.count_nonzero(n_requests))]
        return self._of_bundles(np.flatnonzero(np.isin(code, chosen) & early))

    def _of_bundles(self, bundles: npt.NDArray[np.int64]) -> DemoData:
        rows, offsets = ranges_index(self.bundle_offsets[:-1][bundles], self.bundle_offsets[1:][bundles])
        requests = self.requests.take(np.flatnonzero(np.isin(self.requests.bundle, bundles)))
        requests = replace(requests, bundle=np.searchsorted(bundles, requests.bundle))
        arrival_ts = self.arrival_ts[bundles]
        return replace(
            self,
            users=self.users[rows],
            event_ts=self.event_ts[rows],
            columns={n: c.take(rows) for n, c in self.columns.items()},
            bundle_offsets=offsets,
            arrival_ts=arrival_ts,
            requests=requests,
            cut_ms=cut_at_share(arrival_ts[requests.bundle], 0.5),
        )


def cross_fields(names: tuple[str, str, str, str]) -> tuple[FieldSpec, ...]:
    """Fields of ``DemoData.cross``."""
    seen, days, times, of_group = names
    return FieldSpec(seen, "int8"), FieldSpec(days, "int32"), FieldSpec(times, "int32"), FieldSpec(of_group, "int32")


def cut_at_share(arrival_ts: npt.NDArray[np.int64], held_out: float = HELD_OUT_SHARE) -> int:
    """The time from which on lies about the share ``held_out`` of the ascending (R,) times; 0 where there is none.

    ``cut_at_share([1, 2, 3, 4], 0.25)`` is 4.
    """
    if not len(arrival_ts):
        return 0
    return int(arrival_ts[min(int(len(arrival_ts) * (1 - held_out)), len(arrival_ts) - 1)])
