"""CRC-32C (Castagnoli): the CPU's own instruction where there is one, slicing by 8 elsewhere.

``crc32c(b"123456789") = 0xE3069283``. The instruction takes three steps at once, of chains that do not wait for each
other: so a range is cut into thirds, and their registers are joined. A register after L words more of zeros is the
register times x^(64 L) modulo the polynomial (all reflected): a carry-less product with ``_SHIFTS[L]``, brought back to
32 bits by the same instruction (V. Gopal and others, Fast CRC Computation for iSCSI Polynomial, Intel 2011).

A processor with products of 512 bits folds instead: 128 bits, moved on by D bits, are the sum of the products of their
halves with x^(D + 63) and x^(D - 1) (of two reflected numbers, a product lies one bit lower). Four such sums in each of
four registers take 256 bytes a step; what they come to is 16 bytes that have the CRC of the whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.core.registry import cpu_target
from numba.np.numpy_support import carray

from thinrow.core.buffers import Buffers
from thinrow.kernels.numba.intrinsics import pointer, prefetch, word_at
from thinrow.kernels.numba.jit import intrinsic, njit

Array = npt.NDArray[Any]


def crc_tables(polynomial: int) -> npt.NDArray[np.uint32]:
    """(8, 256) uint32 of a reflected polynomial: ``T[k][b]`` advances byte b through k further zero bytes."""
    table = np.empty((8, 256), np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = (row >> np.uint32(1)) ^ np.where(row & np.uint32(1), np.uint32(polynomial), np.uint32(0))
    table[0] = row
    for k in range(1, 8):
        table[k] = (table[k - 1] >> np.uint32(8)) ^ row[table[k - 1] & np.uint32(0xFF)]
    return table


TABLES = crc_tables(0x82F63B78)


def _features() -> frozenset[str]:
    """What the processor can do that numba compiles for, where it is an x86-64.

    Asks the compiler's target, not the machine: with ``NUMBA_CPU_NAME`` set they differ, and an instruction that the
    target lacks would stop the process.
    """
    try:
        triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    except (AttributeError, ValueError):
        return frozenset()
    return frozenset(str(features).split(",")) if str(triple).startswith("x86_64") else frozenset()


def has_crc_instruction() -> bool:
    """Whether numba compiles for an x86-64 CPU with SSE 4.2."""
    return "+sse4.2" in _features()


def has_product_instruction() -> bool:
    """Whether it compiles for one with carry-less products, too."""
    return has_crc_instruction() and "+pclmul" in _features()


def has_wide_product_instruction() -> bool:
    """Whether it compiles for one with carry-less products of 512 bits."""
    return has_product_instruction() and {"+vpclmulqdq", "+avx512f"} <= _features()


#: Bytes below which one chain is as fast as products.
_SHORT = 112
#: Words of a third at most; longer ranges take several turns.
_THIRD = 512


def _shifts() -> Array:
    """(_THIRD + 1,) uint64: entry L is x^(64 L - 33) modulo the polynomial, reflected; entry 0 is not used.

    33, because the product of two reflected numbers lies one bit lower, and the instruction multiplies by x^32.
    """
    power, found = 0x80000000, [0]
    for _ in range(31):
        power = (power >> 1) ^ (0x82F63B78 if power & 1 else 0)
    for _ in range(_THIRD):
        found.append(power)
        for _ in range(8):
            power = (power >> 8) ^ int(TABLES[0][power & 0xFF])
    return np.array(found, np.uint64)


_SHIFTS = _shifts()


@intrinsic
def _step64(typingctx: Any, crc: Any, data: Any, offset: Any) -> Any:
    """crc of 8 bytes more: ``data[offset:offset + 8]`` at any alignment."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word_type = ir.IntType(64)
        base = context.make_array(signature.args[1])(context, builder, args[1]).data
        word = builder.load(builder.bitcast(builder.gep(base, [args[2]]), word_type.as_pointer()))
        word.align = 1
        step = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", (), _function(word_type, word_type))
        return builder.call(step, [args[0], word])

    return types.uint64(types.uint64, data, types.intp), emit


@intrinsic
def _step8(typingctx: Any, crc: Any, byte: Any) -> Any:
    """crc of one byte more."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(32)
        step = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.32.8", (), _function(kind, ir.IntType(8)))
        return builder.call(step, [args[0], args[1]])

    return types.uint32(types.uint32, types.uint8), emit


def _function(state: Any, data: Any) -> Any:
    return ir.FunctionType(state, [state, data])


@njit
def advance_hardware(state: Any, data: Array, start: int, stop: int) -> Any:
    """The CRC register after ``data[start:stop]`` (no initial or final xor), by the CPU's instruction."""
    wide = np.uint64(state)
    at = start
    while at + 8 <= stop:
        wide = _step64(wide, data, at)
        at += 8
    narrow = np.uint32(wide)
    while at < stop:
        narrow = _step8(narrow, data[at])
        at += 1
    return narrow


@njit
def advance_software(state: Any, data: Array, start: int, stop: int) -> Any:
    """The CRC register after ``data[start:stop]`` (no initial or final xor), by tables."""
    crc = np.uint32(state)
    at = start
    while at + 8 <= stop:
        low = crc ^ (
            np.uint32(data[at])
            | (np.uint32(data[at + 1]) << np.uint32(8))
            | (np.uint32(data[at + 2]) << np.uint32(16))
            | (np.uint32(data[at + 3]) << np.uint32(24))
        )
        crc = (
            TABLES[7, low & np.uint32(0xFF)]
            ^ TABLES[6, (low >> np.uint32(8)) & np.uint32(0xFF)]
            ^ TABLES[5, (low >> np.uint32(16)) & np.uint32(0xFF)]
            ^ TABLES[4, low >> np.uint32(24)]
            ^ TABLES[3, data[at + 4]]
            ^ TABLES[2, data[at + 5]]
            ^ TABLES[1, data[at + 6]]
            ^ TABLES[0, data[at + 7]]
        )
        at += 8
    while at < stop:
        crc = np.uint32((crc >> np.uint32(8)) ^ TABLES[0, (crc ^ np.uint32(data[at])) & np.uint32(0xFF)])
        at += 1
    return crc


@intrinsic
def _multiply(typingctx: Any, a: Any, b: Any) -> Any:
    """The low 64 bits of the carry-less product."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, number = ir.IntType(64), ir.IntType(32)
        pair, first = ir.VectorType(word, 2), ir.Constant(number, 0)
        kind = ir.FunctionType(pair, [pair, pair, ir.IntType(8)])
        product = builder.module.declare_intrinsic("llvm.x86.pclmulqdq", (), kind)
        none = ir.Constant(pair, [0, 0])
        x, y = (builder.insert_element(none, v, first) for v in args)
        return builder.extract_element(builder.call(product, [x, y, ir.Constant(ir.IntType(8), 0)]), first)

    return types.uint64(types.uint64, types.uint64), emit


@intrinsic
def _step_word(typingctx: Any, crc: Any, word: Any) -> Any:
    """The register after 8 bytes more."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(64)
        step = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", (), _function(kind, kind))
        return builder.call(step, args)

    return types.uint64(types.uint64, types.uint64), emit


@njit
def advance_thirds(state: Any, data: Array, start: int, stop: int) -> Any:
    """As ``advance_hardware``, by three chains at a time."""
    first, at = np.uint64(state), start
    while stop - at >= 96:
        third = min((stop - at) // 24, _THIRD)
        size = third * 8
        second, last = np.uint64(0), np.uint64(0)
        for k in range(at, at + size, 8):
            first = _step64(first, data, k)
            second = _step64(second, data, k + size)
            last = _step64(last, data, k + 2 * size)
        shift = _SHIFTS[third]
        first = _step_word(np.uint64(0), _multiply(first, shift)) ^ second
        first = _step_word(np.uint64(0), _multiply(first, shift)) ^ last
        at += 3 * size
    return advance_hardware(np.uint32(first), data, at, stop)


def _power(n: int) -> int:
    """x^n modulo the polynomial, reflected, as the high half of a word."""
    power = 0x80000000
    for _ in range(n):
        power = (power >> 1) ^ (0x82F63B78 if power & 1 else 0)
    return power << 32


_LANES = ir.VectorType(ir.IntType(64), 8)


def _folders(*bits: int) -> ir.Constant:
    """What the halves of four times 128 bits are multiplied by, to be moved on by so many bits each; 0: nothing."""
    return ir.Constant(_LANES, [p for d in bits for p in ((_power(d + 63), _power(d - 1)) if d else (0, 0))])


def _folded(builder: Any, value: Any, by: Any) -> Any:
    kind = ir.FunctionType(_LANES, [_LANES, _LANES, ir.IntType(8)])
    product = builder.module.declare_intrinsic("llvm.x86.pclmulqdq.512", (), kind)
    low, high = (builder.call(product, [value, by, ir.Constant(ir.IntType(8), half)]) for half in (0x00, 0x11))
    return builder.xor(low, high)


@intrinsic
def _fold(typingctx: Any, state: Any, address: Any, words: Any) -> Any:
    """The register after so many words at an address, one at least."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state, address, words = args
        word = ir.IntType(64)

        def number(n: int) -> Any:
            return ir.Constant(word, n)

        def load(at: Any, offset: int = 0) -> Any:
            value = builder.load(builder.inttoptr(builder.add(at, number(offset)), _LANES.as_pointer()))
            value.align = 1
            return value

        def loop(begin: Any, end: Any, size: int, values: Any, step: Any) -> Any:
            """``step`` of what stands at every ``size`` bytes from ``begin`` to ``end``."""
            before = builder.block
            head, body, done = (builder.append_basic_block(name) for name in ("fold", "fold.body", "fold.done"))
            builder.branch(head)
            builder.position_at_end(head)
            at, held = builder.phi(word), [builder.phi(_LANES) for _ in values]
            at.add_incoming(begin, before)
            builder.cbranch(builder.icmp_unsigned("<", at, end), body, done)
            builder.position_at_end(body)
            following = step(held, at)
            at.add_incoming(builder.add(at, number(size)), builder.block)
            for phi, first, value in zip(held, values, following, strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(value, builder.block)
            builder.branch(head)
            builder.position_at_end(done)
            return held

        # Words that do not fill a register come first, behind zeros, which change nothing.
        empty = builder.and_(builder.neg(words), number(7))
        first = _behind(builder, address, empty, builder.zext(state, word))
        end = builder.add(address, builder.shl(words, number(3)))
        begin = builder.add(address, builder.shl(builder.sub(number(8), empty), number(3)))
        # Four registers where there are seven more to come, whose sums are then one's.
        steps = builder.lshr(builder.sub(end, begin), number(6))
        entry = builder.block
        wide, alone = builder.append_basic_block("fold.wide"), builder.append_basic_block("fold.alone")
        builder.cbranch(builder.icmp_unsigned(">=", steps, number(7)), wide, alone)
        builder.position_at_end(wide)
        last = builder.add(begin, builder.shl(builder.lshr(builder.sub(steps, number(3)), number(2)), number(8)))
        last = builder.add(last, number(192))
        values = [first, *(load(begin, 64 * k) for k in range(3))]
        by_2048 = _folders(2048, 2048, 2048, 2048)
        values = loop(
            builder.add(begin, number(192)), last, 256, values,
            lambda held, at: [builder.xor(_folded(builder, v, by_2048), load(at, 64 * k)) for k, v in enumerate(held)],
        )  # fmt: skip
        joined = values[3]
        for k, bits in enumerate((1536, 1024, 512)):
            joined = builder.xor(joined, _folded(builder, values[k], _folders(bits, bits, bits, bits)))
        wide_end = builder.block
        builder.branch(alone)
        builder.position_at_end(alone)
        value, rest = builder.phi(_LANES), builder.phi(word)
        value.add_incoming(first, entry)
        value.add_incoming(joined, wide_end)
        rest.add_incoming(begin, entry)
        rest.add_incoming(last, wide_end)
        by_512 = _folders(512, 512, 512, 512)
        (value,) = loop(
            rest, end, 64, [value], lambda held, at: [builder.xor(_folded(builder, held[0], by_512), load(at))]
        )
        return _register(builder, value)

    return types.uint32(types.uint32, types.intp, types.intp), emit


def _behind(builder: Any, address: Any, empty: Any, state: Any) -> Any:
    """The words at an address in the lanes from ``empty`` on, the state added to the first; 0 before."""
    word, byte, bits = ir.IntType(64), ir.IntType(8), ir.VectorType(ir.IntType(1), 8)
    place = builder.trunc(empty, byte)
    filled = builder.bitcast(builder.shl(ir.Constant(byte, 255), place), bits)
    here = builder.bitcast(builder.shl(ir.Constant(byte, 1), place), bits)
    kind = ir.FunctionType(_LANES, [word.as_pointer(), bits, _LANES])
    expand = builder.module.globals.get("llvm.masked.expandload.v8i64") or ir.Function(
        builder.module, kind, "llvm.masked.expandload.v8i64"
    )
    none, number = ir.Constant(_LANES, None), ir.IntType(32)
    loaded = builder.call(expand, [builder.inttoptr(address, word.as_pointer()), filled, none])
    states = builder.insert_element(none, state, ir.Constant(number, 0))
    states = builder.shuffle_vector(states, none, ir.Constant(ir.VectorType(number, 8), [0] * 8))
    return builder.xor(loaded, builder.select(here, states, none))


def _register(builder: Any, value: Any) -> Any:
    """The four sums of a register as one, and of this what the CRC's register is as of any 16 bytes."""
    word, number = ir.IntType(64), ir.IntType(32)
    none = ir.Constant(_LANES, None)
    last = builder.shuffle_vector(value, none, ir.Constant(ir.VectorType(number, 8), [8] * 6 + [6, 7]))
    value = builder.xor(_folded(builder, value, _folders(384, 256, 128, 0)), last)
    for half in (4, 2):
        places = [i + half if i < half else 8 for i in range(8)]
        value = builder.xor(value, builder.shuffle_vector(value, none, ir.Constant(ir.VectorType(number, 8), places)))
    step = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", (), _function(word, word))
    register = ir.Constant(word, 0)
    for half in range(2):
        register = builder.call(step, [register, builder.extract_element(value, ir.Constant(number, half))])
    return builder.trunc(register, number)


@njit
def _folded_at(state: Any, address: int, size: int) -> Any:
    if size >= _SHORT:
        state = _fold(np.uint32(state), address, size >> 3)
        address, size = address + (size & ~7), size & 7
    return _steps_at(state, address, size)


@njit
def _steps_at(state: Any, address: int, size: int) -> Any:
    wide = np.uint64(state)
    for k in range(size >> 3):
        wide = _step_word(wide, word_at(address + 8 * k))
    narrow = np.uint32(wide)
    if size & 7:
        data = carray(pointer(address), (size,), np.uint8)
        for k in range(size & ~7, size):
            narrow = _step8(narrow, data[k])
    return narrow


@njit
def _any_at(state: Any, address: int, size: int) -> Any:
    return advance(state, carray(pointer(address), (size,), np.uint8), 0, size)


@njit
def advance_folded(state: Any, data: Array, start: int, stop: int) -> Any:
    """As ``advance_hardware``, by products of 512 bits."""
    return _folded_at(state, data.ctypes.data + start, stop - start)


if has_wide_product_instruction():
    advance, advance_at = advance_folded, _folded_at
else:
    advance = advance_thirds if has_product_instruction() else advance_hardware
    advance = advance if has_crc_instruction() else advance_software
    #: The register after ``size`` bytes at an address.
    advance_at = _any_at


@njit
def crc32c(data: Array, crc: int = 0) -> Any:
    """CRC of the uint8 array ``data``, continuing from ``crc`` (that of the bytes before it). Returns uint32."""
    return ~advance(~np.uint32(crc), data, 0, len(data))


@njit
def crc32c_many(buffer: Array, offset: Array, length: Array) -> Array:
    """CRC of each range ``buffer[offset[i]:offset[i] + length[i]]``: (n,) uint32.

    ``buffer`` is uint8, the others int64. Of a range that does not lie in the buffer the result is 0.
    """
    size = len(buffer)
    out = np.zeros(len(offset), np.uint32)
    for i in range(len(offset)):
        start = offset[i]
        n = length[i]
        if 0 <= start <= size and 0 <= n <= size - start:
            out[i] = ~advance(~np.uint32(0), buffer, start, start + n)
    return out


#: Chunks whose headers are asked for ahead of their turn: each is a line of a file far from the last.
_AHEAD = 8


@njit
def _range(address: Array, size: Array, source: Array, offset: Array, length: Array, i: int) -> Any:
    """Whether range i lies in its buffer, and the range (empty where it does not)."""
    where, start, n = source[i], offset[i], length[i]
    inside = 0 <= where < len(address) and n >= 0 and start >= 0
    if not inside or start > size[where] or n > size[where] - start:
        return False, carray(pointer(0), (0,), np.uint8)
    return True, carray(pointer(address[where] + start), (n,), np.uint8)


@njit
def _first_wrong(address: Array, size: Array, source: Array, offset: Array, length: Array, crc: Array) -> int:
    for i in range(len(offset)):
        ahead = i + _AHEAD
        if ahead < len(offset) and 0 <= source[ahead] < len(address):
            prefetch(address[source[ahead]] + offset[ahead])
            prefetch(address[source[ahead]] + offset[ahead] + 64)
        inside, data = _range(address, size, source, offset, length, i)
        if not inside or ~advance(~np.uint32(0), data, 0, len(data)) != crc[i]:
            return i
    return -1


def check_crcs(buffers: Buffers, source: Array, offset: Array, length: Array, crc: Array) -> int:
    """Index of the first range that is not in its buffer or whose CRC is not ``crc[i]``; -1 where all match.

    Args:
        buffers: what holds the ranges.
        source: (n,) int64, which of them range i is in.
        offset, length: (n,) int64 bytes.
        crc: (n,) uint32.
    """
    found: int = _first_wrong(buffers.address, buffers.size, source, offset, length, crc)
    return found


@njit
def _open_chunks(
    address: Array,
    size: Array,
    source: Array,
    offset: Array,
    length: Array,
    n_streams: Array,
    header_crc: Array,
    codec: Array,
    width: Array,
    block_off: Array,
    block_len: Array,
    crc: Array,
) -> Any:
    for i in range(len(offset)):
        ahead = i + _AHEAD
        if ahead < len(offset) and 0 <= source[ahead] < len(address):
            prefetch(address[source[ahead]] + offset[ahead])
        inside, data = _range(address, size, source, offset, length, i)
        streams = n_streams[i]
        head = (streams * 12 + 7) // 8 * 8
        if not inside or streams < 0 or len(data) < head:
            return i, 1
        if ~advance(~np.uint32(0), data, 0, head) != header_crc[i]:
            return i, 2
        at = offset[i] + head
        for k in range(streams):
            entry = data[k * 12 : k * 12 + 12]
            codec[k, i], width[k, i] = entry[0], entry[1]
            n = entry[4:8].view(np.uint32)[0]
            if n % 8 != 0:
                return i, 3
            block_off[k, i], block_len[k, i] = at, n
            crc[k, i] = entry[8:12].view(np.uint32)[0]
            at += n
        if at != offset[i] + len(data):
            return i, 4
    return -1, 0


def open_chunks(
    buffers: Buffers, source: Array, offset: Array, length: Array, n_streams: Array, header_crc: Array
) -> tuple[int, int, Array, Array, Array, Array, Array]:
    """Headers of stripe chunks (docs/format/archive-v2.md, section 3) that lie in ``buffers``.

    Args:
        source: (n,) int64, which buffer chunk i is in.
        offset, length: (n,) int64 bytes of each chunk.
        n_streams: (n,) int64 blocks in each chunk.
        header_crc: (n,) uint32.

    Returns:
        the first bad chunk and what is wrong with it (-1, 0 where all are sound; 1 not in its buffer or shorter than
        its header, 2 the CRC, 3 a block length that is no multiple of 8, 4 lengths that do not add up); then, for n
        chunks of at most S streams, codec and width (S, n) uint8, offset and length of each block (S, n) int64, its CRC
        (S, n) uint32. Those of streams that a chunk does not have are 0.
    """
    shape = int(n_streams.max(initial=1)), len(offset)
    codec, width = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    block_off, block_len = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    crc = np.zeros(shape, np.uint32)
    bad, why = _open_chunks(
        buffers.address,
        buffers.size,
        source,
        offset,
        length,
        n_streams,
        header_crc,
        codec,
        width,
        block_off,
        block_len,
        crc,
    )
    return bad, why, codec, width, block_off, block_len, crc
