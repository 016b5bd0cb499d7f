"""What of a source's events is what of an outcome.

Worked example: ``{"request": 7, "sku": 12, "at": "2026-01-02T00:00:09Z", "no": "c-1"}`` under
``OutcomeFields("request", "sku", "at", name=None, outcome="buy", outcome_id="no")`` is a ``buy`` of item 12, shown for
request 7, with value 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import InputError
from thinrow.examples.records import Outcomes, text_column
from thinrow.examples.streaming import HEARTBEAT
from thinrow.jagged import Column
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.sources.screen import Screened

_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class OutcomeFields:
    """Which fields of a source's events are what of an outcome.

    Attributes:
        request_id, item, ts: integers; ``ts`` may be a time as text too (ISO 8601).
        name: text, which outcome; None where ``outcome`` says it for all.
        outcome: the outcome that every event is; None where ``name`` says it.
        value: an integer within int32, 1 where it is null or not there; None for 1 throughout.
        outcome_id: names an outcome among those of its request, text, or an integer with ``integer_ids``; one that came
            before is left out. ``source_id`` for the place in the source. None where nothing does.
        integer_ids: see ``outcome_id``.
    """

    request_id: str = "request_id"
    item: str = "item"
    ts: str = "ts"
    name: str | None = "name"
    outcome: str | None = None
    value: str | None = "value"
    outcome_id: str | None = None
    integer_ids: bool = False

    def __post_init__(self) -> None:
        if (self.name is None) == (self.outcome is None):
            raise InputError(f"name={self.name!r}, outcome={self.outcome!r}; give the field of names, or one outcome")

    def schema(self) -> EventSchema:
        """The events of the source, as sources and ``screen`` take them: the request in the user's place."""
        columns = [ColumnSpec(1, self.item, Trait.ID, "int64", "main")]
        if self.name is not None:
            columns.append(ColumnSpec(2, self.name, Trait.CATEGORICAL, "string", "main"))
        if self.value is not None:
            columns.append(ColumnSpec(3, self.value, Trait.ID, "int64", "main", nullable=True))
        kind = "int64" if self.integer_ids else "string"
        return EventSchema(
            tuple(columns),
            user_column=self.request_id,
            time_column=self.ts,
            event_id_column=self.outcome_id,
            event_id_dtype=None if self.outcome_id is None else kind,  # type: ignore[arg-type]
        )


def outcomes_of(found: Screened, fields: OutcomeFields) -> tuple[Outcomes, dict[int, str]]:
    """The outcomes of what was screened, and row -> why a row is none."""
    events = found.events
    n = len(events)
    requests = np.asarray(events.users, np.int64)
    values = np.ones(n, np.int64)
    if fields.value is not None:
        column = events.columns[fields.value]
        values = np.where(column.valid, column.values, 1) if column.valid is not None else column.values
    name = text_column(fields.outcome or "", n) if fields.name is None else events.columns[fields.name]
    ids = events.event_ids
    if ids is not None and fields.integer_ids:
        ids = Column.from_arrow(pc.cast(ids.to_arrow(), pa.string()), "string")
    made = Outcomes(requests, events.columns[fields.item].values, name, events.event_ts, values, ids)
    wrong: dict[int, str] = {}
    for mask, why in (
        (requests == HEARTBEAT, f"request {HEARTBEAT} is that of heartbeats, of no outcome"),
        (np.abs(values) > _INT32, f"its value is beyond {_INT32}, as much as a label holds"),
    ):
        wrong |= dict.fromkeys(found.rows[np.flatnonzero(mask)].tolist(), why)
    if wrong:
        made = made.take(~np.isin(found.rows, list(wrong)))
    return made, wrong
