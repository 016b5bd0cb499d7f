"""What kernels cannot say in Python: loads at any alignment, memory at an address, values in vector registers.

Worked example: eight lanes of 5 bits lie in the eight words at address ``row``, lane l in word l. With shift 10, mask
31, base 0 and scale 1 ``store8`` puts value 2 of every lane at the eight bytes at ``out``. The vectors are LLVM's
own: any processor runs them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from thinrow.core.wrap import GOLDEN64
from thinrow.kernels.numba.jit import intrinsic, njit

#: Bytes of a cache line.
LINE = 64


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """An address as a pointer, for ``numba.carray``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), emit


@intrinsic
def pointer_like(typingctx: Any, address: Any, like: Any) -> Any:
    """A pointer to elements of ``like``'s type."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), emit  # type: ignore[no-untyped-call]


@njit
def address(array: Any) -> Any:
    """Of an array's memory, as int64: what numba gives is unsigned, and kernels would be compiled for both."""
    return np.int64(array.ctypes.data)


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address, which need not be one that may be read."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [line], kind)
        builder.call(ask, [builder.inttoptr(args[0], line), *(ir.Constant(number, v) for v in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.intp), emit


@njit
def prefetch_range(begin: int, size: int) -> None:
    """``prefetch`` every line of ``size`` bytes from an address on."""
    for at in range(begin, begin + size, LINE):
        prefetch(at)


@intrinsic
def pass_line(typingctx: Any, source: Any, target: Any) -> Any:
    """Copy 64 bytes, at any alignment, to a cache line that nobody is about to read: it is written past the caches."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), 8)
        found = builder.load(builder.inttoptr(args[0], line.as_pointer()))
        found.align = 1
        put = builder.store(found, builder.inttoptr(args[1], line.as_pointer()))
        put.align = LINE
        put.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), emit


@intrinsic
def load64(typingctx: Any, data: Any, offset: Any) -> Any:
    """The 8 bytes ``data[offset:offset + 8]`` as one uint64, at any alignment."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = context.make_array(signature.args[0])(context, builder, args[0]).data
        word = builder.load(builder.bitcast(builder.gep(base, [args[1]]), ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(data, types.intp), emit


@intrinsic
def word_at(typingctx: Any, address: Any) -> Any:
    """The 8 bytes at an address as one uint64, at any alignment."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _taken(builder, args[0], ir.IntType(64))

    return types.uint64(types.intp), emit


@intrinsic
def bit_length(typingctx: Any, value: Any) -> Any:
    """Bits that a uint64 needs; 0 for 0."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(ir.IntType(64), 64), zeros)

    return types.intp(types.uint64), emit


@intrinsic
def popcount(typingctx: Any, value: Any) -> Any:
    """Ones of a uint64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.intp(types.uint64), emit


@intrinsic
def trailing_zeros(typingctx: Any, value: Any) -> Any:
    """Zeros below the lowest one of a uint64; 64 of 0."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.intp(types.uint64), emit


_EIGHT, _MASK = ir.VectorType(ir.IntType(64), 8), ir.VectorType(ir.IntType(1), 8)


def _function(builder: Any, name: str, kind: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _expanded(context: Any, builder: Any, kind: Any, array: Any, at: Any, mask: Any) -> Any:
    """Words of ``array`` from ``at`` on, one after another, in the lanes of ``mask``; 0 in the others. Nothing else is
    read."""
    base = context.make_array(kind)(context, builder, array).data
    return _expanded_at(builder, builder.ptrtoint(builder.gep(base, [at]), ir.IntType(64)), mask, _EIGHT)


def _expanded_at(builder: Any, address: Any, mask: Any, kind: Any, others: Any = None) -> Any:
    """As ``_expanded``, of items at an address; ``others`` in the other lanes."""
    source = builder.inttoptr(address, kind.element.as_pointer())
    name = f"llvm.masked.expandload.v{kind.count}i{kind.element.width}"
    load = _function(builder, name, ir.FunctionType(kind, [source.type, mask.type, kind]))
    return builder.call(load, [source, mask, ir.Constant(kind, None) if others is None else others])


def _mask_of(builder: Any, bits: Any, kind: Any) -> Any:
    return builder.bitcast(builder.trunc(bits, ir.IntType(kind.count)), kind)


def _put(context: Any, builder: Any, kind: Any, array: Any, at: Any, value: Any) -> None:
    base = context.make_array(kind)(context, builder, array).data
    builder.store(value, builder.bitcast(builder.gep(base, [at]), _EIGHT.as_pointer())).align = 8


@intrinsic
def expand8(typingctx: Any, bits: Any, words: Any, at: Any, base: Any, out: Any, to: Any) -> Any:
    """``out[to:to + 8]``: ``base`` where one of the low eight ``bits`` is 0, else plus the next of ``words[at:]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _expanded(context, builder, signature.args[1], args[1], args[2], _mask_of(builder, args[0], _MASK))
        _put(context, builder, signature.args[4], args[4], args[5], builder.add(value, _splat(builder, args[3])))
        return context.get_dummy_value()

    return types.void(types.uint64, words, types.intp, types.uint64, out, types.intp), emit


@intrinsic
def merge8(typingctx: Any, bits: Any, zeros: Any, at: Any, ones: Any, place: Any, out: Any, to: Any) -> Any:
    """``out[to:to + 8]``: the next of ``zeros[at:]`` where one of the low eight ``bits`` is 0, else of
    ``ones[place:]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        low = _expanded(context, builder, kinds[1], args[1], args[2], _mask_of(builder, builder.not_(args[0]), _MASK))
        high = _expanded(context, builder, kinds[3], args[3], args[4], _mask_of(builder, args[0], _MASK))
        _put(context, builder, kinds[5], args[5], args[6], builder.or_(low, high))
        return context.get_dummy_value()

    return types.void(types.uint64, zeros, types.intp, ones, types.intp, out, types.intp), emit


@intrinsic
def pack8(typingctx: Any, words: Any, mask: Any, shift: Any, out: Any) -> Any:
    """The bits of ``mask`` of the eight words at an address, shifted up, into the eight words at address ``out``, where
    these bits are 0 as yet. A negative ``shift`` is one down."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, mask, shift, out = args
        none = ir.Constant(ir.IntType(64), 0)
        value = builder.and_(_taken(builder, words, _EIGHT), _splat(builder, mask))
        down = builder.icmp_signed("<", shift, none)
        moved = builder.select(
            down,
            builder.lshr(value, _splat(builder, builder.select(down, builder.neg(shift), none))),
            builder.shl(value, _splat(builder, builder.select(down, none, shift))),
        )
        _put_at(builder, out, builder.or_(_taken(builder, out, _EIGHT), moved))
        return context.get_dummy_value()

    return types.void(types.intp, types.uint64, types.int64, types.intp), emit


def _prefix8(builder: Any, sums: Any) -> Any:
    """Running sums of eight words."""
    for step in (1, 2, 4):
        places = ir.Constant(ir.VectorType(ir.IntType(32), 8), [max(i - step, -1) % 16 for i in range(8)])
        moved = builder.shuffle_vector(sums, ir.Constant(_EIGHT, None), places)
        sums = builder.add(sums, moved)
    return sums


@intrinsic
def prefix8(typingctx: Any, words: Any, value: Any, out: Any) -> Any:
    """``value`` plus the running sums of the eight words at an address, at the address ``out``; returns their sum. What
    follows waits for the sum alone."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = _prefix8(builder, _taken(builder, args[0], _EIGHT))
        _put_at(builder, args[2], builder.add(sums, _splat(builder, args[1])))
        return builder.extract_element(sums, ir.Constant(ir.IntType(32), 7))

    return types.uint64(types.intp, types.uint64, types.intp), emit


@intrinsic
def expanded_prefix64(typingctx: Any, bits: Any, words: Any, base: Any, value: Any, out: Any) -> Any:
    """64 running sums on from ``value``, at address ``out``, of ``base`` where one of ``bits`` is 0, else of the next
    of the words at an address; returns the last. Of the words no more than there are ones are read."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, words, base, value, out = args
        word, none = ir.IntType(64), ir.Constant(_EIGHT, ir.Undefined)
        steps, sums = _splat(builder, base), _splat(builder, value)
        last = ir.Constant(ir.VectorType(ir.IntType(32), 8), [7] * 8)
        for i in range(8):
            # What is not marked is given from without: the lanes of a register that zeros would be put to wait for it.
            moved = _expanded_at(builder, words, _mask_of(builder, bits, _MASK), _EIGHT, steps)
            moved = _prefix8(builder, moved)
            sums_here = builder.add(moved, sums)
            _put_at(builder, builder.add(out, ir.Constant(word, 64 * i)), sums_here)
            sums = builder.add(sums, builder.shuffle_vector(moved, none, last))
            held = builder.ctpop(builder.and_(bits, ir.Constant(word, 255)))
            words = builder.add(words, builder.shl(held, ir.Constant(word, 3)))
            bits = builder.lshr(bits, ir.Constant(word, 8))
        return builder.extract_element(sums, ir.Constant(ir.IntType(32), 0))

    return types.uint64(types.uint64, types.intp, types.uint64, types.uint64, types.intp), emit


@intrinsic
def expand32(typingctx: Any, bits: Any, source: Any, out: Any) -> Any:
    """32 items of 2 bytes to address ``out``: 0 where one of the low 32 ``bits`` is 0, else the next of those at
    address ``source``. Of these no more are read."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many = ir.VectorType(ir.IntType(16), 32)
        mask = _mask_of(builder, args[0], ir.VectorType(ir.IntType(1), 32))
        _put_at(builder, args[2], _expanded_at(builder, args[1], mask, many))
        return context.get_dummy_value()

    return types.void(types.uint64, types.intp, types.intp), emit


@intrinsic
def descents32(typingctx: Any, address: Any) -> Any:
    """Which of the 32 bytes at an address are not above the byte before each, which is read too: a bit a byte."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many = ir.VectorType(ir.IntType(8), 32)
        before = _taken(builder, builder.sub(args[0], ir.Constant(ir.IntType(64), 1)), many)
        found = builder.icmp_unsigned("<=", _taken(builder, args[0], many), before)
        return builder.zext(builder.bitcast(found, ir.IntType(32)), ir.IntType(64))

    return types.uint64(types.intp), emit


@intrinsic
def quotients16(typingctx: Any, address: Any, divisor: Any) -> Any:
    """16 int32 at an address to float32, divided, in their place."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.FloatType(), 16)
        number = builder.sitofp(_taken(builder, args[0], ir.VectorType(ir.IntType(32), 16)), kind)
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), args[1], ir.Constant(ir.IntType(32), 0))
        places = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)
        divisor = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), places)
        _put_at(builder, args[0], builder.fdiv(number, divisor))
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), emit


def _splat(builder: Any, value: Any) -> Any:
    none = ir.Constant(_EIGHT, ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8))


def _taken(builder: Any, address: Any, kind: Any) -> Any:
    """A value of a type, at any alignment."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _put_at(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def _funnel(builder: Any, row: Any, next_row: Any, shift: Any) -> Any:
    """Eight words from bit ``shift`` on of those at address ``row``, which go on at ``next_row``."""
    shifted = _function(builder, "llvm.fshr.v8i64", ir.FunctionType(_EIGHT, [_EIGHT] * 3))
    words = _taken(builder, next_row, _EIGHT), _taken(builder, row, _EIGHT)
    return builder.call(shifted, [*words, _splat(builder, shift)])


def _lane_store(bits: int) -> Any:
    """Compiles ``store(row, next_row, shift, mask, base, scale, out)``: ``base + q * scale`` of the eight values q that
    lie at bit ``shift`` of the eight words at address ``row`` (and go on in those at ``next_row``), cut to ``bits`` at
    address ``out``."""

    @intrinsic
    def store(typingctx: Any, row: Any, next_row: Any, shift: Any, mask: Any, base: Any, scale: Any, out: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            splat = partial(_splat, builder)
            value = _funnel(builder, args[0], args[1], args[2])
            value = builder.and_(value, splat(args[3]))
            value = builder.add(builder.mul(value, splat(args[5])), splat(args[4]))
            if bits < 64:
                value = builder.trunc(value, ir.VectorType(ir.IntType(bits), 8))
            _put_at(builder, args[6], value)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, *(types.uint64,) * 4, types.intp), emit

    return store


store8, store16, store32, store64 = _lane_store(8), _lane_store(16), _lane_store(32), _lane_store(64)


def _narrow_store(bits: int) -> Any:
    """Compiles ``store(row, next_row, shift, width, base, out)``: ``base + q`` of the 64 values q of ``width`` bits, 1
    to 8, that lie at bit ``shift`` of the eight words at address ``row`` (and go on in those at ``next_row``), cut to
    ``bits`` at address ``out``. The eight values of a lane are moved apart to a byte each (halves to 32 bits, quarters
    to 16, each to 8), and then the bytes of all lanes to their order."""

    @intrinsic
    def store(typingctx: Any, row: Any, next_row: Any, shift: Any, width: Any, base: Any, out: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            splat = partial(_splat, builder)
            value = _funnel(builder, args[0], args[1], args[2])
            for size, each in ((32, 1), (16, (1 << 32) + 1), (8, 0x0001000100010001)):
                taken = builder.mul(args[3], ir.Constant(word, size // 8))
                mask = builder.sub(builder.shl(ir.Constant(word, 1), taken), ir.Constant(word, 1))
                mask = builder.mul(mask, ir.Constant(word, each))
                moved = builder.shl(value, splat(builder.sub(ir.Constant(word, size), taken)))
                moved = builder.and_(moved, splat(builder.shl(mask, ir.Constant(word, size))))
                value = builder.or_(builder.and_(value, splat(mask)), moved)
            flat = builder.bitcast(value, ir.VectorType(ir.IntType(8), 64))
            places = ir.Constant(ir.VectorType(ir.IntType(32), 64), [(i & 7) * 8 + (i >> 3) for i in range(64)])
            flat = builder.shuffle_vector(flat, ir.Constant(flat.type, None), places)
            item = ir.IntType(bits)
            kind = ir.VectorType(item, 64)
            if bits > 8:
                flat = builder.zext(flat, kind)
            start = args[4] if bits == 64 else builder.trunc(args[4], item)
            first = builder.insert_element(ir.Constant(kind, ir.Undefined), start, ir.Constant(ir.IntType(32), 0))
            all_of = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
            flat = builder.add(flat, builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), all_of))
            _put_at(builder, args[5], flat)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, *(types.uint64,) * 3, types.intp), emit

    return store


narrow8, narrow16, narrow32, narrow64 = _narrow_store(8), _narrow_store(16), _narrow_store(32), _narrow_store(64)


def _mixed(builder: Any, words: Any) -> Any:
    """``scalar.mix`` of eight words."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words = builder.xor(words, builder.lshr(words, ir.Constant(_EIGHT, [shift] * 8)))
        if factor > 1:
            words = builder.mul(words, ir.Constant(_EIGHT, [factor] * 8))
    return words


@intrinsic
def identities32(typingctx: Any, times: Any, arrivals: Any) -> Any:
    """Sum of ``scalar.identity_of`` over 32 events, whose times and arrival numbers are at two addresses."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, sums = ir.IntType(64), ir.Constant(_EIGHT, None)
        golden = ir.Constant(_EIGHT, [GOLDEN64] * 8)
        for k in range(4):
            time, arrival = (_taken(builder, builder.add(a, ir.Constant(word, 64 * k)), _EIGHT) for a in args)
            mixed = _mixed(builder, builder.add(time, golden))
            sums = builder.add(sums, _mixed(builder, builder.add(mixed, arrival)))
        for half in (4, 2, 1):
            places = ir.Constant(ir.VectorType(ir.IntType(32), 8), [i + half if i < half else 8 for i in range(8)])
            sums = builder.add(sums, builder.shuffle_vector(sums, ir.Constant(_EIGHT, None), places))
        return builder.extract_element(sums, ir.Constant(ir.IntType(32), 0))

    return types.uint64(types.intp, types.intp), emit
