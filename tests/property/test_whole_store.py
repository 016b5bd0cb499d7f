"""Random programs against a whole store and a plain Python model of it: whatever happened in whatever order, each
logged request comes back as the fat row that the model stored when it was asked, forever, or with the status that
erasure and retention imply.

A program is a list of steps ``(name, seed)``; what a step does depends on its seed and on what is there. The slow runs,
here and over Redis (``tests/integration/test_redis_store.py``), go through 100,000 steps and more::

    python -m pytest -m slow -s tests/property/test_whole_store.py -k many_programs

THINROW_STEPS says how many, THINROW_SEED from which seed on; a failure names the program's seed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinrow.core.errors import (
    Erased,
    Expired,
    InputError,
    ObjectNotFound,
    ThinrowError,
)
from thinrow.core.units import NEVER
from thinrow.dpp import loader
from thinrow.examples.joiner import join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import Impressions
from thinrow.examples.table import ExampleTable
from thinrow.history import backfill, buckets, bury, compact, erase, load, rebucket
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.layout import EVENT_ID, stored_columns
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.verify import verify_generation, verify_tombstones
from thinrow.history.archive.window import read_everything
from thinrow.history.archive.writer import SegmentWriter
from thinrow.history.bulk import merge, runs, source
from thinrow.history.erase import EventsOf
from thinrow.history.missing import COMPLETE
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.schema import EventSchema, Projection
from thinrow.storage.garbage import FOLDERS, strings_of
from thinrow.storage.manifest import ManifestLog
from thinrow.testing.store_model import Fact, Logged, cut, exact
from thinrow.testing.store_model import shown as shown_value
from thinrow.testing.store_steps import Steps
from thinrow.testing.world import EXAMPLES

Step = tuple[str, int]


class Stop(Exception):
    """A process that ends."""


@contextlib.contextmanager
def small(stripe_rows: int, parts: bool) -> Iterator[None]:
    """Small stripes; and, with ``parts``, whatever is done in parts is done in tiny ones. No fsync, for speed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda _: None)
        for module in (load, buckets):
            patch.setattr(module, "STRIPE_ROWS", stripe_rows)
        defaults = SegmentWriter.__init__.__kwdefaults__
        assert defaults is not None
        patch.setitem(defaults, "stripe_rows", stripe_rows)
        if parts:
            for module in (buckets, compact, rebucket):
                patch.setattr(module, "PART_BYTES", 0)
            for module in (bury, erase):
                patch.setattr(module, "ROWS_AT_ONCE", 3)
            patch.setattr(bury, "_USERS_AT_ONCE", 2)
            patch.setattr(backfill, "_ROWS_AT_ONCE", 3)
            patch.setattr(compact, "_FIRST_USERS", 1)
            patch.setattr(load, "_LEAST_MEMORY", 0)
            patch.setattr(load, "_RUN_SHARE", 1)
            patch.setattr(load, "_FIRST_USERS", 1)
            patch.setattr(source, "CHUNK_ROWS", 5)
            for module in (runs, merge):
                patch.setattr(module, "BATCH_ROWS", 3)
        # A collection of garbage looks for cycles first: among what is made from here on, not among all modules.
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()


class Play(Steps):
    """Steps in steps, checks, and whole programs."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.stack = ExitStack()
        self.stack.enter_context(small([1, 2, 3, 8, 512][rng.integers(5)], bool(rng.random() < 0.5)))
        super().__init__(rng, folder)

    def snapshot(self, rng: np.random.Generator) -> None:
        super().snapshot(rng)
        logged = self.model.logged[-1]
        if rng.random() < 0.5:
            # What is served at the request is the fat row, too.
            self.check_requests(rng, self.pin(), logged.batch, logged.seen, lambda f: f.values, lambda f: f.gone)

    # -- steps in steps --

    def meanwhile(self, rng: np.random.Generator) -> None:
        """One step while another is about to commit."""
        if self.nested:
            return
        outer, inner = OUTER[rng.integers(len(OUTER))], INNER[rng.integers(len(INNER))]
        if (outer, inner) in (("bulk_load", "append"), ("rebucket", "rebucket")):
            return
        archive: Any = self.store.archive
        real, fired = archive.commit, []

        def commit(*args: Any, **named: Any) -> Generation:
            if not fired:
                fired.append(True)
                getattr(self, inner)(np.random.default_rng(int(rng.integers(1 << 40))))
            return real(*args, **named)

        self.step_name += f" {outer}/{inner}"
        self.nested, archive.commit = True, commit
        try:
            getattr(self, outer)(np.random.default_rng(int(rng.integers(1 << 40))))
        finally:
            self.nested = False
            del archive.commit

    def killed(self, rng: np.random.Generator) -> None:
        """A compaction or an erasure ends before or after its commit; then it is opened again and goes on."""
        if self.nested:
            return
        before, erasing = bool(rng.random() < 0.5), bool(rng.random() < 0.4)
        archive: Any = self.store.archive
        real = archive.commit
        self.step_name += f" {'before' if before else 'after'} {'erase' if erasing else 'compact'}"

        def commit(*args: Any, **named: Any) -> Generation:
            if not before:
                real(*args, **named)
            raise Stop

        picked = [self.users[rng.integers(3)]]
        facts: set[Fact] = set()
        events: list[EventsOf] = []
        if erasing and rng.random() < 0.5:
            if any(not f.archived for f in self.model.alive(picked[0])):
                self.compact(rng)
            events, facts = self.some_events(rng, picked[0])
            picked = []
            if not events:
                return
        archive.commit = commit
        try:
            if erasing:
                self.store.erase(picked, events, grace_s=0)
            else:
                self.store.compact(full=bool(rng.random() < 0.5))
            stopped = False
        except Stop:
            stopped = True
        finally:
            del archive.commit
        self.reopen(rng)
        if erasing and not stopped:
            # It met nothing, so it committed nothing and came to its end.
            self.erased(picked, facts, events)
        elif erasing:
            for _ in range(3):
                if rng.random() < 0.3 and not picked:
                    break
                self.append(rng) if not picked else None
            self.store.finish_erasures(grace_s=0)
            assert self.store.pending_erasures() == []
            self.erased(picked, facts, events)
        else:
            self.settle()

    # -- checks --

    def projection(self, rng: np.random.Generator, schema: EventSchema, *, coded: bool = True) -> Projection:
        columns = groups = max_len = horizon = None
        if rng.random() < 0.5:
            columns = tuple(c.name for c in schema.columns if rng.random() < 0.5)
            groups = tuple(g for g in schema.groups if rng.random() < 0.3)
        if rng.random() < 0.6:
            max_len = int(rng.integers(1, 12))
        align = int(rng.integers(1, max_len + 1)) if max_len is not None and rng.random() < 0.4 else 1
        if align == 1 and rng.random() < 0.3:
            horizon = int(rng.integers(0, 50))
        plain = Projection(columns, groups, max_len, horizon, align)
        single = [c for c in plain.resolve(schema) if not c.ragged and not c.size and not c.dtype.startswith("float")]
        codes = tuple(c.name for c in single if coded and rng.random() < 0.2)
        return Projection(columns, groups, max_len, horizon, align, codes)

    def same(
        self,
        histories: Any,
        seen: list[list[Fact]],
        times: list[int],
        schema: EventSchema,
        projection: Projection,
        values_of: Callable[[Fact], dict[int, Any]],
    ) -> None:
        want = [cut(facts, t, projection) for facts, t in zip(seen, times, strict=True)]
        assert histories.to_jagged("arrival").to_arrow().to_pylist() == [[f.arrival for f in facts] for facts in want]
        assert histories.to_jagged("event_ts").to_arrow().to_pylist() == [[f.ts for f in facts] for facts in want]
        specs = projection.resolve(schema)
        assert set(histories.events.columns) == {c.name for c in specs}
        for spec in specs:
            got = [[exact(v) for v in row] for row in histories.to_jagged(spec.name).to_arrow().to_pylist()]
            assert got == [[shown_value(values_of(f), spec) for f in facts] for facts in want], spec

    def check_requests(
        self,
        rng: np.random.Generator,
        generation: Generation,
        batch: RequestBatch,
        seen: list[list[Fact]],
        values_of: Callable[[Fact], dict[int, Any]],
        gone_of: Callable[[Fact], int],
    ) -> None:
        schema, times = generation.schema, batch.request_ts.tolist()
        complete = [not any(map(gone_of, facts)) for facts in seen]
        left = [[f for f in facts if not gone_of(f)] for facts in seen]
        projection = self.projection(rng, schema)
        got = reconstruct(generation, batch, projection, on_missing="shorten")
        for status, facts in zip(got.status.tolist(), seen, strict=True):
            assert status in self.model.statuses(facts, gone_of)
        self.same(got.histories, left, times, schema, projection, values_of)
        if all(complete):
            assert reconstruct(generation, batch, projection).status.tolist() == [COMPLETE] * len(batch)
            return
        with pytest.raises((Erased, Expired)):
            reconstruct(generation, batch, projection)
        rest = reconstruct(generation, batch, projection, on_missing="skip")
        kept = np.flatnonzero(complete).tolist()
        assert rest.kept.tolist() == kept
        self.same(rest.histories, [seen[i] for i in kept], [times[i] for i in kept], schema, projection, values_of)

    def check(self, rng: np.random.Generator) -> None:
        """Some logged requests on the newest generation and on those that are held."""
        for entry in self.model.logged:
            entry.check_fat()
        self.check_some(rng, self.pin(), self.model.logged, lambda f: f.values, lambda f: f.gone)
        for held in self.held:
            number = held.generation.number
            logged = [g for g in self.model.logged if g.pinned <= number and len(g.batch)]
            values, gone = held.values, held.gone
            # One without segments has nothing to erase, and nothing from which a store opened before could learn of it.
            if held.revoked and not held.elsewhere and held.generation.segments:
                if logged:
                    with pytest.raises(Erased):
                        reconstruct(held.generation, logged[0].batch, on_missing="shorten")
                continue
            with contextlib.suppress(*([Erased, ObjectNotFound] if held.revoked else [])):
                self.check_some(
                    rng, held.generation, logged, lambda f, v=values: v.get(f, f.first), lambda f, g=gone: g.get(f, 0)
                )
        for batch, keys in self.foreign:
            for i in range(len(batch)):
                one = batch.take(np.array([i]))
                try:
                    histories = reconstruct(self.pin(), one, Projection(columns=())).histories
                except (ThinrowError, InputError):
                    continue
                positions, _ = histories.positions()
                events = histories.events
                got = list(zip(events.event_ts[positions].tolist(), events.arrival[positions].tolist(), strict=True))
                assert got == keys[i], "a request of a lost store is never another one's"

    def check_some(
        self,
        rng: np.random.Generator,
        generation: Generation,
        logged: list[Logged],
        values_of: Callable[[Fact], dict[int, Any]],
        gone_of: Callable[[Fact], int],
    ) -> None:
        logged = [g for g in logged if len(g.batch)]
        if not logged:
            return
        picked = [logged[i] for i in rng.permutation(len(logged))[: rng.integers(1, 6)]]
        batch, seen = RequestBatch.concat([g.batch for g in picked]), [facts for g in picked for facts in g.seen]
        if rng.random() < 0.5:
            rows = rng.permutation(len(batch))[: rng.integers(1, len(batch) + 1)]
            batch, seen = batch.take(rows), [seen[i] for i in rows]
        self.check_requests(rng, generation, batch, seen, values_of, gone_of)

    def read(self, rng: np.random.Generator) -> None:
        """What a model served now would see."""
        users, times = self.users[: rng.integers(1, 7)], rng.integers(0, 64, 6)
        projection = self.projection(rng, self.model.schema)
        asked = times[: len(users)]
        got = self.store.read(users, asked, projection)
        seen = [self.model.visible(u, t) for u, t in zip(users, asked.tolist(), strict=True)]
        self.same(got.histories, seen, asked.tolist(), self.model.schema, projection, lambda f: f.values)

    def check_archive(self, rng: np.random.Generator) -> None:
        """What is archived, event by event; and that the store finds itself sound."""
        self.settle()
        model, generation = self.model, self.pin()
        for user, held in self.archived_numbers().items():
            want = {
                f.arrival: (f.ts, NEVER if model.shown_in_archive(f) else f.hidden_from)
                for f in model.alive(user)
                if f.archived
            }
            assert held == want
        assert verify_generation(generation) == []
        assert verify_tombstones(generation) == []
        assert self.store.verify_recent() == []
        users = sorted(u for u in model.facts if model.alive(u))
        assert sorted(self.store.users().tolist()) == users
        specs = {c.name: c for c in stored_columns(model.schema)}
        if EVENT_ID in specs and users:
            read = read_everything(generation, self.ids(users), [specs[EVENT_ID]], ReadStats())
            ids = read.columns[EVENT_ID].to_arrow().to_pylist()
            assert ids == [f.event_id for u in users for f in model.alive(u) if f.archived]

    def check_arrow(self, rng: np.random.Generator) -> None:
        model, projection = self.model, self.projection(rng, self.model.schema, coded=False)
        at = int(rng.integers(0, 70)) if projection.horizon_ms is not None or rng.random() < 0.5 else None
        rows = int(rng.integers(1, 20))
        alone = bool(rng.random() < 0.5)
        face = self.pin() if alone else self.store
        table = face.to_arrow(None, projection, at=at, batch_rows=rows).read_all()
        got: dict[Any, list[Any]] = {}
        names = [c.name for c in projection.resolve(model.schema)]
        times = table["event_ts"].cast(pa.int64()).to_pylist()
        times_too = [table[n].cast(pa.int64()) if pa.types.is_timestamp(table[n].type) else table[n] for n in names]
        values = [[exact(v) for v in column.to_pylist()] for column in times_too]
        for i, user in enumerate(table["user_id"].to_pylist()):
            row = (times[i], table["arrival"][i].as_py(), *(v[i] for v in values))
            got.setdefault(user, []).append(row)
        want = {}
        for user in model.facts:
            facts = [f for f in model.alive(user) if at is None or f.ts < at]
            if alone:
                facts = [f for f in facts if f.archived and model.shown_in_archive(f)]
            else:
                facts = [f for f in facts if f.hidden_from == NEVER]
            facts = cut(facts, at or 0, projection)
            if facts:
                specs = projection.resolve(model.schema)
                want[user] = [(f.ts, f.arrival, *(shown_value(f.values, c) for c in specs)) for f in facts]
        assert got == want, (alone, projection, at)

    def check_files(self, rng: np.random.Generator) -> None:
        """Nothing is left that no generation names, and nothing that one names is missing."""
        for held in self.held:
            held.close()
        self.held.clear()
        self.store.collect_garbage(keep=1, grace_s=0)
        objects = self.store.archive.objects
        logs = ManifestLog(objects), ManifestLog(objects, "retired")
        named = {n for log in logs for number in log.list() for n in strings_of(log.load(number))}
        there = {name for folder in FOLDERS for name in objects.list(folder)}
        assert there <= named

    # -- programs --

    def do(self, step: Step) -> None:
        name, seed = step
        self.step_name = name
        getattr(self, name)(np.random.default_rng(seed))

    def finish(self) -> None:
        rng = np.random.default_rng(1)
        for _ in range(2):
            for logged in self.model.logged:
                if len(logged.batch):
                    self.check_requests(
                        rng, self.pin(), logged.batch, logged.seen, lambda f: f.values, lambda f: f.gone
                    )
            self.check(rng)
            self.check_archive(rng)
            self.check_arrow(rng)
            self.store.compact(full=True)
            self.settle()
        self.check_files(rng)

    def close(self) -> None:
        for held in self.held:
            held.close()
        self.store.close()
        self.stack.close()


OUTER = ("compact", "backfill", "rebucket", "bulk_load", "evolve", "erase_users", "erase_events", "retain")
INNER = ("append", "compact", "backfill", "rebucket", "evolve", "snapshot", "hold")
STEPS = {
    "append": 10,
    "bulk_load": 3,
    "compact": 6,
    "snapshot": 8,
    "erase_users": 1,
    "erase_events": 2,
    "retain": 1,
    "tick": 1,
    "evolve": 3,
    "backfill": 4,
    "rebucket": 1,
    "collect": 2,
    "hold": 2,
    "release": 1,
    "reopen": 1,
    "backup": 1,
    "restore": 1,
    "redact": 1,
    "meanwhile": 4,
    "killed": 1,
    "check": 5,
    "read": 2,
    "check_archive": 2,
    "check_arrow": 2,
}
WEIGHTED = [name for name, weight in STEPS.items() for _ in range(weight)]


def run(seed: int, steps: Sequence[Step], folder: Path, trace: list[str] | None = None) -> None:
    """One program in a new folder."""
    folder.mkdir(parents=True)
    play = Play(seed, folder)
    try:
        for step in steps:
            if trace is not None:
                trace.append(str(step))
            play.do(step)
            if trace is not None:
                trace[-1] = f"{step} {play.step_name}"
        play.finish()
    finally:
        play.close()
        shutil.rmtree(folder)


def program(seed: int, n: int) -> list[Step]:
    """Steps from a seed."""
    dice = random.Random(seed)
    return [(dice.choice(WEIGHTED), dice.randrange(1 << 32)) for _ in range(n)]


steps = st.lists(st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 1 << 32)), min_size=5, max_size=30)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), steps=steps)
def test_every_request_comes_back(seed: int, steps: list[Step], tmp_path_factory: pytest.TempPathFactory) -> None:
    run(seed, steps, tmp_path_factory.mktemp("whole") / "store")


# The last five once failed: ids that an erasure forgets, text that no segment of a read holds, an erasure that met
# nothing, which the model took for one that was cut short, a generation without events that was revoked, and a load
# that deleted, for an input that no longer fitted, what buckets had held before it.
@pytest.mark.parametrize("seed", [*range(4), 20_563, 40_447, 1_115, 9_000_720, 700_042])
def test_long_programs(seed: int, tmp_path: Path) -> None:
    run(seed, program(seed, 40), tmp_path / "store")


def many(play: Callable[[int, Path], int], first: int, folder: Path) -> None:
    """Programs from seed ``first`` on, until they went through as many steps as were asked for."""
    wanted, seed = int(os.environ.get("THINROW_STEPS", 100_000)), int(os.environ.get("THINROW_SEED", first))
    since, steps, begun = time.monotonic(), 0, seed
    while steps < wanted:
        try:
            steps += play(seed, folder / str(seed))
        except (Exception, pytest.fail.Exception) as e:
            raise AssertionError(f"program {seed}, after {steps} steps of others") from e
        seed += 1
        if seed % 50 == 0 or steps >= wanted:
            took = time.monotonic() - since
            print(f"seeds {begun} to {seed - 1}: {steps} steps in {took:.0f} s", flush=True)


@pytest.mark.slow
def test_many_programs(tmp_path: Path) -> None:
    def one(seed: int, folder: Path) -> int:
        run(seed, program(seed, 40), folder)
        return 40

    many(one, 1_000, tmp_path)


class Trained(Play):
    """Each request is logged as an impression; at the end they are joined and read as training examples."""

    def snapshot(self, rng: np.random.Generator) -> None:
        super().snapshot(rng)
        batch = self.model.logged[-1].batch
        ids = self.model.logged[-1].serial * 10 + np.arange(len(batch))
        shown = {"item": [[1, 2]] * len(batch), "brand": [["a", "b"]] * len(batch)}
        log = ImpressionLog(self.folder / "shown", self.store.schema, EXAMPLES)
        log.append(Impressions.of(EXAMPLES, ids, batch, candidates=shown, context={"city": ["x"] * len(batch)}))

    def train(self) -> None:
        schema, seen = self.store.schema, {}
        for logged in self.model.logged:
            seen |= {logged.serial * 10 + i: facts for i, facts in enumerate(logged.seen)}
        shown = ImpressionLog(self.folder / "shown", schema, EXAMPLES)
        bought, folder = OutcomeLog(self.folder / "bought"), self.folder / "examples"
        with ExampleTable.create(folder, event_schema=schema, example_schema=EXAMPLES, n_buckets=1) as table:
            join_logs(shown, bought, table, 10**6)
            for policy in ("skip", "shorten"):
                got = {}
                batches = loader(self.store, table, batch_rows=7, base_rows=4, block=2, threads=1, on_missing=policy)
                for batch in batches:
                    arrivals = batch.histories.to_jagged("arrival").to_arrow().to_pylist()
                    columns = {
                        c: [[exact(v) for v in row] for row in batch.histories.to_jagged(c.name).to_arrow().to_pylist()]
                        for c in schema.columns
                    }
                    for i, request in enumerate(batch.request_id.tolist()):
                        got[request] = arrivals[i], {c: rows[i] for c, rows in columns.items()}
                kept = {r: f for r, f in seen.items() if policy == "shorten" or not any(x.gone for x in f)}
                left = {r: [x for x in facts if not x.gone] for r, facts in kept.items()}
                want = {}
                for r, facts in left.items():
                    columns = {c: [shown_value(f.values, c) for f in facts] for c in schema.columns}
                    want[r] = [f.arrival for f in facts], columns
                assert got == want


@pytest.mark.parametrize("seed", range(2))
def test_requests_come_back_as_training_examples(seed: int, tmp_path: Path) -> None:
    play = Trained(seed, tmp_path)
    try:
        for step in [("append", 1), ("snapshot", 1), *program(seed, 30)]:
            if step[0] not in ("redact", "restore", "killed"):
                play.do(step)
        play.train()
    finally:
        play.close()
