"""Columns of one schema of a store as columns of another, matched by id.

Worked example: under schema 1 ``{"price": [1, 2]}`` (id 1, int32); under schema 2, where id 1 is ``cost``, int64, and
id 2 is ``shop``: ``{"cost": [1, 2], "shop": [null, null]}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from thinrow.jagged import Column
from thinrow.jagged.column import cast_column, null_column
from thinrow.schema import ColumnSpec, EventSchema


def recast(
    columns: Mapping[str, Column],
    written: EventSchema,
    wanted: Sequence[ColumnSpec],
    n: int,
    rows: npt.NDArray[Any] | None = None,
) -> dict[str, Column]:
    """``columns`` (n rows, named as in ``written``), of them ``rows`` where given, as the ``wanted`` ones; null where
    ``written`` lacks an id, or ``columns`` the name."""
    names = {c.id: c.name for c in written.columns}
    found = {}
    for spec in wanted:
        column = columns.get(names.get(spec.id, ""))
        if column is None:
            missing = n if rows is None else len(rows)
            found[spec.name] = null_column(spec.dtype, missing, ragged=spec.ragged, size=spec.size)
        else:
            found[spec.name] = cast_column(column if rows is None else column.take(rows), spec.dtype)
    return found
