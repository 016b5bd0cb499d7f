"""``thinrow release``."""

from __future__ import annotations

from pathlib import Path

import click


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
def command(checkpoint: Path, folder: Path, shards: int, dtype: str, keep: int | None, delta: bool) -> None:
    """Write what is served of CHECKPOINT (one, or a folder: the newest) as a release in --to.

    Embedding servers and rankers that watch the folder take it up by themselves (docs/ranker.md).

    \b
    Examples:
      thinrow release run --to releases --shards 4
      thinrow release run --to releases --shards 4 --delta --keep 3
    """
    from thinrow.checkpoints import load, version_of
    from thinrow.serving import Release, publish

    path = publish(load(checkpoint), folder, shards=shards, dtype=dtype, keep=keep, delta=delta)
    release = Release.open(path)
    assert release.version == version_of(path)
    size = sum(file.stat().st_size for file in path.iterdir())
    click.echo(f"{release.name}: {release.rows} rows of {release.dim} {dtype}, {size / 1e6:.1f} MB in {path}")
    click.echo(f"next: thinrow serve local --model {folder} --store STORE, or serve embeddings and serve ranker apart")
