"""The ledger of the loader's engines against any order of events: every item once, in order, whoever ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.dpp.engines.leases import Leases


@settings(max_examples=300)
@given(
    first=st.integers(0, 5),
    n=st.integers(0, 20),
    window=st.integers(1, 6),
    steps=st.lists(st.tuples(st.sampled_from("tslra"), st.integers(0, 3)), max_size=120),
)
def test_every_item_is_delivered_once_and_never_out_with_two(
    first: int, n: int, window: int, steps: list[tuple[str, int]]
) -> None:
    leases: Leases[int] = Leases(first, first + n, window)
    out: dict[int, int] = {}
    done: set[int] = set()
    delivered: list[int] = []

    def step(kind: str, worker: int) -> None:
        if kind == "t":
            free = [v for v in range(leases.head, leases.head + window) if v < first + n]
            free = [v for v in free if v not in done and v not in out.values()]
            expected = min(free) if free and worker not in out else None
            item = leases.take(worker)
            assert item == expected
            if item is not None:
                out[worker] = item
        elif kind == "s" and worker in out:
            assert leases.settle(out[worker], worker)
            # What comes again counts no more.
            assert not leases.settle(out[worker], worker)
            done.add(out.pop(worker))
        elif kind == "l":
            assert leases.lost(worker) == out.pop(worker, None)
        elif kind == "a" and leases.head in done:
            done.remove(leases.head)
            delivered.append(leases.head)
            leases.advance()
        assert all(leases.held(w) == v for w, v in out.items())

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
