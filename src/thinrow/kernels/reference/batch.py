"""The plan of a batch of requests, step by step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core.stripes import (
    FOUND_DELIVERED,
    FOUND_MIXED,
    FOUND_PIECES,
    FOUND_ROWS,
    FOUND_USERS,
    PIECE_DTYPE,
    PLAN_TIMES,
    USED,
    FewTables,
    StripeTables,
)
from thinrow.kernels.reference.pages import ranges_of_keys, take_ranges
from thinrow.kernels.reference.plan import (
    buckets_of_keys,
    compare_versions,
    distinct_keys,
    example_slices,
    group_pieces,
    mark_mixed,
    pairs_of_users,
    read_ranges,
    summarize,
)
from thinrow.kernels.reference.stripes import MAX_STRIPE_ROWS, read_stripes

Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Planned: TypeAlias = tuple[bool, Array, Ints, Ints, tuple[int, int, int, bool]]

DONE, NOT_HERE, NO_PAGE, UNDONE = range(4)
_STRIPE_ROWS = 512
_SEGMENT, _KEY, _PIECE, _START, _STOP, _OUT, _PIECE_FIELDS = range(7)


def place_users(
    keys: Ints, first: Ints, last: Ints, users: Ints, user_of: Ints, pair_user: Ints, pair_segment: Ints, used: Bools
) -> tuple[int, int]:
    """As ``thinrow.kernels.numba.batch.place_users``."""
    n = distinct_keys(keys, users, user_of)
    bucket = np.empty(n, np.int64)
    pairs = buckets_of_keys(users[:n], first, last, bucket)
    pairs_of_users(bucket, first, last, pair_user[:pairs], pair_segment[:pairs], used)
    return n, pairs


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
) -> Planned:
    """As ``thinrow.kernels.numba.batch.plan_batch``."""
    page_off, first_key, first_record, n_records, address = pages
    table, n, size = position[pair_segment], len(pair_user), PIECE_DTYPE.itemsize
    first, last, wanted = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(2 * n, np.int64)
    undone: Planned = (
        False,
        np.empty(0, PIECE_DTYPE),
        np.empty((_PIECE_FIELDS, 0), np.int64),
        np.empty((2, 0), np.int64),
        (0, 0, 0, False),
    )
    total, missing, wrong = ranges_of_keys(
        page_off, first_key, first_record, n_records, address, table, users[pair_user], size, first, last, wanted
    )
    if missing or wrong >= 0 or (total > 4_096 and total > n_records.sum()):
        return undone
    records, by_piece = np.empty(total, PIECE_DTYPE), np.empty((_PIECE_FIELDS, total + 1), np.int64)
    into, wanted = records.view(np.uint32), np.empty(total, np.int64)
    if take_ranges(page_off, first_record, n_records, address, table, first, last, size, into, wanted):
        return undone
    segment, key_off = by_piece[_SEGMENT, :total], by_piece[_KEY, :total]
    users_of = by_user[0], by_user[1]
    n_runs, wrong = group_pieces(
        records, pair_user, pair_segment, first, last, MAX_STRIPE_ROWS, by_user[0], run_off, by_user[1], segment,
        by_user[3, : len(users)],
    )  # fmt: skip
    if wrong >= 0:
        return undone
    runs = records, run_off[: n_runs + 1], users_of[1]
    mixed, latest, out_pos = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total + 1, np.int64)
    examples = user_of, request_ts, bound
    n, rows, hides = mark_mixed(*runs, *examples, key_off, mixed, latest, out_pos)
    if hides or rows > n * _STRIPE_ROWS:
        return undone
    keys, refused = np.empty((2, rows), np.int64), np.zeros(2, np.bool_)
    words, start, stop = records.view(np.uint64).reshape(-1, 8), np.zeros(n, np.int64), np.diff(out_pos[: n + 1])
    none = np.empty(0, np.int64)
    bad = read_stripes(
        tables, words, segment, mixed[:n], start, stop, out_pos, [keys[0], keys[1]], refused, used, none, 0
    )
    if bad >= 0 or refused.any():
        return undone
    summarize(*runs, key_off, keys[0], keys[1], none, *examples, seen[0], digest, seen[1], seen[2], whole)
    ends = np.empty((2, n_runs), np.int64)
    n_read, several = read_ranges(
        *runs, key_off, keys[0], keys[1], none, *examples, oldest_ts, max_len, ends[0], ends[1],
        by_piece[_PIECE], by_piece[_START], by_piece[_STOP], by_piece[_OUT], by_user[2],
    )  # fmt: skip
    return True, records, by_piece, keys, (n_runs, n, n_read, several)


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
    """As ``thinrow.kernels.numba.batch.read_few``."""
    n, n_streams = len(users), len(tables.columns.kind)
    at = USED + n_streams + 1
    bounds = np.cumsum([at, n, n, n + 1, n, n, n]).tolist()
    distinct, user_of, rows, start, stop, bound = (found[a:b] for a, b in itertools.pairwise(bounds))
    bound[:] = versions["snapshot_arrival"]
    newest, oldest = np.full(n, max_len, np.int64), np.full(n, np.iinfo(np.int64).min)
    if horizon >= 0:
        oldest = request_ts - horizon
    done, plan = plan_few(tables, users, request_ts, bound, oldest, newest, found, distinct, user_of)
    if done != DONE:
        return done
    n_users, by_user = plan.n_users, plan.by_user
    if by_user[2, -1] > capacity:
        return UNDONE
    if max(compare_versions(versions, user_of, by_user[3, :n_users], *plan.seen)) >= 0:
        return UNDONE
    if same and (versions["last_arrival"] != by_user[3][user_of]).any():
        return UNDONE
    total = int(by_user[2, -1])
    streams = read_planned(tables, plan, plan.by_piece[_OUT, : plan.n_read], total, out, capacity, found)
    if streams is None:
        return UNDONE
    rows[: n_users + 1], none = by_user[2], np.empty(0, np.int64)
    found[FOUND_DELIVERED] = example_slices(
        by_user[2], streams[tables.times].view(np.int64), none, none, user_of, request_ts, bound, oldest, newest,
        plan.whole, start, stop, exact,
    )  # fmt: skip
    found[FOUND_USERS], found[FOUND_ROWS] = n_users, total
    found[FOUND_PIECES], found[FOUND_MIXED] = len(plan.records), plan.n_mixed
    return DONE


@dataclass(slots=True)
class FewPlan:
    """What ``plan_batch`` says of a few requests: its results and outputs, and how many distinct users there are."""

    n_users: int
    records: Array
    by_piece: Ints
    n_mixed: int
    n_read: int
    by_user: Ints
    seen: tuple[Ints, Array, Ints, Ints]
    whole: Bools


def plan_few(
    tables: FewTables,
    users: Ints,
    request_ts: Ints,
    bound: Ints,
    oldest: Ints,
    newest: Ints,
    found: Ints,
    distinct: Ints,
    user_of: Ints,
) -> tuple[int, Any]:
    """How it ended, and the plan where it is done, of requests that see all events before their time."""
    n, most = len(users), len(users) * tables.most_segments
    pair_user, pair_segment = np.empty(most, np.int64), np.empty(most, np.int64)
    used = np.zeros(len(tables.position), np.bool_)
    n_users, n_pairs = place_users(
        users, tables.bounds[0], tables.bounds[1], distinct, user_of, pair_user, pair_segment, used
    )
    pairs = pair_user[:n_pairs], pair_segment[:n_pairs]
    if (tables.position[pairs[1]] < 0).any():
        return NOT_HERE, None
    if any((tables.pages[4][a:b] == 0).any() for a, b in itertools.pairwise(tables.pages[0].tolist())):
        return NO_PAGE, None
    by_user, run_off = np.empty((4, n_users + 1), np.int64), np.empty(n_pairs + 1, np.int64)
    seen, digest, whole = np.empty((3, n), np.int64), np.empty(n, np.uint64), np.empty(n, np.bool_)
    read = np.zeros(3, np.int64)
    done, records, by_piece, _, (_, n_mixed, n_read, several) = plan_batch(
        tables.pages, tables.keys, distinct[:n_users], user_of, *pairs, tables.position, request_ts, bound, oldest,
        newest, by_user, run_off, seen, digest, whole, read,
    )  # fmt: skip
    found[PLAN_TIMES : PLAN_TIMES + 3] = read
    if not done or several or not whole.all():
        return UNDONE, None
    plan = FewPlan(
        n_users, records, by_piece, n_mixed, n_read, by_user, (seen[0], digest, seen[1], seen[2]), whole
    )  # fmt: skip
    return DONE, plan


def read_planned(
    tables: FewTables, plan: FewPlan, place: Ints, total: int, out: Array, capacity: int, found: Ints
) -> list[Array] | None:
    """The streams in ``out``, ``total`` rows each, with the planned ranges at ``place``; None where one is wrong."""
    streams, n_read, n_streams = [], plan.n_read, len(tables.columns.kind)
    for w, (a, b) in enumerate(itertools.pairwise(tables.row_bytes.tolist())):
        kind = f"i{(b - a) // int(tables.columns.per_row[w])}"
        streams.append(out[capacity * a : capacity * a + total * (b - a)].view(kind))
    refused, words = np.zeros(n_streams, np.bool_), plan.records.view(np.uint64).reshape(-1, 8)
    piece, first, last = (plan.by_piece[field, :n_read] for field in (_PIECE, _START, _STOP))
    bad = read_stripes(
        tables.columns, words, plan.by_piece[_SEGMENT], piece, first, last, place, streams, refused,
        found[USED : USED + n_streams + 1], plan.by_piece[_KEY, : len(plan.records)], tables.key_stream,
    )  # fmt: skip
    return None if bad >= 0 or refused.any() else streams
