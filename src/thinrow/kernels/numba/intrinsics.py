"""What kernels cannot say in Python: loads at any alignment, memory at an address, values in vector registers.

Worked example: eight lanes of 5 bits lie in the words ``row`` to ``row + 8``, lane l in word ``row + l``. With shift
10, mask 31, base 0 and scale 1 ``store8`` puts value 2 of every lane at ``out[at : at + 8]``. The vectors are LLVM's
own: any processor runs them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from thinrow.kernels.numba.jit import intrinsic


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


@intrinsic
def load64(typingctx: Any, data: Any, offset: Any) -> Any:
    """The 8 bytes ``data[offset:offset + 8]`` as one uint64, at any alignment."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = context.make_array(signature.args[0])(context, builder, args[0]).data
        word = builder.load(builder.bitcast(builder.gep(base, [args[1]]), ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(data, types.intp), emit


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
            word, lanes = ir.IntType(64), ir.VectorType(ir.IntType(64), 8)
            source = context.make_array(signature.args[0])(context, builder, args[0]).data
            target = context.make_array(signature.args[7])(context, builder, args[7]).data

            def load(index: Any) -> Any:
                value = builder.load(builder.bitcast(builder.gep(source, [index]), lanes.as_pointer()))
                value.align = 8
                return value

            def splat(value: Any) -> Any:
                none = ir.Constant(lanes, ir.Undefined)
                first = builder.insert_element(none, value, ir.Constant(ir.IntType(32), 0))
                return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8))

            # Two shifts to the left, because a shift by 64 is undefined.
            rest = builder.sub(ir.Constant(word, 63), args[3])
            high = builder.shl(builder.shl(load(args[2]), splat(ir.Constant(word, 1))), splat(rest))
            value = builder.and_(builder.or_(builder.lshr(load(args[1]), splat(args[3])), high), splat(args[4]))
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
