"""Gradients that wait for a step, of one backward pass after another.

They are merged when those that came since the last merge are more than what it left: fifty passes over the same
thousand rows keep two thousand of them, and no gradient is added more than a few times. A sum is the same bits whenever
it is made, since it goes on in the order in which the gradients came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Part = TypeVar("Part", bound=tuple[Any, Any])


def with_part(parts: Sequence[Part], new: Part, merged: Callable[[list[Part]], Part]) -> list[Part]:
    """``parts``, each (rows, sums), and ``new``; as one, by ``merged``, where they have become many."""
    if not parts:
        return [new]
    together = [*parts, new]
    if len(together) > 2 and sum(len(rows) for rows, _ in together) > 2 * len(together[0][0]):
        return [merged(together)]
    return together
