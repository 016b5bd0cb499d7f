"""Index entries of a batch of users: which pieces of which segments hold their events.

Worked example: 512 users over 16 buckets are 512 pairs of user and segment where each bucket has one segment. All pairs
are searched in one compiled call over the index pages of all 16, and their pieces copied out in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError
from thinrow.core.ragged import ranges_index
from thinrow.core.stripes import PIECE_DTYPE
from thinrow.core.users import Users, bucket_of, distinct, plain
from thinrow.history.archive.hides import group_hides
from thinrow.history.archive.layout import MAX_STRIPE_ROWS
from thinrow.jagged import HIDE_DTYPE
from thinrow.kernels import kernel

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation
    from thinrow.history.archive.segments import SegmentSet

Ints = npt.NDArray[np.int64]

_NO_HIDES = np.empty(0, HIDE_DTYPE)
_FEW_ROWS = 1 << 18


@dataclass(slots=True)
class Pieces:
    """The index entries of a batch of users; nobody changes it.

    Attributes:
        users: (U,) distinct ids.
        piece_off: (U + 1,) pieces of each user.
        records: (P,) PIECE_DTYPE, by user, then segment, then time; ``min_hidden_from`` takes hide-lists into account.
        segment: (P,) number of the segment in the generation's list.
        run_off: (R + 1,) pieces of each run (one user in one segment).
        run_of_user: (U + 1,) runs of each user.
        watermark: (U,) highest arrival that the generation holds or has a tombstone for (0 where none).
        hide_off, hides: the hide-list by user (HIDE_DTYPE).
        segments: a set that holds the segments, opened; None where whoever made this has none.
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
    segments: SegmentSet | None = None

    def field(self, name: str) -> npt.NDArray[Any]:
        """One field of the records, contiguous."""
        return np.ascontiguousarray(self.records[name])


@contextmanager
def naming(user: object) -> Iterator[None]:
    """Damage that hits a whole file or page names a user who cannot be read for it; None where nobody is asked for."""
    try:
        yield
    except CorruptionError as e:
        if e.user is not None or user is None:
            raise
        raise CorruptionError(e.what, file=e.file, user=plain(user), column=e.column) from e


def distinct_users(users: Users) -> tuple[Users, Ints]:
    """``thinrow.core.users.distinct``, compiled for numbers."""
    if users.dtype != np.int64:
        return distinct(users)
    found, row_of = np.empty_like(users), np.empty(len(users), np.int64)
    n = kernel("distinct_keys")(users, found, row_of)
    return found[:n], row_of


def look_up(generation: Generation, users: Users) -> Pieces:
    """Index entries of distinct ``users``. Raises CorruptionError on a damaged file or index page."""
    first, last = generation.segment_bounds
    if users.dtype == np.int64:
        buckets = np.empty(len(users), np.int64)
        n_pairs = kernel("buckets_of_keys")(users, first, last, buckets)
    else:
        buckets = bucket_of(users, generation.n_buckets)
        n_pairs = int((last - first)[buckets].sum())
    try:
        return _look_up(generation, users, buckets, n_pairs)
    except CorruptionError as e:
        # Damage of a segment names a user of its bucket.
        bucket = next((b for b, info in generation.segments if info.name == e.file), -1)
        members = np.flatnonzero(buckets == bucket)
        with naming(users[members[0]] if len(members) else None):
            raise


def _look_up(generation: Generation, users: Users, buckets: Ints, n: int) -> Pieces:
    """``n``: how many pairs of user and segment there are."""
    n_users = len(users)
    pair_user, pair_segment = np.empty(n, np.int64), np.empty(n, np.int64)
    used = np.zeros(len(generation.segments), np.bool_)
    kernel("pairs_of_users")(buckets, *generation.segment_bounds, pair_user, pair_segment, used)
    segments = generation.opened_where(used)
    table = segments.position[pair_segment]
    if n:
        first, last, n_records, wrong = segments.pieces.find(table, users[pair_user])
        if wrong >= 0:
            raise _disorder(segments, table[wrong])
        records = segments.pieces.take_ranges(table, first, last, n_records)
    else:
        first, last, records = pair_user, pair_user, np.empty(0, PIECE_DTYPE)
    piece_off, run_of_user = np.empty(n_users + 1, np.int64), np.empty(n_users + 1, np.int64)
    run_off, segment, watermark = np.empty(n + 1, np.int64), np.empty(len(records), np.int64), np.empty_like(buckets)
    n_runs, bad = kernel("group_pieces")(
        records, pair_user, pair_segment, first, last, MAX_STRIPE_ROWS,
        piece_off, run_off, run_of_user, segment, watermark,
    )  # fmt: skip
    if bad >= 0:
        raise _disorder(segments, table[bad])
    beyond = rows_beyond(generation, records, segment)
    if beyond >= 0:
        what = f"users have more rows than its {generation.segments[beyond][1].n_rows}"
        raise CorruptionError(what, file=generation.segments[beyond][1].name)
    hides, hide_off = _hides_of(segments, users, pair_user, table)
    if generation.tombstone_index.files:
        # What was erased at the end of a user's arrivals was archived all the same.
        np.maximum(watermark, generation.tombstones(users).watermark(), out=watermark)
    pieces = Pieces(
        users, piece_off, records, segment, run_off[: n_runs + 1], run_of_user, watermark, hide_off, hides, segments
    )
    return with_hides(pieces, hides, hide_off) if len(hides) else pieces


def rows_beyond(generation: Generation, records: npt.NDArray[np.void], segment: Ints) -> int:
    """The first segment of which pieces of different users have more rows than it has, or -1; ``segment``: (P,) its
    number for each of the index entries. Of few rows nothing is asked: they take no memory to speak of."""
    rows = records["n_rows"].astype(np.int64)
    if int(rows.sum()) <= _FEW_ROWS:
        return -1
    held = np.bincount(segment, rows)
    return next((k for k in np.flatnonzero(held).tolist() if held[k] > generation.segments[k][1].n_rows), -1)


def _disorder(segments: SegmentSet, position: int) -> CorruptionError:
    what = f"pieces of the index are out of order, overlap, or are of 0 or more than {MAX_STRIPE_ROWS} rows"
    return CorruptionError(what, file=segments.names[position])


def _hides_of(segments: SegmentSet, users: Users, pair_user: Ints, table: Ints) -> tuple[npt.NDArray[np.void], Ints]:
    """The hide-lists of the users, and their offsets."""
    if not segments.with_hides:
        return _NO_HIDES, np.zeros(len(users) + 1, np.int64)
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
    return group_hides(len(users), np.concatenate(owner), np.concatenate(found))


def with_hides(pieces: Pieces, hides: npt.NDArray[np.void], hide_off: Ints) -> Pieces:
    """The same pieces under a longer hide-list."""
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
    records = pieces.records.copy()
    records["min_hidden_from"] = least
    return replace(pieces, records=records, hide_off=hide_off, hides=hides)
