"""A source that is read by a thread of its own, one batch ahead of who appends what it gives.

Worked example: a batch takes 30 ms to read and decode, and 40 ms to append. One after the other that is 70 ms a batch;
with the next batch decoded while this one is on its way to disk, 40 ms. One batch waits at most: a store that is slower
than its broker stops the thread, the broker keeps what waits, and the batch after that is the larger one.

What waits here is in no store. ``start``, a newer schema and ``close`` let go of it, and it comes again, from the
stored positions. Where a group gives other partitions in between, the source begins at the stored positions too,
and first waits for what was handed out, so that what is on its way into the store is not read twice; should it not wait
long enough, the positions within the append refuse the second (``PositionConflict``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType

from thinrow.schema import EventSchema
from thinrow.sources.source import Batch, Positions, Source

#: How long a source that begins again waits for what was handed out.
_SETTLE_S = 5.0


class ReadAhead:
    """A ``Source`` around another one, to which the thread alone talks while it runs. ``close`` ends the thread, and
    leaves the other source open."""

    reads_ahead = False

    def __init__(self, source: Source) -> None:
        """What ``source`` gave and nobody stored comes again after its ``start``."""
        self.name = source.name
        self._source = source
        self._positions: Positions = dict
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # What follows is of both threads, under the condition.
        self._asked = 0, 0.0
        self._waiting: Batch | None = None
        self._handed_out = self._in_vain = 0
        self._durable: list[Batch] = []
        self._failed: BaseException | None = None
        self._ended = self._parking = False
        self._lag: int | None = 0

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, schema: EventSchema, positions: Positions) -> None:
        """See ``Source``."""
        self._park()
        self._positions = positions
        self._source.start(schema, self._begin_again)
        self._lag = self._source.lag()

    def use(self, schema: EventSchema) -> None:
        """Begin again at the stored positions: what waits was decoded for another schema."""
        self.start(schema, self._positions)

    def read(self, max_events: int, timeout_s: float) -> Batch | None:
        """See ``Source``. The first call begins the thread. What the thread fails with is raised once what it read
        before is handed out."""
        with self._changed:
            self._asked, in_vain = (max_events, timeout_s), self._in_vain
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"read ahead of {self.name}", daemon=True)
                self._thread.start()
            # The source has a whole timeout, of which a part may be over, and decodes after it.
            self._changed.wait_for(
                lambda: self._waiting is not None or self._failed is not None or self._in_vain != in_vain, 2 * timeout_s
            )
            if self._waiting is not None:
                batch, self._waiting = self._waiting, None
                self._handed_out += 1
                self._changed.notify_all()
                return batch
            if self._failed is not None:
                raise self._failed
            return None

    def acknowledge(self, batch: Batch) -> None:
        """See ``Source``: the thread passes it on before it reads on."""
        with self._changed:
            self._handed_out -= 1
            self._durable.append(batch)
            self._changed.notify_all()

    def ended(self) -> bool:
        """See ``Source``: nothing waits here either."""
        with self._changed:
            return self._ended and self._waiting is None

    def lag(self) -> int | None:
        """See ``Source``: what waits here was not read."""
        with self._changed:
            return None if self._lag is None else self._lag + _messages(self._waiting)

    def close(self) -> None:
        """End the thread; what waits is let go of."""
        self._park()

    def _park(self) -> None:
        """Until the next ``read`` there is no thread, and nothing waits."""
        with self._changed:
            self._parking = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._failed, self._parking, self._ended = None, None, False, False
        if self._lag is not None:
            self._lag += _messages(self._waiting)
        self._waiting, self._handed_out = None, 0
        durable, self._durable = self._durable, []
        for batch in durable:
            self._source.acknowledge(batch)

    def _begin_again(self) -> Mapping[str, str]:
        """The stored positions, for a source that goes on from there."""
        with self._changed:
            # The thread reads only where nothing waits: there is but what was handed out.
            self._ended = False
            self._changed.wait_for(lambda: self._parking or not self._handed_out, _SETTLE_S)
        return self._positions()

    def _run(self) -> None:
        try:
            while self._read_one():
                pass
        except BaseException as e:
            with self._changed:
                self._failed = e
                self._changed.notify_all()

    def _read_one(self) -> bool:
        """One turn of the thread; whether there is another."""
        with self._changed:
            self._changed.wait_for(lambda: self._parking or self._durable or self._waiting is None)
            if self._parking:
                return False
            durable, self._durable = self._durable, []
            has_room, (max_events, timeout_s) = self._waiting is None, self._asked
        for batch in durable:
            self._source.acknowledge(batch)
        if not has_room:
            return True
        until = time.monotonic() + timeout_s
        found = self._source.read(max_events, timeout_s)
        ended, lag = found is None and self._source.ended(), self._source.lag()
        with self._changed:
            self._waiting, self._ended, self._lag = found, ended, lag
            self._in_vain += found is None
            self._changed.notify_all()
            if ended:
                # Not every source waits for more where it has ended.
                self._changed.wait_for(lambda: self._parking, max(0.0, until - time.monotonic()))
        return True


def _messages(batch: Batch | None) -> int:
    return 0 if batch is None else batch.table.num_rows + len(batch.refused) + batch.skipped
