"""Decoded rows that readers share: the same batches, each row group decoded once, and nothing of what was erased."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.core.errors import InputError
from thinrow.dpp import client
from thinrow.dpp.decoded import DecodedRows
from thinrow.examples.erase import erase_everywhere
from thinrow.examples.records import ExampleBatch
from thinrow.examples.table import DECODED, ExampleTable
from thinrow.history.store import HistoryStore
from thinrow.testing.engines import digest
from thinrow.testing.world import make_world

SMALL: dict[str, Any] = {"base_rows": 4, "block": 2, "seed": 3, "threads": 2}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[HistoryStore, ExampleTable]]:
    world = make_world(tmp_path, users=6, days=6)
    with world.store() as store, world.table() as table:
        yield store, table


def test_row_groups_are_decoded_once_for_all_readers_and_damaged_ones_again(
    opened: tuple[HistoryStore, ExampleTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [digest(b) for b in client.loader(*opened, **SMALL)]
    scanned: list[int] = []
    scan = ExampleTable.scan_bucket
    monkeypatch.setattr(
        ExampleTable, "scan_bucket", lambda self, b, *a, **k: scanned.append(b) or scan(self, b, *a, **k)
    )
    folder = opened[1].path / DECODED

    def read(**options: Any) -> list[str]:
        scanned.clear()
        return [digest(b) for b in client.loader(*opened, **SMALL, **options)]

    assert read(cache_bytes=1 << 24) == plain
    assert sorted(scanned) == [0, 1]
    files = sorted(folder.iterdir())
    assert len(files) == 2
    # Other sessions, epochs and processes.
    assert read(cache_bytes=1 << 24) == plain
    assert read(cache_bytes=1 << 24, epochs=2)[:3] == plain[:3]
    assert scanned == []
    # Every byte of a file is checked, and what is short.
    whole = files[0].read_bytes()
    for at in (0, 9, 100, len(whole) - 1):
        files[0].write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read(cache_bytes=1 << 24) == plain
        assert len(scanned) == 1
        assert files[0].read_bytes() == whole
    for n in (0, 63, 64, len(whole) // 2):
        files[0].write_bytes(whole[:n])
        assert read(cache_bytes=1 << 24) == plain
    # A filter keeps other rows.
    some = {"user_share": 0.5}
    kept = [digest(b) for b in client.loader(*opened, **SMALL, **some)]
    assert read(cache_bytes=1 << 24, **some) == read(cache_bytes=1 << 24, **some) == kept != plain


@pytest.mark.slow
def test_worker_processes_share_them(opened: tuple[HistoryStore, ExampleTable]) -> None:
    options = {**SMALL, "engine": "processes", "cache_bytes": 1 << 24}
    plain = [digest(b) for b in client.loader(*opened, **SMALL)]
    assert [digest(b) for b in client.loader(*opened, **options)] == plain
    files = {f: f.stat().st_ino for f in (opened[1].path / DECODED).iterdir()}
    assert len(files) == 2
    assert [digest(b) for b in client.loader(*opened, **options)] == plain
    assert {f: f.stat().st_ino for f in files} == files


def test_bytes_are_bounded_and_a_folder_that_refuses_costs_nothing(
    opened: tuple[HistoryStore, ExampleTable], tmp_path: Path
) -> None:
    _, table = opened
    rows = table.scan_bucket(0)
    shared = DecodedRows(tmp_path / "rows", 3 * (rows.nbytes + 8_192))
    for i in range(12):
        assert shared.put(f"{i:032x}", rows) is not None
        assert sum(f.stat().st_size for f in shared.folder.iterdir()) <= shared.max_bytes
    found = shared.get(f"{11:032x}")
    assert found is not None
    assert found.equals(rows)
    assert shared.get(f"{0:032x}") is None
    assert DecodedRows(tmp_path / "small", 100).put("0", rows) is None
    (tmp_path / "file").write_text("")
    assert DecodedRows(tmp_path / "file", 1 << 24).put("0", rows) is None
    with pytest.raises(InputError, match="cache_bytes=-1"):
        client.loader(*opened, cache_bytes=-1)


def test_nothing_of_what_was_erased_is_kept_not_even_by_who_decoded_it_before(
    opened: tuple[HistoryStore, ExampleTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, table = opened
    folder, erased = table.path / DECODED, list[int]()

    def also(generation: Any, whole: Any) -> Any:
        return erase_everywhere(generation, whole, impressions=[], outcomes=[], tables=[table])

    def kept() -> set[int]:
        shared, found = DecodedRows(folder, 1 << 24), set[int]()
        for file in folder.iterdir() if folder.exists() else ():
            rows = shared.get(file.name)
            assert rows is not None
            users = ExampleBatch.from_arrow(rows, table.event_schema, table.example_schema).batch.users
            found |= set(np.asarray(users).tolist())
        return found

    options = {**SMALL, "threads": 1, "cache_bytes": 1 << 24, "on_missing": "skip"}
    everybody = {u for batch in client.loader(store, table, **options) for u in np.asarray(batch.users).tolist()}
    assert kept() == everybody
    for file in folder.iterdir():
        file.unlink()
    scan = ExampleTable.scan_bucket

    def scan_then_erase(self: ExampleTable, *args: Any, **rest: Any) -> Any:
        rows = scan(self, *args, **rest)
        if not erased:
            erased.append(min(everybody))
            store.erase([erased[0]], also=also, grace_s=0)
        return rows

    with ExampleTable.open(table.path) as own:
        second = client.loader(store, own, epochs=3, **options)
        monkeypatch.setattr(ExampleTable, "scan_bucket", scan_then_erase)
        seen = [np.asarray(batch.users).tolist() for batch in second]
    assert erased[0] not in seen[-1]
    assert erased[0] not in kept()
    assert kept()
