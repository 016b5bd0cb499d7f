"""The quality page says what the lines say, and the synthetic data's best possible figures are right."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.quality import tastes
from bench.quality.page import read, write
from bench.quality.study import Cell, cells

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_that_of_the_lines(tmp_path: Path) -> None:
    page = tmp_path / "quality.md"
    page.write_text((DOCS / "quality.md").read_text())
    lines = read(DOCS / "quality.jsonl")
    write(page, lines, tmp_path)
    assert page.read_text() == (DOCS / "quality.md").read_text()
    for plot in tmp_path.glob("*.svg"):
        assert plot.read_text() == (DOCS / "images" / plot.name).read_text()
    assert "± " in page.read_text()


def test_a_cell_is_run_once_whatever_study_asks_for_it() -> None:
    for study in ("length", "mtgr", "argus", "shared", "scale"):
        found = list(cells(study, "retail", 3))
        assert len({c.key for c in found}) == len(found) > 3
    length = {c.key for c in cells("length", "retail", 1)}
    assert any(c.key in length for c in cells("scale", "retail", 1))
    cell = Cell("length", "retail", "hstu", 16, 0, ("epochs=2",))
    assert dataclasses.replace(cell, study="mtgr").key == cell.key
    assert json.loads(cell.key)["change"] == ["epochs=2"]


@pytest.mark.parametrize(("history", "align"), [(16, 4), (256, 64), (1024, 256)])
def test_no_other_use_of_the_same_events_is_better_than_the_best(history: int, align: int) -> None:
    users, requests, held_out = 150, 4, 2
    ne, gauc = tastes.best(users, requests, held_out, history, align, seed=1)
    longer, _ = tastes.best(users, requests, held_out, 2 * history, max(history // 2, 1), seed=1)
    assert 0.6 < longer <= ne + 0.01 < 1
    drawn = tastes._draw(users, requests, 1)
    # The same, an event at a time, with another prior than the one that the tastes were drawn from.
    loss, labels = 0.0, []
    for u in range(users):
        for r in range(requests - held_out, requests):
            at = int(drawn.asked_at[r])
            first = max(math.ceil((at - history) / align) * align, 0)
            for item, label in zip(drawn.shown[u, r], drawn.label[u, r], strict=True):
                mine = drawn.category[u, first:at] == item // tastes.PER_CATEGORY
                liked = drawn.liked[u, first:at][mine]
                p = (2 + liked.sum()) / (4 + len(liked)) * tastes.PLACES[drawn.asked_place[u, r]]
                loss -= math.log(p if label else 1 - p)
                labels.append(label)
    rate = float(np.mean(labels))
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert ne < loss / len(labels) / entropy < ne + 0.06
    assert 0.5 < gauc < 0.9
