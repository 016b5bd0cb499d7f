"""Scoring n candidates of one request in one pass against scoring them one by one.

The HSTU ranker of ``shared`` scores a request that sees a history of 2,048 events, without gradients, features of the
request included. Units are requests per second; ``figures`` have the time of a request for 1 to 1,000 candidates.

- ``one_pass``: all candidates in one forward pass.
- ``one_by_one``: a pass for each candidate, the same model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from bench.cases.shared import batch, ranker
from bench.harness import Options, Result, Work, rates
from thinrow.features.featurize import featurize
from thinrow.jagged import Column, Jagged, SharedHistories
from thinrow.models import RankerInputs

Scores = Callable[[SharedHistories, npt.NDArray[np.int64], Jagged], torch.Tensor]


def run(options: Options) -> Result:
    """1, 10, 100 and 1,000 candidates; with ``quick`` 64 events and up to 10 candidates."""
    length, counts = (64, (1, 10)) if options.quick else (2_048, (1, 10, 100, 1_000))
    rounds = options.rounds or (1 if options.quick else 3)
    spec = ranker()
    module, _ = spec.build()
    module.eval()
    threads = torch.get_num_threads()
    parameters = {"history": length, "model": repr(spec.model), "rounds": rounds, "threads": threads}
    result = Result("candidates", {**parameters, "torch": torch.__version__})

    def scores(histories: SharedHistories, request_ts: npt.NDArray[np.int64], shown: Jagged) -> torch.Tensor:
        read = featurize(spec.plan, histories, {}, {"item": shown}, request_ts)
        with torch.no_grad():
            logits: torch.Tensor = module(RankerInputs(spec.inputs, *read, request_ts))
        return logits

    for n in counts:
        histories, request_ts, shown = batch(np.random.default_rng(0), "late", 1, 1, length, n)
        each = [Jagged(Column(np.asarray(shown.values)[i : i + 1]), np.array([0, 1])) for i in range(n)]
        one_by_one = torch.cat([scores(histories, request_ts, one) for one in each])
        torch.testing.assert_close(scores(histories, request_ts, shown), one_by_one, rtol=1e-4, atol=1e-5)

        lists = {"one_pass": [shown], "one_by_one": each}
        works = {name: _request(scores, histories, request_ts, asked) for name, asked in lists.items()}
        seen = rates(works, rounds)
        result.figures[f"{n}"] = {f"{name}_ms": round(1e3 / r["median"], 2) for name, r in seen.items()}
        result.ratios[f"vs_one_by_one.{n}"] = seen["one_pass"]["median"] / seen["one_by_one"]["median"]
    return result


def _request(
    scores: Scores, histories: SharedHistories, request_ts: npt.NDArray[np.int64], lists: list[Jagged]
) -> Work:
    def work() -> int:
        for shown in lists:
            scores(histories, request_ts, shown)
        return 1

    return work
