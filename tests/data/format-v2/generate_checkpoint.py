"""Makes the folders ``checkpoints`` and ``exports`` beside it: checkpoints of format version 2 (two shards, and a delta
on them, with a budget, Adagrad and evicted keys), and exports of version 1 in each type, with a delta; and
``checkpoints.json``, the state of each shard at each step.

Run once, with the release that introduced the formats; never again for the same versions. Every later release must read
them (tests/unit/checkpoints/test_format_v2.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thinrow.checkpoints import commit, commit_export, export_shard, save_shard, version_of
from thinrow.core.routing import Routing
from thinrow.embeddings import Budget, DynamicTable, SparseAdagrad
from thinrow.embeddings.states import prefixed

ROUTING = Routing((0, 3 << 62))
TYPES = ("float32", "float16", "int8")


def steps() -> Iterator[tuple[list[DynamicTable], list[dict[str, Any]] | None]]:
    """The tables of two shards after each of two steps, and what changed in the second."""
    tables = [DynamicTable(3, seed=4, budget=Budget(max_rows=12, min_count=1, max_age=2)) for _ in range(2)]
    optimizer = SparseAdagrad(*tables, lr=0.25)
    changes = [table.track() for table in tables]
    for step in (1, 2, 3, 4):
        keys = np.arange(step * 4 - 20, step * 4 - 10)
        for shard, table in enumerate(tables):
            mine = keys[ROUTING.shards(keys) == shard]
            table.add_gradient(table.rows(mine, insert=True), np.full((len(mine), 3), step, np.float32))
        optimizer.step()
        if step == 2:
            yield tables, None
            for noted in changes:
                noted.mark()
    yield tables, [table.delta(noted) for table, noted in zip(tables, changes, strict=True)]


def main(folder: Path) -> None:
    base, bases, expected = None, dict.fromkeys(TYPES), []
    for step, (tables, deltas) in enumerate(steps(), 1):
        states = [table.state() for table in tables] if deltas is None else deltas
        for shard, state in enumerate(states):
            save_shard(folder / "checkpoints", step, shard, ROUTING, tensors=prefixed("items.", state))
            for dtype in TYPES:
                export_shard(folder / "exports" / dtype, step, shard, ROUTING, {"items.": state}, dtype=dtype)
        tensors, meta = {"w": np.arange(4.0).reshape(2, 2)}, {"loss": 0.5}
        base = version_of(commit(folder / "checkpoints", step, ROUTING, tensors=tensors, meta=meta, base=base))
        for dtype in TYPES:
            default = {"items.": np.array([1, 0, -1])}
            path = commit_export(folder / "exports" / dtype, step, ROUTING, base=bases[dtype], default=default)
            bases[dtype] = version_of(path)
        expected.append([{n: [a.dtype.name, a.tolist()] for n, a in t.state().items()} for t in tables])
    (folder / "checkpoints.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(__file__).parent)
