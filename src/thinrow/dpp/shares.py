"""Fair shares: a number of workers divided among those who want some.

Worked example, 8 workers: two ranks of a training session of weight 3, which want all they can get, and an evaluation
of weight 1 that wants 1. Each first gets one; then, one at a time, who has least for its weight: the ranks, 4 and 3.

A session's weight is divided among its members, so that one with more ranks gets no more. What somebody does not want
is there for the others. Members above the number of workers get one each all the same: who has none would stand still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple


class Wish(NamedTuple):
    """What a member asks for: its session, the session's weight, and how many workers it can use."""

    session: str
    weight: float
    most: int


def shares(workers: int, wishes: Mapping[str, Wish]) -> dict[str, int]:
    """Workers of each member, by name; equal wishes of a session differ by one at most, the first name has more."""
    members = Counter(w.session for w in wishes.values())
    given = dict.fromkeys(sorted(wishes), 1)
    left = workers - len(given)
    while left > 0:
        short = [name for name, n in given.items() if n < wishes[name].most]
        if not short:
            break
        chosen = min(short, key=lambda n: (given[n] * members[wishes[n].session] / wishes[n].weight, n))
        given[chosen] += 1
        left -= 1
    return given
