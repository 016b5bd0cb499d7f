"""Exports: the vectors of tables alone, as servers map them: in the order of the mixed key, in one of three types.

Worked example, and what reads it (``ServingTable``)::

    export("served", 200, {"table.": table.state()}, routing=Routing.even(4), dtype="float16")
    base = version_of("served/step-00000200")
    changes.mark(base)                                            # changes = table.track()
    ...                                                           # training goes on
    export("served", 210, {"table.": table.delta(changes, row_states=False)}, routing=..., dtype="float16", base=base)

An export is a checkpoint whose shards hold sorted vectors, in a folder of its own: it is there whole or not at all,
deltas rest on what is before them, and any number of ranks may write it (docs/format/export-v1.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints.checkpoint import check_step
from thinrow.checkpoints.manifest import TENSORS, Manifest, Version, check_base
from thinrow.checkpoints.shardfile import file_of
from thinrow.checkpoints.shards import check_shard, commit, staging_of, write_shard
from thinrow.checkpoints.tensorfile import mapped, read
from thinrow.core.errors import InputError
from thinrow.core.routing import Routing
from thinrow.core.wrap import mix64_words
from thinrow.embeddings.states import BASE, DELTA, State, is_delta, marked_at

FORMAT = 1
#: The command that makes an export of a checkpoint.
WRITER = "thinrow release"
DTYPES = ("float32", "float16", "int8")
#: Words of a bucket of the index, about.
_BUCKET_WORDS = 8
_MOST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
_WHOLE = Routing.even(1)


def export(
    folder: str | Path,
    step: int,
    tables: Mapping[str, State],
    *,
    routing: Routing = _WHOLE,
    dtype: str = "float32",
    default: Mapping[str, npt.NDArray[Any]] | None = None,
    keep: int | None = None,
    base: Version | None = None,
    tensors: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write the vectors of ``tables`` as ``folder/step-<step>``, durably, from one process.

    Args:
        folder: of exports alone.
        step: as for ``save``.
        tables: prefix -> ``table.state()`` or, with ``base``, ``table.delta(...)``; ``row_states=False`` will do. A
            state with ``base`` takes the place of all that was exported of the table before.
        routing: of those who serve.
        dtype: of the vectors: ``float32``, ``float16``, or ``int8`` with a float32 scale a row, the row's largest
            magnitude over 127.
        default: prefix -> finite vector (dim,) of keys that are not there; of tables that it leaves out, that of
            ``base``, or zeros.
        keep, base: as for ``save``.
        tensors, meta: as for ``commit_export``.

    Raises:
        InputError: an argument that cannot be used; a vector that is not finite, or beyond float16 (names the key).
        StoreError: the medium refuses; earlier exports are as they were.
    """
    _check_states(tables)
    for shard in range(len(routing)):
        mine = {p: _of_shard(state, shard, routing) for p, state in tables.items()} if len(routing) > 1 else tables
        export_shard(folder, step, shard, routing, mine, dtype=dtype)
    return commit_export(folder, step, routing, default=default, keep=keep, base=base, tensors=tensors, meta=meta)


def export_shard(
    folder: str | Path,
    step: int,
    shard: int,
    routing: Routing,
    tables: Mapping[str, State],
    *,
    dtype: str = "float32",
) -> None:
    """Write the vectors of one shard for ``commit_export``, on every rank, as ``save_shard`` does.

    Raises:
        As ``export``; InputError also where a key is of another shard.
    """
    folder, step = Path(folder), check_step(step)
    check_shard(shard, routing)
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r}; it must be one of {', '.join(DTYPES)}")
    _check_states(tables)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for prefix, state in tables.items():
        arrays |= {prefix + name: array for name, array in _sorted(state, shard, routing, dtype).items()}
    write_shard(folder, step, shard, routing, arrays, marked_at(tables))


def commit_export(
    folder: str | Path,
    step: int,
    routing: Routing,
    *,
    default: Mapping[str, npt.NDArray[Any]] | None = None,
    keep: int | None = None,
    base: Version | None = None,
    tensors: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Make the shards of ``step`` an export; on one rank, when ``export_shard`` has returned on all.

    Args:
        tensors, meta: what goes with these vectors, such as the weights that were trained beside them; servers of
            embeddings do not read it. No name may end in ``default``.

    Returns:
        Its path.

    Raises:
        As ``commit``.
    """
    folder, step = Path(folder), check_step(step)
    file = staging_of(folder, step) / file_of(0, len(routing))
    # Where it was not exported, commit says so.
    values = {n: a for n, a in (mapped(file) if file.is_file() else {}).items() if n.endswith("values")}
    dims = {name.removesuffix("values"): array.shape[1] for name, array in values.items()}
    vectors = {} if base is None else _defaults_of(check_base(folder, base, step, routing), dims)
    for prefix, vector in (default or {}).items() if dims else ():
        vectors[f"{prefix}default"] = _default(prefix, vector, dims)
    for name in tensors or {}:
        if name.endswith("default"):
            raise InputError(f"tensor {name!r} beside the tables; names that end in 'default' are theirs: rename it")
    stated = {**(meta or {}), "export": FORMAT}
    return commit(folder, step, routing, tensors={**(tensors or {}), **vectors}, meta=stated, keep=keep, base=base)


def _defaults_of(base: Manifest, dims: Mapping[str, int]) -> dict[str, npt.NDArray[Any]]:
    """Those of the tables of ``dims`` that ``base`` has."""
    shapes = {f"{prefix}default": (dim,) for prefix, dim in dims.items()}
    return {name: a for name, a in read(base.checked(TENSORS)).items() if shapes.get(name) == a.shape}


def _default(prefix: str, vector: npt.NDArray[Any], dims: Mapping[str, int]) -> npt.NDArray[np.float32]:
    if prefix not in dims:
        raise InputError(f"default of table {prefix!r}, but there are only {sorted(dims)}; pass the prefix of one")
    with np.errstate(over="ignore"):
        out = np.asarray(vector, np.float32)
    if out.shape != (dims[prefix],) or not np.isfinite(out).all():
        raise InputError(f"default of table {prefix!r} is {out.shape} {out}; it must be {dims[prefix]} finite float32")
    return out


def index_of(words: npt.NDArray[np.uint64], low: int, end: int) -> npt.NDArray[np.int64]:
    """(m + 1,) int64: where the words of each bucket begin, and where the last ends (``kernels.reference.exported``).

    ``words`` are ascending and in ``[low, end)``.
    """
    bits = max(1, (len(words) // _BUCKET_WORDS).bit_length())
    shift = max(0, (end - low - 1).bit_length() - bits)
    buckets = (words - np.uint64(low)) >> np.uint64(shift)
    return np.searchsorted(buckets, np.arange(((end - low - 1) >> shift) + 2, dtype=np.uint64)).astype(np.int64)


def shift_of(n_buckets: int, low: int, end: int) -> int:
    """The shift that an index of ``n_buckets`` was made with."""
    return next((shift for shift in range(64) if (end - low - 1) >> shift < n_buckets), 63)


def _check_states(tables: Mapping[str, State]) -> None:
    for prefix, state in tables.items():
        if not {"keys", "values"} <= set(state):
            found = ", ".join(sorted(state)) or "nothing"
            raise InputError(f"table {prefix!r} has {found}; pass DynamicTable.state() or delta()")


def _of_shard(state: State, shard: int, routing: Routing) -> dict[str, npt.NDArray[Any]]:
    """Of a state or delta, what an export has of it, for keys of one shard."""
    mine = routing.shards(state["keys"]) == shard
    out = {"keys": state["keys"][mine], "values": state["values"][mine]}
    if is_delta(state):
        gone = state[DELTA + "gone"]
        out |= {name: state[name] for name in (DELTA + "rows", BASE) if name in state}
        out[DELTA + "gone"] = gone[routing.shards(gone) == shard]
    return out


def _sorted(state: State, shard: int, routing: Routing, dtype: str) -> dict[str, npt.NDArray[Any]]:
    low, end = routing.bounds(shard)
    words = mix64_words(state["keys"].view(np.uint64))
    order = np.argsort(words)
    words, keys = words[order], state["keys"][order]
    for at in (0, -1) if len(words) else ():
        if not low <= int(words[at]) < end:
            raise InputError(f"key {keys[at]} is not in shard {shard} of {routing}; route keys by it")
    out = {"words": words, "index": index_of(words, low, end)} | _encoded(state["values"][order], keys, dtype)
    if is_delta(state):
        out["gone"] = np.sort(mix64_words(state[DELTA + "gone"].view(np.uint64)))
    return out


def _encoded(values: npt.NDArray[Any], keys: npt.NDArray[np.int64], dtype: str) -> dict[str, npt.NDArray[Any]]:
    largest = np.abs(values).max(axis=1, initial=0)
    bound = np.finfo(np.float16 if dtype == "float16" else np.float32).max
    # NaN is not below the bound either.
    beyond = np.flatnonzero(~(largest <= bound))
    if len(beyond):
        row = beyond[0]
        raise InputError(
            f"the vector of key {keys[row]} has {largest[row]}; {dtype} holds finite values up to {bound}: look for a "
            "run that diverged, or export float32"
        )
    if dtype != "int8":
        return {"values": values.astype(dtype)}
    # Rounded up, 127 times the scale of the largest float32 would be infinite.
    scales = np.minimum((largest / 127).astype(np.float32), _MOST_SCALE)
    steps = np.divide(values, scales[:, None], out=np.zeros_like(values), where=scales[:, None] > 0)
    return {"values": np.clip(np.rint(steps), -127, 127).astype(np.int8), "scales": scales}
