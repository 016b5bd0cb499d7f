"""A checkpoint of format version 1, written by the release that introduced it, still reads as it did."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np

from thinrow.checkpoints import load, save
from thinrow.checkpoints.checkpoint import MANIFEST, TENSORS

DATA = Path(__file__).parents[2] / "data" / "format-v1"


def test_format_1() -> None:
    made_by = runpy.run_path(str(DATA / "generate_checkpoint.py"))
    found = load(DATA / "checkpoint")
    expected = made_by["arrays"]()
    assert (found.step, found.meta) == (7, made_by["META"])
    assert found.tensors.keys() == expected.keys()
    for name, array in expected.items():
        assert found.tensors[name].dtype == array.dtype
        assert found.tensors[name].shape == array.shape
        assert np.array_equal(found.tensors[name], array)
    assert np.signbit(found.tensors["a/number"])


def test_this_release_writes_format_1(tmp_path: Path) -> None:
    found = load(DATA / "checkpoint")
    path = save(tmp_path, 7, tensors=found.tensors, meta=found.meta)
    wrote, before = (json.loads((p / MANIFEST).read_bytes()) for p in (path, found.path))
    assert wrote["format"] == before["format"] == 1
    # How safetensors orders its header is its own business, so the CRC may differ.
    assert wrote["body"]["meta"] == before["body"]["meta"]
    assert wrote["body"]["files"][TENSORS].keys() == before["body"]["files"][TENSORS].keys()
