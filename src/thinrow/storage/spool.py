"""Bytes set aside until their place in a file is known: in memory at first, then in a file without a name.

Worked example: the regions of three feature groups grow together, but lie in the segment one after another. Each has
a ``Spool``; when the last stripe is done they are copied into the segment in order. A killed process leaves nothing:
the file has no name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from thinrow.core.errors import StoreError
from thinrow.storage.objects import BytesLike, as_bytes

#: Bytes that a spool keeps in memory before it takes a file.
MEMORY_BYTES = 8 << 20
_COPY_BYTES = 4 << 20


class Spool:
    """An append-only row of bytes that is read once.

    Attributes:
        size: bytes appended.
    """

    def __init__(self, folder: Path | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        """Beyond ``memory_bytes`` the bytes go to an unnamed file in ``folder`` (by default that of ``tempfile``)."""
        self._folder, self._memory_bytes = folder, memory_bytes
        self._parts: list[bytes] = []
        self._file: IO[bytes] | None = None
        self.size = 0

    def append(self, data: BytesLike) -> None:
        """Add ``data``, copied. Raises StoreError where the disk refuses."""
        view = as_bytes(data)
        if self._file is None and self.size + len(view) <= self._memory_bytes:
            self._parts.append(bytes(view))
        else:
            self._to_file(view)
        self.size += len(view)

    def blocks(self, block_bytes: int = _COPY_BYTES) -> Iterator[bytes]:
        """All bytes in order, in blocks of ``block_bytes`` (the last may be shorter)."""
        if self._file is None:
            data = b"".join(self._parts)
            for at in range(0, len(data), block_bytes):
                yield data[at : at + block_bytes]
            return
        self._file.seek(0)
        while block := self._file.read(block_bytes):
            yield block

    def close(self) -> None:
        """Let go of the bytes."""
        self._parts = []
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _to_file(self, view: memoryview) -> None:
        try:
            if self._file is None:
                if self._folder is not None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
                for part in self._parts:
                    _write(self._file, memoryview(part))
                self._parts = []
            _write(self._file, view)
        except OSError as e:
            where = self._folder or tempfile.gettempdir()
            raise StoreError(f"cannot write a temporary file in {where}: {e.strerror or e}; free space there") from e


def _write(file: IO[bytes], view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]
