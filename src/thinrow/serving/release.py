"""Releases: what is served of a checkpoint. An export whose tables embedding servers map, with the weights beside them.

    publish(load("run"), "releases", shards=4)       # releases/step-00000200
    release = Release.open("releases")               # the newest; its version is that of its vectors, too
    model = release.model(ServerRows(client, release.table, release.version, release.dim))

Weights and vectors are one export, whole or absent: a ranker that asks the servers for the version of its weights
never scores with weights of one step and vectors of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import Checkpoint, ServingTable, Version, export, load, steps, tensorfile
from thinrow.checkpoints import manifest as manifests
from thinrow.checkpoints.checkpoint import newest_of
from thinrow.checkpoints.export import WRITER
from thinrow.checkpoints.manifest import TENSORS, Manifest, name_of
from thinrow.core.errors import CheckpointMismatch, InputError
from thinrow.core.routing import Routing
from thinrow.embeddings.states import BASE, DELTA
from thinrow.models.saved import SavedRanker
from thinrow.models.spec import TABLE
from thinrow.serving.prefixes import Prefixes
from thinrow.serving.rows import FetchedRows, LocalRows, RowSource
from thinrow.serving.scoring import Model

#: Of a release's meta: rows of its table, which says whether a later one lacks some.
_ROWS = "rows"
#: Step and CRC of the checkpoint that it was made of.
_OF = "checkpoint"
_OF_RANKERS = ("ranker", "event_schema", "example_schema")


def publish(
    checkpoint: Checkpoint,
    folder: str | Path,
    *,
    shards: int = 1,
    dtype: str = "float32",
    keep: int | None = None,
    delta: bool = False,
) -> Path:
    """Write a release of ``checkpoint`` into ``folder``, durably; servers and rankers take it up by themselves.

    Its step is that of the checkpoint, or the one after the newest release where that is later: it is the newest then.

    Args:
        folder: of releases of this model alone.
        shards: equal ranges of keys, a file each; any number of servers may serve them.
        dtype: of the vectors, as for ``export``.
        keep: of releases up to this step so many stay.
        delta: write the rows alone that are not as in the newest release there, where there is one that it can rest
            on: one of this model with the same shards, all of whose keys are still there. int8 is written in full.

    Returns:
        Its path.

    Raises:
        CheckpointMismatch: it is no checkpoint of a ranker.
        InputError, StoreError: as ``export``.
    """
    folder = Path(folder)
    SavedRanker.of(checkpoint.meta, checkpoint.tensors, checkpoint.path, rows=False)
    state: dict[str, npt.NDArray[Any]] = {n: checkpoint.tensors[TABLE + n] for n in ("keys", "values")}
    weights = {n: a for n, a in checkpoint.tensors.items() if not n.startswith(TABLE)}
    meta = {n: checkpoint.meta[n] for n in _OF_RANKERS} | {_ROWS: len(state["keys"]), _OF: _said(checkpoint.version)}
    routing, base = Routing.even(shards), None
    there = steps(folder)
    step = there[-1] + 1 if there and there[-1] > checkpoint.step else checkpoint.step
    if delta and dtype != "int8" and any(one < step for one in there):
        changed, base = _changes(state, folder, routing, meta, dtype)
        state = state if changed is None else changed
    return export(
        folder,
        step,
        {TABLE: state},
        routing=routing,
        dtype=dtype,
        keep=keep,
        base=base,
        tensors=weights,
        meta=meta,
    )


def _changes(
    state: Mapping[str, npt.NDArray[Any]], folder: Path, routing: Routing, meta: Mapping[str, Any], dtype: str
) -> tuple[dict[str, npt.NDArray[Any]] | None, Version | None]:
    """Of ``state`` the rows that the newest release does not have so, as a delta on it; None where it cannot rest on
    it."""
    before = Release.open(folder)
    table = ServingTable.open(before.path, TABLE)
    if before.meta.get("ranker") != meta["ranker"] or table.routing != routing:
        return None, None
    vectors, found = table.read(state["keys"])
    if int(found.sum()) != before.meta[_ROWS]:
        return None, None
    with np.errstate(over="ignore"):
        now = state["values"].astype(dtype).astype(np.float32)
    # Bit by bit, for -0 is not 0 to a model that divides by it.
    rows = np.flatnonzero(~found | (now.view(np.uint32) != vectors.view(np.uint32)).any(1))
    delta = {"keys": state["keys"][rows], "values": state["values"][rows], DELTA + "rows": rows}
    at = before.version
    return delta | {DELTA + "gone": np.empty(0, np.int64), BASE: np.array([at.step, at.crc32c])}, at


@dataclass(frozen=True, slots=True)
class Release:
    """A release that is there whole.

    Attributes:
        path: its folder.
        version: which one it is.
        meta: what was written beside it.
        weights: name -> array, without the table's rows.
        table: the prefix of its table.
    """

    path: Path
    version: Version
    meta: dict[str, Any]
    weights: dict[str, npt.NDArray[Any]]
    table: str = TABLE

    @classmethod
    def open(cls, path: str | Path) -> Release:
        """One release, or the newest whole one of a folder. Vectors are not read.

        Raises:
            CheckpointNotFound, CorruptionError, ObjectNotFound: as ``load``.
            CheckpointMismatch: it is no release.
        """
        found, weights = newest_of(Path(path), _weights, writer=WRITER)
        if not {"export", _ROWS, *_OF_RANKERS} <= set(found.meta):
            raise CheckpointMismatch(
                f"{found.path} is no release of a ranker; write one with `{WRITER}`, which takes a checkpoint"
            )
        return cls(found.path, found.version, dict(found.meta), weights)

    def newest(self) -> Release:
        """The newest whole one beside it, or this one."""
        found = Release.open(self.path.parent)
        return self if found.version == self.version else found

    @property
    def rows(self) -> int:
        """Of its table."""
        return int(self.meta[_ROWS])

    def model(self, source: RowSource | None = None, *, prefix_bytes: int = 0) -> Model:
        """What scores with it. Rows come from ``source``; by default from its own files, mapped. States of users'
        histories are kept in ``prefix_bytes`` (``Prefixes``), where the model has such.

        Raises:
            CheckpointMismatch: weights are not what they are said to be.
        """
        saved = SavedRanker.of(self.meta, self.weights, self.path, rows=False)
        fetched = FetchedRows(saved.spec.dim)
        fetched.stand_in(saved.module)
        rows = LocalRows(ServingTable.open(self.path, self.table)) if source is None else source
        return Model(saved, self.name, rows, fetched, Prefixes(prefix_bytes) if prefix_bytes else None)

    @property
    def dim(self) -> int:
        """Width of a vector."""
        width: int = self.meta["ranker"]["dim"]
        return width

    @property
    def name(self) -> str:
        """What impressions say of it, ``hstu@200-1f2e3d4c``: model, step, and the CRC of all its bytes."""
        return f"{self.meta['ranker']['model']['name']}@{self.version.step}-{self.version.crc32c:08x}"


def is_published(version: Version, folder: str | Path) -> bool:
    """Whether a release in ``folder`` was made of the checkpoint of ``version``."""
    folder = Path(folder)
    return any(_meta(folder / name_of(step)).get(_OF) == _said(version) for step in steps(folder))


def _said(version: Version) -> list[int]:
    return [version.step, version.crc32c]


def roll_back(folder: str | Path, step: int | None = None) -> Path:
    """Make the release of ``step``, by default the one before the newest, the newest again, under the step after it.

    What it rests on stays; its own files are linked, so nothing is copied.

    Returns:
        The path of the new release, of another version with the same vectors and weights.

    Raises:
        InputError: there is no such release, or none before the newest.
        CorruptionError, ObjectNotFound: it is damaged. StoreError: the medium refuses.
    """
    folder = Path(folder)
    there = steps(folder)
    wanted = there[-2] if step is None and len(there) > 1 else step
    if wanted is None or wanted not in there:
        have = ", ".join(map(str, there)) or "none"
        raise InputError(f"no release of step {wanted} to go back to in {folder}; there are {have}")
    before = Release.open(folder / name_of(wanted))
    found = manifests.read(before.path)
    for name in found.files:
        found.checked(name)
    meta = {**found.meta, "again": wanted}
    return manifests.linked(found, folder, there[-1] + 1, meta)


def models_at(path: str | Path) -> list[Model]:
    """The models of a release or checkpoint, or of all those in a folder, oldest first, their rows in memory.

    Raises:
        As ``load``; CheckpointMismatch where one is neither.
    """
    path = Path(path)
    found = [path / name_of(step) for step in steps(path)] or [path]
    return [Release.open(one).model() if "export" in _meta(one) else Model.of_checkpoint(load(one)) for one in found]


def _meta(path: Path) -> dict[str, Any]:
    found, _ = newest_of(path, lambda chain: None)
    return dict(found.meta)


def _weights(chain: list[Manifest]) -> dict[str, npt.NDArray[Any]]:
    found = tensorfile.read(chain[-1].checked(TENSORS))
    return {name: array for name, array in found.items() if not name.endswith("default")}


__all__ = ["Release", "is_published", "models_at", "publish", "roll_back"]
