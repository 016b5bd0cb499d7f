"""RowFilter: which stored examples a run reads, by request time and by a share of the users.

Worked example: days 3 and 4 (0 is the first), half of the users::

    rows = RowFilter(since_ms=3 * DAY_MS, until_ms=5 * DAY_MS, user_share=0.5, user_seed=1)
    request at 3 * DAY_MS       kept, if its user is in the half
    request at 5 * DAY_MS       not kept

A user is in a share when its hash ``thinrow_mix64_v1`` (seed ``user_seed``), over 2^64, is below it. So the users of a
share are among those of every larger one of the same seed, in every split, table and run.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.examples.layout import load_int64
from thinrow.features.hash import byte_runs
from thinrow.kernels import kernel


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Everything by default. Filters that keep the same by construction are equal: no share is a share of 1.

    Attributes:
        since_ms: least request time (inclusive), ms; None for no bound.
        until_ms: request time (exclusive), ms; None for no bound.
        user_share: share of the users, in (0, 1]; None for all.
        user_seed: which users are in the share, in [0, 2^63).
    """

    since_ms: int | None = None
    until_ms: int | None = None
    user_share: float | None = None
    user_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("since_ms", "until_ms"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, None if value is None else operator.index(value))
            except TypeError as e:
                raise InputError(f"{name}={value!r}; give whole milliseconds since 1970, as an int") from e
        if self.since_ms is not None and self.until_ms is not None and self.since_ms > self.until_ms:
            raise InputError(f"since_ms={self.since_ms} is after until_ms={self.until_ms}; exchange them")
        if self.user_share is not None and not 0 < self.user_share <= 1:
            raise InputError(f"user_share={self.user_share}; it must be above 0 and at most 1, or None for all users")
        if not 0 <= self.user_seed < 1 << 63:
            raise InputError(f"user_seed={self.user_seed}; it must be in [0, 2^63)")
        share = None if self.user_share is None or self.user_share == 1 else float(self.user_share)
        object.__setattr__(self, "user_share", share)
        object.__setattr__(self, "user_seed", 0 if share is None else int(self.user_seed))

    @property
    def columns(self) -> tuple[str, ...]:
        """Stored columns that ``keep`` reads; none where every row is kept."""
        timed = self.since_ms is not None or self.until_ms is not None
        return (("user_id",) if self.user_share is not None else ()) + (("request_ts",) if timed else ())

    def keep(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """(n,) whether each of n stored rows is kept; ``rows`` has ``columns`` at least."""
        kept = np.ones(rows.num_rows, np.bool_)
        if self.user_share is not None:
            for start, part in _with_starts(rows["user_id"]):
                kept[start : start + len(part)] = in_share(part, self.user_share, self.user_seed)
        if self.since_ms is not None:
            kept &= load_int64(rows["request_ts"]) >= self.since_ms
        if self.until_ms is not None:
            kept &= load_int64(rows["request_ts"]) < self.until_ms
        return kept


def in_share(users: pa.Array, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """(n,) whether each of n users (int64 or strings) is in a share of them, 0 < share <= 1, 0 <= seed < 2^63."""
    if pa.types.is_integer(users.type):
        hashed = kernel("hash_ints")(np.ascontiguousarray(users.to_numpy(), np.int64), seed)
    else:
        hashed = kernel("hash_bytes")(*byte_runs(users), seed)
    below = int(share * 2.0**64)
    return np.asarray(hashed.view(np.uint64) <= np.uint64(max(below, 1) - 1))


def _with_starts(column: pa.ChunkedArray) -> list[tuple[int, pa.Array]]:
    starts = np.cumsum([0, *(len(c) for c in column.chunks)])
    return list(zip(starts.tolist(), column.chunks, strict=False))
