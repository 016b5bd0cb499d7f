"""A store is cut off after any system call: reopened, all that was acknowledged is there and nothing is damaged.

LMDB writes by its own C code, in which nothing can be recorded here: its file is taken as it is when a call has
returned (``sync=True``: its commit is on disk then; the pages of the one before stay until the new root is there, so
that a cut leaves the old state or the new one). Real processes are killed inside its commits in test_recent_sigkill
and test_sigkill.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.units import NEVER
from thinrow.examples.log import ImpressionLog
from thinrow.examples.records import Impressions
from thinrow.history.archive.verify import verify_generation
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema, FieldSpec, Trait
from thinrow.storage.objects import LocalObjects
from thinrow.testing.power_cut import Recorder

SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "item"),))
EXAMPLES = ExampleSchema(
    context=(), candidates=(FieldSpec("product", "int64"),), item="product", outcomes=(("click", 10),)
)


def table(first: int, n: int) -> pa.Table:
    k = first + np.arange(n)
    return pa.table({"user_id": k % 5, "event_ts": k, "item": k})


def record(root: Path) -> Recorder:
    """A day of a store. A mark ("n", n) says that items 0 to n - 1 were acknowledged; ("try", n), that they are on
    the way; ("log", n), that n requests were logged."""
    recent = root / "store" / "recent" / "data.mdb"
    with Recorder(root) as disk, HistoryStore.create(root / "store", SCHEMA, 2) as store:
        write: Callable[..., Any] = store.recent._write  # type: ignore[attr-defined]

        def kept(work: Any) -> Any:
            result = write(work)
            disk.keep(recent)
            return result

        store.recent._write = kept  # type: ignore[attr-defined]
        disk.keep(recent)
        disk.mark(("n", 0))
        log = ImpressionLog(root / "log", SCHEMA, EXAMPLES)
        n = logged = 0

        def take(do: Callable[[pa.Table], Any], more: int) -> None:
            nonlocal n
            disk.mark(("try", n + more))
            do(table(n, more))
            n += more
            disk.mark(("n", n))

        take(store.append, 20)
        store.compact()
        take(store.append, 7)
        take(store.bulk_load, 30)
        store.compact()
        for k in range(2):
            taken = store.snapshot(store.users(), 1000 + k)
            ids = 10 * k + np.arange(len(taken.requests.users))
            log.append(Impressions.of(EXAMPLES, ids, taken, candidates={"product": [[1]] * len(ids)}))
            logged += len(ids)
            disk.mark(("log", logged))
        del taken
        store.collect_garbage(keep=1, grace_s=0)
        take(store.append, 5)
        store.compact(full=True)
        store.collect_garbage(keep=1, grace_s=0)
        store.rebucket()
        store.collect_garbage(keep=1, grace_s=0)
    return disk


def check(root: Path, marks: list[Any]) -> None:
    acknowledged = [m[1] for m in marks if m[0] == "n"]
    if not acknowledged:
        # Not created yet: it can be, unless it is there already.
        if not HistoryStore.exists(root / "store"):
            HistoryStore.create(root / "store", SCHEMA, 2).close()
        return
    tried = max([m[1] for m in marks if m[0] == "try"], default=0)
    with HistoryStore.open(root / "store") as store:
        held = sorted(store.read(store.users(), NEVER - 1).histories.to_jagged("item").values.tolist())
        assert held in ([*range(acknowledged[-1])], [*range(tried)])
        assert verify_generation(store.pin()) == []
        assert store.verify_recent() == []
        store.append(table(len(held), 10))
        store.compact(full=True)
        assert store.pin().n_rows == len(held) + 10
        assert verify_generation(store.pin()) == []
        store.collect_garbage(keep=1, grace_s=0)
        assert store.pin().n_rows == len(held) + 10
    logged = max([m[1] for m in marks if m[0] == "log"], default=0)
    if logged:
        found = sum(len(part) for part in ImpressionLog(root / "log", SCHEMA, EXAMPLES).scan())
        assert found in (logged, logged + 5)


def cut_everywhere(tmp_path: Path, every: int, torn: int) -> int:
    disk = record(tmp_path / "disk")
    assert len(disk.operations) > 200
    cuts = 0
    for n in [*range(0, len(disk.operations), every), len(disk.operations)]:
        for after in disk.cuts(n, random.Random(n), torn):
            after.write(tmp_path / "disk", tmp_path / "after")
            check(tmp_path / "after", after.marks)
            shutil.rmtree(tmp_path / "after", ignore_errors=True)
            cuts += 1
    return cuts


def test_cut_off_after_some_calls(tmp_path: Path) -> None:
    cut_everywhere(tmp_path, every=421, torn=0)


@pytest.mark.slow
def test_cut_off_after_any_call(tmp_path: Path) -> None:
    print(cut_everywhere(tmp_path, every=1, torn=2), "cuts")


def test_the_simulation_finds_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an fsync of the data, a cut leaves a name with nothing behind it."""
    from thinrow.storage import objects

    def lost(missing: str) -> bool:
        root = tmp_path / missing
        root.mkdir()
        with monkeypatch.context() as patch, Recorder(root) as disk:
            if missing == "data":
                real = objects.os.fsync
                patch.setattr(objects.os, "fsync", lambda fd: None if fd in data_files(disk) else real(fd))
            elif missing == "name":
                patch.setattr(objects, "sync_directory", lambda path: None)
            LocalObjects(root).put("a", b"data")
            disk.mark("put")
        ends = [after.files for n in range(len(disk.operations) + 1) for after in disk.cuts(n, random.Random(n))]
        torn = any(files.get(root / "a", b"data") != b"data" for files in ends)
        return torn or any(root / "a" not in f for f in list(ends)[-5:])

    def data_files(disk: Recorder) -> list[int]:
        return [fd for fd, number in disk._open.items() if isinstance(number, int)]

    assert not lost("nothing")
    assert lost("data")
    assert lost("name")
