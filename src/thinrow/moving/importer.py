"""Import of a table of fat rows: a new store with the histories, and a new table of thin examples.

The input is read once and set aside by user (``runs``); then part by part its rows are aligned (``align``), the
histories written as segments and the examples as Arrow files. At the end the segments are committed together, the
examples appended, and each is rebuilt and held against its fat row. What is done is written down in a folder, so that
an import that was killed goes on where it was.

::

    <work>/import/
      job.json              what is imported; another job there begins anew
      rows-00003.arrow      rows of the input by part, complete where rows-00003.json is
      part-00007.json       a part's segment and counts, with its examples and its users beside it
      table.json            parts whose examples are in the table
      done.json             the report
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import InputError, StoreError, StoreExists, StoreNotFound, VersionMismatch
from thinrow.core.users import Users, as_users
from thinrow.examples.records import ExampleBatch, text_column
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.hides import Hides
from thinrow.history.archive.layout import STRIPE_ROWS, SegmentInfo
from thinrow.history.archive.writer import SegmentWriter
from thinrow.history.buckets import new_name
from thinrow.history.bulk.source import Source, open_source
from thinrow.history.bulk.state import LoadFolder, load_folder
from thinrow.history.load import MEMORY_BYTES
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import DEFAULT_BUCKETS, HistoryStore
from thinrow.jagged import HIDE_DTYPE, Events
from thinrow.moving.align import AlignCounts, Aligned, align, mismatches
from thinrow.moving.fat_rows import FatRows
from thinrow.moving.layout import FatLayout
from thinrow.moving.runs import CHUNK_ROWS, ROW, chunks_of, read_part, read_runs
from thinrow.schema import EventSchema, ExampleSchema, Projection

#: A part is copied about so many times while it is aligned and written, a run while it is cut into parts.
_PART_SHARE, _RUN_SHARE = 12, 6
_LEAST_MEMORY = 16 << 20
_NAMED = 20
_VERIFY_EVENTS = 4_000_000


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Attributes:
    work: folder for what is set aside, about as large as the rows in memory; None for one in the store.
    n_buckets: of store and table.
    memory_bytes: aimed at, beyond some 300 MB; the rows of one user must fit in it several times.
    windows: outcome -> attribution window, ms.
    verify: whether every example is rebuilt and compared at the end.
    progress: called with (what is done, done, in all).
    """

    work: Path | None = None
    n_buckets: int = DEFAULT_BUCKETS
    memory_bytes: int = MEMORY_BYTES
    windows: Mapping[str, int] = field(default_factory=dict)
    verify: bool = True
    progress: Callable[[str, int, int | None], None] | None = None


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Attributes:
    counts: what was found.
    newest: rows held the newest so many events, and some less than their history: read with ``max_len`` of it.
    generation: of the store.
    verified: examples that were rebuilt, each equal to its fat row.
    left_out: the first rows that could not be aligned: (request id, reason).
    """

    counts: AlignCounts
    newest: int | None
    generation: int
    verified: int
    left_out: tuple[tuple[int, str], ...]

    def projection(self, horizon_ms: int | None = None) -> Projection:
        """What shows a row as it was."""
        return Projection(max_len=self.newest, horizon_ms=horizon_ms)

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> ImportReport:
        """Reverse of ``dataclasses.asdict``."""
        left = tuple((int(i), str(r)) for i, r in body["left_out"])
        return cls(**{**body, "counts": AlignCounts(**body["counts"]), "left_out": left})


def import_fat_rows(
    source: Any,
    layout: FatLayout,
    store: str | Path,
    table: str | Path,
    options: ImportOptions | None = None,
) -> ImportReport:
    """Turn fat rows into a new store at ``store`` and a new example table at ``table``.

    Calling it again with the same files goes on after a kill, and gives the same report once it is done.

    Args:
        source: Parquet or Arrow files (paths, folders, patterns), or a table in memory, which cannot be gone on with.

    Raises:
        InputError, SchemaError: the rows do not fit the layout, or their memory; store and table are not begun.
        StoreExists: a store or a table is there that this import did not make.
        VersionMismatch: an example does not come back as its row: a defect; store and table are not to be used.
    """
    options = options or ImportOptions()
    if options.memory_bytes < _LEAST_MEMORY:
        raise InputError(f"{options.memory_bytes} bytes of memory; give at least {_LEAST_MEMORY} (16 MiB)")
    opened = open_source(source)
    first = next(iter(opened.chunks(0, layout.columns, CHUNK_ROWS)), None)
    if first is None:
        raise InputError("no rows in the input; check the path")
    events = layout.event_schema(first.table.schema)
    examples = layout.example_schema(first.table.schema, options.windows)
    # Before anything is made: that the first rows are what the layout says.
    FatRows.from_arrow(first.table, layout, events, examples)
    work = Path(store) / "import" if options.work is None else Path(options.work)
    with load_folder(work, "import") as folder:
        return _Import(opened, layout, Path(store), Path(table), options, folder, events, examples).run(first.table)


class _Import:
    def __init__(
        self,
        source: Source,
        layout: FatLayout,
        store: Path,
        table: Path,
        options: ImportOptions,
        folder: LoadFolder,
        events: EventSchema,
        examples: ExampleSchema,
    ) -> None:
        self._source, self._layout, self._options, self._folder = source, layout, options, folder
        self._store, self._table, self._events, self._examples = store, table, events, examples
        self._newest: int | None = None

    def run(self, sample: pa.Table) -> ImportReport:
        wanted = {
            "source": self._source.identity,
            "columns": {c: [str(f) for f in (sample.schema.field(c).type,)] for c in self._layout.columns},
            "layout": repr(self._layout),
            "n_buckets": self._options.n_buckets,
            "examples": self._examples.to_dict(),
        }
        job = self._folder.get("job")
        if job is None or wanted["source"] is None or any(job.get(k) != v for k, v in wanted.items()):
            self._refuse_others()
            self._folder.clear()
            job = {**wanted, "parts": self._n_parts(sample)}
            self._folder.put("job", job)
        done = self._folder.get("done")
        if done is not None:
            return ImportReport.from_dict(done)
        n_runs, longest = read_runs(
            self._source,
            self._layout,
            self._events,
            self._folder,
            job["parts"],
            self._options.memory_bytes // _RUN_SHARE,
            self._counter("rows", self._source.n_rows),
        )
        newest = self._newest = self._layout.newest or longest or None
        with self._opened_store() as store, store.archive.writing("an import", since_ms=0):
            parts = self._align(store, n_runs, job["parts"])
            generation = self._commit(store, parts)
            self._append(parts)
            counts = sum((_counts(p) for p in parts), AlignCounts())
            report = ImportReport(
                counts=counts,
                newest=newest if counts.truncated_rows else None,
                generation=generation,
                verified=0,
                left_out=tuple((i, r) for p in parts for i, r in p["left_out"])[:_NAMED],
            )
            if self._options.verify:
                report = replace(report, verified=self._verify(store, report, n_runs, job["parts"]))
        self._folder.put("done", {**asdict(report), "left_out": [list(pair) for pair in report.left_out]})
        for path in self._folder.path.glob("*-*"):
            path.unlink()
        return report

    def _counter(self, what: str, total: int | None) -> Callable[[int], None]:
        done = Counter[str]()

        def count(n: int) -> None:
            done[what] += n
            if self._options.progress is not None:
                self._options.progress(what, done[what], total)

        return count

    def _refuse_others(self) -> None:
        if HistoryStore.exists(self._store):
            raise StoreExists(f"a store is at {self._store} already; import into a new one")
        if (self._table / "catalog.db").exists():
            raise StoreExists(f"a table is at {self._table} already; import into a new one")

    def _n_parts(self, sample: pa.Table) -> int:
        """A multiple of the buckets, so that a part is a share of one."""
        per_row = sample.nbytes / max(len(sample), 1)
        total = per_row * (self._source.n_rows or len(sample))
        each = self._options.memory_bytes / _PART_SHARE
        return self._options.n_buckets * max(1, -int(-total // (each * self._options.n_buckets)))

    def _opened_store(self) -> HistoryStore:
        try:
            return HistoryStore.open(self._store)
        except StoreNotFound:
            return HistoryStore.create(self._store, self._events, self._options.n_buckets)

    def _align(self, store: HistoryStore, n_runs: int, n_parts: int) -> list[dict[str, Any]]:
        count, parts = self._counter("parts", n_parts), []
        for part in range(n_parts):
            done = self._folder.get(f"part-{part:05d}")
            if done is None:
                done = self._align_part(store, n_runs, part)
                self._folder.put(f"part-{part:05d}", done)
            parts.append(done)
            count(1)
        return parts

    def _read(self, n_runs: int, part: int) -> Aligned:
        table = read_part(self._folder.path, n_runs, part)
        rows = FatRows.from_arrow(table, self._layout, self._events, self._examples)
        if self._layout.request_id is None:
            rows = replace(rows, request_id=table[ROW].to_numpy())
        return align(rows, self._layout, self._events, self._newest)

    def _align_part(self, store: HistoryStore, n_runs: int, part: int) -> dict[str, Any]:
        aligned = self._read(n_runs, part)
        n, bucket = len(aligned.rows), part % self._options.n_buckets
        batch = ExampleBatch(
            aligned.rows.request_id,
            aligned.requests,
            aligned.rows.context,
            aligned.rows.candidates,
            aligned.rows.labels,
            text_column("", n),
            text_column("", n),
            np.zeros(n, np.int64),
        )
        _write_arrow(self._folder.path / f"part-{part:05d}.arrow", batch.to_arrow(self._events, self._examples))
        kind = pa.int64() if self._events.user_kind == "int64" else pa.string()
        users = pa.table({"user": pa.array(aligned.events.users, kind), "top": aligned.top})
        _write_arrow(self._folder.path / f"part-{part:05d}.users.arrow", users)
        segment = None if not len(aligned.events) else self._segment(store, bucket, aligned.events).to_dict()
        counts = asdict(aligned.counts)
        return {
            "segment": segment,
            "bucket": bucket,
            "counts": counts,
            "left_out": [list(pair) for pair in aligned.left_out[:_NAMED]],
        }

    def _segment(self, store: HistoryStore, bucket: int, events: Events) -> SegmentInfo:
        name, n_buckets = new_name(bucket), self._options.n_buckets
        nobody = as_users([], self._events.user_kind)
        some = np.flatnonzero(events.lengths)
        with SegmentWriter(
            store.archive.objects, name, self._events, bucket=bucket, n_buckets=n_buckets, stripe_rows=STRIPE_ROWS
        ) as writer:
            for a, b in chunks_of(events.lengths[some], _VERIFY_EVENTS):
                writer.add(events.take_users(some[a:b]))
            return writer.finish(Hides(nobody, np.zeros(1, np.int64), np.empty(0, HIDE_DTYPE)))

    def _commit(self, store: HistoryStore, parts: list[dict[str, Any]]) -> int:
        """All histories at once; numbers of events that come later begin after them."""
        segments: dict[int, list[SegmentInfo]] = {}
        for part in parts:
            if part["segment"] is not None:
                segments.setdefault(part["bucket"], []).append(SegmentInfo.from_dict(part["segment"]))
        base = store.pin()
        held = {info.name for _, info in base.segments}
        ours = {info.name for infos in segments.values() for info in infos}
        if held and ours <= held:
            return base.number
        if held:
            raise StoreExists(f"the store at {self._store} has events of others; import into a new one")
        for number in range(len(parts)):
            users, top = self._users(number)
            store.recent.raise_counters(users, top)
        return store.archive.commit(base, segments, "import of fat rows").number if segments else base.number

    def _users(self, part: int) -> tuple[Users, npt.NDArray[np.int64]]:
        table = _read_arrow(self._folder.path / f"part-{part:05d}.users.arrow")
        return as_users(table["user"].to_pylist(), self._events.user_kind), table["top"].to_numpy()

    def _append(self, parts: list[dict[str, Any]]) -> None:
        try:
            opened = ExampleTable.open(self._table)
        except StoreNotFound:
            opened = ExampleTable.create(
                self._table,
                event_schema=self._events,
                example_schema=self._examples,
                n_buckets=self._options.n_buckets,
            )
        count = self._counter("appended", len(parts))
        with opened as table:
            done = (self._folder.get("table") or {"parts": 0})["parts"]
            expected = sum(_counts(p).rows for p in parts[:done])
            count(done)
            for number in range(done, len(parts)):
                n = _counts(parts[number]).rows
                have = table.rows()
                # The last one of a killed import may be there and not be written down.
                if have != expected and not (have == expected + n and number == done):
                    raise StoreError(f"{have} rows in {self._table}, {expected} were appended; import into a new one")
                if n and have == expected:
                    table.append(_read_arrow(self._folder.path / f"part-{number:05d}.arrow"))
                expected += n
                self._folder.put("table", {"parts": number + 1})
                count(1)
            table.cluster()

    def _verify(self, store: HistoryStore, report: ImportReport, n_runs: int, n_parts: int) -> int:
        """Rebuild every example and hold it against its row; how many there are."""
        generation, total = store.pin(), 0
        horizon = self._layout.horizon_ms
        if horizon is not None:
            horizon += self._layout.inclusive is True
        projection = report.projection(horizon)
        count = self._counter("verified", report.counts.rows)
        for part in range(n_parts):
            rows = self._read(n_runs, part).rows
            stored = _read_arrow(self._folder.path / f"part-{part:05d}.arrow")
            batch = ExampleBatch.from_arrow(stored, self._events, self._examples)
            for a, b in chunks_of(rows.lengths, _VERIFY_EVENTS):
                wanted = np.arange(a, b)
                histories = reconstruct(generation, batch.batch.take(wanted), projection).histories
                wrong = np.flatnonzero(mismatches(rows.take(wanted), histories))
                if len(wrong):
                    request = int(rows.request_id[a + wrong[0]])
                    raise VersionMismatch(
                        f"request {request} and {len(wrong) - 1} others do not come back as their rows",
                        file=str(self._store),
                        remedy="import into a new store, and report this with the rows",
                    )
                total += b - a
                count(b - a)
        return total


def _counts(part: Mapping[str, Any]) -> AlignCounts:
    return AlignCounts(**part["counts"])


def _write_arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _read_arrow(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        return file.read_all()
