"""What kernels cannot say in Python: loads at any alignment, memory at an address, values in vector registers.

Worked example: eight lanes of 5 bits lie in the words ``row`` to ``row + 8``, lane l in word ``row + l``. With shift
10, mask 31, base 0 and scale 1 ``store8`` puts value 2 of every lane at ``out[at : at + 8]``. The vectors are LLVM's
own: any processor runs them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from thinrow.kernels.numba.jit import intrinsic, njit

#: Bytes of a cache line.
_LINE = 64


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """An address as a pointer, for ``numba.carray``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), emit


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
    for at in range(begin, begin + size, _LINE):
        prefetch(at)


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


_EIGHT, _MASK = ir.VectorType(ir.IntType(64), 8), ir.VectorType(ir.IntType(1), 8)


def _function(builder: Any, name: str, kind: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _expanded(context: Any, builder: Any, kind: Any, array: Any, at: Any, mask: Any) -> Any:
    """Words of ``array`` from ``at`` on, one after another, in the lanes of ``mask``; 0 in the others. Nothing else is
    read."""
    base = context.make_array(kind)(context, builder, array).data
    source = builder.bitcast(builder.gep(base, [at]), ir.IntType(64).as_pointer())
    load = _function(builder, "llvm.masked.expandload.v8i64", ir.FunctionType(_EIGHT, [source.type, _MASK, _EIGHT]))
    return builder.call(load, [source, mask, ir.Constant(_EIGHT, None)])


def _mask_of(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.trunc(bits, ir.IntType(8)), _MASK)


def _put(context: Any, builder: Any, kind: Any, array: Any, at: Any, value: Any) -> None:
    base = context.make_array(kind)(context, builder, array).data
    builder.store(value, builder.bitcast(builder.gep(base, [at]), _EIGHT.as_pointer())).align = 8


@intrinsic
def expand8(typingctx: Any, bits: Any, words: Any, at: Any, base: Any, out: Any, to: Any) -> Any:
    """``out[to:to + 8]``: ``base`` where one of the low eight ``bits`` is 0, else plus the next of ``words[at:]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _expanded(context, builder, signature.args[1], args[1], args[2], _mask_of(builder, args[0]))
        _put(context, builder, signature.args[4], args[4], args[5], builder.add(value, _splat(builder, args[3])))
        return context.get_dummy_value()

    return types.void(types.uint64, words, types.intp, types.uint64, out, types.intp), emit


@intrinsic
def merge8(typingctx: Any, bits: Any, zeros: Any, at: Any, ones: Any, place: Any, out: Any, to: Any) -> Any:
    """``out[to:to + 8]``: the next of ``zeros[at:]`` where one of the low eight ``bits`` is 0, else of
    ``ones[place:]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        low = _expanded(context, builder, kinds[1], args[1], args[2], _mask_of(builder, builder.not_(args[0])))
        high = _expanded(context, builder, kinds[3], args[3], args[4], _mask_of(builder, args[0]))
        _put(context, builder, kinds[5], args[5], args[6], builder.or_(low, high))
        return context.get_dummy_value()

    return types.void(types.uint64, zeros, types.intp, ones, types.intp, out, types.intp), emit


@intrinsic
def prefix8(typingctx: Any, words: Any, at: Any, value: Any, out: Any, to: Any) -> Any:
    """``out[to:to + 8]``: ``value`` plus the running sums of ``words[at:at + 8]``; returns their sum. What follows
    waits for the sum alone."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = context.make_array(signature.args[0])(context, builder, args[0]).data
        sums = builder.load(builder.bitcast(builder.gep(base, [args[1]]), _EIGHT.as_pointer()))
        sums.align = 8
        for step in (1, 2, 4):
            places = ir.Constant(ir.VectorType(ir.IntType(32), 8), [max(i - step, -1) % 16 for i in range(8)])
            moved = builder.shuffle_vector(sums, ir.Constant(_EIGHT, None), places)
            sums = builder.add(sums, moved)
        _put(context, builder, signature.args[3], args[3], args[4], builder.add(sums, _splat(builder, args[2])))
        return builder.extract_element(sums, ir.Constant(ir.IntType(32), 7))

    return types.uint64(words, types.intp, types.uint64, out, types.intp), emit


def _splat(builder: Any, value: Any) -> Any:
    none = ir.Constant(_EIGHT, ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8))


def _lane_store(bits: int) -> Any:
    """Compiles ``store(words, row, next_row, shift, mask, base, scale, out, at)``: ``base + q * scale`` of the eight
    values q that lie at bit ``shift`` of the words ``row`` to ``row + 8`` (and go on in ``next_row``), cut to ``bits``
    at byte ``at``."""

    @intrinsic
    def store(
        typingctx: Any,
        words: Any,
        row: Any,
        next_row: Any,
        shift: Any,
        mask: Any,
        base: Any,
        scale: Any,
        out: Any,
        at: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lanes = _EIGHT
            source = context.make_array(signature.args[0])(context, builder, args[0]).data
            target = context.make_array(signature.args[7])(context, builder, args[7]).data

            def load(index: Any) -> Any:
                value = builder.load(builder.bitcast(builder.gep(source, [index]), lanes.as_pointer()))
                value.align = 8
                return value

            splat = partial(_splat, builder)
            funnel = _function(builder, "llvm.fshr.v8i64", ir.FunctionType(lanes, [lanes] * 3))
            value = builder.call(funnel, [load(args[2]), load(args[1]), splat(args[3])])
            value = builder.and_(value, splat(args[4]))
            value = builder.add(builder.mul(value, splat(args[6])), splat(args[5]))
            kind = ir.VectorType(ir.IntType(bits), 8)
            if bits < 64:
                value = builder.trunc(value, kind)
            builder.store(value, builder.bitcast(builder.gep(target, [args[8]]), kind.as_pointer())).align = 1
            return context.get_dummy_value()

        kinds = (types.intp, types.intp, *(types.uint64,) * 4)
        return types.void(words, *kinds, out, types.intp), emit

    return store


store8, store16, store32, store64 = _lane_store(8), _lane_store(16), _lane_store(32), _lane_store(64)


def _narrow_store(bits: int) -> Any:
    """Compiles ``store(words, row, next_row, shift, width, base, out, at)``: ``base + q`` of the 64 values q of
    ``width`` bits, 1 to 8, that lie at bit ``shift`` of the words ``row`` to ``row + 8`` (and go on in ``next_row``),
    cut to ``bits`` at byte ``at``. The eight values of a lane are moved apart to a byte each (halves to 32 bits,
    quarters to 16, each to 8), and then the bytes of all lanes to their order."""

    @intrinsic
    def store(
        typingctx: Any, words: Any, row: Any, next_row: Any, shift: Any, width: Any, base: Any, out: Any, at: Any
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            source = context.make_array(signature.args[0])(context, builder, args[0]).data
            target = context.make_array(signature.args[6])(context, builder, args[6]).data

            def load(index: Any) -> Any:
                value = builder.load(builder.bitcast(builder.gep(source, [index]), _EIGHT.as_pointer()))
                value.align = 8
                return value

            splat = partial(_splat, builder)
            funnel = _function(builder, "llvm.fshr.v8i64", ir.FunctionType(_EIGHT, [_EIGHT] * 3))
            value = builder.call(funnel, [load(args[2]), load(args[1]), splat(args[3])])
            for size, each in ((32, 1), (16, (1 << 32) + 1), (8, 0x0001000100010001)):
                taken = builder.mul(args[4], ir.Constant(word, size // 8))
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
            start = args[5] if bits == 64 else builder.trunc(args[5], item)
            first = builder.insert_element(ir.Constant(kind, ir.Undefined), start, ir.Constant(ir.IntType(32), 0))
            all_of = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
            flat = builder.add(flat, builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), all_of))
            builder.store(flat, builder.bitcast(builder.gep(target, [args[7]]), kind.as_pointer())).align = 1
            return context.get_dummy_value()

        kinds = (types.intp, types.intp, *(types.uint64,) * 3)
        return types.void(words, *kinds, out, types.intp), emit

    return store


narrow8, narrow16, narrow32, narrow64 = _narrow_store(8), _narrow_store(16), _narrow_store(32), _narrow_store(64)
