"""The log of sealed splits: what the join has closed, in the order in which it closed, for sessions that follow.

Worked example: three steps of ``join_stream`` into a split log::

    0000000000000001.log   300 examples, rows 0 to 299, and the state of the join
    0000000000000002.log   0 examples (outcomes were counted), the state
    0000000000000003.log   150 examples, rows 300 to 449, the state
    0000000000000004.log   sealed: nothing comes after row 449

A split is put if absent under the next number, whole, synced, with CRCs of head, keys and body. The state of the join
lies in the split itself, so a killed step has written its split and is done, or has not and does it again: every
example is there once. An erasure takes rows out of a split; the others keep their numbers. It begins with an empty
split (``fence``), after which a step that read its logs before is one that another writer overtook.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import CommitConflict, CorruptionError, StoreError
from thinrow.examples.log import RecordLog, encode_file, file_name, keys_of
from thinrow.examples.outcomes import join
from thinrow.examples.records import ExampleBatch, Impressions, Outcomes
from thinrow.schema.event_schema import EventSchema
from thinrow.schema.example_schema import ExampleSchema
from thinrow.storage.objects import ObjectStore

Ints = npt.NDArray[np.int64]

_SPLIT = b"thinrow.split"


@dataclass(frozen=True, slots=True)
class Split:
    """Attributes:
    examples: those that are left.
    rows: (n,) the row of each within the split, ascending.
    rows_before: rows of the splits before.
    n_rows: rows of the split when it was written.
    state: of the join, JSON.
    sealed: whether it is the last split there will be.
    """

    examples: ExampleBatch
    rows: Ints
    rows_before: int
    n_rows: int
    state: str
    sealed: bool = False


class SplitLog(RecordLog[Split]):
    """The log of splits under ``path`` (a directory, or an object store); ``join_stream`` takes it in place of a table.

    Attributes:
        name: of messages.
    """

    kind = "splits"

    def __init__(
        self, path: str | Path | ObjectStore, event_schema: EventSchema, example_schema: ExampleSchema
    ) -> None:
        super().__init__(path)
        self.event_schema, self.example_schema = event_schema, example_schema
        self.name = f"splits {self.id}"
        self._last = 0

    def join_state(self) -> tuple[int | None, str | None]:
        """Number of the newest split, and the state of the join in it; None where there is none."""
        number = self._newest()
        return (None, None) if not number else (number, self.read(number).state or None)

    def append_after(self, number: int | None, examples: ExampleBatch, join_state: str) -> int:
        """Append a split after ``number``, durably; returns its number.

        Raises:
            CommitConflict: ``number`` is not the newest any more; nothing was written.
            StoreError: the log is sealed.
            InputError, SchemaError: rows that do not fit the schemas; nothing was written.
        """
        before = None if number is None else self.read(number)
        if before is not None and before.sealed:
            raise StoreError(f"{self.name} is sealed after row {before.rows_before + before.n_rows}; use a new log")
        start = 0 if before is None else before.rows_before + before.n_rows
        n = len(examples)
        return self._put((number or 0) + 1, Split(examples, np.arange(n), start, n, join_state))

    def seal(self) -> int:
        """End the log: sessions that follow end after its last row. Returns the number of the last split; a second call
        changes nothing.

        Raises:
            CommitConflict: another writer appended meanwhile; run again.
        """
        number, last = self._end()
        return number if last.sealed else self._put_empty(number, last, sealed=True)

    def fence(self) -> int | None:
        """Append a split without rows, so that whoever read the state before it cannot append any more: a join that is
        at work starts over, and reads its logs as they are now. Returns its number; None where the log is sealed.

        Raises:
            CommitConflict: another writer appended meanwhile; run again.
        """
        number, last = self._end()
        return None if last.sealed else self._put_empty(number, last, sealed=False)

    def _end(self) -> tuple[int, Split]:
        """The newest split and its number; 0 and one without rows where there is none."""
        number = self._newest()
        return (number, self.read(number)) if number else (0, self._empty(0, "", sealed=False))

    def _put_empty(self, number: int, last: Split, *, sealed: bool) -> int:
        return self._put(number + 1, self._empty(last.rows_before + last.n_rows, last.state, sealed=sealed))

    def _empty(self, start: int, state: str, *, sealed: bool) -> Split:
        none = join(
            Impressions.empty(self.event_schema, self.example_schema), Outcomes.empty(), self.example_schema, 0
        ).examples
        return Split(none, np.arange(0), start, 0, state, sealed)

    def _newest(self) -> int:
        """The newest split, 0 where there is none: by a list the first time, so that a lost file is noticed, and from
        the one that was the newest on later."""
        if self._last:
            self._last = self.newest(self._last) or 0
        else:
            numbers = self.numbers()
            self._last = numbers[-1] if numbers else 0
        return self._last

    def _put(self, number: int, split: Split) -> int:
        table, keys = self._pack(split)
        # A log that was pruned is never empty, so the next number is taken or free, never one that was.
        if number != self._newest() + 1:
            raise CommitConflict(f"{self.name} moved on from split {number - 1}; read its state and run again")
        self._objects.put_if_absent(file_name(number), encode_file(table, keys, self.kind))
        return number

    def _pack(self, records: Split) -> tuple[pa.Table, npt.NDArray[np.void]]:
        table = records.examples.to_arrow(self.event_schema, self.example_schema)
        about: dict[str, Any] = {
            "rows_before": records.rows_before,
            "n_rows": records.n_rows,
            "state": records.state,
            "sealed": records.sealed,
        }
        if len(records.rows) < records.n_rows:
            about["rows"] = records.rows.tolist()
        metadata = {**(table.schema.metadata or {}), _SPLIT: json.dumps(about).encode()}
        keys = keys_of(records.examples.request_id, records.examples.batch.request_ts)
        return table.replace_schema_metadata(metadata), keys

    def _unpack(self, table: pa.Table) -> Split:
        try:
            about = json.loads(table.schema.metadata[_SPLIT])
            before, n, state, sealed = about["rows_before"], about["n_rows"], about["state"], about["sealed"]
            rows = np.array(about.get("rows", np.arange(n)), np.int64)
        except (KeyError, TypeError, ValueError) as e:
            raise CorruptionError(f"not a split: {e!r}", file="a split") from e
        if len(rows) != table.num_rows or (len(rows) and (rows[0] < 0 or rows[-1] >= n or (np.diff(rows) <= 0).any())):
            raise CorruptionError(f"{table.num_rows} examples of {n} rows, at {len(rows)} places", file="a split")
        examples = ExampleBatch.from_arrow(table, self.event_schema, self.example_schema)
        return Split(examples, rows, int(before), int(n), str(state), bool(sealed))
