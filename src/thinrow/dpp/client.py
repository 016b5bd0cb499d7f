"""Loader: the reader of training batches, in the order that the spec fixes, resumable at every batch.

Base batches come from an engine in virtual order; those of a block are merged, their rows permuted and cut into global
batches, of which a rank takes its part. Workers of other processes do that themselves where a batch is a block.
``state_dict`` names the last batch *yielded*: what was read ahead counts not.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from thinrow.core.errors import Erased, InputError, ObjectNotFound, StoreError
from thinrow.dpp.batch import Batch
from thinrow.dpp.budget import BatchBudget
from thinrow.dpp.engines import Engine, EngineChoice, EngineName, Processes, Shared, Threads, engine_of
from thinrow.dpp.merge import BatchMaker, Whole, merge, poisoned_of
from thinrow.dpp.order import Order
from thinrow.dpp.poison import OnPoison, Poisoned, Quarantine, QuarantineFile
from thinrow.dpp.row_filter import RowFilter
from thinrow.dpp.spec import SessionSpec, projection_of
from thinrow.dpp.worker import Produced, Source, TableSource, Worker
from thinrow.examples.datafiles import ROW_GROUP_ROWS
from thinrow.examples.table import ExampleTable
from thinrow.features import FeaturePlan
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.reader import ReadStats
from thinrow.history.missing import OnMissing
from thinrow.history.reconstruct import count_read
from thinrow.schema import Projection

_STATE_FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoaderStats(ReadStats):
    """What the batches yielded so far cost: counts and bytes of all base batches read for them.

    ``seconds`` by stage adds up over threads, so that it may exceed the time that passed; further stages are examples
    (table rows read and decoded), features (the plan) and batch (merging and permuting).

    Attributes:
        batches: batches yielded.
        examples: examples yielded.
        waited_s: seconds that the reader waited for workers.
        restarts: workers that ended and were replaced.
        copied_bytes: bytes that were copied between workers and reader; 0 with threads, and with processes unless
            batches are kept.
        poisoned: examples of these batches that were left out because they cannot be made, see
            ``SessionSpec.on_poison``.
    """

    batches: int = 0
    examples: int = 0
    waited_s: float = 0.0
    restarts: int = 0
    copied_bytes: int = 0
    poisoned: int = 0


class Loader:
    """Iterates ``Batch``; iterating again goes on after the last batch yielded.

    Args:
        spec: what to yield.
        source: where to read it.
        rank: which part of each global batch to yield, in [0, n_ranks).
        hold: entered while the loader is iterated, to keep what it reads from being collected.
        order: of the rows; that of the spec over the source's splits by default.
        engine: what runs the workers, by name ("threads", "processes", "ray") or with its settings.
        count: called for each base batch that was produced outside of this process, with its figures and its number of
            examples.
        n_ranks: parts of a global batch. The state of a reader is the same at every rank, and fits any number of ranks.

    Raises:
        InputError: the spec does not fit the source.
    """

    def __init__(
        self,
        spec: SessionSpec,
        source: Source,
        *,
        rank: int = 0,
        n_ranks: int = 1,
        hold: Callable[[], AbstractContextManager[object]] = nullcontext,
        order: Order | None = None,
        engine: EngineName | EngineChoice = "threads",
        count: Callable[[ReadStats, int], None] | None = None,
    ) -> None:
        if not 0 <= rank < n_ranks:
            raise InputError(f"rank={rank} of n_ranks={n_ranks}; rank must be in [0, n_ranks)")
        self.spec = spec
        self.rank, self.n_ranks = rank, n_ranks
        self.stats = LoaderStats()
        self._order: Order = order or spec.order(source.split_rows)
        self._worker = Worker(spec, self._order, source)
        self._hold = hold
        self._choice = engine_of(engine)
        #: What makes items, whoever says how many workers it may have.
        self._makes = engine_of(self._choice.engine) if isinstance(self._choice, Shared) else self._choice
        self._count = None if self._choice.in_process else count
        self._engine: Engine[Produced] | Engine[Whole] | None = None
        self._t, self._given = -1, False
        policy = spec.on_poison
        self._quarantine: QuarantineFile | None = None
        if isinstance(policy, Quarantine):
            self._quarantine = QuarantineFile(policy.path, spec.snapshot_id, spec.rows)

    @property
    def engine(self) -> Engine[Produced] | Engine[Whole] | None:
        """What runs the workers; None while the loader is not iterated."""
        return self._engine

    def rewind(self) -> None:
        """Begin again: the next iteration gives the first batch. What is iterated now ends."""
        self.close()
        self._t, self._given = -1, False

    @property
    def n_batches(self) -> int | None:
        """Global batches of the whole run; None where it has no end."""
        return self._order.n_batches

    def __len__(self) -> int:
        """Global batches of the whole run. Raises TypeError where it has no end."""
        if self.n_batches is None:
            raise TypeError("a loader with epochs=None has no length")
        return self.n_batches

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        if not self._has(self._t + 1):
            if self._given:
                warnings.warn(
                    f"this loader has delivered all of its {self.n_batches} batches; begin again with rewind(), or "
                    "pass epochs=... for more",
                    stacklevel=2,
                )
            return
        with self._hold():
            yield from self._batches()

    def _batches(self) -> Iterator[Batch]:
        self._figures: tuple[float, int, int] = (0.0, 0, 0)
        # Elsewhere whole batches are made, so that none is put together here; where a window has several, everywhere.
        whole = self.spec.budget is not None or (not self._choice.in_process and self.spec.batch_rows is None)
        batches = self._whole() if whole else self._merged()
        try:
            for batch in batches:
                self.stats.batches += 1
                self.stats.examples += len(batch)
                self._t += 1
                self._given = True
                yield batch
        finally:
            batches.close()

    def _whole(self) -> Generator[Batch, None, None]:
        """Batches as workers made them."""
        maker = BatchMaker(self._worker, self._order, self.rank, self.n_ranks, self.spec.prefetch)
        window = max(self.spec.workers + 1, -(-self.spec.window // self.spec.block))
        if isinstance(self._makes, Processes):
            # What bounds their memory is the engine's, in bytes; so many make up for a worker that died.
            window = max(window, 4 * self.spec.workers)
        make = maker.make_here if self._choice.in_process else maker.make
        engine = self._choice.start(
            make, first=self._t + 1, stop=self.n_batches, workers=self.spec.workers, window=window
        )
        self._engine = engine
        try:
            while self._has(self._t + 1) and self._engine is engine:
                try:
                    made = engine.next()
                except StopIteration:
                    return
                self._account(engine, made.stats, made.n_read)
                self._leave_out(made.poisoned)
                if made.again is not None:
                    made.again.maker = maker
                yield made.batch
        finally:
            engine.close()

    def _merged(self) -> Generator[Batch, None, None]:
        """Batches put together here from base batches."""
        order, spec = self._order, self.spec
        first = order.bases_of(self._t + 1).start
        workers = spec.workers * (1 + spec.prefetch) if isinstance(self._makes, Threads) else spec.workers
        engine = self._choice.start(
            self._worker.produce, first=first, stop=order.n_bases, workers=workers, window=spec.window
        )
        self._engine = engine
        held: dict[int, Produced] = {}
        fetched = first
        try:
            while self._has(self._t + 1) and self._engine is engine:
                bases = order.bases_of(self._t + 1)
                for v in [v for v in held if v < bases.start]:
                    del held[v]
                try:
                    while fetched < bases.stop:
                        held[fetched] = produced = engine.next()
                        self._account(engine, produced.stats, len(produced.rows))
                        fetched += 1
                except StopIteration:
                    return
                if not self._has(self._t + 1):
                    return  # an endless source ended here
                since = time.perf_counter()
                refs = order.batch(self._t + 1, self.rank, self.n_ranks)
                batch = merge(held, refs, self._t + 1)
                self.stats.clock("batch", since)
                self._leave_out(poisoned_of(held, refs, order))
                yield batch
        finally:
            self._leave()
            engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stands: a few hundred bytes of JSON-ready numbers and strings, the same at every rank."""
        manifest = self._order.manifest
        return {
            "format": _STATE_FORMAT,
            "t": self._t,
            "table": manifest.table,
            "snapshot_id": manifest.snapshot_id,
            **asdict(self.spec.rows),
            "rows": manifest.n_rows,
            "base_rows": manifest.base_rows,
            "block": self.spec.block,
            "interleave": self.spec.interleave,
            "batch_rows": self.spec.batch_rows,
            "budget": getattr(self._order, "budget_state", None),
            "epochs": self.spec.epochs,
            "seed": self.spec.seed,
            "manifest": manifest.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after batch ``state["t"]``. Threads, ranks, projection and plan may differ from those of the state.

        Raises:
            InputError: it is no state, or one of another order; the message says what differs.
        """
        own = self.state_dict()
        # States of loaders that knew no filter read every row, of those that knew no budget had none.
        state = {**asdict(RowFilter()), "budget": None, **state}
        missing = [name for name in own if name not in state]
        if missing:
            raise InputError(f"not a reader state: it lacks {missing[0]!r}; pass what Loader.state_dict returned")
        for name, value in own.items():
            if name != "t" and state[name] != value:
                raise InputError(
                    f"the state has {name}={state[name]!r}, this loader {name}={value!r}: batches would differ; "
                    f"open the loader with the {name} of the state"
                )
        t = state["t"]
        if not isinstance(t, int) or t < -1 or (self.n_batches is not None and t >= self.n_batches):
            raise InputError(f"the state has t={t!r}; this run has batches 0 to {(self.n_batches or 0) - 1}")
        self.close()
        self._t, self._given = t, False

    def close(self) -> None:
        """End the workers of an iteration that was left early. Iterating again starts new ones."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._leave()
            engine.close()

    def _leave(self) -> None:
        """Called before workers are ended: one that waits for the source has to return."""

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has(self, t: int) -> bool:
        return self.n_batches is None or t < self.n_batches

    def _account(self, engine: Engine[Any], stats: ReadStats, n_read: int) -> None:
        figures = engine.waited_s, engine.restarts, engine.copied_bytes
        waited, restarts, copied = (now - before for now, before in zip(figures, self._figures, strict=True))
        self._figures = figures
        self.stats.waited_s += waited
        self.stats.restarts += int(restarts)
        self.stats.copied_bytes += int(copied)
        self.stats.add(stats)
        if self._count is not None:
            self._count(stats, n_read)

    def _leave_out(self, poisoned: Sequence[Poisoned]) -> None:
        for one in poisoned:
            self.stats.poisoned += one.left_out
            where = one.left_out, one.row, one.split
            _log.warning("left out %d examples at row %d of split %d: %s", *where, one.message)
        if self._quarantine is not None:
            self._quarantine.add(poisoned)


@contextmanager
def _held(generation: Generation) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            try:
                stack.enter_context(generation.hold())
            except Erased:
                # The source goes over to the newest one, too.
                stack.enter_context(generation.newest().hold())
        except ObjectNotFound:
            raise
        except StoreError as e:
            # A reader may have no right to write.
            _log.warning("generation %d is read without holding it, gc may take it: %s", generation.number, e)
        yield


def _workers(workers: int | None, threads: int | None) -> int:
    if workers is not None and threads is not None:
        raise InputError(f"both workers={workers} and threads={threads}, which are the same; give one")
    given = threads if workers is None else workers
    return (os.cpu_count() or 1) if given is None else given


def _checked(table: ExampleTable) -> ExampleTable:
    if not isinstance(table, ExampleTable):
        raise InputError(f"table={table!r} is a {type(table).__name__}; open it first: ExampleTable.open({table!r})")
    return table


class Pinnable(Protocol):
    """A history store."""

    def pin(self) -> Generation:
        """The newest generation."""
        ...


def loader(
    store: Pinnable | Generation,
    table: ExampleTable,
    *,
    projection: Projection | None = None,
    max_len: int | None = None,
    plan: FeaturePlan | None = None,
    batch_rows: int | None = None,
    budget: BatchBudget | None = None,
    epochs: int | None = 1,
    seed: int = 0,
    rows: RowFilter | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
    user_share: float | None = None,
    user_seed: int = 0,
    engine: EngineName | EngineChoice = "threads",
    workers: int | None = None,
    threads: int | None = None,
    prefetch: int | None = None,
    cache_bytes: int = 0,
    verify: bool = True,
    on_missing: OnMissing = "fail",
    on_poison: OnPoison = "fail",
    snapshot_id: int | None = None,
    base_rows: int = 256,
    block: int = 4,
    interleave: int = 4,
    rank: int = 0,
    n_ranks: int = 1,
) -> Loader:
    """A Loader over a table of examples and the store of their histories. What is not named here is a field of
    ``SessionSpec`` or an argument of ``Loader``.

    Args:
        store: a HistoryStore (its newest generation is read) or a generation.
        table: the examples.
        projection, max_len: what to read of histories, everything by default; short for ``Projection(max_len=...)``.
        rows: which examples to read, all by default. Batches are full whatever it leaves; of nothing there is none.
        since_ms, until_ms: short for ``rows``: examples with ``since_ms <= request_ts < until_ms``; None for no bound.
        user_share, user_seed: short for ``rows``: users whose hash falls into this share, 0 < share <= 1.
        engine: what runs the workers: "threads" of this process, "processes" of this machine, actors of a "ray"
            cluster, or an engine with its settings (``thinrow.dpp.engines``). Any gives the same batches.
        workers, threads: two names for how many; None for one a core.
        prefetch: as in ``SessionSpec``; None for 1 where the archive is in a bucket, else 0.
        snapshot_id: of the table; None for the newest. A resumed run needs the one it began with.

    Raises:
        InputError: arguments out of bounds, a path for a table, ``projection`` and ``max_len``, or ``rows`` twice.
        SchemaError: table and store have different numbers of buckets.
        Erased: a budget, and rows of the snapshot were erased.
    """
    projection = projection_of(projection, max_len)
    short = RowFilter(since_ms, until_ms, user_share, user_seed)
    if rows is not None and short != RowFilter():
        raise InputError(f"both rows={rows} and {short}; put all of it into rows")
    table, generation = _checked(table), store if isinstance(store, Generation) else store.pin()
    snapshot = table.snapshot_id if snapshot_id is None else snapshot_id
    spec = SessionSpec(
        table=table.name,
        snapshot_id=snapshot or 0,
        generation=generation.number,
        projection=projection,
        plan=plan,
        rows=rows or short,
        base_rows=base_rows,
        block=block,
        batch_rows=batch_rows,
        budget=budget,
        epochs=epochs,
        seed=seed,
        interleave=interleave,
        workers=_workers(workers, threads),
        prefetch=int(generation.objects.concurrency > 1) if prefetch is None else prefetch,
        cache_bytes=cache_bytes,
        verify=verify,
        on_missing=on_missing,
        on_poison=on_poison,
    )
    return _over(spec, table, snapshot, generation, rank=rank, n_ranks=n_ranks, engine=engine)


def _over(
    spec: SessionSpec, table: ExampleTable, snapshot_id: int | None, generation: Generation, **rest: Any
) -> Loader:
    # A base batch ends within a row group, which the next one of its split goes on with.
    cached_rows = (2 * spec.interleave + spec.workers) * (ROW_GROUP_ROWS + spec.base_rows)
    source = TableSource(
        table,
        snapshot_id,
        generation,
        cached_rows=cached_rows,
        rows=spec.rows,
        shared_bytes=spec.cache_bytes,
        skip_damaged=spec.on_poison != "fail",
    )
    order = spec.order(source.split_rows, None if spec.budget is None else source.sizes(spec.projection))
    hold, count = partial(_held, generation), partial(count_read, generation, spec.projection)
    return Loader(spec, source, hold=hold, order=order, count=count, **rest)
