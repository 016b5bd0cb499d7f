"""Verify a generation byte by byte: every CRC, every block decoded, every digest computed anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError, NewerFormatError, ObjectNotFound, StoreError, ThinrowError
from thinrow.core.stripes import PIECE_DTYPE
from thinrow.core.users import Users, plain
from thinrow.history.archive.encode import content_digest
from thinrow.history.archive.generation import Generation, reopen
from thinrow.history.archive.layout import key_columns
from thinrow.history.archive.lookup import Pieces
from thinrow.history.archive.reader import ReadStats, RowReader
from thinrow.history.archive.segment import Segment
from thinrow.history.archive.tombstones import read_tombstones
from thinrow.jagged import HIDE_DTYPE
from thinrow.kernels import kernel

_PAGES_AT_ONCE = 32
#: After so many the file is clearly lost, and the rest would only take time.
_DAMAGES_A_SEGMENT = 1_000


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong: ``file``, ``user`` and ``column`` where known, and ``what``."""

    file: str
    user: object | None
    column: str | None
    what: str


def verify_generation(generation: Generation, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
    """All damage of a generation's segments; an empty list where every byte is as written.

    Raises:
        NewerFormatError: a segment is of a newer thinrow, which is no damage.
        Erased, ObjectNotFound: the generation was revoked, or collected, meanwhile: what is missing is no damage.
    """
    found = verify_segments(generation, progress)
    if found:
        generation.require_live()
        try:
            reopen(generation.objects, generation.number)
        except ObjectNotFound:
            raise ObjectNotFound(
                f"generation {generation.number} was collected while it was verified; run again, on the newest"
            ) from None
        except CorruptionError:
            pass
    return found


def verify_segments(generation: Generation, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
    """As ``verify_generation``, of a generation that nobody collects meanwhile."""
    found: list[Damage] = []
    for number, (bucket, info) in enumerate(generation.segments):
        try:
            segment = Segment(generation.objects, info.name)
            segment.require(bucket, info)
            own = _verify_segment(generation.only([number], overlays=False), segment, info.digests)
            damages = _distinct(chain(own, _verify_overlays(generation.only([number]), segment)))
            found += islice(damages, _DAMAGES_A_SEGMENT)
            if next(damages, None) is not None:
                found.append(Damage(info.name, None, None, f"and more than {_DAMAGES_A_SEGMENT} damages in all"))
        except NewerFormatError:
            raise
        except ThinrowError as e:
            found.append(as_damage(e, info.name))
        if progress is not None:
            progress(number + 1, len(generation.segments))
    return found


def verify_tombstones(generation: Generation) -> list[Damage]:
    """All damage of a generation's files of tombstones."""
    found = []
    for bucket, file in generation.tombstone_index.files.items():
        try:
            read_tombstones(generation.objects, bucket, file)
        except NewerFormatError:
            raise
        except ThinrowError as e:
            found.append(as_damage(e, file.name))
    return found


def _distinct(damages: Iterable[Damage]) -> Iterator[Damage]:
    seen: set[Damage] = set()
    for damage in damages:
        if damage not in seen:
            seen.add(damage)
            yield damage


def as_damage(error: ThinrowError, file: str) -> Damage:
    """An error as an entry of the list."""
    if isinstance(error, CorruptionError):
        return Damage(error.file, error.user, error.column, error.what)
    return Damage(file, None, None, str(error))


def _verify_segment(view: Generation, segment: Segment, digests: dict[str, int]) -> Iterator[Damage]:
    for name in ("dictionaries", "hides"):
        try:
            segment.container.read_section(name)
        except CorruptionError as e:
            yield as_damage(e, segment.name)
    stripes = sum(len(records) for _, records, _ in segment.stripes.scan())
    if stripes != segment.stripes.n_records:
        yield Damage(
            segment.name, None, None, f"{stripes} stripe records, the directory says {segment.stripes.n_records}"
        )
    totals: Counter[str] = Counter()
    bad: set[str] = set()
    pages = segment.pieces.scan()
    while some := list(islice(pages, _PAGES_AT_ONCE)):
        users = np.concatenate([keys for _, _, keys in some if keys is not None])
        records = np.concatenate([records for _, records, _ in some])
        held = records["n_rows"] > 0
        for i in np.flatnonzero(~held)[:1]:
            yield Damage(segment.name, plain(users[i]), None, "a piece without rows")
        if held.any():
            yield from _verify_pieces(view, segment, users[held], records[held], totals, bad)
    for key, digest in digests.items():
        total = totals[key] % (1 << 64)
        if key not in bad and total != digest:
            name = next((c.name for c in segment.columns if str(c.id) == key), key)
            yield Damage(segment.name, None, name, f"content digest is {total}, written was {digest}")


def _verify_pieces(
    view: Generation,
    segment: Segment,
    users: Users,
    records: npt.NDArray[np.void],
    totals: Counter[str],
    bad: set[str],
) -> Iterator[Damage]:
    """Damage of some pieces; where there is any, each half again, until every piece that is hit has been named.

    Adds the digests of sound pieces to ``totals``, the ids of damaged columns to ``bad``.
    """
    n = len(users)
    pieces = pieces_alone(users, records)
    reader = RowReader(
        view, pieces, np.arange(n), np.zeros(n, np.int64), records["n_rows"].astype(np.int64), ReadStats()
    )
    sums: Counter[str] = Counter()
    found: list[Damage] = []
    try:
        ts, arrival, hidden = (reader.column(c).values for c in key_columns())
    except (CorruptionError, StoreError) as e:
        bad.update(("identity", *(str(c.id) for c in segment.columns)))
        found.append(as_damage(e, segment.name))
    else:
        mix = kernel("identity_mix")(ts, arrival)
        sums["identity"] = int(mix.sum(dtype=np.uint64))
        found += _verify_records(segment, pieces, reader.out_pos, ts, arrival, hidden, mix)
        for spec in segment.columns:
            try:
                sums[str(spec.id)] = content_digest(spec, reader.column(spec), mix)
            except (CorruptionError, StoreError) as e:
                bad.add(str(spec.id))
                found.append(as_damage(e, segment.name))
    # What names no user, such as a dictionary, is the same for every piece.
    if n > 1 and any(d.user is not None for d in found):
        for part in (slice(None, n // 2), slice(n // 2, None)):
            yield from _verify_pieces(view, segment, users[part], records[part], totals, bad)
        return
    totals.update(sums)
    yield from found


def _verify_overlays(view: Generation, segment: Segment) -> Iterator[Damage]:
    """Damage of the overlays of a view's only segment: every block decoded, every digest computed anew."""
    for info in view.segments[0][1].overlays:
        try:
            overlay = view.overlay(0, info.column)
            assert overlay is not None
            overlay.container.read_section("dictionaries")
            digest = 0
            pages = segment.pieces.scan()
            while some := list(islice(pages, _PAGES_AT_ONCE)):
                users = np.concatenate([keys for _, _, keys in some if keys is not None])
                records = np.concatenate([records for _, records, _ in some])
                first, n = np.zeros(len(users), np.int64), records["n_rows"].astype(np.int64)
                pieces = pieces_alone(users, records)
                reader = RowReader(view, pieces, np.arange(len(users)), first, n, ReadStats())
                ts, arrival = (reader.column(c).values for c in key_columns()[:2])
                digest += content_digest(
                    overlay.column, reader.column(overlay.column), kernel("identity_mix")(ts, arrival)
                )
            if digest % (1 << 64) != info.digest:
                what = f"content digest is {digest % (1 << 64)}, written was {info.digest}"
                yield Damage(info.name, None, overlay.column.name, what)
        except NewerFormatError:
            raise
        except ThinrowError as e:
            yield as_damage(e, info.name)


def pieces_alone(users: Users, records: npt.NDArray[np.void]) -> Pieces:
    """Pieces of one segment, the only one of its view, each as a user of its own: errors then name the right one, and
    runs need no merging."""
    steps = np.arange(len(users) + 1)
    return Pieces(
        users, steps, records, np.zeros(len(users), np.int64), steps, steps, records["max_arrival"].astype(np.int64),
        np.zeros(len(users) + 1, np.int64), np.empty(0, HIDE_DTYPE),
    )  # fmt: skip


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
