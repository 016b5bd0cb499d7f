"""RequestBatch: what requests knew of their users' histories, as a snapshot gives it and an impression logs it.

Worked example. Request 0 of user 7 saw 3 archived events and one recent event; request 1 of user 9 saw 2 archived
events, one of which a recent correction (arrival 6) had hidden from everything after it::

    users         [7, 9]
    versions      [seq_len 3, snapshot_arrival 4], [seq_len 1, snapshot_arrival 6]
    inline        offsets [0, 1, 2]: the recent event of user 7; the correction of user 9
    hides         [(event_ts=1500, arrival=2, hidden_from=6)], hide_offsets [0, 0, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core import check
from thinrow.core.check import as_rows
from thinrow.core.errors import InputError
from thinrow.core.ragged import ranges_index
from thinrow.core.users import Users
from thinrow.history.recast import recast
from thinrow.jagged.column import concat_columns
from thinrow.jagged.events import Events
from thinrow.schema import EventSchema


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """X requests. A user may appear in several of them.

    Attributes:
        users: (X,) int64 or object of ``str``.
        request_ts: (X,) int64 ms; a request sees events with ``event_ts < request_ts`` (exclusive).
        versions: (X,) ``VERSION_DTYPE``, the archive part.
        inline: the visible recent events of each request in order of (event_ts, arrival); ``inline.users`` is
            ``users``, repeats included, and ``hidden_from`` is ``NEVER`` throughout.
        hides: (H,) ``HIDE_DTYPE``, events hidden by recent corrections that the request could see.
        hide_offsets: (X + 1,) int64; the hides of request i are ``hides[hide_offsets[i]:hide_offsets[i + 1]]``.
        schema: whose column names ``inline`` has; None for that of the generation which the requests are rebuilt from.
    """

    users: Users
    request_ts: npt.NDArray[np.int64]
    versions: npt.NDArray[np.void]
    inline: Events
    hides: npt.NDArray[np.void]
    hide_offsets: npt.NDArray[np.int64]
    schema: EventSchema | None = None

    def __len__(self) -> int:
        return len(self.request_ts)

    def take(self, rows: npt.NDArray[Any]) -> RequestBatch:
        """The requests at ``rows`` (positions), in that order, copied."""
        rows = as_rows(rows, len(self))
        index, offsets = ranges_index(self.hide_offsets[:-1][rows], self.hide_offsets[1:][rows])
        return RequestBatch(
            self.users[rows],
            self.request_ts[rows],
            self.versions[rows],
            self.inline.take_users(rows),
            self.hides[index],
            offsets,
            self.schema,
        )

    def under(self, schema: EventSchema | None) -> RequestBatch:
        """The same requests with inline events as columns of ``schema``, matched by id (None changes nothing)."""
        if schema is None or self.schema is None or self.schema == schema:
            return self
        e = self.inline
        columns = recast(e.columns, self.schema, schema.columns, len(e))
        inline = Events(e.users, e.offsets, e.event_ts, e.arrival, e.hidden_from, columns)
        return replace(self, inline=inline, schema=schema)

    @staticmethod
    def concat(parts: Sequence[RequestBatch]) -> RequestBatch:
        """The requests of ``parts`` (one or more, of one store) one after another, under their newest schema."""
        _PARTS(parts, "parts")
        if len(parts) == 1:
            return parts[0]
        if not parts:
            raise InputError("parts is empty; give one batch of requests or more")
        newest = max((p.schema for p in parts if p.schema is not None), key=lambda s: s.schema_id, default=None)
        parts = [p.under(newest) for p in parts]
        inline = [p.inline for p in parts]
        users = np.concatenate([p.users for p in parts])
        return RequestBatch(
            users,
            np.concatenate([p.request_ts for p in parts]),
            np.concatenate([p.versions for p in parts]),
            Events(
                users,
                _joined_offsets([e.offsets for e in inline]),
                np.concatenate([e.event_ts for e in inline]),
                np.concatenate([e.arrival for e in inline]),
                np.concatenate([e.hidden_from for e in inline]),
                {n: concat_columns([e.columns[n] for e in inline]) for n in inline[0].columns},
            ),
            np.concatenate([p.hides for p in parts]),
            _joined_offsets([p.hide_offsets for p in parts]),
            parts[0].schema,
        )


def _joined_offsets(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    base = np.cumsum([0, *(p[-1] for p in parts[:-1])])
    return np.concatenate([[0], *(p[1:] + b for p, b in zip(parts, base, strict=True))]).astype(np.int64)


_PARTS = check.sequence(RequestBatch, "give batches of requests")
