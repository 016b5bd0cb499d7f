"""Fat rows held against each other, in plain Python: the oracle of ``thinrow.kernels.numba.align``.

A fat row is a copy of what one request saw: times and keys (64 bits over an event's values), oldest first. Shapes: X
rows with (X + 1,) offsets over E events.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinrow.core.units import NEVER
from thinrow.core.wrap import GOLDEN64, MASK64, mix64

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

#: Flags of ``event_states``.
VISIBLE, LATE, SUPERSEDED, CORRECTS, FIXED = 1, 2, 4, 8, 16


def fold_words(offsets: Ints, words: Words) -> Words:
    """(n,) one word for the words of each row, in their order: ``h = mix64((h ^ word) + golden)``, from the length."""
    out = np.empty(len(offsets) - 1, np.uint64)
    for i in range(len(out)):
        h = int(offsets[i + 1] - offsets[i])
        for word in words[offsets[i] : offsets[i + 1]].tolist():
            h = mix64(((h ^ word) + GOLDEN64) & MASK64)
        out[i] = h
    return out


def align_rows(
    user: Ints, offsets: Ints, ts: Ints, key: Words, floor: Ints, cut: Bools
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
    """One history for the overlapping rows of each user, in which every row is what was visible at its bound.

    Args:
        user: (X,) codes; the rows of a user stand together, in order of request.
        floor: (X,) times before which a row says nothing of the history.
        cut: (X,) whether a row may also lack the first of the events at ``floor``.

    Returns:
        source (N,) event (of E) that each event of the histories was first seen as, by user and arrival; born, died
        (N,) rows that saw it first, and that did not see it any more (-1: none); arrival (N,) numbers, from 1 for each
        user; bound (X,) highest number that each row could see, also that of what went; match (E,) event of the
        histories (of N) that each event of a row is; edges (X, 2) first and last time of what each row's bound shows,
        in and out of the row (0, 0: nothing).
    """
    source: list[int] = []
    born: list[int] = []
    died: list[int] = []
    arrival: list[int] = []
    bound, match = np.zeros(len(user), np.int64), np.full(len(ts), -1, np.int64)
    edges = np.zeros((len(user), 2), np.int64)
    live: list[int] = []
    top = 0
    for r in range(len(user)):
        if r == 0 or user[r] != user[r - 1]:
            live, top = [], 0
        number, hid = top, False
        below = [n for n in live if ts[source[n]] < floor[r]]
        rest = [n for n in live if ts[source[n]] >= floor[r]]
        row = range(int(offsets[r]), int(offsets[r + 1]))
        kept: list[int] = []
        for t in sorted({int(ts[source[n]]) for n in rest} | {int(ts[j]) for j in row}):
            held, seen = [n for n in rest if ts[source[n]] == t], [j for j in row if ts[j] == t]
            is_cut = bool(cut[r]) and t == floor[r]
            place = _embed([int(key[source[n]]) for n in held], [int(key[j]) for j in seen], is_cut)
            fresh = {int(key[j]) for j in seen[len(place) :]}
            first = place[0] if place else len(held)
            for i, n in enumerate(held):
                if i in place or (is_cut and i < first and int(key[source[n]]) not in fresh):
                    kept.append(n)
                else:
                    died[n], hid = r, True
            for j, i in zip(seen, place, strict=False):
                match[j] = held[i]
            for j in seen[len(place) :]:
                number += 1
                match[j] = len(source)
                kept.append(len(source))
                source.append(j)
                born.append(r)
                died.append(-1)
                arrival.append(number)
        live = below + kept
        top = number if number > top else top + hid
        bound[r] = top
        if live:
            edges[r] = ts[source[live[0]]], ts[source[live[-1]]]
    out = [np.array(v, np.int64) for v in (source, born, died, arrival)]
    return out[0], out[1], out[2], out[3], bound, match, edges


def _embed(held: list[int], seen: list[int], from_end: bool) -> list[int]:
    """Places in ``held`` of the longest begin of ``seen`` that is there in order: the first such, or the last."""
    place: list[int] = []
    p = 0
    for word in seen:
        while p < len(held) and held[p] != word:
            p += 1
        if p == len(held):
            break
        place.append(p)
        p += 1
    if from_end:
        p = len(held) - 1
        for k in range(len(place) - 1, -1, -1):
            while held[p] != seen[k]:
                p -= 1
            place[k] = p
            p -= 1
    return place


def pair_rows(
    a_off: Ints, a_ts: Ints, a_key: Words, b_off: Ints, b_ts: Ints, b_key: Words
) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Which events two lists of each row share: equal time and key, as often as both have it, in their order.

    Returns:
        a_match (A,) place in b of each event of a, -1 where it has none; b_match (B,) likewise; moved (A,) whether a
        matched event of a stands after one at its time that comes later in b.
    """
    a_match, b_match = np.full(len(a_ts), -1, np.int64), np.full(len(b_ts), -1, np.int64)
    moved = np.zeros(len(a_ts), np.bool_)
    for r in range(len(a_off) - 1):
        where: dict[tuple[int, int], list[int]] = {}
        for j in range(int(b_off[r]), int(b_off[r + 1])):
            where.setdefault((int(b_ts[j]), int(b_key[j])), []).append(j)
        last: dict[int, int] = {}
        for i in range(int(a_off[r]), int(a_off[r + 1])):
            found = where.get((int(a_ts[i]), int(a_key[i])))
            if found:
                j = found.pop(0)
                a_match[i], b_match[j] = j, i
                moved[i] = j < last.get(int(a_ts[i]), -1)
                last[int(a_ts[i])] = max(j, last.get(int(a_ts[i]), -1))
    return a_match, b_match, moved


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
    """(W,) flags of wanted events in the histories of their users, as seen at a bound; 0 where there is no such event.

    VISIBLE: known and not hidden; LATE: arrived after the bound; SUPERSEDED: known and hidden by then; CORRECTS: it is
    the correction of another; FIXED: it is visible, and was corrected later.
    """
    out = np.zeros(len(user), np.int8)
    for w in range(len(user)):
        for i in range(int(offsets[user[w]]), int(offsets[user[w] + 1])):
            if ts[i] != want_ts[w] or key[i] != want_key[w]:
                continue
            late, hidden = arrival[i] > bound[w], hidden_from[i] <= bound[w]
            out[w] |= LATE if late else SUPERSEDED if hidden else VISIBLE
            out[w] |= CORRECTS * bool(corrects[i])
            out[w] |= FIXED * bool(not late and not hidden and hidden_from[i] < NEVER)
    return out


def find_in_rows(offsets: Ints, ts: Ints, key: Words, row: Ints, want_ts: Ints, want_key: Words) -> Bools:
    """(W,) whether ``row[w]`` (-1: no row) has an event of this time and key."""
    out = np.zeros(len(row), np.bool_)
    for w in range(len(row)):
        if row[w] >= 0:
            part = slice(int(offsets[row[w]]), int(offsets[row[w] + 1]))
            out[w] = bool(((ts[part] == want_ts[w]) & (key[part] == want_key[w])).any())
    return out
