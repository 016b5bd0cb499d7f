"""Where a store keeps its recent events: in its folder, or on a Redis server that ``recent.json`` in the folder names.

::

    store/
      recent/        the LMDB environment, where it is local
      recent.json    else the URL of the server: {"recent": "redis://cache:6379/0?name=..."}, sealed; never credentials
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from thinrow.core.errors import InputError, StoreExists
from thinrow.core.units import EPOCH_BITS
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.note import Note
from thinrow.history.recent.epochs import claim_epoch
from thinrow.history.recent.lmdb import LmdbRecent
from thinrow.history.recent.redis import RedisRecent
from thinrow.history.recent.redis_link import RedisLocation
from thinrow.history.recent.tier import RecentTier
from thinrow.schema import EventSchema

FILE, FOLDER = "recent.json", "recent"
_NOTE = Note(FILE, "recent", "place of recent events", "Redis server", RedisLocation.parse)


def remembered_tier(path: Path) -> RedisLocation | None:
    """The server that holds the recent events of the store at ``path``; None where its own folder does."""
    return _NOTE.read(path)


def destroy_tier(path: Path, tier: RecentTier) -> None:
    """Remove the tier of a store that was just made, and what ``new_tier`` wrote down of it."""
    if isinstance(tier, RedisRecent):
        tier.destroy()
    forget_tier(path)


def forget_tier(path: Path) -> None:
    """Undo what ``new_tier`` wrote down."""
    _NOTE.remove(path)


def new_tier(path: Path, archive: Archive, schema: EventSchema, url: str | None, sync: bool) -> RecentTier:
    """The tier of a store that is being made at ``path``.

    Raises:
        StoreExists: it holds events.
        InputError: ``url`` is none of a Redis server.
        StoreError: that does not answer, or is not set to what the URL says.
    """
    if url is None:
        tier = LmdbRecent(path / FOLDER, schema, sync=sync)
        if len(tier.known_users(1)):
            tier.close()
            raise StoreExists(
                f"{path / FOLDER} holds events of a store whose archive is gone; restore it, or choose another path"
            )
        return tier
    location = RedisLocation.parse(url)
    if not location.name:
        location = replace(location, name=secrets.token_hex(8))
    made = RedisRecent(location, schema, lambda least: claim_epoch(archive.objects, least), new=True)
    _NOTE.write(path, location)
    return made


def open_tier(path: Path, archive: Archive, url: str | None, sync: bool) -> RecentTier:
    """The tier of the store at ``path``; where it was lost, a new one that counts from a new epoch.

    Raises:
        InputError: ``url`` is not where this store has its recent events.
        StoreError: the server does not answer, or is not set to what its URL says.
    """

    def claim(least: int) -> int:
        return claim_epoch(archive.objects, max(least, next_epoch(archive.pin())))

    location = remembered_tier(path) if url is None else _settle(path, RedisLocation.parse(url))
    schema = archive.pin().schema
    if location is None:
        return LmdbRecent(path / FOLDER, schema, sync=sync, floor=lambda: claim(0))
    opened = RedisRecent(location, schema, claim)
    if location != remembered_tier(path):
        _NOTE.write(path, location)
    return opened


def restored_tier(
    path: Path, archive: Archive, location: RedisLocation, source: LmdbRecent, epoch: int, restore: str
) -> None:
    """Fill a new tier at ``location`` with what ``source`` holds, for the store that is being restored at ``path``.

    Args:
        epoch: from which it counts.
        restore: a name of this restore, the same when it is run again.

    Raises:
        StoreExists: the server holds a tier of that name.
        StoreError: it does not answer, or is not set to what the URL says.
    """

    def claim(least: int) -> int:
        return claim_epoch(archive.objects, max(least, epoch))

    schema = source.schema
    with RedisRecent(location, schema, claim, restoring=restore.encode()) as tier:
        tier.fill(source)
        tier.restored()
    _NOTE.write(path, location)


def next_epoch(generation: Generation) -> int:
    """The number after which a tier that replaces a lost one counts.

    The upper bits of an arrival number are the epoch of its tier: what the lost tier gave out beyond the archive is
    never given again, so a request that logged it inline cannot be taken for another event's.
    """
    held = (generation.segment(i).meta["max_arrival"] for i in range(len(generation.segments)))
    highest = max(held, default=0)
    highest = max(highest, generation.tombstone_index.max_arrival)
    return ((highest >> EPOCH_BITS) + 1) << EPOCH_BITS


def _settle(path: Path, location: RedisLocation) -> RedisLocation:
    """The place that a caller gives, held to the one that the folder remembers."""
    held = remembered_tier(path)
    if held is None:
        if (path / FOLDER).exists():
            raise InputError(f"the store at {path} has its recent events in its own folder, not at {location}")
        if not location.name:
            raise InputError(f"{location} names no store; add ?name=NAME, as in recent.json of its first folder")
    elif location.name not in ("", held.name):
        raise InputError(f"the store at {path} has its recent events at {held}, not at {location}; leave it out")
    else:
        # A server may be reached by another name today, and promise more.
        location = replace(location, name=held.name)
    return location
