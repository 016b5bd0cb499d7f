"""Blocks: what is encoded comes back, every backend agrees, and damaged blocks are refused or decode in bounds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from thinrow.core.buffers import Buffers
from thinrow.kernels import BACKENDS, kernel, use
from thinrow.storage.blocks import Values, encode_fixed, plan_nullable
from thinrow.storage.codecs import NO_CODE, BadBlock, EncodedStream, decode_bytes, encode_bytes
from thinrow.storage.codes import BlockRuns, decode_codes

Array = npt.NDArray[Any]
QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
DTYPES = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
NO_DICTIONARY = np.empty(0, np.uint64)


class Case:
    """Words of one column, cut into stripes and pieces."""

    def __init__(
        self,
        words: Array,
        stripes: Array,
        restarts: Array,
        itemsize: int,
        dictionary: Array,
        codes: Array,
        float_bits: int = 0,
    ) -> None:
        self.words, self.stripes, self.restarts, self.itemsize = words, stripes, restarts, itemsize
        self.dictionary = dictionary
        self.values = Values(words, stripes, restarts, itemsize, float_bits, codes, len(dictionary))

    def encode(self) -> EncodedStream:
        return encode_fixed(self.values)

    @property
    def expected(self) -> Array:
        return self.words.astype(f"u{self.itemsize}").view(DTYPES[self.itemsize])


def make_case(kind: str, seed: int, n: int, stripe_rows: int, itemsize: int, piece_rows: int) -> Case:
    rng = np.random.default_rng(seed)
    top = 1 << (8 * itemsize - 1)
    dictionary, codes = NO_DICTIONARY, np.empty(0, np.uint32)
    if kind == "zero":
        values = np.zeros(n, np.int64)
    elif kind == "constant":
        values = np.full(n, rng.integers(-top, top))
    elif kind == "scaled":
        values = rng.integers(0, 7, n) * max(1, top // 100) - top // 2
    elif kind == "narrow":
        values = rng.integers(-top // 8, top // 8, n) + rng.integers(-top // 2, top // 2)
    elif kind == "ascending":
        values = np.sort(rng.integers(-top, top, n))
    elif kind == "steps":
        values = (np.cumsum(rng.integers(0, 2, n) * 3) + 5) % min(top, 1 << 62)
    elif kind == "few":
        values = rng.choice(rng.integers(-top, top, 5), n)
    elif kind in ("dictionary", "mixed"):
        table = np.unique(rng.integers(-top, top, 300))
        rng.shuffle(table)
        codes = np.minimum(rng.integers(0, len(table), n), rng.geometric(0.02, n) % len(table)).astype(np.uint32)
        values, dictionary = table[codes], table.view(np.uint64)
        if kind == "mixed":
            held = len(table) // 2
            dictionary, codes = dictionary[:held], np.where(codes < held, codes, NO_CODE).astype(np.uint32)
    elif kind in ("tails", "ties"):
        # Lengths of all sorts, few of them long; or mostly nothing.
        lengths = np.minimum(rng.geometric(rng.choice([0.02, 0.2, 0.5]), n), rng.integers(2, 8 * itemsize))
        values = rng.integers(0, 1 << np.minimum(lengths, 62), n) * (rng.random(n) < (1.0 if kind == "tails" else 0.6))
        if rng.random() < 0.5:
            values = np.cumsum(values) & (top - 1)
    elif kind == "marked":
        values = np.where(rng.random(n) < 0.7, np.minimum(rng.geometric(0.1, n), 199), rng.integers(-top, top, n))
        dictionary = np.arange(200).astype(np.uint64)
        codes = np.where((values >= 0) & (values < 200), values, NO_CODE).astype(np.uint32)
    elif kind == "runs":
        values = np.repeat(rng.integers(-top, top, n), rng.integers(1, 90, n))[:n]
    elif kind == "sparse":
        values = np.where(rng.random(n) < 0.85, rng.integers(-top, top), rng.integers(-top, top, n))
    elif kind in ("decimal", "floats") and itemsize >= 4:
        floats = np.round(rng.normal(0, 50, n), rng.integers(0, 4))
        if kind == "floats":
            floats = np.where(rng.random(n) < 0.2, rng.choice([np.nan, -0.0, np.inf, 1e300, 0.1 + 0.2], n), floats)
        with np.errstate(over="ignore"):
            values = floats.astype(f"f{itemsize}").view(f"u{itemsize}").astype(np.uint64).view(np.int64)
    else:
        values = rng.integers(-top, top, n)
    stripes = np.unique(np.append(np.arange(0, n, stripe_rows), n))
    restarts = np.unique(np.concatenate([stripes[:-1], np.arange(0, n, piece_rows)]))
    float_bits = 8 * itemsize if kind in ("decimal", "floats") and itemsize >= 4 else 0
    return Case(values.astype(np.int64).view(np.uint64), stripes, restarts, itemsize, dictionary, codes, float_bits)


KINDS = (
    *("zero", "constant", "scaled", "narrow", "ascending", "steps", "few", "dictionary", "random"),
    *("mixed", "runs", "sparse", "decimal", "floats", "tails", "ties", "marked"),
)
cases = st.builds(
    make_case,
    st.sampled_from(KINDS),
    st.integers(0, 2**32),
    st.integers(1, 1500),
    st.sampled_from([1, 7, 64, 512, 700, 1300]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 3, 50, 10_000]),
)


def decode(case: Case, stream: EncodedStream, row_from: Array, row_to: Array, out: Array, out_pos: Array) -> int:
    n = len(stream.codec)
    found: int = kernel("decode_fixed")(
        Buffers([stream.payload]),
        np.zeros(n, np.int64),
        stream.offsets[:-1],
        np.diff(stream.offsets),
        stream.codec,
        stream.width,
        case.dictionary,
        np.zeros(n, np.int64),
        np.full(n, len(case.dictionary)),
        np.arange(n),
        np.diff(case.stripes),
        row_from,
        row_to,
        out_pos,
        out,
    )
    return found


def whole(case: Case, stream: EncodedStream) -> Array:
    rows = np.diff(case.stripes)
    out = np.empty(len(case.words), DTYPES[case.itemsize])
    assert decode(case, stream, np.zeros_like(rows), rows, out, case.stripes[:-1]) == -1
    return out


@QUICK
@given(cases)
def test_words_come_back(case: Case) -> None:
    np.testing.assert_array_equal(whole(case, case.encode()), case.expected)


@QUICK
@given(cases, st.randoms(use_true_random=False))
def test_any_rows_of_any_stripe(case: Case, random: Any) -> None:
    stream = case.encode()
    rows = np.diff(case.stripes)
    first = np.array([random.randint(0, int(r)) for r in rows])
    last = np.array([random.randint(int(a), int(r)) for a, r in zip(first, rows, strict=True)])
    place = np.concatenate([[3], 3 + np.cumsum(last - first)])
    for name in BACKENDS:
        out = np.full(place[-1] + 4, 77, DTYPES[case.itemsize])
        with use(name):
            assert decode(case, stream, first, last, out, place[:-1]) == -1
        wanted = [case.expected[s + a : s + b] for s, a, b in zip(case.stripes, first, last, strict=False)]
        np.testing.assert_array_equal(out[3:-4], np.concatenate(wanted))
        assert (out[:3] == 77).all()
        assert (out[-4:] == 77).all()


@settings(QUICK, max_examples=30)
@given(cases)
def test_backends_write_the_same_bytes(case: Case) -> None:
    streams = []
    for name in BACKENDS:
        with use(name):
            streams.append(case.encode())
    a, b = streams
    for field in ("codec", "width", "offsets", "payload", "crc"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        *(("zero", 0), ("constant", 1), ("scaled", 2), ("steps", 3), ("dictionary", 4), ("few", 5), ("random", 6)),
        *(("runs", 8), ("sparse", 9), ("decimal", 11), ("mixed", 12), ("marked", 13)),
    ],
)
def test_each_codec_is_chosen_for_its_data(kind: str, codec: int) -> None:
    case = make_case(kind, 5, 2048, 512, 8, 10_000)
    assert case.encode().codec.tolist() == [codec] * 4


@QUICK
@given(cases, st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.6, 0.95, 1.0]))
def test_nulls_and_values_come_back(case: Case, seed: int, share: float) -> None:
    """Where absent rows tell the nulls, the block of the values is read for both."""
    rng, rows = np.random.default_rng(seed), np.diff(case.stripes)
    # Stripes differ in their share, so that those of one codec stand before and after empty ones of another.
    null = rng.random(len(case.words)) < np.repeat(rng.choice([0.0, share, 0.9, 1.0], len(rows)), rows)
    words = np.where(null, np.uint64(0), case.words)
    if len(case.dictionary):
        return
    values = Values(words, case.stripes, case.restarts, case.itemsize, case.values.float_bits)
    for name in BACKENDS:
        with use(name):
            nulls, held = (plan.write() for plan in plan_nullable(values, null))
            absent = nulls.codec == 10
            assert (held.codec[absent] == 9).all()
            assert (np.diff(nulls.offsets)[absent] == 0).all()
            got = whole(case, held)
            np.testing.assert_array_equal(got, words.astype(f"u{case.itemsize}").view(got.dtype))
            flags = np.empty(len(words), np.int8)
            rows = np.diff(case.stripes)
            for stream, which, codec in ((nulls, ~absent, nulls.codec), (held, absent, np.full_like(nulls.codec, 10))):
                blocks = [a[which] for a in (stream.offsets[:-1], np.diff(stream.offsets), codec, stream.width)]
                zero, part = np.zeros(int(which.sum()), np.int64), rows[which]
                runs = np.arange(len(zero)), part, zero, part, case.stripes[:-1][which], flags
                buffers = Buffers([stream.payload])
                assert kernel("decode_fixed")(buffers, zero, *blocks, NO_DICTIONARY, zero, zero, *runs) == -1
            np.testing.assert_array_equal(flags, null)
            separate = encode_fixed(Values(null.astype(np.uint64), case.stripes, case.restarts, 1))
            apart = np.diff(encode_fixed(values).offsets) + np.diff(separate.offsets)
            assert (np.diff(nulls.offsets) + np.diff(held.offsets) <= apart).all()


def runs_of(case: Case, stream: EncodedStream, block: Array, first: Array, last: Array, skipped: int) -> BlockRuns:
    """Runs of some rows, one after another in the output; the column's words come after ``skipped`` others."""
    n = len(stream.codec)
    where = Buffers([stream.payload]), np.zeros(n, np.int64), stream.offsets[:-1], np.diff(stream.offsets)
    held = np.full(n, skipped), np.full(n, len(case.dictionary))
    place = np.cumsum(last - first) - (last - first)
    rows = np.diff(case.stripes)[block]
    return BlockRuns(*where, stream.codec, stream.width, *held, block, rows, first, last, place)


@QUICK
@given(cases, st.integers(0, 2**32), st.integers(0, 3))
def test_codes_refer_to_the_values(case: Case, seed: int, skipped: int) -> None:
    """Any runs of any blocks, several of one block; dictionaries of other segments before it."""
    stream, rng = case.encode(), np.random.default_rng(seed)
    words = np.concatenate([rng.integers(0, 9, skipped).astype(np.uint64), case.dictionary])
    block = np.sort(rng.integers(0, len(stream.codec), 2 * len(stream.codec)))
    first = rng.integers(0, np.diff(case.stripes)[block] + 1)
    last = rng.integers(first, np.diff(case.stripes)[block] + 1)
    runs = runs_of(case, stream, block, first, last, skipped)
    wanted = [case.expected[s + a : s + b] for s, a, b in zip(case.stripes[block], first, last, strict=True)]
    for name in BACKENDS:
        codes = np.full(int((last - first).sum()), -1, np.int32)
        with use(name):
            dictionary = decode_codes([runs], words, DTYPES[case.itemsize], codes)
        np.testing.assert_array_equal(dictionary[:skipped], words[:skipped].astype(DTYPES[case.itemsize]))
        assert (codes >= 0).all()
        np.testing.assert_array_equal(dictionary[codes], np.concatenate(wanted))


@pytest.mark.parametrize(
    ("kind", "own"), [("constant", 4), ("dictionary", 0), ("few", 4 * 5), ("mixed", None), ("random", 2048)]
)
def test_words_of_a_block_are_entries_once(kind: str, own: int | None) -> None:
    case = make_case(kind, 5, 2048, 512, 8, 10_000)
    stream = case.encode()
    block = np.repeat(np.arange(4), 2)
    first = np.tile([0, 256], 4)
    codes = np.empty(2048, np.int32)
    runs = runs_of(case, stream, block, first, first + 256, 0)
    n = len(decode_codes([runs], case.dictionary, np.int64, codes)) - len(case.dictionary)
    if own is None:
        heads = stream.payload.view("<u8")[stream.offsets[:-1] // 8]
        own = int((heads >> np.uint64(32)).sum())
        assert own > 0
    assert n == (2 * own if kind == "constant" else own)


@QUICK
@given(cases, st.integers(0, 64), st.integers(0, 2**32))
def test_codes_of_every_width(case: Case, width: int, seed: int) -> None:
    """A block of codec 4 may be wider than its codes need; beyond 31 bits its values are entries."""
    n, rng = len(case.words), np.random.default_rng(seed)
    words = rng.integers(0, 2**64, 1 << min(width, 6), dtype=np.uint64)
    q = rng.integers(0, len(words), n).astype(np.uint64)
    packed = np.frombuffer(bytearray(pack(q, width, ((n * width + 63) // 64 + 1) * 8)), np.uint8)
    one, rows = np.zeros(1, np.int64), np.array([n])
    kind = np.array([4], np.uint8), np.array([width], np.uint8)
    held = one, np.array([len(words)])
    runs = BlockRuns(Buffers([packed]), one, one, np.array([len(packed)]), *kind, *held, one, rows, one, rows, one)
    for name in BACKENDS:
        codes = np.empty(n, np.int32)
        with use(name):
            dictionary = decode_codes([runs], words, np.int64, codes)
        assert len(dictionary) == len(words) + (n if width > 31 else 0)
        np.testing.assert_array_equal(dictionary[codes].view(np.uint64), words[q.astype(np.int64)])


@given(
    st.integers(0, 12) | st.integers(0, 64),
    st.integers(1, 300),
    st.booleans(),
    st.sampled_from((1, 3)),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
@QUICK
def test_every_width(width: int, n: int, lanes: bool, scale: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 2**64, n, dtype=np.uint64)
    q = q >> np.uint64(64 - width) if width else np.zeros(n, np.uint64)
    packed = pack(q, width, ((n * width + 63) // 64 + 1) * 8)
    if lanes:
        words = ((n + 7) // 8 * width + 63) // 64
        each = [np.frombuffer(pack(q[k::8], width, words * 8), "<u8") for k in range(8)]
        packed = np.stack(each, axis=1).tobytes()
    base = int(rng.integers(0, 2**63))
    block = np.frombuffer(bytearray(np.array([base, scale], "<u8").tobytes() + packed), np.uint8)
    run = [np.array([v]) for v in (0, len(block))]
    first = int(rng.integers(0, n)) if rng.integers(2) else 0
    stop = int(rng.integers(first, n)) if rng.integers(2) else n
    wanted = (q * np.uint64(scale) + np.uint64(base)).astype(f"u{1 << (size - 1)}")
    for name in BACKENDS:
        # One item before and one after, which stay as they are.
        out = np.full(stop - first + 2, 7, wanted.dtype)
        rows = [np.array([v]) for v in (n, first, stop, 1)]
        with use(name):
            assert decode_one(block, *run, 2, width | (0x80 if lanes else 0), *rows, out) == -1
        np.testing.assert_array_equal(out, [7, *wanted[first:stop], 7])


def pack(q: Array, width: int, size: int) -> bytes:
    return sum(int(v) << (i * width) for i, v in enumerate(q)).to_bytes(size, "little")


def decode_one(
    block: Array, off: Array, length: Array, codec: int, width: int, n: Array, a: Array, b: Array, at: Array, out: Array
) -> int:
    zero = np.zeros(1, np.int64)
    kinds = (np.array([codec], np.uint8), np.array([width], np.uint8))
    found: int = kernel("decode_fixed")(
        Buffers([block]), zero, off, length, *kinds, NO_DICTIONARY, zero, zero, zero, n, a, b, at, out
    )
    return found


@settings(QUICK, max_examples=150)
@given(cases, st.integers(0, 2**32), st.booleans())
@example(make_case("steps", 1, 600, 512, 8, 3), 7, True)
def test_damage_stays_in_bounds(case: Case, seed: int, spoil_header: bool) -> None:
    """Flipped bytes: an index of a bad run or values, and never a byte outside the run's output."""
    stream = case.encode()
    rng = np.random.default_rng(seed)
    s = int(rng.integers(len(stream.codec)))
    start, stop = int(stream.offsets[s]), int(stream.offsets[s + 1])
    block = stream.payload[start:stop].copy()
    for _ in range(int(rng.integers(1, 4))):
        if len(block):
            block[rng.integers(min(len(block), 48) if rng.random() < 0.7 else len(block))] = rng.integers(256)
    codec, width = int(stream.codec[s]), int(stream.width[s])
    rows = int(case.stripes[s + 1] - case.stripes[s])
    if spoil_header:
        codec, width, rows = int(rng.integers(14)), int(rng.integers(256)), int(rng.integers(1, 1200))
    a = int(rng.integers(rows))
    b = int(rng.integers(a, rows + 1))
    results = []
    for name in BACKENDS:
        out = np.full(b - a + 8, 77, DTYPES[case.itemsize])
        one = [np.array([v]) for v in (0, len(block))]
        where = [np.array([v]) for v in (rows, a, b, 4)]
        with use(name):
            found = decode_one(block, *one, codec, width, *where, out)
        assert (out[:4] == 77).all()
        assert (out[-4:] == 77).all()
        results.append((found, out.tolist() if found == -1 else None))
    assert results[0] == results[1]


@settings(QUICK, max_examples=300)
@given(cases, st.integers(0, 2**32), st.booleans())
def test_damaged_codes_stay_in_bounds(case: Case, seed: int, spoil_header: bool) -> None:
    """Flipped bytes: an index of a bad run, or codes of the dictionary; the backends agree."""
    stream, rng = case.encode(), np.random.default_rng(seed)
    block = stream.payload.copy()
    s = int(rng.integers(len(stream.codec)))
    start, stop = int(stream.offsets[s]), int(stream.offsets[s + 1])
    for _ in range(int(rng.integers(1, 4))):
        if stop > start:
            block[start + rng.integers(min(stop - start, 48) if rng.random() < 0.7 else stop - start)] = rng.integers(
                256
            )
    codec, width, rows = stream.codec.copy(), stream.width.copy(), int(case.stripes[s + 1] - case.stripes[s])
    if spoil_header:
        codec[s], width[s], rows = rng.integers(14), rng.integers(256), int(rng.integers(1, 1200))
    damaged = EncodedStream(codec, width, block, stream.offsets, stream.crc)
    a = int(rng.integers(rows))
    b = int(rng.integers(a, rows + 1))
    runs = replace(
        runs_of(case, damaged, np.array([s]), np.array([a]), np.array([b]), 0),
        n_rows=np.array([rows]),
        out_pos=np.array([4]),
    )
    results: list[Any] = []
    for name in BACKENDS:
        codes = np.full(b - a + 8, 77, np.int32)
        with use(name):
            try:
                dictionary = decode_codes([runs], case.dictionary, DTYPES[case.itemsize], codes)
            except BadBlock as e:
                results.append(e.index)
            else:
                assert ((codes[4:-4] >= 0) & (codes[4:-4] < len(dictionary))).all()
                results.append(dictionary[codes[4:-4]].tolist())
        assert (codes[:4] == 77).all()
        assert (codes[-4:] == 77).all()
    assert results[0] == results[1]
    out = np.empty(b - a, DTYPES[case.itemsize])
    values = kernel("decode_fixed")(
        *runs.blocks, case.dictionary, runs.dict_off, runs.dict_n, runs.block, runs.n_rows, runs.first, runs.last,
        np.zeros(1, np.int64), out,
    )  # fmt: skip
    if values < 0:
        assert results[0] == out.tolist()
    elif a < b:
        assert results[0] == 0


@settings(QUICK, max_examples=200)
@given(st.lists(st.integers(-8, 64) | st.integers(-(2**63), 2**63 - 1), min_size=12, max_size=12), st.integers(0, 13))
def test_impossible_runs_of_codes_are_refused(noise: list[int], codec: int) -> None:
    buffer = np.arange(256, dtype=np.uint8)
    results = []
    for name in BACKENDS:
        out, tail = np.full(16, 77, np.int32), np.full(16, 77, np.int16)
        off, length, rows, first, last, at, dict_off, dict_n, source, block, place, _ = (np.array([v]) for v in noise)
        head = Buffers([buffer]), source, off, length, np.array([codec], np.uint8), np.array([8], np.uint8)
        where, values = np.zeros(1, np.int64), np.zeros(1, np.int64)
        with use(name):
            placed = kernel("place_words")(*head, dict_n, block, rows, first, last, where, values)
            found = kernel("decode_codes")(
                *head, abs(noise[-1]) % 64, dict_off, dict_n, block, rows, first, last, at, place, tail[4:12], out
            )
        results.append((placed, where.tolist(), values.tolist(), found, out.tolist() if found < 0 else None))
        assert (tail[:4] == 77).all()
        assert (tail[12:] == 77).all()
        if found >= 0 and not 0 <= noise[5] <= 16:
            assert (out == 77).all()
    assert results[0] == results[1]


@settings(QUICK, max_examples=200)
@given(st.lists(st.integers(-8, 64) | st.integers(-(2**63), 2**63 - 1), min_size=10, max_size=10), st.integers(0, 7))
def test_impossible_runs_are_refused(noise: list[int], codec: int) -> None:
    """Offsets, lengths and rows of any size: the backends agree, and what they refuse is never touched."""
    buffer = np.arange(256, dtype=np.uint8)
    results = []
    for name in BACKENDS:
        out = np.full(16, 77, np.int32)
        off, length, rows, first, last, at, dict_off, dict_n, source, block = (np.array([v]) for v in noise)
        kinds = (np.array([codec], np.uint8), np.array([8], np.uint8))
        dictionary = np.arange(4, dtype=np.uint64)
        with use(name):
            found = kernel("decode_fixed")(
                Buffers([buffer]), source, off, length, *kinds, dictionary, dict_off, dict_n, block, rows, first, last,
                at, out,
            )  # fmt: skip
        assert found in (-1, 0)
        results.append((found, out.tolist()))
    assert results[0] == results[1]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=200), st.integers(1, 64), st.data())
@QUICK
def test_bytes_come_back(values: list[bytes], stripe_rows: int, data: st.DataObject) -> None:
    offsets = np.cumsum([0, *(len(v) for v in values)])
    stripes = np.unique(np.append(np.arange(0, len(values), stripe_rows), len(values)))
    stream = encode_bytes((offsets, np.frombuffer(b"".join(values), np.uint8)), stripes)
    assert (stream.codec == 7).all()
    rows = np.diff(stripes)
    first = np.array([data.draw(st.integers(0, int(r))) for r in rows])
    last = np.array([data.draw(st.integers(int(a), int(r))) for a, r in zip(first, rows, strict=True)])
    got_offsets, got = decode_bytes(
        Buffers([stream.payload]),
        np.zeros(len(rows), np.int64),
        stream.offsets[:-1],
        np.diff(stream.offsets),
        rows,
        first,
        last,
    )
    wanted = [v for s, a, b in zip(stripes, first, last, strict=False) for v in values[s + a : s + b]]
    assert [got[a:b].tobytes() for a, b in pairwise(got_offsets)] == wanted


GUARDED = """
import ctypes, mmap
import numpy as np
from thinrow.core.buffers import Buffers
from thinrow.kernels import kernel

page = mmap.PAGESIZE
area = mmap.mmap(-1, 3 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
whole = np.frombuffer(area, np.uint8)
for edge in (0, 2 * page):
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + edge), page, 0) == 0
middle = whole[page : 2 * page]
rng = np.random.default_rng(0)
decode, one = kernel("decode_fixed"), lambda v, dtype=np.int64: np.array([v], dtype)
accepted = coded = with_patches = 0


def patched(n):
    # Head, ends and positions of n values with patches, seldom out of order; and room for the rest.
    groups, low = -(-n // 256), int(rng.integers(1, 9))
    held = [np.sort(rng.permutation(min(256, n - 256 * g))[: rng.integers(30)]) for g in range(groups)]
    where = np.concatenate(held) if rng.integers(8) else np.concatenate(held)[::-1]
    own, high = len(where), int(rng.integers(1, 65 - low))
    places = np.cumsum([len(h) for h in held]).astype("<u2").tobytes() + where.astype(np.uint8).tobytes()
    head = np.array([own | low << 32 | high << 40], "<u8").tobytes() + places + bytes(-len(places) % 8)
    return head, bytes((own * high + 63) // 64 * 8 + ((n + 7) // 8 * low + 63) // 64 * 64)


for trial in range(20_000):
    codec, width, lanes = int(rng.integers(14)), int(rng.integers(66)), int(rng.integers(2))
    if trial % 5 == 1:
        width, lanes = 127, 1
    length = int(rng.integers(1, 100)) * 8
    rows = int(rng.integers(1, max(2, length * 8 // max(width, 1))))
    words = middle[-length:].view(np.uint64)
    words[:] = rng.integers(0, 2**64, len(words), dtype=np.uint64) >> np.uint64(rng.integers(64))
    words[rng.integers(len(words))] = rng.integers(0, 20)
    if trial % 2:  # sizes that add up, so that what lies behind the first check is reached
        packed = ((rows + 7) // 8 * width + 63) // 64 * 64 if lanes else ((rows * width + 63) // 64 + 1) * 8
        if width == 127:
            rows, codec = int(rng.integers(1, 700)), int(rng.choice([2, 3, 4, 11]))
            head, marks = patched(rows) if rng.integers(2) else (None, b"")
            if head is None:
                many = int(rng.integers(1, rows + 1))
                head, patches = patched(many)
                bits = np.zeros(-(-rows // 64) * 64, np.uint8)
                bits[rng.permutation(rows)[:many]] = 1
                inside = np.array([many | 255 << 32 | 1 << 48], "<u8").tobytes()
                head, marks = inside + np.packbits(bits, bitorder="little").tobytes() + head, patches
            packed = len(head) + len(marks)
        count = int(rng.integers(1, 5))
        need = {0: 0, 1: 8, 2: 16 + packed, 4: packed, 5: 8 + 8 * count + packed}.get(codec, length)
        if codec == 3:
            need = 24 + (count * 4 + 7) // 8 * 8 + 8 * count + packed
        if need <= page:
            length = need
            words = middle[page - length :].view(np.uint64)
            if codec == 5:
                words[0] = count
            if width == 127:
                middle[page - packed : page - packed + len(head)] = np.frombuffer(head, np.uint8)
            if codec == 3:
                words[2] = count
                places = np.sort(rng.integers(0, rows + 1, count)).astype("<u4")
                places[0] = 0
                middle[page - length + 24 : page - length + 24 + 4 * count] = places.view(np.uint8)
    first = int(rng.integers(rows))
    last = int(rng.integers(first, rows + 1))
    out = np.zeros(last - first, np.int64)
    table = np.arange(rng.integers(1, 40), dtype=np.uint64)
    found = decode(
        Buffers([middle]), one(0), one(page - length), one(length), one(codec, np.uint8),
        one(width | 0x80 * lanes, np.uint8), table, one(0), one(len(table)), one(0), one(rows), one(first), one(last),
        one(0), out,
    )
    accepted += int(found == -1)
    with_patches += int(found == -1 and width == 127)
    blocks = (
        Buffers([middle]), one(0), one(page - length), one(length), one(codec, np.uint8),
        one(width | 0x80 * lanes, np.uint8),
    )
    run = one(0), one(rows), one(first), one(last)
    place, values, codes = one(0), one(0), np.zeros(last - first, np.int32)
    bad, total = kernel("place_words")(*blocks, one(len(table)), *run, place, values)
    if bad < 0 and total < 1 << 20:
        tail = np.zeros(total, np.int64)
        found = kernel("decode_codes")(
            *blocks, len(table), one(0), one(len(table)), *run, one(0), place, tail, codes,
        )
        coded += int(found == -1 and values[0] == 0)
print(accepted, coded, with_patches)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="guards memory with mprotect")
def test_no_byte_beyond_the_buffer_is_read() -> None:
    """Blocks that end at a page which may not be touched: a read past the end would kill the process."""
    ran = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    accepted, coded, with_patches = (int(n) for n in ran.stdout.split())
    assert accepted > 1900
    assert coded > 100
    assert with_patches > 300
