"""Outcomes from a real broker and from files into an outcome log: each once, whatever is killed; then the join.

Run as a script, this file is a process that reads the topic ``clicks`` into a log until it is killed.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.core.errors import InputError, PositionConflict
from thinrow.examples import ExampleTable, ImpressionLog, OutcomeLog, Outcomes, heartbeat, join_logs, join_stream
from thinrow.examples.erase import erase_outcomes
from thinrow.history.recent.tier import Advance
from thinrow.online import OutcomeFields, OutcomeIngest, OutcomeOptions, outcome_letters
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.kafka import KafkaOptions, KafkaSource
from thinrow.sources.places import make_decoder, open_source
from thinrow.testing.examples import event_schema, example_schema, random_impressions
from thinrow.testing.forked import Commands
from thinrow.testing.kafka import KafkaBroker
from thinrow.testing.registry import CLICK_RECORD

FIELDS = OutcomeFields(outcome_id="id")


@pytest.fixture(scope="module")
def broker():
    with KafkaBroker() as running:
        yield running


def message(k: int) -> tuple[bytes, bytes]:
    """Outcome k of the stream."""
    body = {"request_id": k // 3, "item": k % 5, "name": ("click", "buy")[k % 2], "ts": 1_000 + k, "id": f"o-{k}"}
    return str(k // 3).encode(), json.dumps(body if k % 4 else {**body, "value": k}).encode()


def rows_of(log: OutcomeLog) -> list[tuple[object, ...]]:
    found = Outcomes.concat(list(log.scan()))
    columns = found.request_id, found.item, found.name.to_arrow(), found.ts, found.value
    return sorted(zip(*(c.tolist() for c in columns), strict=True))


def expected(n: int) -> list[tuple[object, ...]]:
    bodies = [json.loads(message(k)[1]) for k in range(n)]
    return sorted((b["request_id"], b["item"], b["name"], b["ts"], b.get("value", 1)) for b in bodies)


def topic(broker: KafkaBroker, name: str, n: int = 0, partitions: int = 2) -> None:
    broker.create_topic(name, partitions)
    if n:
        broker.produce(name, [message(k) for k in range(n)])


def source_of(broker: KafkaBroker, name: str, decoder=None) -> KafkaSource:
    return KafkaSource(name, KafkaOptions(broker.address, name, partitions=(0, 1)), decoder or JsonDecoder())


def letters_of(log: OutcomeLog, folder: Path):
    return outcome_letters(log, folder / "dead").read()


def take_in(log, source, folder, fields=FIELDS, **options):
    try:
        ingest = OutcomeIngest(log, source, folder / "dead", fields, OutcomeOptions(**options))
        return ingest.run()
    finally:
        source.close()


def test_outcomes_of_a_topic_are_logged_once(broker, tmp_path):
    topic(broker, "once", 900)
    log = OutcomeLog(tmp_path / "log")
    report = take_in(log, source_of(broker, "once"), tmp_path, batch_events=70, roll_events=200)
    assert (report.outcomes, report.duplicates, report.refused) == (900, 0, 0)
    assert 2 <= report.files == len(log.numbers()) <= 10, "a file for many reads"
    assert rows_of(log) == expected(900)
    assert take_in(log, source_of(broker, "once"), tmp_path).files == 0
    # The producer sends again what it has sent, and some more.
    broker.produce("once", [message(k) for k in range(800, 1_000)])
    report = take_in(log, source_of(broker, "once"), tmp_path)
    assert (report.outcomes, report.duplicates) == (100, 100)
    assert rows_of(log) == expected(1_000)
    # Another name of the source begins at the first message: ids tell.
    again = KafkaSource("other", KafkaOptions(broker.address, "once", partitions=(0, 1)), JsonDecoder())
    report = take_in(log, again, tmp_path)
    assert (report.outcomes, report.duplicates) == (0, 1_100)
    assert rows_of(log) == expected(1_000)


def test_poison_becomes_letters_and_the_rest_flows_on(broker, tmp_path):
    topic(broker, "poison")
    good = json.loads(message(1)[1])
    wrong = (
        {"request_id": None},
        {"ts": -1},
        {"ts": 1 << 60},
        {"name": None},
        {"value": 1 << 40},
        {"request_id": -(1 << 63)},
    )
    bad = [b"", b"{", b"\xff\x00", *(json.dumps({**good, "id": f"x{i}", **w}).encode() for i, w in enumerate(wrong))]
    sent = [message(k) for k in range(60)]
    broker.produce("poison", [*sent[:30], *((b"k", b) for b in bad), (b"1", None), *sent[30:]])
    log = OutcomeLog(tmp_path / "log")
    report = take_in(log, source_of(broker, "poison"), tmp_path)
    assert (report.outcomes, report.refused, report.skipped) == (60, len(bad), 1)
    assert rows_of(log) == expected(60)
    letters = letters_of(log, tmp_path)
    assert sorted(x.payload for x in letters) == sorted(bad)
    # Nothing but poison moves the position too.
    broker.produce("poison", [(b"k", b"{")])
    assert take_in(log, source_of(broker, "poison"), tmp_path).refused == 1
    assert take_in(log, source_of(broker, "poison"), tmp_path).files == 0


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_killed_reader_loses_and_doubles_nothing_and_the_labels_are_right(tmp_path, rounds):
    chance = random.Random(rounds)
    schemas = event_schema(), example_schema()
    shown = ImpressionLog(tmp_path / "shown", *schemas)
    asked = random_impressions(np.random.default_rng(3), 400, *schemas)
    shown.append(asked)
    truth, bodies = OutcomeLog(tmp_path / "truth"), []
    for i, (request, items, at) in enumerate(
        zip(asked.request_id, asked.candidates["item"].to_arrow().to_pylist(), asked.snapshots.request_ts, strict=True)
    ):
        for j, item in enumerate(items[:3]):
            body = {"request_id": int(request), "item": item, "name": ("click", "buy")[j % 2], "ts": int(at) + i % 60}
            bodies.append({**body, "id": f"{i}/{j}"})
    for b in bodies:
        truth.append(Outcomes.of(b["name"], b["request_id"], b["item"], b["ts"]))
    log = OutcomeLog(tmp_path / "log")
    with KafkaBroker() as broker:
        topic(broker, "clicks")
        done = 0
        for _ in range(rounds):
            reader = subprocess.Popen([sys.executable, __file__, broker.address, str(tmp_path)])
            step = len(bodies) // rounds + 1
            some = bodies[done : done + step]
            done += len(some)
            # Producers send at least once.
            some += [b for b in bodies[:done] if chance.random() < 0.1]
            for part in range(0, len(some), 40):
                values = [(str(b["request_id"]).encode(), json.dumps(b).encode()) for b in some[part : part + 40]]
                broker.produce("clicks", values)
                time.sleep(chance.random() * 0.1)
            before = len(log.numbers())
            end = time.monotonic() + 120
            while len(log.numbers()) == before and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(chance.random() * 0.2)
            reader.send_signal(signal.SIGKILL)
            reader.wait()
        take_in(log, source_of(broker, "clicks"), tmp_path)
    names = [i for part in log.scan() if part.outcome_id is not None for i in part.outcome_id.to_arrow().tolist()]
    assert sorted(names) == sorted(b["id"] for b in bodies), "nothing lost, nothing doubled"
    assert rows_of(log) == rows_of(truth)
    tables = []
    for name, outcomes in (("a", log), ("b", truth)):
        table = ExampleTable.create(tmp_path / name, event_schema=schemas[0], example_schema=schemas[1])
        report = join_logs(shown, outcomes, table, now_ms=10_000)
        assert report.counts.labelled > 100
        rows = pa.concat_tables([table.scan_bucket(b) for b in table.buckets()]).sort_by("request_id")
        tables.append(rows.select(["request_id", "label_click", "label_buy"]).to_pylist())
        table.close()
    assert tables[0] == tables[1]


def test_two_readers_of_one_topic_are_told_apart(broker, tmp_path):
    topic(broker, "two", 300)
    log = OutcomeLog(tmp_path / "log")
    first, second = (source_of(broker, "two") for _ in range(2))
    one = OutcomeIngest(log, first, tmp_path / "dead", OutcomeFields())
    real, done = first.read, []

    def read(n, timeout_s):
        batch = real(n, timeout_s)
        if batch is not None and not done:
            # Between its read and its append another process is first.
            done.append(take_in(OutcomeLog(tmp_path / "log"), second, tmp_path, OutcomeFields()))
        return batch

    first.read = read
    report = one.run()
    first.close()
    assert (done[0].outcomes, report.outcomes, report.conflicts) == (300, 0, 1)
    assert rows_of(log) == expected(300)


def test_what_is_held_when_a_group_gives_partitions_anew_is_not_logged_twice(broker, tmp_path):
    """Without ids: the client begins at the stored positions while what it read is in no file yet."""
    topic(broker, "anew", 200)
    log, source = OutcomeLog(tmp_path / "log"), source_of(broker, "anew")
    ingest = OutcomeIngest(log, source, tmp_path / "dead", OutcomeFields(), OutcomeOptions(20, roll_s=600))
    real, reads = source.read, []

    def read(n, timeout_s):
        batch = real(n, timeout_s)
        reads.append(batch)
        if sum(b is not None for b in reads) == 4:
            source._assign(source._consumer.assignment())
        return batch

    source.read = read
    report = ingest.run()
    source.close()
    assert (report.outcomes, report.files) == (200, 1)
    assert report.conflicts == 1
    assert rows_of(log) == expected(200)


def test_positions_outlive_heartbeats_pruning_erasure_and_other_writers(broker, tmp_path):
    topic(broker, "carried", 100)
    log = OutcomeLog(tmp_path / "log")
    take_in(log, source_of(broker, "carried"), tmp_path)
    held = log.positions("carried")
    assert set(held) == {"0", "1"}
    OutcomeLog(tmp_path / "log").append(heartbeat(5_000))
    log.append(Outcomes.of("click", 7, 1, 2_000))
    erase_outcomes(log, np.arange(10))
    assert log.prune(log.numbers().stop) > 0
    assert OutcomeLog(tmp_path / "log").positions("carried") == log.positions("carried") == held
    assert log.positions("other") == {}
    assert take_in(log, source_of(broker, "carried"), tmp_path).outcomes == 0
    with pytest.raises(PositionConflict, match="another reader was first"):
        log.append(Outcomes.empty(), [Advance("carried", "0", None, "{}")])
    n = log.numbers().stop
    assert log.append(Outcomes.empty(), [Advance("other", "0", None, "1")]) == n
    assert log.positions("other") == {"0": "1"}
    assert log.positions("carried") == held


def test_outcomes_without_an_id_among_those_that_have_one_are_all_logged(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [{**json.loads(message(k)[1]), "id": None if k % 2 else "x"} for k in range(9)]
    path.write_text("".join(json.dumps({**row, "request_id": 1}) + "\n" for row in rows))
    log = OutcomeLog(tmp_path / "log")
    report = take_in(log, open_source([str(path)]), tmp_path)
    assert (report.outcomes, report.duplicates) == (5, 4), "the one that is named, and each that is not"
    assert take_in(log, open_source([str(path)], "again"), tmp_path).outcomes == 4


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_outcomes_of_files(tmp_path, kind):
    folder = tmp_path / "in"
    folder.mkdir()
    log = OutcomeLog(tmp_path / "log")
    bodies = [json.loads(message(k)[1]) for k in range(200)]

    def write(name: str, some) -> None:
        if kind == "jsonl":
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(b) + "\n" for b in some))
        else:
            pq.write_table(pa.Table.from_pylist([{"value": None, **b} for b in some]), folder / f"{name}.parquet")

    write("a", bodies[:120])
    assert take_in(log, open_source([str(folder)]), tmp_path).outcomes == 120
    write("b", bodies[100:])
    report = take_in(log, open_source([str(folder)]), tmp_path)
    assert (report.outcomes, report.duplicates) == (80, 20)
    assert rows_of(log) == expected(200)


def test_fields_by_other_names_and_one_outcome_for_all(broker, tmp_path):
    broker.create_topic("named", 2)
    values = [{"req": k, "sku": 2, "at": "2020-01-01T00:00:01Z", "n": k, "no": k % 10} for k in range(20)]
    broker.produce("named", [(None, json.dumps(v).encode()) for v in values])
    log = OutcomeLog(tmp_path / "log")
    fields = OutcomeFields("req", "sku", "at", None, "buy", "n", "no", integer_ids=True)
    assert take_in(log, source_of(broker, "named"), tmp_path, fields).outcomes == 20
    assert rows_of(log) == [(k, 2, "buy", 1_577_836_801_000, k) for k in range(20)]
    with pytest.raises(InputError, match="give the field of names, or one outcome"):
        OutcomeFields(name=None)


def test_avro_messages(broker, tmp_path):
    fastavro = pytest.importorskip("fastavro")
    import io

    broker.create_topic("avro", 2)
    sent = []
    for k in range(50):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(CLICK_RECORD), json.loads(message(k)[1]))
        sent.append((None, out.getvalue()))
    broker.produce("avro", [*sent, (None, b"\x01")])
    log = OutcomeLog(tmp_path / "log")
    decoder = make_decoder({"format": "avro", "schema": json.dumps(CLICK_RECORD)})
    report = take_in(log, source_of(broker, "avro", decoder), tmp_path)
    assert (report.outcomes, report.refused) == (50, 1)
    assert rows_of(log) == expected(50)


def test_a_stream_join_of_a_topic_is_that_of_the_log(broker, tmp_path):
    """Positions in the log's files, and files of no outcome, are nothing to the join."""
    schemas = event_schema(), example_schema()
    shown, log = ImpressionLog(tmp_path / "shown", *schemas), OutcomeLog(tmp_path / "log")
    shown.append(random_impressions(np.random.default_rng(3), 50, *schemas))
    topic(broker, "joined", 200)
    broker.produce("joined", [(None, b"{")])
    take_in(log, source_of(broker, "joined"), tmp_path, batch_events=20, roll_events=20)
    log.append(heartbeat(100_000))
    table = ExampleTable.create(tmp_path / "t", event_schema=schemas[0], example_schema=schemas[1])
    report = join_stream(shown, log, table, lateness_ms=0)
    assert (report.examples, report.pending) == (50, 0)
    table.close()


def test_the_command_line(broker, tmp_path):
    def run(*words, status=0):
        done = Commands.shared().run(*words)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    topic(broker, "shell", 40)
    broker.produce("shell", [(None, b"{")])
    log, place = str(tmp_path / "log"), f"kafka://{broker.address}/shell?partitions=0,1"
    said = run("outcomes", place, "--log", log, "--outcome-id", "id")
    assert "40 outcomes logged, 0 known already, 1 refused" in said
    assert "1 letters" in run("sources", "letters", "--folder", f"{log}.dead")
    assert "0 outcomes logged, 0 known already, 0 refused" in run("outcomes", place, "--log", log, "--outcome-id", "id")
    assert "name one: --store S, or --folder F" in run("sources", "letters", status=1)
    assert rows_of(OutcomeLog(log)) == expected(40)


if __name__ == "__main__":
    options = KafkaOptions(sys.argv[1], "clicks", partitions=(0, 1))
    into = OutcomeLog(Path(sys.argv[2]) / "log")
    letters = Path(sys.argv[2]) / "dead"
    roll = OutcomeOptions(batch_events=30, linger_s=0.01, roll_events=60, roll_s=0.05)
    OutcomeIngest(into, KafkaSource("clicks", options, JsonDecoder()), letters, FIELDS, roll).run(follow=True)
