"""HistoryMatch: what a candidate has to do with the visible window of its own example, as a step of a plan.

Worked example: the window holds products 7 (on days 0 and 3) and 9 (on day 1); a request on day 5 shows [7, 8]::

    HistoryMatch(Source("history.product"), Source("cand.product"), "count")         [2, 0]
    HistoryMatch(Source("history.product"), Source("cand.product"), "days_since")    [2, -1]
    HistoryMatch(Source("history.product"), Source("cand.product"), "seen")          [1, 0]

The window is the one that the model reads (its newest n events, late and restated ones as the request saw them), online
and offline alike, so nothing that is computed here needs to be logged. The numbers can go on through other ops::

    Hash(Bucketize(HistoryMatch(history, candidate, "count"), boundaries=(1, 2, 4, 8)), seed=5)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from thinrow.core.errors import InputError
from thinrow.features.history_cross import HistoryCross
from thinrow.features.node import EVENT_TS, Domain, Node, Source
from thinrow.features.value import Value

Measure = Literal["count", "days_since", "seen"]
MEASURES: tuple[Measure, ...] = ("count", "days_since", "seen")


@dataclass(frozen=True)
class HistoryMatch(Node):
    """int32, one value a candidate, in the rows of the candidates; never null, a null equals nothing.

    Attributes:
        history: the history column that candidates are looked up in: integers or strings.
        candidate: the candidates' values of the same kind.
        measure: ``count``, the visible events with the candidate's value; ``days_since``, whole days from the newest of
            them to the request, -1 where there is none; ``seen``, 1 where there is one, else 0.
    """

    history: Source
    candidate: Source
    measure: Measure = "count"
    op: ClassVar[str] = "history_match"
    operand_fields: ClassVar[tuple[str, ...]] = ("history", "candidate")

    def __post_init__(self) -> None:
        for field, node, domain in (("history", self.history, "history"), ("candidate", self.candidate, "cand")):
            if not isinstance(node, Source) or node.domain != domain:
                found = repr(node.name) if isinstance(node, Source) else repr(node)
                raise InputError(f"history_match: {field} is {found}; it must be Source('{domain}.NAME')")
        if self.history.name == EVENT_TS:
            raise InputError("history_match: history is 'history.event_ts', a time; give a column of the event schema")
        if self.measure not in MEASURES:
            raise InputError(f"history_match: measure={self.measure!r}; it must be one of {', '.join(MEASURES)}")

    @property
    def operands(self) -> tuple[Node, ...]:
        return (self.history, self.candidate)

    @property
    def domain(self) -> Domain:
        return "cand"

    @property
    def column(self) -> str:
        """The name of the history column."""
        return self.history.name.partition(".")[2]

    def evaluate(self, operands: Sequence[Value]) -> Value:
        raise AssertionError("the plan relates candidates to windows, once for all measures of two operands")

    def pick(self, cross: HistoryCross) -> Value:
        """The step's value, of all that is known of its operands."""
        found = {"count": cross.count, "days_since": cross.days_since, "seen": cross.seen_before}[self.measure]
        return Value(found.values.astype(np.int32, copy=False), None, None, found.offsets)
