"""The files of shards in a checkpoint, read: which of them hold keys of a range, and the rows of that range.

Of a checkpoint of four shards, shard 0 of three, the first third of the mixed keys, has all of shard 0 and the first
third of shard 1; the files of shards 2 and 3 are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from thinrow.checkpoints import tensorfile
from thinrow.checkpoints.manifest import REMEDY, Manifest
from thinrow.core.errors import CorruptionError, InputError
from thinrow.core.routing import Routing
from thinrow.embeddings.states import join, pick, prefixed, replayed, tables_of

Arrays = dict[str, npt.NDArray[Any]]

_EVERYTHING = Routing.even(1)


def file_of(shard: int, n_shards: int) -> str:
    """The name of a shard's file."""
    return f"shard-{shard:05d}-of-{n_shards:05d}.safetensors"


def tables_of_shards(chain: Sequence[Manifest], shard: int = 0, routing: Routing = _EVERYTHING) -> Arrays:
    """Writable tensors of the tables in the last of ``chain``: the rows that are in ``shard`` of ``routing``.

    Rows are in the order of the shards that they come from, and there in their own.
    """
    source = chain[-1].routing
    assert source is not None, "a checkpoint without shards"
    first, end = routing.bounds(shard)
    parts: dict[str, list[Arrays]] = {}
    with damage_of(chain):
        for number in range(len(source)):
            start, stop = source.bounds(number)
            if stop <= first or end <= start:
                continue
            for prefix, state in tables_of(_of_shard(chain, number, len(source))).items():
                inside = first <= start and stop <= end
                state = state if inside else pick(state, routing.shards(state["keys"]) == shard)
                parts.setdefault(prefix, []).append(state)
        joined = [prefixed(prefix, join(states)) for prefix, states in parts.items()]
    return {n: a if a.flags.writeable else a.copy() for tensors in joined for n, a in tensors.items()}


@contextmanager
def damage_of(chain: Sequence[Manifest]) -> Iterator[None]:
    """What tables that are none raise, as a CorruptionError."""
    try:
        yield
    except (InputError, LookupError, ValueError, TypeError, AttributeError) as e:
        what = str(e) if isinstance(e, InputError) else f"its tables are not states: {e!r}"
        raise CorruptionError(what, file=str(chain[-1].path), remedy=REMEDY) from e


def _of_shard(chain: Sequence[Manifest], shard: int, n_shards: int) -> Arrays:
    return replayed([tensorfile.mapped(link.checked(file_of(shard, n_shards))) for link in chain])
