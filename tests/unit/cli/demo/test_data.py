"""Cutting data: a small part of the same types, and the time from which on requests are held out."""

from __future__ import annotations

import numpy as np
import pytest

from thinrow.cli.demo.data import cut_at_share
from thinrow.cli.demo.retail import load_retail


@pytest.mark.parametrize(
    ("times", "share", "cut"), [([1, 2, 3, 4], 0.25, 4), ([1, 1, 1, 9], 0.5, 1), ([5], 0.1, 5), ([], 0.5, 0)]
)
def test_cut(times: list[int], share: float, cut: int) -> None:
    assert cut_at_share(np.array(times, np.int64), share) == cut


def test_a_small_part_is_whole() -> None:
    data = load_retail(weeks=10, households=40)
    part = data.small_part(n_users=3, n_bundles=25)
    users = np.unique(part.users)
    assert 1 <= len(users) <= 3
    assert np.array_equal(np.unique(part.requests.users), users)
    for user in users:
        bundles = np.flatnonzero(data.users[data.bundle_offsets[:-1]] == user)[:25]
        rows = np.concatenate([np.arange(*data.bundle_offsets[[b, b + 1]]) for b in bundles])
        ours = part.users == user
        assert np.array_equal(part.event_ts[ours], data.event_ts[rows])
        for name, column in data.columns.items():
            assert column.take(rows).to_arrow().equals(part.columns[name].take(ours).to_arrow())
    r = part.requests
    assert np.array_equal(part.event_ts[part.bundle_offsets[r.bundle]], r.request_ts)
    assert np.array_equal(part.users[part.bundle_offsets[r.bundle]], r.users)
    row_of = {int(i): n for n, i in enumerate(data.requests.request_id)}
    rows = np.array([row_of[int(i)] for i in r.request_id])
    assert np.array_equal(r.candidates["product_id"].values, data.requests.candidates["product_id"].take(rows).values)
    assert 0 < part.held_out.sum() < len(r)
