"""Passes: every request gets exactly its own events, and requests that may share a pass do."""

from __future__ import annotations

import numpy as np
import pytest

from thinrow.core.units import NEVER
from thinrow.jagged import Column, Events, SharedHistories
from thinrow.jagged.passes import Passes, plan_passes
from thinrow.testing.histories import random_histories


def seen_by(passes: Passes, x: int) -> list[int]:
    start = passes.offsets[passes.pass_of[x]]
    return passes.index[start : start + passes.visible[x]].tolist()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("max_len", "align"), [(None, 1), (4, 1), (6, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_a_request_sees_its_own_events_in_order(seed: int, max_len: int | None, align: int, share: bool) -> None:
    histories, _ = random_histories(np.random.default_rng(seed), max_len=max_len, align=align, late=0.3)
    passes = plan_passes(histories, share=share)
    index, offsets = histories.positions()
    for x in range(len(histories)):
        assert seen_by(passes, x) == index[offsets[x] : offsets[x + 1]].tolist()
    assert passes.offsets[-1] == len(passes.index)
    if not share:
        assert len(passes) == len(histories)


@pytest.mark.parametrize("seed", range(5))
def test_requests_share_a_pass_if_and_only_if_the_rule_allows_it(seed: int) -> None:
    histories, _ = random_histories(np.random.default_rng(seed), n_requests=30, late=0.1)
    passes = plan_passes(histories)
    for x in range(len(histories)):
        for y in range(x):
            same_row = histories.user_of[x] == histories.user_of[y] and histories.start[x] == histories.start[y]
            allowed = same_row and bool(histories.exact[x]) and bool(histories.exact[y])
            assert (passes.pass_of[x] == passes.pass_of[y]) == allowed


def test_a_pass_is_no_longer_than_its_longest_request_needs() -> None:
    item = {"item": Column(np.arange(5))}
    events = Events(np.array([7]), np.array([0, 5]), np.arange(5), np.arange(1, 6), np.full(5, NEVER), item)
    ends = np.array([2, 4])
    shared = SharedHistories(
        events, np.zeros(2, np.int64), np.zeros(2, np.int64), ends, np.full(2, 5), np.ones(2, np.bool_)
    )
    passes = plan_passes(shared)
    assert passes.index.tolist() == [0, 1, 2, 3]
    assert passes.visible.tolist() == [2, 4]


def test_users_without_events_do_not_share_though_their_windows_start_at_one_place() -> None:
    events = Events.empty(np.array([7, 8]), {"item": Column(np.empty(0, np.int64))})
    none = np.zeros(2, np.int64)
    passes = plan_passes(SharedHistories(events, np.arange(2), none, none, none, np.ones(2, np.bool_)))
    assert passes.pass_of.tolist() == [0, 1]
    assert passes.visible.tolist() == [0, 0]


def test_no_request() -> None:
    histories, _ = random_histories(np.random.default_rng(0), n_requests=0)
    passes = plan_passes(histories)
    assert len(passes) == 0
    assert len(passes.index) == 0
