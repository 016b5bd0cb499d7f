"""Readers of one process do not wait for each other."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from thinrow.history.archive import reader
from thinrow.history.archive.reader import ReadStats, RowReader


def test_a_reader_is_made_while_another_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done, made = threading.Event(), threading.Event(), threading.Event()

    def slow(generation: Any, *_: Any) -> Any:
        if generation == "slow":
            begun.set()
            done.wait(60)
        return generation

    def steps(name: str) -> None:
        none, pieces = np.empty(0, np.int64), SimpleNamespace(records=np.empty(0))
        one: Any = RowReader(name, pieces, none, none, none, ReadStats())  # type: ignore[arg-type]
        assert one._steps is one._steps == name
        if name == "quick":
            made.set()

    monkeypatch.setattr(reader, "StepReader", slow)
    threads = [threading.Thread(target=steps, args=("slow",))]
    threads[0].start()
    begun.wait(60)
    threads.append(threading.Thread(target=steps, args=("quick",)))
    threads[1].start()
    passed = made.wait(120)
    done.set()
    for thread in threads:
        thread.join()
    assert passed
