"""Hide-lists: which events a correction hides, by user, in memory and in a segment (format section 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinrow.core.ragged import offsets_of
from thinrow.core.users import Users, kind_of
from thinrow.jagged import HIDE_DTYPE, Events
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hides:
    """Hides by user: those of ``users[u]`` are ``records[offsets[u]:offsets[u + 1]]`` (HIDE_DTYPE), users sorted."""

    users: Users
    offsets: npt.NDArray[np.int64]
    records: npt.NDArray[np.void]


def group_hides(n: int, owner: Ints, rows: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.void], Ints]:
    """Hides by owner (0 to n - 1), exact repeats once."""
    keyed = np.empty(len(rows), np.dtype([("owner", "<i8"), *HIDE_DTYPE.descr]))
    keyed["owner"] = owner
    for name in HIDE_DTYPE.names or ():
        keyed[name] = rows[name]
    keyed = np.unique(keyed)
    out = np.empty(len(keyed), HIDE_DTYPE)
    for name in HIDE_DTYPE.names or ():
        out[name] = keyed[name]
    return out, np.searchsorted(keyed["owner"], np.arange(n + 1)).astype(np.int64)


def hide(events: Events, hides: npt.NDArray[np.void], hide_offsets: npt.NDArray[np.int64]) -> Events:
    """The same events (each user's in order of event_ts) under a hide-list by user."""
    if not len(hides):
        return events
    hidden = events.hidden_from.copy()
    kernel("apply_hides")(
        events.offsets,
        np.arange(len(events.users)),
        events.event_ts,
        events.arrival,
        hidden,
        hide_offsets,
        np.ascontiguousarray(hides["event_ts"]),
        np.ascontiguousarray(hides["arrival"]),
        np.ascontiguousarray(hides["hidden_from"]),
    )
    return Events(events.users, events.offsets, events.event_ts, events.arrival, hidden, events.columns)


def encode_hides(hides: Hides) -> bytes:
    """Section ``hides`` (format section 7): count, users (one a record), records."""
    records = np.ascontiguousarray(hides.records)
    owner = np.repeat(np.arange(len(hides.users)), np.diff(hides.offsets))
    head = np.array([len(records)], "<u8").tobytes()
    if kind_of(hides.users) == "int64":
        return head + hides.users[owner].astype("<i8").tobytes() + records.tobytes()
    encoded = [str(hides.users[u]).encode() for u in owner]
    offsets = offsets_of([len(e) for e in encoded]).astype("<u8")
    return head + offsets.tobytes() + b"".join(encoded) + records.tobytes()
