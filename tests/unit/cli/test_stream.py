"""``thinrow ingest`` of sources, and ``thinrow sources``, as a user types them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from thinrow.cli.main import cli
from thinrow.cli.stream import Compacting
from thinrow.core.errors import InputError, SchemaError, StoreError, ThinrowError
from thinrow.history.store import HistoryStore
from thinrow.sources.ingest import IngestReport


def run(*arguments):
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def write(path, n, start=0):
    with path.open("a") as file:
        for i in range(start, start + n):
            file.write(json.dumps({"user": f"u{i % 3}", "ts": 1000 + i, "item": i, "tags": ["a"]}) + "\n")


def items(store_path):
    with HistoryStore.open(store_path) as store:
        return items_of(store)


def items_of(store):
    return sorted(store.read(["u0", "u1", "u2"], 1 << 60).histories.to_jagged("item").values.tolist())


def compacted(store_path, wanted):
    """Whether a store that another process is making, perhaps, holds what is wanted, some of it in the archive."""
    try:
        with HistoryStore.open(store_path) as store:
            return items_of(store) == wanted and store.pin().number > 1
    except ThinrowError:
        return False


def until(holds, process):
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)


def test_from_a_sample_to_a_store_and_back_for_more(tmp_path):
    events, store, schema = tmp_path / "e.jsonl", tmp_path / "store", tmp_path / "s.toml"
    write(events, 5)
    with events.open("a") as file:
        file.write("junk\n")
    schema.write_text(run("sources", "sample", events))
    assert 'tags = { trait = "id_list", dtype = "string", nullable = true }' in schema.read_text()
    assert '"item": 0' in run("sources", "sample", events, "--show")
    out = run("ingest", events, "--store", store, "--create", "--schema", schema)
    assert out == "5 events appended, 0 known already, 1 refused\n"
    write(events, 5, 5)
    assert run("ingest", events, "--store", store, "--compact").startswith("5 events appended")
    assert items(store) == list(range(10))
    assert "1 letters" in run("sources", "letters", "--store", store)
    assert json.loads(run("sources", "letters", "--store", store, "--all"))["payload"] == "anVuaw=="
    assert run("sources", "retry", "--store", store) == "0 events appended, 0 known already, 1 letters left\n"
    assert '"bytes"' in run("sources", "positions", tmp_path, "--store", store)
    assert "would go" in run("sources", "drop", "--store", store)
    assert run("sources", "drop", "--store", store, "--yes") == "1 letters dropped\n"


def test_options_that_make_no_sense_are_refused(tmp_path):
    write(tmp_path / "e.jsonl", 3)
    (tmp_path / "empty.jsonl").write_text("")
    store, events = tmp_path / "store", tmp_path / "e.jsonl"
    for arguments, what in (
        ([events, "--store", store], "no store"),
        ([events, "--store", store, "--create"], "--create needs"),
        ([events, "--store", store, "--compact-every", 5], "--follow"),
        ([events, "--store", store, "--compact-events", 5], "--follow"),
        ([events, "--store", store, "--bulk", "--follow"], "--bulk"),
        (["kafka://x", "--store", store, "--create"], "kafka://HOST:PORT/TOPIC"),
        (["kafka://h:1/t?x=1", "--store", store, "--create"], "'x'"),
        (["kafka://h:1/t", "b", "--store", store, "--create"], "one URL"),
        (["kafka://u:p@h:1/t", "--store", store, "--create"], "no user"),
        ([tmp_path / "empty.jsonl", "--store", store, "--create", "--user", "user", "--time", "ts"], "no events"),
    ):
        with pytest.raises(InputError, match=what):
            run("ingest", *arguments)
    with pytest.raises(SchemaError, match="nothing"):
        run("ingest", events, "--store", store, "--create", "--user", "nothing", "--time", "ts")
    assert not store.exists()


def test_compactions_come_after_so_many_events_and_not_before(monkeypatch):
    monkeypatch.setattr("thinrow.cli.stream._PAUSE_S", 0.01)

    class Store:
        compacted = 0

        def compact(self):
            # The first one fails, and is tried again.
            self.compacted += 1
            if self.compacted == 1:
                raise StoreError("no space left")

    def waited_for(n):
        end = time.monotonic() + 60
        while store.compacted < n and time.monotonic() < end:
            time.sleep(0.001)
        return store.compacted

    store = Store()
    with Compacting(store, None, 10, threading.Event()) as compacting:
        for events, compactions in ((9, 0), (10, 1), (11, 2), (20, 2), (21, 3), (50, 4)):
            compacting.progress(IngestReport(events=events))
            assert waited_for(compactions) == compactions
            # Until it is counted as taken.
            end = time.monotonic() + 60
            while compactions > 1 and compacting._appended - compacting._taken >= 10 and time.monotonic() < end:
                time.sleep(0.001)
    assert store.compacted == 4
    with Compacting(store, None, None, threading.Event()) as compacting:
        compacting.progress(IngestReport(events=1_000))
        assert compacting.relieve is None
    assert store.compacted == 4


def test_sigterm_ends_it_once_all_is_durable(tmp_path):
    folder, store = tmp_path / "in", tmp_path / "store"
    folder.mkdir()
    write(folder / "a.jsonl", 10)
    program = "from thinrow.cli.main import main; main()"
    arguments = ["ingest", str(folder), "--store", str(store), "--create", "--user", "user", "--time", "ts", "--follow"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments, "--compact-every", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    try:
        until(lambda: (store / "recent" / "data.mdb").exists(), process)
        write(folder / "b.jsonl", 10, 10)
        until(lambda: compacted(store, list(range(20))), process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "20 events appended, 0 known already, 0 refused\n"), err
    assert items(store) == list(range(20))
