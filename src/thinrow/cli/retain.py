"""``thinrow retain``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from thinrow.cli.common import progress_bar, store_option
from thinrow.cli.erase import (
    also_of,
    grace_option,
    impressions_option,
    outcomes_option,
    paths_of,
    show,
    splits_option,
    table_option,
)


@click.command()
@store_option
@click.option("--max-age-days", type=float, help="Events that are older expire; 0 for no limit.")
@click.option("--max-events", type=int, help="Of each user the newest so many stay; 0 for no limit.")
@impressions_option
@outcomes_option
@splits_option
@table_option
@click.option("--dry-run", is_flag=True, help="Say how many archived events would go; change nothing.")
@grace_option
def command(
    store_path: Path,
    max_age_days: float | None,
    max_events: int | None,
    impressions: tuple[Path, ...],
    outcomes: tuple[Path, ...],
    splits: tuple[Path, ...],
    tables: tuple[Path, ...],
    dry_run: bool,
    grace_s: float,
) -> None:
    """Let go of events that are older, or more, than the store keeps.

    The limits are kept in the store: without one, the last one holds. Compactions apply them too, where it is worth it.

    \b
    Example, two years and 20,000 events a user:
      thinrow retain --store S --max-age-days 730 --max-events 20000
    """
    from dataclasses import replace

    from thinrow.core.errors import InputError
    from thinrow.core.units import DAY_MS
    from thinrow.history.erasure import retention_of
    from thinrow.history.store import HistoryStore

    with HistoryStore.open(store_path) as store, ExitStack() as opened:
        policy = retention_of(store.pin())
        if max_age_days is not None:
            if max_age_days < 0:
                raise InputError(f"--max-age-days {max_age_days}; it must be 0 or more")
            policy = replace(policy, max_age_ms=int(max_age_days * DAY_MS) or None)
        if max_events is not None:
            policy = replace(policy, max_events=max_events or None)
        with progress_bar("retain") as progress:
            report = store.retain(
                policy,
                also=also_of(store, paths_of(impressions, outcomes, splits, tables), opened),
                grace_s=grace_s,
                dry_run=dry_run,
                progress=progress,
            )
        age = f"{policy.max_age_ms / DAY_MS:g} days" if policy.max_age_ms else "no limit of age"
        number = f"{policy.max_events} events a user" if policy.max_events else "no limit of number"
        click.echo(f"kept: {age}, {number}")
        show("would expire: " if dry_run else "", report)
