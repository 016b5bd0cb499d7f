"""The history kernels as plain loops over events: the oracle of ``thinrow.kernels.numba.history``.

Nothing here is clever. Every function has the name and the signature of its compiled twin, which documents it.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.units import NEVER
from thinrow.core.wrap import GOLDEN64, MASK64, mix64

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

_MASK = MASK64
_GOLDEN = GOLDEN64
_NULL_WORD = 0xA5A5A5A5A5A5A5A5


def identity_mix(event_ts: Ints, arrival: Ints) -> Words:
    return np.array(
        [mix64((mix64((int(t) + _GOLDEN) & _MASK) + int(a)) & _MASK) for t, a in zip(event_ts, arrival, strict=True)],
        np.uint64,
    )


def content_digest(identity: Words, words: Words, null: Bools, column_id: int) -> np.uint64:
    total = 0
    salt = int(column_id) * _GOLDEN & _MASK
    for i in range(len(identity)):
        value = _NULL_WORD if len(null) and null[i] else int(words[i])
        total += mix64(int(identity[i]) ^ mix64((salt + value) & _MASK))
    return np.uint64(total & _MASK)


def fold_bytes(offsets: Ints, data: npt.NDArray[np.uint8]) -> Words:
    out = np.empty(len(offsets) - 1, np.uint64)
    for i in range(len(out)):
        value = data[offsets[i] : offsets[i + 1]].tobytes()
        h = len(value)
        for p in range(0, len(value), 8):
            h = mix64(h ^ int.from_bytes(value[p : p + 8], "little"))
        out[i] = h
    return out


def apply_hides(
    range_off: Ints,
    user_of: Ints,
    event_ts: Ints,
    arrival: Ints,
    hidden_from: Ints,
    hide_off: Ints,
    hide_ts: Ints,
    hide_arrival: Ints,
    hide_from: Ints,
) -> None:
    for r in range(len(range_off) - 1):
        events = slice(range_off[r], range_off[r + 1])
        for h in range(hide_off[user_of[r]], hide_off[user_of[r] + 1]):
            named = (event_ts[events] == hide_ts[h]) & (arrival[events] == hide_arrival[h])
            hidden_from[events][named] = np.minimum(hidden_from[events][named], hide_from[h])


def tighten_pieces(
    piece_off: Ints, first_ts: Ints, last_ts: Ints, min_hidden: Ints, hide_off: Ints, hide_ts: Ints, hide_from: Ints
) -> None:
    for u in range(len(piece_off) - 1):
        pieces = slice(piece_off[u], piece_off[u + 1])
        for h in range(hide_off[u], hide_off[u + 1]):
            touched = (first_ts[pieces] <= hide_ts[h]) & (hide_ts[h] <= last_ts[pieces])
            min_hidden[pieces][touched] = np.minimum(min_hidden[pieces][touched], hide_from[h])


def merge_runs(run_of_user: Ints, run_start: Ints, run_stop: Ints, event_ts: Ints, arrival: Ints) -> Ints:
    out: list[int] = []
    for u in range(len(run_of_user) - 1):
        rows: list[int] = []
        for r in range(run_of_user[u], run_of_user[u + 1]):
            rows += range(run_start[r], run_stop[r])
        out += sorted(rows, key=lambda i: (int(event_ts[i]), int(arrival[i])))
    return np.array(out, np.int64)


def piece_summaries(
    row_off: Ints, event_ts: Ints, arrival: Ints, hidden_from: Ints, mix: Words
) -> tuple[Ints, Ints, Words]:
    spans = [slice(a, b) for a, b in itertools.pairwise(row_off)]
    return (
        np.array([arrival[s].max(initial=-1) for s in spans], np.int64),
        np.array([hidden_from[s].min(initial=NEVER) for s in spans], np.int64),
        np.array([mix[s].sum(dtype=np.uint64) for s in spans], np.uint64),
    )


def remap_codes(
    out: npt.NDArray[Any], run_pos: Ints, run_rows: Ints, lut: npt.NDArray[np.int32], lut_off: Ints, lut_n: Ints
) -> int:
    for r in range(len(run_pos)):
        codes = out[run_pos[r] : run_pos[r] + run_rows[r]]
        if ((codes < 0) | (codes >= lut_n[r])).any():
            return r
        codes[:] = lut[lut_off[r] + codes]
    return -1


def cut_stripes(lengths: Ints, stripe_rows: int) -> tuple[Ints, Ints, Ints, Ints]:
    found = []
    stripe, used = -1, stripe_rows
    for u, length in enumerate(lengths.tolist()):
        if length and used + length > stripe_rows:
            stripe, used = stripe + 1, 0
        while length > 0:
            if used == stripe_rows:
                stripe, used = stripe + 1, 0
            took = min(length, stripe_rows - used)
            found.append((u, took, stripe, used))
            used, length = used + took, length - took
    user, rows, stripes, first = np.array(found, np.int64).reshape(-1, 4).T
    return user.copy(), rows.copy(), stripes.copy(), first.copy()


def distinct_words(words: Words, limit: int, known: Words) -> tuple[Words, npt.NDArray[np.uint32]]:
    places = {word: place for place, word in enumerate(known.tolist())}
    codes = [places.setdefault(word, len(places)) for word in words.tolist()]
    if len(places) > limit:
        return np.empty(0, np.uint64), np.empty(0, np.uint32)
    return np.array(list(places), np.uint64), np.array(codes, np.uint32)


def code_words(words: Words, known: Words) -> npt.NDArray[np.uint32]:
    place = {word: i for i, word in enumerate(known.tolist())}
    return np.array([place.get(word, 0xFFFFFFFF) for word in words.tolist()], np.uint32)
