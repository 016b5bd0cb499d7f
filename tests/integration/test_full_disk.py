"""A full disk: each writing operation fails with StoreError, loses nothing, and works when there is room again.

The limit on the size of a file (RLIMIT_FSIZE) stands for the full disk: the system then refuses to write on, in the
middle of a file, whoever writes it, LMDB included. Run as a script, this file is the process under the limit.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from thinrow.core.errors import StoreError
from thinrow.core.units import NEVER
from thinrow.history.archive.verify import verify_generation
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait

SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "item"),))


def table(first: int, n: int) -> pa.Table:
    k = first + np.arange(n)
    return pa.table({"user_id": k % 50, "event_ts": k, "item": k * 1_000_003 % 999_983})


def limit(n_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


def contents(store: HistoryStore) -> tuple[int, int]:
    items = store.read(store.users(), NEVER - 1).histories.to_jagged("item").values
    return len(items), int(items.sum())


def refused(store: HistoryStore, n_bytes: int, do: Callable[[], Any], name: str) -> None:
    """``do`` under the limit: StoreError, and the store is as it was."""
    before = contents(store)
    limit(n_bytes)
    try:
        do()
    except StoreError:
        pass
    else:
        raise AssertionError(f"{name} did not notice")
    finally:
        limit(resource.RLIM_INFINITY)
    assert contents(store) == before, name
    assert verify_generation(store.pin()) == [], name
    assert store.verify_recent() == [], name


def work(root: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with HistoryStore.create(root / "store", SCHEMA, 2) as store:
        store.append(table(0, 3_000))
        store.compact()
        store.append(table(3_000, 500))
        n = 3_500
        size = (root / "store" / "recent" / "data.mdb").stat().st_size
        steps: list[tuple[str, int, Callable[[], Any], int]] = [
            ("append", size, lambda: store.append(table(n, 20_000)), 20_000),
            ("compact", 2_000, store.compact, 0),
            ("bulk load", 2_000, lambda: store.bulk_load(table(n, 5_000)), 5_000),
            ("full compaction", 2_000, lambda: store.compact(full=True), 0),
            ("rebucket", 2_000, store.rebucket, 0),
            ("backup", 20_000, lambda: store.backup(root / "copy"), 0),
        ]
        for name, n_bytes, do, more in steps:
            refused(store, n_bytes, do, name)
            # Where a manifest alone is refused, everything before it was in vain, and nothing else.
            if name not in ("append", "backup"):
                refused(store, 200, do, f"{name}, early")
            do()
            n += more
            assert contents(store)[0] == n, name
            print(name, flush=True)
        # Collecting needs no room: it makes some.
        limit(10)
        assert store.collect_garbage(keep=1, grace_s=0).bytes > 10_000
        limit(resource.RLIM_INFINITY)
        assert contents(store)[0] == n
        live = {info.name for g in store.archive.numbers() for _, info in store.archive.generation(g).segments}
        assert set(store.archive.objects.list("segments/")) == live
    limit(30_000)
    try:
        HistoryStore.restore(root / "copy", root / "new")
    except StoreError:
        pass
    else:
        raise AssertionError("restore did not notice")
    limit(resource.RLIM_INFINITY)
    assert not HistoryStore.exists(root / "new")
    HistoryStore.restore(root / "copy", root / "new")
    with HistoryStore.open(root / "new") as store:
        assert contents(store)[0] == n
    print("restore", flush=True)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ["append", "compact", "bulk load", "full compaction", "rebucket", "backup", "restore"]
    assert done.stdout.split("\n") == [*names, ""]


if __name__ == "__main__":
    work(Path(sys.argv[1]))
