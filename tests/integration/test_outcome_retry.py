"""Letters of an outcome log tried again: once the registry has the schema, or the fields are mended. Each is logged
once, wherever the retry is cut short, and labels what is joined then."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import fastavro
import numpy as np
import pytest
from click.testing import CliRunner

from thinrow.cli.main import cli
from thinrow.core.errors import InputError, StoreError
from thinrow.examples import ExampleTable, ImpressionLog, OutcomeLog, Outcomes, join_logs
from thinrow.examples.erase import erase_outcomes
from thinrow.online import OutcomeFields, OutcomeIngest, outcome_letters, retry_outcomes
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.files import FileSource
from thinrow.sources.kafka import KafkaOptions, KafkaSource
from thinrow.sources.places import make_decoder
from thinrow.sources.retry import RetryReport
from thinrow.testing.examples import event_schema, example_schema, random_impressions
from thinrow.testing.kafka import KafkaBroker
from thinrow.testing.registry import CLICK_RECORD, SchemaRegistry

FIELDS = OutcomeFields(outcome_id="id")


def body(k, **more):
    return {"request_id": k, "item": k % 5, "name": "click", "ts": 1_000 + k, "id": f"o-{k}", **more}


def take_in(log: OutcomeLog, folder: Path, bodies, fields=FIELDS):
    path = folder / f"{len(list(folder.glob('*.jsonl')))}.jsonl"
    path.write_text("".join((b if isinstance(b, str) else json.dumps(b)) + "\n" for b in bodies))
    return OutcomeIngest(log, FileSource("f", [path]), folder / "dead", fields).run()


def requests_of(log: OutcomeLog):
    return sorted(int(r) for part in log.scan() for r in part.request_id)


def left(log: OutcomeLog, folder: Path):
    return outcome_letters(log, folder / "dead").read()


def test_a_schema_and_an_impression_that_come_later(tmp_path):
    """A framed message whose schema the registry does not have yet, of a request that is not logged yet."""
    schemas = event_schema(), example_schema()
    asked = random_impressions(np.random.default_rng(3), 40, *schemas)
    items, at = asked.candidates["item"].to_arrow().to_pylist(), asked.snapshots.request_ts
    rows = [(int(r), some[0], int(t)) for r, some, t in zip(asked.request_id, items, at, strict=True) if some]
    log = OutcomeLog(tmp_path / "log")
    with KafkaBroker() as broker, SchemaRegistry() as registry:
        broker.create_topic("late", 1)
        for request, item, ts in rows:
            out = io.BytesIO()
            row = {"request_id": request, "item": item, "name": "click", "ts": ts, "id": f"o-{request}", "value": None}
            fastavro.schemaless_writer(out, fastavro.parse_schema(CLICK_RECORD), row)
            broker.produce("late", [(None, b"\0" + (1).to_bytes(4, "big") + out.getvalue())])
        options = KafkaOptions(broker.address, "late", partitions=(0,))
        source = KafkaSource("late", options, make_decoder({"format": "avro", "registry": registry.url}))
        report = OutcomeIngest(log, source, tmp_path / "dead", FIELDS).run()
        source.close()
        assert (report.outcomes, report.refused) == (0, len(rows))
        assert retry_outcomes(log, tmp_path / "dead", FIELDS) == RetryReport(0, 0, len(rows))
        registry.fails = 503
        with pytest.raises(StoreError, match="registry"):
            retry_outcomes(log, tmp_path / "dead", FIELDS)
        registry.fails = 0
        assert registry.add(json.dumps(CLICK_RECORD)) == 1
        assert retry_outcomes(log, tmp_path / "dead", FIELDS) == RetryReport(len(rows), 0, 0)
        assert retry_outcomes(log, tmp_path / "dead", FIELDS) == RetryReport(0, 0, 0)
    assert requests_of(log) == sorted(r for r, _, _ in rows)
    shown = ImpressionLog(tmp_path / "shown", *schemas)
    table = ExampleTable.create(tmp_path / "t", event_schema=schemas[0], example_schema=schemas[1])
    early = join_logs(shown, log, table, now_ms=0)
    assert (early.counts.unknown_request, early.pending_outcomes) == (0, len(rows))
    shown.append(asked)
    assert join_logs(shown, log, table, now_ms=10_000).counts.labelled == len(rows)
    table.close()


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_retry_that_is_cut_short_logs_nothing_twice(tmp_path, cut, with_ids):
    fields = FIELDS if with_ids else OutcomeFields()
    log = OutcomeLog(tmp_path / "log")
    renamed = [{("at" if name == "ts" else name): v for name, v in body(k).items()} for k in range(6)]
    take_in(log, tmp_path, [*map(body, range(10, 13)), *renamed, "junk"], fields)
    assert len(left(log, tmp_path)) == 7
    mended = OutcomeFields(ts="at", outcome_id=fields.outcome_id)
    put = log._objects.put_if_absent

    def killed(name, data):
        if cut == "after":
            put(name, data)
        raise StoreError("killed")

    log._objects.put_if_absent = killed
    with pytest.raises(StoreError, match="killed"):
        retry_outcomes(log, tmp_path / "dead", mended)
    # A new process.
    log = OutcomeLog(tmp_path / "log")
    expected = RetryReport(6, 0, 1) if cut == "before" else RetryReport(0, 0, 1)
    assert retry_outcomes(log, tmp_path / "dead", mended) == expected
    assert requests_of(log) == [*range(6), 10, 11, 12]
    assert [x.payload for x in left(log, tmp_path)] == [b"junk"]
    # What is refused later comes to those that are left.
    take_in(log, tmp_path, ["more junk"], fields)
    assert [x.payload for x in left(log, tmp_path)] == [b"junk", b"more junk"]
    assert retry_outcomes(log, tmp_path / "dead", mended) == RetryReport(0, 0, 2)


def test_an_outcome_that_came_by_another_way_is_a_duplicate(tmp_path):
    log = OutcomeLog(tmp_path / "log")
    take_in(log, tmp_path, [body(1, ts=None), body(2, ts=None), body(2, ts=None)])
    letters = outcome_letters(log, tmp_path / "dead")
    assert letters.count() == 3
    # The producer was mended and has sent one of them again, under its id.
    take_in(log, tmp_path, [body(1)])
    decoder = JsonDecoder()

    class WithTime:
        def decode(self, values, wanted):
            return decoder.decode([json.dumps({**json.loads(v), "ts": 5}).encode() for v in values], wanted)

    assert retry_outcomes(log, tmp_path / "dead", FIELDS, lambda how: WithTime()) == RetryReport(1, 2, 0)
    assert requests_of(log) == [1, 2]
    assert left(log, tmp_path) == []


def test_wrong_values_stay_with_the_reason_of_today(tmp_path):
    log = OutcomeLog(tmp_path / "log")
    take_in(log, tmp_path, [body(1, value=1 << 40), body(2, ts=1 << 50), body(3, name=None), body(4, id=None)])
    assert len(left(log, tmp_path)) == 3
    fields = OutcomeFields(name=None, outcome="buy", outcome_id="id")
    assert retry_outcomes(log, tmp_path / "dead", fields) == RetryReport(1, 0, 2)
    reasons = sorted(x.reason.partition(";")[0] for x in left(log, tmp_path))
    assert reasons == ["its value is beyond 2147483647, as much as a label holds", "time 'ts' is out of bounds"]
    assert retry_outcomes(log, tmp_path / "dead", fields, max_future_ms=None) == RetryReport(1, 0, 1)


def test_numbers_of_letters_outlive_pruning_and_erasure_and_a_renamed_folder_is_refused(tmp_path):
    log = OutcomeLog(tmp_path / "log")
    take_in(log, tmp_path, [body(1, value=1 << 40), body(2, name=None)])
    fields = OutcomeFields(name=None, outcome="buy", outcome_id="id")
    assert retry_outcomes(log, tmp_path / "dead", fields) == RetryReport(1, 0, 1)
    log.append(Outcomes.of("click", 7, 1, 2_000))
    erase_outcomes(log, np.arange(10))
    log.prune(log.numbers().stop)
    again = OutcomeLog(tmp_path / "log")
    assert [json.loads(x.payload)["request_id"] for x in left(again, tmp_path)] == [1]
    (tmp_path / "dead").rename(tmp_path / "gone")
    with pytest.raises(StoreError, match="give it the name that it had"):
        outcome_letters(again, tmp_path / "gone").read()


PROGRAM = """
import sys
from thinrow.examples import OutcomeLog
from thinrow.online import OutcomeFields, retry_outcomes
retry_outcomes(OutcomeLog(sys.argv[1] + "/log"), sys.argv[1] + "/dead", OutcomeFields(ts="at"))
"""


def test_two_retries_at_once_log_each_once(tmp_path):
    log = OutcomeLog(tmp_path / "log")
    renamed = [{("at" if name == "ts" else name): v for name, v in body(k).items()} for k in range(500)]
    take_in(log, tmp_path, renamed, OutcomeFields())
    runs = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)]) for _ in range(2)]
    assert [run.wait(120) for run in runs] == [0, 0]
    assert requests_of(OutcomeLog(tmp_path / "log")) == list(range(500))


def test_the_command_line(tmp_path):
    def run(*words, status=0):
        done = CliRunner().invoke(cli, [str(w) for w in words])
        if isinstance(done.exception, InputError):
            return str(done.exception)
        assert done.exit_code == status, done.output
        return done.output

    log, events = tmp_path / "log", tmp_path / "e.jsonl"
    events.write_text("".join(json.dumps(body(k)) + "\n" for k in range(3)) + '{"at": 5, "request_id": 9, "item": 1}\n')
    assert "3 outcomes logged, 0 known already, 1 refused" in run("outcomes", events, "--log", log)
    assert "0 outcomes logged, 0 known already, 1 letters left" in run("outcomes", "--retry", "--log", log)
    mended = ("--ts", "at", "--outcome", "click")
    assert "1 outcomes logged, 0 known already, 0 letters left" in run("outcomes", "--retry", "--log", log, *mended)
    assert requests_of(OutcomeLog(log)) == [0, 1, 2, 9]
    assert "0 letters" in run("sources", "letters", "--folder", f"{log}.dead")
    assert "one of the two" in run("outcomes", "--log", log)
    assert "one of the two" in run("outcomes", events, "--retry", "--log", log)
    assert "--registry goes with --retry" in run("outcomes", events, "--log", log, "--registry", "http://r")
    assert "name the log of these letters" in run("sources", "letters", "--folder", tmp_path / "nowhere.dead")
