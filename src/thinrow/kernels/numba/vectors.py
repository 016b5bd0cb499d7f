"""Products of small matrices and other loops of ``numba.hstu``, written as LLVM vectors for the processor at hand.

Loops in Python are not reliably turned into vectors. A tile of a product, a few rows by two vectors, stays in
registers; ``multiply`` puts any size together from them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.registry import cpu_target

from thinrow.kernels.numba.jit import intrinsic, njit


def _target() -> tuple[int, int, bool]:
    """For the CPU that numba compiles for: bytes of a vector, rows of a tile, whether it has fused multiply-add.

    A tile's sums, two vectors a row, stay in registers.
    """
    try:
        triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    except (AttributeError, ValueError):
        return 16, 4, False
    has = set(str(features).split(","))
    if str(triple).startswith("aarch64"):
        return 16, 8, True
    if "+avx512f" in has:
        return 64, 8, True
    return (32, 4, True) if {"+avx2", "+fma"} <= has else (16, 4, False)


#: Widths of tensors are whole vectors.
VECTOR_BYTES, ROWS, _FUSED = _target()
_HALF = ROWS // 2

I32, I64 = ir.IntType(32), ir.IntType(64)


class Emit:
    """Writes vector instructions for one element type into a function that numba is building."""

    def __init__(self, context: Any, builder: Any, kind: Any) -> None:
        self.context, self.builder, self.kind = context, builder, kind
        self.single = kind.dtype == types.float32
        self.element = ir.FloatType() if self.single else ir.DoubleType()
        self.size = 4 if self.single else 8
        self.lanes = VECTOR_BYTES // self.size
        self.vector = ir.VectorType(self.element, self.lanes)

    def start(self, kind: Any, array: Any, at: Any) -> Any:
        """Address of element ``at`` of a one-dimensional array."""
        return self.builder.gep(self.context.make_array(kind)(self.context, self.builder, array).data, [at])

    def ahead(self, address: Any, step: Any, times: int) -> Any:
        """``address`` and ``times`` steps of ``step`` elements."""
        return self.builder.gep(address, [self.builder.mul(step, ir.Constant(I64, times))])

    def load(self, address: Any, vector: int = 0) -> Any:
        """The vector that begins ``vector`` vectors after an address."""
        return self._load(address, self.vector, self.size, vector * self.lanes)

    def load_ints(self, address: Any) -> Any:
        """As many int32 as there are lanes."""
        return self._load(address, ir.VectorType(I32, self.lanes), 4, 0)

    def _load(self, address: Any, kind: Any, align: int, ahead: int) -> Any:
        address = self.builder.gep(address, [ir.Constant(I64, ahead)])
        loaded = self.builder.load(self.builder.bitcast(address, kind.as_pointer()))
        loaded.align = align
        return loaded

    def store(self, value: Any, address: Any, vector: int = 0) -> None:
        """The reverse of ``load``."""
        address = self.builder.gep(address, [ir.Constant(I64, vector * self.lanes)])
        self.builder.store(value, self.builder.bitcast(address, self.vector.as_pointer())).align = self.size

    def variable(self) -> Any:
        """Room for a vector, in a register where the compiler can."""
        return cgutils.alloca_once(self.builder, self.vector)  # type: ignore[no-untyped-call]

    def splat(self, value: Any) -> Any:
        """A scalar in every lane."""
        nothing = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        one = self.builder.insert_element(nothing, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, nothing, self._order([0] * self.lanes))

    def merge(self, a: Any, b: Any, order: list[int]) -> Any:
        """Lanes of ``a`` (0 on) and ``b`` (``lanes`` on) in the given order."""
        return self.builder.shuffle_vector(a, b, self._order(order))

    def _order(self, order: list[int]) -> Any:
        return ir.Constant(ir.VectorType(I32, self.lanes), [ir.Constant(I32, i) for i in order])

    def gather(self, first: Any, index: Any) -> Any:
        """Elements at int32 distances from an address."""
        kept, nothing = self._all(), ir.Constant(self.vector, ir.Undefined)
        return self._call("gather", self.vector, [self._places(first, index), self._align(), kept, nothing])

    def scatter(self, value: Any, first: Any, index: Any) -> None:
        """The reverse of ``gather``; no two distances may be equal."""
        self._call("scatter", ir.VoidType(), [value, self._places(first, index), self._align(), self._all()])

    def _places(self, first: Any, index: Any) -> Any:
        # llvmlite knows addresses of one element only: such an instruction, made one of many.
        places = self.builder.gep(first, [ir.Constant(I32, 0)])
        places.indices, places.type = [index], ir.VectorType(first.type, self.lanes)
        return places

    def _align(self) -> Any:
        return ir.Constant(I32, self.size)

    def _all(self) -> Any:
        return ir.Constant(ir.VectorType(ir.IntType(1), self.lanes), [1] * self.lanes)

    def _call(self, what: str, result: Any, values: list[Any]) -> Any:
        kind = ir.FunctionType(result, [v.type for v in values])
        name = f"llvm.masked.{what}.v{self.lanes}f{8 * self.size}.v{self.lanes}p0"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), values)  # type: ignore[no-untyped-call]

    def number(self, value: float) -> Any:
        """A constant in every lane."""
        return ir.Constant(self.vector, [ir.Constant(self.element, value)] * self.lanes)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """``a * b + c``, rounded once where the CPU can."""
        if not _FUSED:
            return self.builder.fadd(self.builder.fmul(a, b), c)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fma.v{self.lanes}f{8 * self.size}"
        fused = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(fused, [a, b, c])

    def sigmoid(self, x: Any) -> Any:
        """``1 / (1 + exp(-x))`` to the last bit or two; exactly 0 where exp(-x) leaves the range, NaN of NaN.

        ``exp(-x) = 2^n * 2^f`` with n the integer nearest to -x * log2(e) and f in [-1/2, 1/2].
        """
        b, bits, bias = self.builder, 23 if self.single else 52, 127 if self.single else 1023
        word = ir.IntType(8 * self.size)

        def words(value: int) -> Any:
            return ir.Constant(ir.VectorType(word, self.lanes), [ir.Constant(word, value % 2**word.width)] * self.lanes)

        most = bias * math.log(2)
        z = b.fneg(x)
        above, below = b.fcmp_ordered(">", z, self.number(most)), b.fcmp_ordered("<", z, self.number(-most))
        z = b.select(below, self.number(-most), b.select(above, self.number(most), z))
        # Adding this pushes the fraction of z * log2(e) out of the mantissa: n is left in the low bits.
        push = 1.5 * 2.0**bits
        high, rest = math.log2(math.e), _LOG2_E_REST[self.single]
        pushed = b.fadd(b.fmul(z, self.number(high)), self.number(push))
        n = b.fsub(pushed, self.number(push))
        f = self.fma(z, self.number(rest), self.fma(z, self.number(high), b.fneg(n)))
        *lower, highest = _EXP2[self.single]
        series = self.number(highest)
        for c in reversed(lower):
            series = self.fma(series, f, self.number(c))
        low = int(np.float32(push).view(np.int32) if self.single else np.float64(push).view(np.int64))
        power = b.shl(b.add(b.bitcast(pushed, words(0).type), words(bias - low)), words(bits))
        grown = self.fma(series, b.bitcast(power, self.vector), self.number(1.0))
        return b.select(above, self.number(0.0), b.fdiv(self.number(1.0), grown))


#: What log2(e) has beyond the bits of the type; by whether that is single precision.
_LOG2_E_REST = {True: math.log2(math.e) - float(np.float32(math.log2(math.e))), False: 2.0355273740931033e-17}

#: By the same: coefficients of the Taylor series of 2^f, to a tenth of the last bit.
_EXP2 = {single: [math.log(2) ** k / math.factorial(k) for k in range(n)] for single, n in ((True, 8), (False, 14))}


def _tile(rows: int, vectors: int) -> Any:
    @intrinsic
    def tile(typing: Any, a: Any, a_at: Any, a_row: Any, a_sum: Any, b: Any, b_at: Any, b_sum: Any, n: Any,
             c: Any, c_at: Any, c_row: Any, keep: Any) -> Any:  # fmt: skip
        """``c[r, l] = (c[r, l] if keep else 0) + sum of n terms a[r, i] * b[i, l]``, by one chain of multiply-adds.

        ``a[r, i]`` is element ``a_at + r * a_row + i * a_sum``; ``b`` and ``c`` have their columns side by side.
        """

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(context, builder, a)
            body = _tile_body(e, rows, vectors)
            starts = [e.start(kind, args[i], args[i + 1]) for kind, i in ((a, 0), (b, 4), (c, 8))]
            builder.call(body, [*starts, args[2], args[3], args[6], args[7], args[10], args[11]])
            return context.get_dummy_value()

        i = types.int64
        return types.void(a, i, i, i, b, i, i, i, c, i, i, types.boolean), emit

    return tile


def _tile_body(outer: Emit, rows: int, vectors: int) -> Any:
    """The function that computes a tile; it stays a function, since its many copies take long to compile."""
    module, address = outer.builder.module, outer.element.as_pointer()
    name = f"thinrow_hstu_tile_{rows}_{vectors}_{outer.size}"
    if name in module.globals:
        return module.globals[name]
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [address] * 3 + [I64] * 5 + [ir.IntType(1)]), name)
    body.linkage = "linkonce_odr"
    body.attributes.add("noinline")
    e = Emit(outer.context, ir.IRBuilder(body.append_basic_block()), outer.kind)
    b, (a_first, b_first, c_first, a_row, a_sum, b_sum, n, c_row, keep) = e.builder, body.args
    a_rows = [e.ahead(a_first, a_row, r) for r in range(rows)]
    c_rows = [e.ahead(c_first, c_row, r) for r in range(rows)]
    cells = [(r, v) for r in range(rows) for v in range(vectors)]
    sums = {cell: e.variable() for cell in cells}
    with b.if_else(keep) as (then, otherwise):
        with then:
            for r, v in cells:
                b.store(e.load(c_rows[r], v), sums[r, v])
        with otherwise:
            for cell in cells:
                b.store(e.number(0.0), sums[cell])
    with cgutils.for_range(b, n, intp=I64) as loop:
        b_row = b.gep(b_first, [b.mul(loop.index, b_sum)])
        across = [e.load(b_row, v) for v in range(vectors)]
        ahead = b.mul(loop.index, a_sum)
        for r in range(rows):
            factor = e.splat(b.load(b.gep(a_rows[r], [ahead])))
            for v in range(vectors):
                b.store(e.fma(factor, across[v], b.load(sums[r, v])), sums[r, v])
    for r, v in cells:
        e.store(b.load(sums[r, v]), c_rows[r], v)
    b.ret_void()
    return body


_tile_full_two, _tile_half_two, _tile_one_two = _tile(ROWS, 2), _tile(_HALF, 2), _tile(1, 2)
_tile_full_one, _tile_half_one, _tile_one_one = _tile(ROWS, 1), _tile(_HALF, 1), _tile(1, 1)


@njit
def multiply(a: Any, a_at: int, a_row: int, a_sum: int, b: Any, b_at: int, b_sum: int, n: int,
              c: Any, c_at: int, c_row: int, n_rows: int, n_columns: int, keep: bool) -> None:  # fmt: skip
    """``_tile`` for any number of rows, and of columns in whole vectors."""
    lanes = VECTOR_BYTES // c.itemsize
    row = 0
    while row < n_rows:
        left = n_rows - row
        x, z = a_at + row * a_row, c_at + row * c_row
        column = 0
        while column < n_columns:
            y, w = b_at + column, z + column
            if n_columns - column >= 2 * lanes:
                if left >= ROWS:
                    _tile_full_two(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                elif left >= _HALF:
                    _tile_half_two(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                else:
                    _tile_one_two(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                column += 2 * lanes
            else:
                if left >= ROWS:
                    _tile_full_one(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                elif left >= _HALF:
                    _tile_half_one(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                else:
                    _tile_one_one(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                column += lanes
        row += ROWS if left >= ROWS else _HALF if left >= _HALF else 1


@intrinsic
def transpose_square(typing: Any, a: Any, a_at: Any, a_row: Any, n: Any, factor: Any, b: Any, b_at: Any,
                      b_row: Any) -> Any:  # fmt: skip
    """``b[c, r] = a[r, c] * factor`` for as many rows and columns as lanes; rows from ``n`` on repeat row ``n - 1``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emit(context, builder, a)
        first, target, times = e.start(a, args[0], args[1]), e.start(b, args[5], args[6]), e.splat(args[4])
        last = builder.sub(args[3], ir.Constant(I64, 1))
        rows: list[Any] = []
        for r in range(e.lanes):
            at = ir.Constant(I64, r)
            at = builder.select(builder.icmp_signed("<", at, last), at, last)
            rows.append(builder.fmul(e.load(builder.gep(first, [builder.mul(at, args[2])])), times))
        # Halves of pairs of rows change places at distance 1, then 2, 4, ...: each step swaps one bit of (row, column).
        step = 1
        while step < e.lanes:
            for r in (r for r in range(e.lanes) if not r & step):
                low = [e.lanes + (c ^ step) if c & step else c for c in range(e.lanes)]
                high = [e.lanes + c if c & step else c | step for c in range(e.lanes)]
                rows[r], rows[r | step] = e.merge(rows[r], rows[r | step], low), e.merge(rows[r], rows[r | step], high)
            step *= 2
        for r in range(e.lanes):
            e.store(rows[r], e.ahead(target, args[7], r))
        return context.get_dummy_value()

    i = types.int64
    return types.void(a, i, i, i, a.dtype, b, i, i), emit


@intrinsic
def take_next(typing: Any, counter: Any) -> Any:
    """The value of ``counter[0]``, which grows by one: each thread that asks gets another number."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = context.make_array(counter)(context, builder, args[0]).data
        return builder.atomic_rmw("add", address, ir.Constant(I64, 1), "monotonic")

    return types.int64(counter), emit


@njit
def aligned(n: int, like: Any) -> Any:
    """(n,) uninitialised, of the type of ``like``, from a cache line's start: vectors across two lines load slowly."""
    size = like.itemsize
    line = np.empty(n + 64 // size, like.dtype)
    skip = -line.ctypes.data % 64 // size
    return line[skip : skip + n]
