"""What a process knows of the users that it has written, so that its next append of them need not read them.

A call that guesses takes one round trip: its scripts write only if the record of the user is the one that was guessed,
all ids are new, and the tier's own keys are as they were; else they say what is there, and the call goes on from that,
so that a wrong guess takes no more round trips than a read.

Worked example: an ingest process appends to user 42, whose record then ends in the token ``t1``. Its next append of 42
numbers rows from the counter that it left, and its script finds ``t1``. A user who was never met is guessed to be new.
After a restart of the process most guesses are wrong, so that only one call in eight guesses until one is right.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Users whose records are kept, about 200 bytes each.
_MOST_USERS = 1 << 16
#: Calls that read after one that guessed wrong.
_REST = 7


@dataclass(frozen=True, slots=True)
class Standing:
    """Attributes:
    reign: of the server (``redis_link.reign_of``).
    tier, floor: what the tier says of itself.
    at: when that was asked for, by ``time.monotonic``.
    """

    reign: str
    tier: bytes
    floor: bytes
    at: float


class Remembered:
    """Records of users as this process left them, and the server that it met. Safe for threads.

    Attributes:
        standing: None before the first call, and where nothing may be guessed.
        records: by user key.
    """

    def __init__(self, guesses: bool) -> None:
        """``guesses``: whether one script may touch a user and the tier's own keys."""
        self.standing: Standing | None = None
        self.records: dict[bytes, bytes] = {}
        self._guesses, self._rest, self._lock = guesses, 0, threading.Lock()

    def met(self, standing: Standing | None) -> None:
        """The server answered."""
        self.standing = standing if self._guesses else None

    def takes_a_guess(self) -> bool:
        """Whether the next call should guess."""
        self._rest = max(self._rest - 1, 0)
        return self._rest == 0

    def was_wrong(self) -> None:
        """A guess was: read for a while."""
        self._rest = _REST + 1

    def give_up(self) -> None:
        """Never guess again."""
        self._guesses, self.standing = False, None

    def keep(self, written: Mapping[bytes, bytes], unsure: Iterable[bytes]) -> None:
        """Users' new records, empty of one who was forgotten; and users of whom nobody knows."""
        with self._lock:
            for user in unsure:
                self.records.pop(user, None)
            for user, record in written.items():
                # Behind all others, of which the first go.
                self.records.pop(user, None)
                if record:
                    self.records[user] = record
            while len(self.records) > _MOST_USERS:
                del self.records[next(iter(self.records))]
