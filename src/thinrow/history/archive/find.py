"""Find one event by its id in the archive (for corrections of events that the recent tier never numbered)."""

from __future__ import annotations

import numpy as np

from thinrow.core.users import as_users
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.layout import EVENT_ID, stored_columns
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import read_everything


def find_event(generation: Generation, user: object, event_id: object) -> tuple[int, int] | None:
    """(event_ts, arrival) of the user's event with that id; None where the generation holds none."""
    specs = [c for c in stored_columns(generation.schema) if c.name == EVENT_ID]
    if not specs:
        return None
    users = as_users([user], generation.schema.user_kind)
    events = read_everything(generation, users, specs, ReadStats())
    ids = events.columns[EVENT_ID].to_arrow().to_pylist()
    hits = [i for i, value in enumerate(ids) if value == event_id]
    if not hits:
        return None
    newest = max(hits, key=lambda i: int(events.arrival[i]))
    return int(events.event_ts[newest]), int(np.int64(events.arrival[newest]))
