"""Seconds by stage, and progress bars where somebody is looking."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Advance(Protocol):
    """Moves a bar on by ``n``."""

    def __call__(self, n: int = 1) -> None: ...


class Stages:
    """Books time under names; stages may be entered again and nested (the inner time is booked to the inner one)."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Book the time inside to ``name``."""
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def _book(self) -> None:
        now = time.perf_counter()
        if self._open:
            name = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Advance]:
        """A progress bar on a terminal; elsewhere one line when done."""
        if not self.console.is_terminal:
            since = time.perf_counter()
            yield _ignore
            self.console.print(f"{title}: {time.perf_counter() - since:.1f} s", highlight=False)
            return
        columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console) as progress:
            task = progress.add_task(title, total=total)

            def advance(n: int = 1) -> None:
                progress.advance(task, n)

            yield advance


def _ignore(n: int = 1) -> None:
    pass
