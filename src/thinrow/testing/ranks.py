"""Ranks for tests: threads that pass each other arrays, and processes over gloo that are started once for many calls.

run_threads(2, job, 7)                      # [job(rank 0, 7), job(rank 1, 7)]
with GlooProcesses(4) as processes:
    processes.run(2, job, 7)                # the same over gloo, in the first two of four processes
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist

from thinrow.core.errors import RankLost
from thinrow.embeddings.gloo import GlooRanks
from thinrow.embeddings.ranks import Bytes, Ranks

#: Long, since machines that run tests are busy.
PATIENCE_S = 120.0

#: Called with the ranks and further arguments. For processes it is a function of a module that they can import.
Job = Callable[..., Any]


class _Meeting:
    """Where threads swap their parts."""

    def __init__(self, n: int) -> None:
        self.barrier = threading.Barrier(n)
        self.parts: list[Sequence[Bytes]] = [()] * n
        self.beside: _Meeting | None = None
        self._lock = threading.Lock()

    def open_beside(self) -> _Meeting:
        with self._lock:
            self.beside = self.beside or _Meeting(self.barrier.parties)
            return self.beside

    def abort(self) -> None:
        self.barrier.abort()
        if self.beside is not None:
            self.beside.abort()


class ThreadRanks(Ranks):
    """A rank that is a thread of this process."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.barrier.parties)
        self._meeting = meeting

    def _open_beside(self) -> Ranks:
        return ThreadRanks(self.rank, self._meeting.open_beside())

    def _swap(self, parts: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        meeting = self._meeting
        meeting.parts[self.rank] = parts
        try:
            meeting.barrier.wait(PATIENCE_S)
            received = [theirs[self.rank].copy() for theirs in meeting.parts]
            meeting.barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError as error:
            raise RankLost("another rank has failed", rank=-1) from error
        return received


def run_threads(n: int, job: Job, *arguments: Any) -> list[Any]:
    """What ``job(ranks, *arguments)`` returns on each of ``n`` ranks; raises what went wrong first."""
    meeting = _Meeting(n)

    def one(rank: int) -> Any:
        ranks = ThreadRanks(rank, meeting)
        try:
            return job(ranks, *arguments)
        except BaseException:
            meeting.abort()
            raise
        finally:
            ranks.close()

    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(one, rank) for rank in range(n)]
    errors = [e for f in futures if (e := f.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, RankLost)), errors[0])
    return [f.result() for f in futures]


class GlooProcesses:
    """Processes of one process group, each with one torch thread; the first holds the store of the group."""

    def __init__(self, n: int, *, timeout_s: float = PATIENCE_S) -> None:
        """``timeout_s``: of the ranks that jobs get."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "thinrow.testing.sharded", "thinrow.kernels.numba.table"])
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        port = 0
        for rank in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, n, port, timeout_s), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
            port = port or self.result(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, n_ranks: int, job: Job, *arguments: Any) -> None:
        """Begin ``job`` on the first ``n_ranks`` processes."""
        for pipe in self._pipes[:n_ranks]:
            pipe.send((n_ranks, job, arguments))

    def result(self, rank: int) -> Any:
        """What the job that was begun returned on ``rank``; an exception is returned, not raised.

        Raises:
            EOFError: the process ended.
            TimeoutError: it has not answered for long.
        """
        if not self._pipes[rank].poll(2 * PATIENCE_S):
            raise TimeoutError(f"the process of rank {rank} has not answered for {2 * PATIENCE_S:g} s")
        return self._pipes[rank].recv()

    def run(self, n_ranks: int, job: Job, *arguments: Any) -> list[Any]:
        """What ``job(ranks, *arguments)`` returns on each of the first ``n_ranks``; raises what went wrong there."""
        self.start(n_ranks, job, *arguments)
        results = [self.result(rank) for rank in range(n_ranks)]
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            raise next((e for e in errors if not isinstance(e, RankLost)), errors[0])
        return results

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(PATIENCE_S)
            process.kill()


def _serve(pipe: Connection, rank: int, n: int, port: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, n, rank == 0, patience, wait_for_workers=False
    )
    if rank == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=patience)
    made: dict[int, GlooRanks] = {}
    while True:
        try:
            n_ranks, job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if n_ranks not in made:
                made[n_ranks] = GlooRanks(range(n_ranks), timeout_s=timeout_s)
            result = job(made[n_ranks], *arguments)
        except Exception as error:
            result = error
        pipe.send(result)
