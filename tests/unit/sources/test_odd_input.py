"""Input that stops no ingest, blames nobody who is not to blame, and enters once whatever was refused before."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.core.errors import InputError, PositionConflict, SchemaError, StoreError, UserKindError
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources import files
from thinrow.sources.decode import JsonDecoder
from thinrow.sources.files import FileSource
from thinrow.sources.ingest import Ingest, IngestOptions
from thinrow.sources.pseudonyms import Pseudonyms
from thinrow.sources.retry import RetryReport, retry_letters
from thinrow.sources.wanted import wanted_of

ARROW = pa.schema([("user", pa.int64()), ("ts", pa.int64()), ("item", pa.int32())])
SCHEMA = EventSchema.infer(ARROW, user="user", time="ts")


@pytest.fixture
def store(tmp_path):
    with HistoryStore.create(tmp_path / "store", SCHEMA, 1, sync=False) as opened:
        yield opened


def ingest(store, *paths, name="f", **options):
    return Ingest(store, FileSource(name, paths), IngestOptions(**options)).run()


def event(i, user=1):
    return {"user": user, "ts": i, "item": i}


def lines(*events):
    return "".join(e if isinstance(e, str) else json.dumps(e) for e in (x for e in events for x in (e, "\n")))


def items(store, user=1):
    return store.read([user], 1 << 60).histories.to_jagged("item").values.tolist()


@pytest.mark.parametrize("odd", ["null", "7", '"x"', "[1,2]"])
def test_json_that_is_no_object_comes_first(store, tmp_path, odd):
    (tmp_path / "a.jsonl").write_text(lines(odd, event(1), event(1 << 40) | {"ts": 2}))
    report = ingest(store, tmp_path / "a.jsonl")
    assert (report.events, report.refused) == (1, 2)
    store.evolve(widen={"item": "int64"})
    assert retry_letters(store) == RetryReport(1, 0, 1)
    assert items(store) == [1, 1 << 40]


def test_times_as_texts_and_as_numbers_in_one_topic():
    texts = ["1970-01-01T00:00:00.005Z", "", "garbage", "1000"]
    values = [json.dumps({"user": 1, "ts": ts, "item": 0}).encode() for ts in (texts[0], 7, 8, *texts[1:], 9)]
    for cut in (1, 7):
        decoder, found = JsonDecoder(), []
        for first in range(0, 7, cut):
            done = decoder.decode(values[first : first + cut], wanted_of(SCHEMA))
            for i, row in enumerate(done.rows):
                ts = done.table["ts"][i]
                found.append(
                    (first + row, ts.as_py() if pa.types.is_integer(ts.type) else ts.cast("int64").as_py() // 1000)
                )
        assert found == [(0, 5), (1, 7), (2, 8), (6, 9)]


def test_csv_of_which_every_row_is_refused_and_bytes_that_are_no_text(store, tmp_path):
    (tmp_path / "a.csv").write_text("user,ts,item\n7,1e3,1\n")
    (tmp_path / "b.csv").write_bytes(b"user,ts,item,note\n1,5,5,\xff\n1,\xff6,6,\n1,7,7,x\n")
    (tmp_path / "c.csv").write_text("user,ts,item")
    (tmp_path / "d.csv").write_text("user,ts,item\n1,1970-01-01T00:00:00.008Z,8\n1,9,9\n1,,10\n")
    report = ingest(store, *(tmp_path / f"{x}.csv" for x in "abcd"))
    assert (report.events, report.refused) == (4, 3)
    assert items(store) == [5, 7, 8, 9]
    assert sorted(x.reason.split(" is ")[0] for x in store.dead_letters.read()) == [
        "column 'ts'",
        "column 'ts'",
        "time 'ts'",
    ]
    assert next(x.payload for x in store.dead_letters.read() if x.partition == "b.csv") == b"1,\xff6,6,"
    assert retry_letters(store).events == 0
    (tmp_path / "e.csv").write_text("user,ts,item,ts\n1,5,5,5\n")
    with pytest.raises(SchemaError, match="'ts' twice"):
        ingest(store, tmp_path / "e.csv", name="e")


class Cut(Exception):
    pass


def cut_short(store, monkeypatch, path, error):
    """A run that ends between its letters and its append."""

    def refuse(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(store, "append_checked", refuse)
        ingest(store, path)


def test_a_batch_that_never_happened_leaves_no_letter_behind(store, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(event(1), {"user": 1, "ts": 2, "item": 5_000_000_000}))
    with pytest.raises(Cut):
        cut_short(store, monkeypatch, path, Cut())
    assert store.dead_letters.count() == 1
    store.evolve(widen={"item": "int64"})
    assert retry_letters(store) == RetryReport(0, 0, 1)
    assert ingest(store, path).events == 2
    assert retry_letters(store) == RetryReport(0, 0, 0)
    assert items(store) == [1, 5_000_000_000]


def test_a_letter_whose_batch_happened_stays_whoever_comes_next(store, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(event(1), "junk"))
    for _ in range(2):
        ingest(store, path)
        assert store.dead_letters.count() == 1
    path.write_text(path.read_text() + lines("more junk"))
    assert ingest(store, path).refused == 1
    assert store.dead_letters.count() == 2


def test_who_comes_second_takes_letters_back(store, tmp_path, monkeypatch):
    path, first = tmp_path / "a.jsonl", store.append_checked
    path.write_text(lines(event(1), {"user": 1, "ts": 2, "item": 5_000_000_000}))
    before = []

    def overtaken(*given):
        if not before:
            before.append(store.dead_letters._path(0).read_bytes())
            raise PositionConflict("another was first")
        return first(*given)

    monkeypatch.setattr(store, "append_checked", overtaken)
    assert ingest(store, path).conflicts == 1
    assert before[0].count(b"\n") == store.dead_letters._path(0).read_bytes().count(b"\n") == 1


def test_a_damaged_row_group_is_read_from_when_it_is_mended(store, tmp_path):
    path, n = tmp_path / "a.parquet", 30_000
    rng = np.random.default_rng(1)
    columns = {"user": np.ones(n, np.int64), "ts": np.arange(n), "item": rng.integers(0, 1 << 30, n, np.int32)}
    pq.write_table(pa.table(columns, ARROW), path, row_group_size=10_000, compression="zstd")
    good = path.read_bytes()
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(2)
    header = chunk.dictionary_page_offset or chunk.data_page_offset
    path.write_bytes(good[:header] + b"\xff" * 20 + good[header + 20 :])
    first = ingest(store, path, batch_events=10_000)
    assert (first.events, first.refused) == (10_000, 1)
    assert "beyond row 10000" in store.dead_letters.read()[0].reason
    assert ingest(store, path, batch_events=10_000).batches == 0
    path.write_bytes(good)
    assert ingest(store, path, batch_events=10_000).events == 20_000
    assert items(store) == columns["item"].tolist()


def test_a_disk_that_fails_is_nobodys_fault(store, tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist([event(1)], ARROW), tmp_path / "a.parquet")

    def fail(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_tables", fail)
        with pytest.raises(StoreError, match="Too many open files"):
            ingest(store, tmp_path / "a.parquet")
    assert ingest(store, tmp_path / "a.parquet").events == 1
    assert store.dead_letters.count() == 0


def test_folders_are_not_read_again_under_other_names(store, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_text(lines(event(1)))
    assert ingest(store, tmp_path / "a").events == 1
    with pytest.raises(InputError, match=r"has read 'x.jsonl', which is '[ab]/x.jsonl' now"):
        ingest(store, tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "x.jsonl").unlink()
    (tmp_path / "a" / "y.jsonl").write_text(lines(event(2)))
    assert ingest(store, tmp_path / "a").events == 1


def test_ids_of_files_tell_folders_apart(tmp_path):
    with_id = ARROW.append(pa.field("source_id", pa.string()))
    named = EventSchema.infer(with_id, user="user", time="ts", event_id="source_id")
    with HistoryStore.create(tmp_path / "named", named, 1, sync=False) as store:
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "x.jsonl").write_text(lines(event(1)))
            assert ingest(store, tmp_path / folder, name=folder).events == 1
            assert ingest(store, tmp_path / folder, name=f"{folder} again").duplicates == 1


def test_what_is_too_far_ahead_stays_a_letter(store, tmp_path):
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines({"user": 1, "ts": 99_999_999_999_999, "item": 1}, event(2)))
    assert ingest(store, tmp_path / "a.jsonl", max_future_ms=1_000).refused == 1
    assert retry_letters(store, max_future_ms=1_000) == RetryReport(0, 0, 1)
    assert retry_letters(store) == RetryReport(1, 0, 0)


@pytest.mark.parametrize("user", [[1.0, None], [True], [[1]], [b"\xff"]])
def test_pseudonyms_are_of_integers_and_texts(user):
    with pytest.raises(UserKindError, match="integers and texts"):
        Pseudonyms(bytes(16)).apply(pa.table({"u": user}), "u", "int64")
    mixed = pa.table({"u": pa.array(["7", "8"]).dictionary_encode()})
    assert Pseudonyms(bytes(16)).apply(mixed, "u", "int64")["u"][0].as_py() == 1744944827902622075


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_last_line_that_is_half_written_is_waited_for(store, tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    whole = lines(event(1), event(2)) if kind == "jsonl" else "user,ts,item\n1,1,1\n1,2,2\n"
    for cut in (len(whole) - 4, len(whole) - 3):
        path.write_text(whole[:cut])
        with pytest.warns(UserWarning, match="ends within a line"):
            ingest(store, path)
    path.write_text(whole)
    report = ingest(store, path)
    assert (report.events, items(store), store.dead_letters.count()) == (1, [1, 2], 0)


def test_letters_of_csv_enter_when_the_schema_fits(store, tmp_path):
    (tmp_path / "a.csv").write_text('user,ts,item\n1,1,5000000000\n1,2,"2"\n1,x,3\n')
    assert ingest(store, tmp_path / "a.csv").refused == 2
    store.evolve(widen={"item": "int64"})
    assert retry_letters(store) == RetryReport(1, 0, 1)
    assert items(store) == [5_000_000_000, 2]


def test_a_last_line_that_is_whole_and_wrong_is_a_letter(store, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"user":1,"ts":1,"item":1}\n{"user":1,"ts":2,"item":1.5}')
    (tmp_path / "b.csv").write_text("user,ts,item\n1,2,2\n1,3,x")
    report = ingest(store, tmp_path / "a.jsonl", tmp_path / "b.csv")
    assert (report.events, report.refused) == (2, 2)


def test_a_quoted_value_is_not_parted(store, tmp_path):
    path, whole = tmp_path / "a.csv", 'user,note,ts,item\n1,a,1,1\n1,"x\ny",6,6\n1,b,7,7\n'
    path.write_text(whole[: whole.index("y") + 1])
    with pytest.warns(UserWarning, match="within a line"):
        assert ingest(store, path).events == 1
    path.write_text(whole)
    assert (ingest(store, path).events, items(store), store.dead_letters.count()) == (2, [1, 6, 7], 0)
