"""Journal: impressions and outcomes are durable when they are acknowledged, and become few, large log files.

Records are appended to one file, in the order in which they came, many callers' in one write and one fsync. From time
to time, by size or age, what the file holds becomes one file of each log, and a new journal file begins::

    <log>/journal/lock
    <log>/journal/0000000000000003.journal     head; then frames: length, CRC, kind, an Arrow stream
    <log>/impressions/0000000000000017.log     what the second journal file held

After a kill the last file is read again: a frame that is not whole was never acknowledged. Its records go to the logs
unless they were brought there: the head says where the logs ended when the file began, and a log file says of which
records of which journal file it was made. So nothing that was acknowledged is lost, nothing is there twice, and what
was erased from a log file meanwhile does not come back.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import CorruptionError, InputError, NewerFormatError, Overloaded, StoreError
from thinrow.core.units import NEVER
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import Impressions, Outcomes
from thinrow.examples.streaming import HEARTBEAT
from thinrow.storage.objects import sync_directory

FORMAT = 1
_FRAME = struct.Struct("<QIB")
_IMPRESSIONS, _OUTCOMES = 1, 2
ROLL_BYTES, ROLL_S = 16 << 20, 5.0
WAITING_BYTES, HELD_BYTES = 64 << 20, 256 << 20
#: As ``thinrow outcomes`` has it.
MAX_FUTURE_MS = 3_600_000

_log = logging.getLogger(__name__)

R = TypeVar("R", Impressions, Outcomes)


@dataclass(slots=True)
class _Record(Generic[R]):
    kind: int
    records: R
    data: bytes
    done: Future[int] = field(default_factory=Future)


class Journal:
    """The way into an impression log and an outcome log. Safe from many threads; one journal a log folder."""

    def __init__(
        self,
        folder: str | Path,
        impressions: ImpressionLog,
        outcomes: OutcomeLog,
        *,
        roll_bytes: int = ROLL_BYTES,
        roll_s: float = ROLL_S,
        waiting_bytes: int = WAITING_BYTES,
        held_bytes: int = HELD_BYTES,
        max_future_ms: int | None = MAX_FUTURE_MS,
        clock: Clock = system_clock,
    ) -> None:
        """Open the journal in ``folder``; what a killed one left there goes to the logs first.

        Args:
            roll_bytes, roll_s: a journal file becomes log files at this size or age.
            waiting_bytes: records that wait for the disk; more are refused.
            held_bytes: of the journal file where the logs do not take what it holds; more is refused until they do.
            max_future_ms: requests and outcomes later than the clock by more are refused, for a join that follows the
                times of its logs would close every window; None for no bound.

        Raises:
            StoreError: another process has it open, or the disk refuses.
            CorruptionError, NewerFormatError: a file is none of ours.
        """
        self._folder, self._impressions, self._outcomes = Path(folder), impressions, outcomes
        self._roll_bytes, self._roll_s, self._most = roll_bytes, roll_s, waiting_bytes
        self._held_bytes = held_bytes
        self._max_future_ms, self._clock = max_future_ms, clock
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = _locked(self._folder)
        self._state = threading.Lock()
        self._waiting = 0
        self._closed = False
        self._queue: queue.SimpleQueue[_Record[Any] | None] = queue.SimpleQueue()
        self._held: list[_Record[Any]] = []
        #: Of the journal file, by kind: rows that are in the logs.
        self._brought: dict[int, int] = {}
        self._file: Any = None
        self._head: tuple[int, int] | None = None
        self._broken: StoreError | None = None
        #: Why the logs did not take what the file holds, the last time.
        self._untaken: Exception | None = None
        self._good = self._since = 0.0
        try:
            self._number = self._recover()
        except BaseException:
            os.close(self._lock_file)
            raise
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for the disk."""
        return self._waiting

    @property
    def floors(self) -> tuple[int, int]:
        """Files of impressions and of outcomes from these numbers on must stay: a journal that is read again after a
        kill tells by them what it has brought to the logs. Ask when it is known which files are to go."""
        head = self._head
        return (NEVER, NEVER) if head is None else head

    @property
    def broken(self) -> StoreError | None:
        """Why nothing is taken any more; None where it is."""
        if self._broken is not None or self._untaken is None or self._good < self._held_bytes:
            return self._broken
        return StoreError(
            f"the journal in {self._folder} holds {self._good} bytes, {self._held_bytes} at most, which its logs do "
            f"not take ({self._untaken}); mend that, it tries again every {self._roll_s} s"
        )

    def impressions(self, records: Impressions) -> Future[int]:
        """Log impressions; the future gives how many when they are durable.

        Raises:
            InputError, SchemaError: they do not fit the schemas; or a time is below 0 or later than the clock by more
                than ``max_future_ms``, or a request has the id of heartbeats.
            Overloaded: too much waits for the disk already.
            StoreError: the journal is closed, or ``broken``. The future raises it where the disk refuses: nothing of
                it is there.
        """
        self._refuse_strange("request_ts", records.request_id, records.snapshots.request_ts)
        table = records.to_arrow(self._impressions.event_schema, self._impressions.example_schema)
        return self._submit(_Record(_IMPRESSIONS, records, _stream(table)))

    def outcomes(self, records: Outcomes) -> Future[int]:
        """Log outcomes. As ``impressions``."""
        self._refuse_strange("ts", records.request_id, records.ts)
        return self._submit(_Record(_OUTCOMES, records, _stream(records.to_arrow())))

    def close(self) -> None:
        """Write what waits, and bring all of it to the logs. Closing twice is fine."""
        with self._state:
            if self._closed:
                return
            self._closed = True
        self._queue.put(None)
        self._thread.join()
        os.close(self._lock_file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_strange(self, name: str, ids: npt.NDArray[np.int64], times: npt.NDArray[np.int64]) -> None:
        """As outcomes of a source are refused: what would break the join of all the others."""
        latest = NEVER if self._max_future_ms is None else self._clock() + self._max_future_ms
        wrong = np.flatnonzero((times < 0) | (times > latest))
        if len(wrong):
            raise InputError(
                f"{name} is {times[wrong[0]]} in row {wrong[0]}; times are ms since 1970, from 0 to {latest} "
                "by now: send milliseconds, and look at the sender's clock"
            )
        if (ids == HEARTBEAT).any():
            raise InputError(f"request {HEARTBEAT} is that of heartbeats, of no request; number requests otherwise")

    def _submit(self, record: _Record[Any]) -> Future[int]:
        broken = self.broken
        if broken is not None:
            raise broken
        with self._state:
            if self._closed:
                raise StoreError("the journal is closed; nothing was logged")
            if self._waiting + len(record.data) > self._most and self._waiting:
                raise Overloaded(f"{self._waiting} bytes wait for the disk, {self._most} may; try again later")
            self._waiting += len(record.data)
            self._queue.put(record)
        return record.done

    def _work(self) -> None:
        open_ = True
        while open_:
            batch, open_ = self._next()
            if batch:
                self._write(batch)
            if self._has_to_roll and (not open_ or self._is_due()):
                self._try_roll()
        if self._file is not None:
            self._file.close()

    def _next(self) -> tuple[list[_Record[Any]], bool]:
        """All records that wait, or none where none came before a file is due; and whether more may come."""
        batch: list[_Record[Any]] = []
        timeout = max(self._since + self._roll_s - time.monotonic(), 0.01) if self._has_to_roll else None
        try:
            record = self._queue.get(timeout=timeout)
            while True:
                if record is None:
                    return batch, False
                batch.append(record)
                record = self._queue.get_nowait()
        except queue.Empty:
            return batch, True

    @property
    def _has_to_roll(self) -> bool:
        """Whether something is to come to the logs, or is there and its file could not be removed."""
        return bool(self._held) or self._untaken is not None

    def _is_due(self) -> bool:
        is_full = self._good >= self._roll_bytes and self._untaken is None
        return is_full or time.monotonic() - self._since >= self._roll_s

    def _write(self, batch: Sequence[_Record[Any]]) -> None:
        """One write and one fsync for all of ``batch``, which is acknowledged then."""
        try:
            if self._broken is not None:
                raise self._broken
            if self._file is None:
                self._begin()
            start = self._file.tell()
            try:
                for record in batch:
                    _write_all(self._file, _FRAME.pack(len(record.data), zlib.crc32(record.data), record.kind))
                    _write_all(self._file, record.data)
                os.fsync(self._file.fileno())
            except Exception:
                self._undo(start)
                raise
        except Exception as e:  # no other may end the thread: every caller would wait for ever
            error = StoreError(f"the journal in {self._folder} cannot be written: {e}; nothing of the call is there")
            for record in batch:
                self._done(record, error)
            return
        self._good = self._file.tell()
        self._held += batch
        for record in batch:
            self._done(record, None)

    def _done(self, record: _Record[Any], error: StoreError | None) -> None:
        with self._state:
            self._waiting -= len(record.data)
        if not record.done.set_running_or_notify_cancel():
            return
        if error is None:
            record.done.set_result(len(record.records))
        else:
            record.done.set_exception(error)

    def _undo(self, start: int) -> None:
        """Take back what was refused: it must not come to the logs later, and nothing may follow half a frame."""
        try:
            self._file.seek(start)
            os.ftruncate(self._file.fileno(), start)
            os.fsync(self._file.fileno())
        except OSError as e:
            self._broken = StoreError(f"the journal in {self._folder} is cut short and cannot be mended ({e}); restart")

    def _begin(self) -> None:
        self._number += 1
        path = self._path(self._number)
        ends = {"impressions": self._impressions.numbers().stop, "outcomes": self._outcomes.numbers().stop}
        head = {"format": FORMAT, **ends}
        partial = path.with_suffix(".tmp")
        file = partial.open("w+b", buffering=0)
        _write_all(file, json.dumps(head).encode() + b"\n")
        os.fsync(file.fileno())
        partial.rename(path)
        sync_directory(self._folder)
        self._head = ends["impressions"], ends["outcomes"]
        self._brought = {}
        self._file, self._since = file, time.monotonic()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:016d}.journal"

    def _try_roll(self) -> None:
        try:
            for log, kind in ((self._impressions, _IMPRESSIONS), (self._outcomes, _OUTCOMES)):
                some = [r for r in self._held if r.kind == kind]
                if some:
                    # Each kind is dropped when it is in its log: what fails after that must not bring it twice.
                    records = type(some[0].records).concat([r.records for r in some])
                    first = self._brought.get(kind, 0)
                    log.append(records, origin=_origin(self._number, first, first + len(records)))
                    self._brought[kind] = first + len(records)
                    self._held = [r for r in self._held if r.kind != kind]
            if self._file is not None:
                self._file.close()
                self._file = None
            self._path(self._number).unlink(missing_ok=True)
            sync_directory(self._folder)
            self._head = self._untaken = None
        except Exception as e:
            # All of it is durable in the journal; the next round tries again.
            _log.warning("the logs do not take what the journal in %s holds: %s", self._folder, e)
            self._untaken, self._since = e, time.monotonic()

    def _recover(self) -> int:
        """Bring what killed journals left to the logs; the highest number there was."""
        last = 0
        for path in sorted(self._folder.glob("*.journal")):
            last = int(path.stem)
            head, found = _read(path)
            for log, kind, stop in (
                (self._impressions, _IMPRESSIONS, head["impressions"]),
                (self._outcomes, _OUTCOMES, head["outcomes"]),
            ):
                tables = [t for k, t in found if k == kind]
                if not tables:
                    continue
                records: Any = _joined(log, tables)
                done = _brought(log, records, last, stop)
                left = records.take(np.arange(done, len(records)))
                log.append(left, origin=_origin(last, done, len(records)))
            path.unlink()
        for partial in self._folder.glob("*.tmp"):
            partial.unlink()
        return last


def _origin(number: int, first: int, stop: int) -> str:
    """Of a log file with the rows ``[first, stop)`` of its kind in a journal file."""
    return json.dumps({"journal": number, "first": first, "stop": stop})


def _brought(log: ImpressionLog | OutcomeLog, records: Impressions | Outcomes, number: int, start: int) -> int:
    """How many of the records of a journal file are in its log, whose files from ``start`` on came after it began."""
    _, keys = log._pack(records)  # type: ignore[arg-type]
    done = 0
    for n in log.numbers():
        if n < start:
            continue
        said = log.origin_of(n)
        if said is not None:
            origin = json.loads(said)
            done = max(done, int(origin["stop"])) if origin.get("journal") == number else done
        elif np.array_equal(part := log.keys(n), keys[done : done + len(part)]):
            # A file of thinrow 0.1 before it said so.
            done += len(part)
    return min(done, len(records))


def _joined(log: ImpressionLog | OutcomeLog, tables: Sequence[pa.Table]) -> Impressions | Outcomes:
    if isinstance(log, OutcomeLog):
        return Outcomes.concat([Outcomes.from_arrow(t) for t in tables])
    return Impressions.concat([Impressions.from_arrow(t, log.event_schema, log.example_schema) for t in tables])


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _read(path: Path) -> tuple[dict[str, int], list[tuple[int, pa.Table]]]:
    """Head and whole frames of a journal file; what follows the last whole one was never acknowledged."""
    data = path.read_bytes()
    line, _, rest = data.partition(b"\n")
    try:
        head = {k: int(v) for k, v in json.loads(line).items()}
        version = head["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CorruptionError(f"not the head of a journal: {e}", file=str(path)) from e
    if version > FORMAT:
        raise NewerFormatError(f"{path} has format {version}, newer than {FORMAT}; update thinrow")
    found: list[tuple[int, pa.Table]] = []
    at = 0
    while at + _FRAME.size <= len(rest):
        length, crc, kind = _FRAME.unpack_from(rest, at)
        body = rest[at + _FRAME.size : at + _FRAME.size + length]
        if len(body) < length or zlib.crc32(body) != crc:
            break
        with ipc.open_stream(pa.py_buffer(body)) as reader:
            found.append((kind, reader.read_all()))
        at += _FRAME.size + length
    return head, found


def _write_all(file: Any, data: bytes) -> None:
    """Unbuffered, so that what was refused is not written again when the file is closed."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _locked(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreError(f"another process has the journal in {folder} open; give each service its own log") from None
    return descriptor
