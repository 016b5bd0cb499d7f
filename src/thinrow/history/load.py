"""Bulk load: a history that never went through the recent tier becomes part of a generation, however large it is.

The input is read once, checked, and cut into runs sorted by bucket and user (``bulk.runs``). When all of it is known to
be sound, each bucket's users get their arrival numbers, and the runs of the bucket are merged into one segment, part
by part (``bulk.merge``, ``buckets``); then everything is committed at once. What is done is written down in a folder
(``bulk.state``), so a killed load goes on where it was: it never doubles and never loses.

Worked figures, 100 million rows of 42 bytes, ``memory_bytes`` of 1 GiB: runs of 96 MiB on disk (4 GB together), parts
of 16 MiB, two buckets at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CommitConflict, InputError, ObjectNotFound, SchemaError, StoreError
from thinrow.core.units import NEVER
from thinrow.core.users import Users, as_users
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.layout import STRIPE_ROWS
from thinrow.history.archive.lookup import Ints, look_up
from thinrow.history.buckets import (
    BucketTask,
    BucketWrite,
    CompactReport,
    new_name,
    report_of,
    rows_of,
    run_buckets,
    write_bucket,
)
from thinrow.history.bulk.merge import BucketParts, Numbers
from thinrow.history.bulk.runs import Run, read_runs
from thinrow.history.bulk.source import Source, StreamSource, difference, open_source
from thinrow.history.bulk.state import BucketDone, LoadFolder, load_folder
from thinrow.history.engines import BucketEngine
from thinrow.history.recent.tier import RecentTier
from thinrow.jagged import Events
from thinrow.storage.manifest import retried

MEMORY_BYTES = 1 << 30
_LEAST_MEMORY = 64 << 20
#: Shares of the memory: a run is copied several times while it is sorted, a part while it is merged and encoded, and
#: two buckets are in work.
_RUN_SHARE, _PART_SHARE = 10, 64
#: An input is read anew where the schema or the buckets changed meanwhile, at most so many times in all.
_READINGS = 3
_FIRST_USERS, _MOST_USERS = 256, 1 << 16


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is.

    Attributes:
        rows, of_rows: of the input that have been read and checked; of how many, None where that is not known.
        bytes: what these rows take in memory.
        buckets, of_buckets: that are written; of how many, 0 while the input is read.
    """

    rows: int
    of_rows: int | None
    bytes: int
    buckets: int
    of_buckets: int


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load.

    Attributes:
        work: folder for runs and journals; on a cluster every node reaches it under this name.
        load_id: names the input, so that a second load of it is known: one that was killed goes on, one that is done
            is not done again. Files name themselves by path, size and time of change.
        memory_bytes: aimed at, for runs and parts; interpreter, libraries and index come to it (300 MB or so).
        engine: where buckets are written.
        progress: called as it goes on.
        alone: held from the first number until the commit.
    """

    work: Path
    engine: BucketEngine
    load_id: str | None = None
    memory_bytes: int = MEMORY_BYTES
    progress: Callable[[LoadProgress], None] | None = None
    alone: AbstractContextManager[Any] = field(default_factory=nullcontext)


def bulk_load(archive: Archive, recent: RecentTier, source: Any, options: LoadOptions) -> CompactReport:
    """Give the events of ``source`` (see ``open_source``) the next arrival numbers of their users, by (arrival time,
    input order), and commit them as a new generation.

    Numbers are taken first, so that none is given twice even if the commit fails. Recent events of these users with
    lower numbers go into the same generation (the prefix invariant: it holds exactly the arrivals up to some number);
    events that arrive meanwhile have higher ones and stay recent.

    Where the schema or the number of buckets changes meanwhile, a table or files are read anew.

    Raises:
        InputError and its kinds: a bad row, named with its file; nothing has been changed. Or the load that ``load_id``
            names was begun with another input.
        SchemaError: the schema or the buckets changed while a stream was read, or three times; nothing was loaded.
        StoreError: the disk refused, or another process is at this load. What is complete is kept for the next try.
        CommitConflict: other writers won twenty times in a row.
    """
    if options.memory_bytes < _LEAST_MEMORY:
        raise InputError(f"{options.memory_bytes} bytes of memory; give at least {_LEAST_MEMORY} (64 MiB)")
    for left in reversed(range(_READINGS)):
        opened = open_source(source)
        load_id = options.load_id or opened.identity
        try:
            with load_folder(options.work, load_id) as folder:
                return _Load(archive, recent, opened, replace(options, load_id=load_id), folder).run()
        except _Outdated:
            # Sorted by other buckets, or checked under another schema, it is of no use; what comes once is gone.
            if not left or isinstance(opened, StreamSource):
                raise
    raise AssertionError


class _Outdated(SchemaError):
    """The store has another schema or other buckets than the input was read for."""


class _Load:
    def __init__(
        self, archive: Archive, recent: RecentTier, source: Source, options: LoadOptions, folder: LoadFolder
    ) -> None:
        self._archive, self._recent, self._source = archive, recent, source
        self._options, self._folder = options, folder
        self._named = options.load_id is not None
        self._note = f"bulk load {options.load_id}" if self._named else "bulk load"
        self._seen = LoadProgress(0, source.n_rows, 0, 0, 0)
        self._lock = threading.Lock()
        self._numbers: dict[int, tuple[Users, Ints, Ints]] = {}
        self._done: dict[int, BucketDone] = {}
        pinned = archive.pin()
        self._schema, self._schema_log = pinned.schema, pinned.schema_log

    def run(self) -> CompactReport:
        done = self._folder.get("done")
        if done is not None:
            self._folder.sweep()
            return CompactReport(**done)
        base = self._archive.pin()
        committed = self._committed()
        if committed is not None:
            return committed
        if self._named:
            self._begin(base.n_buckets)
        try:
            runs = self._read(base.n_buckets)
        except InputError:
            # What the input was changed to is another one, and may have its name.
            if self._named:
                self._folder.put("refused", {})
            raise
        # What is written from here on is no garbage, however long it takes; nor is what an earlier try has written.
        since_ms = 0 if self._named else None
        with self._options.alone, self._archive.writing("a bulk load", since_ms=since_ms):
            try:
                return retried(lambda: self._write(self._archive.pin(), runs))
            except CommitConflict:
                self._abandon(self._archive.pin())
                raise

    def _begin(self, n_buckets: int) -> None:
        """Go on with what the folder has, where it is of this job; else begin anew.

        Raises:
            InputError: the folder has a load of another input, part of which would be taken for one of this.
        """
        job = {"load": self._options.load_id, "schema": self._schema.to_dict(), "n_buckets": n_buckets}
        held, about = self._folder.get("job"), self._source.about
        begun = held.pop("source", None) if held else None
        # Of another schema, or number of buckets, only a load that was committed is of use.
        if held == job:
            if begun is not None:
                found = difference(begun, about)
            elif self._source.identity in (None, self._options.load_id):
                found = None
            else:
                found = "an earlier thinrow began it, and did not note its files"
            if found is None:
                return
            if self._folder.get("refused") is None:
                raise InputError(
                    f"load_id {self._options.load_id!r} was begun with another input: {found}; give it that one to go "
                    f"on, take another load_id, or delete {self._folder.path} to begin anew"
                )
        self._folder.clear()
        self._folder.put("job", {**job, "source": about})

    def _committed(self) -> CompactReport | None:
        """The end of a load that was killed after its commit."""
        attempt = self._folder.get("commit")
        if attempt is None:
            return None
        number = attempt["generation"]
        try:
            generation = self._archive.generation(number)
        except ObjectNotFound:
            if self._archive.pin().number < number:
                return None
            raise StoreError(
                f"generation {number} is gone, in which the load in {self._folder.path} may have been committed; "
                "compare the number of events, then delete that folder"
            ) from None
        buckets = {b: d for b in range(generation.n_buckets) if (d := self._folder.bucket(b)) is not None}
        held = {info.name for _, info in generation.segments}
        if not buckets or not all(s.name in held for d in buckets.values() for s in d.write.segments):
            return None
        return self._finish(generation, {b: d.write for b, d in buckets.items()})

    def _read(self, n_buckets: int) -> list[Run]:
        """All runs, those of an earlier try among them."""
        runs = self._folder.runs() if self._source.identity is not None else []
        if not runs:
            # What cannot be read from its middle is read again, and sorted into the same runs.
            self._folder.clear(keep=("lock", "job.json"))
        after = runs[-1].read if runs else 0
        self._advance(rows=after)
        if self._folder.get("input") is None or self._source.identity is None:
            found = read_runs(
                self._source,
                self._schema,
                self._schema_log,
                n_buckets,
                after=after,
                run_bytes=self._options.memory_bytes // _RUN_SHARE,
                spill=lambda run: self._folder.add_run(len(runs), run),
                progress=lambda rows, n_bytes: self._advance(rows=rows, n_bytes=n_bytes),
            )
            for run in found:
                runs.append(run)
            if self._named:
                self._folder.put("input", {"runs": len(runs)})
        return [run for run in runs if run.rows.any()]

    def _advance(self, rows: int = 0, n_bytes: int = 0, buckets: int = 0, of_buckets: int = 0) -> None:
        with self._lock:
            seen = self._seen
            self._seen = replace(
                seen,
                rows=seen.rows + rows,
                bytes=seen.bytes + n_bytes,
                buckets=seen.buckets + buckets,
                of_buckets=of_buckets or seen.of_buckets,
            )
            if self._options.progress is not None:
                self._options.progress(self._seen)

    def _write(self, base: Generation, runs: list[Run]) -> CompactReport:
        """Write what is not written of the buckets, and commit all. Raises CommitConflict."""
        if base.schema != self._schema or any(len(run.rows) != base.n_buckets for run in runs):
            self._abandon(base)
            raise _Outdated(
                f"while the input was read, the store went from schema {self._schema.schema_id} to "
                f"{base.schema.schema_id} or to {base.n_buckets} buckets; nothing was loaded and nothing is lost: load "
                "the same input again, when no evolve or rebucket is under way"
            )
        wanted = np.flatnonzero(sum(run.rows for run in runs)).tolist() if runs else []
        self._seen = replace(self._seen, buckets=0)
        self._advance(of_buckets=len(wanted))

        def work(bucket: int) -> BucketWrite | None:
            done = self._resumed(base, bucket) or self._write_bucket(base, bucket, runs)
            self._advance(buckets=1)
            return done

        written: dict[int, BucketWrite] = {}
        try:
            for bucket, done in run_buckets(wanted, work, self._options.engine):
                assert done is not None
                written[bucket] = done
            if self._named:
                self._folder.put("commit", {"generation": base.number + 1})
            generation = base
            if written:
                generation = self._archive.commit(base, {b: w.segments for b, w in written.items()}, self._note)
        except CommitConflict:
            raise
        except BaseException:
            # Of a commit that failed nobody knows whether its manifest is there.
            if self._archive.pin().number == base.number:
                self._abandon(base)
            raise
        return self._finish(generation, written)

    def _abandon(self, base: Generation) -> None:
        """Delete the segments of a load that cannot go on with them later."""
        if not self._named:
            # What a bucket had before is not of this load, and may be read by those who hold an older generation.
            held = {info.name for _, info in base.segments}
            for done in self._done.values():
                for info in done.write.segments:
                    if info.name not in held and info.name not in done.before:
                        self._archive.objects.delete(info.name)

    def _resumed(self, base: Generation, bucket: int) -> BucketWrite | None:
        """The bucket as an earlier try left it, if nothing has happened to it and its users since."""
        if self._named:
            done, held = self._folder.bucket(bucket), self._folder.numbers(bucket)
        else:
            done, held = self._done.get(bucket), self._numbers.get(bucket)
        if done is None or held is None:
            return None
        now = _files(base, bucket)
        new = [info for info in done.write.segments if info.name not in done.before]
        if now == done.before and self._untouched(*held) and all(self._there(i.name, i.bytes) for i in new):
            return done.write
        if self._named:
            self._folder.drop_bucket(bucket)
        else:
            del self._done[bucket]
        for info in new:
            self._archive.objects.delete(info.name)
        return None

    def _there(self, name: str, n_bytes: int) -> bool:
        try:
            return self._archive.objects.size(name) == n_bytes
        except ObjectNotFound:
            return False

    def _untouched(self, users: Users, first: Ints, n: Ints) -> bool:
        """Whether the users got no number since. One that came later may be known to a request already."""
        for at in range(0, len(users), _MOST_USERS):
            part = slice(at, at + _MOST_USERS)
            none = np.full(len(users[part]), NEVER - 1)
            if not np.array_equal(self._recent.read_since(users[part], none, self._schema).top, (first + n)[part]):
                return False
        return True

    def _number(self, base: Generation, bucket: int, runs: list[Run]) -> Numbers:
        """Take numbers for a bucket's users, and read their recent events below them."""
        found = [run.users(bucket) for run in runs]
        everyone: npt.NDArray[Any] = np.concatenate([users for users, _ in found])
        distinct, place = np.unique(everyone, return_inverse=True)
        users = as_users(distinct, base.schema.user_kind)
        n = np.bincount(place, np.concatenate([n for _, n in found]), len(users)).astype(np.int64)
        first = np.zeros(len(users), np.int64)
        held: list[Events] = []
        at, step = 0, _FIRST_USERS
        while at < len(users):
            part = slice(at, min(at + step, len(users)))
            watermark = look_up(base, users[part]).watermark
            first[part] = self._recent.reserve(users[part], watermark, n[part])
            read = self._recent.read_since(users[part], watermark, base.schema).events
            owner = np.repeat(np.arange(len(read.users)), read.lengths)
            below = read.arrival <= first[part][owner]
            held.append(read.take_rows(np.flatnonzero(below), _offsets(owner[below], len(read.users))))
            at = part.stop
            step = min(_MOST_USERS, max(1, _MOST_USERS * (part.stop - part.start) // max(len(read), 1)))
        numbers = Numbers(users, first, n, _joined(held))
        if self._named:
            self._folder.put_numbers(bucket, numbers)
        else:
            self._numbers[bucket] = users, first, n
        return numbers

    def _write_bucket(self, base: Generation, bucket: int, runs: list[Run]) -> BucketWrite:
        engine, numbers = self._options.engine, self._number(base, bucket, runs)
        rows = rows_of(base.schema, self._options.memory_bytes // _PART_SHARE)
        folder = self._folder.path if any(run.path is not None for run in runs) else None
        parts = BucketParts(runs, bucket, numbers, base.schema, rows, STRIPE_ROWS, folder)
        n_new = int(numbers.n.sum()) + (0 if numbers.recent is None else len(numbers.recent))
        task = BucketTask(base, bucket, parts, n_new, False, parts.has_giants, new_name(bucket))
        write = engine.call(write_bucket, task)
        assert write is not None
        done = BucketDone(_files(base, bucket), write)
        if self._named:
            self._folder.put_bucket(bucket, done)
        else:
            self._done[bucket] = done
        return write

    def _finish(self, generation: Generation, written: dict[int, BucketWrite]) -> CompactReport:
        for bucket in written:
            held = self._folder.numbers(bucket) if self._named else self._numbers[bucket]
            assert held is not None
            users, first, n = held
            for at in range(0, len(users), _MOST_USERS):
                part = slice(at, at + _MOST_USERS)
                self._recent.trim(users[part], (first + n)[part])
        report = report_of(generation, list(written.values()))
        if self._named:
            self._folder.finish(report)
        return report


def _files(base: Generation, bucket: int) -> list[str]:
    """What a bucket is made of: its segments, and the overlays that a backfill gave them."""
    return [name for n in base.segments_of(bucket) for name in base.segments[n][1].files]


def _offsets(owner: Ints, n: int) -> Ints:
    return np.searchsorted(owner, np.arange(n + 1)).astype(np.int64)


def _joined(parts: list[Events]) -> Events | None:
    """Events of users that ascend over the parts; None where there are none."""
    return Events.concat(parts) if any(len(p) for p in parts) else None
