"""A training session with two workers: rows and events a second that reach the trainer, against other ways to feed it.

A table of K = 20 requests a user with a label and three candidates, by bucket and user, over an archive; a batch is
1,024 examples with their histories. Tenants: ``long`` reads whole histories, ``short`` the newest 256 events. The
trainer does nothing but count, so that what is timed is the supply; every contestant has two workers (or two threads of
decoding), runs on over epochs, and may read ahead as it does by default.

- ``thinrow``: ``loader(engine="processes")``; ``threads`` is the same loader with threads.
- ``torch_dataloader``: ``torch.utils.data.DataLoader(num_workers=2)`` over our own reader: each worker rebuilds every
  other batch whole, by one call of the same code, and sends tensors, each user's events once.
- ``torch_rows``: the same with a map-style dataset, as such datasets are written: an example, with its history, by its
  number; 1,024 shuffled ones are collated into flat tensors and offsets.
- ``ray_data``: ``ray.data.range(...).map_batches(...)`` with two actors that rebuild by the same code and return rows
  of lists, the form that Ray Data has; ``iter_batches``. It runs after the others, each round from its first batch.
- ``sorted_fat_rows``: a copy of the history in each row, Parquet, plain, zstd-3, by user and time, read by PyArrow with
  two threads in file order. There is one table for both tenants, as there is one archive: its rows are as long as the
  longer tenant needs, and the newest 256 of a row are copied out.
- ``own_fat_rows``: the short tenant with a table of its own, whose rows are cut at 256.

Events that two examples of a user share count for both, also where a contestant holds them once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from bench.datagen.datasets import Histories, Work, load
from bench.datagen.histories import HistoriesSpec
from bench.datagen.requests import Batch, K, clustered
from bench.harness import Options, Result, rates
from bench.peers.fat_rows import write_fat_rows
from bench.peers.peer import copy_values
from thinrow.core.ragged import offsets_of
from thinrow.dpp import Batch as Examples
from thinrow.dpp import SessionSpec, loader
from thinrow.dpp.merge import BatchMaker
from thinrow.dpp.worker import TableSource, Worker
from thinrow.examples.records import ExampleBatch, Impressions
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Archive
from thinrow.history.place import archive_objects
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column, Jagged
from thinrow.schema import ExampleSchema, Projection

_ROWS, _WORKERS, _CANDIDATES = 1_024, 2, 3
_TENANTS = {"long": None, "short": 256}
_PEERS = ("threads", "torch_dataloader", "torch_rows", "ray_data", "sorted_fat_rows", "own_fat_rows")
_EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 86_400_000})
#: (rows, events) of batches, without end.
Counts = Iterator[tuple[int, int]]


def run(options: Options) -> Result:
    """Both tenants; quick: the long one, few users, and two peers only where they are asked for."""
    quick = options.quick
    spec = HistoriesSpec(users=40, events=40_000) if quick else HistoriesSpec(users=400, events=2_000_000)
    rounds, batches = options.rounds or (1 if quick else 5), 2 if quick else 32
    peers = options.choice("peers", _PEERS)
    result = Result("dpp", {"users": spec.users, "events": spec.events, "requests_a_user": K, "workers": _WORKERS})
    result.parameters |= {"batch_rows": _ROWS, "batches": batches, "rounds": rounds, "torch": torch.__version__}
    for slow in ("ray_data", "torch_rows") if quick and options.peers is None else ():
        result.skip(slow, "starting its processes takes longer than all the rest; ask for it with --peers")
        peers = tuple(p for p in peers if p != slow)
    with Work(options.work) as work:
        path, data, requests = stored(work, spec)
        for tenant, newest in list(_TENANTS.items())[: 1 if quick else 2]:
            with ExitStack() as stack:
                sources = {"thinrow": _ours(stack, path, newest, "processes")}
                for peer in peers:
                    if peer != "ray_data" and (newest or peer != "own_fat_rows"):
                        sources[peer] = _peer(stack, peer, work, path, data, requests, newest)
                ours = _book(result, tenant, sources, batches, rounds)
            if "ray_data" in peers:
                rate, events_a_row = _ray_rates(path, newest, batches, rounds)
                result.figures[tenant]["ray_data"] = _figures(rate, events_a_row)
                result.ratios[f"vs_ray_data.{tenant}"] = ours / rate["median"]
    return result


def stored(work: Work, spec: HistoriesSpec, candidates: int = _CANDIDATES) -> tuple[Path, Histories, Sequence[Batch]]:
    """A folder with ``store`` and ``table`` of K requests of every user; the data, and the requests."""
    data = load("synthetic", work, spec=spec)
    requests = clustered(data, data.n_users, 25, K)
    key = {**data.parameters, "requests": sum(len(b) for b in requests), "table": 1}
    key |= {} if candidates == _CANDIDATES else {"candidates": candidates}
    path = work.cached("session", key, lambda p: p.mkdir())
    if not (path / "done").exists():
        _write(path, data, requests, candidates)
    return path, data, requests


def _book(result: Result, tenant: str, sources: dict[str, Counts], batches: int, rounds: int) -> float:
    """Rows and events a second of each contestant, and the ratios; returns our rows a second."""
    rows: dict[str, list[int]] = {name: [0, 0] for name in sources}

    def take(name: str) -> int:
        total = 0
        for _ in range(batches):
            n, events = next(sources[name])
            rows[name][0] += n
            rows[name][1] += events
            total += n
        return total

    seen = rates({name: (lambda name=name: take(name)) for name in sources}, rounds)  # type: ignore[misc]
    for name, rate in seen.items():
        result.figures.setdefault(tenant, {})[name] = _figures(rate, rows[name][1] / rows[name][0])
        if name != "thinrow":
            result.ratios[f"vs_{name}.{tenant}"] = seen["thinrow"]["median"] / rate["median"]
    return seen["thinrow"]["median"]


def _figures(rate: Mapping[str, float], events_a_row: float) -> dict[str, float]:
    return {m: round(v, 1) for m, v in rate.items()} | {"events": round(rate["median"] * events_a_row)}


def _write(path: Path, data: Histories, batches: Sequence[Batch], candidates: int) -> None:
    """The store, and the table of the requests."""
    with HistoryStore.create(path / "store", data.schema) as store:
        store.bulk_load(data.table())
        store.compact(full=True)
        with ExampleTable.create(
            path / "table", event_schema=data.schema, example_schema=_EXAMPLES, n_buckets=store.pin().n_buckets
        ) as table:
            parts, first = [], 0
            for batch in batches:
                seen, n = store.snapshot(batch.users, batch.request_ts).requests, len(batch)
                offsets = np.arange(n + 1) * candidates
                shown = {"item": Jagged(Column(np.arange(n * candidates)), offsets)}
                impressions = Impressions.of(_EXAMPLES, np.arange(first, first + n), seen, candidates=shown)
                labels = {"click": Jagged(Column(np.zeros(n * candidates, np.int32)), offsets)}
                parts.append(ExampleBatch.label(impressions, labels))
                first += n
            table.append(ExampleBatch.concat(parts))
            table.cluster()
    (path / "done").touch()


class _Session:
    """What one worker reads, opened in this process."""

    def __init__(self, path: Path, newest: int | None) -> None:
        generation, table = Archive(archive_objects(path / "store")).pin(), ExampleTable.open(path / "table")
        snapshot = table.snapshot_id
        projection = Projection(max_len=newest)
        self.spec = SessionSpec(table.name, snapshot or 0, generation.number, projection, epochs=None)
        self.source = TableSource(table, snapshot, generation, cached_rows=1 << 16)
        self.order = self.spec.order(self.source.split_rows)
        self.worker = Worker(self.spec, self.order, self.source)

    def batch(self, t: int) -> Examples:
        """Batch ``t`` of the run."""
        return BatchMaker(self.worker, self.order, 0, 1).make(t).batch


def _ours(stack: ExitStack, path: Path, newest: int | None, engine: str) -> Counts:
    generation, table = Archive(archive_objects(path / "store")).pin(), ExampleTable.open(path / "table")
    name: Any = engine
    session = loader(generation, table, max_len=newest, engine=name, workers=_WORKERS, epochs=None)
    stack.callback(session.close)
    return ((len(b), int(b.histories.lengths().sum())) for b in session)


def _peer(
    stack: ExitStack,
    name: str,
    work: Work,
    path: Path,
    data: Histories,
    requests: Sequence[Batch],
    newest: int | None,
) -> Counts:
    if name == "threads":
        return _ours(stack, path, newest, "threads")
    if name == "torch_dataloader":
        return _torch(stack, _Batches(path, newest), batch_size=None)
    if name == "torch_rows":
        return _torch(stack, _Rows(path, newest), batch_size=_ROWS, shuffle=True, collate_fn=_collated)
    held = newest if name == "own_fat_rows" else None
    key = {**data.parameters, "newest": held, "requests": sum(len(b) for b in requests)}
    return _fat_rows(work.cached("session-fat", key, lambda p: write_fat_rows(p, data, requests, held)), newest)


def torch_batches(stack: ExitStack, path: Path) -> Counts:
    """Whole batches of the long tenant through a ``DataLoader`` with two workers."""
    return _torch(stack, _Batches(path, None), batch_size=None)


def _torch(stack: ExitStack, dataset: Any, **settings: Any) -> Counts:
    context = "spawn"  # our store runs threads, which a fork would lose
    reader = DataLoader(
        dataset, num_workers=_WORKERS, persistent_workers=True, multiprocessing_context=context, **settings
    )

    def counts() -> Generator[tuple[int, int], None, None]:
        while True:
            for tensors in reader:
                yield len(tensors["request_ts"]), int(tensors["lengths"].sum())

    walk = counts()
    stack.callback(walk.close)
    return walk


def _tensors(batch: Examples) -> dict[str, torch.Tensor]:
    """What a model reads: each user's events once, and what each example sees of them."""
    h = batch.histories
    arrays = {"request_ts": batch.request_ts, "start": h.start, "stop": h.stop, "event_ts": h.events.event_ts}
    arrays |= {"lengths": h.lengths(), "user_of": h.user_of}
    arrays |= {name: column.values for name, column in h.events.columns.items()}
    arrays |= {name: rows.values for name, rows in (batch.candidates | batch.labels).items()}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


class _Batches(IterableDataset[dict[str, torch.Tensor]]):
    """Batches as thinrow makes them; worker w of W makes those t for which t mod W is w."""

    def __init__(self, path: Path, newest: int | None) -> None:
        self.path, self.newest = path, newest

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        assert worker is not None
        session = _Session(self.path, self.newest)
        t = worker.id
        while True:
            yield _tensors(session.batch(t))
            t += worker.num_workers


@cache
def _opened(path: Path, newest: int | None) -> tuple[_Session, list[tuple[int, int]]]:
    """A session of this process, and where each row of the table is: its split, and its number there."""
    session = _Session(path, newest)
    rows = session.source.split_rows
    return session, [(split, row) for split, n in enumerate(rows) for row in range(n)]


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """An example by its number, with its history."""

    def __init__(self, path: Path, newest: int | None) -> None:
        self.path, self.newest = path, newest
        with ExampleTable.open(path / "table") as table:
            self.n = table.rows()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        session, places = _opened(self.path, self.newest)
        split, row = places[i]
        examples, _ = session.source.examples(split, row, row + 1)
        h = session.source.rebuild(examples.batch, session.spec.projection, True, "fail").histories
        arrays = {"request_ts": examples.batch.request_ts, "lengths": h.lengths(), "event_ts": h.events.event_ts}
        arrays |= {name: column.values for name, column in h.events.columns.items()}
        arrays |= {name: r.values for name, r in (examples.candidates | examples.labels).items()}
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _ray_rates(path: Path, newest: int | None, batches: int, rounds: int) -> tuple[dict[str, float], float]:
    """Rows a second, and events a row. Each round is a run of its own, timed from its first batch to its last: a run
    that went on would take the others' processors, and actors start anew with each."""
    import ray

    ray.init(num_cpus=_WORKERS + 1, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    order, seen, rows, events = _Session(path, newest).order, [], 0, 0
    n_bases = (batches + 1) * _ROWS // order.manifest.base_rows
    actors: Any = ray.data.ActorPoolStrategy(size=_WORKERS)
    try:
        for _ in range(rounds):
            bases = ray.data.range(n_bases, override_num_blocks=n_bases)
            rebuilt = bases.map_batches(_RayRows, fn_constructor_args=(path, newest), batch_size=1, compute=actors)
            found: Iterable[Any] = rebuilt.iter_batches(batch_size=_ROWS, batch_format="pyarrow")
            walk = iter(found)
            next(walk)
            since, before = time.perf_counter(), rows
            for batch in walk:
                rows += len(batch)
                events += len(batch["event_ts"].combine_chunks().flatten())
            seen.append((rows - before) / (time.perf_counter() - since))
    finally:
        ray.shutdown()
    return {"median": statistics.median(seen), "min": min(seen), "max": max(seen)}, events / rows


class _RayRows:
    """Base batches by number, as rows of lists."""

    def __init__(self, path: Path, newest: int | None) -> None:
        self.session = _Session(path, newest)

    def __call__(self, numbers: dict[str, Any]) -> pa.Table:
        batch = self.session.worker.produce(int(numbers["id"][0])).batch
        columns: dict[str, Any] = {"request_ts": pa.array(batch.request_ts)}
        names = ("event_ts", *batch.histories.events.columns)
        columns |= {name: batch.histories.to_jagged(name).to_arrow() for name in names}
        columns |= {name: rows.to_arrow() for name, rows in (batch.candidates | batch.labels).items()}
        return pa.table(columns)


def _fat_rows(path: Path, newest: int | None) -> Counts:
    pa.set_cpu_count(_WORKERS)
    while True:
        file = pq.ParquetFile(path, memory_map=True)
        for batch in file.iter_batches(batch_size=_ROWS, use_threads=True):
            events = 0
            for name in batch.schema.names[1:]:
                lists = batch[name]
                offsets, values = lists.offsets.to_numpy().astype(np.int64), lists.values.to_numpy()
                length = np.diff(offsets) if newest is None else np.minimum(np.diff(offsets), newest)
                events = int(length.sum())
                if events < len(values):
                    out = np.empty(events, values.dtype)
                    copy_values(values, offsets[1:] - length, length, out, offsets_of(length)[:-1])
            yield len(batch), events
