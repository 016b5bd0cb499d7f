"""Files into a store: each event once, whatever is run again, and what is bad goes to the dead letters."""

import json
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.core.errors import InputError, PositionConflict, SchemaError, StoreError
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.files import FileSource
from thinrow.sources.ingest import Ingest, IngestOptions

ARROW = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64()), ("price", pa.float64())])


def schema_of(arrow=ARROW, **roles):
    return EventSchema.infer(arrow, user="user", time="ts", **roles)


@pytest.fixture
def store(tmp_path):
    with HistoryStore.create(tmp_path / "store", schema_of(), 4, sync=False) as opened:
        yield opened


def events_of(store, users=range(10)):
    read = store.read(list(users), 1 << 60).histories
    jagged = read.to_jagged("item")
    return {
        u: jagged.values[a:b].tolist() for u, a, b in zip(users, jagged.offsets[:-1], jagged.offsets[1:], strict=True)
    }


def rows(n, start=0):
    return [{"user": i % 3, "ts": 1000 + i, "item": i, "price": i / 2} for i in range(start, start + n)]


def write_lines(path, events, mode="w"):
    with path.open(mode) as file:
        file.writelines(json.dumps(e) + "\n" for e in events)


def run(store, path, **options):
    return Ingest(store, FileSource("files", [path]), IngestOptions(**options)).run()


def items(store):
    return sorted(i for some in events_of(store).values() for i in some)


def test_a_folder_of_all_kinds_is_read_once(store, tmp_path):
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    write_lines(folder / "a.jsonl", rows(10))
    pq.write_table(pa.Table.from_pylist(rows(10, 10), ARROW), folder / "deep" / "b.parquet", row_group_size=3)
    with pa.OSFile(str(folder / "c.arrow"), "wb") as out, pa.ipc.new_file(out, ARROW) as writer:
        writer.write_table(pa.Table.from_pylist(rows(10, 20), ARROW))
    lines = ["user,ts,item,price", *(f"{e['user']},{e['ts']},{e['item']},{e['price']}" for e in rows(10, 30))]
    (folder / "d.csv").write_text("\n".join(lines) + "\n")
    (folder / "_half.jsonl").write_text("{")
    first = run(store, folder, batch_events=4)
    assert (first.events, first.refused, first.lag) == (40, 0, 0)
    assert items(store) == list(range(40))
    again = run(store, folder)
    assert (again.events, again.batches) == (0, 0)
    write_lines(folder / "a.jsonl", rows(5, 40), "a")
    write_lines(folder / "0.jsonl", rows(5, 45))
    assert run(store, folder).events == 10
    assert items(store) == list(range(50))


@pytest.mark.parametrize("batch", [1, 3, 7, 100])
def test_a_run_that_stops_after_any_batch_goes_on(store, tmp_path, batch):
    pq.write_table(pa.Table.from_pylist(rows(20), ARROW), tmp_path / "b.parquet", row_group_size=6)
    for _ in range(30):
        stop = threading.Event()
        source = FileSource("files", [tmp_path / "b.parquet"])
        ingest = Ingest(store, source, IngestOptions(batch_events=batch), progress=lambda _, stop=stop: stop.set())
        behind = ingest.run(stop=stop).lag
        assert behind == (len(items(store)) < 20), "a file is read when its last event is"
    assert items(store) == list(range(20))


def test_bad_rows_become_letters_and_the_rest_flows_on(store, tmp_path):
    good = rows(300)
    bad = [
        '{"user": null, "ts": 5, "item": 1, "price": 1}',
        '{"user": 1, "ts": -5, "item": 1, "price": 1}',
        '{"user": 1, "ts": 9223372036854775807, "item": 1, "price": 1}',
        '{"user": "x", "ts": 5, "item": 1, "price": 1}',
        '{"user": 1.5, "ts": 5, "item": 1, "price": 1}',
        '{"user": 1, "ts": 5, "item": [1], "price": 1}',
        '{"user": 1, "ts": 5',
        "[1, 2]",
        "null",
        '{"user": 1, "ts": 1}{"user": 2, "ts": 1}',
        "\x00\x01",
        '{"ts": 5, "item": 1, "price": 1}',
        '{"user": 1, "item": 1, "price": 1}',
    ]
    lines = [json.dumps(e) for e in good]
    for i, line in enumerate(bad):
        lines.insert(i * 20, line)
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    report = run(store, tmp_path / "a.jsonl")
    assert (report.events, report.refused) == (300, len(bad))
    assert items(store) == list(range(300))
    letters = store.dead_letters.read()
    assert sorted(x.payload.decode() for x in letters) == sorted(bad)
    assert all(x.reason and x.source == "files" and x.how == {"format": "json"} for x in letters)
    assert {x.user for x in letters if "-5" in x.payload.decode()} == {1}


def test_invalid_text_is_refused_before_it_is_stored(tmp_path):
    arrow = pa.schema([("user", pa.string()), ("ts", pa.int64()), ("item", pa.int64())])
    (tmp_path / "a.jsonl").write_bytes(b'{"user":"a","ts":1,"item":1}\n{"user":"\xff","ts":1,"item":2}\n')
    with HistoryStore.create(tmp_path / "s", schema_of(arrow), 4, sync=False) as store:
        report = Ingest(store, FileSource("f", [tmp_path / "a.jsonl"])).run()
        assert (report.events, report.refused) == (1, 1)


def test_times_come_as_numbers_or_texts_and_booleans_as_such(tmp_path):
    arrow = pa.schema([("user", pa.int64()), ("ts", pa.timestamp("ms")), ("item", pa.bool_())])
    (tmp_path / "a.jsonl").write_text(
        '{"user":1,"ts":"2024-01-01T00:00:00.5Z","item":true}\n{"user":1,"ts":"2024-01-01","item":null}\n'
    )
    (tmp_path / "b.csv").write_text("user,ts,item\n1,2024-01-01T00:00:01Z,false\n1,x,true\n")
    with HistoryStore.create(tmp_path / "s", schema_of(arrow), 4, sync=False) as store:
        report = Ingest(store, FileSource("f", [tmp_path / "a.jsonl", tmp_path / "b.csv"])).run()
        assert (report.events, report.refused) == (3, 1)
        read = store.read([1], 1 << 60).histories
        assert read.to_jagged("item").values.tolist() == [0, 1, 0]


def test_csv_with_quoted_ends_of_lines_is_never_parted(tmp_path):
    arrow = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.string())])
    text = 'user,ts,item\n1,1,"a\nb"\n1,2,c\n1,3\n1,4,"d ""\n"" e"\n1,5,\n'
    (tmp_path / "b.csv").write_text(text)
    with HistoryStore.create(tmp_path / "s", schema_of(arrow), 4, sync=False) as store:
        report = Ingest(store, FileSource("f", [tmp_path / "b.csv"])).run()
        assert (report.events, report.refused) == (4, 1)
        assert store.dead_letters.read()[0].payload == b"1,3"
        column = store.read([1], 1 << 60).histories.to_jagged("item")
        assert len(column.values) == 4


def test_a_line_without_an_end_waits_for_it_when_followed(store, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(e) for e in rows(3)]
    path.write_text(lines[0] + "\n" + lines[1][:10])
    stop = threading.Event()
    reader = threading.Thread(
        target=lambda: Ingest(store, FileSource("f", [path], follow=True)).run(follow=True, stop=stop)
    )
    reader.start()
    try:
        _until(lambda: items(store) == [0])
        with path.open("a") as file:
            file.write(lines[1][10:] + "\n" + lines[2])
        _until(lambda: items(store) == [0, 1])
    finally:
        stop.set()
        reader.join()
    assert Ingest(store, FileSource("f", [path])).run().events == 1
    assert items(store) == [0, 1, 2]


def _until(holds, seconds=120):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_damaged_file_is_a_letter_and_is_read_when_it_is_mended(store, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(b"PAR1 nothing")
    (folder / "b.arrow").write_bytes(b"ARROW1\0\0")
    (folder / "c.parquet").write_bytes(b"")
    write_lines(folder / "d.jsonl", rows(3))
    report = run(store, folder)
    assert (report.events, report.refused) == (3, 3)
    assert run(store, folder).batches == 0
    pq.write_table(pa.Table.from_pylist(rows(10, 10), ARROW), folder / "a.parquet")
    assert run(store, folder).events == 10


def test_files_that_were_replaced_or_do_not_fit_are_errors(store, tmp_path):
    write_lines(tmp_path / "a.jsonl", rows(10))
    run(store, tmp_path / "a.jsonl")
    write_lines(tmp_path / "a.jsonl", rows(2))
    with pytest.raises(StoreError, match="was replaced"):
        run(store, tmp_path / "a.jsonl")
    pq.write_table(pa.table({"user": [1], "ts": [1], "item": ["x"], "price": [0.5]}), tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match="item"):
        run(store, tmp_path / "b.parquet")
    with pytest.raises(InputError, match="no file"):
        run(store, tmp_path / "c.parquet")
    (tmp_path / "c.csv").write_text("user,ts\n1,1\n")
    with pytest.raises(SchemaError, match="no column 'item'"):
        run(store, tmp_path / "c.csv")


def test_two_readers_of_a_source_take_each_event_once(store, tmp_path):
    write_lines(tmp_path / "a.jsonl", rows(10))
    slow, fast = (Ingest(store, FileSource("files", [tmp_path / "a.jsonl"])) for _ in range(2))
    read = slow._source.read
    slow._source.read = lambda *a: (fast.run(), setattr(slow._source, "read", read), read(*a))[-1]
    assert slow.run().conflicts == 1
    assert items(store) == list(range(10))


def test_corrections_of_nothing_are_letters_and_repeats_are_dropped(tmp_path):
    arrow = pa.schema(
        [("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int64()), ("id", pa.string()), ("of", pa.string())]
    )
    events = [{"user": 1, "ts": i, "item": i, "id": f"e{i}", "of": None} for i in range(10)]
    events[3]["of"], events[5]["of"], events[6]["of"] = "none", "e2", "e3"
    events += [events[1], {**events[2], "user": 2}]
    write_lines(tmp_path / "a.jsonl", events)
    with HistoryStore.create(tmp_path / "s", schema_of(arrow, event_id="id", supersedes="of"), 4, sync=False) as store:
        report = Ingest(store, FileSource("f", [tmp_path / "a.jsonl"])).run()
        # Number 6 corrects number 3, which was refused itself.
        assert (report.events, report.duplicates, report.refused) == (9, 1, 2)
        assert {json.loads(x.payload)["item"] for x in store.dead_letters.read()} == {3, 6}
        assert {x.user for x in store.dead_letters.read()} == {1}


def test_positions_only_move_with_their_events(store, tmp_path):
    write_lines(tmp_path / "a.jsonl", rows(10))
    source = FileSource("files", [tmp_path / "a.jsonl"])
    ingest = Ingest(store, source)
    append = store.recent.append
    store.recent.append = lambda *a, **k: (_ for _ in ()).throw(StoreError("the disk is full"))
    with pytest.raises(StoreError, match="full"):
        ingest.run()
    store.recent.append = append
    assert store.recent.positions("files") == {}
    assert ingest.run().events == 10


def test_the_store_refuses_a_stale_position(store, tmp_path):
    write_lines(tmp_path / "a.jsonl", rows(10))
    run(store, tmp_path / "a.jsonl")
    from thinrow.history.recent.tier import Advance
    from thinrow.sources.ingest import set_positions

    with pytest.raises(PositionConflict):
        set_positions(store, [Advance("files", "a.jsonl", None, "{}")])
