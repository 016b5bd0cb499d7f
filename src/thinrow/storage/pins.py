"""Pins: leases on generations, so that none is collected under a reader or a writer, in whatever process it is.

A pin is a small object, ``pins/<unique>.json``: the number it holds, who holds it, and when it ends unless renewed. It
is renewed three times a lease while its holder lives; a dead holder's pin ends by itself.

Worked example: a trainer pins generation 7 at 12:00:00 for 60 s and renews at 12:00:20. It is killed at 12:00:30. The
pin ends at 12:01:20, and since clocks may differ by a minute, collectors leave generation 7 alone until 12:02:20.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import CommitConflict, CorruptionError, ObjectNotFound, StoreError
from thinrow.storage.objects import ObjectStore
from thinrow.storage.sealed import seal, unseal

FORMAT = 1
LEASE_MS = 60_000
#: Clocks of machines, and of the store, may differ by this much.
SKEW_MS = 60_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PinRecord:
    """What a pin's object says.

    Attributes:
        number: the generation; of a writer, the one that its work is based on.
        holder: who, for people.
        writes: whether the holder is writing objects that it has not committed yet.
        taken_ms: when it was taken, ms since 1970 by the holder's clock; a writer's holds what was written since then.
        expires_ms: when it ends unless it is renewed (exclusive).
    """

    number: int
    holder: str
    writes: bool
    taken_ms: int
    expires_ms: int

    def body(self) -> dict[str, Any]:
        """JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}


class Pin:
    """A pin of this process; ``release`` it."""

    def __init__(self, pins: Pins, record: PinRecord) -> None:
        self._pins, self.record = pins, record
        self.name = f"pins/{uuid.uuid4().hex}.json"

    @property
    def valid(self) -> bool:
        """Whether it still holds; not after this process stood still for longer than the lease."""
        return self._pins.clock() < self.record.expires_ms

    def release(self) -> None:
        """End it. May be called twice."""
        self._pins.release(self)


class Pins:
    """The pins of one object store; renews those of this process on a thread of its own."""

    def __init__(
        self, objects: ObjectStore, clock: Clock = system_clock, lease_ms: int = LEASE_MS, skew_ms: int = SKEW_MS
    ) -> None:
        self.objects, self.clock, self.lease_ms, self.skew_ms = objects, clock, lease_ms, skew_ms
        self._lock = threading.Lock()
        self._own: dict[str, Pin] = {}
        self._stop: threading.Event | None = None
        self._pid = os.getpid()
        self._renewed: Callable[[], None] = lambda: None

    def on_renewal(self, call: Callable[[], None]) -> None:
        """Call this after each renewal, on the thread that renews."""
        self._renewed = call

    def take(self, number: int, holder: str = "", writes: bool = False, *, since_ms: int | None = None) -> Pin:
        """Pin generation ``number``. Whether it is there still, the caller must look afterwards.

        Args:
            since_ms: a writer's pin holds what was written since then; since now by default.

        Raises:
            StoreError: the store takes no writes.
        """
        now = self.clock()
        who = holder or f"process {os.getpid()} on {socket.gethostname()}"
        pin = Pin(self, PinRecord(number, who, writes, now if since_ms is None else since_ms, now + self.lease_ms))
        self.objects.put(pin.name, seal(pin.record.body(), FORMAT, "pin"))
        with self._lock:
            if self._pid != os.getpid():
                # Neither the thread nor the pins of the process that this one was forked from are its own.
                self._pid, self._own, self._stop = os.getpid(), {}, None
            self._own[pin.name] = pin
            if self._stop is None:
                self._stop = threading.Event()
                # The thread must not keep alive what nobody uses any more.
                args = weakref.ref(self), self._stop, self.lease_ms / 3000
                threading.Thread(target=_renew, args=args, name="thinrow-pins", daemon=True).start()
        return pin

    def release(self, pin: Pin) -> None:
        """End a pin of this process."""
        with self._lock:
            held = self._own.pop(pin.name, None)
            if not self._own and self._stop is not None:
                self._stop.set()
                self._stop = None
        if held is not None:
            # A pin that cannot be removed ends by itself.
            with suppress(StoreError):
                self.objects.delete(pin.name)

    def live(self) -> list[PinRecord]:
        """The pins of all processes that have not ended."""
        return [record for record in self._all().values() if record.expires_ms + self.skew_ms > self.clock()]

    def drop_ended(self) -> None:
        """Remove the objects of pins that ended: their holders died."""
        for name, record in self._all().items():
            if record.expires_ms + self.skew_ms <= self.clock():
                self.objects.delete(name)

    def renew(self) -> None:
        """Renew all pins of this process; one that has ended stays so, its generation may be gone."""
        with self._lock:
            own = list(self._own.values())
        for pin in own:
            old, now = pin.record, self.clock()
            if not pin.valid:
                continue
            new = PinRecord(old.number, old.holder, old.writes, old.taken_ms, now + self.lease_ms)
            try:
                self.objects.put(pin.name, seal(new.body(), FORMAT, "pin"))
            except StoreError as e:
                _log.warning("pin on generation %d could not be renewed: %s", old.number, e)
                continue
            pin.record = new
            with self._lock:
                released = pin.name not in self._own
            if released:
                self.objects.delete(pin.name)
        self._renewed()

    def _all(self) -> dict[str, PinRecord]:
        found = {}
        for name in self.objects.list("pins/"):
            with suppress(ObjectNotFound):
                body = unseal(self.objects.get(name), FORMAT, "pin", name)
                try:
                    found[name] = PinRecord(**body)
                except TypeError as e:
                    raise CorruptionError(f"it is no pin: {e}", file=name) from e
        return found


def _renew(pins: weakref.ref[Pins], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        held = pins()
        if held is None:
            return
        try:
            held.renew()
        except Exception:
            _log.exception("renewing pins failed; they end in %.0f s unless the next try succeeds", 3 * every_s)
        del held


class Revocations:
    """Generations that must not be read any more although they may be pinned: what they hold was erased.

    ``revoked/<number>.json``, put once, says from when on generations below that number are void.
    """

    def __init__(self, objects: ObjectStore, clock: Clock = system_clock) -> None:
        self._objects, self._clock = objects, clock

    def add(self, below: int, grace_ms: int) -> None:
        """Void all generations below ``below`` (exclusive) in ``grace_ms``."""
        body = {"below": below, "at_ms": self._clock() + grace_ms}
        with suppress(CommitConflict):
            self._objects.put_if_absent(f"revoked/{below:020d}.json", seal(body, FORMAT, "revocation"))

    def below(self) -> int:
        """Generations below this number (exclusive) are void now; 0 where none is."""
        highest = 0
        for name in self._objects.list("revoked/"):
            body = unseal(self._objects.get(name), FORMAT, "revocation", name)
            if body["at_ms"] <= self._clock():
                highest = max(highest, int(body["below"]))
        return highest
