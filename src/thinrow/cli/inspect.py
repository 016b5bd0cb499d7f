"""``thinrow inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from thinrow.cli.common import format_time, parse_time, parse_user, store_option

_CODECS = ("zero", "constant", "bit-packing", "delta", "dictionary", "local dictionary", "raw", "zstd bytes")


@click.command()
@click.argument("user")
@store_option
@click.option("--at", "at_text", help="Version as of this time: ms or ISO 8601; default: all events.")
@click.option("--newest", type=click.IntRange(min=0), default=5, show_default=True, help="How many events to show.")
def command(user: str, store_path: Path, at_text: str | None, newest: int) -> None:
    """Show what the store holds of USER: segments, stripes, the version that a request would log, the newest events."""
    from rich.console import Console
    from rich.table import Table

    from thinrow.cli.read import flat_table
    from thinrow.core.units import NEVER, format_bytes
    from thinrow.core.users import as_users, bucket_of
    from thinrow.history.archive.reader import look_up
    from thinrow.history.reconstruct import reconstruct
    from thinrow.history.store import HistoryStore
    from thinrow.schema import Projection

    # Values of events are shown as they are: no markup, no emoji codes.
    out = Console(width=None if Console().is_terminal else 160, markup=False, emoji=False, highlight=False)
    with HistoryStore.open(store_path) as store:
        ids = as_users([parse_user(user, store.schema.user_kind)], store.schema.user_kind)
        at = NEVER - 1 if at_text is None else parse_time(at_text)
        taken = store.snapshot(ids, at)
        generation = taken.generation
        bucket = int(bucket_of(ids, generation.n_buckets)[0])
        out.print(f"user {user}: bucket {bucket} of {generation.n_buckets}, generation {generation.number}")
        pieces = look_up(generation, ids)
        table = Table("segment", "stripe", "rows", "first", "last", "max arrival", "digest")
        for record, number in zip(pieces.records, pieces.segment, strict=True):
            info = generation.segments[number][1]
            table.add_row(
                info.name, str(record["stripe"]), str(record["n_rows"]), format_time(int(record["first_ts"])),
                format_time(int(record["last_ts"])), str(record["max_arrival"]), f"{int(record['digest']):016x}",
            )  # fmt: skip
        if len(pieces.records):
            out.print(table)
        else:
            out.print("nothing in the archive")
        for number in generation.segments_of(bucket):
            segment, info = generation.segment(number), generation.segments[number][1]
            out.print(f"segment {info.name}: {info.n_rows} events of {info.n_users} users, {format_bytes(info.bytes)}")
            codecs = Table("column", "group", "codecs (stripes)")
            groups = {c.id: c.group for c in segment.columns}
            for column in segment.meta["columns"]:
                counts = ", ".join(f"{_CODECS[int(k)]} ({n})" for k, n in column["codec_counts"].items())
                codecs.add_row(column["name"], groups[column["id"]], counts)
            out.print(codecs)
        version = taken.requests.versions[0]
        out.print("version that a request would log: " + ", ".join(f"{n}={version[n]}" for n in version.dtype.names))
        out.print(f"recent events inline: {len(taken.requests.inline)}, hides: {len(taken.requests.hides)}")
        if newest:
            built = reconstruct(generation, taken.requests, Projection(max_len=newest))
            events = flat_table(built.histories)
            out.print(f"newest {events.num_rows} events:")
            shown = Table(*events.column_names[1:])
            for row in events.to_pylist():
                shown.add_row(
                    *(format_time(v) if k == "event_ts" else str(v) for k, v in row.items() if k != "user_id")
                )
            out.print(shown)
