"""A sealed file in a store's folder that names one place outside it.

Worked example: ``Note("archive.json", "archive", "place of an archive", "bucket", S3Location.parse)`` writes
``{"archive": "s3://histories/shop"}``, sealed, and reads that location back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from thinrow.core.errors import CorruptionError, InputError, ObjectNotFound
from thinrow.storage.objects import LocalObjects
from thinrow.storage.sealed import seal, unseal

_FORMAT = 1
_Location = TypeVar("_Location")


@dataclass(frozen=True, slots=True)
class Note(Generic[_Location]):
    """Attributes:
    file: its name.
    key: under which the place stands in it.
    what: the file is, in errors.
    kind: of place, in errors.
    parse: a place from ``str`` of it; raises InputError.
    """

    file: str
    key: str
    what: str
    kind: str
    parse: Callable[[str], _Location]

    def read(self, path: Path) -> _Location | None:
        """The place that the folder at ``path`` names; None where there is no file.

        Raises:
            CorruptionError, NewerFormatError: the file is damaged or too new.
        """
        try:
            body = unseal(LocalObjects(path).get(self.file), _FORMAT, self.what, self.file)
        except ObjectNotFound:
            return None
        try:
            return self.parse(body[self.key])
        except (KeyError, TypeError, AttributeError, InputError) as e:
            raise CorruptionError(f"it names no {self.kind}: {e}", file=self.file) from e

    def write(self, path: Path, location: _Location) -> None:
        """Let the folder at ``path`` name ``location``."""
        LocalObjects(path).put(self.file, seal({self.key: str(location)}, _FORMAT, self.what))

    def remove(self, path: Path) -> None:
        """Undo ``write``."""
        LocalObjects(path).delete(self.file)
