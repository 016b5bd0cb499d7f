"""A training step of the HSTU ranker (forward, backward, update) with shared passes against one row a request.

Users have a history each and K requests spread over it, with 32 candidates a request; both contestants read the same
batch, run the same model and give the same gradients. Units are requests per second; beside them, what memory grows by
at most in a step of each (Linux).

What there is to gain hangs on where the requests are. Spread evenly over a history of L events, 20 rows have
20 L / 2 events and 20 L^2 / 6 pairs, one pass L and L^2 / 2: 10 times the events, 6.7 times the pairs, and the
candidates, which cost alike, on top. Requests that all come late have 20 times of both.

- ``shared``: requests of a user that start at one event run in one pass (``thinrow.jagged.passes``).
- ``separate``: every request has a pass of its own, through the same kernels.

Shapes: ``uniform``, requests anywhere in the history; ``late``, in its last tenth; ``window``, as uniform but reading
the newest quarter from a grid of an eighth, so that only requests near each other share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.harness import Options, Result, Work, peak_bytes, rates
from thinrow.core.ragged import offsets_of
from thinrow.core.units import DAY_MS, HOUR_MS
from thinrow.embeddings import SparseAdagrad
from thinrow.features import FeaturePlan, Hash, Source
from thinrow.features.featurize import featurize
from thinrow.jagged import Column, Events, Jagged, SharedHistories
from thinrow.jagged.events import never_hidden
from thinrow.models import HSTUConfig, RankerInputs, RankerSpec
from thinrow.schema import Projection

_CANDIDATES, _ITEMS = 32, 5_000


def run(options: Options) -> Result:
    """2,048 and 512 events a user, 20 requests each; with ``quick`` 64 events and 4 requests."""
    lengths, users, k, rounds = ((64,), 2, 4, 1) if options.quick else ((512, 2_048), 4, 20, 5)
    spec = ranker()
    parameters: dict[str, Any] = {"users": users, "requests_a_user": k, "candidates": _CANDIDATES}
    parameters |= {"model": repr(spec.model)}
    parameters |= {"rounds": rounds, "threads": torch.get_num_threads(), "torch": torch.__version__}
    result = Result("shared", parameters)
    for length in lengths:
        for shape in ("uniform", "late", "window"):
            rng = np.random.default_rng(0)
            drawn = batch(rng, shape, users, k, length, _CANDIDATES)
            works = {n: _step(spec, n == "shared", *drawn) for n in _NAMES}
            grown = {n: peak_bytes(work) for n, work in works.items()}
            seen = rates(works, rounds)
            name = f"{shape}_{length}"
            result.figures[name] = {n: {m: round(v, 1) for m, v in r.items()} for n, r in seen.items()}
            result.figures[name]["peak_bytes"] = grown
            result.ratios[f"vs_separate_passes.{name}"] = seen["shared"]["median"] / seen["separate"]["median"]
            result.ratios[f"vs_separate_passes_bytes.{name}"] = grown["shared"] / max(grown["separate"], 1)
    return result


_NAMES = ("shared", "separate")


def ranker() -> RankerSpec:
    """HSTU of two layers, width 32, over hashed items."""
    plan = FeaturePlan({"e": Hash(Source("history.item"), seed=1), "c": Hash(Source("cand.item"), seed=1)})
    model = HSTUConfig(width=32, layers=2)
    return RankerSpec(model=model, plan=plan, projection=Projection(), label="click", dim=16)


def batch(
    rng: np.random.Generator, shape: str, users: int, k: int, length: int, candidates: int
) -> tuple[SharedHistories, npt.NDArray[np.int64], Jagged]:
    """Histories of ``length`` events, k requests a user placed by ``shape``, their times and their candidates."""
    n = users * length
    offsets = offsets_of(np.full(users, length))
    times = np.tile(np.arange(length) * HOUR_MS, users) + 1_000 * DAY_MS
    item = Column(rng.integers(0, _ITEMS, n))
    arrival = np.tile(np.arange(1, length + 1), users)
    events = Events(np.arange(users), offsets, times, arrival, never_hidden(n), {"item": item})
    user_of = np.repeat(np.arange(users), k)
    seen = rng.integers(length * 9 // 10 if shape == "late" else 1, length + 1, users * k)
    start = np.zeros(users * k, np.int64)
    if shape == "window":
        newest, grid = length // 4, length // 8
        start = np.maximum(-(-(seen - newest) // grid) * grid, 0)
    base = offsets[:-1][user_of]
    exact = np.ones(users * k, np.bool_)
    histories = SharedHistories(events, user_of, base + start, base + seen, seen, exact)
    n_shown = users * k * candidates
    shown = Jagged(Column(rng.integers(0, _ITEMS, n_shown)), offsets_of(np.full(users * k, candidates)))
    return histories, times[base + seen - 1] + 1, shown


def _step(
    spec: RankerSpec, share: bool, histories: SharedHistories, request_ts: npt.NDArray[np.int64], shown: Jagged
) -> Work:
    module, table = spec.build()
    dense, sparse = torch.optim.Adam(module.parameters(), lr=1e-3), SparseAdagrad(table, lr=0.1)
    labels = torch.from_numpy((shown.values % 7 == 0).astype(np.float32))

    def work() -> int:
        read = featurize(spec.plan, histories, {}, {"item": shown}, request_ts)
        logits = module(RankerInputs(spec.inputs, *read, request_ts, share=share))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        dense.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        dense.step()
        sparse.step()
        return len(histories)

    return work
