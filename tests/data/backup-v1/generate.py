"""Makes the folder ``copies`` beside it: two backups of format 1 of one store, the second one with what came meanwhile.

Run once, with the last release that wrote the format; never again. Every later release must verify and restore both
(tests/unit/history/test_backup_folder.py).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait

HERE = Path(__file__).parent
SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "item"),))


def events(first: int, stop: int) -> pa.Table:
    """Event k, of user k mod 5, has time 1,000 + k and item k."""
    k = np.arange(first, stop)
    return pa.table({"user_id": k % 5, "event_ts": 1_000 + k, "item": k})


def main() -> None:
    """Backup 1: events 0 to 29, ten of them recent; backup 2: events 0 to 49 in a newer generation, and a log."""
    shutil.rmtree(HERE / "copies", ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder, HistoryStore.create(Path(folder) / "store", SCHEMA, 2) as store:
        store.append(events(0, 20))
        store.compact()
        store.append(events(20, 30))
        store.backup(HERE / "copies")
        store.append(events(30, 45))
        store.compact()
        store.append(events(45, 50))
        (store.path / "log").mkdir()
        (store.path / "log" / "1").write_bytes(b"logged")
        store.backup(HERE / "copies")


if __name__ == "__main__":
    main()
