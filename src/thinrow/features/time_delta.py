"""TimeDelta: how long from one time to another, in whole units.

From 1,000 ms to 4,500 ms in seconds: 3; the other way -4 (rounded down); null where either is null. The age of a
candidate at its request, in hours::

    TimeDelta(Source("cand.published_ts"), Source("ctx.request_ts"), "h")

``ctx.request_ts`` is the request's own time, there without being logged twice. A value beside an event is shared by all
requests that see the event, so it cannot hang on the request: the model has both times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import pyarrow as pa

from thinrow.core.errors import InputError
from thinrow.features.node import Domain, Node, joint_domain
from thinrow.features.value import Value, aligned, united_mask

Unit = Literal["ms", "s", "m", "h", "d"]
_REMEDY = "take both times from the event, or both from the request"
_MS: dict[str, int] = dict(zip(get_args(Unit), (1, 1000, 60_000, 3_600_000, 86_400_000), strict=True))


@dataclass(frozen=True)
class TimeDelta(Node):
    """int64.

    Attributes:
        since, until: times in ms since 1970, integers; a time of the context stands beside every candidate.
        unit: of the result, milliseconds to days.
    """

    since: Node
    until: Node
    unit: Unit = "s"
    op: ClassVar[str] = "time_delta"
    operand_fields: ClassVar[tuple[str, ...]] = ("since", "until")

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str) or self.unit not in _MS:
            raise InputError(f"time_delta: unit={self.unit!r}; it must be one of {', '.join(_MS)}")
        joint_domain("time_delta", self.operands, _REMEDY)

    @property
    def operands(self) -> tuple[Node, ...]:
        return self.since, self.until

    @property
    def domain(self) -> Domain:
        return joint_domain("time_delta", self.operands, _REMEDY)

    @property
    def ms(self) -> int:
        """Milliseconds of a unit."""
        return _MS[self.unit]

    @staticmethod
    def check_times(dtype: np.dtype[Any] | pa.DataType) -> None:
        """Raises InputError where a column of ``dtype`` has no times."""
        if not isinstance(dtype, np.dtype) or dtype.kind not in "iu":
            raise InputError(f"time_delta of a column of {dtype}; times are integers, ms since 1970")

    def evaluate(self, operands: Sequence[Value]) -> Value:
        (since, until), offsets = aligned(operands, "time_delta")
        for side in (since, until):
            self.check_times(side.entries.dtype if isinstance(side.entries, np.ndarray) else side.entries.type)
        delta = until.numbers().astype(np.int64) - since.numbers().astype(np.int64)
        return Value(delta // self.ms, None, united_mask((since, until)), offsets)
