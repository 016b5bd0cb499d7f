"""Bad input on the command line: one clear line, a non-zero exit, and the store byte for byte as it was.

The line says what was found, what is allowed and what to do. Commands run in this process through ``main``; a few run
as real processes, so that exit status and streams are the shell's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.cli.main import main
from thinrow.core.users import bucket_of
from thinrow.history.recent.keys import seal
from thinrow.storage.container import crc_of

TOML = """
user = "who"
time = "at"
event_id = "line"
supersedes = "corrects"
[groups.item]
item = { trait = "id", dtype = "int64" }
[groups.price]
price = { trait = "numeric", dtype = "float64", nullable = true }
"""
PYTHON = """
from thinrow.schema import ColumnSpec, EventSchema, Trait
schema = EventSchema(
    (ColumnSpec(1, "item", Trait.ID, "int64", "item"), ColumnSpec(2, "price", Trait.NUMERIC, "float64", "price", True)),
    user_column="who", time_column="at", event_id_column="line", event_id_dtype="string", supersedes_column="corrects",
)
"""
COLUMNS: dict[str, Any] = {
    "who": pa.array([7, -5], pa.int64()),
    "at": pa.array([3_000, 4_000], pa.int64()),
    "line": pa.array(["n1", "n2"]),
    "corrects": pa.array([None, None], pa.string()),
    "item": pa.array([1, 2], pa.int64()),
    "price": pa.array([None, 2.5]),
}


class Result:
    """Exit status and streams of one command."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    def line(self) -> str:
        """The one line on standard error of a refused command."""
        assert self.status == 1, (self.status, self.out, self.err)
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("thinrow: ")
        assert "Traceback" not in lines[0]
        return lines[0]


class Shell:
    """A working folder with a store of three events, two of them archived, and the command line."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.capsys, self.monkeypatch = folder, capsys, monkeypatch
        monkeypatch.chdir(folder)

    def run(self, *words: str) -> Result:
        self.monkeypatch.setattr(sys, "argv", ["thinrow", *words])
        self.capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else 1
        return Result(status, *self.capsys.readouterr())

    def ingest(self, table: pa.Table | dict[str, Any], *words: str) -> Result:
        pq.write_table(pa.table(table) if isinstance(table, dict) else table, "in.parquet")
        return self.run("ingest", "in.parquet", "--store", "s", *words)

    def files(self) -> dict[str, bytes]:
        """All bytes of the store but LMDB's lock table, where opening a store takes a slot, and the counts of reads."""
        return {
            str(p.relative_to(self.folder)): p.read_bytes()
            for p in sorted((self.folder / "s").rglob("*"))
            if p.is_file() and p.name != "lock.mdb" and p.parent.name != "usage"
        }

    def contents(self) -> list[str]:
        shown = self.run("read", "--all-users", "--store", "s")
        assert shown.status == 0, shown.err
        return sorted(shown.out.splitlines())


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell(tmp_path, capsys, monkeypatch)
    Path("schema.toml").write_text(TOML)
    old = {**COLUMNS, "line": pa.array(["o1", "o2"]), "at": pa.array([1_000, 2_000], pa.int64())}
    made = shell.ingest(old, "--create", "--schema", "schema.toml", "--buckets", "2", "--compact")
    assert made.status == 0, made.err
    one = {n: c.slice(0, 1) for n, c in COLUMNS.items()} | {"line": pa.array(["o3"])}
    assert shell.ingest(one).status == 0
    return shell


@pytest.fixture
def unchanged(shell: Shell) -> Iterator[Shell]:
    """The shell; afterwards the store must hold the same bytes, and the same events."""
    contents, files = shell.contents(), shell.files()
    yield shell
    assert shell.files() == files
    assert shell.contents() == contents


def changed(**columns: Any) -> dict[str, Any]:
    return {n: c for n, c in {**COLUMNS, **columns}.items() if c is not None}


TABLES = {
    "missing column": (changed(item=None), "input has no column 'item' (the schema's column); it has who, at,"),
    "missing user": (changed(who=None), "input has no column 'who' (the schema's user)"),
    "missing time": (changed(at=None), "input has no column 'at' (the schema's time)"),
    "missing event id": (changed(line=None), "input has no column 'line' (the schema's event_id)"),
    "wrong type": (
        changed(item=pa.array(["a", "b"])),
        "column 'item' has type string, the schema says int64; cast the column",
    ),
    "a fraction for an integer": (changed(item=pa.array([1.5, 2.0])), "column 'item': a value of type double is not"),
    "a list": (changed(item=pa.array([[1], [2]])), "column 'item': a value of type list"),
    "null in a column": (
        changed(item=pa.array([1, None])),
        "column 'item' is null in row 1; fill it, or declare it nullable",
    ),
    "null user": (changed(who=pa.array([7, None])), "user 'who' is null in row 1; every event needs its user: drop"),
    "string users": (
        changed(who=pa.array(["7", "8"])),
        "user column 'who' has type string, but this store holds int64 ids; cast the column to int64",
    ),
    "users above int64": (changed(who=pa.array([1, 2**63], pa.uint64())), "a value of type uint64 is not a int64"),
    "null time": (changed(at=pa.array([None, 1])), "time 'at' is null in row 0; every event needs a time"),
    "negative time": (changed(at=pa.array([1, -3])), "time 'at' is -3 in row 1; it must be 0 or more"),
    "time beyond bounds": (changed(at=pa.array([1, 2**63 - 1])), "in row 1; it must be 0 or more and under 2^63-2"),
    "time as text": (changed(at=pa.array(["a", "b"])), "time 'at' has type string; it must be a timestamp or"),
    "an id twice": (
        changed(line=pa.array(["n1", "n1"]), who=pa.array([7, 7])),
        "event id 'n1' of user 7 appears twice in the input (again in row 1); an id names one event: drop the repeats",
    ),
    "an id too long": (
        changed(line=pa.array(["n1", "x" * 256])),
        "event id 'line' has 256 UTF-8 bytes in row 1; at most 255 are allowed: hash longer ids",
    ),
    "ids of the other kind": (changed(line=pa.array([1, 2])), "column 'line' has type int64, the schema says string"),
    "a correction of nothing": (
        changed(corrects=pa.array([None, "zz"])),
        "row 1: supersedes 'zz', an event that user -5 does not have; append the event before its correction",
    ),
    "a correction of another user's event": (changed(corrects=pa.array(["o2", None])), "that user 7 does not have"),
    "a correction of itself": (changed(corrects=pa.array(["n1", None])), "an event must arrive before its correction"),
    "no rows": (pa.table(COLUMNS).slice(0, 0), "in.parquet holds no rows; leave it out"),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_are_refused(unchanged: Shell, case: str) -> None:
    table, message = TABLES[case]
    assert message in unchanged.ingest(table).line()


def test_files_that_are_refused(unchanged: Shell) -> None:
    pq.write_table(pa.table(COLUMNS), "good.parquet")
    good = Path("good.parquet").read_bytes()
    for name, data in {
        "empty.parquet": b"",
        "cut.parquet": good[: len(good) // 2],
        "torn.parquet": b"PAR1" + bytes(100),
        "flipped.parquet": good[:4] + bytes(len(good) - 200) + good[-196:],
        "torn.arrow": b"ARROW1\0\0" + bytes(80),
        "torn.stream": b"\xff\xff\xff\xff\x10\0\0\0" + bytes(40),
    }.items():
        Path(name).write_bytes(data)
    for name, message in {
        "nothing.parquet": "no file at nothing.parquet; check the path",
        "empty.parquet": "empty.parquet is empty (0 bytes); it must be a Parquet or Arrow IPC file",
        "cut.parquet": "cut.parquet cannot be read as Parquet or Arrow: ",
        "torn.parquet": "torn.parquet cannot be read as Parquet or Arrow: ",
        "flipped.parquet": "flipped.parquet cannot be read as Parquet or Arrow: ",
        "torn.arrow": "torn.arrow cannot be read as Parquet or Arrow: ",
        "torn.stream": "torn.stream",
    }.items():
        # All files are read before the first event of the good one is appended.
        assert message in unchanged.run("ingest", "good.parquet", name, "--store", "s").line()
    pq.write_table(pa.table(changed(item=pa.array([1.0, 2.0]))), "float.parquet")
    line = unchanged.run("ingest", "good.parquet", "float.parquet", "--store", "s").line()
    assert "column 'item' is double in float.parquet, but int64 in good.parquet; ingest the files one by one" in line
    pq.write_table(pa.table(changed(price=None)), "short.parquet")
    line = unchanged.run("ingest", "good.parquet", "short.parquet", "--store", "s").line()
    assert "column 'price' is missing in short.parquet, but double in good.parquet" in line


def test_lines_that_lack_a_column_are_refused(unchanged: Shell) -> None:
    pq.write_table(pa.table(COLUMNS), "good.parquet")
    Path("events.csv").write_bytes(b"who,at\n1,2\n")
    refused = unchanged.run("ingest", "good.parquet", "events.csv", "--store", "s")
    assert refused.status == 1
    assert refused.err.splitlines() == [
        "so far: 0 events appended, 0 known already, 0 refused",
        "thinrow: events.csv has no column 'line'; its header names who, at",
    ]


def test_one_bad_event_among_many_keeps_all_out(unchanged: Shell) -> None:
    """More events than go into one transaction; the last one is bad."""
    n = 70_000
    table = {
        "who": pa.array(np.arange(n)),
        "at": pa.array(np.arange(n)),
        "line": pa.array([str(i) for i in range(n - 1)] + ["x" * 300]),
        "corrects": pa.nulls(n, pa.string()),
        "item": pa.array(np.arange(n)),
        "price": pa.nulls(n, pa.float64()),
    }
    assert "event id 'line' has 300 UTF-8 bytes in row 69999" in unchanged.ingest(table).line()


def test_options_that_do_not_fit_the_store(unchanged: Shell) -> None:
    Path("other.toml").write_text(TOML.replace('"float64", nullable = true', '"float64"'))
    for words, message in (
        (
            ["--schema", "other.toml"],
            "column 'price' is trait 'numeric', dtype 'float64', group 'price', nullable False, but",
        ),
        (
            ["--user", "who", "--time", "at"],
            "event_id_column is None, but 'line' in the store at s; leave the schema out",
        ),
        (["--buckets", "3"], "--buckets 3, but the store at s has 2; leave it out"),
        (["--schema", "schema.toml", "--user", "who"], "--schema names the columns already; leave out --user"),
    ):
        assert message in unchanged.ingest(COLUMNS, "--create", *words).line()


SCHEMAS = {
    "not TOML": ("user = ", "schema is not TOML: "),
    "no user": (TOML.replace('user = "who"', ""), "schema lacks 'user'; add a line: user = "),
    "no group": ('user = "who"\ntime = "at"', "schema has no [groups.NAME] table"),
    "unknown key": (TOML.replace("event_id", "even_id"), "schema has an unknown key 'even_id'; known: "),
    "unknown trait": (TOML.replace('"numeric"', '"number"'), "column 'price': unknown trait 'number'; known: "),
    "unknown dtype": (TOML.replace('"float64"', '"decimal"'), "trait numeric with dtype 'decimal'; allowed: int8"),
    "no dtype": (TOML.replace(', dtype = "int64"', ""), "column 'item': write item = { trait ="),
    "a column that is not there": (TOML.replace("price =", "cost ="), "input has no column 'cost'; it has who"),
    "a reserved name": (TOML.replace("item =", "arrival ="), "column name 'arrival' is reserved; rename"),
    "an id that is no number": (TOML.replace('dtype = "int64"', 'dtype = "int64", id = "x"'), "id is 'x'; it must be"),
    "supersedes without ids": (TOML.replace('event_id = "line"', ""), "supersedes needs event_id"),
}


@pytest.mark.parametrize("case", SCHEMAS)
def test_schemas_that_are_refused(shell: Shell, case: str) -> None:
    text, message = SCHEMAS[case]
    Path("bad.toml").write_text(text)
    pq.write_table(pa.table(COLUMNS), "in.parquet")
    line = shell.run("ingest", "in.parquet", "--store", "new", "--create", "--schema", "bad.toml").line()
    assert message in line
    assert not Path("new").exists()


def test_schema_files_that_are_refused(shell: Shell) -> None:
    pq.write_table(pa.table(COLUMNS), "in.parquet")
    Path("latin.toml").write_bytes(b'user = "\xe9"')
    Path("broken.py").write_text("schema = Event(")
    Path("failing.py").write_text("schema = unknown")
    Path("empty.py").write_text("")
    for name, message in {
        "nothing.toml": "no schema file at nothing.toml; pass --schema",
        "latin.toml": "latin.toml is not UTF-8 text",
        "broken.py": "broken.py does not run: SyntaxError",
        "failing.py": "failing.py does not run: NameError: name 'unknown' is not defined",
        "empty.py": "empty.py defines no `schema` of type EventSchema; add: schema =",
    }.items():
        line = shell.run("ingest", "in.parquet", "--store", "new", "--create", "--schema", name).line()
        assert message in line
        assert not Path("new").exists()


def test_a_store_that_cannot_be_made(shell: Shell) -> None:
    pq.write_table(pa.table(COLUMNS), "in.parquet")
    Path("file").write_text("")
    create = ["--create", "--schema", "schema.toml"]
    for store, words, message in (
        ("new", [], "no store at new; add --create with --schema FILE, or with --user and --time"),
        ("new", ["--create"], "--create needs --schema FILE, or --user COLUMN and --time COLUMN"),
        ("new", ["--create", "--user", "who"], "both --user COLUMN and --time COLUMN are needed"),
        ("new", ["--create", "--user", "who", "--time", "when"], "input has no column 'when'"),
        ("new", [*create, "--buckets", "0"], "n_buckets=0; it must be between 1 and 65536"),
        ("new", [*create, "--buckets", "99999999"], "n_buckets=99999999; it must be between 1 and 65536"),
        ("file", create, "Not a directory: "),
        ("/proc/thinrow-store", create, "check the path, permissions and free space"),
    ):
        line = shell.run("ingest", "in.parquet", "--store", store, *words).line()
        assert message in line
    bad = changed(corrects=pa.array([None, "zz"]))
    pq.write_table(pa.table(bad), "in.parquet")
    assert "supersedes 'zz'" in shell.run("ingest", "in.parquet", "--store", "new", *create).line()
    assert not Path("new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(shell: Shell) -> None:
    Path("locked").mkdir(mode=0o500)
    pq.write_table(pa.table(COLUMNS), "in.parquet")
    words = ["--create", "--schema", "schema.toml"]
    assert "Permission denied" in shell.run("ingest", "in.parquet", "--store", "locked/s", *words).line()


@pytest.mark.parametrize("words", [["compact"], ["read", "7"], ["verify"], ["inspect", "7"]], ids=lambda w: str(w[0]))
def test_no_store(shell: Shell, words: list[str]) -> None:
    assert "no store at nowhere; " in shell.run(*words, "--store", "nowhere").line()
    assert not Path("nowhere").exists()
    Path("half/archive/manifests").mkdir(parents=True)
    assert "no store at half; " in shell.run(*words, "--store", "half").line()


def test_questions_that_are_refused(unchanged: Shell) -> None:
    read, inspect = ["read", "--store", "s"], ["inspect", "--store", "s"]
    for words, message in (
        (read, "which users? name at least one, or pass --all-users (not both)"),
        ([*read, "7", "--all-users"], "(not both)"),
        ([*read, "x"], "user 'x' is not an integer, and this store holds int64 ids: pass one"),
        ([*read, str(2**63)], "is out of bounds; int64 ids are from -2^63 to 2^63 - 1"),
        ([*inspect, "x"], "user 'x' is not an integer"),
        ([*inspect, "99"], "user 99 has no events in the store at s; `thinrow read --all-users` shows who has"),
        ([*read, "7", "--columns", "item,colour"], "no column 'colour'; the schema has item, price"),
        ([*read, "7", "--at", "noon"], "time 'noon' is neither milliseconds nor ISO 8601; write 1500000000000 or"),
        ([*read, "7", "--at=-5"], "time '-5' is -5 ms since 1970; it must be from 0 to"),
        ([*read, "7", "--at", str(2**70)], "ms since 1970; it must be from 0 to 9223372036854775806"),
        ([*read, "7", "--at", "1969-12-31"], "time '1969-12-31' is -86400000 ms since 1970"),
        ([*read, "7", "--out", "nowhere/x.parquet"], "check the path, permissions and free space"),
        ([*inspect, "7", "--at", "²"], "time '²' is neither"),
    ):
        assert message in unchanged.run(*words).line()
    usage = unchanged.run(*read, "7", "--newest", "0")
    assert usage.status == 2
    assert "0 is not in the range x>=1" in usage.err
    assert unchanged.run("unknown").status == 2


def test_unknown_users_beside_known_ones(unchanged: Shell) -> None:
    found = unchanged.run("read", "7", "8", "9", "--store", "s", "--columns", "item")
    assert found.status == 1
    assert len(found.out.splitlines()) == 2
    assert found.err == (
        "thinrow: 2 users (8, 9) have no events in the store at s; `thinrow read --all-users` shows who has\n"
    )
    early = unchanged.run("read", "7", "--store", "s", "--at", "1970-01-01T00:00:00.001")
    assert (early.status, early.out) == (0, "")
    assert early.err == "thinrow: user 7 has no events before 1970-01-01T00:00:00.001\n"


def test_what_good_input_does(shell: Shell) -> None:
    """Negative ids, Arrow files and streams, a Python schema, repeated input, and a round trip through --out."""
    assert shell.run("read", "--store", "s", "--columns", "item", "--", "-5").out == (
        "-5\t1970-01-01T00:00:02.000Z\tarrival=1\titem=2\n"
    )
    shown = shell.run("inspect", "--store", "s", "--", "-5").out
    assert "user -5: bucket" in shown
    assert "1 events in the archive, 0 recent" in shown
    table = pa.table(COLUMNS)
    Path("schema.py").write_text(PYTHON)
    with pa.OSFile("in.arrow", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile("in.stream", "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    made = shell.run("ingest", "in.arrow", "--store", "new", "--create", "--schema", "schema.py")
    assert made.out == "2 events appended, 0 known already\n"
    again = shell.run("ingest", "in.stream", "--store", "new", "--create", "--schema", "schema.py", "--compact")
    assert again.out == "0 events appended, 2 known already\ngeneration 2: 2 events moved to the archive\n"
    assert shell.run("verify", "--store", "new").out == "2 events in 1 generation(s) verified: no damage\n"
    assert (
        "2 events of 2 users written to all.parquet"
        in shell.run("read", "--all-users", "--store", "new", "--out", "all.parquet").out
    )
    assert pq.read_table("all.parquet").to_pydict() == {
        "user_id": [-5, 7],
        "event_ts": [4_000, 3_000],
        "arrival": [1, 1],
        "item": [2, 1],
        "price": [2.5, None],
    }
    far = {**COLUMNS, "at": pa.array([2**62, 2**63 - 3]), "line": pa.array(["f1", "f2"])}
    assert shell.ingest(far).status == 0
    assert f"{2**62} ms\tarrival=3" in shell.run("read", "7", "--store", "s").out
    assert f"{2**62} ms" in shell.run("inspect", "7", "--store", "s").out


def test_corrections_and_arrival_times_from_options(shell: Shell) -> None:
    table = {
        "u": pa.array(["a", "a", "a"]),
        "t": pa.array([1, 2, 2], pa.timestamp("ms")),
        "id": pa.array([1, 2, 3]),
        "old": pa.array([None, None, 2], pa.int64()),
        "known": pa.array([30, 10, 20]),
        "v": pa.array([1, 2, 3], pa.int8()),
    }
    pq.write_table(pa.table(table), "in.parquet")
    words = ["--create", "--user", "u", "--time", "t", "--event-id", "id", "--supersedes", "old"]
    words += ["--arrival-time", "known"]
    assert shell.run("ingest", "in.parquet", "--store", "n", *words).status == 0
    for _ in range(2):
        assert shell.run("read", "a", "--store", "n").out == (
            "a\t1970-01-01T00:00:00.001Z\tarrival=3\tv=1\na\t1970-01-01T00:00:00.002Z\tarrival=2\tv=3\n"
        )
        assert shell.run("compact", "--store", "n", "--full").status == 0


# --- stores that are damaged, or of a newer version ------------------------------------------------------------------


COMMANDS = (["compact"], ["read", "7"], ["inspect", "7"], ["ingest", "in.parquet"])


def rewrite(path: Path, **envelope: Any) -> None:
    held = json.loads(path.read_text())
    path.write_text(json.dumps({**held, **envelope}, sort_keys=True, indent=1))


def test_a_newer_format_is_named_and_left_alone(shell: Shell) -> None:
    pq.write_table(pa.table(COLUMNS), "in.parquet")
    newest = max(Path("s/archive/manifests").iterdir())
    rewrite(newest, format=3)
    files = shell.files()
    for words in COMMANDS:
        line = shell.run(*words, "--store", "s").line()
        assert f"manifests/{newest.name} has format 3, this thinrow reads up to 2; update thinrow" in line
        assert shell.files() == files
    checked = shell.run("verify", "--store", "s")
    assert checked.status == 1
    assert "has format 3" in checked.err


def test_a_newer_recent_tier_is_named_and_left_alone(shell: Shell) -> None:
    pq.write_table(pa.table(COLUMNS), "in.parquet")
    with lmdb.open("s/recent", max_dbs=8) as env, env.begin(write=True) as txn:
        txn.put(b"format", seal(b"format", b"3"), db=env.open_db(b"meta", txn=txn))
    for words in (*COMMANDS, ["verify"]):
        result = shell.run(*words, "--store", "s")
        assert result.status == 1
        assert "s/recent has recent format 3, newer than 2; update thinrow" in result.err
        assert "Traceback" not in result.err


def segment_of(user: int) -> Path:
    (segment,) = Path(f"s/archive/segments/{bucket_of(np.array([user]), 2)[0]:05d}").iterdir()
    return segment


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_verify_lists_all_damage_and_what_to_do(shell: Shell) -> None:
    good = shell.run("verify", "--store", "s", "--all-generations")
    assert (good.status, good.out) == (0, "2 events in 2 generation(s) verified: no damage\n")
    segment, manifest = segment_of(7), min(Path("s/archive/manifests").iterdir())
    flip(segment, 130)
    flip(manifest, 40)
    with lmdb.open("s/recent", max_dbs=8) as env, env.begin(write=True) as txn:
        events, ids = env.open_db(b"events", txn=txn), env.open_db(b"ids", txn=txn)
        for db in (events, ids):
            cursor = txn.cursor(db)
            cursor.first()
            value = bytearray(cursor.value())
            value[-1] ^= 1
            txn.put(cursor.key(), bytes(value), db=db)
    result = shell.run("verify", "--store", "s")
    assert (result.status, result.out) == (1, "")
    damage = [line for line in result.err.splitlines() if line.startswith("damaged: ")]
    name = str(segment.relative_to("s/archive"))
    assert any(f"file {name}, user 7, column '" in d for d in damage)
    assert any(f"file manifests/{manifest.name}: " in d for d in damage)
    assert any("file s/recent, user 7: " in d or "file s/recent, user 7, " in d for d in damage)
    assert any("file s/recent: " in d and "event ids" in d for d in damage)
    print(result.err)
    advice = result.err[result.err.index("what to do next") :]
    assert "restore from a copy: " in advice
    assert name in advice
    assert advice.splitlines()[-1] == "then run again: thinrow verify --store s"
    # The same events can still be read where they lie in sound blocks; the damaged ones never come out wrong.
    line = shell.run("read", "7", "--store", "s").line()
    assert "corrupt data (file " in line


def test_verify_without_the_newest_manifest_or_the_tier(shell: Shell) -> None:
    assert shell.run("compact", "--store", "s").status == 0
    shutil.copytree("s", "t")
    newest = max(Path("s/archive/manifests").iterdir())
    newest.unlink()
    result = shell.run("verify", "--store", "s")
    assert result.status == 1
    assert "file s/recent, user 7: events up to number 2 were archived" in result.err
    middle = sorted(Path("t/archive/manifests").iterdir())[1]
    middle.unlink()
    shutil.rmtree("t/recent")
    result = shell.run("verify", "--store", "t")
    assert f"file manifests/{newest.name}: 1 manifests before it are missing" in result.err
    assert "file t/recent: it is missing, and with it what was not compacted" in result.err
    assert not Path("t/recent").exists()
    # A new tier, as any command that opens the store makes it.
    assert shell.run("read", "7", "--store", "t").status == 0
    result = shell.run("verify", "--store", "t")
    assert "file t/recent: it knows no user although the archive holds events" in result.err


def test_verify_names_files_that_nothing_names(shell: Shell) -> None:
    segment = segment_of(7)
    shutil.copy(segment, segment.with_name("0123456789abcdef.seg"))
    result = shell.run("verify", "--store", "s")
    assert result.status == 0
    assert "1 segment files" in result.out
    assert "0123456789abcdef.seg" in result.out
    assert "thinrow gc removes them" in result.out


def test_a_wrong_crc_of_the_body_is_found(shell: Shell) -> None:
    newest = max(Path("s/archive/manifests").iterdir())
    body = json.loads(newest.read_text())["body"]
    body["segments"] = [[], []]
    rewrite(newest, body=body)
    assert "the CRC of the manifest does not match" in shell.run("read", "7", "--store", "s").line()
    rewrite(newest, crc32c=crc_of(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()))
    assert shell.run("verify", "--store", "s").status == 1, "the recent tier knows that more was archived"


# --- a real process --------------------------------------------------------------------------------------------------


def test_a_real_process(unchanged: Shell) -> None:
    pq.write_table(pa.table(changed(at=pa.array([1, -3]))), "in.parquet")
    code = "from thinrow.cli.main import main; main()"
    command = [sys.executable, "-c", code, "ingest", "in.parquet", "--store", "s"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "thinrow: time 'at' is -3 in row 1; it must be 0 or more and under 2^63-2 milliseconds since 1970: "
        "drop or fix the row\n"
    )


def test_a_reader_that_stops_early(shell: Shell) -> None:
    n = 20_000
    numbers = pa.array(np.arange(n))
    pq.write_table(pa.table({"u": pa.array(np.zeros(n, np.int64)), "t": numbers, "v": numbers}), "in.parquet")
    words = ["--create", "--user", "u", "--time", "t"]
    assert shell.run("ingest", "in.parquet", "--store", "long", *words).status == 0
    code = "from thinrow.cli.main import main; main()"
    command = [sys.executable, "-c", code, "read", "0", "--store", "long"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"0\t1970")
        process.stdout.close()
        assert process.stderr.read() == b""
