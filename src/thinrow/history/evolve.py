"""Evolve the schema of a store: one commit of a manifest, no segment and no recent event rewritten.

An event of either tier carries the id of the schema it was written under, and is read by column ids. So appends,
snapshots and compactions of any process may go on meanwhile: a compaction that began under the old schema loses the
commit and runs again, and an append that was checked under it stays what it was.
"""

from __future__ import annotations

from thinrow.history.archive.generation import Archive, Generation
from thinrow.schema.evolution import Evolution
from thinrow.storage.manifest import retried


def evolve(archive: Archive, evolution: Evolution) -> Generation:
    """Commit the generation whose schema is the newest one's with ``evolution`` applied.

    Raises:
        SchemaError: the changes do not fit the newest schema; nothing was changed.
        CommitConflict: other writers won twenty times in a row.
    """

    def attempt() -> Generation:
        base = archive.pin()
        schema, change = evolution.apply(base.schema, base.schema_log, archive.clock())
        log = [c.to_dict() for c in (*base.schema_log, change)]
        return archive.commit(base, {}, "; ".join(change.describe()), schema, {"schema_log": log})

    return retried(attempt)
