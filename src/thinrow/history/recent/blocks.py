"""BlockTier: the one implementation of append, read, trim and counters over a small transactional key-value store.

A tier brings transactions (``Reading``, ``Writing``); what is written, in what order and with what checks is here, so
that memory and LMDB cannot drift apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import compress, islice
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CommitConflict, CorruptionError, UnknownEventError
from thinrow.core.ragged import offsets_of
from thinrow.core.units import EPOCH_BITS
from thinrow.core.users import Users
from thinrow.history.recent.batch import Batch, BatchCheck, Fresh, check_bounds, id_value, refuse_overflow
from thinrow.history.recent.evolution import shape_of
from thinrow.history.recent.keys import UNKNOWN, joined_pairs, pack_pairs, unpack_pairs, user_keys, users_of_keys
from thinrow.history.recent.opened import open_blocks
from thinrow.history.recent.positions import positions_of, refuse_moved, sealed_positions
from thinrow.history.recent.rows import (
    Numbered,
    Rows,
    decode_blocks,
    encode_rows,
    number_rows,
    schema_id_of,
    split_block,
)
from thinrow.history.recent.stored import Stored, parts_of, put_part
from thinrow.history.recent.tier import Advance, AppendResult, RecentRead, Resolve
from thinrow.history.recent.transactions import Reading, Writing
from thinrow.jagged import HIDE_DTYPE, Column, Events
from thinrow.jagged.events import never_hidden
from thinrow.schema import EventSchema

T = TypeVar("T")
_PAIRS_AT_ONCE = 65_536
#: Schemas of which plans are kept.
_MAX_PLANS = 64
_PAD = bytes(8)
_LOOK_FIRST = 7


class _KnownId(Exception):
    """An id that was taken for new is not: the call begins again."""


class BlockTier(ABC):
    """A RecentTier over ``Reading`` and ``Writing``."""

    _schemas: dict[int, EventSchema]
    #: Whether the ids of a call are taken for new, to be told otherwise as they are written: half as many look-ups.
    _takes_ids_for_new = False

    def __init__(self, schema: EventSchema, name: str) -> None:
        self._schema = schema
        self._name = name
        self._floor = 0
        self._plans: dict[int, tuple[BatchCheck, EventSchema | None]] = {}
        #: Calls that look their ids up first, after one that took a known one for new.
        self._look_first = 0

    @property
    def schema(self) -> EventSchema:
        """See ``RecentTier.schema``."""
        return self._schema

    @property
    def name(self) -> str:
        """See ``RecentTier.name``."""
        return self._name

    @property
    def atomic_over_users(self) -> bool:
        """See ``RecentTier.atomic_over_users``."""
        return True

    @abstractmethod
    def _read(self) -> AbstractContextManager[Reading]:
        """A consistent view. Raises StoreError after ``close``."""

    @abstractmethod
    def _write(self, work: Callable[[Writing], T]) -> T:
        """Run ``work`` in a transaction and commit durably; may run it again from the start."""

    @abstractmethod
    def _rewrite(self, work: Callable[[Writing], None]) -> None:
        """``_write``, after which no byte of what was ever dropped is left."""

    @abstractmethod
    def _schema_of(self, schema_id: int) -> EventSchema | None:
        """The stored schema of that id."""

    @abstractmethod
    def _newest_schema(self) -> EventSchema:
        """The stored schema of the highest id."""

    @abstractmethod
    def _learn(self, schema: EventSchema) -> None:
        """Store a schema that is not stored yet. Raises SchemaError as ``check_evolution``."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(
        self,
        users: Users,
        event_ts: npt.NDArray[np.int64] | Column,
        columns: dict[str, Column],
        event_ids: Column | None = None,
        supersedes: Column | None = None,
        resolve: Resolve | None = None,
        schema: EventSchema | None = None,
        advances: Sequence[Advance] = (),
    ) -> AppendResult:
        """See ``RecentTier.append``."""
        schema = schema or self._schema
        check, stored = self._plan(schema)
        batch = check(users, event_ts, columns, event_ids, supersedes)
        if len(batch) == 0 and not advances:
            with self._read():
                return AppendResult(np.empty(0, np.int64), np.empty(0, np.bool_))
        positions = sealed_positions(advances) if advances else []
        if stored is None and len(batch):
            stored = self._in_stored_order(schema)
            self._plans[id(schema)] = check, stored

        def work(txn: Writing, guess: bool = False) -> AppendResult:
            if advances:
                refuse_moved(advances, txn.pairs("positions", [key for key, _ in positions]), self._name)
                txn.put_pairs("positions", positions)
            if stored is None or len(batch) == 0:
                return AppendResult(np.empty(0, np.int64), np.empty(0, np.bool_))
            return self._append(txn, stored, batch, resolve, guess)

        if batch.id_keys and self._takes_ids_for_new and not batch.target_keys:
            if not self._look_first:
                try:
                    return self._write(lambda txn: work(txn, True))
                except _KnownId:
                    self._look_first = _LOOK_FIRST
            else:
                self._look_first -= 1
        return self._write(work)

    @property
    def stores_positions_with_events(self) -> bool:
        """One transaction holds both, where one holds several users."""
        return self.atomic_over_users

    def positions(self, source: str) -> dict[str, str]:
        """See ``RecentTier.positions``."""
        with self._read() as txn:
            return positions_of(list(txn.scan("positions", f"{source}\0".encode())), self._name)

    def _plan(self, schema: EventSchema) -> tuple[BatchCheck, EventSchema | None]:
        """What rows of a schema are held to, and, where events of it were stored, the schema ``_in_stored_order``."""
        found = self._plans.get(id(schema))
        if found is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            # It keeps the schema, so that no other gets its id.
            found = self._plans[id(schema)] = BatchCheck(schema), None
        return found

    def _in_stored_order(self, schema: EventSchema) -> EventSchema:
        """The schema with its columns in the order in which blocks of its id have them; stored where it is new."""
        stored = self._schema_of(schema.schema_id)
        if stored is None or shape_of(stored) != shape_of(schema):
            self._learn(schema)
            return schema
        by_id = {c.id: c for c in schema.columns}
        return replace(schema, columns=tuple(by_id[c.id] for c in stored.columns))

    def schema_of(self, schema_id: int) -> EventSchema | None:
        """The schema of that id, as blocks have its columns; None where none is stored."""
        return self._schema_of(schema_id)

    def _append(
        self, txn: Writing, schema: EventSchema, batch: Batch, resolve: Resolve | None, guess: bool
    ) -> AppendResult:
        """``guess``: all ids are taken for new. Raises _KnownId where one is not."""
        grouped, n = batch.grouped, len(batch)
        if batch.target_keys:
            txn.fetch(grouped.keys, batch.id_keys + batch.target_keys)
        else:
            txn.fetch(grouped.keys, batch.id_keys, new=True)
        known = None if guess else self._known(txn, batch)
        fresh = Fresh(batch) if known is None else Fresh.of_new(batch, known == 0)
        numbered = self._numbered(txn, schema, batch, fresh, None)
        arrivals = numbered.arrivals
        if known is not None:
            arrivals = known
            arrivals[fresh.index] = numbered.arrivals
        if len(batch.correction_rows):
            new = np.zeros(n, np.bool_)
            new[fresh.index] = True
            targets = self._targets(txn, batch, arrivals, new, resolve)
            numbered = self._numbered(txn, schema, batch, fresh, targets)
        if fresh.id_keys:
            pairs = list(zip(fresh.id_keys, numbered.pairs[len(grouped.keys) :], strict=True))
            if not guess:
                txn.put_pairs("ids", pairs)
            elif not txn.add_pairs("ids", pairs):
                raise _KnownId
        txn.put_blocks(numbered.blocks)
        counted = zip(grouped.keys, numbered.pairs, strict=False)
        txn.put_pairs("users", counted if known is None else compress(counted, np.diff(fresh.offsets).tolist()))
        duplicate = np.zeros(n, np.bool_)
        if known is not None:
            duplicate[:] = True
            duplicate[fresh.index] = False
        if grouped.order is None:
            return AppendResult(arrivals, duplicate)
        result = AppendResult(np.empty(n, np.int64), np.empty(n, np.bool_))
        result.arrivals[grouped.order] = arrivals
        result.duplicate[grouped.order] = duplicate
        return result

    def _numbered(
        self,
        txn: Reading,
        schema: EventSchema,
        batch: Batch,
        fresh: Fresh,
        targets: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None,
    ) -> Numbered:
        """The rows that are not there yet, numbered and encoded; ``targets`` is what each supersedes."""
        keys = batch.grouped.keys
        floors, held = self._floors(txn, keys), txn.pairs("users", keys)
        encoded = encode_rows(schema, fresh.rows(batch, targets))
        numbered = number_rows(encoded, keys, held, floors, fresh.offsets, fresh.id_rows, self._name)
        if numbered.over >= 0:
            refuse_overflow(batch.grouped.users, self._above_epoch(txn, keys)[0], np.diff(fresh.offsets))
        return numbered

    def _counters(self, txn: Reading, keys: list[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Counter and trimmed_through of each user; the floor and 0 where unknown."""
        found = txn.pairs("users", keys)
        if len(found) == len(keys):
            return unpack_pairs([found[key] for key in keys], self._name, "the user counters")
        counters, trimmed = np.empty(len(keys), np.int64), np.zeros(len(keys), np.int64)
        counters[:] = self._floors(txn, keys)
        if found:
            at = [i for i, key in enumerate(keys) if key in found]
            counters[at], trimmed[at] = unpack_pairs([found[keys[i]] for i in at], self._name, "the user counters")
        return counters, trimmed

    def _above_epoch(self, txn: Reading, keys: list[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """As ``_counters``, of users who are about to get numbers: those of the epoch that has begun.

        It is one for known users too. A floor within it is what erased users had, and holds for unknown ones alone.
        """
        counters, trimmed = self._counters(txn, keys)
        return np.maximum(counters, self._floors(txn, keys) >> EPOCH_BITS << EPOCH_BITS), trimmed

    def _floors(self, txn: Reading, keys: list[bytes]) -> npt.NDArray[np.int64]:
        """(U,) the number up to which (inclusive) none is given to each user; (1,) where it is the same for all."""
        return np.array([self._floor])

    def _known(self, txn: Reading, batch: Batch) -> npt.NDArray[np.int64] | None:
        """Arrival of the rows whose id was appended before, 0 of the others; None where there is no such row."""
        found = txn.pairs("ids", batch.id_keys) if batch.id_keys else {}
        if not found:
            return None
        known = np.zeros(len(batch), np.int64)
        at = [i for i, key in enumerate(batch.id_keys) if key in found]
        held = unpack_pairs([found[batch.id_keys[i]] for i in at], self._name, "the event ids")
        known[batch.id_rows[at]] = held[0]
        return known

    def _targets(
        self,
        txn: Reading,
        batch: Batch,
        arrivals: npt.NDArray[np.int64],
        new: npt.NDArray[np.bool_],
        resolve: Resolve | None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(event_ts, arrival) of the event that each row supersedes, 0 where none."""
        target_ts, target_arrival = np.zeros(len(batch), np.int64), np.zeros(len(batch), np.int64)
        in_call = {key: row for key, row in zip(batch.id_keys, batch.id_rows.tolist(), strict=True) if new[row]}
        wanted = [
            (row, key) for row, key in zip(batch.correction_rows.tolist(), batch.target_keys, strict=True) if new[row]
        ]
        found = txn.pairs("ids", [key for _, key in wanted if key not in in_call])
        of_arrival, of_ts = unpack_pairs(list(found.values()), self._name, "the event ids")
        held = dict(zip(found, zip(of_arrival.tolist(), of_ts.tolist(), strict=True), strict=True))
        assert batch.supersedes is not None
        unknown: dict[int, str] = {}
        for row, key in wanted:
            if key in in_call:
                target = in_call[key]
                ts, arrival = int(batch.event_ts[target]), int(arrivals[target])
            elif key in held:
                arrival, ts = held[key]
            else:
                owner, name = batch.user_at(row), id_value(batch.supersedes, row)
                outside = resolve(owner, name) if resolve else None
                if outside is None:
                    unknown[batch.input_row(row)] = (
                        f"supersedes {name!r}, an event that user {owner!r} does not have; "
                        "append the event before its correction"
                    )
                    continue
                ts, arrival = outside
            if not 0 < arrival < arrivals[row]:
                name = id_value(batch.supersedes, row)
                unknown[batch.input_row(row)] = (
                    f"(arrival {arrivals[row]}) supersedes {name!r}, which has arrival "
                    f"{arrival}; an event must arrive before its correction"
                )
                continue
            target_ts[row], target_arrival[row] = ts, arrival
        if unknown:
            row, why = min(unknown.items())
            raise UnknownEventError(f"row {row}: {why}", tuple(sorted(unknown)))
        return target_ts, target_arrival

    def held(self, users: Users) -> bytes:
        """All that is held of distinct users that are numbers, as bytes: the pair (counter, trimmed) of each, or
        ``UNKNOWN``; then key, value, key, value, ... of all their blocks in order; then 8 bytes of 0.

        Raises:
            CorruptionError: a pair is not as long as one.
        """
        names = user_keys(users)
        parts: list[bytes] = []
        with self._read() as txn:
            txn.fetch(names, blocks=True)
            found = txn.pairs("users", names)
            for name in found if len(found) == len(names) else [name for name in names if name in found]:
                txn.held(name, parts)
        return held_bytes([found.get(name, b"") for name in names], parts, self._name)

    def read_since(self, users: Users, after: npt.NDArray[np.int64], schema: EventSchema | None = None) -> RecentRead:
        """See ``RecentTier.read_since``."""
        users, after = check_bounds("after", users, after, self._schema.user_kind)
        names = user_keys(users)
        keys: list[bytes] = []
        values: list[bytes] = []
        blocks = np.zeros(len(names), np.int64)
        with self._read() as txn:
            txn.fetch(names, blocks=True)
            top, trimmed = self._counters(txn, names)
            from_arrival = np.maximum(after, trimmed)
            for u in np.flatnonzero(top > from_arrival).tolist():
                blocks[u] = txn.blocks(names[u], int(from_arrival[u]), keys, values)
        rows, arrival, offsets = self._rows_above(schema, after, blocks, keys, values)
        events = Events(users, offsets, rows.event_ts, arrival, never_hidden(len(arrival)), rows.columns)
        hides, hide_offsets = _hides(rows, arrival, offsets)
        return RecentRead(events, hides, hide_offsets, top, trimmed, rows.event_ids)

    def _rows_above(
        self,
        schema: EventSchema | None,
        after: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        keys: list[bytes],
        values: list[bytes],
    ) -> tuple[Rows, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows of each user's ``blocks`` that are above ``after``, their arrivals, and offsets by user."""
        opened = open_blocks(schema or self._schema, self._schema_of, blocks, after, keys, values) if keys else None
        if opened is not None:
            return opened
        try:
            decoded = decode_blocks(schema or self._schema, self._schema_of, keys, values, self._name)
        except CommitConflict:
            if schema is not None:
                raise
            self._schema = self._newest_schema()
            decoded = decode_blocks(self._schema, self._schema_of, keys, values, self._name)
        user = np.repeat(np.repeat(np.arange(len(blocks)), blocks), decoded.counts)
        arrival, rows = decoded.arrival, decoded.rows
        keep = arrival > after[user]
        if not keep.all():
            index = np.flatnonzero(keep)
            user, arrival, rows = user[index], arrival[index], rows.take(index)
        return rows, arrival, offsets_of(np.bincount(user, minlength=len(blocks)))

    def users(self) -> Users:
        """See ``RecentTier.users``."""
        with self._read() as txn:
            return users_of_keys(txn.holders(), self._schema.user_kind)

    def known_users(self, limit: int | None = None) -> Users:
        """See ``RecentTier.known_users``."""
        with self._read() as txn:
            return users_of_keys([key for key, _ in islice(txn.scan("users"), limit)], self._schema.user_kind)

    def check_ids(self) -> None:
        """See ``RecentTier.check_ids``."""
        with self._read() as txn:
            pairs = txn.scan("ids")
            while some := list(islice(pairs, _PAIRS_AT_ONCE)):
                unpack_pairs([value for _, value in some], self._name, "the event ids")
            positions_of(list(txn.scan("positions")), self._name)

    def stored(self) -> Iterator[Stored]:
        """All that is held, as bytes, in parts; of each user as of one moment after this was called, and of all users
        as of one where the tier is ``atomic_over_users``. Appends go on meanwhile."""
        with self._read() as txn:
            yield from parts_of(txn)

    def fill(self, source: BlockTier) -> None:
        """Take over all that ``source`` holds. This tier must be new, and used by nobody else."""
        for part in source.stored():
            self._put_stored(part)
        # After the events: one may be of a schema that came meanwhile.
        source._newest_schema()
        for number in sorted(source._schemas):
            self._learn(source._schemas[number])
        if source._floor > self._floor:
            self._write(lambda txn: txn.raise_floor(source._floor))
            self._floor = max(self._floor, source._floor)

    def _put_stored(self, part: Stored) -> None:
        self._write(lambda txn: put_part(txn, part))

    def trim(self, users: Users, through: npt.NDArray[np.int64]) -> None:
        """See ``RecentTier.trim``."""
        users, through = check_bounds("through", users, through, self._schema.user_kind)
        keys = user_keys(users)

        def work(txn: Writing) -> None:
            txn.fetch(keys, through=through.tolist())
            counters, trimmed = self._counters(txn, keys)
            known = txn.pairs("users", keys)
            # A user who was erased meanwhile stays forgotten: the floor is above what was dropped.
            stays = np.array([key in known for key in keys], np.bool_) | (through > self._floor)
            changed = np.flatnonzero((through > trimmed) & stays).tolist()
            for u in changed:
                self._trim_user(txn, keys[u], int(through[u]))
            values = pack_pairs(np.maximum(counters, through)[changed], through[changed])
            txn.put_pairs("users", zip([keys[u] for u in changed], values, strict=True))

        if len(keys):
            self._write(work)

    def _trim_user(self, txn: Writing, user_key: bytes, through: int) -> None:
        last = txn.pop_blocks(user_key, through)
        if last is not None:
            key, value = last
            written = self._schema_of(schema_id_of(value))
            if written is None:
                raise CorruptionError("a block was written under a schema that is not stored", file=self._name)
            new_key = user_key + (through + 1).to_bytes(8, "big")
            rest = split_block(written, key, value, through, self._name, new_key)
            if rest is not None:
                txn.put_blocks([(new_key, rest)])

    def reserve(self, users: Users, at_least: npt.NDArray[np.int64], n: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See ``RecentTier.reserve``."""
        users, at_least = check_bounds("at_least", users, at_least, self._schema.user_kind)
        users, n = check_bounds("n", users, n, self._schema.user_kind)
        keys = user_keys(users)

        def work(txn: Writing) -> npt.NDArray[np.int64]:
            counters, trimmed = self._above_epoch(txn, keys)
            first = np.maximum(counters, at_least)
            refuse_overflow(users, first, n)
            txn.put_pairs("users", zip(keys, pack_pairs(first + n, trimmed), strict=True))
            return first

        return self._write(work) if len(keys) else np.empty(0, np.int64)

    def raise_counters(self, users: Users, at_least: npt.NDArray[np.int64]) -> None:
        """See ``RecentTier.raise_counters``."""
        users, at_least = check_bounds("at_least", users, at_least, self._schema.user_kind)
        keys = user_keys(users)

        def work(txn: Writing) -> None:
            counters, trimmed = self._counters(txn, keys)
            changed = np.flatnonzero(at_least > counters).tolist()
            values = pack_pairs(at_least[changed], trimmed[changed])
            txn.put_pairs("users", zip([keys[u] for u in changed], values, strict=True))

        if len(keys):
            self._write(work)

    def erase(
        self,
        users: Users,
        offsets: npt.NDArray[np.int64],
        first: npt.NDArray[np.int64],
        last: npt.NDArray[np.int64],
        whole: npt.NDArray[np.bool_],
    ) -> None:
        """See ``RecentTier.erase``."""
        through = np.zeros(len(users), np.int64)
        np.maximum.at(through, np.repeat(np.arange(len(users)), np.diff(offsets)), last)
        users, through = check_bounds("last", users, through, self._schema.user_kind)
        keys = user_keys(users)

        def work(txn: Writing) -> None:
            txn.fetch(keys, through=through.tolist())
            counters, trimmed = self._counters(txn, keys)
            floor = 0
            for u in range(len(keys)):
                mine = slice(offsets[u], offsets[u + 1])
                self._erase_ids(txn, keys[u], first[mine], last[mine])
                self._trim_user(txn, keys[u], int(through[u]))
                top = max(int(counters[u]), int(through[u]))
                # A number above it was given since: the user is back.
                if whole[u] and counters[u] <= through[u]:
                    txn.drop_pairs("users", [keys[u]])
                    floor = max(floor, top)
                elif txn.pairs("users", [keys[u]]):
                    below = max(int(trimmed[u]), int(through[u]))
                    txn.put_pairs("users", [(keys[u], pack_pairs(np.array([top]), np.array([below]))[0])])
            if floor > self._floor:
                txn.raise_floor(floor)

        self._rewrite(work)

    def _erase_ids(
        self, txn: Writing, user_key: bytes, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
    ) -> None:
        held = list(txn.scan("ids", user_key))
        if held and len(first):
            arrival, _ = unpack_pairs([value for _, value in held], self._name, "the event ids")
            at = np.maximum(np.searchsorted(first, arrival, side="right") - 1, 0)
            goes = (arrival >= first[at]) & (arrival <= last[at])
            txn.drop_pairs("ids", [held[i][0] for i in np.flatnonzero(goes).tolist()])


def held_bytes(pairs: list[bytes], parts: list[bytes], file: str) -> bytes:
    """What ``BlockTier.held`` gives: the pair of each user, empty where unknown; keys and values of blocks by turns.

    Raises:
        CorruptionError: a pair is not as long as one.
    """
    return joined_pairs([pair or UNKNOWN for pair in pairs], file, "the user counters") + b"".join(parts) + _PAD


def _hides(
    rows: Rows, arrival: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    if rows.target_ts is None or rows.target_arrival is None:
        return np.empty(0, HIDE_DTYPE), np.zeros(len(offsets), np.int64)
    at = np.flatnonzero(rows.target_arrival)
    hides = np.empty(len(at), HIDE_DTYPE)
    hides["event_ts"], hides["arrival"] = rows.target_ts[at], rows.target_arrival[at]
    hides["hidden_from"] = arrival[at]
    return hides, np.searchsorted(at, offsets).astype(np.int64)
