"""What a batch of examples sees of the archive: the one piece of code behind snapshots, reads and reconstruction.

Steps: index entries of the users (``look_up``) -> *mixed* pieces, those that hold visible and hidden events (the one
that the request time cuts; any with a late or restated event) -> their key columns -> counts and identity digests,
exact for every example -> ranges of rows that the newest n need -> those rows decoded and, over several segments,
merged.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError
from thinrow.core.ragged import offsets_of
from thinrow.core.units import NEVER
from thinrow.core.users import Users
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.hides import group_hides
from thinrow.history.archive.layout import StoredColumn, key_columns
from thinrow.history.archive.lookup import Ints, Pieces, look_up, with_hides
from thinrow.history.archive.planned import Plan, plan_at_once
from thinrow.history.archive.reader import ReadStats, RowReader
from thinrow.jagged import Column, Events, SharedHistories
from thinrow.kernels import kernel

_EVENT_TS, _ARRIVAL, _HIDDEN_FROM = key_columns()
_NONE = np.empty(0, np.int64)
#: So many pieces are read in one call, rows that nobody asks for too, because a call costs more than these.
_FEW = 8


class Window:
    """Examples over the archive part of their users' histories, in one generation.

    Attributes:
        pieces: index entries of the users, under the hide-list of the generation and of the examples.
    """

    def __init__(
        self,
        generation: Generation,
        users: Users,
        user_of: Ints,
        request_ts: Ints,
        bound: Ints,
        stats: ReadStats,
        pieces: Pieces | None = None,
        hide_user: Ints | None = None,
        hides: npt.NDArray[np.void] | None = None,
    ) -> None:
        """Args:
        users: (U,) distinct ids.
        user_of: (X,) row of ``users`` of each example.
        request_ts, bound: (X,) the example sees ``event_ts < request_ts``, ``arrival <= bound < hidden_from``.
        pieces: index entries, where the caller has them already.
        hide_user, hides: hides beside the generation's own: (H,) row of ``users``, (H,) HIDE_DTYPE.
        """
        self.generation, self.user_of, self.bound, self.stats = generation, user_of, bound, stats
        self.request_ts = request_ts
        since = time.perf_counter()
        found = look_up(generation, users) if pieces is None else pieces
        if hides is not None and hide_user is not None and len(hides):
            own = np.repeat(np.arange(len(users)), np.diff(found.hide_off))
            found = with_hides(
                found,
                *group_hides(len(users), np.concatenate([own, hide_user]), np.concatenate([found.hides, hides])),
            )
        self.pieces = found
        self._plan: Plan | None = None
        self._whole: npt.NDArray[np.bool_] | None = None
        stats.pieces += len(found.records)
        #: What kernels go by: index entries, runs, where keys are, keys, examples.
        self._runs = found.records, found.run_off, found.run_of_user
        self._examples = self.user_of, self.request_ts, self.bound
        self._read_mixed(since)

    @classmethod
    def at_once(
        cls,
        generation: Generation,
        users: Users,
        request_ts: Ints,
        bound: Ints,
        oldest_ts: Ints,
        max_len: Ints,
        stats: ReadStats,
    ) -> Window | None:
        """The window of requests of (X,) ``users``, repeats included, in two calls; None where these cannot make it.
        ``read`` of the same two arrays ``oldest_ts`` and ``max_len`` is planned with it.

        The calls find nothing wrong that the long way would not: where they find something, it is to say what.
        """
        plan = plan_at_once(generation, users, request_ts, bound, oldest_ts, max_len, stats)
        if plan is None:
            return None
        self = cls.__new__(cls)
        self.generation, self.user_of, self.bound, self.stats = generation, plan.user_of, bound, stats
        self.request_ts, self.pieces, self._plan, self._whole = request_ts, plan.pieces, plan, plan.whole
        self._runs = plan.pieces.records, plan.pieces.run_off, plan.pieces.run_of_user
        self._examples = plan.user_of, request_ts, bound
        self.key_off, self._keys = plan.key_off, (*plan.keys, _NONE)
        return self

    def _read_mixed(self, since: float) -> None:
        found = self.pieces
        n = len(found.records)
        self.key_off, mixed, latest = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
        out_pos = np.empty(n + 1, np.int64)
        n, rows, hidden = kernel("mark_mixed")(*self._runs, *self._examples, self.key_off, mixed, latest, out_pos)
        self.stats.mixed_pieces += n
        self.stats.clock("index", since)
        self._keys = _NONE, _NONE, _NONE
        if not rows:
            return
        mixed, latest, out_pos = mixed[:n], latest[:n], out_pos[: n + 1]
        none, lengths = np.zeros(n, np.int64), out_pos[1:] - out_pos[:-1]
        reader = RowReader(self.generation, found, mixed, none, lengths, self.stats, out_pos)
        if len(found.hides) or hidden:
            self._keys = self._decode_keys(reader, np.searchsorted(found.piece_off, mixed, side="right") - 1)
            return
        # Nothing is hidden here.
        if n <= _FEW:
            event_ts, arrival = reader.columns((_EVENT_TS, _ARRIVAL))
        else:
            # Of what no request reaches no arrival number is asked.
            (event_ts,), needed = reader.columns((_EVENT_TS,)), np.empty(n, np.int64)
            kernel("rows_before")(out_pos, event_ts.values, latest, needed)
            (arrival,) = reader.columns((_ARRIVAL,), needed)
        self._keys = event_ts.values, arrival.values, _NONE

    def _decode_keys(self, reader: RowReader, owner: Ints) -> tuple[Ints, Ints, Ints]:
        """Keys of all rows, hides applied; ``owner`` is the user of each piece that ``reader`` reads."""
        if not reader.total:
            return (np.empty(0, np.int64),) * 3
        event_ts, arrival, hidden = (c.values for c in reader.columns((_EVENT_TS, _ARRIVAL, _HIDDEN_FROM)))
        if len(self.pieces.hides):
            kernel("apply_hides")(
                reader.out_pos,
                owner,
                event_ts,
                arrival,
                hidden,
                self.pieces.hide_off,
                np.ascontiguousarray(self.pieces.hides["event_ts"]),
                np.ascontiguousarray(self.pieces.hides["arrival"]),
                np.ascontiguousarray(self.pieces.hides["hidden_from"]),
            )
        return event_ts, arrival, hidden

    def summarize(self) -> tuple[Ints, npt.NDArray[np.uint64], Ints, Ints]:
        """(X,) number of visible archived events, their identity digest, first and last event_ts (0, 0 where none)."""
        if self._plan is not None:
            return self._plan.seen
        since, n = time.perf_counter(), len(self.user_of)
        count, start, end = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
        digest, self._whole = np.empty(n, np.uint64), np.empty(n, np.bool_)
        kernel("summarize")(
            *self._runs, self.key_off, *self._keys, *self._examples, count, digest, start, end, self._whole
        )
        self.stats.clock("verify", since)
        return count, digest, start, end

    def all_visible(self) -> npt.NDArray[np.bool_]:
        """(X,) whether the example sees every archived event of its user that has ``event_ts < request_ts``."""
        if self._whole is None:
            self.summarize()
        assert self._whole is not None
        return self._whole

    def read(
        self, max_len: Ints, oldest_ts: Ints, columns: Sequence[StoredColumn], codes: Collection[str] = ()
    ) -> Events:
        """The events that the examples need: of example x at least the newest ``max_len[x]`` visible ones from
        ``oldest_ts[x]`` (inclusive) on. A user's are in order of (event_ts, arrival), ``hidden_from`` under all known
        hides. Columns named in ``codes`` are delivered as codes and a dictionary, as ``RowReader.coded``.

        Raises:
            CorruptionError: a block is damaged.
        """
        since = time.perf_counter()
        plan = self._plan
        if plan is not None and plan.oldest_ts is oldest_ts and plan.max_len is max_len and not plan.several:
            piece, start, stop, out_pos = plan.ranges
            user_off, several, length = plan.user_rows, False, _NONE
        else:
            piece, start, stop, out_pos, user_off, several, length = self._ranges(max_len, oldest_ts)
            self.stats.clock("index", since)
        reader = RowReader(self.generation, self.pieces, piece, start, stop, self.stats, out_pos, self.key_off)
        if self.pieces.segments is None or self.pieces.segments.buffers is None:
            reader.prefetch(columns)
        try:
            event_ts, visibility, values = self._columns(reader, piece, columns, codes)
        except CorruptionError:
            with reader.naming(0):
                raise
        self.stats.events_decoded += reader.total
        if visibility is None:
            events = Events.lazy(self.pieces.users, user_off, event_ts, lambda: _visibility(reader), values)
        else:
            events = Events(self.pieces.users, user_off, event_ts, *visibility, values)
        if not several:
            return events
        since = time.perf_counter()
        ends = np.cumsum(length)
        merged = merge(events, self.pieces.run_of_user, ends - length, ends)
        self.stats.clock("merge", since)
        return merged

    def _ranges(self, max_len: Ints, oldest_ts: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints, bool, Ints]:
        """Piece, first row, last row and place of each range to be read, rows of each user, whether a user has several
        runs, and the rows of each run."""
        n, n_runs = len(self.pieces.records), len(self.pieces.run_off) - 1
        first, last, user_off = (np.empty(k, np.int64) for k in (n_runs, n_runs, len(self.pieces.users) + 1))
        piece, start, stop = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
        out_pos = np.empty(n + 1, np.int64)
        n, several = kernel("read_ranges")(
            *self._runs, self.key_off, *self._keys, *self._examples, oldest_ts, max_len,
            first, last, piece, start, stop, out_pos, user_off,
        )  # fmt: skip
        return piece[:n], start[:n], stop[:n], out_pos[: n + 1], user_off, several, np.maximum(last - first, 0)

    def _columns(
        self, reader: RowReader, piece: Ints, columns: Sequence[StoredColumn], codes: Collection[str]
    ) -> tuple[Ints, tuple[Ints, Ints] | None, dict[str, Column]]:
        """event_ts, arrival and hidden_from where an event may be hidden, and the columns, of the rows of pieces."""
        coded = {c.name: reader.coded(c) for c in columns if c.name in codes and not c.is_bytes} if codes else {}
        plain = [c for c in columns if c.name not in coded] if coded else columns
        visibility = None
        if len(self.pieces.hides):
            owner = np.searchsorted(self.pieces.piece_off, piece, side="right") - 1
            event_ts, *keys = self._decode_keys(reader, owner)
            visibility = keys[0], keys[1]
            read = reader.columns(plain)
        else:
            times, *read = reader.columns((_EVENT_TS, *plain))
            event_ts = times.values
        found = coded | {c.name: column for c, column in zip(plain, read, strict=True)}
        return event_ts, visibility, {c.name: found[c.name] for c in columns} if coded else found


def cut_windows(
    events: Events,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    oldest_ts: Ints,
    newest: Ints,
    whole: npt.NDArray[np.bool_],
) -> tuple[SharedHistories, int]:
    """The newest events of each example as a slice of ``events``, and how many all see; ``whole`` as
    ``Window.all_visible`` gives it."""
    n = len(user_of)
    keys = (_NONE, _NONE) if whole.all() else (events.arrival, events.hidden_from)
    start, stop, exact = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.bool_)
    delivered = kernel("example_slices")(
        events.offsets, events.event_ts, *keys, user_of, request_ts, bound, oldest_ts, newest, whole, start, stop, exact
    )
    return SharedHistories(events, user_of, start, stop, bound, exact), delivered


def _visibility(reader: RowReader) -> tuple[Ints, Ints]:
    return reader.column(_ARRIVAL).values, reader.column(_HIDDEN_FROM).values


def merge(events: Events, run_of_user: Ints, run_start: Ints, run_stop: Ints) -> Events:
    """The runs of each user (positions in ``events``, each sorted) merged by (event_ts, arrival)."""
    order = kernel("merge_runs")(run_of_user, run_start, run_stop, events.event_ts, events.arrival)
    rows = offsets_of(run_stop - run_start)
    return events.take_rows(order, rows[run_of_user])


def read_everything(generation: Generation, users: Users, columns: Sequence[StoredColumn], stats: ReadStats) -> Events:
    """All events of distinct ``users``, hidden ones included, in order of (event_ts, arrival)."""
    n = len(users)
    everything = np.full(n, NEVER, np.int64)
    # Bound NEVER - 1 with every event shown: a window that nothing falls out of needs no key read to be exact.
    window = Window(generation, users, np.arange(n), everything, everything - 1, stats)
    return window.read(everything, np.full(n, np.iinfo(np.int64).min, np.int64), columns)
