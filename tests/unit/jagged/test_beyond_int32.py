"""More than 2^31 elements: offsets are int64 on every path, and what Arrow counts with int32 is refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.buffers import Buffers
from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.core.units import NEVER
from thinrow.jagged import Column, Events, Jagged, SharedHistories
from thinrow.jagged.torch import JaggedTensor, TorchHistories
from thinrow.kernels import BACKENDS, kernel, use
from thinrow.storage.codes import BlockRuns, decode_codes

BEYOND = 1 << 31


def one_user(n: int, n_requests: int) -> SharedHistories:
    """Requests that all see all of n events, whose column counts 0 to 99."""
    ts, x = np.arange(n), np.zeros(n_requests, np.int64)
    columns = {"a": Column((ts % 100).astype(np.int8))}
    events = Events(np.array([7]), np.array([0, n]), ts, ts + 1, np.full(n, NEVER), columns)
    return SharedHistories(events, x, x, x + n, x + n, np.ones(n_requests, np.bool_))


def test_slices_of_more_events_than_int32_counts() -> None:
    histories = one_user(1 << 16, (1 << 15) + 1)
    lengths = histories.lengths()
    assert lengths.dtype == np.int64
    assert int(offsets_of(lengths)[-1]) == BEYOND + (1 << 16)
    both = SharedHistories.concat([histories, histories])
    assert both.lengths().sum() == 2 * (BEYOND + (1 << 16))
    assert both.select(np.array([len(both) - 1])).to_jagged("a").values.tolist() == [i % 100 for i in range(1 << 16)]
    tensors = TorchHistories(histories)
    assert int(tensors.lengths.sum()) == BEYOND + (1 << 16)
    wanted = float(np.arange(1 << 16).astype(np.float64).__mod__(100).sum())
    assert tensors.sum(tensors.columns["a"].double()[:, None]).unique().tolist() == [wanted]


@pytest.mark.slow
def test_copies_of_more_events_than_int32_counts() -> None:
    """2.2 GB of int8."""
    n, k = 1 << 21, 1025
    histories = one_user(n, k)
    jagged, one = histories.to_jagged("a"), histories.events.columns["a"].values
    assert (jagged.offsets.dtype, int(jagged.offsets[-1])) == (np.int64, BEYOND + n)
    assert len(jagged.values) == BEYOND + n
    assert all(np.array_equal(jagged.row(i), one) for i in (0, 1023, k - 1))
    assert np.array_equal(jagged.take(np.array([k - 1])).values, one)
    assert np.array_equal(jagged.to_padded(3)[:, 0], np.full(k, one[-3]))
    arrow = jagged.to_arrow()
    assert pa.types.is_large_list(arrow.type)
    assert np.array_equal(arrow[k - 1].values.to_numpy(), one)
    back = Jagged.from_arrow(arrow, "int8")
    assert np.array_equal(back.offsets, jagged.offsets)
    assert np.array_equal(back.row(k - 1), one)
    tensor = JaggedTensor.of(jagged)
    assert int(tensor.lengths.sum()) == len(tensor.values) == BEYOND + n
    assert tensor.values[int(tensor.offsets[k - 1])] == one[0]
    lists = Column(jagged.values, None, None, jagged.offsets)
    assert np.array_equal(lists.take(np.array([k - 1])).values, one)
    assert np.array_equal(lists.to_arrow()[k - 1].values.to_numpy(), one)


def test_what_lies_beyond_is_read() -> None:
    """Memory that nothing was written to costs none."""
    values = np.zeros(BEYOND + 100, np.int8)
    values[-4:] = 1, 2, 3, 4
    end = np.array([len(values)])
    column = Column(values)
    assert column.take_ranges(end - 3, end).values.tolist() == [2, 3, 4]
    assert column.take(end - 1).values.tolist() == [4]
    assert Jagged(column, np.array([0, len(values) - 2, len(values)])).row(1).tolist() == [3, 4]
    for name in BACKENDS:
        out = np.zeros(BEYOND + 100, np.uint8)
        with use(name):
            assert kernel("copy_ranges")(values.view(np.uint8), end - 3, np.array([3]), out, end - 9) == -1
        assert out[-10:-5].tolist() == [0, 2, 3, 4, 0]


def test_blocks_are_decoded_to_places_beyond() -> None:
    block = np.array([7, 2, 9, 5, 3], np.int64)
    zero, rows, place = np.zeros(1, np.int64), np.array([5]), np.array([BEYOND + 1])
    kind = np.array([6], np.uint8), np.array([64], np.uint8)
    where = Buffers([block.view(np.uint8)]), zero, zero, np.array([block.nbytes]), *kind
    none = np.empty(0, np.uint64)
    for name in BACKENDS:
        out, codes = np.zeros(BEYOND + 9, np.int8), np.zeros(BEYOND + 9, np.int32)
        with use(name):
            assert kernel("decode_fixed")(*where, none, zero, zero, zero, rows, zero, rows, place, out) == -1
            runs = BlockRuns(*where, zero, zero, zero, rows, zero, rows, place)
            words = decode_codes([runs], none, np.int64, codes)
        assert out[BEYOND:].tolist() == [0, 7, 2, 9, 5, 3, 0, 0, 0]
        assert words[codes[BEYOND + 1 : BEYOND + 6]].tolist() == [7, 2, 9, 5, 3]


def test_a_dictionary_has_no_more_entries_than_int32_counts() -> None:
    words = np.broadcast_to(np.zeros(1, np.uint64), BEYOND - 1)
    block = np.zeros(16, np.uint8)
    zero, rows = np.zeros(1, np.int64), np.array([1])
    where = Buffers([block]), zero, zero, np.array([8]), np.array([6], np.uint8), np.array([64], np.uint8)
    runs = BlockRuns(*where, zero, zero, zero, rows, zero, rows, zero)
    with pytest.raises(InputError, match=r"2147483648 values in a dictionary of codes; .* read fewer users at once"):
        decode_codes([runs], words, np.int64, np.zeros(1, np.int32))


@pytest.mark.slow
def test_more_text_than_an_arrow_array_holds_is_refused() -> None:
    column = Column(np.zeros(1 << 11, np.int32), None, pa.array(["x" * (1 << 20)]))
    assert len(column.take(slice(1)).to_arrow()) == 1
    with pytest.raises(InputError, match=r"2048 rows have more text than one Arrow array holds .*; convert fewer rows"):
        column.to_arrow()


def test_chunks_of_more_text_than_an_arrow_array_holds_are_refused() -> None:
    offsets = pa.py_buffer(np.array([0, BEYOND - 2], np.int32))
    half = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(np.zeros(BEYOND - 2, np.uint8))])
    with pytest.raises(InputError, match=r"2 chunks of string are more than one Arrow array holds .*; pass fewer rows"):
        Column.from_arrow(pa.chunked_array([half, half]), "string")
    lists = pa.ListArray.from_arrays(pa.array([0, BEYOND - 2], pa.int32()), pa.array(np.zeros(BEYOND - 2, np.int8)))
    with pytest.raises(InputError, match=r"2 chunks of list.* are more than one Arrow array holds .*; pass fewer rows"):
        Jagged.from_arrow(pa.chunked_array([lists, lists]), "int8")
