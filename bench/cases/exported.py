"""Look-ups in an exported table, a million rows of 64, 200,000 zipf-distributed ids a call, one key in ten absent.

- ``float32``, ``float16``, ``int8``: a ``ServingTable`` mapped from its file, in each type; float32 vectors out.
- ``two_deltas``: the float32 one with two deltas on it, 1% of the rows each.
- ``live_table``: ``DynamicTable`` in memory, the one that was exported.
- ``searchsorted``: NumPy's binary search and ``take`` over the same mapped words and vectors.
- ``lmdb``: the same vectors in LMDB, a ``get`` a key in one transaction.

One figure: ids a second. Every contestant's vectors are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from bench.datagen.datasets import Work as Folder
from bench.harness import Options, Result, Work, rates
from thinrow.checkpoints import ServingTable, export, tensorfile, version_of
from thinrow.core.wrap import mix64_words
from thinrow.embeddings import DynamicTable

_ZIPF = 1.05
Read = Callable[[Any], Any]


def run(options: Options) -> Result:
    """With ``quick`` a fiftieth of it."""
    rows, ids, rounds = (20_000, 4_000, 1) if options.quick else (1_000_000, 200_000, options.rounds or 7)
    rng = np.random.default_rng(0)
    weights = np.cumsum(1 / (np.arange(rows + rows // 9) + 1.0) ** _ZIPF)
    shuffled = rng.permutation(rows + rows // 9)
    batches = [shuffled[np.searchsorted(weights / weights[-1], rng.random(ids))] for _ in range(4)]
    result = Result("exported", {"rows": rows, "dim": 64, "ids": ids, "zipf": _ZIPF, "rounds": rounds})
    with Folder(options.work) as work:
        reads = _contestants(work.path, rows)
        for keys in batches:
            expected = reads["live_table"](keys)
            for name, apart in (
                ("float32", 0),
                ("two_deltas", 0),
                ("searchsorted", 0),
                ("lmdb", 0),
                ("float16", 2**-9),
            ):
                assert np.allclose(reads[name](keys), expected, rtol=apart, atol=apart), name
        seen = rates({name: _work(read, batches) for name, read in reads.items()}, rounds)
    result.figures = {name: {m: round(v) for m, v in of.items()} for name, of in seen.items()}
    ours = seen["float32"]["median"]
    for peer in ("live_table", "searchsorted", "lmdb", "float16", "int8", "two_deltas"):
        result.ratios[f"vs_{peer}"] = ours / seen[peer]["median"]
    return result


def _contestants(work: Path, rows: int) -> dict[str, Read]:
    table = DynamicTable(64)
    table.rows(np.arange(rows), insert=True)
    state, reads = table.state(), {}
    for dtype in ("float32", "float16", "int8"):
        export(work / dtype, 1, {"": state}, dtype=dtype)
        reads[dtype] = _served(work / dtype)
    changes, base = table.track(), version_of(export(work / "two_deltas", 1, {"": state}))
    changes.mark(base)
    for step in (2, 3):
        changes.touched(np.random.default_rng(step).choice(rows, rows // 100, replace=False))
        delta = table.delta(changes, row_states=False)
        base = version_of(export(work / "two_deltas", step, {"": delta}, base=base))
        changes.mark(base)
    mapped = tensorfile.mapped(next((work / "float32").glob("*/shard-*")))
    return reads | {
        "two_deltas": _served(work / "two_deltas"),
        "live_table": lambda keys: table.read(table.rows(keys, insert=False)),
        "searchsorted": lambda keys: _searched(mapped["words"], mapped["values"], keys),
        "lmdb": _lmdb(work / "lmdb", state),
    }


def _served(folder: Path) -> Read:
    served = ServingTable.open(folder)
    return lambda keys: served.read(keys)[0]


def _searched(words: Any, values: Any, keys: Any) -> Any:
    mixed = mix64_words(keys.view(np.uint64))
    at = np.minimum(np.searchsorted(words, mixed), len(words) - 1)
    found = np.take(values, at, axis=0, mode="clip")
    found[words[at] != mixed] = 0
    return found


def _lmdb(folder: Path, state: dict[str, Any]) -> Read:
    environment = lmdb.open(str(folder), map_size=1 << 32, readahead=False)
    with environment.begin(write=True) as write:
        for key, vector in sorted(
            zip((k.to_bytes(8, "big") for k in state["keys"].tolist()), state["values"], strict=True),
            key=lambda p: p[0],
        ):
            write.put(key, vector.tobytes(), append=True)
    zeros = bytes(256)

    def read(keys: Any) -> Any:
        with environment.begin(buffers=True) as reading:
            parts = [reading.get(key.to_bytes(8, "big"), zeros) for key in keys.tolist()]
            return np.frombuffer(b"".join(parts), np.float32).reshape(len(keys), 64)

    return read


def _work(read: Read, batches: list[Any]) -> Work:
    def work() -> int:
        for keys in batches:
            read(keys)
        return sum(map(len, batches))

    return work
