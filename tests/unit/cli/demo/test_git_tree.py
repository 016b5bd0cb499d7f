"""Which file a change is of, through renames and branches; draws that never show a file that is not there."""

from __future__ import annotations

import random

import pytest

from thinrow.cli.demo import git_tree
from thinrow.cli.demo.git_log import ADD, DELETE, MODIFY, RENAME
from thinrow.cli.demo.git_tree import KnownFiles

A, B, C, D = range(4)


def commit(tree: KnownFiles, *changes: tuple[int, ...], now_ms: int = 0) -> list[tuple[int, bool]]:
    """Apply changes ``(action, path)`` or ``(RENAME, old, new)``; returns the file of each and whether it was known."""
    rows = [(c[0], c[-1], c[1] if c[0] == RENAME else -1) for c in changes]
    resolved = tree.resolve(*zip(*rows, strict=True))
    tree.apply(resolved, now_ms)
    return [(c.file, c.was_known) for c in resolved]


def test_the_worked_example() -> None:
    tree = KnownFiles(4)
    assert commit(tree, (ADD, A), (ADD, B)) == [(0, False), (1, False)]
    assert commit(tree, (RENAME, A, C), (ADD, A)) == [(0, True), (2, False)]
    assert tree.path[:3] == [C, B, A]
    assert commit(tree, (DELETE, B)) == [(1, True)]
    assert len(tree) == 2
    assert commit(tree, (MODIFY, B)) == [(3, False)]
    assert len(tree) == 3


def test_two_names_can_be_swapped() -> None:
    tree = KnownFiles(2)
    commit(tree, (ADD, A), (ADD, B))
    assert commit(tree, (RENAME, A, B), (RENAME, B, A)) == [(0, True), (1, True)]
    assert commit(tree, (MODIFY, A), (MODIFY, B)) == [(1, True), (0, True)]
    assert len(tree) == 2


def test_what_another_branch_did_not_know() -> None:
    tree = KnownFiles(4)
    commit(tree, (ADD, A), (ADD, B), (ADD, C))
    # B is taken over by what was A: the old B is gone.
    assert commit(tree, (RENAME, A, B)) == [(0, True)]
    assert len(tree) == 2
    # A is gone by now, and its rename to C is what C's file does.
    assert commit(tree, (RENAME, A, C)) == [(2, True)]
    # Unknown on both sides; and a deletion of what is not there.
    assert commit(tree, (RENAME, A, D), (DELETE, A)) == [(3, False), (4, False)]
    assert len(tree) == 3
    # One file cannot go two ways in one commit.
    assert commit(tree, (RENAME, B, A), (RENAME, B, D)) == [(0, True), (5, False)]


def test_counts_and_times() -> None:
    tree = KnownFiles(2)
    commit(tree, (ADD, A), (ADD, B), now_ms=10)
    commit(tree, (MODIFY, A), now_ms=30)
    commit(tree, (DELETE, B), now_ms=40)
    assert tree.changes == [2, 2]
    assert tree.changed_ms == [30, 40]


@pytest.fixture
def forest() -> KnownFiles:
    """100 files, of which the odd ones are gone and 0 to 8 changed last."""
    tree = KnownFiles(100)
    commit(tree, *((ADD, p) for p in range(100)))
    for _ in range(200):
        commit(tree, *((MODIFY, p) for p in range(0, 10, 2)))
    commit(tree, *((DELETE, p) for p in range(1, 100, 2)))
    return tree


def test_half_of_a_sample_is_recent_and_none_is_touched_or_gone(forest: KnownFiles) -> None:
    for seed in range(50):
        drawn = forest.sample(random.Random(seed), 6, {0, 50})
        assert len(set(drawn)) == 6
        assert not {0, 50} & set(drawn)
        assert all(f % 2 == 0 for f in drawn)
        assert sum(f < 10 for f in drawn) >= 3
    assert {f for s in range(200) for f in forest.sample(random.Random(s), 6, {0})} == set(range(2, 100, 2))


def test_a_small_tree_gives_what_it_has(forest: KnownFiles) -> None:
    most = set(range(0, 96, 2))
    assert sorted(forest.sample(random.Random(0), 6, most)) == [96, 98]
    assert sorted(forest.sample(random.Random(0), 1, most))[0] in (96, 98)
    assert sorted(forest.sample(random.Random(0), 99, {0})) == list(range(2, 100, 2))
    assert KnownFiles(3).sample(random.Random(0), 5, set()) == []


def test_recent_is_bounded(forest: KnownFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_tree, "RECENT_CHANGES", 1)
    # The newest change is the only recent one.
    assert all(8 in forest.sample(random.Random(seed), 2, set()) for seed in range(20))
