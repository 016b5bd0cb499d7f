"""Dead letters tried again: after a fix of schema, registry, code, or once the event came that a correction names.

Worked example: three letters, of which one still is no JSON. The other two are appended; the transaction that appends
them moves the position of ``.dead`` to the file of what is left, which holds one letter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import InputError, UnknownEventError
from thinrow.core.units import NEVER
from thinrow.history.dead_letters import SOURCE, Letter, Retry
from thinrow.history.recent.tier import Advance
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.decode import Decoder
from thinrow.sources.ingest import check_key
from thinrow.sources.places import make_decoder
from thinrow.sources.pseudonyms import Pseudonyms
from thinrow.sources.screen import screen
from thinrow.sources.source import SOURCE_ID, SOURCE_KEY
from thinrow.sources.wanted import added_by_source, as_numbers, empty_table, wanted_of


@dataclass(frozen=True, slots=True)
class RetryReport:
    """``events`` of the letters were taken in, ``duplicates`` were there already, ``left`` are letters still."""

    events: int
    duplicates: int
    left: int


def retry_letters(
    store: HistoryStore,
    pseudonyms: Pseudonyms | None = None,
    decoder_of: Callable[[Mapping[str, str]], Decoder] = make_decoder,
    max_future_ms: int | None = None,
    clock: Clock = system_clock,
) -> RetryReport:
    """Take in what can be taken in now; killed at any moment, the same call goes on.

    Args:
        decoder_of: makes a decoder of a letter's ``how``.
        max_future_ms: events later than the clock by more stay; None for no bound.

    Raises:
        StoreError: store or registry refuse; nothing has changed.
        CorruptionError: a letter is damaged.
    """
    check_key(store, pseudonyms)
    schema = store.schema
    with store.dead_letters.retrying() as retry:
        if not retry.letters:
            return RetryReport(0, 0, 0)
        stand = {name: store.recent.positions(name) for name in {letter.source for letter in retry.letters}}
        # Of a batch that has not happened: its events come again from the source.
        happened: list[Letter] = []
        early: list[Letter] = []
        for x in retry.letters:
            has_not = x.since is not None and x.since == stand[x.source].get(x.partition, "")
            (early if has_not else happened).append(x)
        if not happened:
            return RetryReport(0, 0, len(early))
        table, tried, stay = decode_letters(happened, schema, decoder_of)
        stay += early
        if pseudonyms is not None:
            table = pseudonyms.apply(table, schema.user_column, schema.user_kind)
        found = screen(table, schema, NEVER if max_future_ms is None else clock() + max_future_ms)
        stay += [replace(tried[row], reason=why) for row, why in found.refused.items()]
        return _append(store, retry, found.events, [tried[i] for i in found.rows.tolist()], stay, found.repeated)


def decode_letters(
    letters: Sequence[Letter], schema: EventSchema, decoder_of: Callable[[Mapping[str, str]], Decoder]
) -> tuple[pa.Table, list[Letter], list[Letter]]:
    """Rows of the letters that can be decoded, the letter of each row, and the letters that cannot be, with the reason
    of today. Raises StoreError where a registry does not answer."""
    stay: list[Letter] = []
    tables: list[pa.Table] = [empty_table(schema)]
    tried: list[Letter] = []
    for how, some in _by_how(letters, stay).items():
        table, rows = _decode(some, decoder_of(json.loads(how)), schema, stay)
        tables.append(table)
        tried += [some[i] for i in rows]
    names = tables[0].column_names
    table = pa.concat_tables([as_numbers(t.select(names)) for t in tables], promote_options="permissive")
    return table, tried, stay


def _by_how(letters: Sequence[Letter], stay: list[Letter]) -> dict[str, list[Letter]]:
    found: dict[str, list[Letter]] = {}
    for letter in letters:
        if letter.payload is None:
            stay.append(letter)
        else:
            found.setdefault(json.dumps(letter.how, sort_keys=True), []).append(letter)
    return found


def _decode(
    letters: Sequence[Letter], decoder: Decoder, schema: EventSchema, stay: list[Letter]
) -> tuple[pa.Table, list[int]]:
    done = decoder.decode([letter.payload or b"" for letter in letters], wanted_of(schema))
    stay += [replace(letters[i], reason=why) for i, why in done.refused.items()]
    table = done.table
    for name in added_by_source(schema):
        if name == SOURCE_ID:
            column = pa.array(["/".join(letters[i].name) for i in done.rows], pa.string())
        elif name == SOURCE_KEY:
            column = pa.array([(letters[i].key or b"").decode(errors="replace") for i in done.rows], pa.string())
        else:
            column = pa.array([letters[i].at_ms for i in done.rows], pa.int64())
        table = table.append_column(name, column)
    if not done.rows:
        table = empty_table(schema)
    return table, done.rows


def _append(
    store: HistoryStore, retry: Retry, events: object, tried: list[Letter], stay: list[Letter], repeated: int
) -> RetryReport:
    from thinrow.history.intake import CheckedEvents

    assert isinstance(events, CheckedEvents)
    advance = Advance(SOURCE, "", str(retry.number) if retry.number else None, str(retry.number + 1))
    rows = np.arange(len(events))
    while len(rows):
        retry.leave(stay)
        try:
            result = store.append_checked(events.take(rows), [advance])
        except UnknownEventError as e:
            if not e.rows:
                raise InputError(f"a letter cannot be taken in: {e}") from e
            gone = rows[list(e.rows)]
            stay += [replace(tried[i], reason="it supersedes an event that its user does not have") for i in gone]
            rows = np.delete(rows, e.rows)
            continue
        duplicates = int(result.duplicate.sum())
        return RetryReport(len(rows) - duplicates, duplicates + repeated, len(stay))
    return RetryReport(0, 0, len(stay))
