"""A run's checkpoints with deltas between the full ones, written in the background.

Worked example, a full one after every three deltas::

    saving = Incremental("run", {"table.": table}, deltas=3, keep=2)
    saving.save(100, tensors=weights, meta={})     # full: run/step-00000100
    saving.save(110, tensors=weights, meta={})     # the rows that changed since, on step 100
    saving.close()                                 # both are durable

``load("run")`` gives the state of step 110. A save that failed is reported by the next call; the one after it is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from thinrow.checkpoints.background import Background, snapshot
from thinrow.checkpoints.checkpoint import save
from thinrow.checkpoints.manifest import Version, version_of
from thinrow.core.errors import InputError
from thinrow.embeddings.states import prefixed
from thinrow.embeddings.table import DynamicTable


class Incremental:
    """Tables must not be replaced (``load_state``) while it is in use."""

    def __init__(
        self,
        folder: str | Path,
        tables: Mapping[str, DynamicTable],
        *,
        deltas: int,
        keep: int | None = None,
        after: Version | None = None,
    ) -> None:
        """Args:
        folder: of the run.
        tables: prefix of its tensors -> table.
        deltas: how many are written before the next full one; 0 or more.
        keep: as for ``save``.
        after: the checkpoint that the tables have just been loaded from, where the first delta may rest on it.

        Raises:
            InputError: ``deltas`` is negative.
        """
        if deltas < 0:
            raise InputError(f"deltas={deltas}; it must be 0 or more")
        self.folder, self.tables, self.deltas, self.keep = Path(folder), dict(tables), deltas, keep
        self._changes = {prefix: table.track() for prefix, table in tables.items()} if deltas else {}
        self._base, self._since_full = after, 0
        self._background = Background()

    def save(self, step: int, *, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Copy what is to be saved and start to write it, once the save before is done.

        Args:
            tensors: all but the tables, as for ``save``.

        Raises:
            What the save before it raised; this one is not begun then. InputError where a tensor cannot be stored.
        """
        self.wait()
        delta = self._base is not None and self._base.step < step and self._since_full < self.deltas
        arrays = snapshot(tensors)
        for prefix, table in self.tables.items():
            arrays |= prefixed(prefix, table.delta(self._changes[prefix]) if delta else table.state())
        for changes in self._changes.values():
            changes.mark()
        base, self._base = self._base if delta else None, None
        self._since_full = self._since_full + 1 if delta else 0
        self._background.start(save, self.folder, step, tensors=arrays, meta=meta, keep=self.keep, base=base)

    def wait(self) -> Path | None:
        """The path of what was saved last, once it is durable; None where that was told already. Raises as ``save``."""
        path: Path | None = self._background.wait()
        if path is not None:
            self._base = version_of(path)
        return path

    def close(self) -> None:
        """Wait, and note changes no more. Raises as ``save``."""
        try:
            self.wait()
        finally:
            self._background.close()
            for prefix, changes in self._changes.items():
                self.tables[prefix].untrack(changes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
