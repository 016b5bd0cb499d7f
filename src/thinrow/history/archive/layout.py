"""Names, record types and streams of a segment (docs/format/archive-v2.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from thinrow.jagged.column import Column, null_column
from thinrow.schema.event_schema import (
    ARRIVAL_ID,
    DTYPES,
    EVENT_ID_ID,
    EVENT_TS_ID,
    HIDDEN_FROM_ID,
    IDS_GROUP,
    KEYS_GROUP,
    MAX_ELEMENTS,
    ColumnSpec,
    EventSchema,
)

STRIPE_ROWS = 512
#: Most rows of any stripe: what a reader takes memory for on the word of a record of the index.
MAX_STRIPE_ROWS = 65_536
#: Of the lists of one column in a stripe: 512 of the longest.
MAX_STRIPE_ELEMENTS = 1 << 24

#: Name under which event ids travel in ``Events.columns``; no schema column may have it.
EVENT_ID = "event_id"


def stripe_dtype(n_groups: int) -> np.dtype[np.void]:
    """Stripe record of a segment with ``n_groups`` group regions."""
    chunk = np.dtype([("offset", "<u8"), ("length", "<u4"), ("header_crc", "<u4")])
    return np.dtype([("n_rows", "<u4"), ("reserved", "<u4"), ("chunks", chunk, (n_groups,))])


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column as a segment stores it: ``dtype`` is a schema dtype. Before the stream of values a nullable one has one
    of nulls, and then a ``ragged`` one, of lists, one of lengths. A vector has ``size`` values a row."""

    id: int
    name: str
    dtype: str
    group: str
    nullable: bool
    ragged: bool = False
    size: int = 0

    def __hash__(self) -> int:
        return self.id

    def check(self) -> None:
        """Raises TypeError or ValueError where a file said of a column what no writer says."""
        kinds = {"id": int, "name": str, "dtype": str, "group": str, "nullable": bool, "ragged": bool, "size": int}
        for name, kind in kinds.items():
            if type(getattr(self, name)) is not kind:
                raise TypeError(f"{name} {getattr(self, name)!r:.80} of a column is no {kind.__name__}")
        if self.dtype not in DTYPES or not 0 <= self.size <= MAX_ELEMENTS or (self.ragged and self.size):
            raise ValueError(f"a column of {self.dtype!r:.80} and size {self.size}")

    @classmethod
    def of(cls, spec: ColumnSpec) -> StoredColumn:
        """How a column of a schema is stored."""
        return cls(spec.id, spec.name, spec.dtype, spec.group, spec.nullable, spec.ragged, spec.size)

    def nulls(self, n: int) -> Column:
        """What ``n`` events read that were written without the column."""
        return null_column(self.dtype, n, ragged=self.ragged, size=self.size)

    @property
    def is_bytes(self) -> bool:
        """Whether values are of variable length."""
        return self.dtype in ("string", "binary")

    @property
    def n_streams(self) -> int:
        """Blocks that the column takes in a stripe chunk."""
        return 1 + self.nullable + self.ragged


def key_columns() -> tuple[StoredColumn, ...]:
    """Group 0 of every segment."""
    return (
        StoredColumn(EVENT_TS_ID, "event_ts", "int64", KEYS_GROUP, False),
        StoredColumn(ARRIVAL_ID, "arrival", "int64", KEYS_GROUP, False),
        StoredColumn(HIDDEN_FROM_ID, "hidden_from", "int64", KEYS_GROUP, False),
    )


def stored_columns(schema: EventSchema) -> tuple[StoredColumn, ...]:
    """All columns of a segment, group by group in file order."""
    columns = list(key_columns())
    if schema.event_id_dtype is not None:
        columns.append(StoredColumn(EVENT_ID_ID, EVENT_ID, schema.event_id_dtype, IDS_GROUP, True))
    for group in schema.groups:
        columns += [StoredColumn.of(c) for c in schema.columns if c.group == group]
    return tuple(columns)


def overlay_region(column_id: int) -> str:
    """What a reader calls the region of a column's overlays; no new feature group has this name (``check_new``)."""
    return f"\0overlay {column_id}"


def groups_of(columns: tuple[StoredColumn, ...]) -> tuple[str, ...]:
    """Group names in file order."""
    return tuple(dict.fromkeys(c.group for c in columns))


@dataclass(frozen=True, slots=True)
class OverlayInfo:
    """What the manifest keeps of an overlay: the id of its ``column``, and that column's content digest."""

    name: str
    bytes: int
    column: int
    digest: int

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the digest as a decimal string."""
        return {"name": self.name, "bytes": self.bytes, "column": self.column, "digest": str(self.digest)}


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What the manifest keeps of a segment. ``digests``: "identity" or column id -> digest, modulo 2^64, of what the
    segment file holds; ``overlays``: at most one a column."""

    name: str
    bytes: int
    n_rows: int
    n_users: int
    digests: dict[str, int]
    overlays: tuple[OverlayInfo, ...] = ()

    @property
    def shown_digests(self) -> dict[str, int]:
        """Digests of what readers see: a column that has an overlay is the overlay's."""
        return {**self.digests, **{str(o.column): o.digest for o in self.overlays}}

    @property
    def files(self) -> tuple[str, ...]:
        """Names of its files."""
        return (self.name, *(o.name for o in self.overlays))

    def to_dict(self) -> dict[str, Any]:
        """JSON form: digests as decimal strings, ``overlays`` only where there are some."""
        overlays = {"overlays": [o.to_dict() for o in self.overlays]} if self.overlays else {}
        return {
            "name": self.name,
            "bytes": self.bytes,
            "n_rows": self.n_rows,
            "n_users": self.n_users,
            "digests": {k: str(v) for k, v in self.digests.items()},
            **overlays,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SegmentInfo:
        """Reverse of ``to_dict``. Raises KeyError, TypeError, ValueError or AttributeError on anything else."""
        overlays = tuple(OverlayInfo(**{**o, "digest": int(o["digest"])}) for o in data.get("overlays", ()))
        digests = {k: int(v) for k, v in data["digests"].items()}
        found = cls(**{**data, "digests": digests, "overlays": overlays})
        counts = (found.bytes, found.n_rows, found.n_users, *(n for o in overlays for n in (o.bytes, o.column)))
        if not all(isinstance(n, str) for n in found.files) or any(type(n) is not int for n in counts):
            raise TypeError(f"{data!r:.80} has a name that is no text, or a count that is no number")
        if not 0 <= found.n_rows < 1 << 62 or not 0 <= found.bytes < 1 << 62:
            raise ValueError(f"{found.n_rows} rows in {found.bytes} bytes")
        return found
