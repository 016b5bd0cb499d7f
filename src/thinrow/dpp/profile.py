"""Profile: where bytes, CPU seconds and time of a reader go, by column and stage.

Batches are made in the calling thread, one when it is asked for, so that what is measured is the work of the batches
that are counted and of nothing else. The unit of cost is CPU seconds per million events delivered to examples; a
history that examples share counts for each of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from thinrow.core.errors import InputError
from thinrow.dpp.client import Pinnable, loader
from thinrow.dpp.engines import InTurn
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.schema.event_schema import ARRIVAL_ID, EVENT_ID_ID, EVENT_TS_ID, HIDDEN_FROM_ID

#: What is read of a history beside the schema's columns.
_OWN = {EVENT_TS_ID: "event_ts", ARRIVAL_ID: "arrival", HIDDEN_FROM_ID: "hidden_from", EVENT_ID_ID: "event_id"}


@dataclass(frozen=True, slots=True)
class Profile:
    """Attributes:
    batches, examples, events: that were delivered.
    wall_s, cpu_s: that it took.
    stage_s: seconds by stage, most first; "other" is what no stage booked.
    column_bytes: bytes of blocks read by column, most first.
    """

    batches: int
    examples: int
    events: int
    wall_s: float
    cpu_s: float
    stage_s: Mapping[str, float]
    column_bytes: Mapping[str, int]

    @property
    def cpu_s_per_million(self) -> float:
        """CPU seconds per million events."""
        return self.cpu_s / max(self.events, 1) * 1e6


def profile(store: Pinnable | Generation, table: ExampleTable, *, batches: int, **options: Any) -> Profile:
    """Read ``batches`` batches, after a first one that compiles and opens files. Where there is no other, it is read
    again.

    Args:
        batches: at most; fewer where the run ends.
        options: of ``thinrow.loader``, engine and workers aside.

    Raises:
        InputError: there is no example, or as ``loader``.
    """
    generation = store if isinstance(store, Generation) else store.pin()
    reader = loader(generation, table, engine=InTurn(), workers=1, **options)
    walk = iter(reader)
    if next(walk, None) is None:
        raise InputError("there is no example to read; see ExampleTable.rows() and what the filter leaves")
    if reader.n_batches == 1:
        # By a reader of its own, which has no decoded rows yet.
        reader.close()
        reader = loader(generation, table, engine=InTurn(), workers=1, **options)
        walk = iter(reader)
    # Figures begin where the first batch is done with; objects of it stay.
    stats, seconds, sizes = reader.stats, dict(reader.stats.seconds), dict(reader.stats.column_bytes)
    wall, cpu, events, examples, n = time.perf_counter(), time.process_time(), 0, 0, 0
    for batch in islice(walk, batches):
        events, examples, n = events + int(batch.histories.lengths().sum()), examples + len(batch), n + 1
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    reader.close()
    stages = {s: v - seconds.get(s, 0.0) for s, v in stats.seconds.items()}
    stages["other"] = max(wall - sum(stages.values()), 0.0)
    names = _OWN | {c.id: c.name for c in generation.schema.columns}
    columns = {names.get(i, f"column {i}"): v - sizes.get(i, 0) for i, v in stats.column_bytes.items()}
    most = sorted(stages.items(), key=lambda s: -s[1]), sorted(columns.items(), key=lambda s: -s[1])
    return Profile(n, examples, events, wall, cpu, dict(most[0]), dict(most[1]))
