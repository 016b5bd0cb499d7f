"""Evolution and backfill beside another process, and killed at any moment: nothing is lost, nothing is half-visible."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from thinrow.history.archive.verify import verify_generation
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait

SCHEMA = EventSchema((ColumnSpec(1, "item", Trait.ID, "int32", "main"),))
SCORE = {"score": {"trait": "numeric", "dtype": "int64", "group": "other"}}
N = 3_000

_PRODUCER = """
import sys, numpy as np, pyarrow as pa
from pathlib import Path
from thinrow.history.store import HistoryStore
path = Path(sys.argv[1])
with HistoryStore.open(path, sync=False) as store:
    print("open", flush=True)
    done = 0
    while not (path / "stop").exists() or done < 4:
        i = np.arange(done * 10, done * 10 + 10)
        store.append(pa.table({"user_id": i % 3, "event_ts": i, "item": i.astype(np.int32)}))
        done += 1
        if done % 2 == 0:
            store.compact(full=done % 4 == 0)
        store.snapshot([0, 1, 2], 10**9)
    print(done, flush=True)
"""

_BACKFILLER = """
import sys, numpy as np, pyarrow as pa
from thinrow.history.store import HistoryStore
with HistoryStore.open(sys.argv[1], sync=False) as store:
    print("open", flush=True)
    i = np.arange(3_000)
    for k in range(int(sys.argv[2]), 10**9):
        keys = {"user_id": i % 2, "event_ts": i, "arrival": i // 2 + 1}
        store.backfill("score", pa.table({**keys, "score": i + 10_000 * k}))
        store.evolve(add={f"c{k}": {"trait": "id", "dtype": "int8", "group": "main"}})
        store.evolve(drop=[f"c{k}"])
"""


def _start(script: str, *arguments: object) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    return child


def test_a_process_that_does_not_know_the_change_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with HistoryStore.create(path, SCHEMA, n_buckets=2, sync=False) as store:
        producer = _start(_PRODUCER, path)
        try:
            store.evolve(add=SCORE)
            store.evolve(rename={"item": "article"}, widen={"item": "int64"})
            for step in range(3):
                taken = store.snapshot([0, 1, 2], 10**9)
                built = reconstruct(taken.generation, taken.requests, Projection(columns=("article",)))
                for user, seen in enumerate(built.histories.to_jagged("article").to_arrow().to_pylist()):
                    assert seen == [3 * k + user for k in range(len(seen))]
                store.backfill("score", pa.table({"user_id": [0], "event_ts": [0], "arrival": [1], "score": [step]}))
            (path / "stop").touch()
            out, _ = producer.communicate(timeout=120)
        finally:
            producer.kill()
        assert producer.returncode == 0
        rows = 10 * int(out)
        store.compact()
        store.backfill("score", pa.table({"user_id": [0], "event_ts": [0], "arrival": [1], "score": [77]}))
        built = store.read([0, 1, 2], 10**9)
        found = built.histories.to_jagged("article").to_arrow().to_pylist()
        assert [len(f) for f in found] == [len(range(u, rows, 3)) for u in range(3)]
        assert built.histories.to_jagged("score").to_arrow().to_pylist()[0][:2] == [77, None]
        assert verify_generation(store.pin()) == []


def test_killed_during_backfill_and_evolve(tmp_path: Path) -> None:
    path = tmp_path / "s"
    i = np.arange(N)
    with HistoryStore.create(path, SCHEMA, n_buckets=2, sync=False) as store:
        store.append(pa.table({"user_id": i % 2, "event_ts": i, "item": i.astype(np.int32)}))
        store.compact()
        store.evolve(add=SCORE)
        logged = store.snapshot([0, 1], 10**9).requests
    rng = np.random.default_rng(0)
    for attempt in range(4):
        child = _start(_BACKFILLER, path, attempt * 100)
        time.sleep(float(rng.uniform(0.05, 0.8)))
        child.send_signal(signal.SIGKILL)
        child.wait()
        with HistoryStore.open(path, sync=False) as store:
            built = reconstruct(store.pin(), logged, Projection(columns=("item", "score")))
            assert built.stats.versions_verified == 2
            whole = []
            for user, (item, score) in enumerate(
                zip(*(built.histories.to_jagged(n).to_arrow().to_pylist() for n in ("item", "score")), strict=True)
            ):
                assert item == list(range(user, N, 2))
                whole += [None if s is None else s - i for i, s in zip(item, score, strict=True)]
            # All events are of one backfill, or none was committed.
            assert len(set(whole)) == 1
            assert verify_generation(store.pin()) == []
            assert [c.name for c in store.schema.columns][:2] == ["item", "score"]
