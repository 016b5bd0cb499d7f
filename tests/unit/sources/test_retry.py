"""Letters tried again enter once, wherever a retry is cut short."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from thinrow.core.errors import StoreError
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.files import FileSource
from thinrow.sources.ingest import Ingest, IngestOptions
from thinrow.sources.pseudonyms import Pseudonyms
from thinrow.sources.retry import RetryReport, retry_letters

ARROW = pa.schema(
    [("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64()), ("id", pa.string()), ("of", pa.string())]
)
SCHEMA = EventSchema.infer(ARROW, user="user", time="ts", event_id="id", supersedes="of")
PLAIN = EventSchema.infer(pa.schema(list(ARROW)[:3]), user="user", time="ts")


def ingest(store, tmp_path, lines, **options):
    path = tmp_path / f"{len(list(tmp_path.glob('*.jsonl')))}.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return Ingest(store, FileSource("f", [path]), IngestOptions(**options)).run()


def event(i, of=None):
    return {"user": 1, "ts": i, "item": i, "id": f"e{i}", "of": of}


def items(store, user=1):
    return store.read([user], 1 << 60).histories.to_jagged("item").values.tolist()


def test_a_correction_enters_when_its_event_has_come(tmp_path):
    with HistoryStore.create(tmp_path / "s", SCHEMA, 4, sync=False) as store:
        ingest(store, tmp_path, [event(2, of="e1"), "junk", event(3, of="e2"), event(5, of="e4")])
        assert store.dead_letters.count() == 4
        assert retry_letters(store) == RetryReport(0, 0, 4)
        ingest(store, tmp_path, [event(1)])
        assert retry_letters(store) == RetryReport(2, 0, 2)
        assert items(store) == [3]
        assert retry_letters(store) == RetryReport(0, 0, 2)
        store.compact()
        assert {x.payload for x in store.dead_letters.read()} == {b"junk", json.dumps(event(5, of="e4")).encode()}


@pytest.mark.parametrize("after", ["append", "before"])
def test_a_retry_that_is_cut_short_takes_nothing_in_twice(tmp_path, after):
    with HistoryStore.create(tmp_path / "s", PLAIN, 4, sync=False) as store:
        ingest(store, tmp_path, ['{"user": 1, "ts": 5000, "item": 1}'], max_future_ms=-(1 << 50))
        ingest(store, tmp_path, ["junk"])
        assert store.dead_letters.count() == 2
        append = store.recent.append

        def cut(*args, **kwargs):
            if after == "append":
                append(*args, **kwargs)
            raise StoreError("killed")

        store.recent.append = cut
        with pytest.raises(StoreError, match="killed"):
            retry_letters(store)
        store.recent.append = append
        assert store.dead_letters.count() == (1 if after == "append" else 2)
        retry_letters(store)
        assert items(store) == [1]
        assert [x.payload for x in store.dead_letters.read()] == [b"junk"]
        ingest(store, tmp_path, ["more junk"])
        assert store.dead_letters.count() == 2


def test_a_retry_gives_pseudonyms_too(tmp_path):
    key = Pseudonyms(b"k" * 16)
    with HistoryStore.create(tmp_path / "s", PLAIN, 4, sync=False) as store:
        ingest(store, tmp_path, ['{"user": 7, "ts": 5, "item": 1}'], max_future_ms=-(1 << 50), pseudonyms=key)
        name = key.of(["7"], "int64").to_pylist()[0]
        assert [x.user for x in store.dead_letters.read()] == [name]
        assert retry_letters(store, key).events == 1
        assert items(store, name) == [1]


def test_letters_of_several_kinds_are_taken_in_together(tmp_path):
    arrow = pa.schema([("user", pa.int64()), ("ts", pa.timestamp("ms")), ("item", pa.bool_())])
    schema = EventSchema.infer(arrow, user="user", time="ts")
    with HistoryStore.create(tmp_path / "s", schema, 4, sync=False) as store:
        texts = ['{"user": 1, "ts": "2024-01-01T00:00:01Z", "item": true}', '{"user": 1, "ts": null, "item": true}']
        ingest(store, tmp_path, texts, max_future_ms=-(1 << 50))
        letters = store.dead_letters.read()
        store.dead_letters.add(
            [
                replace(
                    letters[0],
                    where="x",
                    how={"format": "json", "registry": "framed"},
                    payload=b"\0\0\0\0\7" + b'{"user": 1, "ts": 5, "item": false}',
                )
            ]
        )
        assert retry_letters(store) == RetryReport(2, 0, 1)
        assert items(store) == [0, 1]
