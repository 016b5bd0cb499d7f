"""Fat rows held against each other, in compiled loops; definitions are those of ``kernels.reference.align``.

Worked example. A user's rows saw ``a b`` and then ``a x b c`` where x came late: x and c are new, numbers 3 and 4, and
the order of the history is ``a x b c``. A third row ``x b c`` that is full at three events says nothing of a; one that
is not full says that a is gone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.units import NEVER
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.scalar import GOLDEN, lower_bound, mix

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

_VISIBLE, _LATE, _SUPERSEDED, _CORRECTS, _FIXED = np.int8(1), np.int8(2), np.int8(4), np.int8(8), np.int8(16)
#: Events of one time beyond which leftovers are paired in order of their keys.
_FEW = 32


@njit
def fold_words(offsets: Ints, words: Words) -> Words:
    out = np.empty(len(offsets) - 1, np.uint64)
    for i in range(len(out)):
        h = np.uint64(offsets[i + 1] - offsets[i])
        for k in range(offsets[i], offsets[i + 1]):
            h = mix((h ^ words[k]) + GOLDEN)
        out[i] = h
    return out


@njit
def _grown(values: Ints, n: int) -> Ints:
    if n <= len(values):
        return values
    out = np.empty(max(n, 2 * len(values)), np.int64)
    out[: len(values)] = values
    return out


@njit
def _embed(key: Words, source: Ints, live: Ints, i: int, e: int, j: int, f: int, from_end: bool, match: Ints) -> int:
    """Match a begin of the events [j, f) of a row with the live ones [i, e) of their time; returns its end."""
    p, q = i, j
    while q < f:
        k = p
        while k < e and key[source[live[k]]] != key[q]:
            k += 1
        if k == e:
            break
        match[q] = live[k]
        p = k + 1
        q += 1
    if from_end:
        k = e - 1
        for z in range(q - 1, j - 1, -1):
            while key[source[live[k]]] != key[z]:
                k -= 1
            match[z] = live[k]
            k -= 1
    return q


@njit
def _is_among(word: Any, key: Words, j: int, f: int) -> bool:
    for z in range(j, f):  # noqa: SIM110
        if key[z] == word:
            return True
    return False


@njit
def _first_from(ts: Ints, source: Ints, live: Ints, n_live: int, floor: int) -> int:
    lo, hi = 0, n_live
    while lo < hi:
        mid = (lo + hi) // 2
        if ts[source[live[mid]]] < floor:
            lo = mid + 1
        else:
            hi = mid
    return lo


@njit
def align_rows(
    user: Ints, offsets: Ints, ts: Ints, key: Words, floor: Ints, cut: Bools
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
    match, bound = np.full(len(ts), -1, np.int64), np.zeros(len(user), np.int64)
    edges = np.zeros((len(user), 2), np.int64)
    source, born = np.empty(64, np.int64), np.empty(64, np.int64)
    died, arrival = np.empty(64, np.int64), np.empty(64, np.int64)
    live, spare = np.empty(64, np.int64), np.empty(64, np.int64)
    n, n_live, top = 0, 0, 0
    for r in range(len(user)):
        if r == 0 or user[r] != user[r - 1]:
            n_live, top = 0, 0
        j, b = offsets[r], offsets[r + 1]
        lo = _first_from(ts, source, live, n_live, floor[r])
        spare = _grown(spare, n_live - lo + b - j)
        source, born = _grown(source, n + b - j), _grown(born, n + b - j)
        died, arrival = _grown(died, n + b - j), _grown(arrival, n + b - j)
        i, m, number, hid = lo, 0, top, False
        while i < n_live or j < b:
            held_is_first = j >= b or (i < n_live and ts[source[live[i]]] <= ts[j])
            t = ts[source[live[i]]] if held_is_first else ts[j]
            e, f = i, j
            while e < n_live and ts[source[live[e]]] == t:
                e += 1
            while f < b and ts[f] == t:
                f += 1
            is_cut = cut[r] and t == floor[r]
            q = _embed(key, source, live, i, e, j, f, is_cut, match)
            z = j
            for k in range(i, e):
                one = live[k]
                if z < q and match[z] == one:
                    z += 1
                elif not (is_cut and z == j and not _is_among(key[source[one]], key, q, f)):
                    died[one] = r
                    hid = True
                    continue
                spare[m] = one
                m += 1
            for s in range(q, f):
                number += 1
                source[n], born[n], died[n], arrival[n] = s, r, -1, number
                match[s] = n
                spare[m] = n
                n += 1
                m += 1
            i, j = e, f
        live = _grown(live, lo + m)
        live[lo : lo + m] = spare[:m]
        n_live = lo + m
        if number > top:
            top = number
        elif hid:
            top += 1
        bound[r] = top
        if n_live:
            edges[r, 0], edges[r, 1] = ts[source[live[0]]], ts[source[live[n_live - 1]]]
    return source[:n].copy(), born[:n].copy(), died[:n].copy(), arrival[:n].copy(), bound, match, edges


@njit
def _pair_some(a_key: Words, i: int, e: int, b_key: Words, j: int, f: int, a_match: Ints, b_match: Ints) -> None:
    """Pair the unmatched events [i, e) of a and [j, f) of b, all of one time."""
    if e - i <= _FEW or f - j <= _FEW:
        for x in range(i, e):
            for y in range(j, f):
                if b_match[y] < 0 and a_key[x] == b_key[y]:
                    a_match[x], b_match[y] = y, x
                    break
        return
    a_order = np.argsort(a_key[i:e], kind="mergesort")
    b_order = np.argsort(b_key[j:f], kind="mergesort")
    x, y = 0, 0
    while x < e - i and y < f - j:
        u, v = i + a_order[x], j + b_order[y]
        if a_key[u] == b_key[v]:
            a_match[u], b_match[v] = v, u
            x += 1
            y += 1
        elif a_key[u] < b_key[v]:
            x += 1
        else:
            y += 1


@njit
def pair_rows(a_off: Ints, a_ts: Ints, a_key: Words, b_off: Ints, b_ts: Ints, b_key: Words) -> tuple[Ints, Ints, Bools]:
    a_match, b_match = np.full(len(a_ts), -1, np.int64), np.full(len(b_ts), -1, np.int64)
    moved = np.zeros(len(a_ts), np.bool_)
    for r in range(len(a_off) - 1):
        i, a_end, j, b_end = a_off[r], a_off[r + 1], b_off[r], b_off[r + 1]
        while i < a_end and j < b_end:
            if a_ts[i] < b_ts[j]:
                i += 1
                continue
            if a_ts[i] > b_ts[j]:
                j += 1
                continue
            t, e, f = a_ts[i], i, j
            while e < a_end and a_ts[e] == t:
                e += 1
            while f < b_end and b_ts[f] == t:
                f += 1
            first = i
            while i < e and j < f and a_key[i] == b_key[j]:
                a_match[i], b_match[j] = j, i
                i += 1
                j += 1
            if i < e and j < f:
                _pair_some(a_key, i, e, b_key, j, f, a_match, b_match)
                last = -1
                for x in range(first, e):
                    if a_match[x] >= 0:
                        moved[x] = a_match[x] < last
                        last = max(last, a_match[x])
            i, j = e, f
    return a_match, b_match, moved


@njit
def event_states(
    offsets: Ints,
    ts: Ints,
    key: Words,
    arrival: Ints,
    hidden_from: Ints,
    corrects: Bools,
    user: Ints,
    want_ts: Ints,
    want_key: Words,
    bound: Ints,
) -> npt.NDArray[np.int8]:
    out = np.zeros(len(user), np.int8)
    for w in range(len(user)):
        end = offsets[user[w] + 1]
        i = lower_bound(ts, offsets[user[w]], end, want_ts[w])
        while i < end and ts[i] == want_ts[w]:
            if key[i] == want_key[w]:
                if arrival[i] > bound[w]:
                    out[w] |= _LATE
                elif hidden_from[i] <= bound[w]:
                    out[w] |= _SUPERSEDED
                else:
                    out[w] |= _VISIBLE
                    if hidden_from[i] < NEVER:
                        out[w] |= _FIXED
                if corrects[i]:
                    out[w] |= _CORRECTS
            i += 1
    return out


@njit
def find_in_rows(offsets: Ints, ts: Ints, key: Words, row: Ints, want_ts: Ints, want_key: Words) -> Bools:
    out = np.zeros(len(row), np.bool_)
    for w in range(len(row)):
        if row[w] < 0:
            continue
        end = offsets[row[w] + 1]
        i = lower_bound(ts, offsets[row[w]], end, want_ts[w])
        while i < end and ts[i] == want_ts[w]:
            if key[i] == want_key[w]:
                out[w] = True
                break
            i += 1
    return out
