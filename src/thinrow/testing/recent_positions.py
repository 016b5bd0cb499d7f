"""The part of the recent tier's contract suite about positions of event sources; ``RecentTierContract`` has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from thinrow.core.errors import InputError, PositionConflict, UnknownEventError
from thinrow.history.recent.tier import Advance, RecentTier
from thinrow.schema import EventSchema
from thinrow.testing.recent_model import append_rows, contract_schema, values_of


class PositionsContract:
    """Positions advance with the events of their append, from where they stand, or not at all."""

    durable: ClassVar[bool] = True

    def open_tier(self, path: Path, schema: EventSchema) -> RecentTier:
        """See ``RecentTierContract``."""
        raise NotImplementedError

    def _advance(self, tier: RecentTier, advances: Sequence[Advance], event_id: int | None = None) -> None:
        rows = [] if event_id is None else [(7, 10, event_id, None, values_of(event_id))]
        append_rows(tier, rows, advances=advances)

    def test_positions_advance_with_their_events_and_from_where_they_stand(self, tier: RecentTier) -> None:
        assert tier.positions("clicks") == {}
        self._advance(tier, [Advance("clicks", "0", None, "a"), Advance("clicks", "1", None, "b")], event_id=1)
        self._advance(tier, [Advance("clicks", "0", "a", "c")], event_id=2)
        self._advance(tier, [Advance("clicksmore", "0", None, "z")])
        assert tier.positions("clicks") == {"0": "c", "1": "b"}
        for stale in (Advance("clicks", "0", "a", "d"), Advance("clicks", "0", None, "d")):
            with pytest.raises(PositionConflict, match="stands at c"):
                self._advance(tier, [Advance("clicks", "1", "b", "e"), stale], event_id=3)
        assert tier.positions("clicks") == {"0": "c", "1": "b"}
        assert tier.read_since(np.array([7]), np.array([0])).top.tolist() == [2]

    def test_positions_stay_where_an_append_is_refused(self, tier: RecentTier) -> None:
        with pytest.raises(UnknownEventError):
            append_rows(tier, [(7, 10, 1, 99, values_of(1))], advances=[Advance("clicks", "0", None, "a")])
        assert tier.positions("clicks") == {}

    def test_names_of_positions_are_checked(self, tier: RecentTier) -> None:
        twice = [Advance("clicks", "0", None, "a")] * 2
        for wrong in ([Advance("", "0", None, "a")], [Advance("a\0b", "0", None, "a")], twice):
            with pytest.raises(InputError):
                self._advance(tier, wrong)
        self._advance(tier, [Advance("a" * 100, "b" * 400, None, "x")])
        with pytest.raises(InputError, match="501 bytes"):
            self._advance(tier, [Advance("a" * 100, "b" * 401, None, "x")])
        assert tier.positions("a" * 100) == {"b" * 400: "x"}

    def test_positions_outlive_trims_and_erasures(self, tier: RecentTier) -> None:
        self._advance(tier, [Advance("clicks", "0", None, "a")], event_id=1)
        tier.trim(np.array([7]), np.array([1]))
        whole = np.array([7]), np.array([0, 1]), np.array([1]), np.array([1]), np.array([True])
        tier.erase(*whole)
        assert tier.positions("clicks") == {"0": "a"}

    def test_positions_are_there_after_reopening(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path / "tier", contract_schema())
        self._advance(tier, [Advance("clicks", "0", None, "a")], event_id=1)
        tier.close()
        if self.durable:
            again = self.open_tier(tmp_path / "tier", contract_schema())
            assert again.positions("clicks") == {"0": "a"}
            again.close()
