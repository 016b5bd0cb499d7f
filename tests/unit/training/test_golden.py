"""Losses of a small run, kept: a refactor that is none changes them.

On one machine they are the same bits from run to run (``test_loop.py``); between processors the last digits differ,
so they are compared to five. Where a change is meant, say why in its commit, and put the new ones here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from thinrow.testing.rankers import world_config
from thinrow.testing.world import make_world
from thinrow.training import train

GOLDEN = {
    "dlrm": [0.466522, 0.619011, 0.56592, 0.498405, 0.563591, 0.578917, 0.561913, 0.554999, 0.526253, 0.771385],
    "hstu": [0.466603, 0.616707, 0.560327, 0.491592, 0.553517, 0.563134, 0.543924, 0.532587, 0.502209, 0.705406],
}


def test_golden_losses(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    with world.store() as store, world.table() as table:
        for name, golden in GOLDEN.items():
            _, result = train(world_config(name), store, table)
            assert result.losses == pytest.approx(golden, rel=1e-5)
