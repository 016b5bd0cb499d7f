"""The protocol of the recent tier, and what its calls return.

One user's events through a tier::

    append([7, 7], event_ts=[1000, 1500])      -> arrivals [1, 2]
    append([7], event_ts=[1200])               -> arrivals [3]         late: arrival order is not event order
    read_since([7], after=[1])                 -> arrivals 2, 3; top [3]; trimmed_through [0]
    trim([7], through=[2])                     -> arrival 3 is left, the counter stays at 3
    append([7], event_ts=[1600])               -> arrivals [4]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core.users import Users
from thinrow.jagged import Column, Events
from thinrow.schema import EventSchema

#: ``resolve(user, event_id) -> (event_ts, arrival)`` of an event outside the tier, or None where there is none.
Resolve: TypeAlias = Callable[[int | str, int | str], tuple[int, int] | None]


@dataclass(slots=True)
class AppendResult:
    """Attributes:
    arrivals: (n,) int64 arrival of each row; of a duplicate, the one it was given the first time.
    duplicate: (n,) bool, whether the row's event id was held already, so that the row was not appended again.
    """

    arrivals: npt.NDArray[np.int64]
    duplicate: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Advance:
    """How far a partition of an event source is read, once the append that carries this is durable.

    Attributes:
        source, partition: names; together at most 500 bytes of UTF-8, neither with a NUL.
        before: the position that is stored now, None where none is.
        after: what takes its place. Both are texts that only the source understands.
    """

    source: str
    partition: str
    before: str | None
    after: str


@dataclass(frozen=True, slots=True)
class RecentRead:
    """What a tier held of U users at one moment.

    Attributes:
        events: the events read, in arrival order within a user; ``hidden_from`` is NEVER throughout (hides are
            reported, not applied).
        hides: HIDE_DTYPE, one for each event read that supersedes another: event_ts and arrival of the superseded
            event (which may lie in the archive), and ``hidden_from``, the arrival of the correction.
        hide_offsets: (U + 1,) int64; the hides of ``events.users[u]`` are ``[hide_offsets[u], hide_offsets[u + 1])``,
            in order of ``hidden_from``.
        top: (U,) int64 highest arrival ever given to the user, 0 if none.
        trimmed_through: (U,) int64 events with ``arrival <= trimmed_through`` (inclusive) have been dropped.
        event_ids: ids aligned with ``events``, null where an event had none; None where the schema has no ids.
    """

    events: Events
    hides: npt.NDArray[np.void]
    hide_offsets: npt.NDArray[np.int64]
    top: npt.NDArray[np.int64]
    trimmed_through: npt.NDArray[np.int64]
    event_ids: Column | None


class RecentTier(Protocol):
    """A durable, ordered log of recent events by user. Calls may come from several threads at once."""

    @property
    def schema(self) -> EventSchema:
        """The newest schema of its events that the tier knows of."""
        ...

    @property
    def name(self) -> str:
        """What the tier is called in errors and reports: its folder, or its server."""
        ...

    @property
    def atomic_over_users(self) -> bool:
        """Whether a call is there for all of its users or for none, and a read shows all of them at one moment.

        Where it is not, each holds for every single user: all of a user's rows of a call, or none. A call that returns
        is there for all. One that raises has changed nothing, but for ``Unacknowledged``, which says whose rows are
        there; one whose process died may be there for some users. Event ids make either harmless: append it again.
        """
        ...

    def append(
        self,
        users: Users,
        event_ts: npt.NDArray[np.int64] | Column,
        columns: dict[str, Column],
        event_ids: Column | None = None,
        supersedes: Column | None = None,
        resolve: Resolve | None = None,
        schema: EventSchema | None = None,
        advances: Sequence[Advance] = (),
    ) -> AppendResult:
        """Append n events, all or none (of each user: ``atomic_over_users``), in row order; durable by the tier's
        stated policy when it returns.

        Each new event gets its user's counter + 1. An event whose id (scoped to its user) was appended before is a
        duplicate and changes nothing, its ``supersedes`` included. ``supersedes`` (null where none) is the id of an
        earlier event of the same user: an earlier row, one the tier has seen (trimmed or not), or one that
        ``resolve`` knows. ``schema`` is what the columns were checked under (the tier's own by default): any schema of
        the store will do, because events keep the id of theirs. ``advances`` are stored with the events, in one
        transaction where ``stores_positions_with_events`` says so, else after them; of no events they are stored alone.

        Raises (and appends nothing):
            InputError: lengths differ; a time is null or negative; a null in a column that allows none; an event id
                of more than 255 UTF-8 bytes.
            SchemaError: columns are not those of the schema, or not of its dtypes; or the schema contradicts another of
                its id.
            UserKindError: ids are not of the schema's kind.
            DuplicateEventError: one id twice for one user in this call.
            UnknownEventError: ``supersedes`` names no earlier event of the user.
            PositionConflict: a partition does not stand where its advance says.
            Overloaded: the tier takes no more for now.
        And, with rows that are there:
            Unacknowledged: the call was cut short, in a tier that is not atomic over users.
        """
        ...

    @property
    def stores_positions_with_events(self) -> bool:
        """Whether events and ``advances`` of one append are there together or not at all. Where they are not, an append
        that was cut short is made again, and only event ids tell what of it is there."""
        ...

    def positions(self, source: str) -> dict[str, str]:
        """The stored position of each partition of ``source``.

        Raises:
            CorruptionError: what is stored is not what was written.
        """
        ...

    def read_since(self, users: Users, after: npt.NDArray[np.int64], schema: EventSchema | None = None) -> RecentRead:
        """Events with ``arrival > after[u]`` (strict) of each user, all as of one moment (of each user, where the tier
        is not ``atomic_over_users``).

        Columns are those of ``schema`` (the newest that the tier knows of by default), matched by column id: null where
        an event's own schema lacks one, cast where it was widened.

        Raises:
            InputError: a user is asked for twice, or the lengths differ.
            CommitConflict: an event was appended under a schema newer than ``schema``; pin the newest generation.
            CorruptionError: stored bytes are not what was written.
        """
        ...

    def users(self) -> Users:
        """The users that hold at least one event now, ascending."""
        ...

    def known_users(self, limit: int | None = None) -> Users:
        """The users that were ever given an arrival number, ascending; the first ``limit`` of them."""
        ...

    def check_ids(self) -> None:
        """Read every event id that is kept.

        Raises:
            CorruptionError: what is kept of an id is not what was written.
        """
        ...

    def trim(self, users: Users, through: npt.NDArray[np.int64]) -> None:
        """Drop events with ``arrival <= through[u]`` (inclusive); ids stay.

        ``trimmed_through`` becomes the larger of old and new. A counter below ``through`` is raised to it: an arrival
        that was dropped is never given out again. All or none, durable like an append.
        """
        ...

    def reserve(self, users: Users, at_least: npt.NDArray[np.int64], n: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Take ``n[u]`` numbers of each user for events that go elsewhere; no append ever gets them.

        Returns:
            (U,) first: the numbers are ``first + 1`` to ``first + n``, and ``first >= at_least``.
        """
        ...

    def raise_counters(self, users: Users, at_least: npt.NDArray[np.int64]) -> None:
        """Counter becomes ``max(counter, at_least[u])``: after a bulk load, or when the tier was lost."""
        ...

    def erase(
        self,
        users: Users,
        offsets: npt.NDArray[np.int64],
        first: npt.NDArray[np.int64],
        last: npt.NDArray[np.int64],
        whole: npt.NDArray[np.bool_],
    ) -> None:
        """Drop event ids of erased events, and all that is known of whole users, so that no byte of them is left.

        The erased arrivals of ``users[u]`` are the intervals ``[first[i], last[i]]``, ``offsets[u] <= i < offsets[u +
        1]``, ascending. Of events at or below the last of them nothing stays: they must be archived. A ``whole`` user
        without later events is forgotten, and numbers of unknown users then begin after its last one. What the tier
        once held and dropped goes too: its store is written anew, without free pages. Safe beside other processes
        that have it open, and to repeat after a crash.

        Raises:
            InputError: lengths differ, or a user is named twice.
        """
        ...

    def close(self) -> None:
        """Release files and memory; later calls raise StoreError. Closing twice is fine."""
        ...
