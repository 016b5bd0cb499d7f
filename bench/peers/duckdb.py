"""DuckDB: a table sorted by (user, time) in a database file, range-joined with the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from bench.datagen.datasets import Histories, Work
from bench.datagen.requests import Batch
from bench.peers.peer import Out, Peer, tree_bytes


class DuckDb(Peer):
    """``user_id = user_id and place >= start and place < stop``: where newest-n begins is given to it."""

    name: ClassVar[str] = "duckdb"
    package: ClassVar[str | None] = "duckdb"

    def __init__(self, work: Work, data: Histories) -> None:
        """Load the table and open it for reading with one thread."""
        import duckdb

        super().__init__(work, data)
        self.path = work.cached("duckdb", data.parameters, self._build)
        self.db = duckdb.connect(str(self.path), read_only=True, config={"threads": 1})
        names = ", ".join(f"e.{n}" for n in data.columns)
        self.sql = (
            f"select {names} from events e join requests r on e.user_id = r.user_id and e.place >= r.first_place "
            "and e.place < r.last_place order by r.request, e.place"
        )

    def _build(self, path: Path) -> None:
        import duckdb

        events = pa.table({"user_id": self.data.users(), "place": np.arange(self.data.n_events), **self.data.columns})
        db = duckdb.connect(str(path))
        db.register("given", events)
        db.execute("create table events as select * from given order by user_id, place")
        db.close()

    def settings(self) -> dict[str, Any]:
        """How it was tuned."""
        return {
            "threads": 1,
            "layout": "sorted table in a database file",
            "sql": self.sql,
            "bytes": tree_bytes(self.path),
        }

    def read(self, batch: Batch, newest: int | None, out: Out) -> int:
        """Join, then copy the result's columns."""
        start, offsets = batch.cut(newest)
        columns = {"request": np.arange(len(batch)), "user_id": batch.users}
        self.db.register("requests", pa.table(columns | {"first_place": start, "last_place": batch.stop}))
        found = self.db.execute(self.sql).fetchnumpy()
        for name, values in found.items():
            out[name][: len(values)] = values
        return int(offsets[-1])

    def close(self) -> None:
        """Close the database."""
        self.db.close()
