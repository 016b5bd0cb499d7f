"""An erasing process is killed (SIGKILL) at each of its steps while this one has the store open; resuming completes it.

Run as a script, this file is the process: ``path step`` erases a user and dies just before the step.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from thinrow.core.errors import Erased
from thinrow.history.archive.generation import Archive
from thinrow.history.archive.verify import verify_generation
from thinrow.history.journal import Journal
from thinrow.history.recent.lmdb import LmdbRecent
from thinrow.history.reconstruct import reconstruct
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.storage.objects import LocalObjects

COLUMNS = pa.schema([("user", pa.string()), ("ts", pa.int64()), ("id", pa.string())])
SCHEMA = EventSchema.infer(COLUMNS, user="user", time="ts", event_id="id")
#: Where the process dies: before this method is called, or, with "+", after it has returned.
STEPS = {
    "commit": (Archive, "commit"),
    "commit+": (Archive, "commit"),
    "move": (LmdbRecent, "_move"),
    "copy+": (LmdbRecent, "_copy"),
    "revoke": (Archive, "revoke"),
    "revoke+": (Archive, "revoke"),
    "delete+": (LocalObjects, "delete"),
    "end": (Journal, "end"),
}


def events(user: str, n: int, tag: str) -> pa.Table:
    return pa.table([[user] * n, list(range(n)), [f"{tag}{secrets.token_hex(8)}" for _ in range(n)]], COLUMNS)


def marked(folder: Path) -> list[str]:
    marks = [b"MARK", bytes(b + 1 for b in b"MARK")]
    files = [f for f in folder.rglob("*") if f.is_file()]
    return [f.name for f in files if any(m in f.read_bytes() for m in marks)]


def die_at(step: str) -> None:
    kind, name = STEPS[step]
    real = getattr(kind, name)

    def dying(*args: Any, **options: Any) -> Any:
        if step.endswith("+"):
            real(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, name, dying)


QUICK = ("copy+", "delete+")


@pytest.mark.parametrize("step", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in STEPS])
def test_killed_at_any_step_it_is_completed(tmp_path: Path, step: str) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, 1, sync=False) as store:
        store.append(events("user", 40, "keep"))
        store.append(events("MARKvictim", 40, "MARK"))
        store.compact()
        store.append(events("MARKvictim", 5, "MARK"))
        asked = store.snapshot(["MARKvictim", "user"], 1_000).requests
        done = subprocess.run([sys.executable, __file__, str(tmp_path / "s"), step], timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL
        # The leases of the dead end by themselves, after two minutes; here at once.
        for pin in (tmp_path / "s" / "archive" / "pins").glob("*.json"):
            pin.unlink()
        # This process has the recent tier open all the while, and goes over where it moved.
        assert store.append(events("user", 1, "keep")).arrivals.tolist() == [41]
        status = reconstruct(store.pin(), asked, on_missing="shorten").status.tolist()
        assert status == ([0, 0] if step == "commit" else [1, 0])
        assert len(store.pending_erasures()) == 1
        assert len(store.finish_erasures(grace_s=0)) == 1
        assert store.pending_erasures() == []
        assert marked(tmp_path) == []
        with pytest.raises(Erased):
            reconstruct(store.pin(), asked)
        assert store.append(events("MARKvictim", 1, "new")).arrivals.tolist() == [47]
        assert store.read(["user"], 1_000).histories.lengths().tolist() == [41]
        assert verify_generation(store.pin()) == []
        assert store.verify_recent() == []


if __name__ == "__main__":
    with HistoryStore.open(sys.argv[1], sync=False) as opened:
        die_at(sys.argv[2])
        opened.erase(["MARKvictim"], grace_s=0)
