"""The compiled kernels of a batch's plan against the plain loops, and against the protocol said event by event."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_history_kernels import grouped, same
from thinrow.core.stripes import PIECE_DTYPE
from thinrow.core.units import NEVER
from thinrow.core.users import bucket_of, distinct
from thinrow.kernels import BACKENDS, kernel, use
from thinrow.schema import VERSION_DTYPE

FAST = settings(max_examples=60)
Array = Any


def sees_all(g: dict[str, Any]) -> Any:
    """(X,) whether the example sees all events of its user before its request."""
    found = []
    for u, t, bound in zip(g["user_of"], g["request_ts"], g["bound"], strict=True):
        rows = slice(g["off"][u], g["off"][u + 1])
        hidden = (g["arrival"][rows] > bound) | (g["hidden"][rows] <= bound)
        found.append(not (hidden & (g["ts"][rows] < t)).any())
    return np.array(found, np.bool_)


def visible_rows(g: dict[str, Any], x: int, oldest: int = -(2**63)) -> list[int]:
    """Positions of the events that example x sees from ``oldest`` on."""
    u, t, bound = g["user_of"][x], g["request_ts"][x], g["bound"][x]
    return [
        i
        for i in range(g["off"][u], g["off"][u + 1])
        if oldest <= g["ts"][i] < t and g["arrival"][i] <= bound < g["hidden"][i]
    ]


def newest_rows(g: dict[str, Any], x: int) -> list[int]:
    """Positions of the newest ``max_len`` events that example x sees from ``oldest`` on."""
    rows = visible_rows(g, x, g["oldest"][x])
    return rows[max(len(rows) - int(g["max_len"][x]), 0) :]


def slices_of(g: dict[str, Any], whole: Array) -> tuple[Any, ...]:
    names = ("off", "ts", "arrival", "hidden", "user_of", "request_ts", "bound", "oldest", "max_len")
    n = len(whole)
    return *(g[name] for name in names), whole, *(np.zeros(n, np.int64) for _ in range(2)), np.zeros(n, np.bool_)


@FAST
@given(g=grouped())
def test_slices_hold_the_newest_of_each_length(g: dict[str, Any]) -> None:
    for whole in (sees_all(g), np.zeros(len(g["user_of"]), np.bool_)):
        same("example_slices", *slices_of(g, whole))
    *_, start, stop, exact = arguments = slices_of(g, sees_all(g))
    delivered = kernel("example_slices")(*arguments)
    for x in range(len(start)):
        inside = np.arange(start[x], stop[x])
        shown = (g["arrival"][inside] <= g["bound"][x]) & (g["hidden"][inside] > g["bound"][x])
        assert inside[shown].tolist() == newest_rows(g, x)
        assert exact[x] == shown.all()
    assert delivered == sum(len(newest_rows(g, x)) for x in range(len(start)))


class Cut:
    """A batch's events dealt out to up to three segments, each cut into pieces, as an archive holds them.

    Attributes:
        rows: positions of the events in stored order.
        run_row: (R + 1,) rows of each run.
        runs: records, ``run_off``, ``run_of_user``.
        examples: ``user_of``, ``request_ts``, ``bound``.
    """

    def __init__(self, g: dict[str, Any], rng: np.random.Generator) -> None:
        rows: list[int] = []
        run_off, run_of_user, n_rows = [0], [0], []
        for a, b in itertools.pairwise(g["off"].tolist()):
            segment = rng.integers(0, 3, b - a)
            for s in range(3):
                mine = (a + np.flatnonzero(segment == s)).tolist()
                while mine:
                    n = int(rng.integers(1, len(mine) + 1))
                    rows += mine[:n]
                    n_rows.append(n)
                    mine = mine[n:]
                if len(n_rows) > run_off[-1]:
                    run_off.append(len(n_rows))
            run_of_user.append(len(run_off) - 1)
        self.rows = np.array(rows, np.int64)
        self.keys = tuple(np.ascontiguousarray(g[n][self.rows]) for n in ("ts", "arrival", "hidden"))
        self.off = np.concatenate([[0], np.cumsum(n_rows)]).astype(np.int64)
        self.run_row = self.off[run_off]
        ts, mix = self.keys[0], kernel("identity_mix")(*self.keys[:2])
        top, least, digest = kernel("piece_summaries")(self.off, *self.keys, mix)
        records = np.zeros(len(n_rows), PIECE_DTYPE)
        records["first_ts"], records["last_ts"] = ts[self.off[:-1]], ts[self.off[1:] - 1]
        records["max_arrival"], records["min_hidden_from"], records["digest"] = top, least, digest
        records["n_rows"] = n_rows
        self.mix = mix
        self.runs = records, np.array(run_off, np.int64), np.array(run_of_user, np.int64)
        self.examples = tuple(g[n] for n in ("user_of", "request_ts", "bound"))

    def marked(self) -> tuple[Any, ...]:
        """Arguments of ``mark_mixed``."""
        return *self.runs, *self.examples, *(np.zeros(len(self.runs[0]) + 1, np.int64)[k < 3 :] for k in range(4))

    def decoded(self) -> tuple[Any, ...]:
        """``key_off`` and the keys of mixed pieces, as a window decodes them."""
        *_, key_off, mixed, _, _ = arguments = self.marked()
        n, total, hidden = kernel("mark_mixed")(*arguments)
        rows = [np.arange(self.off[p], self.off[p + 1]) for p in mixed[:n]]
        index = np.concatenate([np.empty(0, np.int64), *rows])
        assert len(index) == total
        ts, arrival, hides = (k[index] for k in self.keys)
        return key_off, ts, arrival, hides if hidden else hides[:0]

    def summed(self) -> tuple[Any, ...]:
        """Arguments of ``summarize``."""
        n = len(self.examples[0])
        out = np.zeros(n, np.int64), np.zeros(n, np.uint64), np.zeros(n, np.int64), np.zeros(n, np.int64)
        return *self.runs, *self.decoded(), *self.examples, *out, np.zeros(n, np.bool_)

    def ranged(self, g: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments of ``read_ranges``."""
        records, run_off, run_of_user = self.runs
        sizes = *(len(run_off) - 1,) * 2, *(len(records),) * 3, len(records) + 1, len(run_of_user)
        out = (np.zeros(n, np.int64) for n in sizes)
        return *self.runs, *self.decoded(), *self.examples, g["oldest"], g["max_len"], *out


@FAST
@given(g=grouped(), seed=st.integers(0, 2**32))
def test_pieces_marked_as_mixed_are_those_that_examples_cut(g: dict[str, Any], seed: int) -> None:
    cut = Cut(g, np.random.default_rng(seed))
    same("mark_mixed", *cut.marked())
    *_, key_off, mixed, latest, out_pos = arguments = cut.marked()
    n, _, _ = kernel("mark_mixed")(*arguments)
    # A piece is not marked only where each example sees all of it, or nothing.
    for p in np.flatnonzero(key_off < 0).tolist():
        inside = set(cut.rows[cut.off[p] : cut.off[p + 1]].tolist())
        for x in range(len(g["user_of"])):
            assert inside & set(visible_rows(g, x)) in (set(), inside)
    offsets = np.concatenate([[0], np.cumsum(cut.runs[0]["n_rows"][mixed[:n]])]).astype(np.int64)
    np.testing.assert_array_equal(out_pos[: n + 1], offsets)
    ts = cut.decoded()[1]
    same("rows_before", offsets, ts, latest[:n], np.zeros(n, np.int64))


@FAST
@given(g=grouped(), seed=st.integers(0, 2**32))
def test_summaries_are_sums_over_visible_events(g: dict[str, Any], seed: int) -> None:
    cut = Cut(g, np.random.default_rng(seed))
    same("summarize", *cut.summed())
    *_, count, total, start, end, whole = arguments = cut.summed()
    kernel("summarize")(*arguments)
    mix = kernel("identity_mix")(g["ts"], g["arrival"])
    for x in range(len(count)):
        rows = visible_rows(g, x)
        assert count[x] == len(rows)
        assert total[x] == mix[rows].sum(dtype=np.uint64)
        assert (start[x], end[x]) == ((g["ts"][rows[0]], g["ts"][rows[-1]]) if rows else (0, 0))
    np.testing.assert_array_equal(whole, sees_all(g))
    versions = np.zeros(len(count), VERSION_DTYPE)
    versions["seq_len"], versions["checksum"], versions["start_ts"], versions["end_ts"] = count, total, start, end
    watermark = np.full(len(g["off"]) - 1, 5, np.int64)
    given_ = g["user_of"], watermark, count, total, start, end
    assert kernel("compare_versions")(versions, *given_) == (-1, -1)
    for name in ("seq_len", "checksum", "start_ts", "end_ts", "last_arrival") if len(count) else ():
        x = seed % len(count)
        other = versions.copy()
        other[name][x] += 6
        same("compare_versions", other, *given_)
        assert x in kernel("compare_versions")(other, *given_)


@FAST
@given(g=grouped(), seed=st.integers(0, 2**32))
def test_read_ranges_hold_the_newest_of_each_length(g: dict[str, Any], seed: int) -> None:
    cut = Cut(g, np.random.default_rng(seed))
    same("read_ranges", *cut.ranged(g))
    *_, first, last, piece, start, stop, out_pos, user_rows = arguments = cut.ranged(g)
    n, several = kernel("read_ranges")(*arguments)
    _, _, run_of_user = cut.runs
    assert several == (np.diff(run_of_user) > 1).any()
    read = [cut.off[p] + np.arange(a, b) for p, a, b in zip(piece[:n], start[:n], stop[:n], strict=True)]
    everything = cut.rows[np.concatenate([np.empty(0, np.int64), *read])]
    for x in range(len(g["user_of"])):
        u = g["user_of"][x]
        assert set(newest_rows(g, x)) <= set(everything[user_rows[u] : user_rows[u + 1]].tolist())
        for r in range(run_of_user[u], run_of_user[u + 1]):
            # As wide as a user's examples need, no wider than its run.
            assert first[r] >= last[r] or last[r] <= cut.run_row[r + 1] - cut.run_row[r]
    assert np.diff(out_pos[: n + 1]).tolist() == (stop[:n] - start[:n]).tolist()
    assert user_rows[-1] == sum(np.maximum(last - first, 0))


def test_digests_of_long_pieces_are_summed_in_blocks_once() -> None:
    rng = np.random.default_rng(3)
    n = 300
    ts = np.sort(rng.integers(0, 900, n))
    user_of = np.zeros(40, np.int64)
    g = {"off": np.array([0, n]), "ts": ts, "arrival": np.arange(1, n + 1), "hidden": np.full(n, NEVER)}
    g |= {"user_of": user_of, "request_ts": rng.integers(0, 1000, 40), "bound": np.full(40, n)}
    cut = Cut(g, rng)
    *_, count, total, _, _, _ = arguments = cut.summed()
    kernel("summarize")(*arguments)
    mix = kernel("identity_mix")(g["ts"], g["arrival"])
    before = np.searchsorted(ts, g["request_ts"])
    assert count.tolist() == before.tolist()
    assert total.tolist() == [int(mix[:k].sum(dtype=np.uint64)) for k in before]


@FAST
@given(keys=st.lists(st.integers(-3, 9) | st.integers(-(2**63), 2**63 - 1), max_size=9), in_order=st.booleans())
def test_distinct_keys_and_their_buckets(keys: list[int], in_order: bool) -> None:
    users = np.array(sorted(keys) if in_order else keys, np.int64)
    found, row_of = np.zeros(len(users), np.int64), np.zeros(len(users), np.int64)
    n = kernel("distinct_keys")(users, found, row_of)
    want, rows = distinct(users)
    assert (found[:n].tolist(), row_of.tolist()) == (want.tolist(), rows.tolist())
    last = np.cumsum([2, 0, 1, 3, 1])
    first = last - [2, 0, 1, 3, 1]
    bucket = np.zeros(n, np.int64)
    same("buckets_of_keys", found[:n], first, last, bucket)
    n_pairs = kernel("buckets_of_keys")(found[:n], first, last, bucket)
    np.testing.assert_array_equal(bucket, bucket_of(found[:n], 5))
    pairs = np.zeros(n_pairs, np.int64), np.zeros(n_pairs, np.int64)
    same("pairs_of_users", bucket, first, last, *pairs, np.zeros(7, np.bool_))


@FAST
@given(data=st.data())
def test_group_pieces(data: st.DataObject) -> None:
    pair_user = np.array(sorted(data.draw(st.lists(st.integers(0, 3), max_size=6))), np.int64)
    first = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(pair_user), max_size=len(pair_user))), np.int64)
    last = first + np.random.default_rng(len(first)).integers(0, 3, len(first))
    records = np.zeros(int((last - first).sum()), PIECE_DTYPE)
    records["n_rows"] = data.draw(st.sampled_from([1, 7]))
    records["max_arrival"] = np.arange(len(records)) - 1
    records["stripe"] = np.concatenate([np.arange(k) for k in (last - first).tolist()] or [[]])
    n = len(pair_user)
    out = [np.zeros(k, np.int64) for k in (5, n + 1, 5, len(records), 4)]
    same("group_pieces", records, pair_user, np.arange(n) + 10, first, last, 7, *out)
    if len(records):
        wrong = records.copy()
        if last[first < last][-1] - first[first < last][-1] == 2 and data.draw(st.booleans()):
            wrong["stripe"][-1] = 0
        else:
            wrong["n_rows"][-1] = data.draw(st.sampled_from([0, 8]))
        for name in BACKENDS:
            with use(name):
                _, bad = kernel("group_pieces")(wrong, pair_user, np.arange(n) + 10, first, last, 7, *out)
            assert bad == int(np.flatnonzero(last > first)[-1])
