"""A batch's plan in plain loops, event by event as the protocol says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core.units import NEVER
from thinrow.kernels.reference.history import identity_mix

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Records: TypeAlias = npt.NDArray[Any]

_MASK, _MASK32 = (1 << 64) - 1, (1 << 32) - 1


def distinct_keys(keys: Ints, distinct: Ints, row_of: Ints) -> int:
    """As ``thinrow.kernels.numba.plan.distinct_keys``."""
    found, row_of[:] = np.unique(keys, return_inverse=True)
    distinct[: len(found)] = found
    return len(found)


def buckets_of_keys(keys: Ints, first: Ints, last: Ints, bucket: Ints) -> int:
    """As ``thinrow.kernels.numba.plan.buckets_of_keys``."""
    bucket[:] = [(_murmur3(k) & 0x7FFFFFFF) % len(first) for k in keys.tolist()]
    return int((last - first)[bucket].sum())


def _murmur3(key: int) -> int:
    def rotated(x: int, by: int) -> int:
        return (x << by | x >> (32 - by)) & _MASK32

    h = 0
    for half in (key & _MASK32, key >> 32 & _MASK32):
        h ^= rotated(half * 0xCC9E2D51 & _MASK32, 15) * 0x1B873593 & _MASK32
        h = (rotated(h, 13) * 5 + 0xE6546B64) & _MASK32
    h ^= 8
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK32
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK32
    return h ^ h >> 16


def pairs_of_users(bucket: Ints, first: Ints, last: Ints, user: Ints, segment: Ints, used: Bools) -> None:
    """As ``thinrow.kernels.numba.plan.pairs_of_users``."""
    pairs = [(u, s) for u, b in enumerate(bucket.tolist()) for s in range(first[b], last[b])]
    user[:], segment[:] = np.array(pairs, np.int64).reshape(-1, 2).T
    used[segment] = True


def group_pieces(
    records: Records,
    pair_user: Ints,
    pair_segment: Ints,
    first: Ints,
    last: Ints,
    most_rows: int,
    piece_off: Ints,
    run_off: Ints,
    run_of_user: Ints,
    segment: Ints,
    watermark: Ints,
) -> tuple[int, int]:
    """As ``thinrow.kernels.numba.plan.group_pieces``."""
    n_users, pair = len(watermark), np.repeat(np.arange(len(first)), last - first)
    wrong = (records["n_rows"] <= 0) | (records["n_rows"] > most_rows)
    stripe = records["stripe"].astype(np.int64)
    wrong[1:] |= (np.diff(stripe) <= 0) & (np.diff(pair) == 0)
    if wrong.any():
        return 0, int(pair[np.argmax(wrong)])
    lengths = (last - first)[last > first]
    run_off[: len(lengths) + 1] = np.concatenate([[0], np.cumsum(lengths)])
    piece_off[:] = np.searchsorted(pair_user[pair], np.arange(n_users + 1))
    run_of_user[:] = np.searchsorted(pair_user[last > first], np.arange(n_users + 1))
    segment[:] = pair_segment[pair]
    for u in range(n_users):
        own = records["max_arrival"][piece_off[u] : piece_off[u + 1]]
        watermark[u] = own.max() if len(own) else 0
    return len(lengths), -1


def _all_seen(record: Any, bound: int) -> bool:
    return bool(record["max_arrival"] <= bound < record["min_hidden_from"])


def _pieces(run_off: Ints, run_of_user: Ints, u: int) -> range:
    return range(run_off[run_of_user[u]], run_off[run_of_user[u + 1]])


def mark_mixed(
    records: Records,
    run_off: Ints,
    run_of_user: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    key_off: Ints,
    mixed: Ints,
    latest: Ints,
    out_pos: Ints,
) -> tuple[int, int, bool]:
    """As ``thinrow.kernels.numba.plan.mark_mixed``."""
    top: dict[int, int] = {}
    last_request: dict[int, int] = {}
    for u, t, b in zip(user_of.tolist(), request_ts.tolist(), bound.tolist(), strict=True):
        last_request[u] = max(last_request.get(u, 0), t)
        for p in _pieces(run_off, run_of_user, u):
            if records[p]["first_ts"] < t and (records[p]["last_ts"] >= t or not _all_seen(records[p], b)):
                top[p] = u
    key_off[:], rows = -1, 0
    out_pos[0] = 0
    for n, p in enumerate(sorted(top)):
        key_off[p], mixed[n], latest[n] = rows, p, last_request[top[p]]
        rows += int(records[p]["n_rows"])
        out_pos[n + 1] = rows
    return len(top), rows, any(records[p]["min_hidden_from"] != NEVER for p in top)


def rows_before(offsets: Ints, event_ts: Ints, before: Ints, rows: Ints) -> None:
    """As ``thinrow.kernels.numba.plan.rows_before``."""
    bounds = zip(offsets[:-1], offsets[1:], before, strict=True)
    rows[:] = [(event_ts[a:b] < t).sum() for a, b, t in bounds]


def _visible(
    record: Any, key_off: int, key_ts: Ints, key_arrival: Ints, key_hidden: Ints, t: int, b: int
) -> tuple[Ints, Bools]:
    """Positions of a mixed piece's keys before t, and which of them are visible."""
    k = np.arange(key_off, key_off + int(record["n_rows"]))
    k = k[key_ts[k] < t]
    shown = key_arrival[k] <= b
    return k, shown & (key_hidden[k] > b) if len(key_hidden) else shown


def summarize(
    records: Records,
    run_off: Ints,
    run_of_user: Ints,
    key_off: Ints,
    key_ts: Ints,
    key_arrival: Ints,
    key_hidden: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    count: Ints,
    total: Words,
    start: Ints,
    end: Ints,
    whole: Bools,
) -> None:
    """As ``thinrow.kernels.numba.plan.summarize``."""
    for x in range(len(user_of)):
        t, b = int(request_ts[x]), int(bound[x])
        times: list[int] = []
        mixes: list[int] = []
        found, before = 0, 0
        for p in _pieces(run_off, run_of_user, int(user_of[x])):
            if records[p]["last_ts"] < t and _all_seen(records[p], b):
                n = int(records[p]["n_rows"])
                found, before = found + n, before + n
                mixes.append(int(records[p]["digest"]))
                times += [int(records[p]["first_ts"]), int(records[p]["last_ts"])]
            elif records[p]["first_ts"] < t:
                k, shown = _visible(records[p], int(key_off[p]), key_ts, key_arrival, key_hidden, t, b)
                found, before = found + int(shown.sum()), before + len(k)
                mixes += identity_mix(key_ts[k[shown]], key_arrival[k[shown]]).tolist()
                times += key_ts[k[shown]].tolist()
        count[x], total[x], whole[x] = found, sum(mixes) & _MASK, found == before
        start[x], end[x] = (min(times), max(times)) if times else (0, 0)


def compare_versions(
    versions: Records,
    user_of: Ints,
    watermark: Ints,
    count: Ints,
    digest: Words,
    start: Ints,
    end: Ints,
) -> tuple[int, int]:
    """As ``thinrow.kernels.numba.plan.compare_versions``."""
    behind = versions["last_arrival"] > watermark[user_of]
    wrong = (versions["seq_len"] != count) | (versions["checksum"] != digest)
    wrong |= (versions["start_ts"] != start) | (versions["end_ts"] != end)
    first = [int(np.argmax(found)) if found.any() else -1 for found in (behind, wrong)]
    return first[0], first[1]


def read_ranges(
    records: Records,
    run_off: Ints,
    run_of_user: Ints,
    key_off: Ints,
    key_ts: Ints,
    key_arrival: Ints,
    key_hidden: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    oldest_ts: Ints,
    max_len: Ints,
    first: Ints,
    last: Ints,
    piece: Ints,
    start: Ints,
    stop: Ints,
    out_pos: Ints,
    user_rows: Ints,
) -> tuple[int, bool]:
    """As ``thinrow.kernels.numba.plan.read_ranges``."""
    first[:], last[:] = NEVER, 0
    for x in range(len(user_of)):
        t, b = int(request_ts[x]), int(bound[x])
        for r in range(run_of_user[user_of[x]], run_of_user[user_of[x] + 1]):
            shown: list[bool] = []
            floor = 0
            for p in range(run_off[r], run_off[r + 1]):
                if records[p]["first_ts"] >= t:
                    break
                if records[p]["last_ts"] < oldest_ts[x]:
                    floor = len(shown) + int(records[p]["n_rows"])
                if records[p]["last_ts"] < t and _all_seen(records[p], b):
                    shown += [True] * int(records[p]["n_rows"])
                else:
                    shown += _visible(records[p], int(key_off[p]), key_ts, key_arrival, key_hidden, t, b)[1].tolist()
            if not shown:
                continue
            at = np.append(np.flatnonzero(shown), len(shown))
            begin = int(at[-1 - max_len[x]]) if len(at) > max_len[x] else 0
            first[r] = min(first[r], max(begin, min(floor, len(shown))))
            last[r] = max(last[r], len(shown))
    found = list(_cut(records, run_off, first, last))
    for n, (p, begin, end) in enumerate(found):
        piece[n], start[n], stop[n] = p, begin, end
    rows = np.concatenate([[0], np.cumsum([end - begin for _, begin, end in found])])
    out_pos[: len(rows)] = rows
    owned = [sum(p < run_off[r] for p, _, _ in found) for r in run_of_user]
    user_rows[:] = rows[owned]
    return len(found), bool((np.diff(run_of_user) > 1).any())


def _cut(records: Records, run_off: Ints, first: Ints, last: Ints) -> Iterator[tuple[int, int, int]]:
    for r, (begin, end) in enumerate(itertools.pairwise(run_off.tolist())):
        row = 0
        for p in range(begin, end):
            n = int(records[p]["n_rows"])
            a, b = max(int(first[r]), row), min(int(last[r]), row + n)
            if a < b:
                yield p, a - row, b - row
            row += n


def example_slices(
    event_off: Ints,
    event_ts: Ints,
    arrival: Ints,
    hidden_from: Ints,
    user_of: Ints,
    request_ts: Ints,
    bound: Ints,
    oldest_ts: Ints,
    max_len: Ints,
    whole: Bools,
    start: Ints,
    stop: Ints,
    exact: Bools,
) -> int:
    """As ``thinrow.kernels.numba.plan.example_slices``."""
    delivered = 0
    for x in range(len(user_of)):
        a, b = int(event_off[user_of[x]]), int(event_off[user_of[x] + 1])
        stop[x] = a + int((event_ts[a:b] < request_ts[x]).sum())
        shown = [
            i
            for i in range(a, int(stop[x]))
            if event_ts[i] >= oldest_ts[x] and (whole[x] or arrival[i] <= bound[x] < hidden_from[i])
        ]
        shown = shown[max(len(shown) - int(max_len[x]), 0) :]
        delivered += len(shown)
        start[x] = shown[0] if shown else stop[x]
        exact[x] = len(shown) == stop[x] - start[x]
    return delivered
