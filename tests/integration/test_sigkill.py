"""A process that appends, compacts and logs requests is killed (SIGKILL) at random moments and started again.

Reopened, every acknowledged append is there exactly once, every logged request still rebuilds exactly what it saw, and
what a killed compaction left behind does no harm. Run as a script, this file is the process: operation i appends a
batch, then may compact, then may snapshot all users and log the request; each step is acknowledged on standard output.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.units import NEVER
from thinrow.examples.log import ImpressionLog
from thinrow.examples.records import Impressions
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.verify import verify_generation
from thinrow.history.archive.window import read_everything
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.jagged import SharedHistories
from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema, FieldSpec, Projection, Trait
from thinrow.testing.oracle import FatRowOracle

USERS = ["a", "b", "é", "a\0", "c"]
SCHEMA = EventSchema(
    (
        ColumnSpec(1, "item", Trait.ID, "int64", "item"),
        ColumnSpec(2, "shop", Trait.CATEGORICAL, "string", "shop", nullable=True),
    ),
    user_kind="string",
    event_id_column="event_id",
    event_id_dtype="int64",
    supersedes_column="supersedes",
)
EXAMPLES = ExampleSchema(
    context=(), candidates=(FieldSpec("product", "int64"),), item="product", outcomes=(("click", 10),)
)
Row = tuple[str, int, int, int | None, int, str | None]


def rows_of(i: int) -> list[Row]:
    """The events of operation i: (user, event_ts, event_id, supersedes, item, shop)."""
    rng = random.Random(i)
    rows: list[Row] = []
    for j in range(rng.randrange(1, 120)):
        user, target = USERS[(i + j) % 5], None
        # Row j of operation i - 5 is of the same user.
        if i >= 5 and j == 0 and rng.random() < 0.5:
            target = 1000 * (i - 5)
        # A fifth of the events are late.
        event_ts = 100 * i + rng.randrange(100) - (rng.randrange(2_000) if rng.random() < 0.2 else 0)
        rows.append((user, max(event_ts, 0), 1000 * i + j, target, i + j, rng.choice(["x", "yy", None])))
    return rows


def table_of(rows: list[Row]) -> pa.Table:
    user, ts, event_id, supersedes, item, shop = zip(*rows, strict=True)
    return pa.table(
        {
            "user_id": list(user),
            "event_ts": list(ts),
            "event_id": list(event_id),
            "supersedes": pa.array(supersedes, pa.int64()),
            "item": list(item),
            "shop": pa.array(shop, pa.string()),
        }
    )


def request_ts_of(i: int) -> int:
    return 100 * i + random.Random(-i).randrange(-500, 200) + 500


def step(store: HistoryStore, log: ImpressionLog, i: int) -> Iterator[str]:
    """Operation i; yields each step that has been acknowledged."""
    store.append(table_of(rows_of(i)))
    yield f"append {i}"
    if i % 3 == 2:
        store.compact(full=i % 9 == 8)
        yield f"compact {i}"
    if i % 2 == 1:
        taken = store.snapshot(USERS, request_ts_of(i))
        ids = 10 * i + np.arange(len(USERS))
        log.append(Impressions.of(EXAMPLES, ids, taken, candidates={"product": [[1]] * len(USERS)}))
        yield f"log {i}"


def work(path: Path, start: int) -> None:
    """Operations from ``start`` on, until killed."""
    with tempfile.TemporaryDirectory() as scratch, HistoryStore.create(f"{scratch}/s", SCHEMA, 2) as store:
        # Imports and kernels load here, not in the time until the kill.
        for i in range(9):
            list(step(store, ImpressionLog(f"{scratch}/log", SCHEMA, EXAMPLES), i))
    with HistoryStore.open(path / "store") as store:
        log = ImpressionLog(path / "log", SCHEMA, EXAMPLES)
        print("ready", flush=True)
        for i in range(start, start + 100_000):
            for line in step(store, log, i):
                print(line, flush=True)


def killed_after(steps: int, seconds: float, path: Path, start: int) -> list[str]:
    """Run ``work`` until ``steps`` are acknowledged and about ``seconds`` more, kill it; what it acknowledged."""
    command = [sys.executable, __file__, str(path), str(start)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    first = "".join(process.stdout.readline() for _ in range(steps))
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    lines = (first + process.stdout.read()).split("\n")
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    # The last line may be cut off: it was not acknowledged.
    return lines[:-1]


def fat_rows(histories: SharedHistories) -> list[list[tuple[int, int, tuple[Any, ...]]]]:
    """Each example's events in the oracle's form."""
    columns = [histories.to_jagged(n).to_arrow().to_pylist() for n in ("event_ts", "arrival", "item", "shop")]
    return [
        [(ts, arrival, (item, shop)) for ts, arrival, item, shop in zip(*example, strict=True)]
        for example in zip(*columns, strict=True)
    ]


class Model:
    """What the store must hold after the first n operations, and what request i saw."""

    def __init__(self) -> None:
        self.oracle = FatRowOracle()
        self.n = 0
        self.saw: dict[int, list[Any]] = {}

    def advance(self, n: int) -> None:
        """Apply operations up to n (exclusive)."""
        for i in range(self.n, n):
            for user, ts, event_id, supersedes, item, shop in rows_of(i):
                self.oracle.append(user, ts, {"item": item, "shop": shop}, event_id, supersedes)
            for k, user in enumerate(USERS):
                self.saw[10 * i + k] = self.oracle.fat_row(user, request_ts_of(i))
        self.n = max(n, self.n)

    def now(self) -> list[Any]:
        return [self.oracle.fat_row(u, NEVER - 1) for u in USERS]


def check(path: Path, model: Model, done: int, logged: set[int]) -> bool:
    """Hold the store to the model after ``done`` acknowledged appends; whether the one in flight was applied."""
    with HistoryStore.open(path / "store") as store:
        model.advance(done)
        held = fat_rows(store.read(USERS, NEVER - 1).histories)
        applied = held != model.now()
        if applied:
            model.advance(done + 1)
            assert held == model.now(), f"after {done} acknowledged appends the store holds something else"
        generation = store.pin()
        archived = read_everything(generation, store.users(), [], ReadStats())
        for a, b in zip(archived.offsets[:-1], archived.offsets[1:], strict=True):
            assert sorted(archived.arrival[a:b].tolist()) == list(range(1, b - a + 1))
        assert verify_generation(generation) == []
        assert store.verify_recent() == []
        found = list(ImpressionLog(path / "log", SCHEMA, EXAMPLES).scan())
        assert logged <= {int(r) // 10 for part in found for r in part.request_id}
        if found:
            batch = RequestBatch.concat([part.snapshots for part in found])
            ids = np.concatenate([part.request_id for part in found]).tolist()
            assert fat_rows(reconstruct(generation, batch).histories) == [model.saw[r] for r in ids]
            newest = fat_rows(reconstruct(generation, batch, Projection(max_len=7)).histories)
            assert newest == [model.saw[r][-7:] for r in ids]
    return applied


def orphans(path: Path) -> int:
    """Segment files that no manifest names."""
    archive = path / "store" / "archive"
    named = "".join(m.read_text() for m in (archive / "manifests").glob("*.json"))
    return sum(s.name not in named for s in (archive / "segments").rglob("*.seg"))


def kill_and_check(path: Path, rounds: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    HistoryStore.create(path / "store", SCHEMA, 2).close()
    model, done = Model(), 0
    logged: set[int] = set()
    counts = {"in flight": 0, "compactions": 0, "orphans": 0}
    for _ in range(rounds):
        lines = killed_after(rng.randrange(1, 20), rng.uniform(0.0, 0.1), path, done)
        appended = [int(line.split()[1]) for line in lines if line.startswith("append")]
        assert appended == list(range(done, done + len(appended)))
        logged |= {int(line.split()[1]) for line in lines if line.startswith("log")}
        counts["compactions"] += sum(line.startswith("compact") for line in lines)
        done += len(appended)
        # What was in flight is not acknowledged, so the next process appends it again: its ids make that harmless.
        counts["in flight"] += check(path, model, done, logged)
    counts["orphans"] = orphans(path)
    with HistoryStore.open(path / "store") as store:
        # Orphans do not stand in the way of later compactions.
        store.append(table_of(rows_of(done)))
        store.compact(full=True)
    check(path, model, done + 1, logged)
    assert done > rounds
    return counts


def test_killed_at_random_moments(tmp_path: Path) -> None:
    kill_and_check(tmp_path, rounds=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_many_times(tmp_path: Path, seed: int) -> None:
    counts = kill_and_check(tmp_path, rounds=50, seed=seed)
    print(counts)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
