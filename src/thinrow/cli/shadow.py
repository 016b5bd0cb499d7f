"""``thinrow shadow``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import progress_bar, store_option
from thinrow.cli.import_fat_rows import layout_of, layout_options

if TYPE_CHECKING:
    from thinrow.examples.records import ExampleBatch
    from thinrow.history.reconstruct import Reconstruction
    from thinrow.history.store import HistoryStore
    from thinrow.moving import FatLayout, FatRows, ShadowReport

#: Rows that are compared at once hold about so many events.
_EVENTS = 2_000_000


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@store_option
@click.option("--table", "table_path", type=click.Path(path_type=Path), help="Examples, matched by request id.")
@layout_options
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all differences here.")
@click.option("--show", type=int, default=5, show_default=True, help="Print so many requests that differ.")
def command(
    files: Sequence[Path],
    store_path: Path,
    table_path: Path | None,
    json_path: Path | None,
    show: int,
    **told: Any,
) -> None:
    """Hold the fat rows of an existing pipeline (FILES) against the store's histories of the same requests.

    With --table a row is compared with what its example logged, rebuilt; without, with what the store knows now of the
    time before the request. A line a cause: rows that have it, events that only the fat rows have, events that only
    the store has. The exit status is 1 where anything differs.

    \b
    Examples:
      thinrow shadow rows/ --store S --table T
      thinrow shadow rows/ --store S --newest 512 --json differences.json
    """
    from thinrow.history.store import HistoryStore
    from thinrow.moving import ShadowReport

    layout = layout_of(files, told)
    with HistoryStore.open(store_path) as store:
        examples = None if table_path is None else _examples(table_path)
        parts, unknown = [], 0
        for rows in _batches(files, layout, store):
            if examples is not None:
                rows, rebuilt, missing = _logged(store, rows, examples, layout)
                unknown += missing
            else:
                rebuilt = _now(store, rows, layout)
            parts.append(_compare(store, rows, rebuilt, layout))
    report = ShadowReport.concat(parts)
    _print(report, show)
    if unknown:
        click.echo(f"{unknown} rows have no example in {table_path}", err=True)
    if json_path is not None:
        json_path.write_text(report.to_json())
    if not report.equal.all():
        raise SystemExit(1)


def _batches(files: Sequence[Path], layout: FatLayout, store: HistoryStore) -> Any:
    """The rows in file order, some at a time; the next row of a user may be in the next batch."""
    import pyarrow as pa

    from thinrow.history.bulk.source import open_source
    from thinrow.moving import FatRows
    from thinrow.moving.runs import CHUNK_ROWS

    source = open_source(list(files))
    held: list[pa.Table] = []
    at = size = 0
    with progress_bar("shadow") as bar:
        for chunk in source.chunks(0, layout.columns, CHUNK_ROWS):
            held.append(chunk.table.select(layout.columns))
            size += chunk.table.nbytes
            if size < _EVENTS * 8 * len(layout.columns):
                continue
            table = pa.concat_tables(held)
            yield FatRows.from_arrow(table, layout, store.schema, first_row=at)
            at, held, size = at + len(table), [], 0
            bar(at, source.n_rows or at)
        if held:
            yield FatRows.from_arrow(pa.concat_tables(held), layout, store.schema, first_row=at)


def _examples(path: Path) -> ExampleBatch:
    from thinrow.core.errors import InputError
    from thinrow.examples.records import ExampleBatch
    from thinrow.examples.table import ExampleTable

    with ExampleTable.open(path) as table:
        parts = [table.read_bucket(b) for b in table.buckets()]
    if not parts:
        raise InputError(f"no examples in {path}; join impressions first, or leave --table out")
    return ExampleBatch.concat(parts)


def _logged(
    store: HistoryStore, rows: FatRows, examples: ExampleBatch, layout: FatLayout
) -> tuple[FatRows, Reconstruction, int]:
    """Rows that have an example, what it saw, and how many have none."""
    import numpy as np

    from thinrow.history.reconstruct import reconstruct
    from thinrow.schema import Projection

    order = np.argsort(examples.request_id)
    at = np.searchsorted(examples.request_id, rows.request_id, sorter=order)
    found = order[np.minimum(at, len(order) - 1)]
    known = np.flatnonzero(examples.request_id[found] == rows.request_id)
    batch = examples.batch.take(found[known])
    projection = Projection(columns=tuple(layout.events.values()), max_len=layout.newest)
    rebuilt = reconstruct(store.pin(), batch, projection)
    return rows.take(known), rebuilt, len(rows) - len(known)


def _now(store: HistoryStore, rows: FatRows, layout: FatLayout) -> Reconstruction:
    from thinrow.schema import Projection

    projection = Projection(columns=tuple(layout.events.values()), max_len=layout.newest, horizon_ms=layout.horizon_ms)
    return store.read(rows.users, rows.request_ts, projection)


def _compare(store: HistoryStore, rows: FatRows, rebuilt: Reconstruction, layout: FatLayout) -> ShadowReport:
    from thinrow.core.users import distinct
    from thinrow.moving import compare, evidence

    known = evidence(store.pin(), distinct(rows.users)[0], list(layout.events.values()))
    return compare(rows, rebuilt, known=known, newest=layout.newest)


def _print(report: ShadowReport, show: int) -> None:
    body = report.to_dict(show)
    click.echo(f"{body['requests']} requests, {body['equal']} equal, {body['events']} events in fat rows")
    click.echo(f"{'cause':<10} {'rows':>10} {'theirs only':>12} {'ours only':>12}")
    for cause, counts in body["causes"].items():
        click.echo(f"{cause:<10} {counts['rows']:>10} {counts['theirs']:>12} {counts['ours']:>12}")
    for row in body["differences"]:
        causes = ", ".join(f"{n} {c['theirs']}/{c['ours']}" for n, c in row["causes"].items())
        click.echo(f"request {row['request_id']} of user {row['user']} at {row['request_ts']}: {causes}")
