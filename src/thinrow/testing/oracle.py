"""The slow truth: a store of fat rows, against which the real one is held.

``FatRowOracle`` keeps every event as a Python object and, at each request, copies the visible ones. It knows nothing of
generations, stripes, versions or digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinrow.core.units import NEVER


@dataclass(slots=True)
class OracleEvent:
    """One event as it was appended; ``hidden_from`` changes when a correction arrives."""

    event_ts: int
    arrival: int
    values: Mapping[str, Any]
    hidden_from: int = NEVER


@dataclass(slots=True)
class FatRowOracle:
    """Events by user, and the rule of visibility, spelled out."""

    events: dict[Any, list[OracleEvent]] = field(default_factory=dict)
    ids: dict[tuple[Any, Any], OracleEvent] = field(default_factory=dict)

    def append(
        self, user: Any, event_ts: int, values: Mapping[str, Any], event_id: Any = None, supersedes: Any = None
    ) -> int:
        """The arrival number of the event (of its first copy, where its id is known)."""
        if event_id is not None and (user, event_id) in self.ids:
            return self.ids[user, event_id].arrival
        held = self.events.setdefault(user, [])
        event = OracleEvent(event_ts, len(held) + 1, values)
        held.append(event)
        if event_id is not None:
            self.ids[user, event_id] = event
        if supersedes is not None:
            target = self.ids[user, supersedes]
            target.hidden_from = min(target.hidden_from, event.arrival)
        return event.arrival

    def fat_row(self, user: Any, request_ts: int) -> list[tuple[int, int, tuple[Any, ...]]]:
        """(event_ts, arrival, values in order of name) of what a request now would see, oldest first."""
        shown = [e for e in self.events.get(user, []) if e.event_ts < request_ts and e.hidden_from == NEVER]
        shown.sort(key=lambda e: (e.event_ts, e.arrival))
        return [(e.event_ts, e.arrival, tuple(e.values[n] for n in sorted(e.values))) for e in shown]
