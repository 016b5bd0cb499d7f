"""What an event source is, and what it gives.

Worked example: partition 0 of the source ``clicks`` stands at offset 120 in the store. ``read`` gives messages 120 to
219 as a ``Batch`` of 99 rows: number 150 is no JSON and stands in ``refused``. Its move of partition 0 goes from
``{"offset": 120}`` to ``{"offset": 220}``, and is stored in the transaction that appends the rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from thinrow.schema import EventSchema

#: Columns that a source adds to its rows where the schema names them: text that no other event of the source has,
#: the message's key, and the time (ms) that the source gives it.
SOURCE_ID, SOURCE_KEY, SOURCE_TS = "source_id", "source_key", "source_ts"

#: Partition -> stored position, JSON text.
Positions: TypeAlias = Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an event comes from: see ``history.dead_letters.Letter``."""

    partition: str
    where: str
    payload: bytes | None
    key: bytes | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """An event that cannot be decoded, and why."""

    origin: Origin
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """A partition goes from the stored position ``before`` (None: none) to ``after``."""

    before: str | None
    after: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that were read together.

    Attributes:
        table: decoded events in the order in which they came.
        moves: by partition.
        origin: of a row of ``table``.
        refused: events that are not in ``table``.
        skipped: messages that hold no event by intent (tombstones).
        n_bytes: read.
        made_of_messages: whether a bad row is the fault of its event, not of the source's schema.
    """

    table: pa.Table
    moves: Mapping[str, Move]
    origin: Callable[[int], Origin]
    refused: Sequence[Refused] = ()
    skipped: int = 0
    n_bytes: int = 0
    made_of_messages: bool = True
    how: dict[str, str] = field(default_factory=dict)


class Source(Protocol):
    """Something that events are read from, again from any position. One thread at a time."""

    @property
    def name(self) -> str:
        """Under which its positions are stored."""
        ...

    @property
    def reads_ahead(self) -> bool:
        """Whether it is to be read on a thread, ahead of appends: what is let go of comes again after ``start``."""
        ...

    def start(self, schema: EventSchema, positions: Positions) -> None:
        """Begin, or begin again, from the stored positions; ``positions`` may be called later too.

        Raises:
            InputError, SchemaError: it cannot be read as ``schema``.
            StoreError: it does not answer, or events between position and present are gone.
        """
        ...

    def use(self, schema: EventSchema) -> None:
        """Decode what is read from now on for a newer schema."""
        ...

    def read(self, max_events: int, timeout_s: float) -> Batch | None:
        """The next events, about ``max_events`` at most; None where none came in ``timeout_s``."""
        ...

    def acknowledge(self, batch: Batch) -> None:
        """``batch`` is durable in the store."""
        ...

    def ended(self) -> bool:
        """Whether all is read that there is now."""
        ...

    def lag(self) -> int | None:
        """How many events (files, snapshots) are known and not read; None where that cannot be told."""
        ...

    def close(self) -> None:
        """Let go of connections and files."""
        ...


def position(text: str | None) -> dict[str, Any]:
    """A position as a dict, empty for None."""
    return {} if text is None else json.loads(text)


def position_text(**values: Any) -> str:
    """Reverse of ``position``: equal positions give equal text."""
    return json.dumps(values, sort_keys=True)
