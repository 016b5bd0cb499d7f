"""Aligning and pairing kernels against the plain loops, and a history against the rows that it was made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.ragged import offsets_of
from thinrow.core.units import NEVER
from thinrow.kernels import kernel, use

FAST = settings(max_examples=150)


def same(name: str, *arguments: Any) -> Any:
    got = kernel(name)(*arguments)
    with use("reference"):
        want = kernel(name)(*arguments)
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, want)), strict=True):
        np.testing.assert_array_equal(a, b)
    return got


@st.composite
def rows(draw: st.DrawFn, span: int = 6, most: int = 9) -> tuple[Any, Any, Any]:
    """Offsets, ascending times and keys of a few rows; few times and keys, so that there are ties and repeats."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = np.array(draw(st.lists(st.integers(0, most), min_size=1, max_size=8)), np.int64)
    off = offsets_of(lengths)
    ts = np.concatenate([np.sort(rng.integers(0, span, n)) for n in lengths]) if len(lengths) else np.empty(0, np.int64)
    return off, ts.astype(np.int64), rng.integers(0, 3, len(ts)).astype(np.uint64)


@FAST
@given(rows(), st.integers(1, 9), st.integers(0, 2**32))
def test_every_row_is_what_its_bound_shows(given_rows: Any, newest: int, seed: int) -> None:
    off, ts, key = given_rows
    keep = np.minimum(np.diff(off), newest)
    index = np.concatenate([np.arange(stop - n, stop) for stop, n in zip(off[1:], keep, strict=True)])
    off, ts, key = offsets_of(keep), ts[index], key[index]
    user = np.sort(np.random.default_rng(seed).integers(0, 3, len(keep)))
    cut = keep == newest
    floor = np.where(cut, ts[np.minimum(off[:-1], max(len(ts) - 1, 0))] if len(ts) else 0, -(1 << 62))
    source, born, died, arrival, bound, match, edges = same("align_rows", user, off, ts, key, floor, cut)
    assert (match >= 0).all()
    np.testing.assert_array_equal(ts[source[match]], ts)
    np.testing.assert_array_equal(key[source[match]], key)
    number = np.where(died < 0, 1 << 62, 0)
    for n in np.flatnonzero(died >= 0):
        r = died[n]
        number[n] = (bound[r - 1] if r and user[r - 1] == user[r] else 0) + 1
    for r in range(len(keep)):
        mine = np.flatnonzero((user[born] == user[r]) & (arrival <= bound[r]) & (number > bound[r]))
        mine = mine[np.lexsort((arrival[mine], ts[source[mine]]))]
        if len(mine):
            assert edges[r].tolist() == [ts[source[mine[0]]], ts[source[mine[-1]]]]
        shown = mine[-newest:] if cut[r] else mine
        np.testing.assert_array_equal(shown, match[off[r] : off[r + 1]])


@FAST
@given(rows(), st.integers(0, 2**32))
def test_pairs(a: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    off, ts, key = a
    keep = rng.random(len(ts)) < 0.8
    b_off = offsets_of(keep)[off]
    b_key = np.where(rng.random(keep.sum()) < 0.2, 1, key[keep]).astype(np.uint64)
    a_match, b_match, _ = same("pair_rows", off, ts, key, b_off, ts[keep], b_key)
    paired = np.flatnonzero(a_match >= 0)
    np.testing.assert_array_equal(b_match[a_match[paired]], paired)


def test_pairs_of_many_events_at_one_time() -> None:
    rng = np.random.default_rng(1)
    key = rng.integers(0, 40, 300).astype(np.uint64)
    off, ts = np.array([0, 300]), np.zeros(300, np.int64)
    a_match, b_match, moved = same("pair_rows", off, ts, key, off, ts, rng.permutation(key))
    assert (a_match >= 0).all()
    assert (b_match >= 0).all()
    assert moved.any()


@FAST
@given(rows(), st.integers(0, 2**32))
def test_look_ups(history: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    off, ts, key = history
    n, w = len(ts), 12
    arrival, hidden = rng.integers(1, 9, n), np.where(rng.random(n) < 0.5, NEVER, rng.integers(1, 12, n))
    user, want, word = rng.integers(0, len(off) - 1, w), rng.integers(0, 7, w), rng.integers(0, 3, w).astype(np.uint64)
    corrects = rng.random(n) < 0.3
    same("event_states", off, ts, key, arrival, hidden, corrects, user, want, word, rng.integers(0, 9, w))
    same("find_in_rows", off, ts, key, np.where(rng.random(w) < 0.2, -1, user), want, word)
    same("fold_words", off, key)
