"""The dynamic table against a dict of plain Python, and its kernels against the NumPy reference, bit for bit."""

import itertools
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thinrow.core.wrap import GOLDEN64, MASK64, mix64
from thinrow.embeddings import DynamicTable, SparseAdagrad, index
from thinrow.kernels import BACKENDS, kernel, use
from thinrow.kernels.numba import threads

# A few keys that meet often, and the ends of the range.
keys_drawn = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**63), 2**63 - 1]), st.integers(-(2**63), 2**63 - 1))
key_lists = st.lists(keys_drawn, max_size=12)
dtypes = st.sampled_from([np.float32, np.float64])
block_counts = st.sampled_from([1, 2, 8])


def int64(keys):
    return np.array(keys, np.int64)


def both(name, *arguments):
    """Result of both backends, and the arguments as both leave them; equal bit for bit."""
    outcomes = []
    for backend in BACKENDS:
        copies = [copied(a) for a in arguments]
        with use(backend):
            outcomes.append((kernel(name)(*copies), copies))
    same(*outcomes)
    return outcomes[0]


def copied(a):
    if isinstance(a, np.ndarray):
        return a.copy()
    return [copied(x) for x in a] if isinstance(a, list) else a


def same(a, b):
    if isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    else:
        assert a == b


@given(st.data(), key_lists, key_lists, st.sampled_from([2, 4, 16]), st.integers(1, 7))
@settings(max_examples=120)
def test_index_kernels(data, first, second, size, n_segments):
    slots, counts = [np.full((size, 2), -1, np.int64) for _ in range(n_segments)], np.zeros(n_segments, np.int64)
    rows, fresh, distinct = np.full(len(first), -1, np.int64), int64([7] * len(first)), list(dict.fromkeys(first))
    most = data.draw(st.sampled_from([3, 100]))
    (stop, n), (slots, counts, _, _, _, rows, fresh, _) = both(
        "insert_keys", slots, counts, 0, most, int64(first), rows, fresh, 0
    )
    held = distinct[:n]
    assert fresh.tolist() == held + [7] * (len(first) - n)
    assert rows[:stop].tolist() == [held.index(k) for k in first[:stop]]
    assert stop == (len(first) if len(held) == len(distinct) else first.index(distinct[n]))
    assert counts.tolist() == [int((s[:, 1] >= 0).sum()) for s in slots]
    assert counts.max() <= size - max(1, size // 8)
    if stop < len(first):
        own = segment_of(distinct[n], n_segments)
        assert n == most or counts[own] == size - max(1, size // 8)
    check_index(slots, held, second)

    gone = [k for k in held if data.draw(st.booleans())]
    left = {k: row for row, k in enumerate(held) if k not in gone}
    _, (slots, counts, _) = both("drop_keys", slots, counts, int64(gone))
    assert counts.tolist() == [int((s[:, 1] >= 0).sum()) for s in slots]
    _, (slots, *_) = both("renumber_keys", slots, int64(list(left)), int64([row + 50 for row in left.values()]))
    found, _ = both("find_keys", slots, int64([*held, *second]))
    assert found.tolist() == [left[k] + 50 if k in left else -1 for k in [*held, *second]]

    bit = n_segments.bit_length() - 1
    source, new = n_segments - (1 << bit), np.full((size, 2), -1, np.int64)
    moved, (slots[source], new, _) = both("split_keys", slots[source], new, bit)
    assert moved == (new[:, 1] >= 0).sum()
    found, _ = both("find_keys", [*slots, new], int64([*held, *second]))
    assert found.tolist() == [left[k] + 50 if k in left else -1 for k in [*held, *second]]


def segment_of(key, n_segments):
    word, whole = mix64(key & MASK64), 1 << (n_segments.bit_length() - 1)
    return word % (2 * whole) if word % (2 * whole) < n_segments else word % whole


def check_index(slots, held, asked):
    for number, segment in enumerate(slots):
        assert {segment_of(k, len(slots)) for k, row in segment.tolist() if row >= 0} <= {number}
    found, _ = both("find_keys", slots, int64([*held, *asked]))
    assert found.tolist() == [held.index(k) if k in held else -1 for k in [*held, *asked]]


@given(st.data(), dtypes, st.integers(1, 9), block_counts)
@settings(max_examples=80)
def test_row_kernels(data, dtype, width, block_rows):
    n_rows = data.draw(st.integers(0, 12))
    draw_rows = hnp.arrays(np.int64, st.integers(0, 20), elements=st.integers(-2, n_rows + 1))
    blocks = [np.zeros((block_rows, width), dtype) for _ in range(-(-n_rows // block_rows))]
    keys = data.draw(hnp.arrays(np.int64, n_rows, elements=keys_drawn))
    seed, scale = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.floats(0, 10))
    _, (blocks, *_) = both("start_rows", blocks, 0, keys, seed, scale, True)
    flat = np.concatenate(blocks) if blocks else np.zeros((0, width), dtype)
    assert np.all(np.abs(flat) <= 6 * dtype(scale))
    _, (blocks, *_) = both("start_rows", blocks, 0, keys, seed, scale, False)
    flat = np.concatenate(blocks) if blocks else np.zeros((0, width), dtype)
    assert np.all((-dtype(scale) <= flat) & (flat <= dtype(scale)))

    rows = data.draw(draw_rows)
    bad, (_, _, _, out) = both("gather_rows", blocks, n_rows, rows, np.full((len(rows), width), 7, dtype))
    wrong = [i for i, r in enumerate(rows) if not -1 <= r < n_rows]
    assert bad == (wrong[0] if wrong else -1)
    for i, r in enumerate(rows):
        assert np.all(out[i] == (7 if i in wrong else 0 if r == -1 else flat[r]))

    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=4))
    bounds = int64([0, *sorted(cuts), len(rows)])
    bad, (_, _, _, _, pooled) = both(
        "pool_rows", blocks, n_rows, rows, bounds, np.full((len(bounds) - 1, width), 7, dtype)
    )
    assert bad == (wrong[0] if wrong else -1)
    if not wrong:
        for b, (first, last) in enumerate(itertools.pairwise(bounds)):
            total = np.zeros(width, dtype)
            for vector in out[first:last]:
                total += vector
            np.testing.assert_array_equal(pooled[b], total)


@given(st.data(), dtypes, st.integers(1, 9), st.sampled_from([1, 5, 300, 3000, 5_000_000]), st.sampled_from([1, 3]))
@settings(max_examples=120)
def test_sums_by_row(data, dtype, width, n_rows, n_threads):
    with patch.object(threads, "N_THREADS", n_threads), patch.object(threads, "MIN_BYTES", 1):
        _check_sums(data, dtype, width, n_rows)


def _check_sums(data, dtype, width, n_rows):
    rows = data.draw(hnp.arrays(np.int64, st.integers(0, 30), elements=st.integers(0, n_rows - 1)))
    gradient = data.draw(hnp.arrays(dtype, (len(rows), width), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    (distinct, places), _ = both("distinct_rows", rows, n_rows)
    assert distinct.tolist() == sorted(set(rows.tolist()))
    assert distinct[places].tolist() == rows.tolist()
    if len(rows) and data.draw(st.booleans()):
        gradient[data.draw(st.integers(0, len(rows) - 1)), 0] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    of = data.draw(st.none() | hnp.arrays(np.int64, len(rows), elements=st.integers(0, max(0, len(rows) - 1))))
    bad, (_, _, _, out) = both("sum_rows", gradient, of, places, np.empty((len(distinct), width), dtype))
    if of is not None:
        gradient = gradient[of]
    expected = np.zeros((len(distinct), width), dtype)
    for k, row in enumerate(distinct):
        at = np.flatnonzero(rows == row)
        expected[k] = gradient[at[0]]
        for i in at[1:]:
            expected[k] += gradient[i]
    np.testing.assert_array_equal(out, expected)
    broken = np.flatnonzero(~np.isfinite(expected).all(axis=1))
    assert bad == (broken[0] if len(broken) else -1)


@given(st.data(), dtypes, st.integers(1, 9), block_counts)
@settings(max_examples=80)
def test_update_kernels(data, dtype, width, block_rows):
    n_rows = data.draw(st.integers(1, 10))
    finite = st.floats(-1e3, 1e3, width=32)

    def blocks(elements, width=width, dtype=dtype):
        shape = -(-n_rows // block_rows), block_rows, width
        return list(data.draw(hnp.arrays(dtype, shape, elements=elements)))

    rows = int64(sorted(data.draw(st.sets(st.integers(0, n_rows - 1)))))
    gradient = data.draw(hnp.arrays(dtype, (len(rows), width), elements=finite))
    values, squares = blocks(finite), blocks(st.floats(0, 1e3, width=32))
    decay, decoupled = (data.draw(st.sampled_from([0.0, 0.01])) for _ in range(2))
    both("sgd_rows", values, rows, gradient, 0.01, decay)
    both("adagrad_rows", values, squares, rows, gradient, 0.01, 1e-10, decay)
    sums = blocks(st.floats(0, 1e3, width=32), 1)
    both("rowwise_adagrad_rows", values, sums, rows, gradient, 0.01, 1e-10, decay)
    steps = blocks(st.integers(0, 10_000), 1, np.int64)
    both("adam_rows", values, blocks(finite), squares, steps, rows, gradient, 1e-3, 0.9, 0.999, 1e-8, decay, decoupled)


class DictTable:
    """What the table does, key by key: a vector and an Adagrad sum for each key, in order of first appearance."""

    def __init__(self, dim, seed, scale, dtype):
        self.dim, self.seed, self.scale, self.dtype = dim, seed, scale, dtype
        self.vectors, self.sums = {}, {}

    def insert(self, keys):
        for key in keys:
            if key not in self.vectors:
                self.vectors[key], self.sums[key] = self.start(key), np.full(self.dim, 0.5, self.dtype)

    def start(self, key):
        word = mix64((key & MASK64) ^ mix64((self.seed + GOLDEN64) & MASK64))
        words = [mix64((word + (c + 1) * GOLDEN64) & MASK64) for c in range(self.dim)]
        return np.array([(w >> 40) / 2**23 - 1 for w in words], self.dtype) * self.dtype(self.scale)

    def rows(self, keys):
        order = list(self.vectors)
        return [order.index(k) if k in self.vectors else -1 for k in keys]

    def update(self, keys, gradient, lr, eps):
        summed = {}
        for key, g in zip(keys, gradient, strict=True):
            summed[key] = summed[key] + g if key in summed else g
        for key, g in summed.items():
            self.sums[key] = self.sums[key] + g * g
            self.vectors[key] = self.vectors[key] - self.dtype(lr) * (g / (np.sqrt(self.sums[key]) + self.dtype(eps)))


operations = st.one_of(
    st.tuples(st.sampled_from(["insert", "look", "update", "update"]), key_lists),
    st.tuples(st.just("save and load"), st.booleans()),
)


def small_segments():
    """So that a few keys are many segments, and often too many for one of them."""
    return patch.multiple(index, _MIN_SLOTS=2, _SEGMENT_SLOTS=4, _SLAB_SLOTS=16)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    st.lists(operations, min_size=4, max_size=12), st.integers(1, 4), st.integers(0, 2**63 - 1), dtypes, block_counts
)
@settings(max_examples=150)
def test_any_sequence_of_calls_does_what_a_dict_does(backend, calls, dim, seed, dtype, block_rows):
    with use(backend), small_segments():
        table = DynamicTable(dim, seed=seed, init_scale=0.25, block_rows=block_rows, dtype=dtype)
        adagrad = SparseAdagrad(table, lr=0.1, eps=1e-8, initial_accumulator=0.5)
        oracle = DictTable(dim, seed, 0.25, dtype)
        random = np.random.default_rng(seed)
        for name, given_ in calls:
            blocks = list(table.values.blocks)
            if name == "insert":
                oracle.insert(given_)
                assert table.rows(int64(given_), insert=True).tolist() == oracle.rows(given_)
            elif name == "look":
                before = table.state()
                assert table.rows(int64(given_), insert=False).tolist() == oracle.rows(given_)
                same(sorted(before.items()), sorted(table.state().items()))
            elif name == "update":
                keys = [k for k in given_ if k in oracle.vectors]
                gradient = random.normal(size=(len(keys), dim)).astype(dtype)
                table.add_gradient(table.rows(int64(keys), insert=False), gradient)
                adagrad.step()
                oracle.update(keys, gradient, 0.1, 1e-8)
            else:
                if given_:
                    table.load_state(table.state())
                else:
                    table = DynamicTable.from_state(table.state(), block_rows=4)
                    adagrad = SparseAdagrad(table, lr=0.1, eps=1e-8, initial_accumulator=0.5)
                blocks = list(table.values.blocks)
            assert [id(b) for b in table.values.blocks[: len(blocks)]] == [id(b) for b in blocks]
            check(table, oracle)


def check(table, oracle):
    order = list(oracle.vectors)
    assert table.keys().tolist() == order
    assert len(table) == len(order)
    rows = np.append(np.arange(len(order)), -1)
    expected = np.array([*oracle.vectors.values(), np.zeros(oracle.dim)], oracle.dtype)
    assert table.read(rows).tobytes() == expected.tobytes()
    if "row_state.adagrad.sum" in table.state():
        sums = np.array(list(oracle.sums.values()), oracle.dtype).reshape(-1, oracle.dim)
        assert table.state()["row_state.adagrad.sum"].tobytes() == sums.tobytes()
