"""Index entries of a batch of users: which pieces of which segments hold their events.

Worked example: 512 users over 16 buckets are 512 pairs of user and segment where each bucket has one segment. All pairs
are searched in one compiled call over the index pages of all 16, and their pieces copied out in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.core.users import Users, bucket_of, plain
from thinrow.history.archive.hides import group_hides
from thinrow.history.archive.layout import MAX_STRIPE_ROWS, PIECE_DTYPE
from thinrow.jagged import HIDE_DTYPE
from thinrow.kernels import kernel

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation
    from thinrow.history.archive.segments import SegmentSet

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The index entries of a batch of users.

    Attributes:
        users: (U,) distinct ids.
        piece_off: (U + 1,) pieces of each user.
        records: (P,) PIECE_DTYPE, by user, then segment, then time; ``min_hidden_from`` takes hide-lists into account.
        segment: (P,) number of the segment in the generation's list.
        run_off: (R + 1,) pieces of each run (one user in one segment).
        run_of_user: (U + 1,) runs of each user.
        watermark: (U,) highest arrival that the generation holds or has a tombstone for (0 where none).
        hide_off, hides: the hide-list by user (HIDE_DTYPE).
    """

    users: Users
    piece_off: Ints
    records: npt.NDArray[np.void]
    segment: Ints
    run_off: Ints
    run_of_user: Ints
    watermark: Ints
    hide_off: Ints
    hides: npt.NDArray[np.void]

    def field(self, name: str) -> npt.NDArray[Any]:
        """One field of the records, contiguous."""
        return np.ascontiguousarray(self.records[name])


@contextmanager
def naming(user: object) -> Iterator[None]:
    """Damage that hits a whole file or page names a user who cannot be read for it."""
    try:
        yield
    except CorruptionError as e:
        if e.user is not None:
            raise
        raise CorruptionError(e.what, file=e.file, user=plain(user), column=e.column) from e


def look_up(generation: Generation, users: Users) -> Pieces:
    """Index entries of distinct ``users``. Raises CorruptionError on a damaged file or index page."""
    buckets = bucket_of(users, generation.n_buckets)
    # Pairs of user and segment, by user, then oldest segment first.
    pair_segment, pair_off = ranges_index(*(bound[buckets] for bound in generation.segment_bounds))
    pair_user = np.repeat(np.arange(len(users)), np.diff(pair_off))
    with _naming_one_of(generation, users, buckets):
        segments = generation.opened(pair_segment)
        table = segments.position[pair_segment]
        first, last = segments.pieces.find(table, users[pair_user]) if len(table) else (pair_user, pair_user)
        count = last - first
        if (count < 0).any():
            raise _disorder(segments, table[np.argmin(count)])
        has = np.flatnonzero(count)
        rows, run_off = ranges_index(first[has], last[has])
        run = np.repeat(has, count[has])
        records = segments.pieces.take(table[run], rows) if len(rows) else np.empty(0, PIECE_DTYPE)
        wrong = (records["n_rows"] == 0) | (records["n_rows"] > MAX_STRIPE_ROWS)
        if wrong.any():
            raise _disorder(segments, table[run[np.argmax(wrong)]])
        hides, hide_off = _hides_of(segments, users, pair_user, table)
    piece_off = offsets_of(np.bincount(pair_user, count, len(users)))
    run_of_user = np.searchsorted(pair_user[has], np.arange(len(users) + 1)).astype(np.int64)
    watermark = np.zeros(len(users), np.int64)
    some = np.flatnonzero(np.diff(piece_off))
    if len(some):
        watermark[some] = np.maximum.reduceat(records["max_arrival"], piece_off[:-1][some])
    # What was erased at the end of a user's arrivals was archived all the same.
    np.maximum(watermark, generation.tombstones(users).watermark(), out=watermark)
    pieces = Pieces(
        users,
        piece_off,
        records,
        pair_segment[run],
        run_off,
        run_of_user,
        watermark,
        np.zeros_like(piece_off),
        hides[:0],
    )
    return with_hides(pieces, hides, hide_off)


@contextmanager
def _naming_one_of(generation: Generation, users: Users, buckets: Ints) -> Iterator[None]:
    """Damage of a segment names a user of its bucket."""
    try:
        yield
    except CorruptionError as e:
        bucket = next((b for b, info in generation.segments if info.name == e.file), -1)
        members = np.flatnonzero(buckets == bucket)
        with naming(users[members[0]] if len(members) else None):
            raise


def _disorder(segments: SegmentSet, position: int) -> CorruptionError:
    what = f"pieces of the index are out of order, or of 0 or more than {MAX_STRIPE_ROWS} rows"
    return CorruptionError(what, file=segments.names[position])


def _hides_of(segments: SegmentSet, users: Users, pair_user: Ints, table: Ints) -> tuple[npt.NDArray[np.void], Ints]:
    """The hide-lists of the users, and their offsets."""
    owner, found = [np.empty(0, np.int64)], [np.empty(0, HIDE_DTYPE)]
    for k in segments.with_hides:
        hides = segments.segments[k].hides
        members = pair_user[table == k]
        keys = users[members]
        at = np.searchsorted(hides.users, keys)
        hit = np.flatnonzero((at < len(hides.users)) & (hides.users[np.minimum(at, len(hides.users) - 1)] == keys))
        rows, offsets = ranges_index(hides.offsets[at[hit]], hides.offsets[at[hit] + 1])
        owner.append(np.repeat(members[hit], np.diff(offsets)))
        found.append(hides.records[rows])
    if len(found) == 1:
        return found[0], np.zeros(len(users) + 1, np.int64)
    return group_hides(len(users), np.concatenate(owner), np.concatenate(found))


def with_hides(pieces: Pieces, hides: npt.NDArray[np.void], hide_off: Ints) -> Pieces:
    """The same pieces under a longer hide-list."""
    records = pieces.records
    if len(hides):
        least = pieces.field("min_hidden_from").copy()
        kernel("tighten_pieces")(
            pieces.piece_off,
            pieces.field("first_ts"),
            pieces.field("last_ts"),
            least,
            hide_off,
            np.ascontiguousarray(hides["event_ts"]),
            np.ascontiguousarray(hides["hidden_from"]),
        )
        records = records.copy()
        records["min_hidden_from"] = least
    return Pieces(
        pieces.users,
        pieces.piece_off,
        records,
        pieces.segment,
        pieces.run_off,
        pieces.run_of_user,
        pieces.watermark,
        hide_off,
        hides,
    )
