"""Erasure in logs and training tables: rows of erased users go, and of the others what tells of events that are gone.

Worked example. User 7 was erased whole; of user 9, event 3 was::

    row of user 7, snapshot_arrival 4          goes, with its outcomes; user 7 was erased up to number 10
    row of user 7, snapshot_arrival 12         stays: it came after the erasure
    row of user 9 that saw event 3 inline      stays without it, v_seq_len one more: so that it is known to miss one
    row of user 9 that saw it in the archive   stays; v_start_ts, v_end_ts and v_checksum become those of what is left,
                                               v_seq_len stays
    another row of user 9                      is copied as it is

What goes is what the tombstones of a generation say, so every call may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CommitConflict
from thinrow.core.ragged import offsets_of
from thinrow.core.users import Users, distinct
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import ExampleBatch
from thinrow.examples.splits import SplitLog
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.history.missing import Missing
from thinrow.history.reconstruct import survivors
from thinrow.history.requests import RequestBatch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Redacted:
    """``removed`` rows are gone, ``changed`` others tell less than before, in ``files`` files that were replaced."""

    removed: int = 0
    changed: int = 0
    files: int = 0

    def __add__(self, other: Redacted) -> Redacted:
        return Redacted(self.removed + other.removed, self.changed + other.changed, self.files + other.files)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of some requests: positions of the ``rows`` that stay, which of them are ``changed``, those rows as
    a ``batch``, and how many are ``gone``."""

    rows: Ints
    changed: npt.NDArray[np.bool_]
    batch: RequestBatch
    gone: int

    @property
    def as_it_was(self) -> bool:
        """Whether nothing is to be done."""
        return not self.gone and not self.changed.any()


def redact(generation: Generation, batch: RequestBatch, whole: Users) -> Kept:
    """What is left of requests under the generation's tombstones; none of the users ``whole`` stays.

    Raises:
        VersionMismatch, CorruptionError: a request that is to be changed is not what its version describes.
    """
    users, user_of = distinct(batch.users)
    graves = generation.tombstones(users)
    named = np.isin(users, whole) if len(whole) else np.zeros(len(users), np.bool_)
    goes = (batch.versions["snapshot_arrival"] < graves.whole()[user_of]) | named[user_of]
    rows = np.flatnonzero(~goes)
    left = batch.take(rows)
    changed = np.zeros(len(rows), np.bool_)
    touched = np.flatnonzero(np.diff(graves.offsets)[user_of[rows]] > 0)
    if len(touched):
        some = left.take(touched)
        less, differs = _without_gone(generation, some)
        hit = np.flatnonzero(differs)
        changed[touched[hit]] = True
        if len(hit):
            order = np.arange(len(rows))
            order[touched[hit]] = len(rows) + np.arange(len(hit))
            left = RequestBatch.concat([left, less.take(hit)]).take(order)
    return Kept(rows, changed, left, int(goes.sum()))


def _without_gone(generation: Generation, batch: RequestBatch) -> tuple[RequestBatch, npt.NDArray[np.bool_]]:
    """The requests without what is gone, and (X,) which of them had something of it."""
    users, user_of = distinct(batch.users)
    missing = Missing.of(generation, batch, users, user_of)
    differs = (missing.erased + missing.expired) > 0
    less = missing.batch
    if len(less.hides):
        owner = np.repeat(np.arange(len(less)), np.diff(less.hide_offsets))
        kept = missing.graves.record_of(user_of[owner], np.ascontiguousarray(less.hides["arrival"])) < 0
        offsets = offsets_of(kept)[less.hide_offsets]
        differs |= np.diff(offsets) < np.diff(less.hide_offsets)
        less = replace(less, hides=less.hides[kept], hide_offsets=offsets)
    gone, checksum, start_ts, end_ts = survivors(generation, less)
    versions = less.versions.copy()
    short = gone > 0
    for name, value in (("checksum", checksum), ("start_ts", start_ts), ("end_ts", end_ts)):
        versions[name][short] = value[short]
    versions["seq_len"] += missing.erased + missing.expired
    differs |= versions != less.versions
    return replace(less, versions=versions), differs


def erase_from_log(log: ImpressionLog, generation: Generation, whole: Users) -> Redacted:
    """Erase from every file of a log of impressions what the generation's tombstones cover, and the users ``whole``.

    A file keeps its number; it is replaced as a whole, durably. Safe beside appends, joins and pruning.

    Raises as ``redact`` and ``ImpressionLog.read``.
    """
    done = Redacted()
    for number, records in log.items():
        kept = redact(generation, records.snapshots, whole)
        if not kept.as_it_was and log.rewrite(number, replace(records.take(kept.rows), snapshots=kept.batch)):
            done += Redacted(kept.gone, int(kept.changed.sum()), 1)
    return done


def requests_that_go(log: ImpressionLog, generation: Generation, whole: Users) -> Ints:
    """(n,) ids of the requests in a log that ``erase_from_log`` removes."""
    found = [np.empty(0, np.int64)]
    for _, records in log.items():
        stays = redact(generation, records.snapshots, whole).rows
        found.append(np.delete(records.request_id, stays))
    return np.concatenate(found)


def erase_outcomes(log: OutcomeLog, request_ids: Ints) -> Redacted:
    """Erase the outcomes of some requests from every file of a log."""
    done = Redacted()
    for number, records in log.items():
        goes = np.isin(records.request_id, request_ids)
        if goes.any() and log.rewrite(number, records.take(~goes)):
            done += Redacted(int(goes.sum()), 0, 1)
    return done


def erase_from_table(table: ExampleTable, generation: Generation, whole: Users) -> Redacted:
    """Erase from a training table what the generation's tombstones cover, and the users ``whole``.

    Data files that hold something of it are written anew, in one commit; then all older snapshots expire, and every
    file goes that the newest does not need: data files, manifests (whose bounds have user ids), lists, old metadata. A
    join that runs meanwhile starts over. See ``ExampleTable.rewrite`` for readers of older snapshots.

    Raises:
        SchemaError: table and archive have different numbers of buckets.
        CommitConflict: another writer committed first; run it again.
    """
    table.check_buckets(generation.n_buckets)
    done = Redacted()

    def change(examples: ExampleBatch) -> tuple[ExampleBatch, Ints] | None:
        nonlocal done
        kept = redact(generation, examples.batch, whole)
        if kept.as_it_was:
            return None
        done += Redacted(kept.gone, int(kept.changed.sum()), 1)
        taken = examples.take(kept.rows)
        return replace(taken, batch=kept.batch), kept.rows

    table.rewrite(change)
    return done


def erase_from_splits(log: SplitLog, generation: Generation, whole: Users) -> Redacted:
    """``erase_from_log`` for a log of splits; what stays of a split keeps its row numbers. Erase from the logs that are
    joined into it first: a step of the join that read them before then starts over (``SplitLog.fence``).

    Raises as ``redact`` and ``SplitLog.read``.
    """
    done = Redacted()
    _fence(log)
    for number, split in log.items():
        kept = redact(generation, split.examples.batch, whole)
        if kept.as_it_was:
            continue
        left = replace(split.examples.take(kept.rows), batch=kept.batch)
        if log.rewrite(number, replace(split, examples=left, rows=split.rows[kept.rows])):
            done += Redacted(kept.gone, int(kept.changed.sum()), 1)
    return done


def _fence(log: SplitLog) -> None:
    while True:
        try:
            log.fence()
        except CommitConflict:
            continue
        return


def split_requests_that_go(log: SplitLog, generation: Generation, whole: Users) -> Ints:
    """(n,) ids of the requests in a log of splits that ``erase_from_splits`` removes."""
    found = [np.empty(0, np.int64)]
    for _, split in log.items():
        stays = redact(generation, split.examples.batch, whole).rows
        found.append(np.delete(split.examples.request_id, stays))
    return np.concatenate(found)


def table_requests_that_go(table: ExampleTable, generation: Generation, whole: Users) -> Ints:
    """(n,) ids of the requests in a table that ``erase_from_table`` removes."""
    found = [np.empty(0, np.int64)]
    for bucket in table.buckets():
        examples = table.read_bucket(bucket)
        found.append(np.delete(examples.request_id, redact(generation, examples.batch, whole).rows))
    return np.concatenate(found)


def erase_everywhere(
    generation: Generation,
    whole: Users,
    *,
    impressions: list[ImpressionLog],
    outcomes: list[OutcomeLog],
    tables: list[ExampleTable],
    splits: Sequence[SplitLog] = (),
) -> Redacted:
    """Erase from logs and tables: outcomes first, for only their requests tell whose they are; tables and splits last,
    so that a join that read a log before starts over.

    Returns what was done in all of them. Raises as the functions above.
    """
    goes = [requests_that_go(log, generation, whole) for log in impressions]
    goes += [table_requests_that_go(table, generation, whole) for table in tables]
    goes += [split_requests_that_go(sealed, generation, whole) for sealed in splits]
    ids = np.concatenate([np.empty(0, np.int64), *goes])
    done = Redacted()
    for results in outcomes:
        done += erase_outcomes(results, ids)
    for log in impressions:
        done += erase_from_log(log, generation, whole)
    for sealed in splits:
        done += erase_from_splits(sealed, generation, whole)
    for table in tables:
        done += erase_from_table(table, generation, whole)
    return done
