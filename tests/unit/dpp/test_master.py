"""The master: fair shares, leases, a ledger; what holds a reader up; what is shown of it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from thinrow.cli.dpp import command
from thinrow.core.errors import InputError
from thinrow.dpp.engines import Processes, Shared, Threads
from thinrow.dpp.engines.shared import SharedEngine
from thinrow.dpp.master import Master, MasterServer, metrics, page
from thinrow.dpp.scaling import Sample, Scaler
from thinrow.dpp.shares import Wish, shares
from thinrow.testing.engines import Blocks, same

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
wishes = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.builds(Wish, st.sampled_from(["a", "b", "c"]), st.just(1.0), st.integers(1, 9)),
    max_size=8,
)


@given(st.integers(1, 30), wishes)
def test_shares_are_fair_and_nothing_that_is_wanted_is_left(workers: int, asked: dict[str, Wish]) -> None:
    given_ = shares(workers, asked)
    assert given_.keys() == asked.keys()
    assert all(1 <= n <= max(asked[name].most, 1) for name, n in given_.items())
    used, wanted = sum(given_.values()), sum(w.most for w in asked.values())
    assert used == max(min(workers, wanted), len(asked))
    members = {s: sum(w.session == s for w in asked.values()) for s in "abc"}
    for name, n in given_.items():
        for other, m in given_.items():
            # Nobody could do with one of another who has more than one above it for its weight.
            if n < asked[name].most and m > 1:
                assert (m - 1) * members[asked[other].session] <= n * members[asked[name].session] + 1e-9


def test_a_session_of_more_weight_has_more() -> None:
    both = {"train/0": Wish("train", 3, 99), "train/1": Wish("train", 3, 99), "eval": Wish("eval", 1, 99)}
    assert shares(16, both) == {"train/0": 6, "train/1": 6, "eval": 4}
    assert shares(8, both | {"eval": Wish("eval", 1, 1)}) == {"train/0": 4, "train/1": 3, "eval": 1}
    assert shares(1, both) == dict.fromkeys(both, 1)


def said(name: str, one: str = "1", **more: Any) -> dict[str, Any]:
    return {"id": one, "name": name, "session": name, "weight": 1.0, "want": 9, **more}


def test_a_silent_reader_loses_its_share_and_a_name_is_held_once(tmp_path: Path) -> None:
    now = [0.0]
    master = Master(8, ledger=tmp_path / "ledger", lease_s=10, clock=lambda: now[0])
    assert master.report(said("a")) == 8
    assert master.report(said("b", head=5)) == 4
    assert master.report(said("a", head=7)) == 4
    with pytest.raises(InputError, match="a reader named 'a' runs already"):
        master.report(said("a", "2"))
    now[0] = 9
    assert master.report(said("b", head=6)) == 4
    now[0] = 15
    assert master.report(said("b", head=9)) == 8
    assert master.report(said("a", "2", head=3)) == 4
    assert master.report(said("a", "2", leave=True)) == 0
    assert [m["name"] for m in master.status()["members"]] == ["b"]
    # A new master knows where they stood, and nothing of who is there.
    again = Master(8, ledger=tmp_path / "ledger", clock=lambda: now[0])
    assert again.status() == {"workers": 8, "members": [], "ledger": {"a": 3, "b": 9}}


def test_what_is_no_report_or_ledger_is_named(tmp_path: Path) -> None:
    master = Master(2)
    for wrong in ({}, {"id": 1}, said("a", weight="x"), said("a", head="far"), said("a", want=None)):
        with pytest.raises(InputError, match="not a report"):
            master.report(wrong)
    with pytest.raises(InputError, match="weight=0"):
        master.report(said("a", weight=0))
    with pytest.raises(InputError, match="workers=0"):
        Master(0)
    for text in ("no json", "[]", "{}", '{"format": 1}'):
        (tmp_path / "ledger").write_text(text)
        with pytest.raises(InputError, match="is no ledger of a master"):
            Master(2, ledger=tmp_path / "ledger")
    (tmp_path / "ledger").write_text('{"format": 2, "positions": {}}')
    with pytest.raises(InputError, match="has format 2, this thinrow reads 1"):
        Master(2, ledger=tmp_path / "ledger")


def test_page_and_metrics_say_what_the_status_says_whatever_the_names() -> None:
    master = Master(5)
    hostile = 'x"\n\\</td><script>alert(1)</script>&'
    figures = {"seconds": 2.0, "items": 8, "stall": 0.25, "waste": 0.5, "depth": 0.75, "workers": 3, "head": 1234}
    figures |= {"stop": 5000, "verified": 77_000}
    master.report(said(hostile, **figures, bottleneck='stor"age', why="a <b>"))
    master.report(said("plain"))
    status = master.status()
    root = ElementTree.fromstring(page(status).replace("<!DOCTYPE html>", ""))
    cells = [[td.text or "" for td in tr.findall("td")] for tr in root.iter("tr")]
    assert cells[2][:6] == [hostile, hostile, "1,234", "5,000", "77,000", "4.00"]
    assert cells[2][6:10] == ["25.0%", "50.0%", "75%", "3"]
    assert cells[1][3] == "no end"
    assert cells[2][-2:] == ['stor"age', "a <b>"]
    assert [c[0] for c in cells[1:]] == ["plain", hostile]
    assert "2 readers, 3 of 5 workers" in "".join(root.itertext())
    found = {f.name: f for f in text_string_to_metric_families(metrics(status))}
    samples = {s.labels["reader"]: s.value for s in found["thinrow_dpp_stall_ratio"].samples}
    assert samples == {hostile: 0.25, "plain": 0.0}
    assert found["thinrow_dpp_pool_workers"].samples[0].value == 5
    (slow,) = found["thinrow_dpp_bottleneck"].samples
    assert slow.labels == {"reader": hostile, "session": hostile, "what": 'stor"age'}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; apt-get install chromium")
def test_the_page_is_seen_in_a_browser(tmp_path: Path) -> None:
    picture, screen = tmp_path / "page.png", ("--window-size=1400,400", "--hide-scrollbars")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", *screen]
    with MasterServer(Master(4)) as server:

        def seen(*what: str) -> str:
            ran = subprocess.run([CHROMIUM, *options, *what, server.url], capture_output=True, text=True, timeout=120)
            assert ran.returncode == 0, ran.stderr
            return ran.stdout

        empty = seen(f"--screenshot={picture}") or picture.read_bytes()
        server.master.report(said("train/0", head=77, stop=80, seconds=1.0, items=3, workers=2, bottleneck="storage"))
        server.master.report(said("</td><script>document.body.remove()</script>"))
        dom = seen("--dump-dom")
        assert dom.count("<tr>") == 3
        assert "<td>train/0</td>" in dom
        assert "<td>storage</td>" in dom
        assert "2 readers, 2 of 4 workers" in dom
        seen(f"--screenshot={picture}")
        assert picture.read_bytes() != empty


def simulated(scaler: Scaler, rate_of: Any, trainer: float, rounds: int = 40) -> list[Any]:
    """Decisions where n workers make ``rate_of(n)`` items a second and the trainer takes at most ``trainer``."""
    workers, found = 1, []
    for _ in range(rounds):
        made = rate_of(workers)
        rate = min(made, trainer)
        stall, busy = max(0.0, 1 - rate / trainer), workers * rate / made
        found.append(
            scaler.decide(Sample(1.0, round(rate * 100), stall, workers, busy, 0.0, busy, 0.0, float(made > trainer)))
        )
        workers = found[-1].workers
    return found


def test_workers_come_while_they_help_and_it_holds_still_after_that() -> None:
    # Each worker makes 1 a second, the trainer takes 3.5: four, and never more.
    found = simulated(Scaler(16), lambda n: float(n), 3.5)
    assert [d.workers for d in found[:5]] == [2, 3, 4, 4, 4]
    assert {d.workers for d in found[3:]} == {4}
    assert found[0].bottleneck == "worker cpu"
    assert found[-1].bottleneck == "trainer"
    # Two processors: a third worker brings nothing, is given back, and is not tried again.
    found = simulated(Scaler(16), lambda n: min(float(n), 2.0), 3.5)
    assert [d.workers for d in found[:4]] == [2, 3, 2, 2]
    assert {d.workers for d in found[2:]} == {2}
    assert "nothing has changed" in found[-1].why
    # One is a little too few, and of two the second is idle most of the time: two, and no coming and going.
    found = simulated(Scaler(4), lambda n: 0.98 if n == 1 else 8.0, 1.0)
    assert [d.workers for d in found[:3]] == [2, 1, 2]
    assert {d.workers for d in found[2:]} == {2}
    assert "with one less the trainer waited before" in found[-1].why
    # All that may be used are.
    assert simulated(Scaler(2), lambda n: float(n), 9.0)[-1].why.endswith("all 2 that may be used are")


def test_the_bottleneck_is_named_and_evidence_given() -> None:
    def of(**changes: Any) -> Any:
        values = {"seconds": 2.0, "items": 10, "stall_s": 1.0, "workers": 4, "busy_s": 7.0, "blocked_s": 0.0}
        return Scaler(9).decide(Sample(**{**values, "cpu_s": 6.5, "queued_s": 0.0, "depth": 0.0, **changes}))

    assert of().bottleneck == "worker cpu"
    assert of(cpu_s=1.0, queued_s=2.0).bottleneck == "storage"
    # Workers that wait for a processor wait for no byte.
    assert of(cpu_s=1.0, queued_s=5.0).bottleneck == "processors"
    assert "CPU 14% of busy time, 71% waiting for a processor" in of(cpu_s=1.0, queued_s=5.0).why
    assert of(cpu_s=None).bottleneck == "workers"
    assert of(busy_s=1.0, blocked_s=6.0).bottleneck == "transport"
    assert of(busy_s=1.0, blocked_s=6.0).workers == 4
    assert of(items=0, busy_s=0.0).bottleneck == "unknown"
    idle = of(stall_s=0.0, busy_s=1.0, depth=0.9)
    assert (idle.bottleneck, idle.workers) == ("trainer", 3)
    for part in ("stall 50.0%", "waste 12.5%", "5 items/s", "4 workers", "CPU 93% of busy time"):
        assert part in of().why


def took(engine: Any, blocks: Blocks, stop: int, first: int = 0) -> None:
    for v in range(first, stop):
        assert same(engine.next(), blocks.expected(v))


@pytest.mark.parametrize("inner", [Threads(), Processes()])
def test_readers_share_workers_and_every_item_comes_once_across_a_master_that_restarts(
    tmp_path: Path, inner: Any
) -> None:
    blocks = [Blocks(tmp_path / str(i), delay_s=0.01) for i in range(2)]
    for b in blocks:
        b.folder.mkdir()
    server = MasterServer(Master(4, ledger=tmp_path / "ledger", lease_s=5))
    options = {"engine": inner, "report_s": 0.2, "session": "train"}
    engines: list[SharedEngine[Any]] = [
        Shared(server.url, f"train/{i}", **options).start(b, first=0, stop=None, workers=4, window=8)  # type: ignore[arg-type]
        for i, b in enumerate(blocks)
    ]
    with pytest.raises(InputError, match="'train/0' runs already"):
        Shared(server.url, "train/0").start(blocks[0], first=0, stop=1, workers=1, window=1)
    at = 0
    deadline = time.monotonic() + 30
    # What a reader asks for depends on what it sees of a busy machine: more than it began with, at some time. And where
    # each stands is known before the master ends.

    def under_way() -> bool:
        status = server.master.status()
        return sum(m["workers"] for m in status["members"]) >= 3 and min(status["ledger"].values()) > 0

    while not under_way():
        assert time.monotonic() < deadline, server.master.status()
        for engine, b in zip(engines, blocks, strict=True):
            took(engine, b, at + 5, at)
        at += 5
    assert sum(m["share"] for m in server.master.status()["members"]) <= 4
    port = server.port
    server.close()
    for engine, b in zip(engines, blocks, strict=True):
        took(engine, b, at + 40, at)
    at += 40
    server = MasterServer(Master(3, ledger=tmp_path / "ledger"), port=port)
    assert all(head > 0 for head in server.master.status()["ledger"].values())
    engines[1].close()
    while [m["name"] for m in server.master.status()["members"]] != ["train/0"]:
        assert time.monotonic() < deadline + 30, server.master.status()
        took(engines[0], blocks[0], at + 5, at)
        at += 5
    assert sorted(set(blocks[0].made))[:at] == list(range(at))
    engines[0].close()
    assert server.master.status()["members"] == []
    assert engines[0].decisions[-1].why
    server.close()


def test_workers_that_share_one_processor_are_not_said_to_wait_for_storage() -> None:
    with MasterServer(Master(2)) as server:
        engine = Shared(server.url, "one", engine=Processes(), report_s=0.2).start(
            math.factorial, first=30_000, stop=None, workers=2, window=4
        )
        deadline, inner, only = time.monotonic() + 60, engine._engine, min(os.sched_getaffinity(0))
        while not any(d.bottleneck == "processors" for d in engine.decisions):
            assert time.monotonic() < deadline, engine.decisions
            for pid in inner.pids:  # type: ignore[attr-defined]
                os.sched_setaffinity(pid, {only})
            engine.next()
        (why, *_) = [d.why for d in engine.decisions if d.bottleneck == "processors"]
        assert "waiting for a processor" in why
        assert all(t.queued_s >= 0 for t in engine.gauges().times.values())
        engine.close()


def test_a_wait_under_way_is_a_stall() -> None:
    with MasterServer(Master(1)) as server:
        engine = Shared(server.url, "slow", engine="threads", report_s=0.05).start(
            lambda i: time.sleep(0.5), first=0, stop=3, workers=1, window=2
        )
        for _ in range(3):
            engine.next()
        assert sum(d.bottleneck == "trainer" for d in engine.decisions) <= len(engine.decisions) // 2
        engine.close()


def test_a_start_that_fails_gives_its_name_back(tmp_path: Path) -> None:
    with MasterServer(Master(1)) as server:
        shared = Shared(server.url, "one", engine="processes")
        with pytest.raises(InputError, match="workers elsewhere cannot open"):
            shared.start(lambda item: item, first=0, stop=1, workers=1, window=1)
        engine = shared.start(Blocks(tmp_path), first=0, stop=1, workers=1, window=1)
        engine.next()
        with pytest.raises(InputError, match=r"'one' runs already, heard of .* s ago; .* when 10 s have passed"):
            shared.start(Blocks(tmp_path), first=0, stop=1, workers=1, window=1)
        engine.close()


def test_a_ledger_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match=r"the ledger .*none/ledger cannot be written"):
        Master(1, ledger=tmp_path / "none" / "ledger")
    (folder := tmp_path / "some").mkdir()
    master = Master(2, ledger=folder / "ledger")
    shutil.rmtree(folder)
    report = {"id": "1", "name": "a", "session": "a", "weight": 1.0, "want": 2}
    assert master.report(report) == 2
    assert "was not written" in caplog.text


def test_a_reader_without_a_master_goes_on_with_one_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocks = Blocks(tmp_path)
    engine = Shared("http://127.0.0.1:9", "r", engine="threads", report_s=0.1).start(
        blocks, first=0, stop=20, workers=4, window=8
    )
    took(engine, blocks, 20)
    assert engine.gauges().workers <= 1
    engine.close()
    assert "r goes on with what it has, no answer of the master" in caplog.text
    for wrong in ({"master": "here"}, {"name": ""}, {"weight": 0.0}, {"report_s": 0.0}):
        with pytest.raises(InputError):
            Shared(**{"master": "http://h:1", "name": "r", **wrong})  # type: ignore[arg-type]


def test_the_command_shows_what_the_master_knows() -> None:
    with MasterServer(Master(4)) as server:
        server.master.report(said("train/0", head=77, seconds=1.0, items=3, workers=2, bottleneck="storage"))
        shown = CliRunner().invoke(command, ["top", server.url, "--once"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, shown.output
        assert "1 readers, 2 of 4 workers" in shown.output
        assert all(word in shown.output for word in ("train/0", "77", "3.00", "storage"))
        # A terminal of 80 characters: no column is cut, and the reasons follow.
        why = "stall 40.0%, waste 12.5%, depth 0%, 3 items/s with 2 workers, CPU 93% of busy time: one more"
        figures = {"seconds": 1.0, "items": 1234, "workers": 12, "stall": 1.0, "waste": 1.0, "depth": 1.0}
        figures |= {"head": 1_234_567, "stop": 9_876_543, "bottleneck": "worker cpu", "why": why}
        server.master.report(said("eval-long-name/[red]0", **figures))
        shown = CliRunner().invoke(command, ["top", server.url, "--once"], env={"COLUMNS": "80"})
        lines = shown.output.splitlines()
        assert max(map(len, lines)) <= 80
        (line,) = [line for line in lines if "1,234,567" in line]
        assert all(word in line for word in ("9,876,543", "1234.00", "100%", "12/2", "worker cpu"))
        assert why in " ".join(line.strip() for line in lines)
        server.master.report(said("eval-long-name/[red]0", leave=True))
        for path, method, body in (("/none", "GET", None), ("/v1/report", "POST", b"[]"), ("/v1/report", "POST", b"{")):
            request = urllib.request.Request(server.url + path, body, method=method)
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request)
            assert error.value.code == (404 if body is None else 400)
        with urllib.request.urlopen(server.url + "/status") as answer:
            assert json.load(answer)["ledger"] == {"eval-long-name/[red]0": 1_234_567, "train/0": 77}
        with pytest.raises(InputError, match=r"cannot listen at 127\.0\.0\.1"):
            MasterServer(Master(1), port=server.port)
    failed = CliRunner().invoke(command, ["top", "http://127.0.0.1:9", "--once"])
    assert isinstance(failed.exception, InputError)
    assert "no master at" in str(failed.exception)
