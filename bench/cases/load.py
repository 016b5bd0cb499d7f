"""Bulk load: unsorted Parquet files, larger than memory, become an archive.

- ``thinrow``: ``HistoryStore.bulk_load`` in a process of its own, with 1 GiB of working memory: 100 million events are
  to need less than 2 GB. Where the machine has cgroups (version 1) that this process may use, 2 GB is a hard limit.
- ``duckdb_sort``: DuckDB sorts the same files by (user, time, arrival) into one zstd Parquet file, with a memory limit
  of 2 GB and two threads: the least that a fat-row job must do first.
- ``read``: reading the files, all columns, a batch after another.

Units are events a second, once through. Keys that end in ``_bytes`` are ours over theirs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.datagen.datasets import Work
from bench.harness import Options, Result
from bench.peers.peer import tree_bytes

LIMIT_BYTES = 2_000_000_000
_CHUNK = 1_000_000
_FILE_CHUNKS = 10
_CGROUPS = Path("/sys/fs/cgroup/memory")


def run(options: Options) -> Result:
    """Generate, load, sort, read; each once."""
    n, users = (300_000, 2_000) if options.quick else (100_000_000, 200_000)
    with Work(options.work) as work, tempfile.TemporaryDirectory(dir=work.path) as name:
        folder = Path(name)
        files = folder / "events"
        generate(files, n, users)
        ours = _loaded(folder, files, n)
        theirs = _duckdb(folder, files, n)
        read = _read(files, n)
        result = Result("load", {"events": n, "users": users, "limit_bytes": LIMIT_BYTES})
        result.figures = {
            "input_bytes": tree_bytes(files),
            "thinrow": ours,
            "duckdb_sort": theirs,
            "read": {"events_per_s": read},
        }
        result.ratios = {
            "vs_duckdb_sort": ours["events_per_s"] / theirs["events_per_s"],
            "vs_read": ours["events_per_s"] / read,
            "vs_duckdb_sort_bytes": ours["bytes"] / theirs["bytes"],
        }
        return result


def generate(folder: Path, n: int, users: int, seed: int = 7) -> None:
    """Parquet files of ``n`` unsorted events in the columns of ``bench.datagen.histories``, a chunk at a time."""
    rng = np.random.default_rng(seed)
    weights = rng.lognormal(0.0, 1.2, users)
    bounds = np.cumsum(weights) / weights.sum()
    ids = (np.arange(1_000_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(24)
    folder.mkdir()
    writer, done, number = None, 0, 0
    while done < n:
        rows = min(_CHUNK, n - done)
        event_ts = (1_700_000_000 + rng.integers(0, 365 * 86_400, rows)) * 1000
        late = np.where(rng.random(rows) < 0.15, rng.exponential(86_400_000 * 3, rows), 0).astype(np.int64)
        table = pa.table(
            {
                "user_id": np.minimum(np.searchsorted(bounds, rng.random(rows)), users - 1).astype(np.int64),
                "event_ts": event_ts,
                "arrival_ts": event_ts + late,
                "item": ids[np.minimum(rng.zipf(1.1, rows) - 1, len(ids) - 1)].astype(np.int64),
                "action": np.minimum(rng.geometric(0.4, rows) - 1, 15).astype(np.int8),
                "surface": rng.integers(0, 32, rows).astype(np.int8),
                "dwell": np.minimum(rng.exponential(8_000, rows), 65_000).astype(np.int32),
                "price": (np.round(rng.lognormal(2.0, 1.0, rows) * 100) / 100).astype(np.float32),
            }
        )
        if writer is None:
            writer = pq.ParquetWriter(folder / f"{number:04d}.parquet", table.schema, compression="zstd")
        writer.write_table(table)
        done, number = done + rows, number + 1
        if number % _FILE_CHUNKS == 0 or done >= n:
            writer.close()
            writer = None


def _loaded(folder: Path, files: Path, n: int) -> dict[str, Any]:
    store, group = folder / "store", _cgroup()
    command = [sys.executable, "-m", "bench.cases.load", str(store), str(files)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if group is not None:
        (group / "cgroup.procs").write_text(str(child.pid))
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            peak[0] = max(peak[0], tree_bytes(store) if store.exists() else 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = child.communicate()
    over.set()
    watcher.join()
    held = None if group is None else int((group / "memory.max_usage_in_bytes").read_text())
    if group is not None:
        group.rmdir()
    if child.returncode != 0:
        raise RuntimeError(f"the load ended with status {child.returncode}; 137 or -9 is the memory limit")
    figures = json.loads(out.splitlines()[-1])
    return {
        "events_per_s": n / figures["seconds"],
        "seconds": figures["seconds"],
        "peak_rss_bytes": figures["peak_rss_bytes"],
        "hard_limit": group is not None,
        "cgroup_peak_bytes_with_page_cache": held,
        "peak_disk_bytes": peak[0],
        "bytes": tree_bytes(store / "archive"),
    }


def _cgroup() -> Path | None:
    group = _CGROUPS / f"thinrow-load-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError:
        return None
    return group


def _duckdb(folder: Path, files: Path, n: int) -> dict[str, float]:
    import duckdb

    out = folder / "sorted.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"set memory_limit='2GB'; set threads=2; set temp_directory='{folder / 'spill'}'")
        since = time.perf_counter()
        connection.execute(
            f"copy (select * from '{files}/*.parquet' order by user_id, event_ts, arrival_ts) to '{out}' "
            "(format parquet, compression zstd)"
        )
        return {"events_per_s": n / (time.perf_counter() - since), "bytes": out.stat().st_size}


def _read(files: Path, n: int) -> float:
    since = time.perf_counter()
    rows = 0
    for path in sorted(files.iterdir()):
        with pq.ParquetFile(path) as file:
            rows += sum(batch.num_rows for batch in file.iter_batches(1 << 18))
    assert rows == n
    return n / (time.perf_counter() - since)


def main(store_path: str, files: str) -> None:
    """The load itself, in a process that is measured."""
    from bench.datagen.histories import SCHEMA
    from thinrow.history.store import HistoryStore

    with HistoryStore.create(store_path, SCHEMA, 16) as store:
        since = time.perf_counter()
        store.bulk_load(files)
        seconds = time.perf_counter() - since
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"seconds": seconds, "peak_rss_bytes": peak}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
