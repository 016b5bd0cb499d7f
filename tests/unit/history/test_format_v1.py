"""Archives of format version 1, kept in tests/data, read as they did when they were written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError
from thinrow.core.units import EPOCH_BITS
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.verify import verify_generation
from thinrow.history.store import HistoryStore
from thinrow.storage.objects import LocalObjects
from thinrow.testing.generators import generator

DATA = Path(__file__).parents[2] / "data" / "format-v1"


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_reads_as_written(kind: str) -> None:
    made = generator(DATA / "generate.py")
    archive = Archive(LocalObjects(DATA / kind))
    assert verify_generation(archive.pin()) == []
    assert made.contents(archive) == json.loads((DATA / f"{kind}.json").read_text())


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_files_hold_every_codec_and_a_hide_list(kind: str) -> None:
    generation = Archive(LocalObjects(DATA / kind)).pin()
    segments = [generation.segment(i) for i in range(len(generation.segments))]
    used = {codec for s in segments for c in s.meta["columns"] for codec in c["codec_counts"]}
    assert used == {str(codec) for codec in range(8)}
    assert sum(len(s.hides.records) for s in segments) > 0
    assert len(segments) > generation.n_buckets


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_a_store_of_version_1_lives_on(kind: str, tmp_path: Path) -> None:
    """Opened, read, written, compacted, rebucketed, collected, backed up, restored: its events stay what they were."""
    shutil.copytree(DATA / kind, tmp_path / "store" / "archive")
    # The recent tier is not part of the kept files: it is a new one, as if it had been lost.
    with HistoryStore.open(tmp_path / "store", sync=False) as store:
        users = store.users()

        def seen(store: HistoryStore) -> list[object]:
            held = store.read(users, 1_600_000_000_000).histories
            return [
                held.to_jagged(n).to_arrow().to_pylist() for n in ("event_ts", "item", "kind", "note", "raw", "price")
            ]

        before, rows = seen(store), store.pin().n_rows
        added = generator(DATA / "generate.py").events(kind).slice(0, 40)
        for name, values in (
            ("event_id", pa.array([10_000_000 + i if kind == "int64" else f"new-{i}" for i in range(40)])),
            ("event_ts", pa.array([1_650_000_000_000] * 40)),
            ("supersedes", pa.nulls(40, added.schema.field("supersedes").type)),
        ):
            added = added.set_column(added.schema.get_field_index(name), name, values)
        assert (store.append(added).arrivals > 1 << EPOCH_BITS).all()
        store.compact()
        assert seen(store) == before
        store.compact(full=True)
        store.rebucket()
        store.collect_garbage(keep=1, grace_s=0)
        assert seen(store) == before
        assert store.pin().n_rows == rows + 40
        assert verify_generation(store.pin()) == []
        assert store.verify_recent() == []
        store.backup(tmp_path / "copy")
    HistoryStore.restore(tmp_path / "copy", tmp_path / "new")
    with HistoryStore.open(tmp_path / "new") as store:
        assert seen(store) == before
        assert store.pin().n_rows == rows + 40


@pytest.mark.parametrize(("name", "file"), json.loads((DATA / "corrupt.json").read_text()).items())
def test_damaged_files_of_version_1_are_told(name: str, file: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "int64", tmp_path / "archive")
    shutil.copyfile(DATA / "corrupt" / name, tmp_path / "archive" / file)
    archive = Archive(LocalObjects(tmp_path / "archive"))
    if name.startswith("manifest"):
        with pytest.raises(CorruptionError, match=file):
            archive.pin()
        return
    found = verify_generation(archive.pin())
    assert {d.file for d in found} == {file}
