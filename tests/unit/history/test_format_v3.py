"""An archive of format version 3, kept in tests/data, reads as it did when it was written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from thinrow.history.archive.generation import Archive
from thinrow.history.archive.verify import verify_generation
from thinrow.kernels import BACKENDS, use
from thinrow.storage.objects import LocalObjects
from thinrow.testing.fuzz.damage import layout_of
from thinrow.testing.generators import generator

DATA = Path(__file__).parents[2] / "data" / "format-v3"


def test_reads_as_written() -> None:
    made, expected = generator(DATA / "generate.py"), json.loads((DATA / "archive.json").read_text())
    assert verify_generation(Archive(LocalObjects(DATA / "archive")).pin()) == []
    for backend in BACKENDS:
        with use(backend):
            assert made.contents(Archive(LocalObjects(DATA / "archive"))) == expected


def test_files_hold_patches_of_every_form() -> None:
    (path,) = DATA.glob("archive/segments/*/*.seg")
    data = path.read_bytes()
    assert data[8] == 3
    blocks = layout_of(data).blocks
    patched = [b for b in blocks if b.width == 255]
    assert {b.codec for b in patched} >= {2, 3, 11, 13}
    # Codec 2 has the head of what is packed after base and scale: form, and whether that has patches within.
    heads = [int(np.frombuffer(data[b.start + 16 : b.start + 24], "<u8")[0]) for b in patched if b.codec == 2]
    assert {(head >> 48, head >> 32 & 0xFF == 255) for head in heads} == {(0, False), (1, False), (1, True)}
