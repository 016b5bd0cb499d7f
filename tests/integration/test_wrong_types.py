"""Values of wrong types, and numbers beyond their bounds, at every public call: an error of thinrow's that says what
was passed, never one from far inside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import thinrow
from thinrow.core.check import checked, integer, seconds
from thinrow.core.errors import InputError, ThinrowError
from thinrow.examples.export import export_events
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

TABLE = pa.table({"user": [1, 1, 2], "ts": [10, 20, 30], "item": [5, 6, 7], "kind": ["a", "b", "a"]})
SCHEMA = EventSchema.infer(TABLE.schema, user="user", time="ts")


WRONG: dict[str, Any] = {
    "bytes": b"ab",
    "float": 1.5,
    "nan": float("nan"),
    "negative": -1,
    "huge": 2**70,
    "floats": np.array([1.5, np.nan]),
    "matrix": np.zeros((2, 2)),
    "pandas": pd.DataFrame({"a": [1]}),
    "polars": pl.Series([1.5, 2.0]),
    "arrow": pa.chunked_array([[1.5]]),
    "dict of numbers": {1: 2},
    "list of nothing": [None],
    "object": object(),
    "nul": "a\0b",
}
#: Arguments for which one of the values is right, or is looked at only later.
RIGHT = {
    ("grace_s", "float"),
    ("evolve.drop", "nul"),
    ("users", "negative"),
    ("erase.users", "negative"),
    ("events.user", "negative"),
    ("to_arrow.users", "negative"),
    ("request_ts", "negative"),
    ("request_ts", "matrix"),
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HistoryStore]:
    with thinrow.create(tmp_path_factory.mktemp("wrong") / "store", SCHEMA, 2) as made:
        made.append(TABLE)
        made.compact()
        yield made


CALLS: dict[str, Callable[[HistoryStore, Any, Path], object]] = {
    "create.path": lambda s, v, p: thinrow.create(v, SCHEMA),
    "create.schema": lambda s, v, p: thinrow.create(p, v),
    "create.n_buckets": lambda s, v, p: thinrow.create(p, SCHEMA, v),
    "create.archive": lambda s, v, p: thinrow.create(p, SCHEMA, archive=v),
    "create.cache_bytes": lambda s, v, p: thinrow.create(p, SCHEMA, cache_bytes=v),
    "open": lambda s, v, p: thinrow.open_store(v),
    "append": lambda s, v, p: s.append(v),
    "evolve.add": lambda s, v, p: s.evolve(add=v),
    "evolve.add.one": lambda s, v, p: s.evolve(add={"more": v}),
    "evolve.drop": lambda s, v, p: s.evolve(drop=v),
    "evolve.rename": lambda s, v, p: s.evolve(rename=v),
    "evolve.widen": lambda s, v, p: s.evolve(widen=v),
    "backfill.column": lambda s, v, p: s.backfill(v, TABLE),
    "backfill.table": lambda s, v, p: s.backfill("item", v),
    "bulk_load.source": lambda s, v, p: s.bulk_load(v),
    "bulk_load.load_id": lambda s, v, p: s.bulk_load(TABLE, load_id=v),
    "bulk_load.memory_bytes": lambda s, v, p: s.bulk_load(TABLE, memory_bytes=v),
    "bulk_load.engine": lambda s, v, p: s.bulk_load(TABLE, engine=v),
    "compact.full": lambda s, v, p: s.compact(full=v),
    "compact.engine": lambda s, v, p: s.compact(engine=v),
    "rebucket": lambda s, v, p: s.rebucket(v),
    "backup.folder": lambda s, v, p: s.backup(v),
    "backup.keep": lambda s, v, p: s.backup(p, keep=v),
    "restore.folder": lambda s, v, p: HistoryStore.restore(v, p),
    "restore.number": lambda s, v, p: HistoryStore.restore(p, p / "new", v),
    "collect_garbage.keep": lambda s, v, p: s.collect_garbage(keep=v),
    "grace_s": lambda s, v, p: s.collect_garbage(grace_s=v),
    "erase.users": lambda s, v, p: s.erase(v, dry_run=True),
    "erase.events": lambda s, v, p: s.erase((), v, dry_run=True),
    "events.user": lambda s, v, p: s.erase((), [thinrow.EventsOf(v, arrivals=(1,))], dry_run=True),
    "events.arrivals": lambda s, v, p: s.erase((), [thinrow.EventsOf(1, arrivals=v)], dry_run=True),
    "events.event_ids": lambda s, v, p: s.erase((), [thinrow.EventsOf(1, event_ids=v)], dry_run=True),
    "retain": lambda s, v, p: s.retain(v, dry_run=True),
    "retention": lambda s, v, p: thinrow.Retention(max_events=v),
    "users": lambda s, v, p: s.read(v, 100),
    "request_ts": lambda s, v, p: s.snapshot([1, 2], v),
    "read.projection": lambda s, v, p: s.read([1], 100, v),
    "columns": lambda s, v, p: s.read([1], 100, Projection(columns=v)),
    "max_len": lambda s, v, p: Projection(max_len=v),
    "horizon_ms": lambda s, v, p: Projection(horizon_ms=v),
    "align": lambda s, v, p: Projection(max_len=9, align=v),
    "codes": lambda s, v, p: s.read([1], 100, Projection(codes=v)),
    "reconstruct.generation": lambda s, v, p: thinrow.reconstruct(v, s.snapshot([1], 9).requests),
    "reconstruct.batch": lambda s, v, p: thinrow.reconstruct(s.pin(), v),
    "reconstruct.projection": lambda s, v, p: thinrow.reconstruct(s.pin(), s.snapshot([1], 9).requests, v),
    "on_missing": lambda s, v, p: thinrow.reconstruct(s.pin(), s.snapshot([1], 9).requests, on_missing=v),
    "to_arrow.users": lambda s, v, p: s.to_arrow(v).read_all(),
    "to_arrow.projection": lambda s, v, p: s.pin().to_arrow(None, v).read_all(),
    "at": lambda s, v, p: s.to_arrow(at=v).read_all(),
    "batch_rows": lambda s, v, p: s.pin().to_arrow(batch_rows=v).read_all(),
    "take": lambda s, v, p: s.snapshot([1, 2], 9).requests.take(v),
    "concat": lambda s, v, p: type(s.snapshot([1], 9).requests).concat(v),
    "to_jagged": lambda s, v, p: s.read([1], 9).histories.to_jagged(v),
    "width": lambda s, v, p: s.read([1], 9).histories.to_padded("item", v),
    "select": lambda s, v, p: s.read([1], 9).histories.select(v),
    "generation": lambda s, v, p: s.pin().at(v),
    "schema_at": lambda s, v, p: s.pin().schema_at(v),
    "export.store": lambda s, v, p: export_events(v, p),
    "export.path": lambda s, v, p: export_events(s, v),
    "infer": lambda s, v, p: EventSchema.infer(v, user="user", time="ts"),
    "infer.user": lambda s, v, p: EventSchema.infer(TABLE.schema, user=v, time="ts"),
    "from_dict": lambda s, v, p: EventSchema.from_dict(v),
    "id": lambda s, v, p: ColumnSpec(v, "a", Trait.ID, "int64", "g"),
    "trait": lambda s, v, p: ColumnSpec(1, "a", v, "int64", "g"),
    "dtype": lambda s, v, p: ColumnSpec(1, "a", Trait.ID, v, "g"),
    "schema.columns": lambda s, v, p: EventSchema(v),
}


@pytest.mark.parametrize("call", CALLS)
def test_wrong_values_are_named_where_they_enter(call: str, store: HistoryStore, tmp_path: Path) -> None:
    passed = []
    for name, value in WRONG.items():
        with contextlib.suppress(ThinrowError):
            CALLS[call](store, value, tmp_path / "new")
            passed.append(name)
    assert [n for n in passed if (call, n) not in RIGHT] == []
    assert store.pin().n_rows == 3


def test_what_is_given_is_checked_and_a_default_is_not() -> None:
    @checked(keep=integer(1, 9), wait=seconds)
    def call(keep: int | None = None, *, wait: float = 0.0) -> tuple[int | None, float]:
        return keep, wait

    assert call() == (None, 0.0)
    assert call(None, wait=2) == (None, 2)
    assert call(np.int64(9)) == (9, 0.0)
    for keep in (0, 10):
        with pytest.raises(InputError, match=f"keep={keep}; it must be 1 to 9"):
            call(keep)
    for wrong in (True, "3", 2.0):
        with pytest.raises(InputError, match=r"keep=.*; it must be an integer"):
            call(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="wait=inf"):
        call(wait=float("inf"))
    assert call.__name__ == "call"
