"""What several commands share: the store option, users, times, progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thinrow.core.errors import InputError
from thinrow.core.units import NEVER

if TYPE_CHECKING:
    from thinrow.core.users import UserKind, Users
    from thinrow.history.buckets import Progress
    from thinrow.history.store import HistoryStore

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAMED = 5

store_option = click.option(
    "--store", "store_path", type=click.Path(path_type=Path), required=True, help="Directory of the store."
)


def parse_time(text: str) -> int:
    """Milliseconds since 1970 (UTC) from an integer or an ISO 8601 time; a time without zone is UTC.

    Raises:
        InputError: the text is neither, or before 1970.
    """
    try:
        value = int(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise InputError(
                f"time {text!r} is neither milliseconds nor ISO 8601; write 1500000000000 or 2017-07-14T02:40"
            ) from None
        value = ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)
    if not 0 <= value < NEVER:
        raise InputError(f"time {text!r} is {value} ms since 1970; it must be from 0 to {NEVER - 1}")
    return value


def format_time(ms: int) -> str:
    """ISO 8601 in UTC with milliseconds; the milliseconds themselves beyond the year 9999."""
    try:
        moment = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return f"{ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_users(texts: Sequence[str], kind: UserKind) -> Users:
    """User ids of the store's kind, repeats once. Raises InputError where a text is not one."""
    from thinrow.core.users import as_users

    if kind == "string":
        return as_users(list(dict.fromkeys(texts)), kind)
    found: dict[int, None] = {}
    for text in texts:
        try:
            user = int(text)
        except ValueError:
            raise InputError(f"user {text!r} is not an integer, and this store holds int64 ids: pass one") from None
        if not -(1 << 63) <= user < 1 << 63:
            raise InputError(f"user {text} is out of bounds; int64 ids are from -2^63 to 2^63 - 1")
        found[user] = None
    return as_users(list(found), kind)


def parse_named(store: HistoryStore, texts: Sequence[str], pseudonyms: str | None, as_stored: bool) -> Users:
    """User ids as the store has them: of one with pseudonyms, those of the users that are named.

    Raises:
        InputError: as ``parse_users``; or the store has pseudonyms, and neither their key nor ``as_stored`` is given.
    """
    from thinrow.core.users import as_users
    from thinrow.sources.ingest import KEY_SOURCE
    from thinrow.sources.pseudonyms import Pseudonyms

    kind = store.schema.user_kind
    if pseudonyms is not None:
        key = Pseudonyms.load(pseudonyms)
        if store.recent.positions(KEY_SOURCE).get("") != key.check:
            raise InputError("the user ids of this store are not pseudonyms of this key; give the key that made them")
        return as_users(key.of(list(dict.fromkeys(texts)), kind).to_pylist(), kind)
    if texts and not as_stored and store.recent.positions(KEY_SOURCE):
        raise InputError(
            "user ids of this store are pseudonyms: pass --pseudonyms with their key and ids as they came, or "
            "--as-stored with ids that the store has"
        )
    return parse_users(texts, kind)


pseudonyms_option = click.option(
    "--pseudonyms",
    metavar="FILE|env:NAME",
    help="USERS are ids as they came; key of the pseudonyms that the store has.",
)
as_stored_option = click.option("--as-stored", is_flag=True, help="USERS are pseudonyms.")


def name_unknown(users: Users, store_path: Path) -> None:
    """Say which users the store does not know, and exit with status 1; nothing where ``users`` is empty."""
    if not len(users):
        return
    listed = ", ".join(str(u) for u in users[:_NAMED].tolist()) + (", ..." if len(users) > _NAMED else "")
    who = f"user {listed} has" if len(users) == 1 else f"{len(users)} users ({listed}) have"
    click.echo(
        f"thinrow: {who} no events in the store at {store_path}; `thinrow read --all-users` shows who has", err=True
    )
    sys.exit(1)


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
