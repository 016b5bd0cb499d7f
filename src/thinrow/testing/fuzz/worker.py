"""Workers: processes that do tries one after another, and whoever watches them.

A worker says in a file which try it is at, so that a process that dies or stands still names its try. Worked example:
of two workers the second does tries 1, 3, 5 and so on; killed by a signal in try 3, it leaves the number 3, and another
one goes on with 5.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from thinrow.testing.fuzz.damage import OUTCOMES, Failure

Kind = Literal["stores", "blocks"]

#: What a try may add to the address space, and to the memory in use at the peak.
SPACE_BYTES, PEAK_BYTES = 1 << 30, 256 << 20
#: A try that takes longer hangs; most take some ms.
HANG_S = 60.0
_POLL_S = 0.2
#: What a worker says of itself: the number of its try, plus 1, and how many tries came to which of ``OUTCOMES``.
_PROGRESS = struct.Struct("<5Q")


@dataclass(frozen=True, slots=True)
class Share:
    """Tries ``first, first + step, ...`` below ``stop`` of one seed."""

    kind: Kind
    seed: int
    first: int
    stop: int
    step: int


def work(share: Share, progress: Path) -> None:
    """Do the tries of a share in this process; failures go to standard output, a line of JSON each."""
    from thinrow.testing.fuzz.block_tries import BlockTries
    from thinrow.testing.fuzz.tries import Tries

    tries = (Tries if share.kind == "stores" else BlockTries)(share.seed)
    for number in range(2):
        tries.run(number)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_space_bytes() + SPACE_BYTES, hard))
    peak = _peak_bytes()
    tries.outcomes[:] = [0] * len(OUTCOMES)
    with progress.open("r+b") as f, mmap.mmap(f.fileno(), _PROGRESS.size) as at:
        for number in range(share.first, share.stop, share.step):
            at[:] = _PROGRESS.pack(number + 1, *tries.outcomes)
            failure = tries.run(number)
            grown = _peak_bytes() - peak
            if failure is None and grown > PEAK_BYTES:
                failure = Failure(number, "", share.kind, f"memory grew by {grown >> 20} MiB", "memory")
            peak = max(peak, peak + grown - PEAK_BYTES // 2)
            if failure is not None:
                print(json.dumps(asdict(failure)), flush=True)
        at[:] = _PROGRESS.pack(number + 1, *tries.outcomes)


def _space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(shares: list[Share], tick: Callable[[int, list[int]], None]) -> Iterator[Failure]:
    """Do all shares, a process each; a few times a second ``tick`` gets the number of tries begun, and ``OUTCOMES``."""
    with tempfile.TemporaryDirectory() as folder:
        watched = [_Watched(share, Path(folder) / f"{k}") for k, share in enumerate(shares)]
        try:
            while any(not w.done for w in watched):
                time.sleep(_POLL_S)
                for w in watched:
                    yield from w.look()
                tick(sum(w.begun for w in watched), [sum(n) for n in zip(*(w.outcomes for w in watched), strict=True)])
        finally:
            for w in watched:
                w.stop()


class _Watched:
    """A share and the process that does it, started again where it dies."""

    def __init__(self, share: Share, path: Path) -> None:
        self._share, self._path = share, path
        self._number, self._since, self.done, self.begun = -1, time.monotonic(), False, 0
        self._before = self.outcomes = [0] * len(OUTCOMES)
        self._start(share.first)

    def _start(self, first: int) -> None:
        share = self._share
        self._path.with_suffix(".at").write_bytes(bytes(_PROGRESS.size))
        self._before = self.outcomes
        self._out, self._read = self._path.with_suffix(".out").open("wb"), 0
        arguments = [share.kind, *(str(n) for n in (share.seed, first, share.stop, share.step))]
        self._first, self._number, self._since = first, -1, time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "thinrow.testing.fuzz", "--worker", *arguments, str(self._path.with_suffix(".at"))],
            stdout=self._out,
            stderr=subprocess.PIPE,
        )

    def look(self) -> Iterator[Failure]:
        """Failures since the last look; a process that died or hangs is one, and is replaced."""
        if self.done:
            return
        ended = self._process.poll()
        begun, *outcomes = _PROGRESS.unpack(self._path.with_suffix(".at").read_bytes())
        self.outcomes = [a + b for a, b in zip(self._before, outcomes, strict=True)]
        number = begun - 1
        if number != self._number:
            self._number, self._since = number, time.monotonic()
            self.begun = (number - self._share.first) // self._share.step + 1
        yield from self._told()
        # To start takes as long as it takes to compile.
        hangs = ended is None and time.monotonic() - self._since > (HANG_S if number >= 0 else 20 * HANG_S)
        if hangs:
            self.stop()
            yield self._failed(number, f"no end in {HANG_S:g} s", "hang")
        elif ended:
            said = self._process.stderr.read().decode(errors="replace")[-2000:] if self._process.stderr else ""
            name = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
            yield self._failed(number, f"{name} {said}", f"crash: {name}")
        if ended == 0 or (number < 0 and (hangs or ended)):
            self.done = True
        elif hangs or ended:
            following = number + self._share.step
            if following < self._share.stop:
                self._start(following)
            else:
                self.done = True

    def _told(self) -> Iterator[Failure]:
        data = self._path.with_suffix(".out").read_bytes()
        end = data.rfind(b"\n") + 1
        for line in data[self._read : end].splitlines():
            yield Failure(**json.loads(line))
        self._read = end

    def _failed(self, number: int, what: str, where: str) -> Failure:
        return Failure(number, "", self._share.kind, what, where)

    def stop(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
