"""An archive of format version 2, kept in tests/data, reads as it did when it was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinrow.history.archive.generation import Archive
from thinrow.history.archive.verify import verify_generation, verify_tombstones
from thinrow.kernels import BACKENDS, use
from thinrow.schema import Trait
from thinrow.storage.objects import LocalObjects
from thinrow.testing.generators import generator

DATA = Path(__file__).parents[2] / "data" / "format-v2"


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_overlays_tombstones_and_hides_read_as_written(kind: str) -> None:
    folder, made = DATA / "overlays" / kind, generator(DATA / "generate_overlays.py")
    generation = Archive(LocalObjects(folder)).pin()
    assert [*verify_generation(generation), *verify_tombstones(generation)] == []
    assert all(len(info.overlays) == 2 for _, info in generation.segments)
    assert any(len(generation.segment(i).hides.records) for i in range(len(generation.segments)))
    expected = json.loads((DATA / "overlays" / f"{kind}.json").read_text())
    assert max(expected["erased"]) > 0
    for backend in BACKENDS:
        with use(backend):
            assert made.contents(Archive(LocalObjects(folder))) == expected


def test_reads_as_written() -> None:
    made = generator(DATA / "generate.py")
    archive, expected = Archive(LocalObjects(DATA / "archive")), json.loads((DATA / "archive.json").read_text())
    assert verify_generation(archive.pin()) == []
    assert made.contents(archive) == expected
    with use("reference"):
        assert made.contents(Archive(LocalObjects(DATA / "archive"))) == expected


def test_files_hold_every_trait_and_codec() -> None:
    generation = Archive(LocalObjects(DATA / "archive")).pin()
    segments = [generation.segment(i) for i in range(len(generation.segments))]
    assert len(segments) == 2
    used = {int(codec) for s in segments for c in s.meta["columns"] for codec in c["codec_counts"]}
    # Nulls alone are zeros (0) or the absent rows of another stream (10); a local dictionary (5) is in version 1.
    assert used >= set(range(1, 13)) - {5, 10}
    assert {c.trait for c in generation.schema.columns} == set(Trait)
