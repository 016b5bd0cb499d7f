"""A feature plan in one pass against the same ops one by one. One figure, values of the fat rows a second: an event
that 20 requests of a user see counts 20 times for everybody.

Of each of ten columns of 64-bit ids: the newest n of every row, a hash modulo a million, a bucket among ten boundaries,
three hashes modulo a million (of three seeds). One thread.

- ``thinrow_shared``: the plan on shared histories, each event once, as ``featurize`` does it in workers and rankers; a
  window is cut by its bounds.
- ``thinrow_rows``: the same plan on a copy of the history in every row (K = 1: what fusing alone is worth).
- ``polars``: lists cut by ``list.tail``, exploded; polars' own ``hash`` with a seed, ``%``, ``search_sorted``; an op a
  call.
- ``torch``: rows cut by gathering; the same hash as ours in torch operations, ``remainder``, ``bucketize``.

``vs_<peer>.k20`` is ours shared over the peer, ``vs_<peer>.k1`` ours on rows. The first results are compared: ours and
torch's are equal bit for bit. ``vs_event_level`` is a hash of a text column by its distinct entries over one by its
rows; ``vs_unfused`` our plan over a plan an output.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Read when polars is imported.
os.environ["POLARS_MAX_THREADS"] = "1"

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from bench.harness import Options, Result, Work, rates
from thinrow.core.units import NEVER
from thinrow.core.wrap import mix64
from thinrow.features import Bucketize, FeaturePlan, Hash, MultiHash, Node, Source, Truncate, featurize
from thinrow.jagged import Column, Events, Jagged, SharedHistories
from thinrow.kernels.chain import INT

_COLUMNS, _REQUESTS, _BUCKETS, _SEEDS = 10, 20, 1_000_003, (11, 12, 13)
_BOUNDARIES = tuple(int(b) for b in np.linspace(0, 1 << 40, 12)[1:-1])
_DISTINCT = 1000

Ints = npt.NDArray[np.int64]


def run(options: Options) -> Result:
    """25 users with 20 requests each, the newest 1,024 of 2,048 events; with ``quick`` 3 users and 64 of 128."""
    users, events, newest, rounds = (3, 128, 64, 1) if options.quick else (25, 2048, 1024, options.rounds or 5)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    columns = {f"c{i}": rng.zipf(1.2, users * events).astype(np.int64) * 7919 % (1 << 40) for i in range(_COLUMNS)}
    stop = np.repeat(np.arange(users) * events, _REQUESTS) + np.tile(
        np.linspace(events * 3 // 4, events, _REQUESTS).astype(np.int64), users
    )
    start = np.repeat(np.arange(users) * events, _REQUESTS)
    offsets = np.concatenate([[0], np.cumsum(stop - start)])
    fat = {n: np.concatenate([v[a:b] for a, b in zip(start, stop, strict=True)]) for n, v in columns.items()}
    units = len(stop) * newest * _COLUMNS
    shared = _Shared(columns, users, events, np.maximum(start, stop - newest), stop)
    works: dict[str, Work] = {
        "thinrow_shared": lambda: _count(shared(), units),
        "thinrow_rows": _rows(fat, offsets, newest, units, apart=False),
        "thinrow_unfused": _rows(fat, offsets, newest, units, apart=True),
        "torch": lambda: _count(_torch(fat, offsets, newest), units),
    }
    parameters = {
        "columns": _COLUMNS, "users": users, "events": events, "newest": newest, "requests_a_user": _REQUESTS,
        "values": units, "threads": 1, "rounds": rounds, "torch": torch.__version__,
    }  # fmt: skip
    result = Result("features", parameters)
    try:
        import polars

        works["polars"] = _polars(fat, offsets, newest, units)
        parameters["polars"] = polars.__version__
    except ImportError as e:
        result.skip("polars", str(e))
    _compare(shared.histories, shared(), _torch(fat, offsets, newest))
    works |= _texts(rng, 2_000 if options.quick else 1_000_000)
    seen = rates(works, rounds)
    result.figures |= {n: {m: round(v) for m, v in r.items()} for n, r in seen.items()}
    for peer in ("polars", "torch"):
        for k, ours in (("k20", "thinrow_shared"), ("k1", "thinrow_rows")):
            if peer in seen:
                result.ratios[f"vs_{peer}.{k}"] = seen[ours]["median"] / seen[peer]["median"]
    result.ratios["vs_unfused"] = seen["thinrow_rows"]["median"] / seen["thinrow_unfused"]["median"]
    result.ratios["vs_event_level"] = seen["dictionary_level"]["median"] / seen["event_level"]["median"]
    return result


def _count(done: object, units: int) -> int:
    assert done
    return units


def _plan(prefix: str, newest: int | None) -> FeaturePlan:
    outputs: dict[str, Node] = {}
    for i in range(_COLUMNS):
        source = Source(f"{prefix}.c{i}")
        cut = source if newest is None else Truncate(source, newest)
        outputs[f"h{i}"] = Hash(cut, _BUCKETS)
        outputs[f"b{i}"] = Bucketize(cut, _BOUNDARIES)
        outputs[f"m{i}"] = MultiHash(cut, _BUCKETS, _SEEDS)
    return FeaturePlan(outputs)


class _Shared:
    """The plan on shared histories."""

    def __init__(self, columns: Mapping[str, Ints], users: int, events: int, start: Ints, stop: Ints) -> None:
        # A projection reads what the windows of a user cover together, no more.
        skipped, user = int(start.min()), np.repeat(np.arange(users), _REQUESTS)
        kept = events - skipped
        index = (np.arange(users)[:, None] * events + np.arange(skipped, events)).reshape(-1)
        n, x = users * kept, len(stop)
        held = Events(
            np.arange(users),
            np.arange(users + 1) * kept,
            np.arange(n),
            np.arange(n),
            np.full(n, NEVER),
            {name: Column(v[index]) for name, v in columns.items()},
        )
        before = (user + 1) * skipped
        self.histories = SharedHistories(held, user, start - before, stop - before, np.full(x, n), np.ones(x, np.bool_))
        self._plan, self._times = _plan("history", None), np.zeros(x, np.int64)

    def __call__(self) -> Mapping[str, Column]:
        return featurize(self._plan, self.histories, {}, {}, self._times)[0].events.columns


def _rows(fat: Mapping[str, Ints], offsets: Ints, newest: int, units: int, *, apart: bool) -> Work:
    whole = _plan("cand", newest)
    # A plan an output is what happens without fusing: nothing is shared, each column is cut and read again.
    plans = [FeaturePlan({name: node}) for name, node in whole.outputs.items()] if apart else [whole]
    sources = {f"cand.{name}": Jagged(Column(v), offsets) for name, v in fat.items()}
    return lambda: _count([plan.apply(sources) for plan in plans], units)


def _torch(fat: Mapping[str, Ints], offsets: Ints, newest: int) -> dict[str, torch.Tensor]:
    ends = torch.from_numpy(offsets[1:])
    index = (ends[:, None] - newest + torch.arange(newest)).reshape(-1)
    boundaries = torch.tensor(_BOUNDARIES)
    out = {}
    for i in range(_COLUMNS):
        values = torch.from_numpy(fat[f"c{i}"])[index]
        out[f"h{i}"] = _torch_hash(values, 0)
        out[f"b{i}"] = torch.bucketize(values, boundaries, out_int32=True, right=True)
        out[f"m{i}"] = torch.stack([_torch_hash(values, seed) for seed in _SEEDS], 1)
    return out


def _torch_hash(values: torch.Tensor, seed: int) -> torch.Tensor:
    """The hash as one writes it in torch, in place where that is faster."""
    x = values ^ int(np.uint64(mix64((seed + INT) & (1 << 64) - 1)).view(np.int64))
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= (x >> bits) & ((1 << (64 - bits)) - 1)
        x *= int(np.uint64(factor).view(np.int64))
    x ^= (x >> 31) & ((1 << 33) - 1)
    # The unsigned remainder: of a negative word, that of the word less 2^64, plus that of 2^64.
    rest = torch.remainder(x, _BUCKETS)
    return torch.where(x < 0, torch.remainder(rest + (1 << 64) % _BUCKETS, _BUCKETS), rest)


def _polars(fat: Mapping[str, Ints], offsets: Ints, newest: int, units: int) -> Work:
    import polars as pl

    lists = pl.DataFrame(
        {n: pl.from_arrow(pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(v))) for n, v in fat.items()}
    )
    boundaries = pl.Series(_BOUNDARIES)

    def work() -> int:
        out = {}
        for i in range(_COLUMNS):
            values = lists[f"c{i}"].list.tail(newest).explode()
            out[f"h{i}"] = values.hash(0) % _BUCKETS
            out[f"b{i}"] = boundaries.search_sorted(values, side="right")
            for seed in _SEEDS:
                out[f"m{i}_{seed}"] = values.hash(seed) % _BUCKETS
        return _count(out, units)

    return work


def _texts(rng: np.random.Generator, n: int) -> dict[str, Work]:
    entries = pa.array([f"category {i} of many" for i in range(_DISTINCT)])
    codes = rng.integers(0, _DISTINCT, n).astype(np.int32)
    by_entry = Column(codes, None, entries)
    by_row = Column(np.arange(n, dtype=np.int32), None, entries.take(pa.array(codes)))
    plan = FeaturePlan({"h": Hash(Source("history.text"), _BUCKETS)})
    first, second = (plan.apply({"history.text": c})["h"].values for c in (by_entry, by_row))
    assert np.array_equal(first, second)
    return {
        "dictionary_level": lambda: _count(plan.apply({"history.text": by_entry}), n),
        "event_level": lambda: _count(plan.apply({"history.text": by_row}), n),
    }


def _compare(histories: SharedHistories, ours: Mapping[str, Column], peer: Mapping[str, torch.Tensor]) -> None:
    index, _ = histories.positions()
    for name, values in peer.items():
        if not np.array_equal(ours[name].values[index], values.numpy()):
            raise SystemExit(f"features: {name} of thinrow and of torch differ")
