"""Named tensors and JSON beside them, on disk whole or not at all; what they mean is the caller's business.

Worked example::

    save("run", 200, tensors={"w": np.eye(2)}, meta={"loss": 0.31}, keep=3)     # -> run/step-00000200
    load("run").tensors["w"]                                                    # of the newest whole one
    load("run/step-00000100").meta                                              # of this one

A checkpoint is a folder of two files: ``tensors.safetensors``, and ``checkpoint.json``, which has the format, the step,
the meta, and size and CRC-32C of the other. It is written under a hidden name, synced, and renamed: a process killed
at any moment leaves the earlier checkpoints as they were. ``load`` reads every byte and checks it. CRC-32C and not a
cryptographic hash, for damage is what is looked for, not forgery: 500 MB took 0.05 s, SHA-256 0.28 s, reading 0.25 s.

With ``base`` it is a delta: its tables are ``DynamicTable.delta``, all else is whole. ``load`` gives the state that
they lead to::

    changes = table.track()
    base = version_of(save("run", 200, tensors=prefixed("table.", table.state()), meta={}))
    changes.mark(base)
    ...                                                                         # ten steps
    save("run", 210, tensors=prefixed("table.", table.delta(changes)), meta={}, base=base)
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import manifest as manifests
from thinrow.checkpoints import tensorfile
from thinrow.checkpoints.manifest import MANIFEST, TENSORS, Manifest, Version
from thinrow.checkpoints.scratch import scratch, sweep
from thinrow.checkpoints.shardfile import damage_of, tables_of_shards
from thinrow.checkpoints.tensorfile import DTYPES, RESERVED
from thinrow.core.errors import CheckpointNotFound, CorruptionError, InputError, ObjectNotFound, StoreError
from thinrow.core.routing import Routing
from thinrow.embeddings.states import check_follow, marked_at, replayed, tables_of
from thinrow.storage.objects import make_directory, sync_directory

Arrays = dict[str, npt.NDArray[Any]]
T = TypeVar("T")

#: How often checkpoints may vanish under a reader that looks for the newest.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint in memory.

    Attributes:
        path: the folder that it was read from.
        step: number of training steps done.
        tensors: name -> writable array in C order; shape and dtype as saved. Of a delta, as of a full one.
        meta: the JSON that was saved beside them.
        version: which one it is, for deltas on it.
        routing: of the shards that it was saved by; None where there were none.
    """

    path: Path
    step: int
    tensors: dict[str, npt.NDArray[Any]]
    meta: dict[str, Any]
    version: Version
    routing: Routing | None


def save(
    folder: str | Path,
    step: int,
    *,
    tensors: Mapping[str, Any],
    meta: Mapping[str, Any],
    keep: int | None = None,
    base: Version | None = None,
) -> Path:
    """Write ``folder/step-<step>``, durably; a checkpoint of the same step is replaced.

    Nothing is copied but arrays that are not in C order. What killed writers left in ``folder`` is removed first.

    Args:
        folder: made where it does not exist.
        step: 0 or more.
        tensors: name -> NumPy array or torch tensor of any shape, of one of ``DTYPES``; must not change meanwhile.
        meta: JSON: string keys, lists in place of tuples, no NaN.
        keep: where given, of the checkpoints up to this step only so many stay, the newest, and those that they rest
            on; 1 or more.
        base: where the tables among ``tensors`` are deltas, the checkpoint at whose save their changes were marked.

    Returns:
        The path of the checkpoint.

    Raises:
        InputError: an argument that cannot be stored; nothing was written.
        StoreError: the medium refuses (full, not writable); earlier checkpoints are as they were.
    """
    folder, step, keep = Path(folder), check_step(step), check_keep(keep)
    arrays, meta = as_arrays(tensors), manifests.frozen(step, meta)
    path = folder / manifests.name_of(step)
    check_marked(marked_at(tables_of(arrays)), base)
    if base is not None:
        found = manifests.check_base(folder, base, step, None)
        check_follow(arrays, tensorfile.mapped(found.path / TENSORS))
    with manifests.told(step, folder):
        make_directory(folder)
        sweep(folder)
        with scratch(folder) as temporary:
            temporary.mkdir()
            files = {TENSORS: tensorfile.write(temporary / TENSORS, arrays)}
            Manifest(temporary, step, meta, files, base).write()
            sync_directory(temporary)
            manifests.put_in_place(temporary, path)
        if keep is not None:
            manifests.drop_older(folder, step, keep)
    return path


def load(path: str | Path) -> Checkpoint:
    """A checkpoint, every byte checked; what shards hold is joined, and deltas are replayed.

    Args:
        path: one checkpoint; or a folder of them: the newest whole one is loaded, with a warning where a newer one is
            damaged.

    Raises:
        CheckpointNotFound: there is none.
        CorruptionError: it is damaged, or what it rests on is; of a folder, every one in it is.
        ObjectNotFound: one of its files is missing, or what it rests on.
        NewerFormatError: a newer thinrow wrote it (of a folder: the newest that is not damaged).
    """
    return load_from(path, _all_tensors)


def has_checkpoints(folder: str | Path) -> bool:
    """Whether ``folder`` holds a checkpoint, be it whole or damaged."""
    return bool(manifests.in_place(Path(folder)))


def steps(folder: str | Path) -> list[int]:
    """Steps of the checkpoints in ``folder``, ascending; empty where there is no such folder.

    Those with a damaged ``checkpoint.json`` or with a file missing or cut off, and those that rest on such ones, are
    left out; other bytes are not read.
    """
    return list(manifests.whole(Path(folder)))


def load_from(path: str | Path, read: Callable[[list[Manifest]], Arrays]) -> Checkpoint:
    """As ``load``, with the tensors that ``read`` makes of the chain of what the checkpoint rests on."""
    own, tensors = newest_of(Path(path), read)
    return Checkpoint(own.path, own.step, tensors, dict(own.meta), own.version, own.routing)


def newest_of(path: Path, read: Callable[[list[Manifest]], T], *, writer: str = "thinrow train") -> tuple[Manifest, T]:
    """What is said of the checkpoint at ``path``, or of the newest whole one in it, and what ``read`` makes of the
    chain of what it rests on, itself the last. Raises as ``load``; where there is none, ``writer`` is the command that
    makes one."""
    if (path / MANIFEST).exists() or manifests.is_named(path):
        return _read_one(path, read)
    for _ in range(_ATTEMPTS):
        found = _read_newest(path, read, writer)
        if found is not None:
            return found
    raise StoreError(f"checkpoints in {path} are removed faster than they are read; save with a larger keep")


def _read_newest(folder: Path, read: Callable[[list[Manifest]], T], writer: str) -> tuple[Manifest, T] | None:
    """Of the newest whole one; None where one vanished while it was read."""
    damage: CorruptionError | ObjectNotFound | None = None
    for step in reversed(manifests.in_place(folder)):
        path = folder / manifests.name_of(step)
        try:
            found = _read_one(path, read)
        except (CorruptionError, ObjectNotFound) as e:
            if not path.exists():
                return None
            damage = damage or e
            continue
        if damage is not None:
            warnings.warn(f"step {step} is loaded in place of a newer one: {damage}", RuntimeWarning, stacklevel=5)
        return found
    raise damage or _not_found(folder, writer)


def _read_one(path: Path, read: Callable[[list[Manifest]], T]) -> tuple[Manifest, T]:
    chain = manifests.read(path).chain()
    return chain[-1], read(chain)


def _all_tensors(chain: list[Manifest]) -> Arrays:
    tensors = whole_tensors(chain)
    return tensors if chain[-1].routing is None else tensors | tables_of_shards(chain)


def whole_tensors(chain: list[Manifest]) -> Arrays:
    """Writable tensors of the last of ``chain`` that are not in shards."""
    if len(chain) == 1:
        return tensorfile.read(chain[0].checked(TENSORS))
    with damage_of(chain):
        found = replayed([tensorfile.mapped(link.checked(TENSORS)) for link in chain])
    return {name: a if a.flags.writeable else a.copy() for name, a in found.items()}


def check_marked(at: Sequence[int] | None, base: Version | None, what: str = "") -> None:
    """Raises InputError unless deltas that were marked ``at`` a step and CRC rest on ``base``; None is no deltas."""
    if at is not None and base is None:
        raise InputError(f"{what}a delta on step {at[0]} is among the tensors; pass the base that it was marked at")
    if at is not None and base is not None and tuple(at) != (base.step, base.crc32c):
        marked = Version(*at)
        raise InputError(f"{what}a delta that was marked at {marked} cannot rest on {base}; pass that as the base")


def as_arrays(tensors: Mapping[str, Any]) -> Arrays:
    """Name -> array in C order. Raises InputError where one cannot be stored."""
    return {_check_name(n): _as_array(n, t) for n, t in tensors.items()}


def check_step(step: int) -> int:
    """``step`` as an int. Raises InputError where it is none that a checkpoint can have."""
    return _whole_number("step", step, 0, manifests.MAX_STEP)


def check_keep(keep: int | None) -> int | None:
    """``keep`` as an int. Raises InputError where it is below 1."""
    return None if keep is None else _whole_number("keep", keep, 1, manifests.MAX_STEP)


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or name == RESERVED:
        raise InputError(f"tensor name {name!r}; it must be a string other than {RESERVED!r}: rename it")
    try:
        name.encode()
    except UnicodeEncodeError as e:
        raise InputError(f"tensor name {name!r} is not Unicode text: {e.reason}; rename it") from e
    return name


def _as_array(name: str, tensor: Any) -> npt.NDArray[Any]:
    """The values as an array in C order and the machine's byte order, copied only where they are not so already."""
    if hasattr(tensor, "detach"):
        # A torch tensor; torch itself need not be imported for that.
        try:
            tensor = tensor.numpy(force=True)
        except (TypeError, RuntimeError) as e:
            raise InputError(f"tensor {name!r} is not one of {', '.join(DTYPES)}: {e}; cast it first") from e
    if not isinstance(tensor, np.ndarray | np.generic):
        raise InputError(f"tensor {name!r} is a {type(tensor).__name__}; pass a NumPy array or a torch tensor")
    if tensor.dtype.name not in DTYPES:
        raise InputError(f"tensor {name!r} is {tensor.dtype}, not one of {', '.join(DTYPES)}; cast it first")
    return np.asarray(tensor, tensor.dtype.newbyteorder("="), order="C")


def _whole_number(name: str, value: int, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise InputError(f"{name} is {value!r}; it must be an integer from {low} to {high}")
    return number


def _not_found(path: Path, writer: str) -> CheckpointNotFound:
    if not path.is_dir():
        what = "it is a file" if path.exists() else "there is no such folder"
    else:
        what = "it holds no step-* folder" if any(path.iterdir()) else "it is empty"
    return CheckpointNotFound(f"no checkpoint in {path}: {what}; write one with `{writer}`, or check the path")
