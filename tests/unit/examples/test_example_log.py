"""The logs: what was appended is read back; a torn, damaged, missing or foreign file is named."""

from __future__ import annotations

import json
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core.errors import CorruptionError, InputError, NewerFormatError, ObjectNotFound, SchemaError
from thinrow.core.users import UserKind
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import Outcomes
from thinrow.schema.example_schema import ExampleSchema, FieldSpec
from thinrow.storage.objects import MemoryObjects
from thinrow.testing.examples import (
    event_schema,
    example_schema,
    random_impressions,
    random_outcomes,
    same_records,
)

ES, XS = event_schema(), example_schema()


def _log(path: Path, files: int = 3) -> ImpressionLog:
    log = ImpressionLog(path, ES, XS)
    rng = np.random.default_rng(0)
    for i in range(files):
        assert log.append(random_impressions(rng, 2, ES, XS, first_id=2 * i)) == i + 1
    return log


def _outcome(ts: int) -> Outcomes:
    return Outcomes.of("click", [ts], [1], [ts])


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 5), max_size=4), st.sampled_from(["int64", "string"]))
def test_what_was_appended_is_read_back(seed: int, sizes: list[int], kind: UserKind) -> None:
    rng, es = np.random.default_rng(seed), event_schema(kind)
    objects, other = MemoryObjects(), MemoryObjects()
    log, outcome_log = ImpressionLog(objects, es, XS), OutcomeLog(other)
    batches = [random_impressions(rng, n, es, XS) for n in sizes]
    outcomes = [random_outcomes(rng, n, 5) for n in sizes]
    for impressions, results in zip(batches, outcomes, strict=True):
        assert (log.append(impressions) is None) == (not len(impressions))
        outcome_log.append(results)
    reopened = ImpressionLog(objects, es, XS)
    kept = [b for b in batches if len(b)]
    assert all(same_records(a, b) for a, b in zip(kept, reopened.scan(), strict=True))
    assert all(same_records(a, b) for a, b in zip([o for o in outcomes if len(o)], outcome_log.scan(), strict=True))
    for number, batch in enumerate(kept, 1):
        assert np.array_equal(reopened.keys(number)["request_id"], batch.request_id)
        assert np.array_equal(reopened.keys(number)["ts"], batch.snapshots.request_ts)
    assert reopened.id == log.id


def test_writers_share_the_numbers(tmp_path: Path) -> None:
    def write(first: int) -> None:
        log = OutcomeLog(tmp_path)
        for i in range(15):
            log.append(_outcome(first + i))

    writers = [threading.Thread(target=write, args=(100 * w,)) for w in range(3)]
    for w in writers:
        w.start()
    for w in writers:
        w.join()
    log = OutcomeLog(tmp_path)
    assert log.numbers() == range(1, 46)
    found = sorted(int(o.ts[0]) for o in log.scan())
    assert found == sorted(100 * w + i for w in range(3) for i in range(15))


def test_a_cut_file_is_torn_at_any_length(tmp_path: Path) -> None:
    log = _log(tmp_path)
    path = tmp_path / "0000000000000002.log"
    whole = path.read_bytes()
    for length in [*range(100), *range(100, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptionError, match=r"0000000000000002\.log"):
            list(log.scan())
        with pytest.raises(CorruptionError, match=r"0000000000000002\.log"):
            log.keys(2)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptionError, match="torn"):
        log.read(2)


def test_a_flipped_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    log = _log(tmp_path, files=1)
    path = tmp_path / "0000000000000001.log"
    whole = path.read_bytes()
    for position in [*range(100), *range(100, len(whole), 31), len(whole) - 1]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with pytest.raises(CorruptionError, match=r"0000000000000001\.log"):
            log.keys(1), log.read(1)


def test_a_missing_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    log = _log(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CorruptionError, match=r"notes\.txt"):
        log.numbers()
    (tmp_path / "notes.txt").rename(tmp_path / "0000000000000004.log")
    with pytest.raises(CorruptionError, match=r"0000000000000004\.log"):
        list(log.scan())
    (tmp_path / "0000000000000004.log").unlink()
    (tmp_path / "0000000000000002.log").unlink()
    with pytest.raises(CorruptionError, match=r"0000000000000002\.log"):
        list(log.scan())
    with pytest.raises(ObjectNotFound, match=r"0000000000000009\.log"):
        log.read(9)


def test_unfinished_files_are_not_seen(tmp_path: Path) -> None:
    log = _log(tmp_path, files=1)
    (tmp_path / ".tmp-1234").write_bytes(b"half")
    assert log.numbers() == range(1, 2)


def test_newer_formats_are_refused(tmp_path: Path) -> None:
    log = _log(tmp_path, files=1)
    path = tmp_path / "0000000000000001.log"
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 8, 2)
    struct.pack_into("<I", data, 36, zlib.crc32(data[:36]))
    path.write_bytes(data)
    with pytest.raises(NewerFormatError, match="format 2, newer than 1"):
        log.read(1)
    head = json.loads((tmp_path / "log.json").read_text())
    (tmp_path / "log.json").write_text(json.dumps(head | {"format": 2}))
    with pytest.raises(NewerFormatError, match="format 2, newer than 1"):
        ImpressionLog(tmp_path, ES, XS)
    (tmp_path / "log.json").write_text("{")
    with pytest.raises(CorruptionError, match=r"log\.json"):
        ImpressionLog(tmp_path, ES, XS)


def test_kinds_and_schemas_are_not_mixed(tmp_path: Path) -> None:
    _log(tmp_path, files=1)
    with pytest.raises(InputError, match="a log of impressions, not of outcomes"):
        OutcomeLog(tmp_path)
    other = ExampleSchema((FieldSpec("age", "int8"),), XS.candidates, "item", XS.outcomes)
    with pytest.raises(SchemaError, match="ctx_age"):
        ImpressionLog(tmp_path, ES, other).read(1)


def test_a_refused_batch_leaves_no_file(tmp_path: Path) -> None:
    log = _log(tmp_path, files=1)
    bad = random_impressions(np.random.default_rng(0), 2, event_schema("string"), XS)
    with pytest.raises(InputError):
        log.append(bad)
    assert log.numbers() == range(1, 2)


def test_pruning_keeps_the_newest_so_that_numbers_go_on(tmp_path: Path) -> None:
    log = _log(tmp_path)
    assert log.prune(3) == 2
    assert log.prune(99) == 0
    assert log.numbers() == range(3, 4)
    reopened = ImpressionLog(tmp_path, ES, XS)
    assert reopened.append(random_impressions(np.random.default_rng(0), 1, ES, XS)) == 4
    assert [len(b) for b in reopened.scan(start=4)] == [1]
    assert reopened.append(random_impressions(np.random.default_rng(0), 1, ES, XS)) == 5
    assert log.prune(5) == 2
    # A writer whose last number was pruned by another goes on after the newest.
    assert log.append(random_impressions(np.random.default_rng(0), 1, ES, XS)) == 6
    assert log.numbers() == range(5, 7)
