"""Bytes of a unique event, index included, against what else would hold the same events.

- ``sorted_fat_rows``: Parquet, K = 20 requests a user at uniform times in the later half, sorted by (user, time),
  plain, zstd-3; each row holds its whole history. Of some users, and their unique events.
- ``vortex``: the writer's default, sorted by (user, time), without the column that says whose an event is.
- ``parquet``: an event table sorted by (user, time), zstd-9, dictionaries and row groups as pyarrow chooses.

Ours holds more than they do: arrival numbers, and digests and CRCs by stripe. Keys end in ``_bytes``: ours over theirs.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.datagen.datasets import Histories, Work, load
from bench.datagen.requests import clustered_batches, unique_events
from bench.harness import Options, Result
from bench.peers.fat_rows import SortedFatRows
from bench.peers.peer import tree_bytes
from bench.peers.thinrow import Thinrow
from bench.peers.vortex import VortexIndices


def run(options: Options) -> Result:
    """One measurement: sizes do not vary."""
    with Work(options.work) as work:
        data = load(options.data, work, quick=options.quick, git_file=options.git_file)
        result = Result("storage", dict(data.parameters))
        batches = clustered_batches(data, options.quick)
        fat = SortedFatRows(work, data, batches, None)
        sizes = {
            "thinrow": Thinrow(work, data).generation.bytes / data.n_events,
            "sorted_fat_rows": tree_bytes(fat.path) / unique_events(batches),
            "parquet": tree_bytes(_event_table(work, data)) / data.n_events,
            "in_memory": float(data.row_bytes),
        }
        if VortexIndices.missing():
            result.skip("vortex", "vortex is not installed")
        else:
            sizes["vortex"] = tree_bytes(VortexIndices(work, data).path) / data.n_events
        result.figures["bytes_an_event"] = {n: round(s, 3) for n, s in sizes.items()}
        for peer in ("sorted_fat_rows", "vortex", "parquet"):
            if peer in sizes:
                result.ratios[f"vs_{peer}_bytes"] = sizes["thinrow"] / sizes[peer]
    return result


def _event_table(work: Work, data: Histories) -> Path:
    table = pa.table({"user_id": data.users(), **data.columns})

    def write(path: Path) -> None:
        pq.write_table(table, path, compression="zstd", compression_level=9)

    return work.cached("event_table", data.parameters, write)
