"""Makes the files beside it: a small archive of format version 2 with every trait and codec, and what it must read as.

Run once, with the release that introduced the format; never again for the same version. Every later release must read
these files (tests/unit/history/test_format_v2.py).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from thinrow.core.units import NEVER
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.window import read_everything
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.storage.objects import LocalObjects

HERE = Path(__file__).parent
N = 900
SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "session", Trait.ID, "int64", "item"),
        ColumnSpec(3, "discount", Trait.NUMERIC, "int32", "price"),
        ColumnSpec(4, "coupon", Trait.ID, "int64", "price", nullable=True),
        ColumnSpec(5, "price", Trait.NUMERIC, "float32", "price"),
        ColumnSpec(6, "cost", Trait.NUMERIC, "float64", "price", nullable=True),
        ColumnSpec(7, "flags", Trait.BITMAP, "int16", "context"),
        ColumnSpec(8, "seen", Trait.ID_LIST, "int32", "lists"),
        ColumnSpec(9, "tags", Trait.ID_LIST, "string", "lists", nullable=True),
        ColumnSpec(10, "spot", Trait.VECTOR, "float32", "lists", nullable=True, size=2),
        ColumnSpec(11, "kind", Trait.CATEGORICAL, "string", "context", nullable=True),
        ColumnSpec(12, "note", Trait.TEXT, "binary", "text"),
        ColumnSpec(13, "at", Trait.TIMESTAMP, "int64", "context"),
    )
)


def events() -> pa.Table:
    """Users of a few to some hundred events, in two appends."""
    rng = np.random.default_rng(4)
    common, times = rng.integers(0, 1 << 40, 30), 1_700_000_000_000 + np.arange(N) * 1_000
    return pa.table(
        {
            "user_id": np.minimum(rng.geometric(0.7, N), 4),
            "event_ts": times + rng.integers(-5, 2, N) * 1_000,
            "item": np.where(rng.random(N) < 0.7, rng.choice(common, N), rng.integers(0, 1 << 40, N)),
            "session": np.repeat(rng.integers(0, 1 << 60, N), 60)[:N],
            "discount": np.where(rng.random(N) < 0.9, 0, rng.integers(0, 1 << 20, N)).astype(np.int32),
            "coupon": pa.array(rng.integers(0, 1 << 50, N), mask=rng.random(N) < 0.9),
            "price": (np.round(rng.random(N) * 90, 2)).astype(np.float32),
            "cost": pa.array(np.round(rng.normal(0, 9, N), 1), mask=rng.random(N) < 0.2),
            "flags": rng.integers(-(1 << 15), 1 << 15, N).astype(np.int16),
            "seen": pa.array([list(range(i % 7, i % 7 + i % 4)) for i in range(N)], pa.list_(pa.int32())),
            "tags": pa.array([None if i % 6 == 0 else ["", "ü", f"t{i % 9}"][: i % 4] for i in range(N)]),
            "spot": pa.array([None if i % 5 == 0 else [i / 2, -0.0] for i in range(N)], pa.list_(pa.float32(), 2)),
            "kind": pa.array([None if i % 11 == 0 else f"kind {i % 5}" for i in range(N)]),
            "note": pa.array([f"note {i}".encode() * (i % 3) for i in range(N)], pa.binary()),
            "at": times - 777,
        }
    )


def contents(archive: Archive) -> dict[str, Any]:
    """Everything that the newest generation holds, as JSON: keys of each event and every column."""
    generation = archive.pin()
    columns = [c for c in stored_columns(generation.schema) if c.group != "keys"]
    held = read_everything(generation, generation.users(), columns, ReadStats())
    values = {n: c.to_arrow().to_pylist() for n, c in held.columns.items()}
    values["note"] = [v.hex() for v in values["note"]]
    return {
        "users": held.users.tolist(),
        "offsets": held.offsets.tolist(),
        "event_ts": held.event_ts.tolist(),
        "arrival": held.arrival.tolist(),
        "hidden_from": [None if h == NEVER else h for h in held.hidden_from.tolist()],
        "columns": values,
    }


def main() -> None:
    """Write ``archive``: two segments of one bucket."""
    target, table = HERE / "archive", events()
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        with HistoryStore.create(Path(folder) / "store", SCHEMA, n_buckets=1) as store:
            for a, b in ((0, N - 50), (N - 50, N)):
                store.append(table.slice(a, b - a))
                store.compact()
            live = {info.name for _, info in store.pin().segments}
            newest = store.pin().number
        for name in [*live, f"manifests/{newest:020d}.json"]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder) / "store" / "archive" / name, target / name)
    expected = contents(Archive(LocalObjects(target)))
    (HERE / "archive.json").write_text(json.dumps(expected, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
