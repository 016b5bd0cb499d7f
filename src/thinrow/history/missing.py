"""Requests that saw events which were erased or have expired since: what is missing, and what is still proven.

Worked example. A request saw 5 archived events (``seq_len`` 5) and 1 inline. Of the five, 2 were erased::

    the archive gives 3, the tombstones up to ``snapshot_arrival`` stand for 2 or more -> erased, 2 missing
    the archive gives 3, there is no tombstone, or one for 1 event                     -> VersionMismatch: damage
    the archive gives 5 whose digest is the version's                                  -> complete, whatever was erased
    the archive gives 5 with another digest                                            -> VersionMismatch

Of what is left, the bytes of each event are proven by their CRCs, and that the request saw it by the visible rule. That
nothing else is missing is proven up to the number of removed events; where the row was redacted (its checksum is
that of the survivors), exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import Erased, Expired, InputError
from thinrow.core.ragged import offsets_of
from thinrow.core.users import Users, plain
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.tombstones import ERASED, EXPIRED, WHOLE, Tombstones
from thinrow.history.recent.tier import RecentRead
from thinrow.history.requests import RequestBatch

Ints = npt.NDArray[np.int64]

#: What to do with a request that saw events which are gone: raise ``Erased`` or ``Expired``; leave it out; take what is
#: left.
OnMissing: TypeAlias = Literal["fail", "skip", "shorten"]
_POLICIES = ("fail", "skip", "shorten")

#: Status of a request: it saw nothing that is gone; events that were erased; events that have expired.
COMPLETE, STATUS_ERASED, STATUS_EXPIRED = 0, 1, 2


def check_policy(on_missing: str) -> None:
    """Raises InputError where it is none."""
    if not isinstance(on_missing, str) or on_missing not in _POLICIES:
        raise InputError(f"on_missing={on_missing!r}; it must be one of {', '.join(map(repr, _POLICIES))}")


@dataclass(frozen=True, slots=True)
class Missing:
    """Attributes:
    batch: the requests without inline events that are gone.
    graves: tombstones by user.
    user_of: (X,) user of each request.
    erased, expired: (X,) inline events that are gone.
    """

    graves: Tombstones
    user_of: Ints
    batch: RequestBatch
    erased: Ints
    expired: Ints

    @classmethod
    def of(cls, generation: Generation, batch: RequestBatch, users: Users, user_of: Ints) -> Missing:
        """Of requests of distinct ``users``; request x is of user ``user_of[x]``."""
        graves = generation.tombstones(users)
        inline = batch.inline
        none = np.zeros(len(batch), np.int64)
        if not len(graves) or not len(inline):
            return cls(graves, user_of, batch, none, none)
        request = np.repeat(np.arange(len(batch)), inline.lengths)
        grave = graves.record_of(user_of[request], inline.arrival)
        gone = grave >= 0
        if not gone.any():
            return cls(graves, user_of, batch, none, none)
        kind = graves.records["kind"][grave[gone]]
        expired = np.bincount(request[gone][kind == EXPIRED], minlength=len(batch)).astype(np.int64)
        erased = np.bincount(request[gone], minlength=len(batch)).astype(np.int64) - expired
        left = inline.take_rows(np.flatnonzero(~gone), offsets_of(~gone)[inline.offsets])
        return cls(graves, user_of, replace(batch, inline=left), erased, expired)

    def allowed(self) -> Ints:
        """(X,) how many events each request can miss without being damaged.

        Up to ``snapshot_arrival``: a redacted row counts inline events that went as events of its archive part.
        """
        return self.graves.removed(self.user_of, np.ascontiguousarray(self.batch.versions["snapshot_arrival"]))

    def status(self, archived: Ints) -> npt.NDArray[np.int8]:
        """(X,) of each request, of whose archive part ``archived`` (X,) events are gone.

        Where erased and expired events may be among them and it cannot be told which, they count as erased.
        """
        if not len(self.graves):
            return np.zeros(len(self.batch), np.int8)
        bound = np.ascontiguousarray(self.batch.versions["snapshot_arrival"])
        by_erasure = self.graves.removed(self.user_of, bound, (ERASED, WHOLE)) > 0
        status = np.zeros(len(self.batch), np.int8)
        status[(archived > 0) | (self.expired > 0)] = STATUS_EXPIRED
        status[((archived > 0) & by_erasure) | (self.erased > 0)] = STATUS_ERASED
        return status

    def refuse(self, archived: Ints) -> None:
        """Raises Erased or Expired for the first request that saw what is gone."""
        if not len(self.graves):
            return
        status = self.status(archived)
        hit = np.flatnonzero(status)
        if not len(hit):
            return
        i = int(hit[0])
        n, user = int(archived[i] + self.erased[i] + self.expired[i]), plain(self.batch.users[i])
        kind, verb = (Erased, "were erased") if status[i] == STATUS_ERASED else (Expired, "have expired")
        raise kind(
            f"request {i} of user {user!r} at {self.batch.request_ts[i]} ms saw {n} events that {verb} since; "
            "pass on_missing='skip' to leave such requests out, or 'shorten' to take what is left",
            user=user,
            request=i,
        )


def without_gone(generation: Generation, users: Users, read: RecentRead) -> RecentRead:
    """What a recent tier holds of ``users``, less corrections of events that are gone: a hide tells their time."""
    if not len(read.hides):
        return read
    graves = generation.tombstones(users)
    owner = np.repeat(np.arange(len(users)), np.diff(read.hide_offsets))
    kept = graves.record_of(owner, np.ascontiguousarray(read.hides["arrival"])) < 0
    return replace(read, hides=read.hides[kept], hide_offsets=offsets_of(kept)[read.hide_offsets])
