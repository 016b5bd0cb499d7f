"""The whole plan of a batch of requests in two calls, and a whole read of a few in one.

These are the kernels of ``pages``, ``plan`` and ``stripes`` one after another, for what most batches are: users that
are numbers, mapped files, no event that is hidden. What they cannot do, or find wrong, they leave to whoever calls the
same kernels one by one. Worked example: a batch of one user in one segment takes two calls and then one that reads, or
``read_few`` alone, which was 14 calls.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from thinrow.core.stripes import (
    ALL_PAGES,
    ALL_SEGMENTS,
    FIRST_KEY,
    FIRST_RECORD,
    FIRST_SEGMENT,
    FOUND_DELIVERED,
    FOUND_MIXED,
    FOUND_PIECES,
    FOUND_ROWS,
    FOUND_USERS,
    KEY_KIND,
    KEY_PER_ROW,
    KEY_SEGMENTS,
    KEY_STREAMS,
    KEYS,
    KINDS,
    LAST_SEGMENT,
    MOST_SEGMENTS,
    N_BUCKETS,
    N_RECORDS,
    N_SEGMENTS,
    N_STREAMS,
    N_TABLES,
    PAGE_ADDRESS,
    PAGE_OFF,
    PER_ROW,
    PIECE_DTYPE,
    PLAN_TIMES,
    POSITION,
    ROW_BYTES,
    SEGMENT_FIELDS,
    STREAM_FIELDS,
    STREAMS,
    TIMES,
    USED,
    FewTables,
    StripeTables,
)
from thinrow.kernels.numba.few import (
    CUT_FIELDS,
    as_versions_say,
    by_user_of,
    cut_users,
    prove,
    put_times,
    ranges_of_users,
    slices_of_requests,
)
from thinrow.kernels.numba.intrinsics import pointer
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.pages import ranges_of_keys, take_ranges
from thinrow.kernels.numba.plan import (
    buckets_of_keys,
    distinct_keys,
    group_pieces,
    mark_mixed,
    pairs_of_users,
    read_ranges,
    rows_before,
    summarize,
)
from thinrow.kernels.numba.stripes import read_into, rooms
from thinrow.kernels.numba.unpack import ROOM, SCRATCH, workspace

Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_ITEMSIZE = PIECE_DTYPE.itemsize
#: So many pieces are read in one pass, arrivals that no request reaches too: a second pass costs more than these.
FEW = 8
#: Rows that a stripe is written with; more are not believed before they are found.
STRIPE_ROWS = 512
MAX_STRIPE_ROWS = 65_536
#: So many pieces take no memory to speak of, whatever a damaged index says.
_FEW = 4_096
#: Rows of what ``plan_batch`` says by piece: segment, place of its keys or -1; and, of those that are read, piece,
#: first row, last row (exclusive), place in what is delivered.
SEGMENT, KEY, PIECE, START, STOP, OUT, PIECE_FIELDS = range(7)
#: What a call says of itself: done; not done, because a segment is not there, or a page, or for another reason.
DONE, NOT_HERE, NO_PAGE, UNDONE = range(4)


@njit
def place_users(
    keys: Ints, first: Ints, last: Ints, users: Ints, user_of: Ints, pair_user: Ints, pair_segment: Ints, used: Bools
) -> tuple[int, int]:
    """The distinct of (X,) ``keys``, the place of each among them, and pairs of user and segment, as
    ``plan.distinct_keys`` and ``plan.pairs_of_users`` give them.

    Args:
        first, last: (B,) segments of each bucket, ``[first, last)``.
        users, user_of: (X,)
        pair_user, pair_segment: as long as X users can have pairs.
        used: (S,) False; becomes True of segments that are in a pair.

    Returns:
        how many users and pairs there are.
    """
    n = distinct_keys(keys, users, user_of)
    bucket = np.empty(n, np.int64)
    pairs = buckets_of_keys(users[:n], first, last, bucket)
    pairs_of_users(bucket, first, last, pair_user, pair_segment, used)
    return n, pairs


@njit
def _read_keys(
    segments: Ints,
    streams: Ints,
    kind: Ints,
    per_row: Ints,
    records: Array,
    segment: Ints,
    mixed: Ints,
    latest: Ints,
    out_pos: Ints,
    key_ts: Ints,
    key_arrival: Ints,
    used: Ints,
    scratch: Array,
    room: Array,
) -> bool:
    """Times and arrival numbers of pieces; whether all is sound."""
    n = len(mixed)
    words = carray(pointer(records.ctypes.data), (len(records), 8), np.uint64)
    start, length = np.zeros(n, np.int64), out_pos[1:] - out_pos[:n]
    target, refused = np.empty((2, 3), np.int64), np.zeros(2, np.bool_)
    target[0, 0], target[1, 0] = key_ts.ctypes.data, key_arrival.ctypes.data
    target[:, 1], target[:, 2] = len(key_ts), 8
    none = np.empty(0, np.int64)
    if n <= FEW:
        runs, blocks = rooms(n, 2)
        bad = read_into(
            segments, streams, kind, per_row, words, segment, mixed, start, length, out_pos, target, refused, used,
            none, 0, -1, runs, blocks, scratch, room,
        )  # fmt: skip
        return bool(bad < 0 and not refused[0] and not refused[1])
    # Two passes of one stream each.
    runs, blocks = rooms(n, 1)
    total = np.zeros(2, np.int64)
    bad = read_into(
        segments, streams[:1], kind[:1], per_row[:1], words, segment, mixed, start, length, out_pos, target[:1],
        refused[:1], total, none, 0, -1, runs, blocks, scratch, room,
    )  # fmt: skip
    if bad >= 0 or refused[0]:
        return False
    used[0], used[2] = total[0], total[1]
    # Of what no request reaches no arrival number is asked.
    rows_before(out_pos, key_ts, latest, length)
    total[:] = 0
    bad = read_into(
        segments, streams[1:], kind[1:], per_row[1:], words, segment, mixed, start, length, out_pos, target[1:],
        refused[1:], total, none, 0, -1, runs, blocks, scratch, room,
    )  # fmt: skip
    used[1] = total[0]
    return bool(bad < 0 and not refused[1])


@njit
def _pieces(
    page_off: Ints,
    first_key: Ints,
    first_record: Ints,
    n_records: Ints,
    address: Ints,
    users: Ints,
    pair_user: Ints,
    pair_segment: Ints,
    position: Ints,
    by_user: Ints,
    run_off: Ints,
) -> Any:
    """Index entries of users, as ``plan_batch`` gives them: how it ended, entries, by piece, number of runs."""
    records, by_piece = np.empty(0, PIECE_DTYPE), np.empty((PIECE_FIELDS, 0), np.int64)
    n_pairs, size = len(pair_user), _ITEMSIZE
    table, key = position[pair_segment], users[pair_user]
    first, last = np.empty(n_pairs, np.int64), np.empty(n_pairs, np.int64)
    wanted = np.empty(2 * n_pairs, np.int64)
    total, missing, wrong = ranges_of_keys(
        page_off, first_key, first_record, n_records, address, table, key, size, first, last, wanted
    )
    if missing:
        return NO_PAGE, records, by_piece, 0
    if wrong >= 0 or (total > _FEW and total > n_records.sum()):
        return UNDONE, records, by_piece, 0
    records, by_piece = np.empty(total, PIECE_DTYPE), np.empty((PIECE_FIELDS, total + 1), np.int64)
    bytes_of = carray(pointer(records.ctypes.data), (total * size // 4,), np.uint32)
    wanted = np.empty(total, np.int64)
    if take_ranges(page_off, first_record, n_records, address, table, first, last, size, bytes_of, wanted):
        return NO_PAGE, records, by_piece, 0
    n_runs, wrong = group_pieces(
        records, pair_user, pair_segment, first, last, MAX_STRIPE_ROWS,
        by_user[0], run_off, by_user[1], by_piece[SEGMENT, :total], by_user[3, : len(users)],
    )  # fmt: skip
    return DONE if wrong < 0 else UNDONE, records, by_piece, n_runs


@njit
def _plan(
    page_off: Ints,
    first_key: Ints,
    first_record: Ints,
    n_records: Ints,
    address: Ints,
    segments: Ints,
    streams: Ints,
    kind: Ints,
    per_row: Ints,
    users: Ints,
    user_of: Ints,
    pair_user: Ints,
    pair_segment: Ints,
    position: Ints,
    request_ts: Ints,
    bound: Ints,
    oldest_ts: Ints,
    max_len: Ints,
    by_user: Ints,
    run_off: Ints,
    seen: Ints,
    digest: Array,
    whole: Bools,
    used: Ints,
    scratch: Array,
    room: Array,
) -> Any:
    keys, sizes = np.empty((2, 0), np.int64), (0, 0, 0, False)
    done, records, by_piece, n_runs = _pieces(
        page_off,
        first_key,
        first_record,
        n_records,
        address,
        users,
        pair_user,
        pair_segment,
        position,
        by_user,
        run_off,
    )
    if done != DONE:
        return done, records, by_piece, keys, sizes
    total = len(records)
    segment, key_off, run_of_user, user_rows = by_piece[SEGMENT, :total], by_piece[KEY, :total], by_user[1], by_user[2]
    runs = run_off[: n_runs + 1]
    mixed, latest, out_pos = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total + 1, np.int64)
    n, rows, hides = mark_mixed(records, runs, run_of_user, user_of, request_ts, bound, key_off, mixed, latest, out_pos)
    if hides or rows > n * STRIPE_ROWS:
        return UNDONE, records, by_piece, keys, sizes
    keys = np.empty((2, rows), np.int64)
    if n and not _read_keys(
        segments, streams, kind, per_row, records, segment, mixed[:n], latest[:n], out_pos[: n + 1], keys[0], keys[1],
        used, scratch, room,
    ):  # fmt: skip
        return UNDONE, records, by_piece, keys, sizes
    none = np.empty(0, np.int64)
    summarize(
        records, runs, run_of_user, key_off, keys[0], keys[1], none, user_of, request_ts, bound,
        seen[0], digest, seen[1], seen[2], whole,
    )  # fmt: skip
    ends = np.empty((2, n_runs), np.int64)
    n_read, several = read_ranges(
        records, runs, run_of_user, key_off, keys[0], keys[1], none, user_of, request_ts, bound, oldest_ts, max_len,
        ends[0], ends[1], by_piece[PIECE], by_piece[START], by_piece[STOP], by_piece[OUT], user_rows,
    )  # fmt: skip
    return DONE, records, by_piece, keys, (n_runs, n, n_read, several)


def plan_batch(
    pages: tuple[Ints, ...],
    tables: StripeTables,
    users: Ints,
    user_of: Ints,
    pair_user: Ints,
    pair_segment: Ints,
    position: Ints,
    request_ts: Ints,
    bound: Ints,
    oldest_ts: Ints,
    max_len: Ints,
    by_user: Ints,
    run_off: Ints,
    seen: Ints,
    digest: Array,
    whole: Bools,
    used: Ints,
) -> tuple[bool, Array, Ints, Ints, tuple[int, int, int, bool]]:
    """What X examples of U users see of their archived events, its proof, and the rows to read for it.

    Args:
        pages: of the piece indexes as one, as ``pages.ranges_of_keys`` has them: page_off, first_key, first_record,
            n_records, address.
        tables: of the streams event_ts and arrival; all segments of the pairs are prepared.
        users, user_of, pair_user, pair_segment: as ``place_users`` gives them, cut to their lengths.
        position: segment number -> table of the index.
        request_ts, bound, oldest_ts, max_len: (X,) what each example sees, as ``plan.read_ranges`` says.
        by_user: (4, U + 1) gets pieces, runs and delivered rows as offsets, and the watermark of each user.
        run_off: one longer than there are pairs; gets the pieces of each run.
        seen: (3, X) gets the count, first and last time of what each example sees; ``digest``, ``whole`` (X,) as
            ``plan.summarize``.
        used: (3,) 0, gets bytes of the blocks of event_ts and arrival, and of chunks.

    Returns:
        whether it was done; where not, nothing else counts: a page is not there or unsound, an event is hidden,
        something is damaged. (P,) PIECE_DTYPE; (``PIECE_FIELDS``, P + 1) by piece; (2, n) times and arrivals of mixed
        pieces; numbers of runs, of mixed pieces and of pieces to be read, and whether a user has several runs.
    """
    page_off, first_key, first_record, n_records, address = pages
    found: tuple[int, Array, Ints, Ints, tuple[int, int, int, bool]] = _plan(
        page_off, first_key, first_record, n_records, address,
        tables.segments, tables.streams, tables.kind, tables.per_row,
        users, user_of, pair_user, pair_segment, position, request_ts, bound, oldest_ts, max_len,
        by_user, run_off, seen, digest, whole, used, *workspace(),
    )  # fmt: skip
    return found[0] == DONE, *found[1:]


@njit
def ints_at(state: Ints, field: int, n: Any) -> Ints:
    return carray(pointer(state[field]), (n,), np.int64)


@njit
def read_rows(
    state: Ints,
    records: Array,
    by_piece: Ints,
    n_read: int,
    total: int,
    key_ts: Ints,
    out: Array,
    capacity: int,
    used: Ints,
    scratch: Array,
    room: Array,
) -> Any:
    """All columns of what was planned; the address of the times, or 0."""
    n_streams, n_segments, times = state[N_STREAMS], state[N_SEGMENTS], state[TIMES]
    per_row, row_bytes = ints_at(state, PER_ROW, n_streams), ints_at(state, ROW_BYTES, n_streams + 1)
    target, refused = np.empty((n_streams, 3), np.int64), np.zeros(n_streams, np.bool_)
    for w in range(n_streams):
        target[w, 0] = out.ctypes.data + capacity * row_bytes[w]
        target[w, 1] = total * per_row[w]
        target[w, 2] = (row_bytes[w + 1] - row_bytes[w]) // per_row[w]
    piece, start, stop = by_piece[PIECE, :n_read], by_piece[START, :n_read], by_piece[STOP, :n_read]
    out_pos, key_off = by_piece[OUT, : n_read + 1], by_piece[KEY, : len(records)]
    put_times(key_off, key_ts, piece, start, stop, out_pos, target[times, 0])
    runs, blocks = rooms(n_read, n_streams)
    bad = read_into(
        carray(pointer(state[ALL_SEGMENTS]), (n_segments, SEGMENT_FIELDS), np.int64),
        carray(pointer(state[STREAMS]), (n_streams, n_segments, STREAM_FIELDS), np.int64),
        ints_at(state, KINDS, n_streams), per_row,
        carray(pointer(records.ctypes.data), (len(records), 8), np.uint64), by_piece[SEGMENT, : len(records)],
        piece, start, stop, out_pos, target, refused, used, key_off, state[KEYS], times, runs, blocks, scratch, room,
    )  # fmt: skip
    if bad >= 0 or refused.any():
        return 0
    return target[times, 0]


@njit
def find_few(state: Ints, asked: Ints, users: Ints, user_of: Ints, by_user: Ints, run_off: Ints) -> Any:
    """``_pieces`` of the distinct of ``asked``, and how many these are."""
    n, n_segments = len(asked), state[N_SEGMENTS]
    first, last = ints_at(state, FIRST_SEGMENT, state[N_BUCKETS]), ints_at(state, LAST_SEGMENT, state[N_BUCKETS])
    position = ints_at(state, POSITION, n_segments)
    pair_user, pair_segment = np.empty(n * state[MOST_SEGMENTS], np.int64), np.empty(n * state[MOST_SEGMENTS], np.int64)
    n_users = distinct_keys(asked, users, user_of)
    bucket, used = np.empty(n_users, np.int64), np.empty(n_segments, np.bool_)
    n_pairs = buckets_of_keys(users[:n_users], first, last, bucket)
    pairs_of_users(bucket, first, last, pair_user, pair_segment, used)
    for i in range(n_pairs):
        if position[pair_segment[i]] < 0:
            records, by_piece = np.empty(0, PIECE_DTYPE), np.empty((PIECE_FIELDS, 0), np.int64)
            return NOT_HERE, records, by_piece, 0, n_users
    n_pages = state[ALL_PAGES]
    done, records, by_piece, n_runs = _pieces(
        ints_at(state, PAGE_OFF, state[N_TABLES] + 1), ints_at(state, FIRST_KEY, n_pages),
        ints_at(state, FIRST_RECORD, n_pages), ints_at(state, N_RECORDS, n_pages),
        ints_at(state, PAGE_ADDRESS, n_pages),
        users[:n_users], pair_user[:n_pairs], pair_segment[:n_pairs], position, by_user, run_off,
    )  # fmt: skip
    return done, records, by_piece, n_runs, n_users


@njit
def seen_by(
    state: Ints, asked: Ints, request_ts: Ints, bound: Ints, found: Ints, users: Ints, user_of: Ints, by_user: Ints
) -> Any:
    """What requests see of their archived events: how it ended; pieces, by piece and runs as ``find_few`` has them; how
    many distinct users, and mixed pieces; requests by user; ``rows_to``, ``cut`` and ``digest`` of ``few.cut_users``;
    times of mixed pieces; scratch, room."""
    n, n_segments = len(asked), state[N_SEGMENTS]
    run_off = np.empty(n * state[MOST_SEGMENTS] + 1, np.int64)
    done, records, by_piece, n_runs, n_users = find_few(state, asked, users, user_of, by_user, run_off)
    n_pieces, runs, (requests, order) = len(records), run_off[: n_runs + 1], by_user_of(user_of, n_users)
    rows_to, cut, digest = np.empty(n_pieces, np.int64), np.empty((CUT_FIELDS, n), np.int64), np.empty(n, np.uint64)
    key_ts, scratch, room = np.empty(0, np.int64), np.empty(SCRATCH, np.uint64), np.empty(ROOM, np.uint64)
    n_mixed = np.int64(0)
    if done == DONE:
        run_of_user, key_off = by_user[1, : n_users + 1], by_piece[KEY, :n_pieces]
        mixed, latest, out_pos = (
            np.empty(n_pieces, np.int64),
            np.empty(n_pieces, np.int64),
            np.empty(n_pieces + 1, np.int64),
        )
        mixed_off = np.empty(n_users + 1, np.int64)
        n_mixed = cut_users(
            records, runs, run_of_user, requests, order, request_ts, bound, rows_to, key_off, mixed, latest, out_pos,
            mixed_off, cut, digest,
        )  # fmt: skip
        # More rows are not believed before they are found.
        if n_mixed < 0 or out_pos[n_mixed] > n_mixed * STRIPE_ROWS:
            done = UNDONE
        elif n_mixed:
            key_ts, (key_runs, blocks) = np.empty(out_pos[n_mixed], np.int64), rooms(n_mixed, 2)
            if not prove(
                carray(pointer(state[KEY_SEGMENTS]), (n_segments, SEGMENT_FIELDS), np.int64),
                carray(pointer(state[KEY_STREAMS]), (2, n_segments, STREAM_FIELDS), np.int64),
                ints_at(state, KEY_KIND, 2), ints_at(state, KEY_PER_ROW, 2), records, by_piece[SEGMENT, :n_pieces],
                mixed[:n_mixed], latest, out_pos[: n_mixed + 1], mixed_off, requests, order, request_ts, bound, cut,
                digest, key_ts, found[PLAN_TIMES : PLAN_TIMES + 3], key_runs, blocks, scratch, room,
            ):  # fmt: skip
                done = UNDONE
    return done, records, by_piece, runs, n_users, n_mixed, requests, order, rows_to, cut, digest, key_ts, scratch, room


@njit
def _few(
    state: Ints,
    versions: Array,
    asked: Ints,
    request_ts: Ints,
    max_len: int,
    horizon: int,
    same: bool,
    out: Array,
    capacity: int,
    found: Ints,
    exact: Bools,
) -> int:
    n, n_streams = len(asked), state[N_STREAMS]
    at = USED + n_streams + 1
    users, user_of, bound = found[at : at + n], found[at + n : at + 2 * n], found[at + 5 * n + 1 :]
    by_user = np.empty((4, n + 1), np.int64)
    for x in range(n):
        bound[x] = versions[x].snapshot_arrival
    done, records, by_piece, runs, n_users, n_mixed, requests, order, rows_to, cut, digest, key_ts, scratch, room = (
        seen_by(state, asked, request_ts, bound, found, users, user_of, by_user)
    )
    if done != DONE:
        return int(done)
    if not as_versions_say(versions, by_user[3], user_of, cut, digest, same):
        return UNDONE
    oldest, newest = np.empty(n, np.int64), np.empty(n, np.int64)
    for x in range(n):
        oldest[x], exact[x] = request_ts[x] - horizon if horizon >= 0 else np.iinfo(np.int64).min, True
        newest[x] = max_len
    at += 2 * n
    rows = found[at : at + n_users + 1]
    start, stop = found[at + n + 1 : at + 2 * n + 1], found[at + 2 * n + 1 : at + 3 * n + 1]
    n_read = ranges_of_users(
        records, runs, by_user[1, : n_users + 1], requests, order, rows_to, cut, oldest, newest,
        by_piece[PIECE], by_piece[START], by_piece[STOP], by_piece[OUT], rows, stop,
    )  # fmt: skip
    total = rows[n_users]
    if total > capacity:
        return UNDONE
    used = found[USED : USED + n_streams + 1]
    begin = read_rows(state, records, by_piece, n_read, total, key_ts, out, capacity, used, scratch, room)
    if begin == 0:
        return UNDONE
    event_ts = carray(pointer(begin), (total,), np.int64)
    found[FOUND_DELIVERED] = slices_of_requests(user_of, rows, event_ts, oldest, max_len, start, stop)
    found[FOUND_USERS], found[FOUND_ROWS] = n_users, total
    found[FOUND_PIECES], found[FOUND_MIXED] = len(records), n_mixed
    return DONE


def read_few(
    tables: FewTables,
    versions: Array,
    users: Ints,
    request_ts: Ints,
    max_len: int,
    horizon: int,
    same: bool,
    out: Array,
    capacity: int,
    found: Ints,
    exact: Bools,
) -> int:
    """A whole read: the newest events of X requests, verified and decoded.

    Args:
        tables: of what is read.
        versions: (X,) VERSION_DTYPE.
        users, request_ts: (X,) int64.
        max_len, horizon: the newest so many, and ms back from the request, -1 for all time.
        same: whether nothing may have been archived of these users since.
        out: (capacity * row_bytes[W],) uint8; stream w begins at ``capacity * row_bytes[w]``.
        capacity: rows that there is room for, a multiple of 8.
        found: (USED + W + 1 + 6 * X + 1,) int64, 0 at first: gets the fields up to ``USED``, bytes by stream and of
            chunks, then distinct users (X), user of each request (X), rows of each user as offsets (X + 1), start (X),
            stop (X) and bound (X) of each request.
        exact: (X,) gets True.

    Returns:
        ``DONE``; ``NOT_HERE`` where a segment is not in the tables; ``NO_PAGE`` where a page of the index is not there;
        ``UNDONE`` where something is wrong, or not for this call: hidden or late events, several runs a user, more rows
        than there is room for.
    """
    done: int = _few(tables.state, versions, users, request_ts, max_len, horizon, same, out, capacity, found, exact)
    return done
