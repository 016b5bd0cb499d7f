"""Verify the recent tier: every event and id read back, every counter held against the archive.

Worked example: the newest manifest is lost. The archive then ends at arrival 40 of user 7, but the tier has dropped
what was compacted, arrivals up to 50: ten events are nowhere, and user 7 is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from thinrow.core.errors import CorruptionError, ThinrowError
from thinrow.core.users import Users, plain
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.lookup import Ints, look_up
from thinrow.history.archive.verify import Damage, as_damage
from thinrow.history.recent.tier import RecentTier

_USERS_AT_ONCE = 512


def verify_recent(
    pin: Callable[[], Generation], recent: RecentTier, file: str, progress: Callable[[int, int], None] | None = None
) -> list[Damage]:
    """All damage of the tier. ``file`` is what the tier is called; safe beside appends and compactions."""
    users = recent.known_users()
    found: list[Damage] = []
    if not len(users) and pin().n_rows:
        what = "it knows no user although the archive holds events: it was lost, and with it what was not compacted"
        found.append(Damage(file, None, None, what))
    for a in range(0, len(users), _USERS_AT_ONCE):
        found += _verify_users(pin, recent, file, users[a : a + _USERS_AT_ONCE])
        if progress is not None:
            progress(min(a + _USERS_AT_ONCE, len(users)), len(users))
    try:
        recent.check_ids()
    except CorruptionError as e:
        found.append(as_damage(e, file))
    return found


def _verify_users(pin: Callable[[], Generation], recent: RecentTier, file: str, users: Users) -> Iterator[Damage]:
    # Pinned before: a counter may only be ahead of it. Pinned after: it may only be ahead of what was trimmed.
    before = _watermark(pin, users)
    try:
        read = recent.read_since(users, np.zeros(len(users), np.int64))
    except CorruptionError as e:
        if len(users) == 1:
            yield Damage(e.file, plain(users[0]), e.column, e.what)
            return
        half = len(users) // 2
        yield from _verify_users(pin, recent, file, users[:half])
        yield from _verify_users(pin, recent, file, users[half:])
        return
    if before is not None:
        for u in np.flatnonzero(read.top < before).tolist():
            what = f"the next event would be number {read.top[u] + 1}, but the archive holds {before[u]} already"
            yield Damage(file, plain(users[u]), None, what)
    after = _watermark(pin, users)
    if after is not None:
        for u in np.flatnonzero(read.trimmed_through > after).tolist():
            what = (
                f"events up to number {read.trimmed_through[u]} were archived, but the newest generation holds them "
                f"up to {after[u]} only: a newer manifest is missing"
            )
            yield Damage(file, plain(users[u]), None, what)


def _watermark(pin: Callable[[], Generation], users: Users) -> Ints | None:
    """None where the archive is damaged, which verifying the archive reports."""
    try:
        return look_up(pin(), users).watermark
    except ThinrowError:
        return None
