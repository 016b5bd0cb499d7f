"""Pseudonyms: one key, one name; the key is nowhere in the store, and another one is refused."""

import hashlib
import hmac
import json

import pyarrow as pa
import pytest
from click.testing import CliRunner

from thinrow.cli.main import cli
from thinrow.core.errors import InputError
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema
from thinrow.sources.files import FileSource
from thinrow.sources.ingest import Ingest, IngestOptions
from thinrow.sources.pseudonyms import Pseudonyms

KEY = bytes(16)
SECRET = b"a key that nobody knows"


def test_they_are_hmac_sha256_of_the_text():
    digest = hmac.new(KEY, b"7", hashlib.sha256).digest()
    assert Pseudonyms(KEY).of(["7"], "int64").to_pylist() == [int.from_bytes(digest[:8], "big") >> 1]
    assert Pseudonyms(KEY).of(["7"], "string").to_pylist() == [digest[:16].hex()]
    seven, eight = Pseudonyms(KEY).of(["7", "8"], "int64").to_pylist()
    named = Pseudonyms(KEY).apply(pa.table({"u": [7, None, 7, 8]}), "u", "int64")
    assert named["u"].to_pylist() == [seven, None, seven, eight]
    assert Pseudonyms(KEY).apply(pa.table({"u": ["7"]}), "u", "int64")["u"].to_pylist() == [seven]


def test_the_example_of_the_module():
    assert Pseudonyms(bytes(16)).of(["7"], "int64").tolist() == [1744944827902622075]


def test_keys_are_loaded_and_checked(tmp_path, monkeypatch):
    (tmp_path / "key").write_bytes(KEY)
    monkeypatch.setenv("THE_KEY", "k" * 16)
    assert Pseudonyms.load(str(tmp_path / "key")).check == Pseudonyms(KEY).check
    assert Pseudonyms.load("env:THE_KEY").check == Pseudonyms(b"k" * 16).check
    for place, what in ((str(tmp_path / "none"), "not at"), ("env:NO_KEY", "no environment variable")):
        with pytest.raises(InputError, match=what):
            Pseudonyms.load(place)
    with pytest.raises(InputError, match="15 bytes"):
        Pseudonyms(bytes(15))


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_a_store_keeps_to_its_key(tmp_path, kind):
    schema = EventSchema.infer(pa.schema({"user": kind, "ts": pa.int64(), "item": pa.int64()}), user="user", time="ts")
    user = {"int64": 123456789, "string": "someone@example.com"}[str(kind)]
    lines = [{"user": user, "ts": i, "item": i} for i in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with HistoryStore.create(tmp_path / "s", schema, 4, sync=False) as store:
        made = Pseudonyms(SECRET)
        run = lambda key: Ingest(store, FileSource("f", [tmp_path / "a.jsonl"]), IngestOptions(pseudonyms=key)).run()  # noqa: E731
        assert run(made).events == 5
        name = made.of([str(user)], schema.user_kind).to_pylist()
        assert store.users().tolist() == name
        store.compact()
        assert run(Pseudonyms(SECRET)).events == 0
        for other in (Pseudonyms(b"x" * 16), None):
            with pytest.raises(InputError, match="pseudonyms"):
                run(other)
        held = b"".join(p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file())
        assert SECRET not in held
        if kind == pa.string():
            assert b"someone" not in held


def test_pseudonyms_begin_with_the_first_event(tmp_path):
    schema = EventSchema.infer(pa.schema({"user": pa.int64(), "ts": pa.int64()}), user="user", time="ts")
    (tmp_path / "a.jsonl").write_text('{"user": 1, "ts": 1}\n')
    with HistoryStore.create(tmp_path / "s", schema, 4, sync=False) as store:
        store.append(pa.table({"user": [1], "ts": [1]}))
        with pytest.raises(InputError, match="as they came"):
            Ingest(store, FileSource("f", [tmp_path / "a.jsonl"]), IngestOptions(pseudonyms=Pseudonyms(KEY)))


def test_commands_that_name_users_ask_for_the_key(tmp_path):
    schema = EventSchema.infer(
        pa.schema({"user": pa.int64(), "ts": pa.int64(), "item": pa.int64()}), user="user", time="ts"
    )
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"user": 7, "ts": i, "item": i}) for i in (1, 2)) + '\n{"user":7\n'
    )
    with HistoryStore.create(tmp_path / "s", schema, 4, sync=False) as store:
        Ingest(store, FileSource("f", [tmp_path / "a.jsonl"]), IngestOptions(pseudonyms=Pseudonyms(KEY))).run()
        assert store.dead_letters.count() == 1
        name = str(store.users()[0])

    def ask(*words):
        return CliRunner().invoke(cli, [words[0], "--store", str(tmp_path / "s"), *words[1:]], standalone_mode=False)

    for command in ("read", "inspect", "erase"):
        assert "--as-stored" in str(ask(command, "7").exception)
    key = ["--pseudonyms", str(tmp_path / "key")]
    assert ask("read", "7", *key).output.count("\n") == ask("read", name, "--as-stored").output.count("\n") == 2
    assert "2 recent" in ask("inspect", "7", *key).output
    assert ask("erase", "7", *key, "--grace", "0").exception is None
    with HistoryStore.open(tmp_path / "s") as store:
        assert store.dead_letters.count() == 0
        assert store.read(Pseudonyms(KEY).of(["7"], "int64").to_pylist(), 1 << 60).histories.lengths().tolist() == [0]
