"""Prefixes: states of users' histories, kept between requests, so that a request scores its candidates alone.

Worked example, 1,024 events and 500 candidates. The first request of a user runs the model over the events, keeps of
each layer their keys and values (2 x 32 floats an event and layer), and scores. The next one that sees the same events,
bit for bit, reads these: neither are the events' rows looked up, nor do the events attend to each other.

Where it is used, a request is scored in these two parts whether or not its states were kept, so that a hit gives the
bits of a miss. A model's states are its own: a new release begins with none. States that were made of rows which a
server did not give are not kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from thinrow.core.errors import InputError
from thinrow.models.sequence import EventStates


class Prefixes:
    """The most recently used states, in so many bytes. Any number of threads may ask.

    Attributes:
        hits, misses: how often states were there, and were not.
        bytes: of what is kept.
    """

    def __init__(self, most_bytes: int) -> None:
        """Raises InputError where there is no room."""
        if most_bytes < 1:
            raise InputError(f"most_bytes={most_bytes} for states of histories; it must be 1 or more")
        self._most, self._lock = most_bytes, threading.Lock()
        self._states = OrderedDict[str, EventStates]()
        self.hits = self.misses = self.bytes = 0

    def __len__(self) -> int:
        return len(self._states)

    def get(self, digest: str) -> EventStates | None:
        """The states of the events of ``digest`` (``RankerInputs.event_digest``)."""
        with self._lock:
            found = self._states.get(digest)
            if found is None:
                self.misses += 1
            else:
                self.hits += 1
                self._states.move_to_end(digest)
            return found

    def put(self, digest: str, states: EventStates) -> None:
        """Keep these, and let go of those that were not asked for the longest."""
        with self._lock:
            if digest in self._states or bytes_of(states) > self._most:
                return
            self._states[digest] = states
            self.bytes += bytes_of(states)
            while self.bytes > self._most:
                _, gone = self._states.popitem(last=False)
                self.bytes -= bytes_of(gone)

    def read(self) -> dict[str, Any]:
        """Of hits, misses, entries and bytes."""
        return {"hits": self.hits, "misses": self.misses, "entries": len(self), "bytes": self.bytes}


def bytes_of(states: EventStates) -> int:
    """Of their memory."""
    return sum(t.numel() * t.element_size() for pair in states for t in pair)


__all__ = ["Prefixes", "bytes_of"]
