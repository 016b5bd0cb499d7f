"""``thinrow verify``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thinrow.cli.common import progress_bar, store_option

if TYPE_CHECKING:
    from thinrow.history.archive.generation import Archive, Generation
    from thinrow.history.archive.verify import Damage

_LISTED = 100


@click.command()
@store_option
@click.option("--all-generations", is_flag=True, help="Every generation that is still there, not only the newest.")
@click.option("--log", "logs", type=click.Path(path_type=Path), multiple=True, help="A log that is elsewhere.")
@click.option("--table", "tables", type=click.Path(path_type=Path), multiple=True, help="A table that is elsewhere.")
def command(store_path: Path, all_generations: bool, logs: tuple[Path, ...], tables: tuple[Path, ...]) -> None:
    """Check every byte of a store: manifests, indexes, blocks, digests, tombstones, recent events and their ids.

    Logs and training tables in its directory, or named by options, are checked too. A folder of backups is checked the
    same way.

    Exit status 0 where all is well, 1 where something is damaged: each damage is a line with file, user and column on
    standard error, and then what to do next. Changes nothing; safe beside readers and writers.

    \b
    Examples:
      thinrow verify --store S
      thinrow verify --store S --log shown --log clicks --table examples
    """
    from thinrow.core.errors import NewerFormatError, StoreNotFound, ThinrowError
    from thinrow.history.archive.generation import Archive
    from thinrow.history.archive.verify import Damage, as_damage, verify_tombstones
    from thinrow.history.backup import is_backup
    from thinrow.history.place import archive_objects
    from thinrow.history.store import HistoryStore
    from thinrow.history.tiers import remembered_tier

    if is_backup(store_path):
        _verify_backup(store_path)
        return
    if not HistoryStore.exists(store_path):
        raise StoreNotFound(f"no store at {store_path}; check the path, `thinrow ingest --create` makes one")
    # Past the cache, so that what is checked is what is stored.
    archive = Archive(archive_objects(store_path, cache_bytes=0))
    found: list[Damage] = []
    generations = list(_generations(archive, found))
    checked = generations if all_generations else generations[-1:]
    rows = _verify_segments(checked, found)
    for generation in checked:
        found += verify_tombstones(generation)
    location = remembered_tier(store_path)
    recent = str(store_path / "recent") if location is None else location.tier
    if location is not None or Path(recent).exists():
        try:
            with HistoryStore.open(store_path) as store, progress_bar("recent events") as progress:
                found += store.verify_recent(progress)
        except NewerFormatError:
            raise
        except ThinrowError as e:
            found.append(as_damage(e, recent))
    else:
        # Opening the store would make a new one.
        found.append(Damage(recent, None, None, "it is missing, and with it what was not compacted"))
    logs = (*logs, *(p.parent for p in sorted(store_path.rglob("log.json"))))
    tables = (*tables, *(p.parent for p in sorted(store_path.rglob("catalog.db"))))
    found += (*_verify_logs(logs), *_verify_tables(tables))
    found = list(dict.fromkeys(found))
    if found:
        _report(found, store_path, recent)
        sys.exit(1)
    beside = f", {len(logs)} logs and {len(tables)} tables" if logs or tables else ""
    click.echo(f"{rows} events in {len(checked)} generation(s){beside} verified: no damage")
    _name_orphans(archive, generations)


def _verify_backup(folder: Path) -> None:
    """The newest backup of a folder."""
    from thinrow.history.backup import verify_backup

    number, rows, found = verify_backup(folder)
    if not found:
        click.echo(f"backup {number}: {rows} events in 1 generation(s) verified: no damage")
        return
    for damage in found[:_LISTED]:
        click.echo(f"damaged: file {damage.file}: {damage.what}", err=True)
    click.echo(
        "what to do next: the store itself may be sound (thinrow verify): back it up into another folder; an older "
        f"backup may not need these files: thinrow restore {folder} --backup N",
        err=True,
    )
    sys.exit(1)


def _generations(archive: Archive, found: list[Damage]) -> Iterator[Generation]:
    """All generations that can be opened; manifests that are damaged or missing go to ``found``."""
    from thinrow.core.errors import NewerFormatError, ThinrowError
    from thinrow.history.archive.verify import Damage, as_damage

    before: int | None = None
    for number in archive.numbers():
        file = f"manifests/{number:020d}.json"
        if before is not None and number > before + 1:
            found.append(Damage(file, None, None, f"{number - before - 1} manifests before it are missing"))
        before = number
        try:
            yield archive.generation(number)
        except NewerFormatError:
            raise
        except ThinrowError as e:
            found.append(as_damage(e, file))


def _verify_segments(generations: list[Generation], found: list[Damage]) -> int:
    """Verify each segment once, however many generations share it; returns how many events they hold."""
    from thinrow.history.archive.verify import verify_generation

    seen: set[str] = set()
    rows = 0
    for generation in reversed(generations):
        fresh = [i for i, (_, info) in enumerate(generation.segments) if not seen.issuperset(info.files)]
        rows += sum(info.n_rows for _, info in generation.segments if info.name not in seen)
        seen |= {name for _, info in generation.segments for name in info.files}
        part = generation.only(fresh)
        with progress_bar(f"generation {generation.number}") as progress:
            found += verify_generation(part, progress)
    return rows


def _verify_logs(folders: tuple[Path, ...]) -> Iterator[Damage]:
    from thinrow.examples.log import verify_log
    from thinrow.history.archive.verify import Damage, as_damage

    for folder in folders:
        for file, error in verify_log(folder):
            yield Damage(str(folder / file), None, None, as_damage(error, file).what)


def _verify_tables(folders: tuple[Path, ...]) -> Iterator[Damage]:
    """Every row of the newest snapshot is read and decoded."""
    from thinrow.core.errors import ThinrowError
    from thinrow.examples.table import ExampleTable
    from thinrow.history.archive.verify import as_damage

    for folder in folders:
        try:
            with ExampleTable.open(folder) as table:
                for bucket in table.buckets():
                    try:
                        table.read_bucket(bucket)
                    except ThinrowError as e:
                        yield as_damage(e, f"{folder}: bucket {bucket}")
        except ThinrowError as e:
            yield as_damage(e, str(folder))


#: What to do about damage, by the kind of file.
_NEXT = {
    "segments": (
        "restore from a copy: {files}; files of the archive never change, so any copy of one serves",
        "without a copy: of a file named without a user, no user of its bucket can be read (segments/<bucket>/); other "
        "users not named above can (thinrow read --out): ingest the rest again",
    ),
    "manifests": (
        "restore from a copy: {files}; without one restore a backup (thinrow restore) and ingest again what came "
        "since: an older generation lacks events that the recent tier has dropped",
    ),
    "recent": (
        "{files}: compact what can be read (thinrow compact), restore a backup to another path, and ingest again what "
        "neither holds",
    ),
    "logs": (
        "restore from a copy: {files}; logged files never change. Without one its rows are lost and the outcome join "
        "stops there: begin a new log",
    ),
    "tables": ("join the logs again into a new table, or restore from a copy: {files}",),
}


def _kind(file: str, recent: str) -> str:
    if file.startswith(("segments/", "overlays/", "tombstones/")):
        return "segments"
    if file.startswith("manifests/"):
        return "manifests"
    if file.startswith(recent):
        return "recent"
    return "logs" if file.endswith((".log", "log.json")) else "tables"


def _report(found: list[Damage], store_path: Path, recent: str) -> None:
    for damage in found[:_LISTED]:
        where = "".join(
            f", {what} {value!r}"
            for what, value in (("user", damage.user), ("column", damage.column))
            if value is not None
        )
        click.echo(f"damaged: file {damage.file}{where}: {damage.what}", err=True)
    if len(found) > _LISTED:
        click.echo(f"... and {len(found) - _LISTED} more", err=True)
    lines = []
    for kind, advice in _NEXT.items():
        files = list(dict.fromkeys(d.file for d in found if _kind(d.file, recent) == kind))
        if files:
            lines += [line.format(files=", ".join(files[:_LISTED])) for line in advice]
    lines[0] = f"what to do next: {lines[0]}"
    for line in (*lines, f"then run again: thinrow verify --store {store_path}"):
        click.echo(line, err=True)


def _name_orphans(archive: Archive, generations: list[Generation]) -> None:
    """What is no damage, but is to be known: files that nothing needs, and erasures that are not finished."""
    from thinrow.history.journal import Journal

    named = {name for g in generations for _, info in g.segments for name in info.files}
    named |= {f.name for g in generations for f in g.tombstone_index.files.values()}
    folders = {"segments/": "segment", "overlays/": "overlay", "tombstones/": "tombstone"}
    for folder, what in folders.items():
        orphans = [n for n in archive.objects.list(folder) if n not in named]
        if orphans:
            size = sum(archive.objects.size(n) for n in orphans)
            click.echo(
                f"{len(orphans)} {what} files ({size} bytes) that no manifest names, as a killed compaction leaves "
                f"them ({orphans[0]}); harmless, thinrow gc removes them"
            )
    pending = Journal(archive.objects).pending()
    if pending:
        click.echo(
            f"{len(pending)} erasures were begun and cut short ({pending[0].name}): what they name is not gone yet; "
            "finish them: thinrow erase --resume"
        )
