"""The log of a run: one JSON line a step, in ``log.jsonl`` beside the checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOG = "log.jsonl"


class StepLog:
    """Appends records; does nothing where there is no folder."""

    def __init__(self, out: Path | None) -> None:
        self._file = None
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            self._file = (out / LOG).open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; others see it at once."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Make what was written durable. A checkpoint must not outlive the steps that led to it."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def cut_log(out: Path, step: int) -> None:
    """Drop what is beyond ``step``, and whatever follows a line that is none of ours: a killed run took steps after its
    last checkpoint, and its last line may be torn."""
    path = out / LOG
    if not path.exists():
        return
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or not _is_step(line, len(kept) + 1) or len(kept) == step:
            break
        kept.append(line)
    path.write_bytes(b"".join(kept))


def _is_step(line: bytes, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] == step)
    except (ValueError, KeyError, TypeError):
        return False
