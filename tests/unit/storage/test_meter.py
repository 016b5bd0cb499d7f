from __future__ import annotations

import numpy as np
import pytest

from thinrow.storage.meter import Meter, count, metering
from thinrow.storage.objects import MemoryObjects, each


def test_only_what_is_metered_counts_and_the_inner_meter_alone() -> None:
    outer, inner = Meter(), Meter()
    count(requests=5)
    with metering(outer):
        count(requests=1, bytes_fetched=10)
        with metering(inner):
            count(requests=2, retries=1)
        count(cache_hits=3)
    count(requests=5)
    assert outer.counts() == {
        "requests": 1, "bytes_fetched": 10, "retries": 0, "hedges": 0, "cache_hits": 3, "cache_misses": 0,
    }  # fmt: skip
    assert (inner.requests, inner.retries) == (2, 1)


class Distant(MemoryObjects):
    concurrency = 4


@pytest.mark.parametrize("store", [MemoryObjects(), Distant()])
def test_each_keeps_the_order_counts_for_the_caller_and_raises_the_first_failure(store: MemoryObjects) -> None:
    store.put("a", bytes(100))

    def read(n: int) -> int:
        store.read_into("a", np.array([0]), np.array([n]), np.zeros(100, np.uint8), np.array([0]))
        if n == 7:
            raise RuntimeError("seven")
        return n

    with metering(Meter()) as meter:
        assert each(store, read, [3, 1, 2]) == [3, 1, 2]
    assert meter.bytes_fetched == 6
    with pytest.raises(RuntimeError, match="seven"):
        each(store, read, [1, 7, 2])
