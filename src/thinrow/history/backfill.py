"""Backfill: values of one column for events that are archived already.

No event and no version changes: a version says *which* events a request saw, by time and arrival number; a column is
what is known of them. The values go into overlays (format section 13), one for each segment that holds such an event,
and the generation that names these is committed at once. Memory is that of the table and of one part of a segment.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import CommitConflict, DuplicateEventError, InputError, SchemaError
from thinrow.core.users import Users, bucket_of, plain
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.layout import (
    EVENT_ID,
    OverlayInfo,
    SegmentInfo,
    StoredColumn,
    key_columns,
    overlay_region,
    stored_columns,
)
from thinrow.history.archive.overlay import stripe_parts, write_overlay
from thinrow.history.archive.reader import ReadStats, RowReader
from thinrow.history.archive.verify import pieces_alone
from thinrow.history.intake import event_times, typed_column, user_ids
from thinrow.jagged import Column
from thinrow.jagged.column import concat_columns, unite_dictionaries
from thinrow.kernels import kernel
from thinrow.schema import EventSchema
from thinrow.storage.manifest import retried

Ints = npt.NDArray[np.int64]
_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """Attributes:
    generation: the number of the newest generation.
    placed: rows of the table that name an archived event.
    unplaced: rows that name none: recent events (compact, then backfill these again), or no events of the store.
    segments: segments that got an overlay.
    """

    generation: int
    placed: int
    unplaced: int
    segments: int


@dataclass(frozen=True, slots=True)
class _Values:
    """Values for events (R,), by user, and what names the event: ``event_ts`` and ``arrival``, or ``event_id``."""

    users: Users
    values: Column
    event_ts: Ints | None
    arrival: Ints | None
    event_id: Column | None

    def take(self, rows: npt.NDArray[np.intp]) -> _Values:
        return _Values(
            self.users[rows],
            self.values.take(rows),
            None if self.event_ts is None else self.event_ts[rows],
            None if self.arrival is None else self.arrival[rows],
            None if self.event_id is None else self.event_id.take(rows),
        )


@dataclass(frozen=True, slots=True)
class _Annotated:
    """What was written for a segment: its overlay before, the new one (None: no event of it was named), rows placed."""

    before: OverlayInfo | None
    overlay: OverlayInfo | None
    placed: int


def backfill(
    archive: Archive, column: str, table: pa.Table, progress: Callable[[int, int], None] | None = None
) -> BackfillReport:
    """Commit a generation in which the events that ``table`` names have its values of ``column``; others keep theirs.

    Args:
        column: a column of the newest schema, and of the table; null is a value where the column is nullable.
        table: one row an event: the user, and either its time and ``arrival`` number or its event id. Columns have the
            names of the schema's input, or ``user_id``, ``event_ts``, ``event_id``.

    Raises:
        InputError and its kinds: the table does not fit; nothing was changed.
        CommitConflict: other writers won twenty times in a row.
        CorruptionError: a segment is damaged.
    """
    done: dict[tuple[str, StoredColumn], _Annotated] = {}

    def attempt() -> BackfillReport:
        base = archive.pin()
        spec = StoredColumn.of(base.schema.column(column))
        _require_region(base, spec)
        values = _values_of(table, base.schema, column)
        changed = _annotate(archive, base, spec, values, done, progress)
        used = {o.overlay.name for o in done.values() if o.overlay is not None and o.overlay in _named(changed)}
        placed = sum(o.placed for o in done.values() if o.overlay is not None and o.overlay.name in used)
        if not changed:
            _delete_but(archive, done, used)
            return BackfillReport(base.number, 0, len(values.users), 0)
        generation = archive.commit(base, changed, f"backfill {column}")
        _delete_but(archive, done, used)
        return BackfillReport(generation.number, placed, len(values.users) - placed, len(used))

    with archive.writing("backfill"):
        try:
            return retried(attempt)
        except (InputError, CommitConflict):
            _delete_but(archive, done, set())
            raise


def _require_region(base: Generation, spec: StoredColumn) -> None:
    """Raises SchemaError where segments may have a group of the name under which overlays of the column are read."""
    ever = (*base.schema.columns, *(c for change in base.schema_log for c in change.removed))
    region = overlay_region(spec.id)
    if any(c.group == region for c in ever):
        raise SchemaError(
            f"column {spec.name!r} cannot be backfilled: the store has a group {region!r}, the name under which its "
            "overlays would be read; add a column, and backfill that"
        )


def _named(changed: dict[int, list[SegmentInfo]]) -> set[OverlayInfo]:
    return {o for infos in changed.values() for info in infos for o in info.overlays}


def _delete_but(archive: Archive, done: dict[tuple[str, StoredColumn], _Annotated], used: set[str]) -> None:
    for annotated in done.values():
        if annotated.overlay is not None and annotated.overlay.name not in used:
            archive.objects.delete(annotated.overlay.name)


def _annotate(
    archive: Archive,
    base: Generation,
    spec: StoredColumn,
    values: _Values,
    done: dict[tuple[str, StoredColumn], _Annotated],
    progress: Callable[[int, int], None] | None,
) -> dict[int, list[SegmentInfo]]:
    """Segment lists of the buckets in which something changes. What was written for a segment that is as it was when
    that was done is kept in ``done``; so a lost commit costs only what the winner changed."""
    buckets = bucket_of(values.users, base.n_buckets)
    wanted = np.unique(buckets).tolist()
    changed: dict[int, list[SegmentInfo]] = {}
    for i, bucket in enumerate(wanted):
        mine = values.take(np.flatnonzero(buckets == bucket))
        infos = []
        for number in base.segments_of(bucket):
            info = base.segments[number][1]
            before = next((o for o in info.overlays if o.column == spec.id), None)
            held = done.get((info.name, spec))
            if held is None or held.before != before:
                if held is not None and held.overlay is not None:
                    archive.objects.delete(held.overlay.name)
                overlay, placed = _write(archive, base, number, spec, mine)
                held = done[info.name, spec] = _Annotated(before, overlay, placed)
            if held.overlay is not None:
                others = tuple(o for o in info.overlays if o.column != spec.id)
                info = replace(info, overlays=(*others, held.overlay))
            infos.append(info)
        if infos != [base.segments[n][1] for n in base.segments_of(bucket)]:
            changed[bucket] = infos
        if progress is not None:
            progress(i + 1, len(wanted))
    return changed


def _write(
    archive: Archive, base: Generation, number: int, spec: StoredColumn, values: _Values
) -> tuple[OverlayInfo | None, int]:
    """An overlay of the segment, and how many rows of ``values`` it holds; None where that is none."""
    view, segment = base.only([number]), base.segment(number)
    ids = next((c for c in stored_columns(base.schema) if c.name == EVENT_ID), None)
    held = [users for _, users, _ in stripe_parts(segment, _ROWS_AT_ONCE)]
    values = values.take(np.flatnonzero(np.isin(values.users, np.concatenate(held)))) if held else values
    if not held or not len(values.users):
        return None, 0
    placed = 0

    def parts() -> Iterator[tuple[Column, object, npt.NDArray[np.uint64]]]:
        nonlocal placed
        for records, users, cut in stripe_parts(segment, _ROWS_AT_ONCE):
            pieces = pieces_alone(users, records)
            n = np.zeros(len(users), np.int64)
            reader = RowReader(view, pieces, np.arange(len(users)), n, cut.rows, ReadStats())
            ts, arrival = (reader.column(c).values for c in key_columns()[:2])
            current = reader.column(spec)
            row, value = _matches(values, users, cut.rows, ts, arrival, reader.column(ids) if ids else None)
            placed += len(row)
            index = np.arange(len(current))
            index[row] = len(current) + np.arange(len(row))
            merged = concat_columns([current, values.values.take(value)]).take(index)
            yield merged, cut, kernel("identity_mix")(ts, arrival)

    name = f"overlays/{base.segments[number][0]:05d}/{secrets.token_hex(8)}.ovl"
    overlay = write_overlay(archive.objects, name, segment, spec, parts())  # type: ignore[arg-type]
    if not placed:
        archive.objects.delete(name)
        return None, 0
    return overlay, placed


def _matches(
    values: _Values, users: Users, rows: Ints, ts: Ints, arrival: Ints, ids: Column | None
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Rows of the part and rows of ``values`` that are one event. ``users`` (P,) ascend, with ``rows`` rows each."""
    named, asking = np.unique(values.users, return_inverse=True)
    place = np.searchsorted(named, users)
    known = (place < len(named)) & (named[np.minimum(place, len(named) - 1)] == users)
    mine = np.flatnonzero(np.repeat(known, rows))
    if values.event_id is None:
        assert values.arrival is not None
        keys, wanted = arrival[mine], values.arrival
    else:
        assert ids is not None
        shown = ids.take(mine)
        if shown.valid is not None:
            mine, shown = mine[shown.valid], shown.take(np.flatnonzero(shown.valid))
        keys, wanted = _codes(shown, values.event_id)
    user = np.append(np.repeat(place, rows)[mine], asking)
    key = np.append(keys, wanted)
    # Stable: an event stands right before the value that names it.
    order = np.lexsort((key, user))
    same = (np.diff(user[order]) == 0) & (np.diff(key[order]) == 0)
    pair = np.flatnonzero(same)
    row, value = mine[order[pair]], order[pair + 1] - len(keys)
    if values.event_ts is not None:
        right = ts[row] == values.event_ts[value]
        row, value = row[right], value[right]
    return row, value


def _codes(a: Column, b: Column) -> tuple[Ints, Ints]:
    """Equal ids as equal numbers."""
    if a.dictionary is None or b.dictionary is None:
        return a.values.astype(np.int64), b.values.astype(np.int64)
    _, (first, second) = unite_dictionaries([a.dictionary, b.dictionary])
    return (
        (first[a.values] if len(first) else a.values).astype(np.int64),
        (second[b.values] if len(second) else b.values).astype(np.int64),
    )


def _values_of(table: pa.Table, schema: EventSchema, column: str) -> _Values:
    """The table, checked. Raises as ``backfill``."""
    if not isinstance(table, pa.Table):
        raise InputError(f"values are a {type(table).__name__}; pass a pyarrow.Table")
    spec = schema.column(column)
    user = _name(table, schema.user_column, "user_id")
    time, event_id = _name(table, schema.time_column, "event_ts"), _name(table, schema.event_id_column, EVENT_ID)
    by_arrival = time is not None and "arrival" in table.column_names
    if user is None or column not in table.column_names or not (by_arrival or event_id):
        raise SchemaError(
            f"values have columns {', '.join(table.column_names)}; they need user_id, {column}, and event_ts with "
            "arrival" + (" or event_id" if schema.event_id_dtype else "")
        )
    users = user_ids(table.column(user), schema)
    values = typed_column(table.column(column), spec.dtype, column, ragged=spec.ragged, size=spec.size)
    if values.valid is not None and not spec.nullable and not values.valid.all():
        row = int(np.flatnonzero(~values.valid)[0])
        raise SchemaError(f"column {column!r} is null in row {row} and not nullable; leave the row out, or fill it")
    if by_arrival:
        assert time is not None
        found = _Values(
            users,
            values,
            event_times(table.column(time), time),
            typed_column(table.column("arrival"), "int64", "arrival").values,
            None,
        )
        key = found.arrival
    else:
        assert event_id is not None
        assert schema.event_id_dtype is not None
        ids = typed_column(table.column(event_id), schema.event_id_dtype, event_id)
        if ids.valid is not None and not ids.valid.all():
            row = int(np.flatnonzero(~ids.valid)[0])
            raise InputError(
                f"{event_id!r} is null in row {row}; name the event by event_ts and arrival, or drop the row"
            )
        found = _Values(users, values, None, None, ids)
        key, _ = _codes(ids, ids)
    assert key is not None
    who = np.unique(users, return_inverse=True)[1]
    order = np.lexsort((key, who))
    twice = np.flatnonzero((np.diff(who[order]) == 0) & (np.diff(key[order]) == 0))
    if len(twice):
        row = int(order[twice[0] + 1])
        raise DuplicateEventError(f"row {row} names an event of user {plain(users[row])!r} again; give it one value")
    return found


def _name(table: pa.Table, *names: str | None) -> str | None:
    """The first of the names that the table has."""
    return next((n for n in names if n is not None and n in table.column_names), None)
