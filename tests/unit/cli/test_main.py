"""``thinrow`` as a process sees it: interrupted, it says how far it came."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.cli import ingest
from thinrow.cli.main import main
from thinrow.history.store import HistoryStore


def test_ctrl_c_says_how_much_is_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ingest, "_CHUNK_EVENTS", 2)
    pq.write_table(pa.table({"user": [1, 2, 3], "ts": [1, 2, 3], "item": [1, 2, 3]}), "a.parquet")
    append = HistoryStore.append_checked
    columns = ["--user", "user", "--time", "ts"]

    def interrupted(self: HistoryStore, events: object) -> object:
        if len(events) < 2:  # type: ignore[arg-type]
            raise KeyboardInterrupt
        return append(self, events)  # type: ignore[arg-type]

    monkeypatch.setattr(HistoryStore, "append_checked", interrupted)
    monkeypatch.setattr("sys.argv", ["thinrow", "ingest", "a.parquet", "--store", "s", "--create", *columns])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    said = capsys.readouterr().err
    assert "the first 2 of 3 events are in the store" in said
    assert "thinrow: interrupted" in said
    with HistoryStore.open("s") as store:
        assert store.users().tolist() == [1, 2]
