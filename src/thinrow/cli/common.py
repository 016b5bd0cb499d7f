"""What several commands share: the store option, times, progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thinrow.core.errors import InputError

if TYPE_CHECKING:
    from thinrow.core.users import UserKind
    from thinrow.history.archive.compact import Progress

store_option = click.option(
    "--store", "store_path", type=click.Path(path_type=Path), required=True, help="Directory of the store."
)


def parse_time(text: str) -> int:
    """Milliseconds since 1970 (UTC) from an integer or an ISO 8601 time; a time without zone is UTC.

    Raises:
        InputError: the text is neither.
    """
    if text.lstrip("-").isdigit():
        value = int(text)
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise InputError(
                f"time {text!r} is neither milliseconds nor ISO 8601; write 1500000000000 or 2017-07-14T02:40"
            ) from None
        value = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    if value < 0:
        raise InputError(f"time {text!r} is {value} ms; it must be 0 or more")
    return value


def format_time(ms: int) -> str:
    """ISO 8601 in UTC with milliseconds."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_user(text: str, kind: UserKind) -> int | str:
    """A user id as the store's kind. Raises InputError where it is not one."""
    if kind == "string":
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"user {text!r} is not an integer, and this store holds int64 ids; pass an integer") from None


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A progress bar on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
