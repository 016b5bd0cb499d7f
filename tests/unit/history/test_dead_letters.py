"""Dead letters: whole after a crash, bounded, and gone with the users that are erased."""

import base64
import multiprocessing
from dataclasses import replace

import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError, StoreError
from thinrow.history.dead_letters import MAX_PAYLOAD_BYTES, DeadLetters, Letter
from thinrow.history.erase import EventsOf, Retention
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema


def letter(i, user=None, **more):
    return Letter(
        "s", "0", f'{{"offset": {i}}}', "why", b"\x00payload %d" % i, b"k", {"format": "json"}, user, i, **more
    )


@pytest.fixture
def letters(tmp_path):
    return DeadLetters(tmp_path / "dead", lambda: 0)


def test_letters_come_back_once_and_in_order(letters):
    assert letters.read() == []
    letters.add([letter(1), letter(2, 7)])
    letters.add([letter(2, 7), letter(3, "é")])
    assert letters.read() == [letter(1), letter(2, 7), letter(3, "é")]
    assert letters.count() == 3


def test_a_large_payload_is_left_out(letters):
    most = b"x" * MAX_PAYLOAD_BYTES
    letters.add([replace(letter(1), payload=most), replace(letter(2), payload=most + b"x")])
    assert letters.read() == [replace(letter(1), payload=most), replace(letter(2), payload=None)]


@pytest.mark.parametrize("cut", [1, 10, 50])
def test_what_a_killed_writer_began_is_no_letter(letters, tmp_path, cut):
    letters.add([letter(1), letter(2)])
    path = tmp_path / "dead" / "letters-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert letters.read() == [letter(1)]
    letters.add([letter(3)])
    assert letters.read() == [letter(1), letter(3)]


def test_damage_is_told_and_goes_with_an_erasure(letters, tmp_path):
    letters.add([letter(1, 7), letter(2, 8)])
    path = tmp_path / "dead" / "letters-00000.jsonl"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptionError):
        letters.read()
    assert letters.erase(lambda _: False) == 1
    assert letters.read() == [letter(2, 8)]


def test_letters_are_bounded_and_nothing_of_what_is_too_much_is_written(tmp_path):
    small = DeadLetters(tmp_path / "dead", lambda: 0, max_bytes=600)
    small.add([letter(1)])
    with pytest.raises(StoreError, match="at most 600"):
        small.add([letter(i) for i in range(10)])
    assert small.read() == [letter(1)]


def _write(folder, process):
    letters = DeadLetters(folder, lambda: 0)
    for i in range(20):
        letters.add([letter(1000 * process + i)])


def test_several_processes_write_at_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write, args=(tmp_path / "dead", p)) for p in range(3)]
    for w in writers:
        w.start()
    for w in writers:
        w.join()
    assert len(DeadLetters(tmp_path / "dead", lambda: 0).read()) == 60


def test_a_retry_holds_once_its_number_is_taken(tmp_path):
    number = [0]
    letters = DeadLetters(tmp_path / "dead", lambda: number[0])
    letters.add([letter(i) for i in range(4)])
    with letters.retrying() as retry:
        retry.leave(retry.letters[:2])
    assert letters.count() == 4
    with letters.retrying() as retry:
        retry.leave(retry.letters[1:2])
        number[0] = 1
    assert letters.read() == [letter(1)]
    assert [p.name for p in (tmp_path / "dead").glob("letters*")] == ["letters-00001.jsonl"]
    with letters.retrying() as retry:
        retry.leave([])
        number[0] = 2
    assert letters.read() == []


def test_erasure_and_retention_reach_the_letters(tmp_path):
    table = pa.table({"user": [7, 8], "ts": [1, 2], "item": [1, 2]})
    schema = EventSchema.infer(table.schema, user="user", time="ts")
    with HistoryStore.create(tmp_path / "s", schema, 4, sync=False, clock=lambda: 10_000) as store:
        store.append(table)
        store.compact()
        store.dead_letters.add([letter(1, 7), letter(2, 8), letter(3), letter(4, 9)])
        store.erase([7], dry_run=True)
        assert store.dead_letters.count() == 4
        # A letter that tells no user may be of anybody.
        store.erase([7], grace_s=0)
        assert store.dead_letters.read() == [letter(2, 8), letter(4, 9)]
        store.erase(events=[EventsOf(8, arrivals=[1])], grace_s=0)
        assert store.dead_letters.read() == [letter(4, 9)]
        data = b"".join(p.read_bytes() for p in (tmp_path / "s" / "dead").iterdir())
        assert base64.b64encode(letter(1).payload) not in data
        store.retain(Retention(max_age_ms=9_997), grace_s=0)
        assert store.dead_letters.count() == 1
        store.retain(Retention(max_age_ms=9_995), grace_s=0)
        assert store.dead_letters.count() == 0
