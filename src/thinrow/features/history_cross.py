"""Cross features between a user's history and an example's candidates, from the *visible* events only.

Worked example: the user bought product 7 on days 0 and 3 and product 9 on day 1; a request on day 5 ranks [7, 8]::

    seen_before  [1, 0]      count  [2, 0]      days_since  [2, -1]

The same function serves the request and rebuilds it, so what was logged can be compared with what is rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from thinrow.core.errors import InputError
from thinrow.jagged import Column, Jagged, SharedHistories
from thinrow.kernels import kernel

_ALL_VALID = np.empty(0, np.bool_)


@dataclass(frozen=True, slots=True)
class HistoryCross:
    """One value a candidate, in the rows of the candidates.

    Attributes:
        seen_before: int8, 1 where a visible event has the candidate's value, else 0.
        count: int32, the number of such events.
        days_since: int32, whole days from the newest such event to the request, -1 where there is none.
        group_count: int32, the number of visible events with the candidate's group; None where none was asked for.
    """

    seen_before: Jagged
    count: Jagged
    days_since: Jagged
    group_count: Jagged | None


def history_candidate_cross(
    histories: SharedHistories,
    column: str,
    candidates: Jagged,
    request_ts: npt.NDArray[np.int64],
    *,
    group: tuple[str, Jagged] | None = None,
) -> HistoryCross:
    """Relate each candidate to the visible history of its example.

    Args:
        histories: X examples.
        column: name of the history column that candidates are looked up in (integers or strings).
        candidates: X rows of values of the same kind. A null equals nothing.
        request_ts: (X,) ms.
        group: a second history column and the candidates' values of it, in rows of the same lengths as
            ``candidates``: their category, say.

    Raises:
        InputError: rows do not match, or a column and its candidates are not of one kind.
    """
    counts, days = _look_up(histories, column, candidates, request_ts, with_days=True)
    group_count = None
    if group is not None:
        name, values = group
        if not np.array_equal(values.offsets, candidates.offsets):
            raise InputError(
                f"candidates of {column!r} and of {name!r} have rows of different lengths; they must be alike"
            )
        group_count = Jagged(Column(_look_up(histories, name, values, request_ts, with_days=False)[0]), values.offsets)
    seen = (counts > 0).astype(np.int8)
    offsets = candidates.offsets
    return HistoryCross(
        Jagged(Column(seen), offsets), Jagged(Column(counts), offsets), Jagged(Column(days), offsets), group_count
    )


def _look_up(
    histories: SharedHistories, name: str, candidates: Jagged, request_ts: npt.NDArray[np.int64], *, with_days: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    if not len(histories) == len(candidates) == len(request_ts):
        raise InputError(
            f"{len(histories)} histories, {len(candidates)} rows of candidates, {len(request_ts)} request times; "
            "they must be as many"
        )
    if name not in histories.events.columns:
        raise InputError(f"no column {name!r} in the histories; they have {', '.join(histories.events.columns)}")
    column, n = histories.events.columns[name], len(candidates.values)
    if column.offsets is not None or column.size:
        raise InputError(
            f"history column {name!r} holds {column.shape_name}; candidates are looked up in single values"
        )
    keys, wanted = _one_kind(name, column, candidates.column)
    count, days = np.zeros(n, np.int32), np.empty(n if with_days else 0, np.int32)
    kernel("history_candidate_cross")(
        histories.start,
        histories.stop,
        histories.bound,
        histories.exact,
        histories.events.arrival,
        histories.events.hidden_from,
        histories.events.event_ts,
        keys,
        _ALL_VALID if column.valid is None else column.valid,
        request_ts,
        candidates.offsets,
        wanted,
        _ALL_VALID if candidates.column.valid is None else candidates.column.valid,
        count,
        days,
    )
    return count, days


def _one_kind(name: str, held: Column, wanted: Column) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Both columns as int64 that are equal where the values are."""
    held, wanted = held.decoded(), wanted.decoded()
    if held.dictionary is not None and wanted.dictionary is not None and held.dictionary.type == wanted.dictionary.type:
        # Candidates' entries in the numbers of the history's dictionary; -1 is in no history.
        position = pc.fill_null(pc.index_in(wanted.dictionary, value_set=held.dictionary), -1)
        lookup = np.asarray(position, np.int64)
        codes = lookup[wanted.values] if len(lookup) else np.full(len(wanted), -1, np.int64)
        return held.values.astype(np.int64), codes
    for what, c in (("history", held), ("candidates", wanted)):
        if c.dictionary is not None or c.values.dtype.kind not in "iu":
            kind = c.values.dtype if c.dictionary is None else c.dictionary.type
            other = "candidates" if what == "history" else "history"
            raise InputError(
                f"column {name!r} of the {what} is of {kind}; it and the {other} must both be integers or strings"
            )
    return np.ascontiguousarray(held.values, np.int64), np.ascontiguousarray(wanted.values, np.int64)
