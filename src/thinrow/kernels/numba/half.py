"""float16 to float32 in a compiled loop; ``kernels.reference.half`` defines what it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from thinrow.kernels.numba.intrinsics import address
from thinrow.kernels.numba.jit import intrinsic, njit

#: Numbers that are widened at once.
LANES = 16


def _widened(lanes: int) -> Any:
    """Compiles ``widen(source, target)``: ``lanes`` finite float16 at an address to float32 at another, both at any
    alignment, as ``core/half.py`` does it: all bits but two to their places, then one exact product."""

    @intrinsic
    def widen(typingctx: Any, source: Any, target: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def splat(kind: Any, value: Any) -> Any:
                return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)

            halves, words = ir.VectorType(ir.IntType(16), lanes), ir.VectorType(ir.IntType(32), lanes)
            floats = ir.VectorType(ir.FloatType(), lanes)
            half = builder.load(builder.inttoptr(args[0], halves.as_pointer()))
            half.align = 1
            bits = builder.shl(builder.sext(half, words), splat(ir.IntType(32), 13))
            bits = builder.and_(bits, splat(ir.IntType(32), -0x70000001))
            wide = builder.fmul(builder.bitcast(bits, floats), splat(ir.FloatType(), 2.0**112))
            put = builder.store(wide, builder.inttoptr(args[1], floats.as_pointer()))
            put.align = 1
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), emit

    return widen


_widen_many, _widen_one = _widened(LANES), _widened(1)


@njit
def widen_at(source: int, n: int, target: int) -> None:
    """``n`` finite float16 at an address to float32 at another."""
    many = n // LANES * LANES
    for i in range(0, many, LANES):
        _widen_many(source + 2 * i, target + 4 * i)
    for i in range(many, n):
        _widen_one(source + 2 * i, target + 4 * i)


@njit
def _widen(half: npt.NDArray[np.int16], out: npt.NDArray[np.float32]) -> None:
    widen_at(address(half), len(half), address(out))


def widen_half(half: npt.NDArray[np.float16], out: npt.NDArray[np.float32]) -> None:
    _widen(half.reshape(-1).view(np.int16), out.reshape(-1))
