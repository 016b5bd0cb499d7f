"""The learner of the main job: at the cut it trains both models at every length, then it ranks what comes, and in the
end it scores what was held out and holds what it read online against what training rebuilds.

Everything runs through what a user has: the loader over the table, ``thinrow.training``, checkpoints, ``Ranker`` on a
snapshot, an impression log, the outcome join, and ``thinrow.serving.compare``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import load
from thinrow.cli.demo.cells import Cell, Place, score_cell, single_columns, train_cell, use_one_thread
from thinrow.cli.demo.job import Run
from thinrow.cli.demo.quality import tabulate
from thinrow.cli.demo.rebuild import LENGTHS, length_name
from thinrow.core.errors import InputError
from thinrow.core.users import distinct
from thinrow.dpp import RowFilter
from thinrow.examples import ExampleTable, OutcomeLog, Outcomes, join_logs
from thinrow.examples.outcomes import last_window_ms
from thinrow.examples.records import take_rows
from thinrow.history.snapshot import Snapshot
from thinrow.recipes.registry import RECIPES
from thinrow.serving import Ranker, compare

MODELS = ("hstu", "dlrm")
SEEDS = 3
#: What the ranker returns and logs of a request.
TOP = 10
#: Requests that a run trains on, about, where there are more.
MAX_REQUESTS = 16_500
#: With fewer users than this a share of them may be anything; then the newest requests are taken.
_MIN_USERS = 200
#: Where the squares of all histories add up to more than this, whole histories are left out.
_MAX_PAIRS = 1e11
_WORKERS = 2


class DemoLearner:
    """Implements ``job.Learner``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._place = Place(run.store.path, run.config.out / "examples")
        self._held_out = RowFilter(since_ms=run.data.cut_ms)
        lengths = _lengths(run)
        seeds = range(1 if run.is_warm_up else SEEDS)
        self._cells = [_cell(run, model, n, seed) for seed in seeds for n in lengths for model in MODELS]
        # The longest take longest: first come, so that none is left alone at the end.
        self._cells.reverse()
        self._workers = _Inline() if run.is_warm_up else _processes()
        self._trained = self._each("training rankers", train_cell)
        served = next(c for c in self._cells if (c.model, c.history) == ("hstu", length_name(lengths[-1])))
        self._serving = _Serving(run, served)

    @property
    def version(self) -> str:
        """Model and step of the checkpoint that serves."""
        return self._serving.ranker.model_version

    def on_requests(self, rows: npt.NDArray[np.int64], taken: Snapshot) -> None:
        """Rank the requests with the HSTU ranker of the longest histories, and log lists and outcomes."""
        self._serving.rank(rows, taken)

    def report(self) -> dict[str, Any]:
        """Quality of every cell, the best single column, and whether online and offline agree."""
        with self._run.stages.stage("online_offline"):
            served = self._serving.report()
        report = {
            "online_offline_differences": served["input_differences"] + served["score_differences"],
            "serving": served,
        }
        with self._run.stages.stage("evaluate"), self._workers:
            try:
                scored = self._each("scoring what was held out", score_cell, self._held_out)
                config = self._serving.cell.config
                single = self._workers.submit(single_columns, self._place, config, self._held_out).result()
            except InputError as e:
                # A tiny history may hold out nothing, or nothing but one label.
                return report | {"quality": [], "training": [], "without_quality": str(e)}
        return report | tabulate(self._cells, self._trained, scored) | {"single_column": single}

    def _each(self, title: str, work: Callable[..., dict[str, Any]], *more: Any) -> list[dict[str, Any]]:
        """``work(place, cell, *more)`` of every cell, in the order of the cells."""
        with self._run.stages.bar(f"{title} ({len(self._cells)} runs)", len(self._cells)) as advance:
            waiting = [self._workers.submit(work, self._place, cell, *more) for cell in self._cells]
            for done in as_completed(waiting):
                done.result()
                advance()
        return [future.result() for future in waiting]


class _Serving:
    """A ranker on the store, its logs, and the comparison at the end."""

    def __init__(self, run: Run, cell: Cell) -> None:
        self._run, self.cell = run, cell
        self._checkpoint = load(cell.out)
        self._followed = OutcomeLog(run.config.out / "served_outcomes")
        shown = run.config.out / "served_impressions"
        self.ranker = Ranker(run.store, self._checkpoint, log=shown, arm=cell.model)
        self._ranked = self._outcomes = self._outcomes_in_top = 0
        self._expected_at_random = 0.0

    def rank(self, rows: npt.NDArray[np.int64], taken: Snapshot) -> None:
        data, fields = self._run.data, self.ranker.request_schema
        requests = data.requests
        ranked = self.ranker.rank(
            requests.request_id[rows],
            taken.requests.users,
            taken.requests.request_ts,
            candidates=take_rows({f.name: requests.candidates[f.name] for f in fields.candidates}, rows),
            context={f.name: requests.context[f.name].take(rows) for f in fields.context},
            k=TOP,
            seen=taken,
        )
        labels = requests.labels[data.outcome].take(rows)
        of_request = np.repeat(np.arange(len(rows)), ranked.position.lengths)
        hit = labels.values[labels.offsets[:-1][of_request] + ranked.position.values] > 0
        followed = ranked.request_id[of_request[hit]], ranked.candidates[data.item].values[hit]
        self._followed.append(Outcomes.of(data.outcome, *followed, taken.requests.request_ts[of_request[hit]]))
        self._ranked += len(rows)
        row_of = np.repeat(np.arange(len(rows)), labels.lengths)
        followed_of = np.bincount(row_of[labels.values > 0], minlength=len(rows))
        self._expected_at_random += float((followed_of * np.minimum(TOP / np.maximum(labels.lengths, 1), 1)).sum())
        self._outcomes += int((labels.values > 0).sum())
        self._outcomes_in_top += int(hit.sum())

    def report(self) -> dict[str, Any]:
        """The lists as examples: rebuilt, and held against what was read when they were made."""
        run, out = self._run, self._run.config.out
        with ExampleTable.create(
            out / "served",
            event_schema=run.data.event_schema,
            example_schema=self.ranker.schema,
            n_buckets=run.config.n_buckets,
        ) as table:
            closed_ms = int(run.data.arrival_ts[-1]) + last_window_ms(self.ranker.schema)
            assert self.ranker.log is not None
            join_logs(self.ranker.log, self._followed, table, closed_ms)
            parity = compare(self._checkpoint, run.store, table)
        return asdict(parity) | {
            "model_version": self.ranker.model_version,
            "history": self.cell.history,
            "ranked": self._ranked,
            "top": TOP,
            "outcomes": self._outcomes,
            "outcomes_in_top": self._outcomes_in_top,
            "random_share": self._expected_at_random / max(self._outcomes, 1),
        }


def _cell(run: Run, model: str, length: int | None, seed: int) -> Cell:
    config = RECIPES[f"{model}_{'git' if run.config.git is not None else 'retail'}_small"]()
    # A window that starts on a grid lets requests near each other share a pass.
    config = config.with_history(length, align=1 if length is None else max(length // 2, 1))
    config = replace(config, seed=seed, rows=_training_rows(run, seed))
    name = length_name(length)
    return Cell(model, name, config, run.config.out / "models" / f"{model}-{name}-{seed}")


def _lengths(run: Run) -> tuple[int | None, ...]:
    """All of ``LENGTHS``, but whole histories where passes over them would take hours."""
    lengths = run.source.lengths.astype(np.float64)
    return LENGTHS if float((lengths**2).sum()) <= _MAX_PAIRS else tuple(n for n in LENGTHS if n is not None)


def _training_rows(run: Run, seed: int) -> RowFilter:
    """Requests before the cut: all of them, or about ``MAX_REQUESTS``, of a share of the users or the newest."""
    data = run.data
    times = np.sort(data.requests.request_ts[~data.held_out])
    if len(times) <= 1.2 * MAX_REQUESTS:
        return RowFilter(until_ms=data.cut_ms)
    if len(distinct(data.requests.users)[0]) >= _MIN_USERS:
        return RowFilter(until_ms=data.cut_ms, user_share=MAX_REQUESTS / len(times), user_seed=seed)
    return RowFilter(since_ms=int(times[-MAX_REQUESTS]), until_ms=data.cut_ms)


class _Inline:
    """An executor of this thread, for the warm-up: processes of their own would take longer to start than to work."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _processes() -> ProcessPoolExecutor:
    # Spawned: a forked child would inherit the locks of threads that it does not have.
    return ProcessPoolExecutor(min(_WORKERS, os.cpu_count() or 1), multiprocessing.get_context("spawn"), use_one_thread)
