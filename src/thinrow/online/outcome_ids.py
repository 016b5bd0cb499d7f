"""Which outcomes a log has, by request and id, and appends of those alone that it has not.

Worked example: file 3 of the log holds ``c-1`` of request 7. Two readers get ``c-1`` again and ``c-2`` new, and put
file 4. The first one's holds ``c-2``. The second one's number is taken: it looks at file 4, and ``c-2`` is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import CommitConflict
from thinrow.examples.log import OutcomeLog
from thinrow.examples.records import Outcomes
from thinrow.history.recent.tier import Advance


class KnownIds:
    """Requests and ids of the outcomes that the files of a log hold: of those that are there, for a file that is pruned
    is settled, and what comes again of it finds its request closed."""

    def __init__(self, log: OutcomeLog) -> None:
        self._log = log
        self._next = 0
        self._files: deque[tuple[int, list[str]]] = deque()
        self._names: set[str] = set()

    def append(self, outcomes: Outcomes, advances: Sequence[Advance]) -> tuple[int, int]:
        """How many outcomes went into the log, and how many it had. Raises PositionConflict."""
        while True:
            number = self._look()
            names = names_of(outcomes)
            fresh = self._fresh(names)
            try:
                self._log.append(outcomes.take(fresh), advances, at=number)
            except CommitConflict:
                # Others appended, perhaps these very outcomes.
                continue
            self._add(number, [n for n, new in zip(names, fresh.tolist(), strict=True) if new and n is not None])
            return int(fresh.sum()), int((~fresh).sum())

    def _look(self) -> int:
        """Read what others appended; the number of the next file."""
        numbers = self._log.numbers()
        for number in range(max(self._next, numbers.start), numbers.stop):
            self._add(number, [n for n in names_of(self._log.read(number)) if n is not None])
        while self._files and self._files[0][0] < numbers.start:
            self._names.difference_update(self._files.popleft()[1])
        self._next = numbers.stop
        return numbers.stop

    def _add(self, number: int, names: list[str]) -> None:
        """Those of a file."""
        self._files.append((number, names))
        self._names.update(names)
        self._next = number + 1

    def _fresh(self, names: Sequence[str | None]) -> npt.NDArray[np.bool_]:
        """(n,) whether a name is in no file and no earlier row; one that is None always is."""
        out, here = np.ones(len(names), np.bool_), set[str]()
        for i, name in enumerate(names):
            if name is not None:
                out[i] = name not in self._names and name not in here
                here.add(name)
        return out


def names_of(outcomes: Outcomes) -> list[Any]:
    """(n,) request and id of each, as one text; None where it has no id."""
    if outcomes.outcome_id is None:
        return [None] * len(outcomes)
    requests = pc.cast(pa.array(outcomes.request_id), pa.string())
    ids = outcomes.outcome_id.to_arrow().cast(pa.string())
    return list(pc.binary_join_element_wise(requests, ids, " ").to_pylist())
