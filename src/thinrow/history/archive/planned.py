"""A batch's plan in two compiled calls, for what most are: users that are numbers, mapped files, nothing hidden.

Worked example: a request of user 7 for its newest 200. ``place_users`` says that bucket 3 and its segment 5 are meant;
the segment is opened, which the generation remembers, and what a kernel needs to know of its keys is written down once;
``plan_batch`` finds the user's index entries, decodes the keys of the stripe that the request cuts, sums up what the
request saw, and says which rows to read. ``Window`` does the same step by step where this cannot, and is its oracle.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinrow.core.users import Users
from thinrow.history.archive.layout import key_columns
from thinrow.history.archive.lookup import Ints, Pieces, rows_beyond
from thinrow.jagged import HIDE_DTYPE
from thinrow.kernels import kernel
from thinrow.schema.event_schema import ARRIVAL_ID, EVENT_TS_ID

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Generation
    from thinrow.history.archive.reader import ReadStats

_KEYS = key_columns()[:2]
_NO_HIDES = np.empty(0, HIDE_DTYPE)
#: Rows of what ``plan_batch`` says by piece.
_SEGMENT, _KEY, _PIECE, _START, _STOP, _OUT = range(6)


@dataclass(slots=True)
class Plan:
    """Attributes:
    user_of: (X,) row of ``pieces.users`` of each example.
    pieces: index entries of the users.
    key_off, keys: places and keys of mixed pieces, as ``kernels.numba.plan`` has them.
    seen: (X,) count, identity digest, first and last time of what each example sees.
    whole: (X,) whether that is all of its user's events before its request.
    oldest_ts, max_len: what ``ranges`` were planned for.
    ranges: piece, first row, last row (exclusive) of each range of rows to read, and where it goes.
    user_rows: (U + 1,) rows of each user among these.
    several: whether a user has several runs, which must be merged.
    """

    user_of: Ints
    pieces: Pieces
    key_off: Ints
    keys: npt.NDArray[np.int64]
    seen: tuple[Ints, npt.NDArray[np.uint64], Ints, Ints]
    whole: npt.NDArray[np.bool_]
    oldest_ts: Ints
    max_len: Ints
    ranges: tuple[Ints, Ints, Ints, Ints]
    user_rows: Ints
    several: bool


def plan_at_once(
    generation: Generation,
    asked: Users,
    request_ts: Ints,
    bound: Ints,
    oldest_ts: Ints,
    max_len: Ints,
    stats: ReadStats,
) -> Plan | None:
    """The plan of requests of (X,) users, repeats included; None where the two calls cannot make it.

    Raises:
        CorruptionError, ObjectNotFound, Erased: a segment cannot be opened.
    """
    n = len(asked)
    if asked.dtype != np.int64 or not n:
        return None
    since = time.perf_counter()
    # Copies, because memory that is not ours may be of a kind that the calls were not compiled for.
    asked, request_ts, bound = asked.copy(), request_ts.copy(), bound.copy()
    users, user_of, used = np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(len(generation.segments), np.bool_)
    pairs = np.empty((2, n * generation.most_segments), np.int64)
    pair_user, pair_segment = pairs[0], pairs[1]
    n_users, n_pairs = kernel("place_users")(
        asked, *generation.segment_bounds, users, user_of, pair_user, pair_segment, used
    )
    if not n_pairs:
        return None
    segments = generation.opened_where(used)
    tables = generation.tables.of(len(generation.segments), _KEYS)
    pages = segments.pieces.pages
    if pages is None or segments.with_hides or not tables.prepare_set(generation, segments):
        return None
    users = users[:n_users]
    by_user, run_off = np.empty((4, n_users + 1), np.int64), np.empty(n_pairs + 1, np.int64)
    seen, digest, whole = np.empty((3, n), np.int64), np.empty(n, np.uint64), np.empty(n, np.bool_)
    read = np.zeros(3, np.int64)
    done, records, by_piece, keys, sizes = kernel("plan_batch")(
        pages, tables.tables, users, user_of, pair_user[:n_pairs], pair_segment[:n_pairs],
        segments.position, request_ts, bound, oldest_ts, max_len, by_user, run_off, seen, digest, whole, read,
    )  # fmt: skip
    if not done:
        return None
    n_runs, n_mixed, n_ranges, several = sizes
    if rows_beyond(generation, records, by_piece[_SEGMENT, : len(records)]) >= 0:
        # The long way says which file it is.
        return None
    stats.pieces += len(records)
    stats.mixed_pieces += n_mixed
    if n_mixed:
        times, arrivals, chunks = read.tolist()
        stats.bytes_read += chunks
        stats.book_bytes(EVENT_TS_ID, times)
        stats.book_bytes(ARRIVAL_ID, arrivals)
    piece_off, run_of_user, user_rows, watermark = by_user
    pieces = Pieces(
        users, piece_off, records, by_piece[_SEGMENT, : len(records)], run_off[: n_runs + 1], run_of_user,
        watermark[:n_users], np.zeros(n_users + 1, np.int64), _NO_HIDES, segments,
    )  # fmt: skip
    piece, start, stop, out_pos = by_piece[_PIECE:]
    plan = Plan(
        user_of, pieces, by_piece[_KEY, : len(records)], keys, (seen[0], digest, seen[1], seen[2]), whole, oldest_ts,
        max_len, (piece[:n_ranges], start[:n_ranges], stop[:n_ranges], out_pos[: n_ranges + 1]), user_rows, several,
    )  # fmt: skip
    stats.clock("index", since)
    return plan
