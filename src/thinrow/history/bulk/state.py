"""The folder of one bulk load: what is done is written down, so that a killed load goes on where it was.

::

    <work>/<load>/
      job.json             what is loaded into what: input, schema, buckets; of another input it is refused, of another
                           schema it begins anew
      run-00003.arrow      sorted rows, with run-00003.arrow.users; complete where run-00003.json is
      run-00003.json       rows of each bucket, and rows of the input up to here
      input.json           the input has been read to its end
      refused.json         the input had a bad row: what it is changed to may take its place
      numbers-00007.arrow  arrival numbers of a bucket's users
      bucket-00007.json    the bucket's segment is written
      commit.json          which generation is about to be committed
      done.json            the report; nothing else is left

A load without a name (a stream, a table) cannot be known again: its folder is deleted by the next load.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from thinrow.core.errors import ObjectNotFound, StoreError
from thinrow.core.users import Users
from thinrow.history.archive.layout import SegmentInfo
from thinrow.history.buckets import BucketWrite, CompactReport
from thinrow.history.bulk.merge import Numbers
from thinrow.history.bulk.runs import Ints, Run, users_array, write_batches, write_run
from thinrow.storage.objects import LocalObjects
from thinrow.storage.sealed import seal, unseal

_FORMAT = 1
_ANONYMOUS = "unnamed-"
_SWEEPING = ".lock"  # no load is named so


@dataclass(frozen=True, slots=True)
class BucketDone:
    """A bucket whose segment is written: the names of its segments ``before``, and the ``write``."""

    before: list[str]
    write: BucketWrite


class LoadFolder:
    """The folder of one load. Made when something is first put there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._objects = LocalObjects(path)

    def get(self, name: str) -> dict[str, Any] | None:
        """What ``put`` stored; None where there is none. Raises CorruptionError."""
        try:
            return unseal(self._objects.get(f"{name}.json"), _FORMAT, "bulk load", str(self.path / name))
        except ObjectNotFound:
            return None

    def put(self, name: str, body: dict[str, Any]) -> None:
        """Write a fact down, whole and durable. Raises StoreError."""
        self._objects.put(f"{name}.json", seal(body, _FORMAT, "bulk load"))

    def drop(self, name: str) -> None:
        """Take a fact back."""
        self._objects.delete(f"{name}.json")

    def runs(self) -> list[Run]:
        """The complete runs; files of others are deleted."""
        found: list[Run] = []
        while (body := self.get(f"run-{len(found):05d}")) is not None:
            path = self.path / f"run-{len(found):05d}.arrow"
            found.append(Run(np.array(body["rows"], np.int64), body["read"], path, None, None))
        self._sweep_runs(len(found))
        return found

    def add_run(self, number: int, run: Run) -> Run:
        """Put a run on disk. Raises StoreError."""
        name = f"run-{number:05d}"
        written = write_run(run, self._objects, f"{name}.arrow")
        self.put(name, {"rows": run.rows.tolist(), "read": run.read})
        return written

    def numbers(self, bucket: int) -> tuple[Users, Ints, Ints] | None:
        """Users of a bucket, the numbers before their first, and how many they got; None where it has none yet."""
        path = self.path / f"numbers-{bucket:05d}.arrow"
        if not path.exists():
            return None
        with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
            batch = file.get_batch(0)
        return users_array(batch.column(0)), batch.column(1).to_numpy(), batch.column(2).to_numpy()

    def put_numbers(self, bucket: int, numbers: Numbers) -> None:
        """Write the numbers of a bucket down. Raises StoreError."""
        kind = pa.int64() if numbers.users.dtype == np.int64 else pa.string()
        batch = pa.record_batch({"user": pa.array(numbers.users, kind), "first": numbers.first, "n": numbers.n})
        with self._objects.create(f"numbers-{bucket:05d}.arrow") as writer:
            write_batches(writer, batch.schema, iter([batch]))

    def bucket(self, bucket: int) -> BucketDone | None:
        """The bucket's segment, where it has been written."""
        body = self.get(f"bucket-{bucket:05d}")
        if body is None:
            return None
        segments = [SegmentInfo.from_dict(s) for s in body["segments"]]
        return BucketDone(body["before"], BucketWrite(segments, body["events"], body["merged_events"]))

    def put_bucket(self, bucket: int, done: BucketDone) -> None:
        """Write a bucket's segment down. Raises StoreError."""
        write = done.write
        body = {"segments": [s.to_dict() for s in write.segments], "events": write.events}
        self.put(f"bucket-{bucket:05d}", {**body, "merged_events": write.merged_events, "before": done.before})

    def drop_bucket(self, bucket: int) -> None:
        """Take a bucket's segment back."""
        self.drop(f"bucket-{bucket:05d}")

    def finish(self, report: CompactReport) -> None:
        """Leave the report alone."""
        self.put("done", asdict(report))
        self.sweep()

    def sweep(self) -> None:
        """Delete everything but the report of a load that is done."""
        self.clear(keep=("done.json", "lock"))

    def clear(self, keep: tuple[str, ...] = ("lock",)) -> None:
        """Delete everything but ``keep``."""
        if self.path.is_dir():
            for path in sorted(self.path.iterdir()):
                if path.name not in keep:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _sweep_runs(self, n_runs: int) -> None:
        """Delete what a killed process left half written."""
        if not self.path.is_dir():
            return
        for path in self.path.iterdir():
            run = re.match(r"run-(\d+)\.", path.name)
            if path.name.startswith((".tmp-", "giant-")) or (run and int(run[1]) >= n_runs):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def load_folder(work: Path, load_id: str | None) -> Iterator[LoadFolder]:
    """The folder of a load in ``work``, held alone; folders of unnamed loads that nobody holds are deleted.

    An unnamed load's is deleted at the end.

    Raises:
        StoreError: another process is at this load, or the folder cannot be made.
    """
    with ExitStack() as stack:
        # A sweep must not take the lock of a folder between its making and the lock of its own load.
        with _alone(work, _SWEEPING, patient=True):
            for path in work.glob(f"{_ANONYMOUS}*"):
                with suppress(StoreError), _alone(path):
                    shutil.rmtree(path, ignore_errors=True)
            folder = LoadFolder(work / (load_id or f"{_ANONYMOUS}{secrets.token_hex(8)}"))
            stack.enter_context(_alone(folder.path))
        if load_id is None:
            stack.callback(shutil.rmtree, folder.path, ignore_errors=True)
        yield folder


@contextmanager
def _alone(path: Path, name: str = "lock", *, patient: bool = False) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(os.fdopen(os.open(path / name, os.O_RDWR | os.O_CREAT, 0o666), "r+b"))
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
        except BlockingIOError:
            raise StoreError(f"another process is at the load in {path}; wait for it") from None
        except OSError as e:
            raise StoreError(f"cannot make {path / name}: {e.strerror}; free space, or take another work_dir") from e
        yield
