"""The compiled history kernels against the plain loops, on arrays that a store would give them and worse ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.units import NEVER
from thinrow.kernels import kernel, use

FAST = settings(max_examples=60)


def same(name: str, *arguments: Any) -> None:
    """Both backends return the same, and leave the same in the arrays that they may change."""
    ours = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    theirs = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    got = kernel(name)(*ours)
    with use("reference"):
        want = kernel(name)(*theirs)
    for a, b in zip(_listed(got) + ours, _listed(want) + theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


@st.composite
def grouped(draw: st.DrawFn) -> dict[str, Any]:
    """Events of a few users in order of (event_ts, arrival), some late, some hidden, and examples over them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = np.array(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)), np.int64)
    off = np.concatenate([[0], np.cumsum(lengths)])
    n = int(off[-1])
    ts, arrival = np.empty(n, np.int64), np.empty(n, np.int64)
    for a, b in itertools.pairwise(off):
        t, number = rng.integers(0, 8, b - a), rng.permutation(b - a) + 1
        order = np.lexsort((number, t))
        ts[a:b], arrival[a:b] = t[order], number[order]
    hidden = np.where(rng.random(n) < 0.2, rng.integers(1, 12, n), NEVER)
    x = draw(st.integers(0, 6))
    return {
        "off": off,
        "ts": ts,
        "arrival": arrival,
        "hidden": hidden,
        "user_of": rng.integers(0, len(lengths), x),
        "request_ts": rng.integers(0, 10, x),
        "bound": rng.integers(0, 12, x),
        "oldest": rng.integers(-2, 8, x),
        "max_len": rng.choice(np.array([0, 1, 2, 5, NEVER]), x),
    }


@FAST
@given(g=grouped())
def test_digests_and_summaries_of_pieces(g: dict[str, Any]) -> None:
    same("identity_mix", g["ts"], g["arrival"])
    mix = kernel("identity_mix")(g["ts"], g["arrival"])
    same("piece_summaries", g["off"], g["ts"], g["arrival"], g["hidden"], mix)
    for null in (np.empty(0, np.bool_), g["hidden"] < NEVER):
        same("content_digest", mix, g["ts"].astype(np.uint64), null, 7)


@FAST
@given(values=st.lists(st.binary(max_size=20), max_size=8))
def test_fold_bytes(values: list[bytes]) -> None:
    offsets = np.concatenate([[0], np.cumsum([len(v) for v in values])]).astype(np.int64)
    same("fold_bytes", offsets, np.frombuffer(bytearray(b"".join(values)), np.uint8))


@FAST
@given(lengths=st.lists(st.integers(0, 20), max_size=12), stripe_rows=st.integers(1, 8))
def test_cut_stripes(lengths: list[int], stripe_rows: int) -> None:
    rows = np.array(lengths, np.int64)
    same("cut_stripes", rows, stripe_rows)
    user, n, stripe, first = kernel("cut_stripes")(rows, stripe_rows)
    assert np.bincount(user, n, len(lengths)).tolist() == lengths
    assert (first + n <= stripe_rows).all()
    for s in range(int(stripe.max(initial=-1)) + 1):
        mine = stripe == s
        assert first[mine].tolist() == [0, *np.cumsum(n[mine]).tolist()][:-1]


@FAST
@given(
    words=st.lists(st.sampled_from([0, 1, 2**64 - 1, 2**63, 77]), max_size=30),
    limit=st.integers(1, 6),
    known=st.integers(0, 7),
)
def test_distinct_words(words: list[int], limit: int, known: int) -> None:
    same("distinct_words", np.array(words, np.uint64), limit, np.array([5, 0, 77, 8, 9, 2**63, 4][:known], np.uint64))


@FAST
@given(g=grouped(), parts=st.integers(1, 4))
def test_merge_runs(g: dict[str, Any], parts: int) -> None:
    lengths = np.diff(g["off"])
    cuts = [np.linspace(a, b, parts + 1).astype(np.int64) for a, b in zip(g["off"][:-1], g["off"][1:], strict=True)]
    start = np.concatenate([c[:-1] for c in cuts])
    stop = np.concatenate([c[1:] for c in cuts])
    same("merge_runs", np.arange(0, len(lengths) * parts + 1, parts), start, stop, g["ts"], g["arrival"])


@FAST
@given(g=grouped(), seed=st.integers(0, 2**32))
def test_hides(g: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_users = len(g["off"]) - 1
    hide_off = np.concatenate([[0], np.cumsum(rng.integers(0, 3, n_users))]).astype(np.int64)
    n = int(hide_off[-1])
    arrival, hidden_from, ts = rng.integers(0, 11, n), rng.integers(1, 12, n), rng.integers(0, 9, n)
    events = g["ts"], g["arrival"], g["hidden"]
    same("apply_hides", g["off"], np.arange(n_users), *events, hide_off, ts, arrival, hidden_from)
    same("tighten_pieces", g["off"], g["ts"], g["ts"] + 2, g["hidden"], hide_off, ts, hidden_from)
