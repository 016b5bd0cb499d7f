"""Bytes set aside: in memory, in a file without a name, and what a full disk says."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.core.errors import StoreError
from thinrow.storage.spool import Spool


@pytest.mark.parametrize("memory_bytes", [0, 10, 1000])
def test_bytes_come_back_in_order(tmp_path: Path, memory_bytes: int) -> None:
    parts = [bytes([i]) * (i % 7) for i in range(50)]
    with Spool(tmp_path / "new", memory_bytes) as spool:
        for part in parts:
            spool.append(part)
        spool.append(np.arange(3, dtype=np.uint16))
        whole = b"".join(parts) + np.arange(3, dtype=np.uint16).tobytes()
        assert spool.size == len(whole)
        blocks = list(spool.blocks(16))
        assert b"".join(blocks) == whole
        assert {len(b) for b in blocks[:-1]} == {16}
        assert list(tmp_path.rglob("*.*")) == [], "the file has no name"


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("thinrow.storage.spool._write", refuse)
    with Spool(tmp_path, 0) as spool, pytest.raises(StoreError, match=r"No space left.*free space"):
        spool.append(b"x")
