"""What ``thinrow train`` shows while it trains: a bar and a line of figures, TensorBoard, a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

#: Seconds between two lines of figures on a terminal, and elsewhere.
_TERMINAL_S, _ELSEWHERE_S = 1.0, 30.0


@contextmanager
def watched(out: Path | None, tensorboard: bool, profile: str | None) -> Iterator[Callable[..., None]]:
    """An ``on_step`` that shows a run into ``out`` on standard error; one that does nothing for ranks that are not the
    first, of which ``out`` is None.

    Raises:
        InputError: ``profile`` is not FIRST:LAST.
        MissingExtraError: ``tensorboard`` is not installed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from thinrow.training import report

    if out is None:
        yield lambda *_: None
        return
    console = Console(stderr=True)
    columns = (
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with ExitStack() as stack:
        write = stack.enter_context(report.tensorboard(out / "tensorboard")) if tensorboard else None
        trace = stack.enter_context(report.profiled(out / "trace.json", *_steps(profile))) if profile else None
        bar = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal, transient=True))
        task = bar.add_task("", total=None)

        def show(text: str) -> None:
            if console.is_terminal:
                bar.update(task, description=text.partition(": ")[2])
            else:
                click.echo(text, err=True)

        # Of several machines, the share that is this one's.
        share = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / int(os.environ.get("WORLD_SIZE", "1"))
        every_s = _TERMINAL_S if console.is_terminal else _ELSEWHERE_S
        meter = report.Meter(every_s=every_s, show=show, write=write, share=share)

        def on_step(step: int, total: int | None, record: dict[str, Any]) -> None:
            # An open log has no end yet.
            bar.update(task, completed=step, total=step if total is None else total)
            meter(step, total, record)
            if trace is not None:
                trace()

        yield on_step


def _steps(text: str) -> tuple[int, int]:
    from thinrow.core.errors import InputError

    first, colon, last = text.partition(":")
    if not colon or not (first.isdecimal() and last.isdecimal()):
        raise InputError(f"--profile {text!r} is not FIRST:LAST; write --profile 10:12")
    return int(first), int(last)
