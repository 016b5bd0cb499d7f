"""GlooRanks: ``Ranks`` over a process group of torch.distributed, which name the rank that was lost.

gloo says at which connection it failed, not which rank is to blame: of three ranks of which one is killed, another
fails next, closes its connections and so fails the third. So a rank that gives up first reports whom it lost in the
store of the process group, and only then closes its connections. Who finds a connection closed and a report of its
rank looks at whom that one lost; who finds no report has found the rank that ended without a word.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from thinrow.core.errors import InputError, RankLost
from thinrow.core.pool import empty
from thinrow.embeddings.ranks import Bytes, Ranks

#: Of the timeout, kept for finding out who is to blame.
_SHARE_FOR_BLAME = 0.2
#: How many connections of these members this process has made: all members count alike.
_made: dict[tuple[int, ...], itertools.count[int]] = {}


class GlooRanks(Ranks):
    """The ranks ``members`` of ``torch.distributed``, by default all, over connections of their own. Every one of them
    must make it.

    A step ends within ``timeout_s`` of its first wait for a rank that is gone or silent, on all ranks, with
    ``RankLost``; after that these ranks are of no use any more. So it must be longer than what a rank may be slower
    than the others.

    Raises:
        InputError: ``torch.distributed`` has no process group yet, this rank is no member, or ``timeout_s`` is not
            above 0.
        RankLost: another one did not make it within ``timeout_s``.
    """

    def __init__(self, members: Sequence[int] | None = None, *, timeout_s: float = 300.0) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError("there is no process group; call torch.distributed.init_process_group first")
        if not timeout_s > 0:
            raise InputError(f"timeout_s={timeout_s}; it must be above 0")
        self._members = list(range(dist.get_world_size()) if members is None else members)
        if dist.get_rank() not in self._members:
            raise InputError(f"members={self._members}; rank {dist.get_rank()}, this one, is not among them")
        super().__init__(self._members.index(dist.get_rank()), len(self._members))
        self.timeout_s = timeout_s
        self._lost: RankLost | None = None
        number = next(_made.setdefault(tuple(self._members), itertools.count()))
        self._store = PrefixStore(f"thinrow/{self._members}/{number}", _get_default_store())
        self._reports = PrefixStore("lost", self._store)
        self._channels = [self]
        self._connect("first")

    def _connect(self, channel: str) -> None:
        # Not by new_group: its names hang where ranks have been in different numbers of groups before.
        store, patience = PrefixStore(channel, self._store), timedelta(seconds=self.timeout_s)
        here = [f"{member} is here" for member in self._members]
        store.set(here[self.rank], "")
        try:
            self._group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, patience)
        except RuntimeError as error:
            absent = [member for member, key in zip(self._members, here, strict=True) if not store.check([key])]
            if not absent:
                raise
            raise RankLost(
                f"rank {absent[0]} did not connect to the {channel} channel within {self.timeout_s:g} s; every rank "
                f"of {self._members} must make a GlooRanks of them, and prefetch where others do",
                rank=absent[0],
            ) from error

    def _open_beside(self) -> Ranks:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        Ranks.__init__(other, self.rank, self.size)
        other._connect("second")
        self._channels.append(other)
        return other

    def _swap(self, parts: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        received = [parts[p] if p == self.rank else empty(n, np.uint8) for p, n in enumerate(sizes)]
        until = time.monotonic() + self.timeout_s * (1 - _SHARE_FOR_BLAME)
        failed = self._send_and_receive(parts, received, until)
        if failed is not None:
            raise self._give_up(failed, silent=time.monotonic() >= until)
        return received

    def _send_and_receive(self, parts: Sequence[Bytes], received: Sequence[Bytes], until: float) -> int | None:
        """Swap with all others; the first of them with whom it failed, or None."""
        group, others = self._group, [p for p in range(self.size) if p != self.rank]
        if self._lost is not None:
            raise self._lost
        works = []
        try:
            for start, buffers in ((group.recv, received), (group.send, parts)):
                for peer in others:
                    if len(buffers[peer]):
                        works.append((peer, start([torch.from_numpy(buffers[peer])], peer, 0)))
            while works:
                peer, work = works.pop(0)
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
        except RuntimeError:
            # Work that is still known keeps the connections open, and its error would keep it known.
            works, work = [], None
            return peer
        return None

    def _give_up(self, peer: int, *, silent: bool) -> RankLost:
        """Say to the others that ``peer`` is lost, find out who really is, and close all connections."""
        patience_s = self.timeout_s * _SHARE_FOR_BLAME
        latest = time.monotonic() + patience_s
        me, found, how = self._members[self.rank], self._members[peer], "is silent" if silent else "ended"
        answers: list[tuple[int, str]] = []
        # A store whose process is stopped does not answer, and has no timeout.
        asking = threading.Thread(target=self._ask_reports, args=(found, how, latest, answers), daemon=True)
        asking.start()
        asking.join(patience_s)
        found, how = answers[0] if answers else (0, "is silent" if asking.is_alive() else "ended")
        if found == me:
            text = f"the other ranks gave rank {me}, this one, up: it did not answer within {self.timeout_s:g} s"
        elif how == "ended":
            text = f"rank {found} ended in the middle of a run; see what it wrote last"
        else:
            text = f"rank {found} did not answer within {self.timeout_s:g} s; see what it is at"
        lost = RankLost(f"{text}, then start all ranks again from the newest checkpoint", rank=found)
        for channel in self._channels:
            channel._lost, channel._group = lost, None
        if me == 0:
            # The store ends with the process that holds it, in most runs this one.
            self._wait_for([m for m in self._members if m not in (me, found)], latest)
        return lost

    def _ask_reports(self, found: int, how: str, latest: float, answers: list[tuple[int, str]]) -> None:
        """Report whom this rank has lost; the answer is whom the reports of all blame. None where the store is gone."""
        me = self._members[self.rank]
        with contextlib.suppress(RuntimeError):
            # First, so that who finds the connections of this rank closed finds this.
            self._reports.set(str(me), f"{found} {how}")
            # A connection that closed was closed after a report; one that is silent may bring one yet.
            answers.append(self._to_blame(found, how, latest - 0.1 if how == "is silent" else 0.0))
            self._reports.set(f"{me} knows", "")

    def _to_blame(self, suspect: int, how: str, until: float) -> tuple[int, str]:
        """Follow the reports: whom the suspect lost, and so on, to the one that has lost nobody."""
        seen = {self._members[self.rank]}
        while suspect not in seen and self._reported(str(suspect), until):
            seen.add(suspect)
            number, how = self._reports.get(str(suspect)).decode().split(" ", 1)
            suspect = int(number)
        return suspect, how

    def _wait_for(self, members: Sequence[int], until: float) -> None:
        with contextlib.suppress(RuntimeError):
            for member in members:
                self._reported(f"{member} knows", until)

    def _reported(self, key: str, until: float) -> bool:
        while not self._reports.check([key]):
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        return True
