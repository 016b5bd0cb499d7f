"""HistoryVersion: what a request logs instead of its history.

Worked example. User 7's archive holds 3 visible events at request time, (1000 ms, arrival 1), (1500, 2), (1500, 3), of
the 4 arrivals that the pinned generation held; one more event (arrival 5) was recent and is logged inline::

    HistoryVersion(start_ts=1000, end_ts=1500, seq_len=3, checksum=<sum of three mixes>,
                   last_arrival=4, snapshot_arrival=5, schema_id=1)
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

import numpy as np

from thinrow.core.errors import InputError

#: One HistoryVersion per element; fields as in HistoryVersion.
VERSION_DTYPE = np.dtype(
    [
        ("start_ts", "<i8"),
        ("end_ts", "<i8"),
        ("seq_len", "<i8"),
        ("checksum", "<u8"),
        ("last_arrival", "<i8"),
        ("snapshot_arrival", "<i8"),
        ("schema_id", "<i4"),
    ]
)

_WIRE = struct.Struct("<BqqqQqqi")
_WIRE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class HistoryVersion:
    """O(1) description of the history that a request saw.

    Attributes:
        start_ts: event time of the oldest visible archived event, ms, inclusive (0 where there is none).
        end_ts: event time of the newest visible archived event, ms, inclusive (0 where there is none).
        seq_len: number of visible archived events.
        checksum: identity digest of those events: the sum modulo 2^64 of mix(event_ts, arrival).
        last_arrival: highest arrival number that the pinned generation held of this user (inclusive bound of scans).
        snapshot_arrival: highest arrival number that the whole snapshot could see (inclusive bound of visibility).
        schema_id: the schema under which the snapshot was taken.
    """

    start_ts: int = 0
    end_ts: int = 0
    seq_len: int = 0
    checksum: int = 0
    last_arrival: int = 0
    snapshot_arrival: int = 0
    schema_id: int = 1

    def encode(self) -> bytes:
        """53 bytes, little-endian, first byte the format number."""
        return _WIRE.pack(_WIRE_FORMAT, *astuple(self))

    @classmethod
    def decode(cls, data: bytes) -> HistoryVersion:
        """Reverse of ``encode``. Raises InputError on other lengths or formats."""
        if len(data) != _WIRE.size:
            raise InputError(f"an encoded version has {_WIRE.size} bytes, got {len(data)}; log it whole")
        form, *fields = _WIRE.unpack(data)
        if form != _WIRE_FORMAT:
            raise InputError(
                f"version format {form} is not {_WIRE_FORMAT}, the one known; log it whole, or update thinrow"
            )
        return cls(*fields)
