"""Small sound stores with every trait, codec and kind of file, and what they must read as.

Worked example: ``sound_worlds()[0].files`` are the bytes of a store of integer users: a manifest, segments with
hide-lists, an overlay and a file of tombstones. They are the same bytes in every process, so that the number of a try
says what it damages.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from unittest import mock

import numpy as np
import pyarrow as pa

from thinrow.core.users import Users, as_users
from thinrow.history import backfill as backfill_module
from thinrow.history import buckets as buckets_module
from thinrow.history.archive import encode as encode_module
from thinrow.history.archive.generation import Archive
from thinrow.history.compact import compact
from thinrow.history.erase import EventsOf
from thinrow.history.erasure import erase
from thinrow.history.intake import check_table
from thinrow.history.recent.memory import MemoryRecent
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import take_snapshot
from thinrow.schema import ColumnSpec, EventSchema, Trait
from thinrow.storage.manifest import FORMAT
from thinrow.storage.objects import MemoryObjects
from thinrow.storage.sealed import seal

Files = dict[str, bytes]
Kind = Literal["int64", "string"]

#: Folders of what readers read; pins and journals have names by chance.
_KINDS = ("manifests", "segments", "overlays", "tombstones")
#: Rows of a stripe: enough for values in lanes.
STRIPE_ROWS = 80
COLUMNS = (
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
    ColumnSpec(12, "note", Trait.TEXT, "string", "text", nullable=True),
    ColumnSpec(13, "blob", Trait.TEXT, "binary", "text"),
    ColumnSpec(14, "surface", Trait.CATEGORICAL, "int8", "context"),
)


@dataclass(frozen=True)
class World:
    """A sound store.

    Attributes:
        kind: of its users.
        files: name -> bytes, of all generations.
        live: names that the newest generation needs, its manifest first.
        users: all that hold events.
        batch: requests that were logged while it grew.
    """

    kind: Kind
    files: Files
    live: tuple[str, ...]
    users: Users
    batch: RequestBatch


@cache
def sound_worlds() -> tuple[World, ...]:
    """First one of integer and one of string users, then parts of them that are quicker to read: one segment each, with
    its overlays or without, and with tombstones or without; at last one that nothing was corrected or erased in, as
    reads of a few requests in one call need it. Built once a process, the same bytes each time."""
    whole = _build("int64", _grow), _build("string", _grow)
    return (*whole, *(_part(w, s, s == 1, s == 0) for w in whole for s in range(3)), _build("int64", _grow_plain))


def _part(whole: World, segment: int, overlays: bool, tombstones: bool) -> World:
    """The store of ``whole`` with one segment alone."""
    body = json.loads(whole.files[whole.live[0]])["body"]
    (entry,) = body["segments"][0][segment : segment + 1]
    body["segments"] = [[entry]]
    if not overlays:
        del entry["overlays"]
    if not tombstones:
        del body["tombstones"]
    files = {**whole.files, whole.live[0]: seal(body, FORMAT, "manifest")}
    archive = opened(files)
    users = archive.pin().users()
    recent = MemoryRecent(archive.pin().schema)
    batches = [take_snapshot(archive.pin, recent, users, np.full(len(users), t)).requests for t in (1_500, 9_000)]
    batch = RequestBatch.concat(batches)
    return _world(whole.kind, archive, files, batch)


def opened(files: Files) -> Archive:
    """The archive of some files, in memory."""
    objects = MemoryObjects()
    for name, data in files.items():
        objects.put(name, data)
    return Archive(objects, lambda: 0)


def _world(kind: Kind, archive: Archive, files: Files, batch: RequestBatch) -> World:
    generation = archive.pin()
    live = [f"manifests/{generation.number:020d}.json"]
    live += [name for _, info in generation.segments for name in info.files]
    live += [f.name for f in generation.tombstone_index.files.values()]
    return World(kind, files, tuple(live), generation.users(), batch)


def _build(kind: Kind, grow: Callable[[Kind], World]) -> World:
    names = (f"{i:032x}" for i in itertools.count(1))
    with (
        mock.patch("secrets.token_hex", lambda n: next(names)[-2 * n :]),
        mock.patch.object(buckets_module, "STRIPE_ROWS", STRIPE_ROWS),
        # So that few rows meet the codec of strings that are too many for a dictionary.
        mock.patch.object(encode_module, "_ALWAYS_STRINGS", 3),
    ):
        return grow(kind)


def _schema(kind: Kind) -> EventSchema:
    return EventSchema(
        COLUMNS,
        user_kind=kind,
        event_id_column="event_id",
        event_id_dtype="string" if kind == "int64" else "int64",
        supersedes_column="supersedes",
    )


def _grow_plain(kind: Kind) -> World:
    """Users of up to five stripes each, in one segment."""
    rng, schema, objects = np.random.default_rng(12), _schema(kind), MemoryObjects()
    archive, recent = Archive.create(objects, schema, 1, lambda: 0), MemoryRecent(schema)
    owners = rng.choice(6, 600, p=[0.6, 0.25, 0.12, 0.01, 0.01, 0.01]).tolist()
    events = check_table(_table(rng, kind, (), owners), schema)
    recent.append(events.users, events.event_ts, events.columns, events.event_ids, events.supersedes)
    compact(archive, recent)
    users = archive.pin().users()
    times = [rng.integers(500, 13_000, len(users)) for _ in range(3)]
    taken = [take_snapshot(archive.pin, recent, users, t).requests for t in times]
    files = {n: objects.get(n) for n in objects.list("") if n.split("/")[0] in _KINDS}
    return _world(kind, archive, files, RequestBatch.concat(taken))


def _grow(kind: Kind) -> World:
    rng, schema = np.random.default_rng(11), _schema(kind)
    objects = MemoryObjects()
    archive, recent = Archive.create(objects, schema, 1, lambda: 0), MemoryRecent(schema)
    owners: list[int] = []
    batches: list[RequestBatch] = []
    for n in (60, 200, 50, 8):
        known = list(owners)
        # Users 3 to 5 have a few events each, and so share stripes; the others have many.
        owners += rng.choice(6, n, p=[0.5, 0.3, 0.11, 0.03, 0.03, 0.03]).tolist()
        events = check_table(_table(rng, kind, known, owners, () if n == 60 else (0, 5)), schema)
        recent.append(events.users, events.event_ts, events.columns, events.event_ids, events.supersedes)
        compact(archive, recent)
        if n == 60:
            some = [EventsOf(_user(kind, 0), arrivals=(3, 4))]
            erase(archive, recent, as_users([_user(kind, 5)], kind), some, grace_s=0)
        users = archive.pin().users()
        batches.append(take_snapshot(archive.pin, recent, users, rng.integers(900, 6_000, len(users))).requests)
    _backfill(archive, kind)
    files = {n: objects.get(n) for n in objects.list("") if n.split("/")[0] in _KINDS}
    return _world(kind, archive, files, RequestBatch.concat(batches))


def _user(kind: str, number: int) -> Any:
    return number - 2 if kind == "int64" else f"user {number} é"


def _table(
    rng: np.random.Generator, kind: str, known: Sequence[int], owners: Sequence[int], but: Sequence[int] = ()
) -> pa.Table:
    """One event of each owner after the ``known`` ones, whose ids are their places; every third corrects an older one
    of its user, unless the user is one of ``but``."""
    n, numbers = len(owners) - len(known), range(len(known), len(owners))
    corrects: list[int | None] = [None] * n
    for row in range(0, n, 3):
        mine = [i for i, owner in enumerate(known) if owner == owners[numbers[row]] and owner not in but]
        corrects[row] = int(rng.choice(mine)) if mine else None
    text = kind == "int64"
    words = ["", "ü", "word", "another"]
    return pa.table(
        {
            "user_id": [_user(kind, owners[i]) for i in numbers],
            "event_ts": np.arange(n) * 20 + rng.integers(-90, 20, n) + 500,
            "event_id": [str(i) if text else i for i in numbers],
            "supersedes": pa.array(
                [c if c is None else str(c) if text else c for c in corrects], pa.string() if text else pa.int64()
            ),
            "item": np.where(rng.random(n) < 0.7, rng.integers(0, 6, n) << 35, rng.integers(0, 1 << 40, n)),
            "session": np.repeat(rng.integers(0, 1 << 60, n), 40)[:n],
            "discount": np.where(rng.random(n) < 0.9, 0, rng.integers(0, 1 << 20, n)).astype(np.int32),
            "coupon": pa.array(rng.integers(0, 1 << 50, n), mask=rng.random(n) < 0.9),
            "price": np.round(rng.random(n) * 90, 2).astype(np.float32),
            "cost": pa.array(np.round(rng.normal(0, 9, n), 1), mask=rng.random(n) < 0.2),
            "flags": rng.integers(-(1 << 15), 1 << 15, n).astype(np.int16),
            "seen": pa.array([list(range(i % 7, i % 7 + i % 4)) for i in range(n)], pa.list_(pa.int32())),
            "tags": pa.array([None if i % 6 == 0 else words[: i % 4] for i in range(n)], pa.list_(pa.string())),
            "spot": pa.array([None if i % 5 == 0 else [i / 2, -0.0] for i in range(n)], pa.list_(pa.float32(), 2)),
            "kind": pa.array([None if i % 11 == 0 else words[i % 4] for i in range(n)]),
            "note": pa.array([None if i % 9 == 0 else f"note {i} " * (i % 3) for i in numbers]),
            "blob": pa.array([rng.bytes(int(rng.integers(0, 9))) for _ in range(n)], pa.binary()),
            "surface": np.repeat(rng.integers(0, 100, n), 20)[:n].astype(np.int8),
        }
    )  # fmt: skip


def _backfill(archive: Archive, kind: str) -> None:
    """Overlays of a column of floats with nulls and of one of lists of strings."""
    generation = archive.pin()
    events = generation.to_arrow(at=None).read_all()
    n = len(events)
    overlays: dict[str, tuple[int, pa.Array]] = {
        "cost": (2, pa.array([None if i % 4 == 0 else i / 4 for i in range(n)])),
        "tags": (3, pa.array([["new", "ü"][: i % 3] for i in range(n)], pa.list_(pa.string()))),
    }
    for column, (step, values) in overlays.items():
        some = events.take(np.arange(0, n, step))
        table = pa.table({name: some[name] for name in ("user_id", "event_ts", "arrival")})
        backfill_module.backfill(archive, column, table.append_column(column, values[: len(some)]))
