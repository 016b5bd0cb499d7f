"""Loaders that share workers: the same batches, each once, whatever dies: workers, the master, a rank."""

from __future__ import annotations

import os
import signal
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.dpp import BatchBudget, Loader, loader
from thinrow.dpp.engines import Processes, Shared
from thinrow.dpp.engines.shared import SharedEngine
from thinrow.dpp.master import Master, MasterServer
from thinrow.testing.engines import digest
from thinrow.testing.world import World, make_world

OPTIONS: dict[str, Any] = {"base_rows": 4, "block": 2, "seed": 3, "epochs": 2}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), users=8, days=8)


def kill_one(reader: Loader, rng: np.random.Generator, killed: set[int]) -> None:
    engine: Any = reader.engine
    assert isinstance(engine, SharedEngine)
    inner: Any = engine._engine
    deadline = time.monotonic() + 10
    # One that was killed may not be replaced yet.
    while not (pids := [pid for pid in inner.pids if pid not in killed]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if pids:
        killed.add(pid := pids[rng.integers(0, len(pids))])
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "changes", [pytest.param({}, marks=pytest.mark.slow), {"budget": BatchBudget(limit=60)}], ids=["blocks", "budget"]
)
def test_ranks_and_an_evaluation_get_their_batches_whatever_dies(
    world: World, changes: dict[str, Any], tmp_path: Path
) -> None:
    options, rng, killed = {**OPTIONS, **changes}, np.random.default_rng(1), set[int]()
    with world.store() as store, world.table() as table:

        def shared(url: str, name: str, workers: int, **more: Any) -> Loader:
            engine = Shared(url, name, session=name.split("/")[0], engine=Processes(), report_s=0.2)
            return loader(store, table, engine=engine, workers=workers, **{**options, **more})

        def plain(**more: Any) -> list[str]:
            return [digest(b) for b in loader(store, table, threads=1, **{**options, **more})]

        want = [plain(rank=r, n_ranks=2) for r in range(2)]
        evaluation = plain(epochs=1)
        server = MasterServer(Master(3, ledger=tmp_path / "ledger"))
        ranks = [shared(server.url, f"train/{r}", 3, rank=r, n_ranks=2) for r in range(2)]
        beside = shared(server.url, "evaluation", 1, epochs=1)
        walks, half = [iter(r) for r in ranks], len(want[0]) // 2
        got: list[list[str]] = [[], []]
        seen = []
        for t, batch in zip(range(half), beside, strict=False):
            seen.append(digest(batch))
            for r, walk in enumerate(walks):
                got[r].append(digest(next(walk)))
                # Twice a rank: a batch that ends three workers is an error.
                if t in (1 + r, 5 + r):
                    kill_one(ranks[r], rng, killed)
            if t == half // 2:
                port = server.port
                server.close()
                server = MasterServer(Master(2, ledger=tmp_path / "ledger"), port=port)
        seen += [digest(batch) for batch in beside]
        assert seen == evaluation
        assert got == [w[:half] for w in want]
        assert len(killed) > 3
        # The training goes on with three ranks, and other numbers of workers.
        state = ranks[0].state_dict()
        for r in ranks:
            r.close()
        rest = [shared(server.url, f"train/{r}", 1 + r, rank=r, n_ranks=3) for r in range(3)]
        for r in rest:
            r.load_state_dict(state)
        whole = [b.request_id.tolist() for b in loader(store, table, threads=1, **options)]
        for expected, parts in zip(whole[half:], zip(*rest, strict=True), strict=True):
            assert sorted(chain.from_iterable(p.request_id.tolist() for p in parts)) == sorted(expected)
        server.close()
