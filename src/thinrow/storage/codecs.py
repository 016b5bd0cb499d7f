"""Streams of column values as stripe blocks, and group regions of several streams (docs/format/archive-v2.md, 3 and 4).

Worked example: rows ``[7, 7, 7 | 9, 8]`` in two stripes. ``encode_fixed`` of ``blocks`` gives a constant block of 8
bytes (7) and for the second stripe, of 1-byte items, a raw block of 8 bytes; ``interleave`` of this one stream puts
before each block a header of 12 bytes padded to 16: two chunks of 24 bytes.

Decoding of fixed-width runs is the kernel ``decode_fixed``; here are the checks before it and the decoding of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinrow.core.buffers import Buffers
from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.kernels import kernel

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

#: One stream's entry in a chunk header.
ENTRY_DTYPE = np.dtype(
    [("codec", "u1"), ("width", "u1"), ("reserved", "<u2"), ("length", "<u4"), ("crc", "<u4")], align=False
)

#: Codecs by id (format section 4); ids above are reserved.
CODEC_NAMES = (
    *("zero", "constant", "bit-packing", "delta", "dictionary", "local dictionary", "raw", "zstd bytes"),
    *("run length", "sparse", "absent rows", "decimal", "mixed dictionary", "marked dictionary"),
)
#: Codecs whose blocks hold codes into the column's segment dictionary, directly or in the block within.
DICTIONARY, MIXED, MARKED = (CODEC_NAMES.index(n) for n in ("dictionary", "mixed dictionary", "marked dictionary"))
#: Codec of string and binary values that are no codes.
ZSTD_BYTES = CODEC_NAMES.index("zstd bytes")
#: Codecs with a plain block within, and that of nulls which the next stream's block of codec ``SPARSE`` tells.
RUNS, SPARSE, ABSENT = (CODEC_NAMES.index(n) for n in ("run length", "sparse", "absent rows"))
LAST_CODEC = len(CODEC_NAMES) - 1
#: Flag of a width: packed values lie in lanes, as those of blocks of so many values or more do.
LANES, LANES_FROM = 0x80, 64
#: Code of a word that the segment dictionary lacks.
NO_CODE = 0xFFFFFFFF
ZSTD_LEVEL = 3
_MAX_BLOCK = (1 << 32) - 8
#: No frame holds more bytes for each of its own: 4 bytes stand for 128 KiB at most (RFC 8878, 3.1.1.2).
_ZSTD_RATIO = 32_768


class BadBlock(Exception):
    """Stored bytes that no writer wrote; the caller adds file, user and column and raises CorruptionError.

    Attributes:
        index: chunk or run in the call's arrays.
        stream: position of the stream in its group, -1 where none is to blame.
        what: what is wrong.
    """

    def __init__(self, index: int, stream: int, what: str) -> None:
        self.index, self.stream, self.what = index, stream, what
        super().__init__(f"chunk or run {index}, stream {stream}: {what}")


@dataclass(frozen=True, slots=True)
class EncodedStream:
    """One stream of all stripes of a segment.

    Attributes:
        codec: (S,) uint8.
        width: (S,) uint8 bits a packed value.
        payload: uint8, the blocks one after another, each a multiple of 8 bytes.
        offsets: (S + 1,) int64 bytes of each block in ``payload``.
        crc: (S,) uint32 CRC of each block.
        coded: whether any block holds codes into the column's segment dictionary.
    """

    codec: U8
    width: U8
    payload: U8
    offsets: I64
    crc: U32
    coded: bool = False


def inner_codecs(stream: EncodedStream) -> dict[int, U8]:
    """Codec with a plain block within -> that block's codec, of each stripe in which the stream has it."""
    found = {}
    for outer in (RUNS, SPARSE):
        place = stream.offsets[:-1][stream.codec == outer]
        if len(place):
            # The head's first word: u32 count, u8 codec and u8 width of the block within.
            found[outer] = stream.payload[place + 4]
    return found


def header_bytes(n_streams: int) -> int:
    """Bytes of the header of a chunk of ``n_streams`` blocks."""
    return (n_streams * ENTRY_DTYPE.itemsize + 7) // 8 * 8


def encode_bytes(values: tuple[I64, U8], stripe_offsets: I64) -> EncodedStream:
    """Strings or bytes, one zstd block a stripe (codec 7).

    Args:
        values: (R + 1,) int64 offsets, and the uint8 data that they cut.
        stripe_offsets: (S + 1,) int64 rows of each stripe.

    Raises:
        InputError: the values of one stripe take 4 GiB or more.
    """
    import zstandard

    offsets, data = values
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    lengths = np.diff(offsets).astype("<u4")
    blocks = []
    for start, stop in zip(stripe_offsets[:-1].tolist(), stripe_offsets[1:].tolist(), strict=True):
        first, last = int(offsets[start]), int(offsets[stop])
        if last - first + 4 * (stop - start) > _MAX_BLOCK // 2:
            raise InputError(f"a stripe of {last - first} bytes of values; 2 GiB at most, store shorter values")
        raw = lengths[start:stop].tobytes() + data[first:last].tobytes()
        frame = compressor.compress(raw)
        sizes = np.array([len(raw), len(frame)], "<u8").tobytes()
        blocks.append(sizes + frame + bytes(-len(frame) % 8))
    block_offsets = offsets_of(np.array([len(b) for b in blocks], np.int64))
    payload = np.frombuffer(bytearray(b"".join(blocks)), np.uint8)
    crc = kernel("crc32c_many")(payload, block_offsets[:-1], np.diff(block_offsets))
    n = len(blocks)
    return EncodedStream(np.full(n, ZSTD_BYTES, np.uint8), np.zeros(n, np.uint8), payload, block_offsets, crc)


def interleave(streams: Sequence[EncodedStream]) -> tuple[U8, I64, U32]:
    """The group region of several streams of the same stripes: one chunk a stripe, header first.

    Returns:
        the region's bytes (uint8), chunk offsets (S + 1,) int64 in it, and the CRC of each chunk's header (S,) uint32.
    """
    n_streams, n = len(streams), len(streams[0].codec)
    head = header_bytes(n_streams)
    lengths = np.stack([np.diff(s.offsets) for s in streams], axis=1)
    chunk_offsets = offsets_of(head + lengths.sum(axis=1))
    entries = np.zeros((n, n_streams), ENTRY_DTYPE)
    for k, stream in enumerate(streams):
        entries["codec"][:, k] = stream.codec
        entries["width"][:, k] = stream.width
        entries["length"][:, k] = lengths[:, k]
        entries["crc"][:, k] = stream.crc
    headers = np.zeros((n, head), np.uint8)
    headers[:, : n_streams * ENTRY_DTYPE.itemsize] = entries.view(np.uint8).reshape(n, -1)
    header_crc = kernel("crc32c_many")(headers.reshape(-1), np.arange(n, dtype=np.int64) * head, np.full(n, head))
    region = np.empty(int(chunk_offsets[-1]), np.uint8)
    copy = kernel("copy_ranges")
    copy(headers.reshape(-1), np.arange(n, dtype=np.int64) * head, np.full(n, head), region, chunk_offsets[:-1])
    place = chunk_offsets[:-1] + head
    for k, stream in enumerate(streams):
        copy(stream.payload, stream.offsets[:-1], np.ascontiguousarray(lengths[:, k]), region, place)
        place = place + lengths[:, k]
    return region, chunk_offsets, header_crc


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of n chunks of at most S streams.

    Attributes:
        codec, width: (S, n) uint8 of each block.
        block, length: (S, n) int64 where each block lies in its chunk's buffer, and its bytes.
        crc: (S, n) uint32 of each block.
    """

    codec: U8
    width: U8
    block: I64
    length: I64
    crc: U32


_WRONG = (
    "",
    "a chunk shorter than its header or not in the bytes read",
    "the header's CRC does not match",
    "a block length that is no multiple of 8",
    "block lengths that do not add up to the chunk's",
)


def parse_headers(
    buffers: Buffers, source: I64, chunk_off: I64, chunk_len: I64, n_streams: I64, header_crc: U32
) -> Headers:
    """The headers of chunks that lie in ``buffers``.

    Args:
        source: (n,) int64 buffer of each chunk.
        chunk_off: (n,) int64 position of each chunk in its buffer.
        chunk_len: (n,) int64 bytes of each chunk, as the stripe record says.
        n_streams: (n,) int64 streams of each chunk.
        header_crc: (n,) uint32, as the stripe record says.

    Raises:
        BadBlock: a chunk outside its buffer, a wrong header CRC, an unknown codec, or lengths that do not add up.
    """
    bad, why, *found = kernel("open_chunks")(buffers, source, chunk_off, chunk_len, n_streams, header_crc)
    if bad >= 0:
        raise BadBlock(bad, -1, _WRONG[why])
    headers = Headers(*found)
    if headers.codec.max(initial=0) > LAST_CODEC:
        k, i = (int(v) for v in np.argwhere(headers.codec > LAST_CODEC)[0])
        raise BadBlock(i, k, f"unknown codec {headers.codec[k, i]}; codecs 0 to {LAST_CODEC} are known")
    return headers


def check_crcs(buffer: U8, off: I64, length: I64, crc: U32) -> int:
    """Index of the first range of ``buffer`` whose CRC is not ``crc[i]`` (or that is not in it); -1 where all match."""
    found: int = kernel("check_crcs")(Buffers([buffer]), np.zeros(len(off), np.int64), off, length, crc)
    return found


def decode_bytes(
    buffers: Buffers, source: I64, block_off: I64, length: I64, n_rows: I64, row_from: I64, row_to: I64
) -> tuple[I64, U8]:
    """Rows [row_from, row_to) of codec 7 blocks, run after run (all arguments but ``buffers`` are (n,) int64).

    Returns:
        (rows + 1,) int64 offsets and the uint8 data that they cut.

    Raises:
        BadBlock: a run whose block, frame or rows are impossible.
    """
    lengths: list[npt.NDArray[np.int64]] = []
    parts: list[U8] = []
    runs = zip(*(a.tolist() for a in (source, block_off, length, n_rows, row_from, row_to)), strict=True)
    at, opened = None, (np.zeros(1, np.int64), np.empty(0, np.uint8))
    for i, (where, block, size, rows, first, last) in enumerate(runs):
        buffer = buffers.arrays[where]
        if not 0 <= first <= last <= rows or not 0 <= block <= len(buffer) - size or size < 16:
            raise BadBlock(i, -1, f"rows {first} to {last} of {rows} in a block of {size} bytes")
        # Users of one stripe follow each other: a block that many share is opened once.
        if at != (where, block, size, rows):
            at, opened = (where, block, size, rows), _open_bytes(buffer[block : block + size], rows, i)
        bounds, data = opened
        lengths.append(np.diff(bounds[first : last + 1]))
        parts.append(data[int(bounds[first]) : int(bounds[last])])
    if not parts:
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    return offsets_of(np.concatenate(lengths)), np.concatenate(parts)


def _open_bytes(block: U8, rows: int, run: int) -> tuple[I64, U8]:
    """The values of a codec 7 block: (rows + 1,) int64 offsets and the data. Raises BadBlock."""
    import zstandard

    raw_bytes, frame_bytes = (int(v) for v in block[:16].view("<u8"))
    most = min(_MAX_BLOCK, _ZSTD_RATIO * frame_bytes)
    if 16 + (frame_bytes + 7) // 8 * 8 != len(block) or not 4 * rows <= raw_bytes <= most:
        raise BadBlock(run, -1, f"a frame of {frame_bytes} bytes for {raw_bytes} in a block of {len(block)}")
    frame = block[16 : 16 + frame_bytes].data
    try:
        if zstandard.frame_content_size(frame) != raw_bytes:
            raise BadBlock(run, -1, f"a zstd frame that does not hold {raw_bytes} bytes")
        raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    except (zstandard.ZstdError, MemoryError) as e:
        raise BadBlock(run, -1, f"zstd: {e}") from e
    bounds = offsets_of(raw[: 4 * rows].view("<u4"))
    if len(raw) != raw_bytes or int(bounds[-1]) != raw_bytes - 4 * rows:
        raise BadBlock(run, -1, "value lengths that do not add up to the data")
    return bounds, raw[4 * rows :]
