"""``thinrow read``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import (
    as_stored_option,
    format_time,
    name_unknown,
    parse_named,
    parse_time,
    pseudonyms_option,
    store_option,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from thinrow.history.archive.reader import ReadStats
    from thinrow.jagged import SharedHistories


@click.command()
@click.argument("users", nargs=-1)
@store_option
@click.option("--at", "at_text", help="As of this time (exclusive): ms or ISO 8601; default: all events.")
@click.option("--newest", type=click.IntRange(min=1), help="Only the newest N events of each user.")
@click.option("--columns", help="Comma-separated columns; default: all.")
@click.option("--all-users", is_flag=True, help="Every user of the store.")
@pseudonyms_option
@as_stored_option
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write Parquet here, one row an event, instead of printing."
)
@click.option("--stats", is_flag=True, help="Say on standard error what the read cost.")
def command(
    users: tuple[str, ...],
    store_path: Path,
    at_text: str | None,
    newest: int | None,
    columns: str | None,
    all_users: bool,
    pseudonyms: str | None,
    as_stored: bool,
    out: Path | None,
    stats: bool,
) -> None:
    """Print the histories of USERS, oldest event first, or write them to a Parquet file.

    A line has user, time (UTC), arrival number and columns, separated by tabs; times in a Parquet file are milliseconds
    since 1970. A user that the store does not know is named on standard error, and the exit status is then 1.

    \b
    Examples:
      thinrow read 42 --store S --newest 10
      thinrow read --all-users --store S --columns product_id,price --out events.parquet
      thinrow read --store S -- -42                  ids that begin with a dash, after --
    """
    from thinrow.core.errors import InputError
    from thinrow.core.units import NEVER
    from thinrow.history.reconstruct import reconstruct
    from thinrow.history.store import HistoryStore
    from thinrow.schema import Projection

    if bool(users) == all_users:
        raise InputError("which users? name at least one, or pass --all-users (not both)")
    at = NEVER - 1 if at_text is None else parse_time(at_text)
    names = None if columns is None else tuple(c.strip() for c in columns.split(","))
    projection = Projection(columns=names, max_len=newest)
    with HistoryStore.open(store_path) as store:
        projection.resolve(store.schema)
        ids = store.users() if all_users else parse_named(store, users, pseudonyms, as_stored)
        taken = store.snapshot(ids, at)
        rebuilt = reconstruct(taken.generation, taken.requests, projection)
    histories = rebuilt.histories
    if stats:
        click.echo(f"thinrow: {cost(rebuilt.stats)}", err=True)
    known = taken.requests.versions["snapshot_arrival"] > 0
    for row in (known & (histories.lengths() == 0)).nonzero()[0].tolist():
        click.echo(f"thinrow: user {ids[row]} has no events before {at_text}", err=True)
    table = flat_table(histories)
    if out is not None:
        write_whole(table, out)
        click.echo(f"{table.num_rows} events of {int(known.sum())} users written to {out}")
    else:
        for row in plain_rows(table):
            user, ts = row.pop("user_id"), row.pop("event_ts")
            click.echo(f"{user}\t{format_time(ts)}\t" + "\t".join(f"{k}={v}" for k, v in row.items()))
    name_unknown(ids[~known], store_path)


def cost(stats: ReadStats) -> str:
    """What a read cost, in one line."""
    from thinrow.core.units import format_bytes

    io = stats.io
    return (
        f"{stats.events_delivered} events delivered, {format_bytes(stats.bytes_read)} of blocks; "
        f"{io.requests} requests ({io.retries} repeated, {io.hedges} doubled), "
        f"{format_bytes(io.bytes_fetched)} fetched; {io.cache_hits} blocks from the cache, {io.cache_misses} not"
    )


def flat_table(histories: SharedHistories) -> pa.Table:
    """SharedHistories as an Arrow table of one row a visible event."""
    import numpy as np
    import pyarrow as pa

    positions, offsets = histories.positions()
    owner = np.repeat(histories.user_of, np.diff(offsets))
    events = histories.events
    data = {
        "user_id": pa.array(events.users[owner], pa.int64() if events.users.dtype == np.int64 else pa.string()),
        "event_ts": pa.array(events.event_ts[positions]),
        "arrival": pa.array(events.arrival[positions]),
    }
    return pa.table({**data, **{n: c.take(positions).to_arrow() for n, c in events.columns.items()}})


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as Python values; a float32 is the shortest decimal that names it: 93.65, not 93.6500015258789."""
    import pyarrow as pa

    held = table.schema
    for to in (pa.string(), pa.float64()):
        table = table.cast(pa.schema([pa.field(f.name, _float32_as(f.type, to)) for f in held]))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _float32_as(dtype: pa.DataType, to: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_fixed_size_list(dtype):
        return pa.list_(_float32_as(dtype.value_type, to), dtype.list_size)
    if pa.types.is_list(dtype):
        return pa.list_(_float32_as(dtype.value_type, to))
    if pa.types.is_large_list(dtype):
        return pa.large_list(_float32_as(dtype.value_type, to))
    return to if pa.types.is_float32(dtype) else dtype


def write_whole(table: pa.Table, path: Path) -> None:
    """Write a Parquet file that appears whole or not at all. Raises OSError where the disk refuses."""
    import pyarrow.parquet as pq

    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        pq.write_table(table, part, compression="zstd")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
