"""Hash: an integer, string or bytes -> 64 bits, or a bucket, by the named hash ``thinrow_mix64_v1``.

5 and "5" differ; 5 as int8 and 5 as int64 do not. The definition is in ``kernels.reference.features``. Several seeds
on one column make a ``MultiHash``. With seed 0 and no buckets: 5 -> -5233069316186871543, "5" -> -8733482803633890400.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.features.node import Elementwise, Formula, as_bucket_count, as_seed, integers
from thinrow.kernels import kernel
from thinrow.kernels.chain import INT, Op, Step, hash_start, remainder


@dataclass(frozen=True)
class Hash(Elementwise):
    """int64: the hash read as signed, or, with ``buckets``, the unsigned hash modulo ``buckets``."""

    buckets: int | None = None
    seed: int = 0
    op: ClassVar[str] = "hash"

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", as_bucket_count("hash", "buckets", self.buckets))
        object.__setattr__(self, "seed", as_seed("hash", self.seed))

    def formula(self, dtype: np.dtype[Any]) -> Formula:
        integers(dtype, "hash", "bucketize floats first")
        return Formula((hash_steps(self.seed, self.buckets),), np.dtype(np.int64))

    def texts(self, entries: pa.Array) -> npt.NDArray[Any]:
        return hash_texts(entries, self.seed, self.buckets)


def hash_steps(seed: int, buckets: int | None) -> tuple[Step, ...]:
    """The hash of an integer, or its bucket."""
    hashed = Step(Op.HASH, (hash_start(seed, INT),))
    return (hashed,) if buckets is None else (hashed, remainder(buckets))


def hash_texts(entries: pa.Array, seed: int, buckets: int | None) -> npt.NDArray[np.int64]:
    """(n,) hashes of strings or bytes, or their buckets."""
    hashed = kernel("hash_bytes")(*byte_runs(entries), seed)
    return np.asarray(hashed if buckets is None else kernel("mod_unsigned")(hashed, buckets))


def byte_runs(entries: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """(n + 1,) offsets and the bytes of a string or binary array, without a copy of the bytes."""
    if len(entries) == 0:
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    wide = pa.types.is_large_string(entries.type) or pa.types.is_large_binary(entries.type)
    _, offsets, data = entries.buffers()
    bounds = np.frombuffer(offsets, np.int64 if wide else np.int32)[entries.offset : entries.offset + len(entries) + 1]
    flat = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return bounds.astype(np.int64), flat
