"""Examples that cannot be made: raise, leave out and count, or write down; nothing else moves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinrow.core.errors import CorruptionError, InputError, ObjectNotFound, StoreError
from thinrow.core.units import DAY_MS
from thinrow.dpp import BatchBudget, Loader, Quarantine, RowFilter, SessionSpec, loader
from thinrow.dpp.poison import Poisoned, QuarantineFile, halve
from thinrow.dpp.worker import _scan
from thinrow.examples.datafiles import local_path
from thinrow.testing.source import ROWS, SPLIT, FakeSource, digest
from thinrow.testing.world import make_world

SMALL: dict[str, Any] = {"base_rows": 4, "block": 3, "interleave": 2, "epochs": 2}


class Damaged(FakeSource):
    """``bad`` request ids cannot be rebuilt; rows of split ``lost`` cannot be read from row 4 on."""

    def __init__(self, bad: set[int], lost: int = -1, error: Exception | None = None) -> None:
        super().__init__(ROWS)
        self.bad, self.lost = bad, lost
        self.error = error or CorruptionError("a block", file="f", user=7)

    def examples(self, split: int, first_row: int, stop_row: int) -> Any:
        if split == self.lost and stop_row > max(first_row, 4):
            raise CorruptionError("a row group", file="data.parquet")
        return super().examples(split, first_row, stop_row)

    def rebuild(self, batch: Any, *rest: Any) -> Any:
        if self.bad & set((batch.request_ts - 100).tolist()):
            raise self.error
        if not len(batch):
            # Of no rows: what the columns are is read from any others.
            found = super().rebuild(super().examples(0, 0, 1)[0].batch, *rest)
            none = np.empty(0, np.int64)
            return type(found)(found.histories.select(none), found.stats, found.status[:0], none)
        return super().rebuild(batch, *rest)


def run(source: Damaged, rank: int = 0, n_ranks: int = 1, **changes: Any) -> Loader:
    spec = SessionSpec(**{"table": "examples", "snapshot_id": 5, "generation": 1, **SMALL, **changes})
    return Loader(spec, source, rank=rank, n_ranks=n_ranks)


def rows(batches: Any) -> list[list[int]]:
    return [b.request_id.tolist() for b in batches]


@pytest.mark.parametrize("batch_rows", [None, 7])
@pytest.mark.parametrize("bad", [{5}, {0, 1, 2, 3, 2_000, 3_013}, set(range(4_000))])
def test_what_is_left_out_moves_nothing_else(bad: set[int], batch_rows: int | None) -> None:
    whole = rows(run(Damaged(set()), batch_rows=batch_rows))
    one = run(Damaged(bad), batch_rows=batch_rows, on_poison="skip")
    assert rows(one) == [[r for r in batch if r not in bad] for batch in whole]
    assert one.stats.poisoned == sum(r in bad for batch in whole for r in batch)
    with pytest.raises(CorruptionError, match="a block"):
        list(run(Damaged(bad), batch_rows=batch_rows))


def test_rows_that_cannot_be_read_are_left_out_with_their_base_batch() -> None:
    whole = rows(run(Damaged(set())))
    one = run(Damaged(set(), lost=2), on_poison="skip")
    lost = set(range(2 * SPLIT + 4, 2 * SPLIT + 9))
    assert rows(one) == [[r for r in batch if r not in lost] for batch in whole]
    assert one.stats.poisoned == 2 * len(lost)
    with pytest.raises(CorruptionError, match="a row group"):
        list(run(Damaged(set(), lost=2)))


def test_from_any_step_what_comes_is_the_same() -> None:
    one = run(Damaged({5, 2_001}), on_poison="skip")
    states, whole = [one.state_dict()], []
    for batch in one:
        whole.append(digest(batch))
        states.append(one.state_dict())
    for t, state in enumerate(states):
        other = run(Damaged({5, 2_001}), on_poison="skip", workers=1 + t % 3)
        other.load_state_dict(state)
        assert [digest(b) for b in other] == whole[t:]


@pytest.mark.parametrize("error", [StoreError("full"), ObjectNotFound("gone"), OSError("away"), MemoryError()])
def test_what_is_not_the_examples_own_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        list(run(Damaged({5}, error=error), on_poison="skip"))


def test_an_op_that_fails_is_the_examples_own() -> None:
    one = run(Damaged({5}, error=ZeroDivisionError("by an op")), on_poison="skip")
    assert sum(map(len, one)) == 2 * (sum(ROWS) - 1)


def test_a_quarantine_holds_each_example_once(tmp_path: Path) -> None:
    policy = Quarantine(tmp_path / "bad.jsonl")
    list(run(Damaged({5, 2_001}, lost=3), on_poison=policy))
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert sorted((p["split"], p["row"], p["rows"], p["request_id"], p["user"]) for p in lines) == [
        (0, 5, 1, 5, 1),
        (2, 1, 1, 2_001, 2_000),
        (3, 4, 4, None, None),
        (3, 8, 4, None, None),
        (3, 12, 2, None, None),
    ]
    assert {p["error"] for p in lines} == {"CorruptionError"}
    # Another run, of which one example more is bad, over the torn line of a killed one.
    with (tmp_path / "bad.jsonl").open("ab") as file:
        file.write(b'{"form')
    list(run(Damaged({5, 6, 2_001}, lost=3), on_poison=policy))
    again = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in again[:5]] == lines
    assert json.loads(again[6])["row"] == 6
    assert len(again) == 7
    # Its torn line stays in the middle, and the next run holds what is around it.
    list(run(Damaged({5, 6, 2_001}, lost=3), on_poison=policy))
    assert (tmp_path / "bad.jsonl").read_text().splitlines() == again


@pytest.mark.parametrize("batch_rows", [None, 7])
def test_ranks_count_and_write_each_example_once_together(tmp_path: Path, batch_rows: int | None) -> None:
    bad, lost = {0, 5, 2_001}, set(range(3_004, 3_014))
    file = tmp_path / "bad.jsonl"
    options: dict[str, Any] = {"batch_rows": batch_rows, "epochs": 1}
    ranks = [run(Damaged(bad, lost=3), rank=r, n_ranks=3, on_poison=Quarantine(file), **options) for r in range(3)]
    for parts in zip(*ranks, strict=True):
        assert not (bad | lost) & {r for part in parts for r in part.request_id.tolist()}
    assert sum(r.stats.poisoned for r in ranks) == len(bad | lost)
    assert all(0 < r.stats.poisoned < len(bad | lost) for r in ranks)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((p["split"], p["row"], p["rows"]) for p in lines) == [
        *((0, 0, 1), (0, 5, 1), (2, 1, 1)),
        *((3, 4, 4), (3, 8, 4), (3, 12, 2)),
    ]


def test_lines_of_other_filters_and_of_format_1_stand_for_nothing_else(tmp_path: Path) -> None:
    path, error = tmp_path / "bad", {"error": "E", "message": "m"}
    one, base = Poisoned(0, 1, 1, 2, "u", **error), Poisoned(0, 4, 4, None, None, **error)
    old = {"split": 0, "row": 1, "rows": 1, "request_id": 2, "user": "u", **error}
    path.write_text("".join(json.dumps({"format": 1, **old, **more}) + "\n" for more in ({}, {"request_id": None})))
    for rows in (RowFilter(), RowFilter(since_ms=5)):
        for _ in range(2):
            # Another request at the same place is another example, the same request elsewhere is not.
            QuarantineFile(path, 7, rows).add(
                [one, replace(one, row=9), base, replace(one, request_id=rows.since_ms or 3)]
            )
    lines = [json.loads(line) for line in path.read_text().splitlines()][2:]
    assert [(p["request_id"], p["rows"], p["filter"]["since_ms"]) for p in lines] == [
        *((None, 4, None), (3, 1, None)),
        *((None, 4, 5), (5, 1, 5)),
    ]
    assert {(p["format"], p["snapshot_id"]) for p in lines} == {(2, 7)}


@pytest.mark.parametrize("engine", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_damaged_file_that_a_filter_or_budget_reads_first_is_left_out(tmp_path: Path, engine: Any) -> None:
    world = make_world(tmp_path, users=6, days=6)
    with world.store() as store, world.table() as table:
        options: dict[str, Any] = {"base_rows": 4, "block": 2, "engine": engine, "workers": 1}
        files = table.data_files()
        filters: list[dict[str, Any]] = [{"since_ms": world.start_ms + DAY_MS}, {"user_share": 0.9}]
        filters += [{"budget": BatchBudget(limit=60)}]
        filters += [{**filters[0], **filters[2]}]
        whole = [{r for b in loader(store, table, **options, **f) for r in b.request_id.tolist()} for f in filters]
        lost = set(table.read_bucket(files[0].bucket).request_id.tolist())
        path = Path(local_path(files[0].path))
        data = bytearray(path.read_bytes())
        data[4 : len(data) - 8] = bytes(len(data) - 12)
        path.write_bytes(data)
        for changes, want in zip(filters, whole, strict=True):
            with pytest.raises(CorruptionError):
                list(loader(store, table, **options, **changes))
            reader = loader(store, table, on_poison="skip", **options, **changes)
            got = [r for b in reader for r in b.request_id.tolist()]
            assert sorted(got) == sorted(want - lost)
            # Which of them a filter would have kept cannot be told.
            assert reader.stats.poisoned == len(lost)


def test_of_a_bucket_only_the_row_groups_that_are_damaged_are_left_out() -> None:
    class Table:
        def scan_bucket(self, *_: Any, columns: Any, start: int = 0, stop: int | None = None) -> pa.Table:
            stop = 10_000 if stop is None else stop
            if start < 5_000 < stop:
                raise CorruptionError("a row group", file="f")
            return pa.table({"x": np.arange(start, stop)})

    found, readable = _scan(Table(), 0, 1, ["x"], 10_000)  # type: ignore[arg-type]
    assert np.flatnonzero(~readable).tolist() == list(range(4_096, 8_192))
    assert found["x"].to_pylist() == np.flatnonzero(readable).tolist()
    with pytest.raises(CorruptionError):
        _scan(Table(), 0, 1, ["x"], None)  # type: ignore[arg-type]


def test_bad_policies_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"on_poison='skp'; it must be 'fail', 'skip' or"):
        run(Damaged(set()), on_poison="skp")
    (tmp_path / "other.txt").write_text("a file\nof something else\n")
    with pytest.raises(InputError, match=r"no line of .*other\.txt is a quarantined example"):
        QuarantineFile(tmp_path / "other.txt")
    with pytest.raises(InputError, match=r"no folder .*missing for the quarantine file bad\.jsonl; make it first"):
        run(Damaged(set()), on_poison=Quarantine(tmp_path / "missing" / "bad.jsonl"))
    QuarantineFile(tmp_path / "none").add([])
    assert not (tmp_path / "none").exists()
    file = QuarantineFile(tmp_path / "one")
    file.add([Poisoned(0, 1, 1, 2, "u", "E", "m")] * 1)
    file.add([Poisoned(0, 1, 1, 2, "u", "E", "m")])
    assert len((tmp_path / "one").read_text().splitlines()) == 1


@given(st.integers(0, 40), st.sets(st.integers(0, 39)))
def test_halving_finds_exactly_the_bad_ones(n: int, bad: set[int]) -> None:
    def make(first: int, stop: int) -> list[int]:
        if bad & set(range(first, stop)):
            raise CorruptionError("x", file="f")
        return list(range(first, stop))

    found: list[int] = []
    parts = halve(make, 0, n, lambda i, _: found.append(i))
    assert found == sorted(bad & set(range(n)))
    assert [i for part in parts for i in part] == [i for i in range(n) if i not in bad]
