"""Checkpoints that several processes write together, each the tables' rows of its own shard, and any number reads.

Worked example, four ranks, then three::

    routing = Routing.even(4)
    save_shard("run", 200, rank, routing, tensors=prefixed("table.", table.state()))     # on every rank
    ...                                                                                  # wait for all: a barrier
    commit("run", 200, routing, tensors=dense, meta={"loss": 0.31})                      # on one of them
    load_shard("run", rank, Routing.even(3)).tensors["table.keys"]                       # on every one of three ranks

Shards gather in a hidden folder; ``commit`` describes them and renames it. So a rank that is killed at any moment, in
any of the calls, leaves the earlier checkpoints as they were, and there is never a part of one.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import manifest as manifests
from thinrow.checkpoints import tensorfile
from thinrow.checkpoints.checkpoint import (
    Checkpoint,
    as_arrays,
    check_keep,
    check_marked,
    check_step,
    load_from,
    whole_tensors,
)
from thinrow.checkpoints.manifest import TENSORS, Manifest, Version
from thinrow.checkpoints.scratch import sweep
from thinrow.checkpoints.shardfile import file_of, tables_of_shards
from thinrow.core.errors import CorruptionError, InputError, StoreError
from thinrow.core.routing import Routing
from thinrow.embeddings.states import check_follow, is_entry, marked_at, pick, prefixed, tables_of
from thinrow.storage.objects import make_directory, sync_directory
from thinrow.storage.sealed import seal, unseal

_STAGING = re.compile(r"\.saving-step-(\d{8,18})")
#: Format of the notes that ranks leave for who commits.
_NOTE_FORMAT = 1


def save_shard(folder: str | Path, step: int, shard: int, routing: Routing, *, tensors: Mapping[str, Any]) -> None:
    """Write the tables' rows of one shard, durably, for ``commit`` to make part of checkpoint ``step``.

    Until then no reader sees them. What was saved for this shard and step before is replaced.

    Args:
        folder: the same on all ranks; made where it does not exist.
        step: 0 or more.
        shard: its number in ``routing``.
        routing: of all shards; the same on all ranks.
        tensors: of one table or more, ``table.state()`` or, for a delta, ``table.delta(...)``, under a prefix each,
            such as ``table.keys``; must not change meanwhile.

    Raises:
        InputError: an argument that cannot be stored: a tensor of no table, or a key of another shard.
        StoreError: the medium refuses.
    """
    folder, step = Path(folder), check_step(step)
    check_shard(shard, routing)
    arrays = as_arrays(tensors)
    tables = tables_of(arrays)
    for name in arrays:
        if not any(is_entry(name, prefix) for prefix in tables):
            raise InputError(f"tensor {name!r} is of no table; pass it to commit, which saves what all shards share")
    for prefix, state in tables.items():
        wrong = np.flatnonzero(routing.shards(state["keys"]) != shard)
        if len(wrong):
            key = state["keys"][wrong[0]]
            raise InputError(f"{prefix}keys has {key}, which is not in shard {shard} of {routing}; route keys by it")
    write_shard(folder, step, shard, routing, arrays, marked_at(tables))


def write_shard(
    folder: Path,
    step: int,
    shard: int,
    routing: Routing,
    arrays: Mapping[str, npt.NDArray[Any]],
    at: tuple[int, int] | None,
) -> None:
    """Write a shard's file and the note of it, durably; ``at``: what its deltas rest on. Raises StoreError."""
    staging, name = staging_of(folder, step), file_of(shard, len(routing))
    with manifests.told(step, folder):
        make_directory(staging)
        note = staging / _note_of(name)
        # First, lest it speak of a file that it was not written for.
        note.unlink(missing_ok=True)
        temporary = staging / f".{uuid.uuid4().hex}"
        stated = tensorfile.write(temporary, arrays)
        temporary.rename(staging / name)
        starts = [f"{start:016x}" for start in routing.starts]
        body = {"base": None if at is None else list(at), "file": stated, "starts": starts, "step": step}
        tensorfile.write_bytes(temporary, [seal(body, _NOTE_FORMAT, "shard")])
        temporary.rename(note)
        sync_directory(staging)


def commit(
    folder: str | Path,
    step: int,
    routing: Routing,
    *,
    tensors: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
    keep: int | None = None,
    base: Version | None = None,
) -> Path:
    """Make the shards of ``step`` a checkpoint; on one rank, when ``save_shard`` has returned on all.

    Args:
        tensors: what is saved whole: weights, small tables, as for ``save``.
        meta, keep, base: as for ``save``; with ``base`` all shards are deltas.

    Returns:
        The path of the checkpoint.

    Raises:
        InputError: an argument that cannot be stored, or ``base`` has other shards.
        StoreError: a shard was not saved, or the medium refuses; earlier checkpoints are as they were.
    """
    folder, step, keep = Path(folder), check_step(step), check_keep(keep)
    arrays, meta = as_arrays(tensors or {}), manifests.frozen(step, meta or {})
    staging, path = staging_of(folder, step), folder / manifests.name_of(step)
    check_marked(marked_at(tables_of(arrays)), base)
    if base is not None:
        below = manifests.check_base(folder, base, step, routing).path
        check_follow(arrays, tensorfile.mapped(below / TENSORS))
    with manifests.told(step, folder):
        sweep(folder)
        files = {}
        for shard in range(len(routing)):
            name = file_of(shard, len(routing))
            files[name] = _stated(staging, name, step, routing, base)
            if base is not None:
                check_follow(tensorfile.mapped(staging / name), tensorfile.mapped(below / name))
        for entry in staging.iterdir():
            if entry.name not in files:
                entry.unlink()
        files[TENSORS] = tensorfile.write(staging / TENSORS, arrays)
        Manifest(staging, step, meta, files, base, routing).write()
        sync_directory(staging)
        manifests.put_in_place(staging, path)
        shutil.rmtree(staging, ignore_errors=True)
        _sweep_staging(folder, step)
        if keep is not None:
            manifests.drop_older(folder, step, keep)
    return path


def load_shard(path: str | Path, shard: int, routing: Routing, *, split: Sequence[str] = ()) -> Checkpoint:
    """A checkpoint with the rows of one shard; it may have been saved by any number of others.

    Saved by the same ``routing``, the tables are as they were, row by row. By another one, rows are in the order of the
    shards that they come from, and the counters of keys without a row, where a budget has them, are the largest of
    those shards'. Only files that can hold keys of the shard are read, and each read is checked whole.

    Args:
        path: one checkpoint or a folder of them, as for ``load``.
        shard: its number in ``routing``.
        routing: of those who load.
        split: of a checkpoint that was saved without shards, the prefixes of the tables of which only the shard's rows
            are wanted.

    Raises:
        As ``load``; InputError where the checkpoint was saved without shards and ``split`` names no table.
    """
    check_shard(shard, routing)

    def read(chain: list[Manifest]) -> dict[str, Any]:
        if chain[-1].routing is None and not split:
            raise InputError(f"{chain[-1].path} was saved without shards; name the tables to split, or load it")
        if chain[-1].routing is None:
            tensors = whole_tensors(chain)
            for prefix, state in tables_of(tensors).items():
                if prefix in split:
                    tensors |= prefixed(prefix, pick(state, routing.shards(state["keys"]) == shard))
            return tensors
        return whole_tensors(chain) | tables_of_shards(chain, shard, routing)

    return load_from(path, read)


def check_shard(shard: int, routing: Routing) -> None:
    """Raises InputError unless ``routing`` has such a shard."""
    if not 0 <= shard < len(routing):
        raise InputError(f"shard {shard}; it must be from 0 to {len(routing) - 1}, as {routing} has it")


def staging_of(folder: Path, step: int) -> Path:
    """Where shards of ``step`` wait for the commit."""
    return folder / f".saving-{manifests.name_of(step)}"


def _note_of(name: str) -> str:
    return name.removesuffix(".safetensors") + ".json"


def _stated(staging: Path, name: str, step: int, routing: Routing, base: Version | None) -> dict[str, int]:
    """Size and CRC of a shard's file, as the rank that wrote it noted them."""
    file = staging / _note_of(name)
    try:
        body = unseal(file.read_bytes(), _NOTE_FORMAT, "shard", str(file))
        size = (staging / name).stat().st_size
    except FileNotFoundError:
        raise StoreError(f"{name} of step {step} was not saved; call save_shard on every rank, then commit") from None
    if body["starts"] != [f"{start:016x}" for start in routing.starts] or body["step"] != step:
        raise StoreError(f"{name} of step {step} was saved by another routing than {routing}; save all shards by one")
    check_marked(body.get("base"), base, f"{name} of step {step}: ")
    if size != body["file"]["bytes"]:
        raise CorruptionError(f"it has {size} bytes, not {body['file']['bytes']}", file=str(staging / name))
    stated: dict[str, int] = body["file"]
    return stated


def _sweep_staging(folder: Path, step: int) -> None:
    """Remove shards of earlier steps that were never committed: ranks are past them."""
    for entry in folder.iterdir():
        named = _STAGING.fullmatch(entry.name)
        if named and int(named[1]) < step:
            shutil.rmtree(entry, ignore_errors=True)
