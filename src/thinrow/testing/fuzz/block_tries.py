"""Tries of the decoders alone: a damaged block between forbidden pages, decoded into memory between forbidden pages.

A thousand times quicker than a try of a store, and nearer to what could read or write outside a buffer. Worked example:
``BlockTries(seed=1).run(7)`` takes a block of codec 3, doubles its number of restarts, and decodes rows 5 to 60 of it,
as items of 2 bytes. It is None where the decoder refused or stayed in bounds, else a ``Failure``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.buffers import Buffers
from thinrow.kernels import kernel, use
from thinrow.storage.blocks import Values, encode_fixed
from thinrow.storage.codecs import LAST_CODEC, NO_CODE, ZSTD_BYTES, BadBlock, decode_bytes
from thinrow.testing.fuzz.damage import OUTCOMES, Failure, failure_of, hostile, layout_of, pick
from thinrow.testing.fuzz.guard import guarded
from thinrow.testing.fuzz.layout import Span
from thinrow.testing.fuzz.world import sound_worlds

#: One of so many tries is compared with the plain kernels.
_COMPARED = 24
_ROWS_AT_MOST = 5_000
#: Rows of a stripe of values with patches, and the width that says so.
_PATCHED_ROWS, PATCHED = 512, 255


@dataclass(frozen=True, slots=True)
class _Sound:
    """A block as a writer wrote it, and the rows of its stripe."""

    data: bytes
    codec: int
    width: int
    rows: int


class BlockTries:
    """Tries of one seed."""

    def __init__(self, seed: int) -> None:
        """Collects the blocks of the sound stores."""
        self.seed = seed
        #: Nothing is counted: no CRC is looked at here.
        self.outcomes = [0] * len(OUTCOMES)
        held: dict[int, list[_Sound]] = {}
        for world in sound_worlds()[:2]:
            for name in world.live[1:]:
                data = world.files[name]
                for b in layout_of(data).blocks:
                    held.setdefault(b.codec, []).append(_Sound(data[b.start : b.stop], b.codec, b.width, b.rows))
        #: By codec, so that rare ones come as often as others; those with patches that no such small store has, too.
        self._blocks = [*(blocks for _, blocks in sorted(held.items())), *_patched()]

    def run(self, number: int) -> Failure | None:
        """Do try ``number``."""
        rng = np.random.default_rng([self.seed, 1 << 40, number])
        sound: _Sound = pick(rng, pick(rng, self._blocks))
        data, codec, width, rows = bytearray(sound.data), sound.codec, sound.width, sound.rows
        for _ in range(int(rng.choice(3, p=[0.1, 0.6, 0.3]))):
            _spoil(data, rng)
        if rng.random() < 0.3:
            codec = int(rng.integers(LAST_CODEC + 2))
        if rng.random() < 0.25:
            width = int(pick(rng, (0, 1, 2, 3, 7, 8, 31, 57, 58, 63, 64, 65, 127, 127))) | int(rng.integers(2)) << 7
        if rng.random() < 0.3:
            rows = int(pick(rng, (0, 1, rows - 1, rows + 1, 2 * rows, 63, 64, 65, 512, 1 << 16, 1 << 31, -1)))
        if rng.random() < 0.15:
            data = data[: 8 * int(rng.integers(len(data) // 8 + 1))]
        top = min(max(rows, 0), _ROWS_AT_MOST)
        first = int(rng.integers(top + 1)) if rng.random() < 0.5 else 0
        last = int(rng.integers(first, top + 1)) if rng.random() < 0.5 else top
        said = f"block of codec {codec}, width {width}, rows {first} to {last} of {rows}: {data.hex()}"
        block = guarded(len(data))
        block[:] = np.frombuffer(data, np.uint8)
        try:
            if codec == ZSTD_BYTES:
                _bytes(block, rows, first, last)
                return None
            # The plain kernels unpack whole blocks.
            compare = number % _COMPARED == 0 and rows <= 1 << 20
            what = _fixed(block, codec, width, rows, first, last, rng, compare)
        except Exception as e:
            return failure_of(number, said, "block", e)
        return None if what is None else Failure(number, said, "block", what, f"{what}, codec {codec}")


def _patched() -> tuple[list[_Sound], list[_Sound]]:
    """Blocks of decimals and of marked codes, most of them small and a few large, so that these have patches."""
    rng, n = np.random.default_rng(13), 4 * _PATCHED_ROWS
    cents = np.where(rng.random(n) < 0.95, rng.integers(0, 60, n), rng.integers(0, 1 << 20, n))
    prices = (cents / 100).astype(np.float32).view(np.uint32).astype(np.uint64)
    codes = np.where(rng.random(n) < 0.95, rng.integers(0, 8, n), rng.integers(0, 1 << 10, n)).astype(np.uint32)
    words = np.where(rng.random(n) < 0.1, rng.integers(1 << 40, 1 << 60, n), codes).astype(np.uint64)
    codes[words != codes] = NO_CODE
    stripes = np.arange(0, n + 1, _PATCHED_ROWS)
    no_codes = np.empty(0, np.uint32)
    found = []
    for values in (
        Values(prices, stripes, stripes[:-1], 4, 32, no_codes, 0),
        Values(words, stripes, stripes[:-1], 8, 0, codes, 1 << 10),
    ):
        stream = encode_fixed(values)
        assert (stream.width == PATCHED).all()
        ends = zip(stream.offsets.tolist(), stream.offsets[1:].tolist(), stream.codec.tolist(), strict=False)
        found.append([_Sound(stream.payload[a:b].tobytes(), codec, PATCHED, _PATCHED_ROWS) for a, b, codec in ends])
    return found[0], found[1]


def _spoil(data: bytearray, rng: np.random.Generator) -> None:
    if not data:
        return
    size = int(pick(rng, (1, 1, 2, 4, 8)))
    top = len(data) if rng.random() < 0.4 else min(len(data), 40)
    at = int(rng.integers(top // size)) * size
    data[at : at + size] = hostile(rng, data, Span(at, at + size, ""))


def _bytes(block: npt.NDArray[np.uint8], rows: int, first: int, last: int) -> None:
    run = (np.array([v], np.int64) for v in (0, 0, len(block), rows, first, last))
    try:
        offsets, data = decode_bytes(Buffers([block]), *run)
    except BadBlock:
        return
    assert offsets[0] == 0
    assert (np.diff(offsets) >= 0).all()
    assert offsets[-1] == len(data)


def _fixed(
    block: npt.NDArray[np.uint8],
    codec: int,
    width: int,
    rows: int,
    first: int,
    last: int,
    rng: np.random.Generator,
    compare: bool,
) -> str | None:
    itemsize = int(pick(rng, (1, 2, 4, 8)))
    words = int(pick(rng, (0, 1, 3, 40, 4096)))
    dictionary = guarded(8 * words).view(np.uint64)
    dictionary[:] = np.arange(words)
    n = last - first
    found: list[Any] = []
    for backend in ("numba", "reference") if compare else ("numba",):
        out = guarded(n * itemsize).view(f"i{itemsize}")
        out[:] = 77
        one = [np.array([v], np.int64) for v in (0, 0, len(block))]
        kinds = np.array([codec], np.uint8), np.array([width], np.uint8)
        held = [np.array([v], np.int64) for v in (0, words, 0, rows, first, last, 0)]
        with use(backend):
            bad = kernel("decode_fixed")(Buffers([block]), *one, *kinds, dictionary, *held, out)
        if bad not in (-1, 0):
            return f"answer {bad} of one run"
        found.append((bad, out.tobytes() if bad == -1 else b""))
    if compare and found[0] != found[1]:
        return "backends differ"
    return None
