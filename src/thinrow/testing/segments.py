"""A segment in one call, for tests of what reads them; whoever writes a store writes them in parts (``SegmentWriter``).

Worked example: ``write_segment(MemoryObjects(), "segments/a.seg", events, NO_HIDES, schema, bucket=0, n_buckets=1)``
gives the entry that a manifest has of it: its bytes, rows, users and digests.
"""

from __future__ import annotations

from thinrow.history.archive.hides import Hides
from thinrow.history.archive.layout import STRIPE_ROWS, SegmentInfo
from thinrow.history.archive.writer import SegmentWriter
from thinrow.jagged import Events
from thinrow.schema import EventSchema
from thinrow.storage.objects import ObjectStore


def write_segment(
    objects: ObjectStore,
    name: str,
    events: Events,
    hides: Hides,
    schema: EventSchema,
    *,
    bucket: int,
    n_buckets: int,
    stripe_rows: int = STRIPE_ROWS,
) -> SegmentInfo:
    """Write ``events`` (users ascending, each user's events in order of (event_ts, arrival)) as segment ``name``.

    ``hides`` names events of older segments. Raises as ``SegmentWriter``.
    """
    with SegmentWriter(objects, name, schema, bucket=bucket, n_buckets=n_buckets, stripe_rows=stripe_rows) as writer:
        writer.add(events)
        return writer.finish(hides)
