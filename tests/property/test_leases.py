"""The ledger of the loader's engines against any order of events: every item once, in order, whoever ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.dpp.engines.leases import Leases


@settings(max_examples=400)
@given(
    first=st.integers(0, 5),
    n=st.integers(0, 20),
    window=st.integers(1, 6),
    warm=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from("tslraw"), st.integers(0, 3)), max_size=120),
)
def test_every_item_is_delivered_once_and_out_with_two_only_where_it_is_the_slow_head(
    first: int, n: int, window: int, warm: bool, steps: list[tuple[str, int]]
) -> None:
    now = [0.0]
    leases: Leases[int] = Leases(first, first + n, window, lambda: now[0])
    out: dict[int, int] = {}
    since: dict[int, float] = {}
    done: set[int] = set()
    delivered: list[int] = []
    seen = 0

    def step(kind: str, worker: int) -> None:
        nonlocal seen
        if kind == "t":
            free = [v for v in range(leases.head, leases.head + window) if v < first + n]
            free = [v for v in free if v not in done and v not in out.values()]
            holders = [w for w, v in out.items() if v == leases.head]
            wait = leases.backup_s()
            assert (wait is None) == (len(holders) != 1 or leases.head in done or seen < 8)
            # Never before a second.
            assert wait is None or wait >= 1 - (now[0] - since[holders[0]])
            if not free and wait is not None and wait <= 0:
                free = [leases.head]
            item = leases.take(worker)
            assert item == (min(free) if free and worker not in out else None)
            if item is not None:
                assert worker not in out
                out[worker], since[worker] = item, now[0]
        elif kind == "s" and worker in out:
            item, counts = out[worker], out[worker] not in done and out[worker] >= leases.head
            assert leases.settle(item, worker) == counts
            # What comes again counts no more.
            assert not leases.settle(item, worker)
            del out[worker]
            seen += 1
            if counts:
                done.add(item)
        elif kind == "l":
            item = out.pop(worker, None)
            gone = item is not None and (item in done or item < leases.head)
            assert leases.lost(worker) == (None if gone else item)
        elif kind == "a" and leases.head in done:
            done.remove(leases.head)
            delivered.append(leases.head)
            leases.advance()
        elif kind == "w":
            now[0] += 100 if worker == 3 else 1
        assert all(leases.held(w) == v for w, v in out.items())
        assert max(map(list(out.values()).count, out.values()), default=0) <= 2

    if warm and n >= 8:
        for _ in range(8):
            step("t", 0)
            step("w", 0)
            step("s", 0)
            step("a", 0)
    for kind, worker in steps:
        step(kind, worker)
    # From wherever that led, one worker brings it to its end.
    for worker in range(4):
        step("l", worker)
    while not leases.exhausted:
        step("t", 0)
        step("s", 0)
        step("a", 0)
    assert delivered == list(range(first, first + n))
    assert leases.take(0) is None


def test_the_first_of_two_results_counts_and_a_slow_worker_that_ends_gives_nothing_back() -> None:
    now = [0.0]
    leases: Leases[str] = Leases(0, None, 2, lambda: now[0])
    for v in range(8):
        assert leases.take("a") == v
        now[0] += 0.01
        assert leases.settle(v, "a")
        leases.advance()
    assert (leases.take("a"), leases.take("b")) == (8, 9)
    assert leases.settle(9, "b")
    assert leases.backup_s() == 1.0
    assert leases.take("b") is None
    now[0] += 1
    assert leases.take("b") == 8
    assert leases.take("c") is None
    assert leases.backup_s() is None
    assert leases.settle(8, "b")
    # Done, though not taken yet: nobody makes it a third time.
    assert leases.backup_s() is None
    assert leases.take("c") is None
    assert leases.lost("a") is None
    assert leases.ended(8) == 0
    leases.advance()
    leases.advance()
    assert (leases.take("a"), leases.take("b")) == (10, 11)
    assert leases.settle(11, "b")
    now[0] += 5
    assert leases.take("b") == 10
    # Both end: it is made again, once.
    assert (leases.lost("a"), leases.lost("b")) == (10, 10)
    assert [leases.take(w) for w in "ab"] == [10, None]


def test_what_lies_beyond_a_failed_item_is_not_leased_but_what_lies_before_it_is() -> None:
    leases: Leases[str] = Leases(0, None, 8)
    assert [leases.take(w) for w in "abcd"] == [0, 1, 2, 3]
    assert leases.settle(2, "c")
    leases.cut(2)
    assert leases.take("c") is None
    assert leases.lost("a") == 0
    assert leases.lost("d") == 3
    assert leases.ended(0) == leases.ended(3) == 1
    assert leases.take("c") == 0
    assert leases.take("d") is None
