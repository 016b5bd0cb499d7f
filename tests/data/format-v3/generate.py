"""Makes the files beside it: a small archive of format version 3 with patches of every form, and what it must read as.

Run once, with the release that introduced the format; never again for the same version. Every later release must read
these files (tests/unit/history/test_format_v3.py).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from thinrow.history.archive.generation import Archive
from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import read_everything
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.storage.objects import LocalObjects

HERE = Path(__file__).parent
N = 1_600
SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "dwell", Trait.NUMERIC, "int32", "context"),
        ColumnSpec(3, "clicks", Trait.NUMERIC, "int64", "context"),
        ColumnSpec(4, "price", Trait.NUMERIC, "float32", "price"),
        ColumnSpec(5, "coupon", Trait.ID, "int64", "price", nullable=True),
        ColumnSpec(6, "views", Trait.NUMERIC, "int32", "context"),
        ColumnSpec(7, "shop", Trait.TEXT, "string", "context"),
    )
)


def events() -> pa.Table:
    """Users of a few to some hundred events."""
    rng = np.random.default_rng(6)
    common = rng.integers(0, 1 << 40, 60)
    gaps = np.where(rng.random(N) < 0.3, 0, rng.exponential(90_000, N)).astype(np.int64)
    tails = 1 << np.minimum(rng.geometric(0.3, N) + 3, 30)
    return pa.table(
        {
            "user_id": np.minimum(rng.geometric(0.6, N), 5),
            "event_ts": 1_700_000_000_000 + np.cumsum(gaps),
            "item": np.where(
                rng.random(N) < 0.65, common[np.minimum(rng.geometric(0.2, N), 59)], rng.integers(0, 1 << 40, N)
            ),
            "dwell": rng.integers(0, tails).astype(np.int32),
            "clicks": np.where(rng.random(N) < 0.4, 0, rng.integers(0, tails)),
            "price": (np.round(rng.lognormal(2, 1, N), 2)).astype(np.float32),
            "coupon": pa.array(rng.integers(0, tails), mask=rng.random(N) < 0.6),
            "views": np.where(rng.random(N) < 0.4, 0, rng.integers(1 << 19, 1 << 20, N)).astype(np.int32),
            "shop": [f"shop {int(k)}" for k in np.minimum(rng.geometric(0.25, N), 70)],
        }
    )


def contents(archive: Archive) -> dict[str, Any]:
    """Everything that the newest generation holds, as JSON: keys of each event and every column."""
    generation = archive.pin()
    columns = [c for c in stored_columns(generation.schema) if c.group != "keys"]
    held = read_everything(generation, generation.users(), columns, ReadStats())
    return {
        "users": held.users.tolist(),
        "offsets": held.offsets.tolist(),
        "event_ts": held.event_ts.tolist(),
        "arrival": held.arrival.tolist(),
        "columns": {n: c.to_arrow().to_pylist() for n, c in held.columns.items()},
    }


def main() -> None:
    """Write ``archive``: one segment."""
    target = HERE / "archive"
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        with HistoryStore.create(Path(folder) / "store", SCHEMA, n_buckets=1) as store:
            store.append(events())
            store.compact()
            live, newest = [info.name for _, info in store.pin().segments], store.pin().number
        for name in [*live, f"manifests/{newest:020d}.json"]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder) / "store" / "archive" / name, target / name)
    expected = contents(Archive(LocalObjects(target)))
    (HERE / "archive.json").write_text(json.dumps(expected, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
