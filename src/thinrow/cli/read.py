"""``thinrow read``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from thinrow.cli.common import format_time, parse_time, parse_user, store_option

if TYPE_CHECKING:
    import pyarrow as pa

    from thinrow.jagged import SharedHistories


@click.command()
@click.argument("users", nargs=-1)
@store_option
@click.option("--at", "at_text", help="As of this time (exclusive): ms or ISO 8601; default: all events.")
@click.option("--newest", type=click.IntRange(min=1), help="Only the newest N events of each user.")
@click.option("--columns", help="Comma-separated columns; default: all.")
@click.option("--all-users", is_flag=True, help="Every user of the store.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write Parquet here, one row an event, instead of printing."
)
def command(
    users: tuple[str, ...],
    store_path: Path,
    at_text: str | None,
    newest: int | None,
    columns: str | None,
    all_users: bool,
    out: Path | None,
) -> None:
    """Print the histories of USERS, oldest event first, or write them to a Parquet file.

    A user without events is named on standard error.

    \b
    Examples:
      thinrow read 42 --store S --newest 10
      thinrow read --all-users --store S --columns product_id,price --out events.parquet
    """
    import pyarrow.parquet as pq

    from thinrow.core.errors import InputError
    from thinrow.core.units import NEVER
    from thinrow.core.users import as_users
    from thinrow.history.store import HistoryStore
    from thinrow.schema import Projection

    with HistoryStore.open(store_path) as store:
        kind = store.schema.user_kind
        if not users and not all_users:
            raise InputError("name at least one user, or pass --all-users")
        ids = store.users() if all_users else as_users([parse_user(u, kind) for u in dict.fromkeys(users)], kind)
        names = tuple(columns.split(",")) if columns else None
        at = NEVER - 1 if at_text is None else parse_time(at_text)
        built = store.read(ids, at, Projection(columns=names, max_len=newest))
    for row in (built.histories.lengths() == 0).nonzero()[0].tolist():
        click.echo(f"no events of user {ids[row]} here", err=True)
    table = flat_table(built.histories)
    if out is not None:
        pq.write_table(table, out, compression="zstd")
        click.echo(f"{table.num_rows} events of {len(ids)} users written to {out}")
        return
    for row in table.to_pylist():
        user, ts = row.pop("user_id"), row.pop("event_ts")
        click.echo(f"{user}\t{format_time(ts)}\t" + "\t".join(f"{k}={v}" for k, v in row.items()))


def flat_table(histories: SharedHistories) -> pa.Table:
    """SharedHistories as an Arrow table of one row a visible event."""
    import numpy as np
    import pyarrow as pa

    positions, offsets = histories.positions()
    owner = np.repeat(histories.user_of, np.diff(offsets))
    events = histories.events
    data = {
        "user_id": pa.array(events.users[owner].tolist()),
        "event_ts": pa.array(events.event_ts[positions]),
        "arrival": pa.array(events.arrival[positions]),
    }
    return pa.table({**data, **{n: c.take(positions).to_arrow() for n, c in events.columns.items()}})
