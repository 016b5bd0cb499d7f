"""Batch: examples with their rebuilt histories, one shared copy per user, ready for a model.

Worked example: two requests of user 7 and one of user 9, two candidates each::

    histories    events of 7 and 9 once; user_of [0, 1, 0], each with its own start, stop and bound
    candidates   {"item": [[1, 2], [3, 4], [1, 5]]}      labels {"click": [[0, 1], [0, 0], [1, 0]]}
    features     {"item_bucket": [[17, 4], ...]}          outputs of the plan beside candidates and context

Outputs of the plan that stand beside events are columns of ``histories.events``, shared like all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.users import Users
from thinrow.examples.records import concat_rows, take_rows
from thinrow.jagged import Column, Jagged, SharedHistories
from thinrow.jagged.column import concat_columns


@dataclass(frozen=True, slots=True)
class Batch:
    """X examples.

    Attributes:
        request_id: (X,) int64.
        request_ts: (X,) int64 ms; histories hold events before it (exclusive).
        histories: X examples on shared events; also outputs of the plan that stand beside events.
        context: name -> (X,) Column.
        candidates: name -> X rows.
        labels: outcome name -> X rows of int32, aligned with the candidates.
        features: name -> (X,) Column or X rows, the other outputs of the plan.
        model_version: (X,) string Column.
        arm: (X,) string Column.
        boundary: (X,) int64, how many of the newest events the logged model treated as the recent part.
        status: (X,) int8, whether events that the example saw are gone (``thinrow.history.missing``): 0 for none.
        t: the number of the global batch; -1 within the reader.
    """

    request_id: npt.NDArray[np.int64]
    request_ts: npt.NDArray[np.int64]
    histories: SharedHistories
    context: dict[str, Column]
    candidates: dict[str, Jagged]
    labels: dict[str, Jagged]
    features: dict[str, Column | Jagged]
    model_version: Column
    arm: Column
    boundary: npt.NDArray[np.int64]
    status: npt.NDArray[np.int8]
    t: int = -1

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def users(self) -> Users:
        """(X,) user of each example."""
        return self.histories.events.users[self.histories.user_of]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays; ``arrival`` and ``hidden_from`` count, though they may be made when they are asked
        for."""
        h = self.histories
        events = h.events.event_ts.nbytes * 3 + sum(c.nbytes for c in h.events.columns.values())
        groups = (self.context, self.candidates, self.labels, self.features)
        # A few numbers an example beside them: request, slice and bound, model and arm.
        return events + sum(c.nbytes for group in groups for c in group.values()) + 80 * len(self)

    def take(self, rows: npt.NDArray[Any], t: int = -1) -> Batch:
        """The examples at ``rows`` (positions), in that order; events are copied only to drop users without example."""
        return Batch(
            self.request_id[rows],
            self.request_ts[rows],
            self.histories.select(rows),
            {n: c.take(rows) for n, c in self.context.items()},
            take_rows(self.candidates, rows),
            take_rows(self.labels, rows),
            {n: c.take(rows) for n, c in self.features.items()},
            self.model_version.take(rows),
            self.arm.take(rows),
            self.boundary[rows],
            self.status[rows],
            t,
        )

    def with_histories(self, histories: SharedHistories) -> Batch:
        """The same examples with other histories."""
        return replace(self, histories=histories)

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """The examples of ``parts`` (one or more, of one spec) one after another."""
        if len(parts) == 1:
            return parts[0]
        return Batch(
            np.concatenate([p.request_id for p in parts]),
            np.concatenate([p.request_ts for p in parts]),
            SharedHistories.concat([p.histories for p in parts]),
            {n: concat_columns([p.context[n] for p in parts]) for n in parts[0].context},
            concat_rows([p.candidates for p in parts]),
            concat_rows([p.labels for p in parts]),
            _concat_features([p.features for p in parts]),
            concat_columns([p.model_version for p in parts]),
            concat_columns([p.arm for p in parts]),
            np.concatenate([p.boundary for p in parts]),
            np.concatenate([p.status for p in parts]),
        )


def _concat_features(parts: Sequence[dict[str, Column | Jagged]]) -> dict[str, Column | Jagged]:
    result: dict[str, Column | Jagged] = {}
    for name, first in parts[0].items():
        values = [p[name] for p in parts]
        if isinstance(first, Jagged):
            result.update(concat_rows([{name: v} for v in values if isinstance(v, Jagged)]))
        else:
            result[name] = concat_columns([v for v in values if isinstance(v, Column)])
    return result
