"""``thinrow inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
    from rich.console import Console

    from thinrow.history.archive.generation import Generation
    from thinrow.history.archive.lookup import Pieces
    from thinrow.history.snapshot import Snapshot


@click.command()
@click.argument("user", required=False)
@store_option
@click.option("--at", "at_text", help="Version as of this time: ms or ISO 8601; default: all events.")
@click.option("--newest", type=click.IntRange(min=0), default=5, show_default=True, help="How many events to show.")
@click.option(
    "--examples", type=click.Path(path_type=Path), help="Directory of a training table: show the versions logged in it."
)
@click.option("--usage", is_flag=True, help="Instead of a user: how much each column is read, dead ones first.")
@pseudonyms_option
@as_stored_option
def command(
    user: str | None,
    store_path: Path,
    at_text: str | None,
    newest: int,
    examples: Path | None,
    usage: bool,
    pseudonyms: str | None,
    as_stored: bool,
) -> None:
    """Show what the store holds of USER, or (--usage) how much each column is read.

    Its index entries, segments and codecs in the archive; the version that a request at this time would log; how many
    recent events go inline; and the newest events that such a request sees. With --examples also every version of the
    user that a training table holds, each verified against the archive.

    \b
    Examples:
      thinrow inspect 42 --store S --newest 20
      thinrow inspect 42 --store S --examples examples
      thinrow inspect --store S --at 2017-07-14T02:40 -- -42
      thinrow inspect --store S --usage
    """
    if (user is None) != usage:
        raise click.UsageError("name a USER, or pass --usage")
    from rich.console import Console

    from thinrow.core.units import NEVER
    from thinrow.core.users import bucket_of
    from thinrow.history.archive.lookup import look_up
    from thinrow.history.store import HistoryStore

    # Values of events are shown as they are: no markup, no emoji codes.
    out = Console(width=None if Console().is_terminal else 160, markup=False, emoji=False, highlight=False)
    at = NEVER - 1 if at_text is None else parse_time(at_text)
    with HistoryStore.open(store_path) as store:
        if user is None:
            _print_usage(out, store.pin())
            return
        ids = parse_named(store, [user], pseudonyms, as_stored)
        taken = store.peek(ids, at)
        version = taken.requests.versions[0]
        if not version["snapshot_arrival"] and examples is None:
            name_unknown(ids, store_path)
        generation = taken.generation
        bucket = int(bucket_of(ids, generation.n_buckets)[0])
        pieces = look_up(generation, ids)
        archived = int(pieces.records["n_rows"].sum())
        recent = len(store.recent.read_since(ids, pieces.watermark).events)
        out.print(f"user {user}: bucket {bucket} of {generation.n_buckets}, generation {generation.number}")
        out.print(f"{archived} events in the archive, {recent} recent")
        if archived:
            _print_archive(out, taken, pieces)
        out.print("version that a request would log: " + ", ".join(f"{n}={version[n]}" for n in version.dtype.names))
        out.print(f"recent events inline: {len(taken.requests.inline)}, hides: {len(taken.requests.hides)}")
        if newest:
            _print_events(out, taken, newest)
        if examples is not None:
            _print_logged(out, taken, bucket, examples)


def _print_usage(out: Console, generation: Generation) -> None:
    from rich.table import Table

    from thinrow.core.units import format_bytes
    from thinrow.history.usage import usage_rows

    rows = usage_rows(generation)
    months = sorted({m for row in rows for m in row["bytes_by_month"]})[-3:]
    table = Table("column", "id", "last read", "requests", "events", *(f"read {m}" for m in months), "stored")
    for row in rows:
        last = format_time(row["last_ms"]) if row["last_ms"] else "never"
        sizes = (format_bytes(row["bytes_by_month"].get(m, 0)) for m in months)
        counts = str(row["requests"]), str(row["events"])
        table.add_row(row["column"], str(row["id"]), last, *counts, *sizes, format_bytes(row["stored_bytes"]))
    out.print(table)


def _print_archive(out: Console, taken: Snapshot, pieces: Pieces) -> None:
    """The user's index entries, then each segment that holds some."""
    from rich.table import Table

    from thinrow.core.units import format_bytes

    generation = taken.generation
    table = Table("segment", "stripe", "rows", "first", "last", "max arrival", "digest")
    for record, number in zip(pieces.records, pieces.segment, strict=True):
        table.add_row(
            generation.segments[number][1].name,
            str(record["stripe"]),
            str(record["n_rows"]),
            format_time(int(record["first_ts"])),
            format_time(int(record["last_ts"])),
            str(record["max_arrival"]),
            f"{int(record['digest']):016x}",
        )
    out.print(table)
    for number in dict.fromkeys(pieces.segment.tolist()):
        segment, info = generation.segment(number), generation.segments[number][1]
        out.print(f"segment {info.name}: {info.n_rows} events of {info.n_users} users, {format_bytes(info.bytes)}")
        codecs = Table("column", "group", "codecs (stripes; bytes)")
        groups = {c.id: c.group for c in segment.columns}
        for column in segment.meta["columns"]:
            sizes, inner = column.get("codec_bytes", {}), column.get("inner_counts", {})
            counts = ", ".join(
                _codec(int(k), n, sizes.get(k), inner.get(k, {})) for k, n in column["codec_counts"].items()
            )
            codecs.add_row(column["name"], groups[column["id"]], counts)
        for overlay in info.overlays:
            opened = generation.overlay(number, overlay.column)
            assert opened is not None
            counts = ", ".join(_codec(int(k), n, None, {}) for k, n in opened.codec_counts.items())
            codecs.add_row(f"{opened.column.name}, backfilled", f"{opened.name}", counts)
        out.print(codecs)


def _codec(codec: int, stripes: int, size: int | None, inner: dict[str, int]) -> str:
    """A codec with the stripes whose values it holds, and their bytes and the codecs within where the segment says."""
    from thinrow.core.units import format_bytes
    from thinrow.storage.codecs import CODEC_NAMES

    within = " and ".join(CODEC_NAMES[int(k)] for k in inner)
    name = f"{CODEC_NAMES[codec]} of {within}" if within else CODEC_NAMES[codec]
    return f"{name} ({stripes}{'' if size is None else f'; {format_bytes(size)}'})"


def _print_events(out: Console, taken: Snapshot, newest: int) -> None:
    from rich.table import Table

    from thinrow.cli.read import flat_table, plain_rows
    from thinrow.history.reconstruct import reconstruct
    from thinrow.schema import Projection

    events = flat_table(reconstruct(taken.generation, taken.requests, Projection(max_len=newest)).histories)
    out.print(f"newest {events.num_rows} events:")
    shown = Table(*events.column_names[1:])
    for row in plain_rows(events.drop_columns(["user_id"])):
        shown.add_row(format_time(row.pop("event_ts")), *(str(v) for v in row.values()))
    out.print(shown)


def _print_logged(out: Console, taken: Snapshot, bucket: int, path: Path) -> None:
    """The user's versions in a training table, oldest request first."""
    import numpy as np
    from rich.table import Table

    from thinrow.examples.table import ExampleTable
    from thinrow.history.reconstruct import reconstruct
    from thinrow.schema import Projection

    with ExampleTable.open(path, n_buckets=taken.generation.n_buckets) as table:
        rows = table.read_bucket(bucket)
    mine = np.flatnonzero(rows.batch.users == taken.requests.users[0])
    mine = mine[np.argsort(rows.batch.request_ts[mine], kind="stable")]
    logged = rows.batch.take(mine)
    reconstruct(taken.generation, logged, Projection(columns=(), max_len=1))
    out.print(f"{len(mine)} versions in {path}, all of them verified:")
    shown = Table("request", "time", "start", "end", "events", "checksum", "last", "snapshot", "inline", "hides")
    hides = np.diff(logged.hide_offsets)
    for i, request in enumerate(rows.request_id[mine].tolist()):
        v = logged.versions[i]
        times = (format_time(int(t)) for t in (logged.request_ts[i], v["start_ts"], v["end_ts"]))
        numbers = v["last_arrival"], v["snapshot_arrival"], logged.inline.lengths[i], hides[i]
        shown.add_row(str(request), *times, str(v["seq_len"]), f"{int(v['checksum']):016x}", *(str(n) for n in numbers))
    out.print(shown)
