"""Makes the files beside it: two small archives of format version 1, and what they must read as.

Run once, with the release that introduced the format; never again for the same version. Every later release must read
these files (tests/unit/history/test_format_v1.py).
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
N = 3_000


def schema(kind: str) -> EventSchema:
    """Every dtype, every codec."""
    columns = (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "kind", Trait.CATEGORICAL, "string", "item", nullable=True),
        ColumnSpec(3, "note", Trait.TEXT, "string", "text"),
        ColumnSpec(4, "raw", Trait.TEXT, "binary", "text", nullable=True),
        ColumnSpec(5, "price", Trait.NUMERIC, "float32", "price", nullable=True),
        ColumnSpec(6, "noise", Trait.NUMERIC, "float64", "price"),
        ColumnSpec(7, "small", Trait.CATEGORICAL, "int8", "context"),
        ColumnSpec(8, "medium", Trait.CATEGORICAL, "int16", "context"),
        ColumnSpec(9, "constant", Trait.CATEGORICAL, "int32", "context"),
        ColumnSpec(10, "zero", Trait.CATEGORICAL, "int32", "context"),
    )
    return EventSchema(
        columns,
        user_kind=kind,  # type: ignore[arg-type]
        event_id_column="event_id",
        event_id_dtype="int64" if kind == "int64" else "string",
        supersedes_column="supersedes",
    )


def events(kind: str) -> pa.Table:
    """Users of 1 to 1,500 events, ties, late events and corrections."""
    rng = np.random.default_rng(1)
    who = np.minimum(rng.geometric(0.3, N) - 1, 9)
    ids = np.arange(N)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    corrects: list[int | None] = []
    for i, u in enumerate(who.tolist()):
        corrects.append(last.get(u) if i % 97 == 0 else first.get(u) if i % 101 == 0 else None)
        last[u] = i
        first.setdefault(u, i)
    as_id = (lambda v: v) if kind == "int64" else (lambda v: None if v is None else f"event-{v}")
    return pa.table(
        {
            "user_id": pa.array([int(u) * 7 - 21 if kind == "int64" else f"user-{u}-ü" for u in who.tolist()]),
            "event_ts": 1_500_000_000_000 + np.maximum(np.arange(N) // 3 * 60_000 + rng.integers(-9, 2, N) * 30_000, 0),
            "event_id": pa.array([as_id(int(v)) for v in ids]),
            "supersedes": pa.array([as_id(v) for v in corrects], pa.int64() if kind == "int64" else pa.string()),
            "item": rng.zipf(1.3, N) % 100_003,
            "kind": pa.array([None if i % 11 == 0 else f"kind {i % 5}" for i in range(N)]),
            "note": [f"note {i} " + "x" * (i % 40) for i in range(N)],
            "raw": pa.array([None if i % 7 == 0 else bytes([i % 256]) * (i % 9) for i in range(N)], pa.binary()),
            "price": pa.array([None if i % 13 == 0 else i % 400 / 4 for i in range(N)], pa.float32()),
            "noise": rng.normal(size=N),
            "small": (np.arange(N) % 3).astype(np.int8),
            "medium": rng.integers(-500, 500, N).astype(np.int16),
            "constant": np.full(N, 42, np.int32),
            "zero": np.zeros(N, np.int32),
        }
    )


def contents(archive: Archive) -> dict[str, Any]:
    """Everything that the newest generation holds, as JSON: keys of each event and every column."""
    generation = archive.pin()
    columns = [c for c in stored_columns(generation.schema) if c.group != "keys"]
    keys = [generation.segment(i).pieces for i in range(len(generation.segments))]
    users = np.unique(np.concatenate([p.keys() for p in keys]))
    held = read_everything(generation, users, columns, ReadStats())
    hidden = [None if h == NEVER else h for h in held.hidden_from.tolist()]
    values = {n: c.to_arrow().to_pylist() for n, c in held.columns.items()}
    values["raw"] = [None if v is None else v.hex() for v in values["raw"]]
    return {
        "users": users.tolist(),
        "offsets": held.offsets.tolist(),
        "event_ts": held.event_ts.tolist(),
        "arrival": held.arrival.tolist(),
        "hidden_from": hidden,
        "columns": values,
    }


def main() -> None:
    """Write ``int64`` and ``string``: several segments a bucket, a hide-list among them."""
    for kind in ("int64", "string"):
        target = HERE / kind
        shutil.rmtree(target, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            table = events(kind)
            with HistoryStore.create(Path(folder) / "store", schema(kind), n_buckets=2) as store:
                for a, b in ((0, 2_500), (2_500, 2_900), (2_900, N)):
                    store.append(table.slice(a, b - a))
                    store.compact()
                live = {info.name for _, info in store.pin().segments}
                newest = store.pin().number
            archive = Path(folder) / "store" / "archive"
            for name in [*live, f"manifests/{newest:020d}.json"]:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(archive / name, target / name)
        expected = contents(Archive(LocalObjects(target)))
        (HERE / f"{kind}.json").write_text(json.dumps(expected, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
