"""Checkpoints of format version 2 and exports of version 1, written by the release that introduced them, still read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from thinrow.checkpoints import ServingTable, load, load_shard
from thinrow.core.routing import Routing
from thinrow.embeddings.states import tables_of

DATA = Path(__file__).parents[2] / "data" / "format-v2"
STATES = json.loads((DATA / "checkpoints.json").read_text())
ROUTING = Routing((0, 3 << 62))
KEYS = np.arange(-30, 20)


@pytest.mark.parametrize("step", [1, 2])
def test_shards_and_deltas(step: int) -> None:
    path = DATA / "checkpoints" / f"step-0000000{step}"
    found = load(path)
    assert (found.step, found.meta, found.routing) == (step, {"loss": 0.5}, ROUTING)
    assert found.tensors["w"].tolist() == [[0, 1], [2, 3]]
    for shard, expected in enumerate(STATES[step - 1]):
        state = tables_of(load_shard(path, shard, ROUTING).tensors)["items."]
        assert {n: [a.dtype.name, a.tolist()] for n, a in state.items()} == expected
    assert len(STATES[0][0]["keys"][1]) > 0


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("dtype", "apart"), [("float32", 0.0), ("float16", 2**-9), ("int8", 2**-6)])
def test_exports(step: int, dtype: str, apart: float) -> None:
    vectors, found = ServingTable.open(DATA / "exports" / dtype / f"step-0000000{step}", "items.").read(KEYS)
    held = {k: v for s in STATES[step - 1] for k, v in zip(s["keys"][1], s["values"][1], strict=True)}
    assert found.tolist() == [key in held for key in KEYS.tolist()]
    assert 0 < len(held) < len(KEYS)
    for key, vector, known in zip(KEYS.tolist(), vectors, found, strict=True):
        np.testing.assert_allclose(vector, held[key] if known else [1, 0, -1], rtol=apart, atol=apart if known else 0)
