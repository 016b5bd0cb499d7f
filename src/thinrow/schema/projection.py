"""Projection: what one tenant reads of a history.

Worked example of aligned windows, ``Projection(max_len=4, align=2)``, events numbered from the oldest visible one::

    visible events    4    5    6    7    8
    window reads     0-3  2-4  2-5  4-6  4-7

The window starts at a multiple of ``align`` in the user's visible sequence and holds 3 or 4 events: requests near each
other share a start, and so one pass of a causal model, where windows of exactly the newest 4 would all start apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinrow.core import check
from thinrow.core.errors import InputError, SchemaError
from thinrow.core.units import NEVER
from thinrow.core.wrap import mix64_words
from thinrow.schema.event_schema import ColumnSpec, EventSchema

_ONE, _NONE = check.integer(1), check.integer(0)


@dataclass(frozen=True, slots=True)
class Projection:
    """Columns, length and age that a model needs; pushed down to byte ranges.

    Attributes:
        columns: names of columns; None for all of ``groups``, or all there are.
        groups: names of feature groups, added to ``columns``.
        max_len: the *newest* n visible events; None for all.
        horizon_ms: only events with ``event_ts >= request_ts - horizon_ms`` (inclusive); None for all.
        align: with ``max_len`` n, windows that do not hold all events start at a multiple of ``align`` in the user's
            visible events, and hold the newest n - align + 1 to n of them; 1 for exactly n. In [1, n], and without a
            horizon.
        codes: columns of single integers, of those read, that are delivered as int32 codes and a dictionary, as text
            always is: what is done for each word, such as a hash or an embedding, is then done for each entry. A word
            may have several entries, and so equal values several codes; every code is right. ``Column.decoded`` gives
            the values.
        shortest: with ``max_len`` n, each request reads its newest m events, m drawn from ``shortest`` to n, inclusive:
            a model learns all lengths and pays for the mean of them. The draw is a function of ``draw_seed``, the
            request's time and its version, so that it is the same whoever reads, in whatever batch; None for always n.
        draw_seed: another one draws other lengths.
    """

    columns: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    max_len: int | None = None
    horizon_ms: int | None = None
    align: int = 1
    codes: tuple[str, ...] = ()
    shortest: int | None = None
    draw_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("columns", "groups", "codes"):
            names = getattr(self, name)
            if names is not None and not (isinstance(names, tuple) and not names):
                object.__setattr__(self, name, tuple(check.names(names, name)))
        if self.max_len is not None:
            _ONE(self.max_len, "max_len")
        if self.horizon_ms is not None:
            _NONE(self.horizon_ms, "horizon_ms")
        _ONE(self.align, "align")
        if self.align > 1 and (self.max_len is None or self.align > self.max_len):
            raise InputError(f"align={self.align} with max_len={self.max_len}; max_len must be align or more")
        if self.align > 1 and self.horizon_ms is not None:
            raise InputError(
                f"align={self.align} with horizon_ms={self.horizon_ms}; a horizon starts windows at times: "
                "drop one of the two"
            )

        if self.shortest is not None:
            _ONE(self.shortest, "shortest")
            if self.max_len is None or self.shortest > self.max_len or self.align > 1:
                raise InputError(
                    f"shortest={self.shortest} with max_len={self.max_len} and align={self.align}; max_len must be "
                    "shortest or more, and windows of drawn lengths are not aligned"
                )
        check.integer(-(1 << 63), (1 << 63) - 1)(self.draw_seed, "draw_seed")

    def drawn(self, request_ts: npt.NDArray[np.int64], checksum: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """(X,) how many of their newest events requests with these times and version checksums read: ``shortest``."""
        assert self.shortest is not None
        assert self.max_len is not None
        words = mix64_words(checksum ^ mix64_words(request_ts.view(np.uint64) ^ np.uint64(self.draw_seed % 2**64)))
        return np.asarray((words % np.uint64(self.max_len - self.shortest + 1)).view(np.int64) + self.shortest)

    def newest(self, visible: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(X,) how many of the newest visible events requests read that see ``visible`` (X,) events; at least 1, and
        ``NEVER`` or more than there are for all. Only where ``align`` is more than 1 does ``visible`` matter. With
        ``shortest`` see ``drawn``."""
        if self.max_len is None or self.align == 1:
            newest = np.empty(len(visible), np.int64)
            newest.fill(NEVER if self.max_len is None else self.max_len)
            return newest
        over = np.maximum(visible - self.max_len, 0)
        skipped = -(-over // self.align) * self.align
        return np.where(over > 0, visible - skipped, self.max_len)

    def resolve(self, schema: EventSchema) -> tuple[ColumnSpec, ...]:
        """The columns asked for, in schema order.

        Raises:
            SchemaError: an unknown column or group, or codes of a column that is not read or has none.
        """
        for name in self.columns or ():
            schema.column(name)
        for group in self.groups or ():
            if group not in schema.groups:
                raise SchemaError(f"no feature group {group!r}; the schema has {', '.join(schema.groups)}")
        found = schema.columns
        if self.columns is not None or self.groups is not None:
            found = tuple(c for c in found if c.name in (self.columns or ()) or c.group in (self.groups or ()))
        for name in self.codes:
            _check_codes(schema.column(name), found)
        return found


def _check_codes(spec: ColumnSpec, read: tuple[ColumnSpec, ...]) -> None:
    if spec not in read:
        raise SchemaError(f"codes of column {spec.name!r}, which is not read; add it to the columns, or drop its codes")
    if spec.ragged or spec.size or spec.dtype in ("float32", "float64"):
        kind = "lists" if spec.ragged else f"vectors of {spec.size}" if spec.size else spec.dtype
        raise SchemaError(
            f"codes of column {spec.name!r}, which holds {kind}; single integers and text have codes: leave it out"
        )


#: Check of an argument that is a projection.
PROJECTION = check.instance(Projection, "give a Projection, such as Projection(max_len=1000)")
