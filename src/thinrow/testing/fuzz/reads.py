"""Reads of a part of a store, aimed at what was damaged, so that a try costs what one read of one column does.

Worked example: where a block of ``price`` in user 3's second stripe was damaged, ``aimed`` says 8 times of 20 to read
user 3's ``price`` and nothing else, 6 times that of the requests that user 3 made, and now and then something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from thinrow.core.users import plain
from thinrow.history.archive.find import find_event
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.layout import StoredColumn, stored_columns
from thinrow.history.archive.lookup import look_up
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.verify import verify_generation
from thinrow.history.archive.window import read_everything
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.jagged import Column, Events, Jagged
from thinrow.schema import Projection
from thinrow.schema.event_schema import IDS_GROUP, KEYS_GROUP
from thinrow.testing.fuzz.damage import pick
from thinrow.testing.fuzz.standing import Hit
from thinrow.testing.fuzz.world import World


@dataclass(frozen=True, slots=True)
class Read:
    """One read: of what kind, whose events, which column (None: none but the keys), the newest how many, how old at
    most."""

    kind: str
    user: int = 0
    column: str | None = None
    newest: int | None = None
    horizon: int | None = None

    def __call__(self, generation: Generation, world: World) -> Any:
        """What it finds, as something to compare. Raises as the reader does."""
        return _KINDS[self.kind](self, generation, world)


def aimed(rng: np.random.Generator, hit: Hit, world: World, generation: Generation) -> Read:
    """A read that mostly meets what ``hit`` damaged."""
    user = pick(rng, hit.users) if hit.users else int(rng.integers(len(world.users)))
    columns = {c.name: c for c in stored_columns(generation.schema) if c.group != KEYS_GROUP}
    stored = columns.get(hit.column or "") or pick(rng, list(columns.values()))
    newest, horizon = pick(rng, (None, None, 1, 3, 40, 200)), pick(rng, (None, None, None, 0, 40, 3_000))
    share = rng.random()
    if share < 0.40 or stored.group == IDS_GROUP:
        return Read("find" if stored.group == IDS_GROUP and share < 0.3 else "rows", user, stored.name)
    if share < 0.72:
        return Read("logged", user, stored.name, newest, horizon)
    if share < 0.82:
        return Read("codes" if _is_coded(stored) else "logged", user, stored.name, newest, horizon)
    if share < 0.90:
        return Read("batch", 0, stored.name, newest, horizon)
    if share < 0.94:
        return Read("look up")
    if share < 0.97:
        return Read("arrow", user, stored.name, newest)
    return Read("everything" if share < 0.988 else "verify")


def _is_coded(stored: StoredColumn) -> bool:
    return not stored.ragged and not stored.size and not stored.dtype.startswith("float")


def seen(column: Column | Jagged) -> Any:
    """A column as something to compare, every offset of it followed."""
    if isinstance(column, Jagged):
        return seen(column.column), column.offsets.tobytes()
    if column.dictionary is None and column.offsets is None:
        # By their bits: -0.0 is not 0.0.
        if column.valid is None:
            return column.values.tobytes()
        return column.values[column.valid].tobytes(), column.valid.tobytes()
    array = column.to_arrow()
    array.validate(full=True)
    return array


def contents(events: Events) -> dict[str, Any]:
    """All that was read of some users."""
    found: dict[str, Any] = {f"key {n}": getattr(events, n) for n in ("offsets", "event_ts", "arrival", "hidden_from")}
    found.update({name: seen(column) for name, column in events.columns.items()})
    return found


def _rows(read: Read, generation: Generation, world: World) -> Any:
    columns = [c for c in stored_columns(generation.schema) if c.name == read.column]
    return contents(read_everything(generation, world.users[read.user : read.user + 1], columns, ReadStats()))


_taken: dict[tuple[int, int, bool], RequestBatch] = {}


def _requests_of(world: World, user: int, first: bool) -> RequestBatch:
    """The requests that a user made, or the first of them; worlds live as long as the process."""
    key = id(world), user, first
    if key not in _taken:
        rows = np.flatnonzero(world.batch.users == world.users[user])
        _taken[key] = world.batch.take(rows[:1] if first else rows)
    return _taken[key]


def _logged(read: Read, generation: Generation, world: World) -> Any:
    return _requested(read, generation, _requests_of(world, read.user, read.newest == 1))


def _batch(read: Read, generation: Generation, world: World) -> Any:
    return _requested(read, generation, world.batch)


def _requested(read: Read, generation: Generation, batch: RequestBatch) -> Any:
    columns = () if read.column is None else (read.column,)
    codes = columns if read.kind == "codes" else ()
    projection = Projection(columns=columns, groups=(), max_len=read.newest, horizon_ms=read.horizon, codes=codes)
    histories = reconstruct(generation, batch, projection).histories
    return [seen(histories.to_jagged(n)) for n in ("event_ts", "arrival", *columns)]


def _look_up(read: Read, generation: Generation, world: World) -> list[Any]:
    pieces = look_up(generation, world.users)
    return [np.asarray(generation.users()), pieces.records.tobytes(), pieces.watermark, pieces.hides.tobytes()]


def _find(read: Read, generation: Generation, world: World) -> list[Any]:
    ids = ("4", "77", "x") if world.kind == "int64" else (4, 77, -9)
    return [find_event(generation, plain(world.users[read.user]), i) for i in ids]


def _arrow(read: Read, generation: Generation, world: World) -> Any:
    projection = Projection(columns=() if read.column is None else (read.column,), groups=(), max_len=read.newest)
    users = world.users[read.user : read.user + 1]
    table: pa.Table = generation.to_arrow(users, projection, batch_rows=90).read_all()
    table.validate(full=True)
    return [table.column(i) for i in range(table.num_columns)]


def _everything(read: Read, generation: Generation, world: World) -> dict[str, Any]:
    columns = [c for c in stored_columns(generation.schema) if c.group != KEYS_GROUP]
    return contents(read_everything(generation, world.users, columns, ReadStats()))


def _verify(read: Read, generation: Generation, world: World) -> list[Any]:
    return list(verify_generation(generation))


_KINDS: dict[str, Callable[[Read, Generation, World], Any]] = {
    "rows": _rows,
    "logged": _logged,
    "codes": _logged,
    "batch": _batch,
    "look up": _look_up,
    "find": _find,
    "arrow": _arrow,
    "everything": _everything,
    "verify": _verify,
}
