"""Streams of many stripes in one call: records found, headers and blocks checked, values decoded, while one stripe's
bytes are in the nearest cache and the next one's are on their way.

Worked example: three runs want rows of stripes 4, 4 and 9. The records of 4 and 9 are found first. Then, stripe after
stripe: the chunk headers of the second stripe after this one are asked for from memory, those of the next one are
checked and its blocks asked for, and the blocks of this one are checked and decoded into the two runs' places.

Whatever is wrong (a page, a record, a header, a CRC, a block) ends the call with the run that it hits; who wants to
know what it is reads again step by step (``crc.open_chunks``, ``crc.check_crcs``, ``blocks.decode_fixed``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from thinrow.core.stripes import (
    ELSEWHERE,
    FILE,
    FILE_BYTES,
    LACKING,
    N_BLOCKS,
    N_PAGES,
    N_STRIPES,
    N_WORDS,
    NULLS,
    PAGE_BYTES,
    PAGE_COUNT,
    PAGE_CRC,
    PAGE_FIELDS,
    PAGE_FIRST,
    PAGE_OFFSET,
    PAGE_RECORDS,
    PAGE_SOUND,
    PAGES,
    PLACE,
    RECORD_BYTES,
    STREAM,
    TEXT,
    WORDS,
    StripeTables,
)
from thinrow.kernels.numba.blocks import decode_rows
from thinrow.kernels.numba.crc import advance_at
from thinrow.kernels.numba.intrinsics import address, load64, pointer, prefetch, prefetch_range, word_at
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.nested import LAST_CODEC
from thinrow.kernels.numba.unpack import sound_width, workspace

Array = npt.NDArray[Any]

MAX_STRIPE_ROWS = 65_536
_SPARSE, _ABSENT, _ZSTD = 9, 10, 7
#: Stripes that are decoded together, column by column: their blocks fit the second cache with those of the next.
TOGETHER = 16
#: Fields of a block that was found: address, bytes, codec, width, CRC.
_AT, _BYTES, _CODEC, _WIDTH, _CRC, BLOCK_FIELDS = range(6)
#: Rows of the table of runs: first row, last row (exclusive) and stripe of each run, whether its piece was counted
#: before; then, stripe by stripe, segment, address of the record, rows, whether its chunk of keys was counted before,
#: runs that were not.
FROM, TO, _STRIPE, _KNOWN, _SEGMENT, _RECORD, _ROWS, _COUNTED, _FRESH, RUN_FIELDS = range(10)


@njit
def bare(array: Array, kind: Any) -> Array:
    """The same memory as an array that counts no references: a view of one counts with a locked instruction."""
    return carray(pointer(array.ctypes.data), array.shape, kind)


@njit
def _crc_is(address: int, size: int, wanted: Any) -> bool:
    return bool(~advance_at(~np.uint32(0), address, size) == np.uint32(wanted))


@njit
def _page_of(row: Array, stripe: Any) -> Any:
    """The page of a stripe's record."""
    pages = carray(pointer(row[PAGES]), (row[N_PAGES], PAGE_FIELDS), np.int64)
    guess = min(stripe // row[PAGE_RECORDS], row[N_PAGES] - 1)
    if pages[guess, PAGE_FIRST] <= stripe < pages[guess, PAGE_FIRST] + pages[guess, PAGE_COUNT]:
        return guess
    low, high = 0, row[N_PAGES]
    while high - low > 1:
        middle = (low + high) // 2
        if pages[middle, PAGE_FIRST] <= stripe:
            low = middle
        else:
            high = middle
    return low


@njit
def _check_page(row: Array, page: Array) -> Any:
    """Whether a page of stripe records lies in its file, has its CRC and holds what the directory says."""
    begin, size = page[PAGE_OFFSET], page[PAGE_BYTES]
    if begin < 0 or size < 8 or begin > row[FILE_BYTES] or size > row[FILE_BYTES] - begin:
        return False
    if not _crc_is(row[FILE] + begin, size, page[PAGE_CRC]):
        return False
    head = word_at(row[FILE] + begin)
    count, heap = np.int64(head & np.uint64(0xFFFFFFFF)), np.int64(head >> np.uint64(32))
    return count == page[PAGE_COUNT] and (8 + count * row[RECORD_BYTES] + heap + 7) // 8 * 8 == size


@njit
def _record(row: Array, stripe: Any) -> Any:
    """Address of a stripe's record in a page that was found sound; 0 where there is none."""
    if row[FILE] == 0 or stripe < 0 or stripe >= row[N_STRIPES]:
        return 0
    number = _page_of(row, stripe)
    page = carray(pointer(row[PAGES] + number * PAGE_FIELDS * 8), (PAGE_FIELDS,), np.int64)
    at = stripe - page[PAGE_FIRST]
    if at < 0 or at >= page[PAGE_COUNT]:
        return 0
    if page[PAGE_SOUND] == 0:
        if not _check_page(row, page):
            return 0
        page[PAGE_SOUND] = 1
    return row[FILE] + page[PAGE_OFFSET] + 8 + at * row[RECORD_BYTES]


@njit
def find_runs(
    segments: Array,
    records: Array,
    segment: Array,
    piece: Array,
    start: Array,
    stop: Array,
    counted: Array,
    runs: Array,
) -> Any:
    """Fill the table of runs, neighbours in one stripe sharing it; (first wrong run or -1, stripes)."""
    n: Any = 0
    last_segment: Any = -1
    last_stripe: Any = -1
    for i in range(len(piece)):
        p = piece[i]
        if p < 0 or p >= len(records):
            return i, n
        place, where = records[p, 6], segment[p]
        stripe, first = np.int64(place & np.uint64(0xFFFFFFFF)), np.int64(place >> np.uint64(32))
        if where < 0 or where >= len(segments) or start[i] < 0 or start[i] > stop[i] or stop[i] > MAX_STRIPE_ROWS:
            return i, n
        if where != last_segment or stripe != last_stripe:
            address = _record(segments[where], stripe)
            if address == 0:
                return i, n
            prefetch(address)
            runs[_RECORD, n], runs[_SEGMENT, n], runs[_COUNTED, n], runs[_FRESH, n] = address, where, 0, 0
            last_segment, last_stripe, n = where, stripe, n + 1
        runs[_STRIPE, i], runs[FROM, i], runs[TO, i] = n - 1, first + start[i], first + stop[i]
        runs[_KNOWN, i] = p < len(counted) and counted[p] >= 0
        if runs[_KNOWN, i]:
            runs[_COUNTED, n - 1] = 1
        else:
            runs[_FRESH, n - 1] += 1
    for k in range(n):
        runs[_ROWS, k] = np.int64(word_at(runs[_RECORD, k]) & np.uint64(0xFFFFFFFF))
    for i in range(len(piece)):
        rows = runs[_ROWS, runs[_STRIPE, i]]
        if rows > MAX_STRIPE_ROWS or runs[TO, i] > rows:
            return i, n
    return -1, n


@njit
def _chunk(row: Array, record: int, place: int) -> Any:
    """Whether a chunk lies in its file; its address, bytes and header CRC."""
    if place < 0 or 24 + place * 16 > row[RECORD_BYTES]:
        return False, 0, 0, 0
    offset, rest = word_at(record + 8 + place * 16), word_at(record + 16 + place * 16)
    size, limit = rest & np.uint64(0xFFFFFFFF), np.uint64(row[FILE_BYTES])
    if (offset & np.uint64(7)) != np.uint64(0) or offset > limit or size > limit - offset:
        return False, 0, 0, 0
    return True, row[FILE] + np.int64(offset), np.int64(size), np.int64(rest >> np.uint64(32))


@njit
def ask_headers(segments: Array, streams: Array, runs: Array, first: int, last: int) -> None:
    """Ask for the headers of the chunks of stripes [first, last)."""
    for k in range(first, last):
        segment, previous = runs[_SEGMENT, k], np.int64(-1)
        for w in range(len(streams)):
            place = streams[w, segment, PLACE]
            if place >= 0 and place != previous:
                inside, begin, size, _ = _chunk(segments[segment], runs[_RECORD, k], place)
                if inside:
                    prefetch_range(begin, min(size, (streams[w, segment, N_BLOCKS] * 12 + 7) // 8 * 8))
                previous = place


@njit
def _open_header(begin: int, size: int, n_blocks: int, crc: Any) -> bool:
    """Whether a chunk's header has its CRC, known codecs, and blocks that fill the chunk."""
    head = (n_blocks * 12 + 7) // 8 * 8
    if n_blocks < 0 or head > size or not _crc_is(begin, head, crc):
        return False
    total: Any = head
    header = carray(pointer(begin), (head,), np.uint8)
    for k in range(n_blocks):
        n = np.int64(load64(header, k * 12) >> np.uint64(32))
        if n % 8 != 0 or header[k * 12] > LAST_CODEC:
            return False
        total += n
    return bool(total == size)


@njit
def _put_block(begin: int, head: int, k: int, block: Array) -> None:
    """Where block k of a sound chunk lies, and what it is."""
    header = carray(pointer(begin), (head,), np.uint8)
    at: Any = begin + head
    for j in range(k):
        at += np.int64(load64(header, j * 12) >> np.uint64(32))
    entry = load64(header, k * 12)
    block[_AT], block[_BYTES] = at, np.int64(entry >> np.uint64(32))
    block[_CODEC], block[_WIDTH] = header[k * 12], header[k * 12 + 1]
    block[_CRC] = np.int64(load64(header, k * 12 + 4) >> np.uint64(32))


@njit
def open_blocks(
    segments: Array,
    streams: Array,
    kind: Array,
    runs: Array,
    first: int,
    last: int,
    keys: int,
    known: int,
    blocks: Array,
    used: Array,
) -> Any:
    """Find the blocks of all streams in stripes [first, last), headers checked, and count their bytes; the first stripe
    of which something is wrong, or -1. A block of stream ``known`` that no run asks for is empty."""
    for at in range(first, last):
        segment, previous = runs[_SEGMENT, at], np.int64(-1)
        begin: Any = 0
        head: Any = 0
        for w in range(len(streams)):
            place, n_blocks, k = streams[w, segment, PLACE], streams[w, segment, N_BLOCKS], streams[w, segment, STREAM]
            if place < 0:
                continue
            if place != previous:
                inside, begin, size, crc = _chunk(segments[segment], runs[_RECORD, at], place)
                if not inside or not _open_header(begin, size, n_blocks, crc):
                    return at
                head, previous = (n_blocks * 12 + 7) // 8 * 8, place
                if keys < 0 or place != streams[keys, segment, PLACE] or runs[_COUNTED, at] == 0:
                    used[len(streams)] += size
            if k < 0 or k >= n_blocks:
                return at
            block = blocks[w, at - first]
            _put_block(begin, head, k, block)
            if block[_CODEC] == _ABSENT:
                # What is there, the block after it says.
                if kind[w] != NULLS or k + 1 >= n_blocks:
                    return at
                _put_block(begin, head, k + 1, block)
                if block[_CODEC] != _SPARSE:
                    return at
                block[_CODEC] = _ABSENT
            if not sound_width(block[_WIDTH]):
                return at
            used[w] += block[_BYTES]
            if w == known and runs[_FRESH, at] == 0:
                block[_BYTES] = 0
    return -1


@njit
def _fill(out: Array, at: int, n: int, itemsize: int, value: int) -> None:
    target = out[at * itemsize : (at + n) * itemsize]
    for i in range(len(target)):
        target[i] = value


@njit
def decode_stream(
    streams: Array,
    w: int,
    kind: int,
    times: int,
    known: bool,
    runs: Array,
    n: int,
    first: int,
    blocks: Array,
    run: int,
    last_run: int,
    out_pos: Array,
    target: Array,
    refused: Array,
    scratch: Array,
    room: Array,
) -> Any:
    """Check the blocks of stream w in the stripes from ``first`` on, and decode the rows of runs [run, last_run), which
    lie there, those of counted pieces but where they are ``known``; ask for the blocks of those after them meanwhile.
    ``blocks`` as ``come_to`` left them. Returns the first run of which something is wrong, or -1."""
    turn = (first // TOGETHER) & 1
    here, following = blocks[turn, w], blocks[1 - turn if first + TOGETHER < n else 2, w]
    items, itemsize = target[w, 1], target[w, 2]
    out = carray(pointer(target[w, 0]), (items * itemsize,), np.uint8)
    asked, previous = np.int64(-1), np.int64(-1)
    for i in range(run, last_run):
        k = runs[_STRIPE, i]
        segment, block = runs[_SEGMENT, k], here[k - first]
        place = streams[w, segment, PLACE]
        if k != asked:
            prefetch_range(following[k - first, _AT], following[k - first, _BYTES])
            asked = k
        if known and runs[_KNOWN, i]:
            continue
        if k != previous:
            if place == ELSEWHERE or (place >= 0 and kind == TEXT and block[_CODEC] == _ZSTD):
                refused[w] = True
            elif place >= 0 and not refused[w] and not _crc_is(block[_AT], block[_BYTES], block[_CRC]):
                return i
            previous = k
        if refused[w]:
            continue
        row, stop, at = runs[FROM, i] * times, runs[TO, i] * times, out_pos[i] * times
        if at < 0 or at > items or stop - row > items - at:
            return i
        if place < 0:
            _fill(out, at, stop - row, itemsize, 1 if kind == NULLS and place == LACKING else 0)
            continue
        dictionary, n_words = streams[w, segment, WORDS], streams[w, segment, N_WORDS]
        n_rows, place = runs[_ROWS, k] * times, target[w, 0] + at * itemsize
        if not decode_rows(
            block[_AT], block[_BYTES], block[_CODEC], block[_WIDTH], n_rows, row, stop, dictionary, n_words, place,
            itemsize, scratch.ctypes.data, room.ctypes.data,
        ):  # fmt: skip
            return i
    return -1


@njit
def come_to(
    segments: Array,
    streams: Array,
    kind: Array,
    runs: Array,
    n: int,
    first: int,
    keys: int,
    known: int,
    blocks: Array,
    used: Array,
) -> Any:
    """While the stripes from ``first`` on are decoded (``TOGETHER`` of n, none where it is below 0), the blocks of the
    next ones come, and the headers of those after them. Returns the first stripe of which something is wrong, or -1."""
    if first < 0:
        ask_headers(segments, streams, runs, 0, min(n, TOGETHER))
    after = first + TOGETHER
    found = blocks[(after // TOGETHER) & 1]
    last = min(after + TOGETHER, n)
    wrong = open_blocks(segments, streams, kind, runs, min(after, n), last, keys, known, found, used)
    if wrong >= 0:
        return wrong
    ask_headers(segments, streams, runs, after + TOGETHER, min(after + 2 * TOGETHER, n))
    if first < 0:
        for w in range(len(streams)):
            for k in range(min(n, TOGETHER)):
                prefetch_range(found[w, k, _AT], found[w, k, _BYTES])
    return -1


@njit
def first_run_after(runs: Array, run: Any, n_runs: int, first: int) -> Any:
    """The first run from ``run`` on that lies behind the stripes ``[first, first + TOGETHER)``."""
    while run < n_runs and runs[_STRIPE, run] < first + TOGETHER:
        run += 1
    return run


@njit
def rooms(n_runs: int, n_streams: int) -> tuple[Array, Array]:
    """``runs`` and ``blocks`` of ``read_into``."""
    # The third is always empty: after the last stripes nothing follows.
    blocks = np.zeros((3, n_streams, TOGETHER, BLOCK_FIELDS), np.int64)
    return np.empty((RUN_FIELDS, n_runs), np.int64), blocks


@njit
def read_into(
    segments: Array,
    streams: Array,
    kind: Array,
    per_row: Array,
    records: Array,
    segment: Array,
    piece: Array,
    start: Array,
    stop: Array,
    out_pos: Array,
    target: Array,
    refused: Array,
    used: Array,
    counted: Array,
    keys: int,
    known: int,
    runs: Array,
    blocks: Array,
    scratch: Array,
    room: Array,
) -> Any:
    """``read_stripes`` with its tables and outputs spread out: ``target`` (W, 3) int64 is address, values and bytes a
    value of each output; of stream ``known`` (-1: none) the runs of counted pieces are in their place already. The
    caller keeps all memory alive."""
    segments, streams, blocks = bare(segments, np.int64), bare(streams, np.int64), bare(blocks, np.int64)
    scratch, room, runs = bare(scratch, np.uint64), bare(room, np.uint64), bare(runs, np.int64)
    bad, n = find_runs(segments, records, segment, piece, start, stop, counted, runs)
    if bad >= 0:
        return bad
    run: Any = 0
    for first in range(-TOGETHER, n, TOGETHER):
        wrong = come_to(segments, streams, kind, runs, n, first, keys, known, blocks, used)
        if wrong >= 0:
            return np.searchsorted(runs[_STRIPE], wrong)
        if first < 0:
            continue
        begin = run
        run = first_run_after(runs, run, len(piece), first)
        for w in range(len(streams)):
            wrong = decode_stream(
                streams, w, kind[w], per_row[w], w == known, runs, n, first, blocks, begin, run, out_pos, target,
                refused, scratch, room,
            )  # fmt: skip
            if wrong >= 0:
                return wrong
    return -1


def read_stripes(
    tables: StripeTables,
    records: Array,
    segment: Array,
    piece: Array,
    start: Array,
    stop: Array,
    out_pos: Array,
    out: Sequence[Array],
    refused: Array,
    used: Array,
    counted: Array,
    keys: int,
) -> int:
    """Rows ``[start[i], stop[i])`` of piece ``piece[i]``, of every stream, into ``out[w][out_pos[i] * per_row[w]:]``.

    Args:
        tables: of the streams; all segments that the runs lie in are prepared.
        records: (P, 8) uint64, the piece records (docs/format/archive-v2.md, section 6).
        segment: (P,) int64 number of each piece's segment.
        piece, start, stop: (R,) int64; rows within the piece, ``stop`` exclusive.
        out_pos: (R,) int64, or longer.
        out: by stream, contiguous, of any dtype of 1, 2, 4 or 8 bytes. Or of the first streams only: with none, the
            call says whether the stripes have the rows.
        refused: (W,) bool, out: streams that these tables cannot read; what stands in their output says nothing.
        used: (W + 1,) int64, out: bytes of blocks by stream, and of chunks.
        counted: (P,) int64, or empty: 0 or more of pieces whose stripes' chunk of keys was counted in an earlier call.
        keys: a stream of that chunk; -1 where there is none.

    Returns:
        -1, or a run that something impossible was found of. Nothing outside the files, the dictionaries and the runs'
        own output ranges is ever read or written.
    """
    places = [(address(array), array.size, array.itemsize) for array in out]
    target = np.array(places, np.int64).reshape(-1, 3)
    found: int = read_into(
        tables.segments,
        tables.streams[: len(out)],
        tables.kind,
        tables.per_row,
        records,
        segment,
        piece,
        start,
        stop,
        out_pos,
        target,
        refused,
        used,
        counted,
        keys if keys < len(out) else -1,
        -1,
        *rooms(len(piece), len(out)),
        *workspace(),
    )
    return found
