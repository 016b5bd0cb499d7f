"""Positions of event sources, as a tier keeps them beside the events.

Worked example: partition 0 of the source ``clicks`` is read up to offset 120. The database ``positions`` holds, sealed,
``clicks NUL 0 -> {"offset": 120}``. An append of messages 120 to 219 carries ``Advance("clicks", "0", <that>, <220>)``:
it happens only if 120 still stands there, so that no message enters twice, whoever else reads the partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinrow.core.errors import CorruptionError, InputError, PositionConflict
from thinrow.history.recent.keys import is_sealed, seal
from thinrow.history.recent.tier import Advance

#: Of source and partition together, in UTF-8 (inclusive).
MAX_NAME_BYTES = 500


def position_key(source: str, partition: str) -> bytes:
    """The key of a partition's position.

    Raises:
        InputError: a name is empty or has a NUL, or both are too long.
    """
    key = f"{source}\0{partition}".encode()
    if not source or "\0" in source or "\0" in partition or len(key) > MAX_NAME_BYTES + 1:
        raise InputError(
            f"source {source!r:.80}, partition {partition!r:.80}: names of {len(key) - 1} bytes; use at most "
            f"{MAX_NAME_BYTES}, no NUL, and a source that is not empty"
        )
    return key


def sealed_positions(advances: Sequence[Advance]) -> list[tuple[bytes, bytes]]:
    """(key, value) of each, as stored. Raises InputError where a partition is named twice, and as ``position_key``."""
    found = {key: seal(key, a.after.encode()) for a in advances for key in [position_key(a.source, a.partition)]}
    if len(found) != len(advances):
        raise InputError(f"{len(advances)} advances of {len(found)} partitions; name each partition once")
    return list(found.items())


def refuse_moved(advances: Sequence[Advance], held: Mapping[bytes, bytes], file: str) -> None:
    """Raises PositionConflict where a partition does not stand at ``before``; CorruptionError as ``positions_of``."""
    for a in advances:
        key = position_key(a.source, a.partition)
        found = None if key not in held else _unsealed(key, held[key], file)
        if found != a.before:
            raise PositionConflict(
                f"partition {a.partition!r} of source {a.source!r} stands at {found}, not at {a.before}: another "
                "reader was first; read on from where it stands"
            )


def positions_of(pairs: Sequence[tuple[bytes, bytes]], file: str) -> dict[str, str]:
    """Partition -> position of stored pairs. Raises CorruptionError."""
    return {key.partition(b"\0")[2].decode(): _unsealed(key, value, file) for key, value in pairs}


def _unsealed(key: bytes, value: bytes, file: str) -> str:
    if not is_sealed(key, value):
        source, _, partition = key.decode(errors="replace").partition("\0")
        raise CorruptionError(f"the position of partition {partition!r} of source {source!r} fails its CRC", file=file)
    return value[:-4].decode()
