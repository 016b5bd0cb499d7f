"""Blocks that are wrong in where their values stand: every backend refuses them.

Patches (docs/format/archive-v2.md, 4), marked rows (codecs 9 and 13, and patches of form 1), last rows of runs (codec
8) and restarts (codec 3) are put together here from positions and counts that no writer gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinrow.core.buffers import Buffers
from thinrow.kernels import BACKENDS, kernel, use
from thinrow.storage.codecs import LAST_CODEC, ZSTD_BYTES
from thinrow.testing.fuzz.guard import guarded

Array = npt.NDArray[Any]

PATCHED, LANES, WORDS = 255, 0x80, 3_000
PACKED, DELTA, DICTIONARY, RUNS, SPARSE, DECIMAL, MARKED = 2, 3, 4, 8, 9, 11, 13
FORGED = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Forged:
    """A block of ``rows`` rows, and whether some position in it is one that no writer gives."""

    codec: int
    width: int
    rows: int
    data: bytes
    wrong: bool


class Forger:
    """Makes blocks by a seed; ``fault`` is what is wrong in their positions."""

    def __init__(self, seed: int, fault: str) -> None:
        self.rng, self.fault, self.wrong = np.random.default_rng(seed), fault, False

    def positions(self, n: int, many: int) -> Array:
        """``many`` of n positions, ascending but for the fault."""
        found = np.sort(self.rng.choice(n, many, replace=False))
        at = int(self.rng.integers(many)) if many else 0
        if self.fault == "twice" and many > 1:
            found[max(at, 1)] = found[max(at, 1) - 1]
        elif self.fault == "all one" and many > 1:
            found[:] = found[0]
        elif self.fault == "descending" and many > 1:
            found = found[::-1].copy()
        elif self.fault == "beyond" and many:
            found[-1] = n + int(self.rng.integers(3))
        else:
            return found
        self.wrong = True
        return found

    def marks(self, n: int, many: int) -> bytes:
        """Bits of ``many`` of n rows, or of one more or less, or one behind the rows."""
        bits = np.zeros((n + 63) // 64 * 64, np.uint8)
        bits[self.rng.choice(n, many, replace=False)] = 1
        if self.fault == "one more" and many < n:
            bits[np.flatnonzero(bits[:n] == 0)[0]] = 1
        elif self.fault == "one less" and many:
            bits[np.flatnonzero(bits)[0]] = 0
        elif self.fault == "behind" and n % 64 and many:
            bits[np.flatnonzero(bits)[0]], bits[n] = 0, 1
        else:
            return np.packbits(bits, bitorder="little").tobytes()
        self.wrong = True
        return np.packbits(bits, bitorder="little").tobytes()

    def patches(self, n: int, low: int, high: int) -> bytes:
        """Patches of form 0 of n values."""
        groups = -(-n // 256)
        each = [int(self.rng.integers(min(256, n - 256 * g) + 1)) for g in range(groups)]
        if self.rng.random() < 0.7:
            each = [min(m, 9) for m in each]
        places = [self.positions(min(256, n - 256 * g), m) & 255 for g, m in enumerate(each)]
        own, ends = sum(each), np.cumsum(each).astype("<u2")
        head = np.array([own | low << 32 | high << 40], "<u8").tobytes()
        highs = np.packbits(self.rng.integers(0, 2, own * high).astype(np.uint8), bitorder="little")
        if self.rng.random() < 0.5:
            highs[:] = 255
        stored = padded(ends.tobytes() + np.concatenate([np.empty(0), *places]).astype(np.uint8).tobytes())
        return head + stored + padded(highs.tobytes()) + self.lanes(n, low)

    def lanes(self, n: int, width: int) -> bytes:
        size = (-(-n // 8) * width + 63) // 64 * 64
        return self.rng.bytes(size) if self.rng.random() < 0.5 else b"\xff" * size

    def packed(self, n: int, low: int, high: int) -> bytes:
        """Values with patches of either form."""
        if n < 2 or self.rng.random() < 0.5:
            return self.patches(n, low, high)
        own = int(self.rng.integers(1, n))
        head = np.array([own | PATCHED << 32 | 1 << 48], "<u8").tobytes()
        return head + self.marks(n, own) + self.patches(own, low, high)

    def block(self, codec: int, rows: int) -> Forged:
        """A block whose values have patches, of any of the codecs that have positions."""
        rng, width = self.rng, PATCHED
        low, high = int(rng.integers(1, 15)), int(rng.integers(1, 17))
        if codec in (DICTIONARY, MARKED):
            low, high = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        words = rng.integers(0, 1 << 12, 2).astype("<u8")
        if codec == PACKED:
            data = words.tobytes() + self.packed(rows, low, high)
        elif codec == DECIMAL:
            words[1] = int(rng.integers(0, 11)) | int(rng.choice((32, 64))) << 8
            data = words.tobytes() + self.packed(rows, low, high)
        elif codec == DICTIONARY:
            data = self.packed(rows, low, high)
        elif codec == MARKED:
            own = int(rng.integers(rows))
            own_width = int(rng.integers(1, 40)) | LANES
            words[0] = own | own_width << 32
            marks, own_words = self.marks(rows, own), self.lanes(own, own_width & 127)
            data = words.tobytes() + marks + own_words + self.packed(rows - own, low, high)
        elif codec == DELTA:
            data = words.tobytes() + self._restarts(rows) + self.packed(rows, low, high)
        elif codec == RUNS:
            n = int(rng.integers(1, rows + 1))
            ends = np.append(self.positions(max(rows - 1, 1), n - 1), rows - 1) if n > 1 else np.array([rows - 1])
            head = np.array([n | PACKED << 32 | PATCHED << 40 | 16 << 48], "<u8").tobytes()
            last_rows = padded(ends.astype("<u2").tobytes()) + bytes(8)
            data = head + last_rows + words.tobytes() + self.packed(n, low, high)
            width = 0
        else:
            n = int(rng.integers(1, rows + 1))
            head = np.array([7, n | PACKED << 32 | PATCHED << 40], "<u8").tobytes()
            data = head + self.marks(rows, n) + words.tobytes() + self.packed(n, low, high)
            width = 0
        return Forged(codec, width, rows, data, self.wrong)

    def _restarts(self, rows: int) -> bytes:
        n = int(self.rng.integers(1, min(rows, 6) + 1))
        at = np.append(0, 1 + self.positions(rows - 1, n - 1)) if n > 1 else np.zeros(1)
        values = self.rng.integers(0, 1 << 60, n).astype("<u8").tobytes()
        return np.array([n], "<u8").tobytes() + padded(at.astype("<u4").tobytes()) + values


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


FAULTS = ("none", "twice", "all one", "descending", "beyond", "one more", "one less", "behind")
blocks = st.builds(
    lambda seed, fault, codec, rows: Forger(seed, fault).block(codec, rows),
    st.integers(0, 2**32),
    st.sampled_from(FAULTS),
    st.sampled_from((PACKED, DELTA, DICTIONARY, RUNS, SPARSE, DECIMAL, MARKED)),
    st.integers(1, 70) | st.integers(71, 1_100),
)


def read_fixed(block: Forged, first: int, last: int, itemsize: int, backend: str) -> tuple[int, bytes]:
    """What a backend answers, and what it read, from and to memory between forbidden pages."""
    data = guarded(len(block.data))
    data[:] = np.frombuffer(block.data, np.uint8)
    dictionary = guarded(8 * WORDS).view(np.uint64)
    dictionary[:] = np.arange(WORDS) * 3
    out = guarded((last - first) * itemsize).view(f"i{itemsize}")
    out[:] = 77
    place = [np.array([v], np.int64) for v in (0, 0, len(data))]
    kinds = np.array([block.codec], np.uint8), np.array([block.width], np.uint8)
    run = [np.array([v], np.int64) for v in (0, WORDS, 0, block.rows, first, last, 0)]
    with use(backend):
        bad = kernel("decode_fixed")(Buffers([data]), *place, *kinds, dictionary, *run, out)
    return int(bad), out.tobytes() if bad < 0 else b""


def read_codes(block: Forged, first: int, last: int, backend: str) -> Any:
    """Codes, and words of the block's own."""
    data = guarded(len(block.data))
    data[:] = np.frombuffer(block.data, np.uint8)
    one = [np.array([v], np.int64) for v in (0, 0, len(data))]
    kinds = np.array([block.codec], np.uint8), np.array([block.width], np.uint8)
    run = [np.array([v], np.int64) for v in (0, block.rows, first, last)]
    place, values, held = np.empty(1, np.int64), np.empty(1, np.int64), np.array([WORDS])
    with use(backend):
        bad, n = kernel("place_words")(Buffers([data]), *one, *kinds, held, *run, place, values)
        if bad >= 0:
            return bad
        tail, out = np.zeros(n, np.int64), np.full(last - first, -1, np.int32)
        zero = np.zeros(1, np.int64)
        bad = kernel("decode_codes")(
            Buffers([data]), *one, *kinds, WORDS, zero, held, *run, zero, place, tail, out
        )  # fmt: skip
    return bad, values.tolist(), (tail.tolist(), out.tolist()) if bad < 0 else None


@FORGED
@given(blocks, st.floats(0, 1), st.floats(0, 1), st.sampled_from((1, 2, 4, 8)))
def test_wrong_positions_are_refused_and_right_ones_read_alike(
    block: Forged, begin: float, share: float, itemsize: int
) -> None:
    first = int(begin * block.rows)
    last = first + int(share * (block.rows - first))
    for a, b in ((0, block.rows), (first, last)):
        found = [read_fixed(block, a, b, itemsize, name) for name in BACKENDS]
        assert found[0] == found[1]
        if block.wrong:
            assert found[0][0] == 0
        codes = [read_codes(block, a, b, name) for name in BACKENDS]
        assert codes[0] == codes[1]


@pytest.mark.parametrize("fault", FAULTS[1:])
@pytest.mark.parametrize("codec", [PACKED, DELTA, DICTIONARY, RUNS, SPARSE, DECIMAL, MARKED])
def test_each_fault_is_met(codec: int, fault: str) -> None:
    """Of each codec, at 512 rows and the width of items that most columns have."""
    itemsize, met = 4 if codec == DECIMAL else 8, 0
    for seed in range(40):
        block = Forger(seed, fault).block(codec, 500)
        if block.wrong:
            met += 1
            assert [read_fixed(block, 0, 500, itemsize, name)[0] for name in BACKENDS] == [0] * len(BACKENDS)
    assert met > 0


@pytest.mark.parametrize("codec", [c for c in range(LAST_CODEC + 1) if c != ZSTD_BYTES])
def test_of_a_block_of_no_rows_nothing_beside_it_is_read(codec: int) -> None:
    """All that such a block says of itself is 0: no restarts, no words, no marks."""
    for width in (0, 1, 64, LANES, LANES | 64, PATCHED):
        for size in (0, 8, 16, 24, 32, 64, 128):
            block = Forged(codec, width, 0, bytes(size), wrong=False)
            for itemsize in (1, 2, 4, 8):
                found = [read_fixed(block, 0, 0, itemsize, name) for name in BACKENDS]
                assert found[0] == found[1], (width, size, itemsize)
