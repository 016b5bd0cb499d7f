"""Ragged data: Column, Jagged, Events grouped by user, and SharedHistories (one copy per user + slices)."""

from thinrow.jagged.column import Column
from thinrow.jagged.events import HIDE_DTYPE, Events
from thinrow.jagged.jagged import Jagged
from thinrow.jagged.shared import SharedHistories

__all__ = ["HIDE_DTYPE", "Column", "Events", "Jagged", "SharedHistories"]
