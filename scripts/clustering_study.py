"""What user clustering does to quality: rankers of the demo, with windows of shuffling from a batch to the epoch.

::

    thinrow demo --no-training --out demo-out
    python scripts/clustering_study.py demo-out --windows 64,1024,all --seeds 3

Batches have 64 requests whatever the window, and are read in the same order of blocks; within a block of the window's
size rows are in random order. A line of JSON a run: held-out metrics, and NE of each batch before its step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinrow.dpp import RowFilter, loader
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Archive
from thinrow.history.place import archive_objects
from thinrow.recipes.registry import RECIPES
from thinrow.training import Trainer, evaluate, score

_BATCH, _REQUESTS, _HELD_OUT_MS = 64, 16_500, 42 * 86_400_000


def study(demo: Path, model: str, window: str, seed: int) -> dict[str, Any]:
    """One run: trained once through on the requests of a share of the households, scored on the last six weeks."""
    torch.set_num_threads(1)
    generation = Archive(archive_objects(demo / "store")).pin()
    with ExampleTable.open(demo / "examples") as table:
        times = [
            table.scan_bucket(b, table.snapshot_id, columns=("request_ts",))["request_ts"].to_numpy()
            for b in range(table.n_buckets)
        ]
        request_ts = np.concatenate(times).astype(np.int64)
        cut = int(request_ts.max()) - _HELD_OUT_MS
        share = min(1.0, _REQUESTS / int((request_ts < cut).sum()))
        config = RECIPES[f"{model}_retail_small"]().with_history(128, align=64)
        config = replace(config, seed=seed, rows=RowFilter(until_ms=cut, user_share=share, user_seed=seed))
        trainer, spec = Trainer(config, generation, table, threads=1), config.ranker
        block = -(-len(request_ts) // _BATCH) if window == "all" else int(window) // _BATCH
        trainer.loader = loader(
            generation, table, projection=spec.projection, plan=spec.plan, seed=seed, rows=config.rows, threads=1,
            base_rows=_BATCH, block=block, batch_rows=_BATCH,
        )  # fmt: skip
        result = trainer.run()
        scored = score(spec, trainer.module, generation, table, RowFilter(since_ms=cut), threads=1)
    found = evaluate(scored)
    figures = {"requests": result.examples, "progressive_ne": result.ne, "seconds": round(result.seconds, 1)}
    held_out = {"ne": found.ne, "auc": found.auc, "gauc": found.gauc}
    return {"model": model, "window": window, "seed": seed, **figures, **held_out}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path)
    parser.add_argument("--models", default="hstu,dlrm")
    parser.add_argument("--windows", default="64,256,1024,4096,all", help="requests, multiples of 64, or all")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args(arguments)
    runs = list(product([given.demo], given.models.split(","), given.windows.split(","), range(given.seeds)))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(study, *zip(*runs, strict=True)):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
