"""Every engine of the loader keeps one contract; and what each promises beyond."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from thinrow.core.errors import InputError, WorkerLost
from thinrow.dpp.client import loader
from thinrow.dpp.engines import InTurn, Processes, Ray, Shared, Threads
from thinrow.dpp.engines.arena import MAX_KEPT
from thinrow.dpp.engines.processes import ProcessEngine
from thinrow.dpp.master import Master, MasterServer
from thinrow.history.store import HistoryStore
from thinrow.testing.engines import SMALL, Blocks, EngineContract, Unopenable, digest, kinds, same


class TestThreads(EngineContract):
    mortal = False

    def choice(self, lease_s: float = 60.0) -> Threads:
        return Threads()


class TestInTurn(EngineContract):
    mortal = False

    def choice(self, lease_s: float = 60.0) -> InTurn:
        return InTurn()


class TestProcesses(EngineContract):
    #: Of all tests: an end is noticed a moment later, and the same worker is not to be ended twice.
    killed_pids: ClassVar[set[int]] = set()

    def choice(self, lease_s: float = 60.0) -> Processes:
        return Processes(lease_s=lease_s)

    def kill(self, engine: Any, rng: np.random.Generator) -> bool:
        pids = [pid for pid in engine.pids if pid not in self.killed_pids]
        if pids:
            pid = pids[rng.integers(0, len(pids))]
            self.killed_pids.add(pid)
            os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def test_arrays_are_views_of_shared_memory(self, tmp_path: Path) -> None:
        engine = self.start(Blocks(tmp_path), stop=3)
        item = engine.next()
        shared = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in _maps() if "memfd:thinrow" in line]
        for array in kinds(item).values():
            start, stop = np.lib.array_utils.byte_bounds(array)
            assert not array.size or any(a <= start and stop <= b for a, b in shared)
            assert array.flags.writeable
        engine.close()
        assert engine.copied_bytes == 0

    def test_a_slow_reader_bounds_memory(self, tmp_path: Path) -> None:
        # An item has 1.6 MB in two arrays; the window would let 50 of them wait.
        blocks, limit = Blocks(tmp_path, rows=100_000), 8 << 20
        before = _shared_kb()
        engine = Processes(buffer_bytes=limit).start(blocks, first=0, stop=200, workers=2, window=50)
        for v in range(60):
            item = engine.next()
            assert item["item"] == v
            if v in (0, 20, 40):
                time.sleep(0.3)
                # What waits, what each worker has in hand, and what the reader had.
                assert len(blocks.made) - v <= limit // 1_600_000 + 2 + 2
                assert _shared_kb() - before <= (limit + (4 << 20)) // 1024
        assert engine.peak_bytes <= limit + (4 << 20)
        assert engine.copied_bytes == 0
        engine.close()

    @pytest.mark.parametrize("rows", [10, 200_000])
    def test_what_is_kept_beyond_the_bound_is_copied(self, tmp_path: Path, rows: int) -> None:
        blocks, limit = Blocks(tmp_path, rows=rows), 16 << 20
        n = MAX_KEPT + 20 if rows == 10 else 20
        engine = Processes(buffer_bytes=limit).start(blocks, first=0, stop=None, workers=2, window=4)
        kept = [engine.next() for _ in range(n)]
        assert engine.copied_bytes > 0
        assert engine.peak_bytes <= 2 * limit + 2 * (4 << 20)
        del kept[3:]
        copied = engine.copied_bytes
        assert all(same(engine.next(), blocks.expected(n + i)) for i in range(20))
        assert engine.copied_bytes == copied
        assert all(same(item, blocks.expected(v)) for v, item in enumerate(kept))
        engine.close()

    def test_an_item_larger_than_the_buffer_is_delivered(self, tmp_path: Path) -> None:
        blocks = Blocks(tmp_path, rows=100_000)
        engine = Processes(buffer_bytes=1000).start(blocks, first=0, stop=6, workers=2, window=4)
        assert all(same(engine.next(), blocks.expected(v)) for v in range(6))
        engine.close()

    def test_close_leaves_nothing(self, tmp_path: Path) -> None:
        engine: ProcessEngine[Any] = Processes().start(  # type: ignore[assignment]
            Blocks(tmp_path), first=0, stop=None, workers=2, window=4
        )
        engine.next()
        engine.close()
        # Memory goes without a collection; that of failed tests before this one has to be gone first.
        gc.collect()
        descriptors, maps, shm = len(os.listdir("/proc/self/fd")), _memfd_maps(), {*os.listdir("/dev/shm")}
        for _ in range(3):
            engine = Processes().start(  # type: ignore[assignment]
                Blocks(tmp_path), first=0, stop=None, workers=2, window=4
            )
            item = engine.next()
            pids = engine.pids
            engine.close()
            del item, engine
            assert pids
            assert not any(_running(pid) for pid in pids)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert _memfd_maps() <= maps
        # What other processes have there comes and goes, too; what this one left would stay.
        left, deadline = {*os.listdir("/dev/shm")} - shm, time.monotonic() + 60
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left &= {*os.listdir("/dev/shm")}
        assert not left

    def test_workers_end_with_a_killed_reader(self, tmp_path: Path) -> None:
        code = (
            "import os, sys, time\n"
            "from pathlib import Path\n"
            "from thinrow.dpp.engines import Processes\n"
            "from thinrow.testing.engines import Blocks\n"
            "blocks = Blocks(Path(sys.argv[1]), delay_s=0.05)\n"
            "engine = Processes().start(blocks, first=0, stop=None, workers=2, window=4)\n"
            "items = [engine.next() for _ in range(3)]\n"
            "while len(engine.pids) < 2:\n"
            "    engine.next()\n"
            "print(*engine.pids, flush=True)\n"
            "time.sleep(600)\n"
        )
        reader = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        pids = list(map(int, reader.stdout.readline().split()))
        assert len(pids) == 2
        children = _descendants(reader.pid)
        assert set(pids) <= set(children)
        reader.kill()
        reader.wait()
        deadline = time.monotonic() + 20
        while any(_running(pid) for pid in children):
            assert time.monotonic() < deadline, "a worker outlived its reader"
            time.sleep(0.05)

    def test_a_killed_template_is_replaced(self, tmp_path: Path) -> None:
        blocks = Blocks(tmp_path, delay_s=0.01)
        engine: ProcessEngine[Any] = Processes().start(  # type: ignore[assignment]
            blocks, first=0, stop=40, workers=2, window=4
        )
        assert same(engine.next(), blocks.expected(0))
        pids = engine.pids
        template = int(Path(f"/proc/{pids[0]}/stat").read_text().split()[3])
        for pid in (template, *pids):
            os.kill(pid, signal.SIGKILL)
        assert all(same(engine.next(), blocks.expected(v)) for v in range(1, 40))
        assert engine.restarts >= len(pids)
        engine.close()

    def test_what_cannot_be_sent_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="workers elsewhere cannot open what this loader reads"):
            Processes().start(lambda item: item, first=0, stop=1, workers=1, window=1)
        with pytest.raises(InputError, match="lease_s=0"):
            Processes(lease_s=0)

    def test_workers_that_cannot_open_say_why(self, tmp_path: Path) -> None:
        engine = Processes().start(Unopenable(tmp_path), first=0, stop=1, workers=2, window=1)
        with pytest.raises(ValueError, match="cannot be opened"):
            engine.next()
        engine.close()
        engine = Processes().start(Unopenable(tmp_path, dies=True), first=0, stop=1, workers=2, window=1)
        with pytest.raises(WorkerLost, match="3 workers one after another ended before"):
            engine.next()
        engine.close()


class _RayEngine(EngineContract):
    """On a cluster of two nodes."""

    killed_actors: ClassVar[set[Any]] = set()

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def cluster(cls) -> Iterator[Any]:
        ray = pytest.importorskip("ray")
        from ray.cluster_utils import Cluster

        memory = {"object_store_memory": 160 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, **memory})
        cluster.add_node(num_cpus=3, **memory)
        ray.init(address=cluster.address, log_to_driver=False)
        cls.ray = ray
        yield cluster
        ray.shutdown()
        cluster.shutdown()

    def choice(self, lease_s: float = 60.0) -> Ray:
        return Ray(lease_s=lease_s)

    def kill(self, engine: Any, rng: np.random.Generator) -> bool:
        actors = [actor for actor in engine.actors if actor._actor_id not in self.killed_actors]
        if actors:
            actor = actors[rng.integers(0, len(actors))]
            self.killed_actors.add(actor._actor_id)
            self.ray.kill(actor)
        return bool(actors)


#: An actor takes seconds to start, so that only this runs always.
_ALWAYS = {"test_a_killed_worker_changes_nothing"}


class TestRay(_RayEngine):
    locals().update({n: None for n in dir(EngineContract) if n.startswith("test_") and n not in _ALWAYS})

    @pytest.mark.slow
    def test_actors_are_spread_and_arrays_are_views_of_the_object_store(self, tmp_path: Path) -> None:
        blocks = Blocks(tmp_path, rows=100_000)
        engine = self.start(blocks, stop=None)
        items = [engine.next()]
        while len(engine.actors) < 2:
            items = [*items[:3], engine.next()]
        node = lambda _: __import__("ray").get_runtime_context().get_node_id()  # noqa: E731
        where = [actor.__ray_call__.remote(node) for actor in engine.actors]
        assert len(set(self.ray.get(where))) == 2
        shared = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in _maps() if "plasma" in line]
        items = [*items[:3], engine.next()]
        for name in ("n", "x"):
            start, stop = np.lib.array_utils.byte_bounds(items[-1][name])
            assert any(a <= start and stop <= b for a, b in shared)
            assert not items[-1][name].flags.writeable
        engine.close()
        assert all(same(item, blocks.expected(v)) for v, item in enumerate(items[:3]))


@pytest.mark.slow
class TestRayWhole(_RayEngine):
    """All of the contract, and readers that share the actors of a cluster."""

    def test_readers_share_what_a_master_gives(
        self, opened: tuple[HistoryStore, Any], wanted: list[str], tmp_path: Path
    ) -> None:
        rng, got = np.random.default_rng(3), (list[str](), list[str]())
        with contextlib.closing(MasterServer(Master(3, ledger=tmp_path / "ledger"))) as server:
            engines = [Shared(server.url, f"job {k}", engine=self.choice(), report_s=0.1) for k in range(2)]
            readers = [loader(*opened, engine=e, workers=3, epochs=2, **SMALL) for e in engines]
            for step, batches in enumerate(zip(*readers, strict=True)):
                for mine, batch in zip(got, batches, strict=True):
                    mine.append(digest(batch))
                if step in (2, 5):
                    inner: Any = readers[step % 2].engine
                    self.kill(inner._engine, rng)
            for reader in readers:
                reader.close()
        assert got == (wanted, wanted)


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def _memfd_maps() -> int:
    return sum("memfd:thinrow" in line for line in _maps())


def _shared_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0])


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and _running(int(name)):
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [pid]
    for one in found:
        found += [p for p, parent in parents.items() if parent == one]
    return found[1:]
