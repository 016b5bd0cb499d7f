"""``thinrow outcomes``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from thinrow.online.outcome_fields import OutcomeFields
    from thinrow.online.outcome_ingest import OutcomeReport

#: Between two lines about the progress.
_TELL_S = 60.0


@click.command()
@click.argument("places", nargs=-1, metavar="[SOURCE]")
@click.option("--retry", is_flag=True, help="In place of a source: take in the dead letters that can be taken in now.")
@click.option("--registry", help="With --retry: another schema registry than the one the letters name.")
@click.option("--log", "log_path", type=click.Path(path_type=Path), required=True, help="The outcome log; made if new.")
@click.option("--outcome", help="Every event is this outcome; else the field `name` says which.")
@click.option("--request-id", default="request_id", show_default=True, help="Field: the request.")
@click.option("--item", default="item", show_default=True, help="Field: the candidate.")
@click.option("--ts", default="ts", show_default=True, help="Field: when it happened.")
@click.option("--name-field", default="name", show_default=True, help="Field: which outcome.")
@click.option("--value", default="value", show_default=True, help="Field: the label; 1 where it is not there.")
@click.option("--outcome-id", help="Field: what names an outcome of its request; source_id for its place.  [none]")
@click.option("--integer-ids", is_flag=True, help="Outcome ids are integers.")
@click.option("--letters", type=click.Path(path_type=Path), help="Folder of what is refused.  [LOG.dead]")
@click.option("--name", "source_name", help="Under which positions are kept.  [topic or folder]")
@click.option("--follow", is_flag=True, help="Go on until SIGTERM or Ctrl-C.")
@click.option("--roll-s", type=click.FloatRange(min=0.01), default=5.0, show_default=True, help="Between log files.")
@click.option(
    "--max-future", type=click.IntRange(min=0), default=3_600, show_default=True, help="Seconds; refuse later."
)
def command(
    places: tuple[str, ...],
    retry: bool,
    registry: str | None,
    log_path: Path,
    outcome: str | None,
    name_field: str,
    outcome_id: str | None,
    integer_ids: bool,
    letters: Path | None,
    source_name: str | None,
    follow: bool,
    roll_s: float,
    max_future: int,
    **fields: str,
) -> None:
    """Read outcomes from SOURCE into an outcome log: a topic, folders, JSON lines, Parquet (docs/sources.md).

    Each outcome is in the log once, however often this is killed; what is no outcome becomes a dead letter. With
    --retry, and the options as before or mended, letters are read again.

    \b
    Examples:
      thinrow outcomes "kafka://broker:9092/clicks" --log log/outcomes --outcome click --outcome-id id --follow
      thinrow outcomes bought.jsonl --log log/outcomes --outcome buy --value pieces
      thinrow outcomes --retry --log log/outcomes --outcome buy --value pieces
    """
    from thinrow.core.errors import InputError
    from thinrow.online.outcome_fields import OutcomeFields

    if bool(places) == retry:
        raise InputError("name a source, or --retry; one of the two")
    if registry is not None and not retry:
        raise InputError("--registry goes with --retry; a source names its registry in its URL")
    outcome_fields = OutcomeFields(
        name=None if outcome is not None else name_field,
        outcome=outcome,
        outcome_id=outcome_id,
        integer_ids=integer_ids,
        **fields,
    )
    folder = letters or Path(f"{log_path}.dead")
    if retry:
        _retry(log_path, folder, outcome_fields, registry, 1_000 * max_future)
    else:
        _read(places, source_name, log_path, folder, outcome_fields, follow, roll_s, 1_000 * max_future)


def _retry(log_path: Path, folder: Path, fields: OutcomeFields, registry: str | None, max_future_ms: int) -> None:
    from thinrow.examples.log import OutcomeLog
    from thinrow.online.outcome_retry import retry_outcomes
    from thinrow.sources.places import make_decoder

    more = {} if registry is None else {"registry": registry}
    report = retry_outcomes(
        OutcomeLog(log_path), folder, fields, lambda how: make_decoder({**how, **more}), max_future_ms
    )
    click.echo(f"{report.events} outcomes logged, {report.duplicates} known already, {report.left} letters left")


def _read(
    places: tuple[str, ...],
    source_name: str | None,
    log_path: Path,
    folder: Path,
    fields: OutcomeFields,
    follow: bool,
    roll_s: float,
    max_future_ms: int,
) -> None:
    from thinrow.cli.stream import stopped
    from thinrow.examples.log import OutcomeLog
    from thinrow.online.outcome_ingest import OutcomeIngest, OutcomeOptions
    from thinrow.sources.places import open_source

    source: Any = open_source(places, source_name, follow=follow)
    ingest = OutcomeIngest(
        OutcomeLog(log_path),
        source,
        folder,
        fields,
        OutcomeOptions(roll_s=roll_s, max_future_ms=max_future_ms),
        _teller() if follow else None,
    )
    try:
        with stopped() as stop:
            report = ingest.run(follow=follow, stop=stop)
    except BaseException:
        click.echo(f"so far: {_describe(ingest.report)}", err=True)
        raise
    finally:
        source.close()
    click.echo(_describe(report))
    if report.refused:
        click.echo(f"why they were refused: thinrow sources letters --folder {folder}", err=True)


def _teller() -> Any:
    last = time.monotonic()

    def tell(report: OutcomeReport) -> None:
        nonlocal last
        if time.monotonic() - last >= _TELL_S:
            last = time.monotonic()
            click.echo(_describe(report), err=True)

    return tell


def _describe(report: OutcomeReport) -> str:
    text = f"{report.outcomes} outcomes logged, {report.duplicates} known already, {report.refused} refused"
    if report.skipped:
        text += f", {report.skipped} messages without an event"
    return f"{text}; {report.lag} behind" if report.lag else text
