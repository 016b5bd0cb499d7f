"""Verify a generation byte by byte: every CRC, every block decoded, every digest computed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from thinrow.core.errors import CorruptionError, StoreError, ThinrowError
from thinrow.core.users import plain
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.layout import PIECE_DTYPE, key_columns
from thinrow.history.archive.reader import Pieces, ReadStats, RowReader
from thinrow.history.archive.segment import Segment
from thinrow.history.archive.writer import content_digest
from thinrow.jagged import HIDE_DTYPE
from thinrow.kernels import kernel

_PIECES_AT_ONCE = 8_192


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong: ``file``, ``user`` and ``column`` where known, and ``what``."""

    file: str
    user: object | None
    column: str | None
    what: str


def verify_generation(generation: Generation, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
    """All damage of a generation's segments; an empty list where every byte is as written."""
    found: list[Damage] = []
    for number, (bucket, info) in enumerate(generation.segments):
        try:
            segment = Segment(generation.objects, info.name)
            segment.require(bucket, info)
            found += _verify_segment(generation.only([number]), segment, info.digests)
        except ThinrowError as e:
            found.append(as_damage(e, info.name))
        if progress is not None:
            progress(number + 1, len(generation.segments))
    return found


def as_damage(error: ThinrowError, file: str) -> Damage:
    """An error as an entry of the list."""
    if isinstance(error, CorruptionError):
        return Damage(error.file, error.user, error.column, error.what)
    return Damage(file, None, None, str(error))


def _verify_segment(view: Generation, segment: Segment, digests: dict[str, int]) -> Iterator[Damage]:
    for name in ("dictionaries", "hides"):
        segment.container.read_section(name)
    segment.hides  # noqa: B018  # parses what the CRC has vouched for
    for column in segment.columns:
        segment.dictionary(column)
    stripes = sum(len(records) for _, records, _ in segment.stripes.scan())
    if stripes != segment.stripes.n_records:
        yield Damage(
            segment.name, None, None, f"{stripes} stripe records, the directory says {segment.stripes.n_records}"
        )
    totals: dict[str, int] = {}
    bad_columns: set[str] = set()
    for pieces in _piece_batches(segment):
        yield from _verify_pieces(view, segment, pieces, totals, bad_columns)
    for key, total in totals.items():
        if key not in bad_columns and total != digests.get(key):
            name = next((c.name for c in segment.columns if str(c.id) == key), key)
            yield Damage(segment.name, None, name, f"content digest is {total}, written was {digests.get(key)}")


def _piece_batches(segment: Segment) -> Iterator[Pieces]:
    for a in range(0, segment.pieces.n_records, _PIECES_AT_ONCE):
        rows = np.arange(a, min(a + _PIECES_AT_ONCE, segment.pieces.n_records))
        records, keys = segment.pieces.take(rows), segment.pieces.keys(rows)
        n = len(rows)
        steps = np.arange(n + 1)
        # Each piece stands as a user of its own: errors then name the right one, and runs need no merging.
        yield Pieces(
            keys, steps, records, np.zeros(n, np.int64), steps, steps, records["max_arrival"].astype(np.int64),
            np.zeros(n + 1, np.int64), np.empty(0, HIDE_DTYPE),
        )  # fmt: skip


def _verify_pieces(
    view: Generation, segment: Segment, pieces: Pieces, totals: dict[str, int], bad: set[str]
) -> Iterator[Damage]:
    n = len(pieces.users)
    rows = pieces.records["n_rows"].astype(np.int64)
    reader = RowReader(view, pieces, np.arange(n), np.zeros(n, np.int64), rows, ReadStats())
    event_ts, arrival, hidden = key_columns()
    try:
        ts, arr, hid = (reader.column(c).values for c in (event_ts, arrival, hidden))
    except (CorruptionError, StoreError) as e:
        bad.update(str(c.id) for c in segment.columns)
        bad.add("identity")
        yield as_damage(e, segment.name)
        return
    mix = kernel("identity_mix")(ts, arr)
    yield from _verify_records(segment, pieces, reader.out_pos, ts, arr, hid, mix)
    totals["identity"] = (totals.get("identity", 0) + int(mix.sum(dtype=np.uint64))) % (1 << 64)
    for spec in segment.columns:
        try:
            column = reader.column(spec)
        except (CorruptionError, StoreError) as e:
            bad.add(str(spec.id))
            yield as_damage(e, segment.name)
            continue
        key = str(spec.id)
        totals[key] = (totals.get(key, 0) + content_digest(spec, column, mix)) % (1 << 64)


def _verify_records(
    segment: Segment,
    pieces: Pieces,
    row_off: np.ndarray[tuple[int], np.dtype[np.int64]],
    ts: np.ndarray[tuple[int], np.dtype[np.int64]],
    arrival: np.ndarray[tuple[int], np.dtype[np.int64]],
    hidden: np.ndarray[tuple[int], np.dtype[np.int64]],
    mix: np.ndarray[tuple[int], np.dtype[np.uint64]],
) -> Iterator[Damage]:
    top, least, digest = kernel("piece_summaries")(row_off, ts, arrival, hidden, mix)
    truth = np.zeros(len(pieces.records), PIECE_DTYPE)
    truth["first_ts"], truth["last_ts"] = ts[row_off[:-1]], ts[row_off[1:] - 1]
    truth["max_arrival"], truth["min_hidden_from"], truth["digest"] = top, least, digest
    for name in ("first_ts", "last_ts", "max_arrival", "min_hidden_from", "digest"):
        for i in np.flatnonzero(truth[name] != pieces.records[name])[:1]:
            yield Damage(
                segment.name,
                plain(pieces.users[i]),
                name,
                f"the index says {pieces.records[name][i]}, the rows {truth[name][i]}",
            )
    same = np.ones(len(ts), np.bool_)
    same[row_off[:-1]] = False
    disorder = np.zeros(len(ts), np.bool_)
    disorder[1:] = (ts[1:] < ts[:-1]) | ((ts[1:] == ts[:-1]) & (arrival[1:] <= arrival[:-1]))
    for row in np.flatnonzero(same & disorder)[:1]:
        piece = int(np.searchsorted(row_off, row, side="right") - 1)
        yield Damage(
            segment.name,
            plain(pieces.users[piece]),
            "event_ts",
            f"row {row - row_off[piece]} of the piece is out of order",
        )
