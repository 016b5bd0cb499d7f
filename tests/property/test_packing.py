"""Packed objects come back as they were, as views of where they were put."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thinrow.core.errors import InputError
from thinrow.dpp.engines.packing import Packed, pack_job, unpack

KINDS = st.sampled_from(["i1", "i4", "i8", "f4", "f8", "?"])


@given(
    arrays=st.lists(hnp.arrays(KINDS, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=40)), max_size=6),
    texts=st.lists(st.none() | st.text(max_size=5), max_size=10),
    plain=st.dictionaries(st.text(max_size=3), st.integers() | st.none()),
    extra=st.integers(0, 100),
)
def test_what_is_packed_comes_back(
    arrays: list[np.ndarray], texts: list[str | None], plain: dict[str, int | None], extra: int
) -> None:
    item = {"arrays": arrays, "columns": [a.T for a in arrays], "texts": pa.array(texts, pa.string()), "plain": plain}
    packed = Packed(item)
    memory = np.full(packed.size + extra, 255, np.uint8)
    packed.write(memory)
    found = unpack(memory[: packed.size].data)
    assert found["plain"] == plain
    assert found["texts"].equals(item["texts"])
    first, last = np.lib.array_utils.byte_bounds(memory)
    for one, other in zip(arrays + item["columns"], found["arrays"] + found["columns"], strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
        if other.size:
            start, stop = np.lib.array_utils.byte_bounds(other)
            assert first <= start < stop <= last
            assert other.flags.writeable


def test_a_job_of_this_process_alone_is_refused() -> None:
    def local(item: int) -> int:
        return item

    with pytest.raises(InputError, match="workers elsewhere cannot open what this loader reads"):
        pack_job(local)
    local.__qualname__, local.__module__ = "local", "__main__"
    with pytest.raises(InputError, match=r"local is defined in the script that runs \(__main__\)"):
        pack_job(local)
