"""``thinrow verify`` of a store without damage names what is left over, and what is not finished."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

import thinrow
from thinrow.cli.verify import command


def test_leftovers_and_unfinished_erasures_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, path = pa.table({"user": [1, 1, 2], "ts": [10, 20, 30], "item": [5, 6, 7]}), tmp_path / "store"
    schema = thinrow.EventSchema.infer(table.schema, user="user", time="ts")

    def verified() -> str:
        ran = CliRunner().invoke(command, ["--store", str(path)])
        assert ran.exit_code == 0, ran.output
        return ran.output

    with thinrow.create(path, schema, 2) as store:
        store.append(table)
        store.compact()
    assert verified().splitlines()[-1] == "3 events in 1 generation(s) verified: no damage"

    def cut_short(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with thinrow.open_store(path) as store:
        store.archive.objects.put("overlays/left.ovl", b"12345")
        monkeypatch.setattr(store.archive, "commit", cut_short)
        with pytest.raises(KeyboardInterrupt):
            store.erase([1], grace_s=0)
    assert "1 overlay files (5 bytes) that no manifest names" in verified()
    assert "1 erasures were begun and cut short" in verified()
    with thinrow.open_store(path) as store:
        store.finish_erasures(grace_s=0)
    assert "cut short" not in verified()
