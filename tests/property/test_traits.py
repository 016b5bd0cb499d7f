"""Columns of every trait, nullable or not, through append, snapshot, log, compaction and reconstruction."""

from __future__ import annotations

import itertools
import resource
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinrow.core.errors import CorruptionError, VersionMismatch
from thinrow.examples.records import Impressions
from thinrow.history import buckets
from thinrow.history.archive import reader
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.layout import key_columns, stored_columns
from thinrow.history.archive.lookup import look_up
from thinrow.history.archive.reader import ReadStats, RowReader
from thinrow.history.archive.stepwise import StepReader
from thinrow.history.archive.verify import verify_generation
from thinrow.history.compact import compact
from thinrow.history.intake import check_table
from thinrow.history.recent.memory import MemoryRecent
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import take_snapshot
from thinrow.jagged import Column
from thinrow.jagged.column import concat_columns
from thinrow.kernels import use
from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema, Projection
from thinrow.storage import codecs
from thinrow.storage.objects import MemoryObjects
from thinrow.testing.columns import STYLES, TRAITS, bits, spec_of, styled_column
from thinrow.testing.fuzz.layout import close, mend, read_layout

_QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": 1})
USERS = np.arange(3)


@st.composite
def columns(draw: st.DrawFn) -> list[tuple[ColumnSpec, str]]:
    """Columns of a schema, each with the style of its values."""
    kinds = draw(st.lists(st.sampled_from(TRAITS), min_size=1, max_size=5))
    return [
        (spec_of(i, trait, dtype, draw(st.booleans())), draw(st.sampled_from(STYLES)))
        for i, (trait, dtype) in enumerate(kinds, 1)
    ]


class World:
    """A store in memory, and every event in the order of its arrival."""

    def __init__(self, chosen: list[tuple[ColumnSpec, str]], seed: int) -> None:
        self.chosen, self.rng = chosen, np.random.default_rng(seed)
        self.schema = EventSchema(tuple(spec for spec, _ in chosen))
        self.archive = Archive.create(MemoryObjects(), self.schema, 2)
        self.recent = MemoryRecent(self.schema)
        self.user, self.ts = np.empty(0, np.int64), np.empty(0, np.int64)
        self.columns: dict[str, Column] = {}
        self.generations: list[Generation] = [self.archive.pin()]
        self.logged: list[tuple[int, RequestBatch, list[list[int]]]] = []

    def append(self, n: int) -> None:
        user, ts = self.rng.choice(USERS, n, p=[0.8, 0.15, 0.05]), self.rng.integers(0, 1_000, n)
        made = {spec.name: styled_column(self.rng, n, spec, style) for spec, style in self.chosen}
        table = pa.table({"user_id": user, "event_ts": ts, **{name: c.to_arrow() for name, c in made.items()}})
        events = check_table(table, self.schema)
        self.recent.append(events.users, events.event_ts, events.columns)
        self.user, self.ts = np.append(self.user, user), np.append(self.ts, ts)
        for name, column in made.items():
            assert bits(events.columns[name]) == bits(column)
            self.columns[name] = concat_columns([self.columns[name], column]) if self.columns.get(name) else column

    def request(self) -> None:
        times = self.rng.integers(0, 1_200, len(USERS))
        seen = take_snapshot(self.archive.pin, self.recent, USERS, times)
        shown = Impressions.of(EXAMPLES, USERS, seen, candidates={"item": [[1]] * len(USERS)})
        batch = Impressions.from_arrow(shown.to_arrow(self.schema, EXAMPLES), self.schema, EXAMPLES).snapshots
        rows = [np.flatnonzero((self.user == u) & (self.ts < t)) for u, t in zip(USERS, times, strict=True)]
        self.logged.append((len(self.generations) - 1, batch, [r[np.argsort(self.ts[r], kind="stable")] for r in rows]))

    def compact(self, full: bool) -> None:
        compact(self.archive, self.recent, full=full)
        if self.archive.pin().number != self.generations[-1].number:
            self.generations.append(self.archive.pin())

    def check(self) -> None:
        for at, generation in enumerate(self.generations):
            assert verify_generation(generation) == []
            since = [(batch, rows) for pinned, batch, rows in self.logged if pinned <= at]
            if not since:
                continue
            batch = RequestBatch.concat([b for b, _ in since])
            kinds = {spec.name: spec.dtype for spec, _ in self.chosen if not (spec.ragged or spec.size)}
            codes = tuple(n for n, dtype in kinds.items() if not dtype.startswith("float"))
            for newest, coded in ((None, ()), (None, codes), (1, ()), (7, codes)):
                rows = [r[-newest:] if newest else r for _, part in since for r in part]
                histories = reconstruct(generation, batch, Projection(max_len=newest, codes=coded)).histories
                positions, offsets = histories.positions()
                assert np.diff(offsets).tolist() == [len(r) for r in rows]
                flat = np.concatenate([np.empty(0, np.int64), *rows])
                for name, column in self.columns.items():
                    assert name not in coded or histories.events.columns[name].dictionary is not None
                    found = bits(histories.events.columns[name].take(positions))
                    assert found == bits(column.take(flat)), self.schema.column(name)

    def check_readers(self) -> None:
        """One call for all columns gives what reading them step by step gives, and counts the same bytes."""
        for generation in self.generations[1:]:
            pieces = look_up(generation, generation.users())
            n = pieces.field("n_rows").astype(np.int64)
            piece = np.flatnonzero(self.rng.random(len(n)) < 0.8)
            start = self.rng.integers(0, n[piece])
            stop = self.rng.integers(start, n[piece] + 1)
            specs = stored_columns(self.schema)
            stats, expected = ReadStats(), ReadStats()
            one = RowReader(generation, pieces, piece, start, stop, stats)
            found = one.columns(specs)
            counted = stats.bytes_read, {s.id: stats.column_bytes.get(s.id, 0) for s in specs if not s.nullable}
            steps = StepReader(generation, pieces, piece, start, stop, expected)
            for spec, column in zip(specs, found, strict=True):
                wanted = steps.column(spec)
                assert bits(column) == bits(wanted), spec
                assert (column.valid is None) == (wanted.valid is None)
                assert one.total == 0 or spec.ragged or spec.is_bytes or (one._at_once((spec,), None) or [None])[0]
            if not any(s.ragged for s in specs):
                assert counted[0] == expected.bytes_read
                assert counted[1] == {i: expected.column_bytes.get(i, 0) for i in counted[1]}
            before = stats.bytes_read
            one.columns(key_columns())
            assert stats.bytes_read == before, "the chunk of keys is counted once"


def play(chosen: list[tuple[ColumnSpec, str]], seed: int, steps: list[str], most: int, stripe_rows: int) -> World:
    world = World(chosen, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "STRIPE_ROWS", stripe_rows)
        patch.setattr(buckets, "PART_BYTES", 0)
        for step in [*steps, "append", "request", "compact", "full"]:
            if step == "append":
                world.append(int(world.rng.integers(1, most)))
            elif step == "request":
                world.request()
            else:
                world.compact(step == "full")
    return world


_STEPS = st.lists(st.sampled_from(["append", "request", "compact", "full"]), max_size=4)


@settings(max_examples=20, suppress_health_check=_QUIET)
@given(columns(), st.integers(0, 2**32), _STEPS, st.sampled_from([12, 700]), st.sampled_from([3, 512]))
def test_every_trait_comes_back_through_the_store(chosen: Any, seed: int, steps: Any, most: int, rows: int) -> None:
    world = play(chosen, seed, steps, most, rows)
    world.check()
    world.check_readers()


@settings(max_examples=8, suppress_health_check=_QUIET)
@given(columns(), st.integers(0, 2**32))
def test_reference_kernels_agree(chosen: Any, seed: int) -> None:
    with use("reference"):
        world = play(chosen, seed, [], 20, 3)
        world.check()
        world.check_readers()


@pytest.mark.slow
@settings(max_examples=1_500, suppress_health_check=_QUIET)
@given(columns(), st.integers(0, 2**32), _STEPS, st.sampled_from([12, 700]), st.sampled_from([1, 3, 16, 512]))
def test_every_trait_comes_back_through_the_store_long(
    chosen: Any, seed: int, steps: Any, most: int, rows: int
) -> None:
    play(chosen, seed, steps, most, rows).check()


def test_each_trait_in_every_style() -> None:
    for seed, (style, nullable) in enumerate(itertools.product(STYLES, (False, True))):
        every = [(spec_of(i, trait, dtype, nullable), style) for i, (trait, dtype) in enumerate(TRAITS, 1)]
        world = play(every, seed, [], 60, 16)
        world.check()
        world.check_readers()


def test_patched_columns_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes of many rows whose values have tails: lanes, patches and marks, any rows, as the steps read them."""
    real, met = codecs.kernel, set[tuple[int, int]]()

    def recorded(name: str) -> Any:
        def opened(*arguments: Any) -> Any:
            found = real(name)(*arguments)
            met.update(zip(found[2].ravel().tolist(), found[3].ravel().tolist(), strict=True))
            return found

        return opened if name == "open_chunks" else real(name)

    monkeypatch.setattr(codecs, "kernel", recorded)
    every = [(spec_of(i, trait, dtype, False), "tails") for i, (trait, dtype) in enumerate(TRAITS, 1)]
    for seed in range(3):
        world = play(every, seed, ["append"] * 3, 2_500, 512)
        for _ in range(5):
            world.check_readers()
    assert {(codec, 255) for codec in (2, 3, 11, 13)} <= met, "all codecs of the direct way, with patches"


@pytest.mark.parametrize("style", STYLES)
def test_blocks_that_lie_under_right_crcs(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a writer had sealed nonsense: an error of ours or values, never a crash, a hang or memory without bound."""
    every = [(spec_of(i, trait, dtype, i % 3 > 0), style) for i, (trait, dtype) in enumerate(TRAITS, 1)]
    world = play(every, 3, [], 1_200, 512)
    batch, generation = world.logged[-1][1], world.generations[-1]
    real, objects, refused = reader.kernel, generation.objects, []

    def recorded(name: str) -> Any:
        def read(*arguments: Any) -> Any:
            refused.append(real(name)(*arguments) >= 0)
            return 0 if refused[-1] else -1

        return read if name == "read_stripes" else real(name)

    monkeypatch.setattr(reader, "kernel", recorded)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng, outcomes = np.random.default_rng(2), []
    codes = tuple(s.name for s, _ in every if s.dtype.startswith("int") and not (s.ragged or s.size))
    for _, info in generation.segments:
        sound = objects.get(info.name)
        layout = read_layout(sound)
        blocks = [b for b in layout.blocks if b.stop > b.start]
        for _ in range(40):
            block, body = blocks[rng.integers(len(blocks))], bytearray(sound[: layout.body])
            dirty = [int(at) for at in rng.integers(block.start, block.stop, 3)]
            for at in dirty:
                body[at] = rng.integers(256)
            mend(body, layout, [(at, at + 1) for at in dirty], set())
            copy = MemoryObjects()
            for name in objects.list(""):
                copy.put(name, close(body, deepcopy(layout.meta)) if name == info.name else objects.get(name))
            try:
                reconstruct(Archive(copy).pin(), batch)
                outcomes.append(True)
            except (CorruptionError, VersionMismatch):
                outcomes.append(False)
            with suppress(CorruptionError, VersionMismatch):
                reconstruct(Archive(copy).pin(), batch, Projection(codes=codes))
    assert len(set(outcomes)) == 2
    assert False in refused
    # Constants that lie are constants.
    assert style == "constant" or True in refused, "the compiled read meets damaged blocks"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000, "KiB more than before"
