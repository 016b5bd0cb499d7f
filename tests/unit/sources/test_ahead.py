"""Reading on a thread changes nothing but the time: what a store holds, its letters, and what a caller is told."""

import contextlib
import json
import threading
import time

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import StoreError
from thinrow.history.recent.tier import Advance
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.ahead import ReadAhead
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.ingest import Ingest, IngestOptions, set_positions
from thinrow.sources.source import Batch, Move, Origin, Refused, position, position_text
from thinrow.sources.wanted import wanted_of

ARROW = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64())])
SCHEMA = EventSchema.infer(ARROW, user="user", time="ts")


def value(i, poison=False):
    return b"{" if poison else json.dumps({"user": i % 3, "ts": 1_000 + i, "item": i, "more": i}).encode()


class ScriptedSource:
    """One partition of messages. ``script`` says what each read does: a number of messages, "again" (a group gives the
    partition anew), "fail", or "none"; afterwards reads are as large as they may be."""

    name, reads_ahead = "scripted", True

    def __init__(self, values, script=()):
        self.values, self.script = values, list(script)
        self.decoder, self.at, self.stored = JsonDecoder(), 0, None
        self.reads, self.told, self.inside = 0, [], threading.Lock()

    def _alone(self):
        assert self.inside.acquire(blocking=False), "two threads at once"

    def start(self, schema, positions):
        self._alone()
        self.wanted, self.positions = wanted_of(schema), positions
        self._begin()
        self.inside.release()

    def _begin(self):
        self.stored = self.positions().get("0")
        self.at = position(self.stored).get("offset", 0)

    def use(self, schema):
        self.wanted = wanted_of(schema)

    def read(self, max_events, timeout_s):
        self._alone()
        try:
            return self._read(max_events, timeout_s)
        finally:
            self.inside.release()

    def _read(self, max_events, timeout_s):
        step = self.script.pop(0) if self.script else max_events
        if step == "fail" and not self.ended():
            raise StoreError("the broker gave up")
        if step == "again":
            self._begin()
            return None
        if step in ("none", "fail") or self.at == len(self.values):
            time.sleep(timeout_s)
            return None
        self.reads += 1
        first = self.at
        some = self.values[first : first + min(step, max_events)]
        self.at += len(some)
        before, self.stored = self.stored, position_text(offset=self.at)
        done = self.decoder.decode(some, self.wanted)

        def origin(i):
            return Origin("0", position_text(offset=first + i), some[i])

        refused = [Refused(origin(i), why) for i, why in sorted(done.refused.items())]
        moves = {"0": Move(before, self.stored)}
        return Batch(done.table, moves, lambda row: origin(done.rows[row]), refused, 0, sum(map(len, some)))

    def acknowledge(self, batch):
        self._alone()
        self.told.append(position(batch.moves["0"].after)["offset"])
        self.inside.release()

    def ended(self):
        return self.at == len(self.values)

    def lag(self):
        return len(self.values) - self.at

    def close(self):
        pass


def items(store, column="item"):
    return store.read([0, 1, 2], 1 << 60).histories.to_jagged(column).values.tolist()


def no_thread():
    return not [t for t in threading.enumerate() if t.name.startswith("read ahead")]


@pytest.fixture
def store(tmp_path):
    with HistoryStore.create(tmp_path / "store", SCHEMA, 2, sync=False) as opened:
        yield opened


STEPS = st.lists(st.one_of(st.integers(1, 9), st.sampled_from(["again", "fail", "none", "other"])), max_size=12)


@settings(max_examples=25)
@given(st.lists(st.booleans(), max_size=40), STEPS)
def test_a_store_and_its_letters_are_as_without_a_thread(tmp_path_factory, poison, steps):
    values = [value(i, p) for i, p in enumerate(poison)]
    seen = []
    for read_ahead in (False, True):
        folder = tmp_path_factory.mktemp("s")
        with HistoryStore.create(folder / "store", SCHEMA, 2, sync=False) as store:
            source = ScriptedSource(values, [s for s in steps if s != "other"])
            options = IngestOptions(batch_events=5, linger_s=0.002, read_ahead=read_ahead)
            ingest = Ingest(store, source, options)
            append, rivals = store.append_checked, steps.count("other")

            def first(events, advances=(), append=append):
                nonlocal rivals
                if rivals and advances and advances[0].source == ScriptedSource.name:
                    # Another reader has taken this very batch in just before.
                    rivals -= 1
                    append(events, advances)
                return append(events, advances)

            store.append_checked = first
            for _ in range(steps.count("fail")):
                with contextlib.suppress(StoreError):
                    ingest.run()
            report = ingest.run()
            assert no_thread()
            assert report.lag == 0
            assert source.told == sorted(source.told)
            letters = [(x.where, x.payload, x.reason) for x in store.dead_letters.read()]
            users = [store.read([u], 1 << 60).histories.to_jagged("item").values.tolist() for u in range(3)]
            seen.append((users, letters, store.recent.positions(source.name)))
    assert seen[0] == seen[1]
    assert sorted(i for user in seen[1][0] for i in user) == [i for i, p in enumerate(poison) if not p]


def test_while_one_batch_is_appended_the_next_is_read_and_no_other(store):
    source = ScriptedSource([value(i) for i in range(60)])
    append, ahead = store.append_checked, []

    def slow(events, advances=()):
        end = time.monotonic() + 60
        while source.reads < min(len(ahead) + 2, 6) and time.monotonic() < end:
            time.sleep(0.001)
        # Long enough for one read too many.
        time.sleep(0.05)
        ahead.append(source.reads - len(ahead))
        return append(events, advances)

    store.append_checked = slow
    assert Ingest(store, source, IngestOptions(batch_events=10)).run().events == 60
    # The batch in hand, and one more until all is read.
    assert ahead == [2, 2, 2, 2, 2, 1]
    assert source.told == [10, 20, 30, 40, 50, 60]


def test_what_was_read_before_an_error_is_stored_and_the_error_is_the_callers(store):
    source = ScriptedSource([value(i) for i in range(30)], [10, 10, "fail"])
    ingest = Ingest(store, source, IngestOptions(batch_events=10))
    with pytest.raises(StoreError, match="gave up"):
        ingest.run()
    assert sorted(items(store)) == list(range(20))
    assert no_thread()
    assert ingest.run().events == 30
    assert sorted(items(store)) == list(range(30))


def test_an_error_of_the_store_ends_the_thread_and_loses_nothing(store):
    source = ScriptedSource([value(i) for i in range(30)])
    ingest = Ingest(store, source, IngestOptions(batch_events=10))
    append = store.append_checked

    def full(events, advances=()):
        raise StoreError("no space left on device")

    store.append_checked = full
    with pytest.raises(StoreError, match="no space left"):
        ingest.run()
    assert no_thread()
    assert ingest._source.lag() == 30 - 10, "what waited is not read; what was in hand is told by the position"
    store.append_checked = append
    assert ingest.run().events == 30
    assert sorted(items(store)) == list(range(30))


def test_a_stop_comes_soon_and_what_waited_comes_again(store):
    source, stop = ScriptedSource([value(i) for i in range(1_000)]), threading.Event()
    ingest = Ingest(store, source, IngestOptions(batch_events=10), progress=lambda _: stop.set())
    began = time.monotonic()
    report = ingest.run(follow=True, stop=stop)
    assert time.monotonic() - began < 60
    assert (report.events, report.lag, no_thread()) == (10, 990, True)
    assert Ingest(store, source).run().events == 990
    assert sorted(items(store)) == list(range(1_000))


def test_a_source_that_begins_again_waits_for_what_is_on_its_way(store):
    source = ScriptedSource([value(i) for i in range(30)], [10, "again"])
    append = store.append_checked

    def slow(events, advances=()):
        time.sleep(0.1)
        return append(events, advances)

    store.append_checked = slow
    report = Ingest(store, source, IngestOptions(batch_events=10)).run()
    assert (report.events, report.conflicts) == (30, 0)


def test_columns_of_a_newer_schema_are_read_from_the_change_on(store, monkeypatch):
    monkeypatch.setattr("thinrow.sources.ingest._SCHEMA_S", 0.0)
    source = ScriptedSource([value(i) for i in range(40)])
    append, calls = store.append_checked, []

    def evolve(events, advances=()):
        done = append(events, advances)
        calls.append(len(events))
        if len(calls) == 2:
            store.evolve(add={"more": {"trait": "id", "dtype": "int64", "group": "main", "nullable": True}})
        return done

    store.append_checked = evolve
    assert Ingest(store, source, IngestOptions(batch_events=10)).run().events == 40
    found = store.read([0, 1, 2], 1 << 60).histories
    pairs = zip(
        found.to_jagged("item").values.tolist(), found.to_jagged("more").to_arrow().flatten().to_pylist(), strict=True
    )
    assert dict(pairs) == {i: i if i >= 20 else None for i in range(40)}


def test_positions_set_aside_make_it_begin_again(store):
    source = ScriptedSource([value(i) for i in range(20)])
    ahead = ReadAhead(source)
    ahead.start(SCHEMA, lambda: store.recent.positions("scripted"))
    assert ahead.read(10, 1.0).table.num_rows == 10
    set_positions(store, [Advance("scripted", "0", None, position_text(offset=15))])
    ahead.start(SCHEMA, lambda: store.recent.positions("scripted"))
    assert ahead.read(10, 1.0).table["item"].to_pylist() == list(range(15, 20))
    assert ahead.read(10, 0.01) is None
    assert ahead.ended()
    ahead.close()
    assert no_thread()
