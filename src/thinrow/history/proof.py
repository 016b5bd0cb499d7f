"""Proof that a rewrite lost nothing: content digests add up, so those that are written must be the sum of those read.

Worked example: two segments of 60 and 40 events are merged with 10 new ones. ``digests_of`` gives the sum of the two
segments' digests, ``plus`` adds those of the new events, and ``prove`` holds the segment of 110 against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from thinrow.core.errors import CorruptionError
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.layout import SegmentInfo
from thinrow.schema.event_schema import HIDDEN_FROM_ID

Digests = dict[str, int]


def digests_of(view: Generation) -> Digests:
    """Digests of all events in the segments of a view (one or more), of the columns that each segment has, as these
    events have them under today's schema."""
    return reduce(plus, (_comparable(view, number) for number in range(len(view.segments))))


def _comparable(view: Generation, number: int) -> Digests:
    # A widened float has other bits.
    stored = ((c.id, view.stream_of(number, c.id)) for c in view.schema.columns if c.dtype == "float64")
    widened = {str(i) for i, part in stored if part is not None and part[2].dtype == "float32"}
    return {k: d for k, d in view.segments[number][1].shown_digests.items() if k not in widened}


def plus(total: Mapping[str, int], part: Mapping[str, int]) -> Digests:
    """Digests of both together, of the columns that both have."""
    return {key: (value + part[key]) % (1 << 64) for key, value in total.items() if key in part}


def minus(total: Mapping[str, int], part: Mapping[str, int]) -> Digests:
    """Digests of what is left of ``total`` without ``part``, of the columns that both have."""
    return {key: (value - part[key]) % (1 << 64) for key, value in total.items() if key in part}


def prove(base: Generation, expected: Mapping[str, int], written: Sequence[SegmentInfo], doing: str, file: str) -> None:
    """Delete what was written where it is not what ``doing`` should leave; columns that the schema dropped are free.

    Args:
        file: named as damaged, for that is what is likely.

    Raises:
        CorruptionError: the digest of a column differs.
    """
    for key, digest in expected.items():
        # Applying a hide-list changes hidden_from; what an event says of itself never changes.
        if key == str(HIDDEN_FROM_ID) or any(key not in info.digests for info in written):
            continue
        found = sum(info.digests[key] for info in written) % (1 << 64)
        if found != digest:
            for info in written:
                base.objects.delete(info.name)
            raise CorruptionError(f"{doing} would change column {key}: {digest} in, {found} out", file=file)
