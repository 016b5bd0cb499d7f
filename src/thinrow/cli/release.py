"""``thinrow release``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from thinrow.checkpoints import Checkpoint


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True, help="Folder of releases.")
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="Files of equal ranges of keys.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "int8"]),
    default="float32",
    show_default=True,
    help="Of the vectors; float32 scores as the checkpoint does, bit for bit.",
)
@click.option("--keep", type=click.IntRange(1), help="Keep so many releases, the newest.  [all]")
@click.option(
    "--delta", is_flag=True, help="Write only rows that changed since the newest release, where that will do."
)
@click.option("--watch-s", type=click.FloatRange(min=0.05), help="Go on with newer checkpoints, looked for so often.")
def command(
    checkpoint: Path, folder: Path, shards: int, dtype: str, keep: int | None, delta: bool, watch_s: float | None
) -> None:
    """Write what is served of CHECKPOINT (one, or a folder: the newest) as a release in --to.

    Embedding servers and rankers that watch the folder take it up by themselves (docs/ranker.md).

    \b
    Examples:
      thinrow release run --to releases --shards 4
      thinrow release run --to releases --shards 4 --delta --keep 3
      thinrow release run --to releases --shards 4 --delta --keep 3 --watch-s 5     # beside a run that trains
    """
    from thinrow.checkpoints import load

    options = {"shards": shards, "dtype": dtype, "keep": keep, "delta": delta}
    if watch_s is None:
        _publish(load(checkpoint), folder, options)
        apart = "or serve embeddings and serve ranker apart"
        click.echo(f"next: thinrow serve local --model {folder} --store STORE, {apart}")
        return
    from thinrow.cli.stream import stopped

    with stopped() as stop:
        while not stop.is_set():
            _publish_newer(checkpoint, folder, options)
            stop.wait(watch_s)


def _publish_newer(checkpoint: Path, folder: Path, options: dict[str, Any]) -> None:
    """The newest checkpoint, where there is one that was not published yet: not again after a rollback either."""
    from thinrow.checkpoints import has_checkpoints, load, steps, version_of
    from thinrow.checkpoints.manifest import name_of
    from thinrow.serving.release import is_published

    there = steps(checkpoint) if has_checkpoints(checkpoint) else []
    if there and not is_published(version_of(checkpoint / name_of(there[-1])), folder):
        _publish(load(checkpoint), folder, options)


def _publish(checkpoint: Checkpoint, folder: Path, options: dict[str, Any]) -> None:
    from thinrow.serving import Release, publish

    path = publish(checkpoint, folder, **options)
    release, dtype = Release.open(path), options["dtype"]
    size = sum(file.stat().st_size for file in path.iterdir())
    click.echo(f"{release.name}: {release.rows} rows of {release.dim} {dtype}, {size / 1e6:.1f} MB in {path}")
