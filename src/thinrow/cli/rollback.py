"""``thinrow rollback``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("releases", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), help="Back to the release of this step.  [the one before the newest]")
def command(releases: Path, step: int | None) -> None:
    """Make an earlier release of RELEASES the newest again, under a new step.

    Servers and rankers take it up as any other. Files are linked, not copied; nothing is removed.

    \b
    Examples:
      thinrow rollback releases
      thinrow rollback releases --step 200
    """
    from thinrow.serving import Release
    from thinrow.serving.release import roll_back

    release = Release.open(roll_back(releases, step))
    click.echo(f"{release.name}: as step {release.meta['again']}, in {release.path}")
