"""Where a store keeps its archive: in its folder, or in a bucket that ``archive.json`` in the folder names.

::

    store/
      archive/        the archive, where it is local
      archive.json    else its URL: {"archive": "s3://histories/shop?endpoint=..."}, sealed; never credentials
      cache/          blocks of that archive, as long as they are used (storage/cache.py); may be deleted
"""

from __future__ import annotations

from pathlib import Path

from thinrow.history.note import Note
from thinrow.storage.cache import DEFAULT_CACHE_BYTES, CachedObjects
from thinrow.storage.garbage import FOLDERS
from thinrow.storage.objects import LocalObjects, ObjectStore
from thinrow.storage.s3 import S3Location, S3Objects

FILE, CACHE = "archive.json", "cache"
_NOTE = Note(FILE, "archive", "place of an archive", "bucket", S3Location.parse)


def archive_objects(path: str | Path, *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> ObjectStore:
    """The objects of the archive of the store at ``path``, which need not be there yet.

    Args:
        cache_bytes: of distant blocks to keep in the store's folder; 0 for no cache.

    Raises:
        CorruptionError, NewerFormatError: the file that names the bucket is damaged or too new.
        MissingExtraError: the archive is in a bucket, and obstore is not installed.
    """
    path = Path(path)
    location = remembered(path)
    if location is None:
        return LocalObjects(path / "archive")
    objects = S3Objects(location)
    if not cache_bytes:
        return objects
    return CachedObjects(objects, path / CACHE, FOLDERS, max_bytes=cache_bytes)


def remembered(path: Path) -> S3Location | None:
    """The bucket that holds the archive of the store at ``path``; None where its own folder does."""
    return _NOTE.read(path)


def remember(path: Path, location: S3Location) -> None:
    """Let the store at ``path`` have its archive there."""
    _NOTE.write(path, location)


def forget(path: Path) -> None:
    """Undo ``remember``."""
    _NOTE.remove(path)
