"""A run's checkpoints with deltas between the full ones, written in the background, by one process or by ranks.

Worked example, a full one after every three deltas::

    saving = Incremental("run", {"table.": table}, deltas=3, keep=2)
    saving.save(100, tensors=weights, meta={})     # full: run/step-00000100
    saving.save(110, tensors=weights, meta={})     # the rows that changed since, on step 100
    saving.close()                                 # both are durable

``load("run")`` gives the state of step 110. A save that failed is reported by the next call; the one after it is full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints.background import Background, snapshot
from thinrow.checkpoints.checkpoint import Checkpoint, save
from thinrow.checkpoints.manifest import TENSORS, Manifest, Version, frozen, name_of, read, version_of
from thinrow.checkpoints.shardfile import file_of
from thinrow.checkpoints.shards import commit, save_shard
from thinrow.checkpoints.tensorfile import mapped
from thinrow.core.errors import CorruptionError, InputError, StoreError
from thinrow.core.routing import Routing
from thinrow.embeddings.ranks import Ranks
from thinrow.embeddings.states import is_entry, n_rows, prefixed, tables_of
from thinrow.embeddings.table import DynamicTable

Arrays = dict[str, npt.NDArray[Any]]


class Incremental:
    """Tables must not be replaced (``load_state``) while it is in use."""

    _routing: Routing | None = None

    def __init__(
        self,
        folder: str | Path,
        tables: Mapping[str, DynamicTable],
        *,
        deltas: int,
        keep: int | None = None,
        after: Checkpoint | None = None,
    ) -> None:
        """Args:
        folder: of the run.
        tables: prefix of its tensors -> table.
        deltas: how many are written before the next full one; 0 or more.
        keep: as for ``save``.
        after: what the tables have just been loaded from, and not written to since: the first save is a delta on it,
            unless it has other tables, or has them in other places.

        Raises:
            InputError: ``deltas`` is negative.
        """
        if deltas < 0:
            raise InputError(f"deltas={deltas}; it must be 0 or more")
        self.folder, self.tables, self.deltas, self.keep = Path(folder), dict(tables), deltas, keep
        self._changes = {prefix: table.track() for prefix, table in tables.items()} if deltas else {}
        # What other shards saved is no base for these.
        fits = after is not None and after.routing == self._routing
        self._base = after.version if fits and after is not None else None
        self._since_full = 0
        self._background = Background()

    def save(self, step: int, *, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Copy what is to be saved and start to write it, once the save before is done.

        Args:
            tensors: all but the tables, as for ``save``.

        Raises:
            What the save before it raised; this one is not begun then. InputError where a tensor cannot be stored, or
            has a name of a table's.
        """
        self.wait()
        self._begin(step, tensors, meta)

    def _begin(self, step: int, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        meta = frozen(step, meta)
        for name in tensors:
            for prefix in self.tables:
                if is_entry(name, prefix):
                    raise InputError(f"tensor {name!r} has a name of table {prefix!r}; rename it")
        delta = self._since_full < self.deltas and self._has_base(step)
        arrays = snapshot(tensors)
        for changes in self._changes.values():
            changes.base = self._base
        states = {p: t.delta(self._changes[p]) if delta else t.state() for p, t in self.tables.items()}
        for changes in self._changes.values():
            changes.mark()
        base, self._base = self._base if delta else None, None
        self._since_full = self._since_full + 1 if delta else 0
        self._start(step, arrays, states, meta, base)

    def _has_base(self, step: int) -> bool:
        """Whether a delta of ``step`` has something to rest on; where somebody took it away, the save is full."""
        if self._base is None or self._base.step >= step:
            return False
        try:
            base = read(self.folder / name_of(self._base.step))
            base.check_sizes()
            return base.version == self._base and self._follows(base)
        except (CorruptionError, StoreError):
            return False

    def _follows(self, base: Manifest) -> bool:
        """Whether ``base`` has each table where this save would put it, with the rows that it had at the mark."""
        files = {prefix: self._file_of(prefix) for prefix in self.tables}
        below = {file: tables_of(mapped(base.path / file)) for file in set(files.values()) if file}
        return all(
            prefix in below[file] and n_rows(below[file][prefix]) == self._changes[prefix].marked_rows
            for prefix, file in files.items()
            if file
        )

    def _file_of(self, prefix: str) -> str:
        """The file that this process writes a table to; empty for none."""
        return TENSORS

    def _start(
        self, step: int, arrays: Arrays, states: Mapping[str, Arrays], meta: Mapping[str, Any], base: Version | None
    ) -> None:
        for prefix, state in states.items():
            arrays |= prefixed(prefix, state)
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


class RankTable(Protocol):
    """One rank's part of a table, as ``thinrow.embeddings.shards.Shard``."""

    table: DynamicTable
    ranks: Ranks
    whole: bool


class RankIncremental(Incremental):
    """``Incremental`` of tables that are spread over ranks: each writes its rows, rank 0 the rest, whole tables too.

    ``save``, ``wait`` and ``close`` are collective. A checkpoint is there when the ``wait`` after its ``save``, or the
    next ``save``, has returned: then all ranks have written, and rank 0 has put it in place. What one rank could not do
    (tensors that cannot be stored, too) is an error of that call on all of them.
    """

    def __init__(
        self,
        folder: str | Path,
        shards: Mapping[str, RankTable],
        *,
        deltas: int,
        keep: int | None = None,
        after: Checkpoint | None = None,
    ) -> None:
        """Args:
        shards: prefix -> this rank's part of the table, one at least; all of the same ranks. The rest as
            ``Incremental``.

        Raises:
            InputError: ``deltas`` is negative.
        """
        self.shards = dict(shards)
        self.ranks: Ranks = next(iter(shards.values())).ranks
        self._routing: Routing = Routing.even(self.ranks.size)
        self._pending: dict[str, Any] | None = None
        tables = {prefix: shard.table for prefix, shard in shards.items()}
        super().__init__(folder, tables, deltas=deltas, keep=keep, after=after)

    def _begin(self, step: int, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        try:
            super()._begin(step, tensors, meta)
        except Exception as e:
            # The others have begun: all are told by the next call.
            self._base = None
            self._pending = {"step": step}
            self._background.start(_fail, e)

    def _file_of(self, prefix: str) -> str:
        if self.shards[prefix].whole:
            return "" if self.ranks.rank else TENSORS
        return file_of(self.ranks.rank, self.ranks.size)

    def _start(
        self, step: int, arrays: Arrays, states: Mapping[str, Arrays], meta: Mapping[str, Any], base: Version | None
    ) -> None:
        mine: Arrays = {}
        for prefix, state in states.items():
            (arrays if self.shards[prefix].whole else mine).update(prefixed(prefix, state))
        self._pending = {"step": step, "tensors": arrays, "meta": meta, "base": base}
        self._background.start(save_shard, self.folder, step, self.ranks.rank, self._routing, tensors=mine)

    def wait(self) -> Path | None:
        """As ``Incremental.wait``; collective."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        step = pending["step"]
        self._together(f"shard of {step}", self._background.wait)
        crc = self._together(f"commit of {step}", lambda: self._commit(pending))
        self._base = Version(step, crc)
        return self.folder / name_of(step)

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
            return
        # The other ranks are somewhere else: what was being saved is not committed, and nobody waits for anybody.
        self._pending = None
        with contextlib.suppress(Exception):
            self._background.close()

    def _commit(self, pending: Mapping[str, Any]) -> int:
        if self.ranks.rank:
            return 0
        return version_of(commit(self.folder, routing=self._routing, keep=self.keep, **pending)).crc32c

    def _together(self, what: str, call: Any) -> int:
        """What ``call`` returned on rank 0, once it has on all ranks. Raises StoreError where it failed on another."""
        failure: Exception | None = None
        number = 0
        try:
            number = call() or 0
        except Exception as e:
            failure = e
        told = np.array([failure is not None, number], np.int64)
        answers = self.ranks.gather(what, told)
        if failure is not None:
            raise failure
        failed = [rank for rank, answer in enumerate(answers) if answer[0]]
        if failed:
            raise StoreError(f"rank {failed[0]} did not save its {what}; its own error says why, save again")
        return int(answers[0][1])


def _fail(error: Exception) -> None:
    raise error
