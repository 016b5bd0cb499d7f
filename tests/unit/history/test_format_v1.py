"""Archives of format version 1, kept in tests/data, read as they did when they were written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from thinrow.history.archive.generation import Archive
from thinrow.history.archive.verify import verify_generation
from thinrow.storage.objects import LocalObjects

DATA = Path(__file__).parents[2] / "data" / "format-v1"


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_reads_as_written(kind: str) -> None:
    spec = importlib.util.spec_from_file_location("generate_v1", DATA / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    archive = Archive(LocalObjects(DATA / kind))
    assert verify_generation(archive.pin()) == []
    assert generator.contents(archive) == json.loads((DATA / f"{kind}.json").read_text())


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_files_hold_every_codec_and_a_hide_list(kind: str) -> None:
    generation = Archive(LocalObjects(DATA / kind)).pin()
    segments = [generation.segment(i) for i in range(len(generation.segments))]
    used = {codec for s in segments for c in s.meta["columns"] for codec in c["codec_counts"]}
    assert used == {str(codec) for codec in range(8)}
    assert sum(len(s.hides.records) for s in segments) > 0
    assert len(segments) > generation.n_buckets
