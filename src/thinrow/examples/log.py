"""Logs of impressions and outcomes: numbered, immutable files, each whole or absent.

Worked example: three appends, the first pruned after its rows were joined::

    impressions/log.json                    {"format": 1, "id": "...", "kind": "impressions"}
    impressions/0000000000000002.log        head, keys (request id, time), Arrow IPC body
    impressions/0000000000000003.log

A file is put if absent under the next number, so several processes may append. Numbers have no gaps: a missing file, a
torn one and a foreign one are told apart from "not there yet" and reported. See docs/format/examples-v1.md.
"""

from __future__ import annotations

import contextlib
import json
import struct
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from thinrow.core.check import path as checked_path
from thinrow.core.errors import (
    CommitConflict,
    CorruptionError,
    InputError,
    NewerFormatError,
    ObjectNotFound,
    PositionConflict,
    SchemaError,
    ThinrowError,
)
from thinrow.examples.records import Impressions, Outcomes
from thinrow.history.recent.tier import Advance
from thinrow.schema.event_schema import EventSchema
from thinrow.schema.example_schema import ExampleSchema
from thinrow.storage.objects import LocalObjects, ObjectStore

FORMAT = 1
#: Key of a logged row: request id, and request time (impressions) or outcome time (outcomes).
KEY_DTYPE = np.dtype([("request_id", "<i8"), ("ts", "<i8")])

_MAGIC = b"THINLOG\0"
_KINDS = {"impressions": 1, "outcomes": 2, "splits": 3}
#: magic, format, kind, CRC of the keys, rows, bytes of the body, CRC of the body; then the CRC of those 36 bytes.
_HEAD = struct.Struct("<8sHHIQQI")
_HEAD_BYTES = _HEAD.size + 4

#: Source -> partition -> position.
Positions: TypeAlias = dict[str, dict[str, str]]
_POSITIONS = b"thinrow.positions"
#: Which records of whom a file was made of; stays when rows of it are erased.
_ORIGIN = b"thinrow.origin"
T = TypeVar("T")


class _Head(NamedTuple):
    """Of a file: rows, CRC of their keys, bytes of the body, its CRC."""

    rows: int
    keys_crc: int
    body_bytes: int
    body_crc: int

    @classmethod
    def of(cls, data: bytes, name: str, kind: str) -> _Head:
        """Of what a file begins with."""
        if len(data) < _HEAD_BYTES:
            raise CorruptionError(f"{len(data)} bytes, shorter than a head; torn", file=name)
        magic, version, number, keys_crc, rows, length, body_crc = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise CorruptionError(f"starts with {magic!r}; not a thinrow log file", file=name)
        if zlib.crc32(data[: _HEAD.size]) != int.from_bytes(data[_HEAD.size : _HEAD_BYTES], "little"):
            raise CorruptionError("wrong CRC of the head", file=name)
        if version > FORMAT:
            raise NewerFormatError(f"log file {name} has format {version}, newer than {FORMAT}; update thinrow")
        if number != _KINDS[kind]:
            raise CorruptionError(f"holds records of kind {number}, not {kind}", file=name)
        return cls(rows, keys_crc, length, body_crc)

    @classmethod
    def of_file(cls, data: bytes, name: str, kind: str) -> _Head:
        """Of a whole file, which has to be as long as its head says."""
        head = cls.of(data, name, kind)
        head.check_size(len(data), name)
        return head

    def check_size(self, size: int, name: str) -> None:
        """Raises CorruptionError where a file of ``size`` bytes is not whole."""
        wanted = self.body_at + self.body_bytes
        if size != wanted:
            raise CorruptionError(f"{size} bytes, its head says {wanted}; torn", file=name)

    @property
    def body_at(self) -> int:
        """Where in the file the body begins."""
        return _HEAD_BYTES + self.rows * KEY_DTYPE.itemsize

    def keys_in(self, data: bytes, name: str) -> npt.NDArray[np.void]:
        """(rows,) KEY_DTYPE, which ``data`` begins with."""
        packed = data[: self.rows * KEY_DTYPE.itemsize]
        if zlib.crc32(packed) != self.keys_crc:
            raise CorruptionError("wrong CRC of the keys", file=name)
        return np.frombuffer(packed, KEY_DTYPE)

    def body_of(self, data: bytes, name: str) -> memoryview:
        """The body in the bytes of the file."""
        body = memoryview(data)[self.body_at :]
        if zlib.crc32(body) != self.body_crc:
            raise CorruptionError("wrong CRC of the body", file=name)
        return body


class RecordLog(ABC, Generic[T]):
    """Numbered files of one kind of record. Numbers start at 1."""

    kind: str

    def __init__(self, path: str | Path | ObjectStore) -> None:
        self._objects = LocalObjects(checked_path(path, "path")) if isinstance(path, (str, Path)) else path
        self._next = 0
        self.id = self._identify()

    def append(self, records: T, *, origin: str | None = None) -> int | None:
        """Write records as one file; durable when it returns.

        Args:
            origin: what ``origin_of`` says of the file from then on, also when rows of it are erased.

        Returns:
            The file's number; None where there is no record and so no file.

        Raises:
            InputError, SchemaError: records that do not fit the schemas; nothing was written.
        """
        table, keys = self._pack(records)
        if not len(keys):
            return None
        return self._put_next(lambda _: encode_file(_with_origin(table, origin), keys, self.kind))

    def origin_of(self, number: int) -> str | None:
        """What a file was made of, where its writer said so. Raises as ``read``."""
        said = (self._table(number).schema.metadata or {}).get(_ORIGIN)
        return None if said is None else said.decode(errors="replace")

    def _put_next(self, data_of: Callable[[int], bytes]) -> int:
        """Put a file under the next number, for which ``data_of`` gives its bytes."""
        if not self._is_end(self._next):
            self._next = self.numbers().stop
        while True:
            data = data_of(self._next)
            try:
                self._objects.put_if_absent(file_name(self._next), data)
            except CommitConflict:
                self._next = self.numbers().stop
            else:
                self._next += 1
                return self._next - 1

    def numbers(self) -> range:
        """Numbers of the files that are there.

        Raises:
            CorruptionError: a file between two others is missing, or one is none of ours.
        """
        found = self._listed()
        numbers = range(found[0], found[-1] + 1) if found else range(1, 1)
        if len(found) != len(numbers):
            # A file that was rewritten while others were pruned is there for a moment (``rewrite``).
            found = self._listed()
            numbers = range(found[0], found[-1] + 1) if found else range(1, 1)
        if len(found) != len(numbers):
            gap = next(n for n, have in zip(numbers, found, strict=False) if n != have)
            raise CorruptionError(f"missing, though number {found[-1]} is there; restore it", file=file_name(gap))
        return numbers

    def _listed(self) -> list[int]:
        found = []
        for name in self._objects.list(""):
            if name == "log.json":
                continue
            number = name.removesuffix(".log")
            if (
                not name.endswith(".log")
                or not (number.isascii() and number.isdigit())
                or name != file_name(int(number))
            ):
                raise CorruptionError(f"not a file of the log of {self.kind}; move it away", file=name)
            found.append(int(number))
        return found

    def newest(self, known: int = 0) -> int | None:
        """The number of the newest file; None where there is none.

        Where file ``known`` (or file 1) is there still it is found by asking for names in growing steps, not by a list
        of all: a file that is lost may be taken for the end of the log, unless the next one is there. Where ``known``
        was pruned all are listed.

        Raises as ``numbers``.
        """
        start, step = next((n for n in (known, 1) if n > 0 and self._has(n)), 0), 1
        while start and self._has(start + step):
            start, step = start + step, 2 * step
        # File ``start`` is there, ``start + step`` is not.
        while step > 1:
            step //= 2
            start += step * self._has(start + step)
        if not start or self._has(start + 2):
            numbers = self.numbers()
            return numbers[-1] if numbers else None
        return start

    def keys(self, number: int) -> npt.NDArray[np.void]:
        """(rows,) KEY_DTYPE of a file; its body is not read. Raises as ``read``."""
        name = file_name(number)
        size = self._objects.size(name)
        try:
            head = _Head.of(self._bytes(name, 0, min(_HEAD_BYTES, size)), name, self.kind)
            head.check_size(size, name)
            return head.keys_in(self._bytes(name, _HEAD_BYTES, head.rows * KEY_DTYPE.itemsize), name)
        except CorruptionError:
            # The file may have been rewritten between two reads of it: of one read this is not so.
            data = self._objects.get(name)
            return _Head.of_file(data, name, self.kind).keys_in(data[_HEAD_BYTES:], name)

    def read(self, number: int) -> T:
        """The records of a file.

        Raises:
            ObjectNotFound: there is no such file.
            CorruptionError: the file is torn, damaged or none of ours.
            NewerFormatError: a newer thinrow wrote it.
            SchemaError: it was written under other schemas.
        """
        name, table = file_name(number), self._table(number)
        try:
            return self._unpack(table)
        except (SchemaError, KeyError) as e:
            raise SchemaError(f"log file {name} was written under other schemas: {e}") from e

    def _table(self, number: int) -> pa.Table:
        name = file_name(number)
        data = self._objects.get(name)
        head = _Head.of_file(data, name, self.kind)
        body, rows = head.body_of(data, name), head.rows
        try:
            with ipc.open_stream(pa.py_buffer(body)) as reader:
                table = reader.read_all()
        except (pa.ArrowException, OSError) as e:
            raise CorruptionError(f"unreadable body: {e}", file=name) from e
        if table.num_rows != rows:
            raise CorruptionError(f"{table.num_rows} rows in the body, {rows} in the head", file=name)
        return table

    def items(self) -> Iterator[tuple[int, T]]:
        """Number and records of each file, in order, without those that are pruned meanwhile. Raises as ``read``."""
        for number in self.numbers():
            try:
                records = self.read(number)
            except ObjectNotFound:
                if number in self.numbers():
                    raise
            else:
                yield number, records

    def scan(self, start: int = 1, stop: int | None = None) -> Iterator[T]:
        """The records of each file in ``[start, stop)``, in order. Raises as ``read``."""
        for number in self.numbers():
            if start <= number and (stop is None or number < stop):
                yield self.read(number)

    def rewrite(self, number: int, records: T) -> bool:
        """Put ``records``, which may be none, in the place of those of a file; durable when it returns. Of a file that
        was pruned nothing is left, and False is returned.

        Raises:
            InputError, SchemaError: records that do not fit the schemas; nothing was written.
        """
        table, keys = self._pack(records)
        numbers = self.numbers()
        if number not in numbers:
            return False
        try:
            data = encode_file(self._said_again(number, table), keys, self.kind)
        except ObjectNotFound:
            return False
        self._objects.put(file_name(number), data)
        if number != numbers[-1] and not self._has(number + 1):
            # Pruned meanwhile, with those after it. ``prune`` looks again at what it has deleted, in the other order.
            self._objects.delete(file_name(number))
            return False
        return True

    def _said_again(self, number: int, table: pa.Table) -> pa.Table:
        """``table`` with what a file says beside its rows. Raises ObjectNotFound where it was pruned."""
        said = self._table(number).schema.metadata or {}
        kept = {name: said[name] for name in (_POSITIONS, _ORIGIN) if name in said}
        return table.replace_schema_metadata({**(table.schema.metadata or {}), **kept}) if kept else table

    def prune(self, below: int) -> int:
        """Delete the files numbered below ``below``, but never the newest: its number tells what the next one is.

        A request whose file is gone can no longer be recognised when it is logged again. Returns the files deleted.
        """
        doomed = [n for n in self.numbers()[:-1] if n < below]
        # Ascending, so that a crash leaves no gap.
        for number in doomed:
            self._objects.delete(file_name(number))
        for number in doomed:
            # It was rewritten meanwhile.
            if self._has(number):
                self._objects.delete(file_name(number))
        return len(doomed)

    def _is_end(self, number: int) -> bool:
        """Whether ``number``, once the end of the log, is so still or is taken: false when others pruned past it."""
        return number > 1 and self._has(number - 1)

    def _has(self, number: int) -> bool:
        try:
            self._objects.size(file_name(number))
        except ObjectNotFound:
            return False
        return True

    @abstractmethod
    def _pack(self, records: T) -> tuple[pa.Table, npt.NDArray[np.void]]:
        """The rows of a file and their keys."""

    @abstractmethod
    def _unpack(self, table: pa.Table) -> T:
        """Reverse of ``_pack``."""

    def _identify(self) -> str:
        """The log's id, made on first use: it ties the joined table to its logs."""
        fresh = {"format": FORMAT, "kind": self.kind, "id": uuid.uuid4().hex}
        try:
            data = self._objects.get("log.json")
        except ObjectNotFound:
            # A conflict means that another process made it just now; its id holds.
            with contextlib.suppress(CommitConflict):
                self._objects.put_if_absent("log.json", json.dumps(fresh, sort_keys=True).encode())
            data = self._objects.get("log.json")
        try:
            found = json.loads(data)
            version, kind, identity = int(found["format"]), str(found["kind"]), str(found["id"])
        except (ValueError, KeyError, TypeError) as e:
            raise CorruptionError(f"not the head of a log: {e}", file="log.json") from e
        if version > FORMAT:
            raise NewerFormatError(f"log.json has format {version}, newer than {FORMAT}; update thinrow")
        if kind != self.kind:
            raise InputError(f"this is a log of {kind}, not of {self.kind}; give each its own directory")
        return identity

    def _bytes(self, name: str, offset: int, length: int) -> bytes:
        out = np.empty(length, np.uint8)
        one = np.array([offset], np.int64), np.array([length], np.int64)
        self._objects.read_into(name, *one, out, np.zeros(1, np.int64))
        return out.tobytes()


class ImpressionLog(RecordLog[Impressions]):
    """The log of impressions under ``path`` (a directory, or an object store)."""

    kind = "impressions"

    def __init__(
        self, path: str | Path | ObjectStore, event_schema: EventSchema, example_schema: ExampleSchema
    ) -> None:
        super().__init__(path)
        self.event_schema, self.example_schema = event_schema, example_schema

    def _pack(self, records: Impressions) -> tuple[pa.Table, npt.NDArray[np.void]]:
        table = records.to_arrow(self.event_schema, self.example_schema)
        return table, keys_of(records.request_id, records.snapshots.request_ts)

    def _unpack(self, table: pa.Table) -> Impressions:
        return Impressions.from_arrow(table, self.event_schema, self.example_schema)


class OutcomeLog(RecordLog[Outcomes]):
    """The log of outcomes under ``path`` (a directory, or an object store).

    A file may say how far the sources of its outcomes are read, in ``thinrow.positions`` of its Arrow schema's
    metadata: ``{source: {partition: position}}``, of all sources. Every later file says it again, so the newest one,
    which stays when others are pruned, says what holds.
    """

    kind = "outcomes"

    def __init__(self, path: str | Path | ObjectStore) -> None:
        super().__init__(path)
        #: Number of a file, and the positions that it says.
        self._said: tuple[int, Positions] = 0, {}

    def append(
        self,
        records: Outcomes,
        advances: Sequence[Advance] = (),
        *,
        at: int | None = None,
        origin: str | None = None,
    ) -> int | None:
        """Write records as one file, with how far their sources are read then; durable when it returns.

        Args:
            advances: from where to where partitions of sources go with it; a file of no records is written for them.
            at: the number that the file must get.
            origin: as ``RecordLog.append``.

        Returns:
            The file's number; None where there is neither record nor advance and so no file.

        Raises:
            InputError: records that do not fit; nothing was written.
            PositionConflict: a partition does not stand where its advance says; nothing was written.
            CommitConflict: the file's number is not ``at``; nothing was written.
        """
        table, keys = self._pack(records)
        if not len(keys) and not advances:
            return None
        said: Positions = {}

        def data_of(number: int) -> bytes:
            nonlocal said
            if at is not None and number != at:
                raise CommitConflict(f"the log of outcomes is at file {number}, not {at}; look at what came, run again")
            said = _moved(self._before(number), advances)
            return encode_file(_with_origin(_with_positions(table, said), origin), keys, self.kind)

        if at is not None:
            self._next = at
        number = self._put_next(data_of)
        self._said = number, said
        return number

    def positions(self, source: str) -> dict[str, str]:
        """Partition -> position to which ``source`` is read. Raises CorruptionError."""
        return dict(self._before(self.numbers().stop).get(source, {}))

    def _before(self, number: int) -> Positions:
        """What holds where ``number`` is the next file's."""
        if self._said[0] != number - 1:
            self._said = number - 1, (self._says(number - 1) or {}) if number - 1 in self.numbers() else {}
        return self._said[1]

    def _says(self, number: int) -> Positions | None:
        text = (self._table(number).schema.metadata or {}).get(_POSITIONS)
        if text is None:
            return None
        try:
            found: Positions = {str(s): {str(p): str(t) for p, t in v.items()} for s, v in json.loads(text).items()}
        except (ValueError, AttributeError) as e:
            raise CorruptionError(f"unreadable positions of sources: {e}", file=file_name(number)) from e
        return found

    def _pack(self, records: Outcomes) -> tuple[pa.Table, npt.NDArray[np.void]]:
        return records.to_arrow(), keys_of(records.request_id, records.ts)

    def _unpack(self, table: pa.Table) -> Outcomes:
        return Outcomes.from_arrow(table)


def _moved(held: Positions, advances: Sequence[Advance]) -> Positions:
    """``held`` after the advances. Raises PositionConflict."""
    after = {source: dict(partitions) for source, partitions in held.items()}
    for a in advances:
        stands = after.setdefault(a.source, {}).get(a.partition)
        if stands != a.before:
            raise PositionConflict(
                f"partition {a.partition!r} of source {a.source!r} stands at {stands} in the log of outcomes, not at "
                f"{a.before}: another reader was first; read on from where it stands"
            )
        after[a.source][a.partition] = a.after
    return after


def _with_positions(table: pa.Table, said: Positions) -> pa.Table:
    if not said:
        return table
    metadata = {**(table.schema.metadata or {}), _POSITIONS: json.dumps(said, sort_keys=True).encode()}
    return table.replace_schema_metadata(metadata)


def _with_origin(table: pa.Table, origin: str | None) -> pa.Table:
    if origin is None:
        return table
    return table.replace_schema_metadata({**(table.schema.metadata or {}), _ORIGIN: origin.encode()})


def file_name(number: int) -> str:
    """The name of a log's file."""
    return f"{number:016d}.log"


def keys_of(request_id: npt.NDArray[np.int64], ts: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """(rows,) KEY_DTYPE."""
    keys = np.empty(len(request_id), KEY_DTYPE)
    keys["request_id"], keys["ts"] = request_id, ts
    return keys


def encode_file(table: pa.Table, keys: npt.NDArray[np.void], kind: str) -> bytes:
    """The bytes of a log file of one kind."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    body, packed = sink.getvalue(), keys.tobytes()
    head = _HEAD.pack(_MAGIC, FORMAT, _KINDS[kind], zlib.crc32(packed), len(keys), len(body), zlib.crc32(body))
    return b"".join((head, zlib.crc32(head).to_bytes(4, "little"), packed, body))


def verify_log(folder: Path) -> Iterator[tuple[str, ThinrowError]]:
    """(file, error) of every damaged or missing file of the log in ``folder``; its schemas need not be known."""
    try:
        log = _AnyLog(folder)
        numbers = log.numbers()
    except ThinrowError as e:
        yield "log.json", e
        return
    for number in numbers:
        try:
            log.check(number)
        except ThinrowError as e:
            yield file_name(number), e


class _AnyLog(ImpressionLog):
    """A log of whatever kind, for looking at its bytes."""

    def __init__(self, folder: Path) -> None:
        try:
            self.kind = str(json.loads((folder / "log.json").read_bytes())["kind"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise CorruptionError(f"unreadable: {e}", file="log.json") from e
        if self.kind not in _KINDS:
            raise CorruptionError(f"no log is of kind {self.kind!r}", file="log.json")
        RecordLog.__init__(self, folder)

    def check(self, number: int) -> None:
        """Hold a file to its checksums. Raises as ``read``."""
        name = file_name(number)
        data = self._objects.get(name)
        head = _Head.of_file(data, name, self.kind)
        head.keys_in(data[_HEAD_BYTES:], name)
        head.body_of(data, name)
