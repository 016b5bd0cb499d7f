"""``python -m thinrow.testing.fuzz``: see the package."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from thinrow.testing.fuzz.damage import OUTCOMES, Failure
from thinrow.testing.fuzz.worker import Kind, Share, run, work


def main(arguments: list[str]) -> int:
    """Run tries; the exit code is 1 where one failed."""
    if arguments[:1] == ["--worker"]:
        kind: Kind = "stores" if arguments[1] == "stores" else "blocks"
        seed, first, stop, step = (int(a) for a in arguments[2:6])
        work(Share(kind, seed, first, stop, step), Path(arguments[6]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m thinrow.testing.fuzz", description="Fuzz the reader.")
    parser.add_argument("--tries", type=int, default=1_000, help="of damaged stores (default: %(default)s)")
    parser.add_argument("--blocks", type=int, help="tries of the decoders alone (default: 20 for each of --tries)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first try (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    given = parser.parse_args(arguments)
    blocks = 20 * given.tries if given.blocks is None else given.blocks
    failed = 0
    for kind, n in (("stores", given.tries), ("blocks", blocks)):
        if n:
            failed += _run(kind, n, given.seed, given.first, given.workers)
    return 1 if failed else 0


def _run(kind: Kind, n: int, seed: int, first: int, workers: int) -> int:
    workers = min(workers, n)
    shares = [Share(kind, seed, first + k, first + n, workers) for k in range(workers)]
    counts: Counter[str] = Counter()
    begun, since, shown = 0, time.monotonic(), 0.0
    outcomes: list[int] = []

    def tick(tries: int, found: list[int]) -> None:
        nonlocal begun, shown, outcomes
        begun, outcomes = tries, found
        if sys.stderr.isatty() and time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"\r{kind}: {begun:,} of {n:,}", end="", file=sys.stderr, flush=True)

    for failure in run(shares, tick):
        counts[failure.where] += 1
        if counts[failure.where] == 1:
            _show(kind, seed, failure)
    took = time.monotonic() - since
    print(
        f"{kind}: {begun:,} tries of seed {seed} in {took:.0f} s, {begun / took:.0f} a second, {counts.total()} failed"
    )
    for said, count in zip(OUTCOMES, outcomes, strict=True):
        if sum(outcomes):
            print(f"  {100 * count / sum(outcomes):5.1f}%  {said}")
    for where, count in counts.most_common():
        print(f"  {count:6,}  {where}")
    return counts.total()


def _show(kind: Kind, seed: int, failure: Failure) -> None:
    again = f"--tries {int(kind == 'stores')} --blocks {int(kind == 'blocks')} --seed {seed} --first {failure.number}"
    print(f"{failure.where}: {failure.probe}: {failure.what}\n  damage: {failure.damage}", flush=True)
    print(f"  again: python -m thinrow.testing.fuzz {again}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
