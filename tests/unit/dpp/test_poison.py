"""Examples that cannot be made: raise, leave out and count, or write down; nothing else moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinrow.core.errors import CorruptionError, InputError, ObjectNotFound, StoreError
from thinrow.dpp import Loader, Quarantine, SessionSpec
from thinrow.dpp.poison import Poisoned, QuarantineFile, halve
from thinrow.testing.source import ROWS, SPLIT, FakeSource, digest

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


def run(source: Damaged, **changes: Any) -> Loader:
    spec = SessionSpec(**{"table": "examples", "snapshot_id": 5, "generation": 1, **SMALL, **changes})
    return Loader(spec, source)


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
