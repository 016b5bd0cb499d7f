"""Streams and group regions against the format document, and the refusal of what no writer wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from thinrow.core.buffers import Buffers
from thinrow.core.errors import InputError
from thinrow.kernels import BACKENDS, kernel, use
from thinrow.storage.blocks import Values, encode_fixed
from thinrow.storage.codecs import (
    ENTRY_DTYPE,
    BadBlock,
    EncodedStream,
    Headers,
    check_crcs,
    decode_bytes,
    encode_bytes,
    header_bytes,
    interleave,
    parse_headers,
)

Array = npt.NDArray[Any]


def words(*values: int) -> Array:
    return np.array(values, np.int64).view(np.uint64)


def one_stripe(values: Array, itemsize: int, restarts: tuple[int, ...] = (0,)) -> EncodedStream:
    return encode_fixed(Values(values, np.array([0, len(values)]), np.array(restarts), itemsize))


def u64(*values: int) -> bytes:
    return np.array([v % 2**64 for v in values], "<u8").tobytes()


def test_each_block_is_what_the_document_says() -> None:
    assert one_stripe(words(0, 0), 8).payload.tobytes() == b""
    assert one_stripe(words(-2, -2), 8).payload.tobytes() == u64(-2)
    packed = one_stripe(words(*[100, 115, 105] * 20), 8)
    assert (packed.codec[0], packed.width[0]) == (2, 2)
    bits = sum([0, 3, 1][i % 3] << (2 * i) for i in range(60))
    assert packed.payload.tobytes() == u64(100, 5) + bits.to_bytes(16, "little") + u64(0)
    pieces = one_stripe(words(*range(10**9, 10**9 + 60 * 7, 7), *range(0, 60 * 7, 7)), 8, (0, 60))
    assert (pieces.codec[0], pieces.width[0]) == (3, 0x80)
    places = np.array([0, 60], "<u4").tobytes()
    assert pieces.payload.tobytes() == u64(7, 1, 2) + places + u64(10**9, 0)
    local = one_stripe(words(*[2**60, -1, 12345] * 20), 8)
    assert (local.codec[0], local.width[0]) == (5, 2)
    bits = sum([1, 2, 0][i % 3] << (2 * i) for i in range(60))
    assert local.payload.tobytes() == u64(3, 12345, 2**60, -1) + bits.to_bytes(16, "little") + u64(0)
    raw = one_stripe(words(-1, 2, 300), 2)
    assert (raw.codec[0], raw.width[0]) == (6, 16)
    assert raw.payload.tobytes() == np.array([-1, 2, 300, 0], "<i2").tobytes()


def test_segment_dictionary_codes() -> None:
    table = np.random.default_rng(0).integers(0, 2**63, 900)
    codes = np.arange(900) % 900
    stream = encode_fixed(Values(table[codes].view(np.uint64), np.array([0, 900]), np.array([0]), 8, 0, codes, 900))
    assert (stream.codec[0], stream.width[0]) == (4, 0x80 | 10)
    lanes = [sum(int(c) << (10 * i) for i, c in enumerate(codes[k::8])).to_bytes(8 * 18, "little") for k in range(8)]
    assert stream.payload.tobytes() == np.stack([np.frombuffer(lane, "<u8") for lane in lanes], axis=1).tobytes()


def test_input_is_checked() -> None:
    with pytest.raises(InputError, match="first row of every stripe"):
        encode_fixed(Values(words(1, 2), np.array([0, 1, 2]), np.array([0]), 8))
    with pytest.raises(InputError, match="first row of every stripe"):
        encode_fixed(Values(words(1, 2), np.array([0, 2]), np.empty(0, np.int64), 8))
    with pytest.raises(InputError, match="code 5 of a dictionary of 5"):
        encode_fixed(Values(words(1, 2), np.array([0, 2]), np.array([0]), 8, 0, np.array([1, 5], np.uint32), 5))


def test_no_rows_and_empty_stripes() -> None:
    none = encode_fixed(Values(words(), np.array([0]), np.empty(0, np.int64), 8))
    assert (len(none.codec), len(none.payload), none.offsets.tolist()) == (0, 0, [0])
    holes = encode_fixed(Values(words(5, 6), np.array([0, 0, 2, 2]), np.array([0]), 1))
    assert holes.codec.tolist() == [0, 6, 0]
    nothing = encode_bytes((np.zeros(1, np.int64), np.empty(0, np.uint8)), np.array([0]))
    assert len(nothing.codec) == 0


def region() -> tuple[Array, Array, Array, list[EncodedStream]]:
    rng = np.random.default_rng(3)
    stripes = np.array([0, 40, 41, 100])
    values = [rng.integers(0, 9, 100), rng.integers(0, 2**40, 100), np.zeros(100, np.int64)]
    streams = [encode_fixed(Values(v.view(np.uint64), stripes, stripes[:-1], 8)) for v in values]
    texts = [bytes([65 + i % 26]) * (i % 5) for i in range(100)]
    offsets = np.cumsum([0, *map(len, texts)])
    streams.append(encode_bytes((offsets, np.frombuffer(b"".join(texts), np.uint8)), stripes))
    data, chunks, header_crc = interleave(streams)
    return data, chunks, header_crc, streams


def parsed(data: Array, offsets: Array, lengths: Array, header_crc: Array) -> Headers:
    n = len(offsets)
    return parse_headers(Buffers([data]), np.zeros(n, np.int64), offsets, lengths, np.full(n, 4), header_crc)


def test_a_region_holds_header_and_blocks_of_each_stripe() -> None:
    data, chunks, header_crc, streams = region()
    assert header_bytes(4) == 48
    assert header_bytes(1) == 16
    assert chunks[-1] == len(data)
    headers = parsed(data, chunks[:-1], np.diff(chunks), header_crc)
    assert ENTRY_DTYPE.itemsize == 12
    for k, stream in enumerate(streams):
        np.testing.assert_array_equal(headers.codec[k], stream.codec)
        np.testing.assert_array_equal(headers.width[k], stream.width)
        for s in range(3):
            at, size = int(headers.block[k, s]), int(headers.length[k, s])
            assert at % 8 == size % 8 == 0
            assert data[at : at + size].tobytes() == stream.payload[stream.offsets[s] : stream.offsets[s + 1]].tobytes()
        assert check_crcs(data, headers.block[k], headers.length[k], headers.crc[k]) == -1


def test_the_docstring_of_codecs() -> None:
    stripes = np.array([0, 3, 5])
    stream = encode_fixed(Values(words(7, 7, 7, 9, 8), stripes, stripes[:-1], 1))
    assert (stream.codec.tolist(), stream.offsets.tolist()) == ([1, 6], [0, 8, 16])
    assert interleave([stream])[1].tolist() == [0, 24, 48]


def test_chunks_may_lie_anywhere_in_the_buffer() -> None:
    data, chunks, header_crc, _ = region()
    scattered = np.zeros(len(data) + 64, np.uint8)
    places = np.array([int(chunks[3] - chunks[1]) + 16, int(chunks[3] - chunks[2]) + 8, 0])
    for k in range(3):
        scattered[places[k] : places[k] + chunks[k + 1] - chunks[k]] = data[chunks[k] : chunks[k + 1]]
    found = parsed(scattered, places, np.diff(chunks), header_crc)
    np.testing.assert_array_equal(found.block[0], places + 48)
    np.testing.assert_array_equal(found.crc, parsed(data, chunks[:-1], np.diff(chunks), header_crc).crc)


def test_chunks_of_several_buffers_and_widths() -> None:
    data, chunks, header_crc, _ = region()
    one = encode_fixed(Values(words(5, 6, 7), np.array([0, 3]), np.array([0]), 8))
    other, _, other_crc = interleave([one])
    for name in BACKENDS:
        with use(name):
            headers = parse_headers(
                Buffers([other, data]),
                np.array([1, 0]),
                np.array([chunks[1], 0]),
                np.array([chunks[2] - chunks[1], len(other)]),
                np.array([4, 1]),
                np.array([header_crc[1], other_crc[0]]),
            )
        assert headers.block[0].tolist() == [chunks[1] + 48, 16]
        assert headers.length[:, 1].tolist() == [len(other) - 16, 0, 0, 0]


def test_every_flipped_byte_of_a_region_is_noticed() -> None:
    good, chunks, header_crc, _ = region()
    for at in range(len(good)):
        data = good.copy()
        data[at] ^= 0x40
        try:
            headers = parsed(data, chunks[:-1], np.diff(chunks), header_crc)
        except BadBlock as e:
            found = e.index
        else:
            by_chunk = (a.T.ravel() for a in (headers.block, headers.length, headers.crc))
            found = check_crcs(data, *by_chunk) // 4
        assert found == np.searchsorted(chunks, at, side="right") - 1


def seal(data: Array, chunks: Array, header_crc: Array, n_streams: int) -> None:
    """Give the headers right CRCs again."""
    n = len(chunks) - 1
    header_crc[:] = kernel("crc32c_many")(data, chunks[:-1], np.full(n, header_bytes(n_streams)))


@pytest.mark.parametrize(
    ("stream", "field", "value", "what"),
    [
        (0, "codec", 14, "unknown codec 14"),
        (2, "codec", 200, "unknown codec 200"),
        (0, "length", 16, "add up"),
        (1, "length", 0xFFFFFFF8, "add up"),
        (1, "length", 3, "multiple of 8"),
    ],
)
def test_headers_that_lie(stream: int, field: str, value: int, what: str) -> None:
    data, chunks, header_crc, _ = region()
    entry = data[chunks[1] + 12 * stream : chunks[1] + 12 * stream + 12].view(ENTRY_DTYPE)
    entry[field] = value
    seal(data, chunks, header_crc, 4)
    with pytest.raises(BadBlock, match=what) as caught:
        parsed(data, chunks[:-1], np.diff(chunks), header_crc)
    assert caught.value.index == 1
    assert caught.value.stream == (stream if field == "codec" else -1)


@pytest.mark.parametrize(("offset", "length"), [(-8, 100), (0, 40), (0, 10**9), (1 << 62, 100), (0, -1), (0, 1 << 62)])
def test_chunks_outside_the_buffer(offset: int, length: int) -> None:
    data, chunks, header_crc, _ = region()
    offsets, lengths = chunks[:-1].copy(), np.diff(chunks)
    offsets[2], lengths[2] = offset, length
    with pytest.raises(BadBlock, match="not in the bytes read") as caught:
        parsed(data, offsets, lengths, header_crc)
    assert caught.value.index == 2


def test_crcs_of_ranges_outside_the_buffer_do_not_match() -> None:
    data = np.zeros(8, np.uint8)
    for offset, length in ((-1, 1), (9, 0), (0, 9), (0, -1), (1 << 62, 1 << 62)):
        assert check_crcs(data, np.array([0, offset]), np.array([0, length]), np.zeros(2, np.uint32)) == 1


def texts_block() -> EncodedStream:
    texts = [b"ab", b"", b"cdefg", b"h"] * 10
    offsets = np.cumsum([0, *map(len, texts)])
    return encode_bytes((offsets, np.frombuffer(b"".join(texts), np.uint8)), np.array([0, 40]))


def read_texts(block: Array, rows: int = 40, first: int = 0, last: int = 40) -> tuple[Array, Array]:
    one = [np.array([v]) for v in (0, 0, len(block), rows, first, last)]
    return decode_bytes(Buffers([block]), *one)


def test_a_bytes_block_is_what_the_document_says() -> None:
    import zstandard

    block = texts_block().payload
    raw_bytes, frame_bytes = block[:16].view("<u8").tolist()
    raw = zstandard.ZstdDecompressor().decompress(block[16 : 16 + frame_bytes].tobytes())
    assert len(raw) == raw_bytes
    assert raw == np.array([2, 0, 5, 1] * 10, "<u4").tobytes() + b"abcdefgh" * 10
    assert not block[16 + frame_bytes :].any()
    offsets, data = read_texts(block, first=2, last=5)
    assert (offsets.tolist(), data.tobytes()) == ([0, 5, 6, 8], b"cdefghab")


def test_no_runs_of_bytes() -> None:
    none = np.empty(0, np.int64)
    offsets, data = decode_bytes(Buffers([]), none, none, none, none, none, none)
    assert (offsets.tolist(), len(data)) == ([0], 0)


@pytest.mark.parametrize(
    ("rows", "first", "last"), [(41, 0, 40), (39, 0, 39), (40, 0, 41), (40, -1, 3), (40, 5, 4), (-1, 0, 0)]
)
def test_bytes_of_impossible_rows(rows: int, first: int, last: int) -> None:
    with pytest.raises(BadBlock) as caught:
        read_texts(texts_block().payload, rows, first, last)
    assert caught.value.index == 0


def test_damaged_bytes_blocks_are_refused_or_decode_to_as_many_rows() -> None:
    good = texts_block().payload
    rng = np.random.default_rng(4)
    refused = 0
    for _ in range(400):
        block = good.copy()
        block[rng.integers(len(block))] = rng.integers(256)
        try:
            offsets, data = read_texts(block)
        except BadBlock:
            refused += 1
        else:
            assert len(offsets) == 41
            assert offsets[-1] == len(data)
    assert refused > 100


@pytest.mark.parametrize("raw_bytes", [0, 2**32, 2**63, 2**64 - 1, 10**9])
def test_claimed_sizes_are_not_believed(raw_bytes: int) -> None:
    block = texts_block().payload
    block[:8].view("<u8")[0] = raw_bytes
    with pytest.raises(BadBlock):
        read_texts(block)


@pytest.mark.parametrize("size", [0, 8, 15])
def test_bytes_blocks_that_are_cut(size: int) -> None:
    with pytest.raises(BadBlock):
        read_texts(texts_block().payload[:size].copy())
