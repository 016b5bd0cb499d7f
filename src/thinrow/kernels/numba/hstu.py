"""HSTU attention in compiled loops: the tiles of ``kernels.torch.hstu``, which owns threads and autograd.

A block of up to 32 queries goes along the keys that its row shows it, 64 at a time. Scores lie with the queries side by
side, so that a vector holds one key's scores and a query is one lane::

    q (32, D) --transpose, * scale--> qT (D, 32)
    for each 64 keys:   s = k @ qT (64, 32)  ->  silu, 0 where a query does not see the key  ->  out += s^T @ v

Backward makes ``s`` again, ``g = v @ dout^T`` beside it, and adds to dv, dk and dq in the same step. The five products
are one routine, ``_multiply``. It and the elementwise steps are written as LLVM vectors, since loops in Python are not
reliably turned into them. A thread holds qT, dout^T, s and g and no larger part of the scores: 32 * (D + E + 128)
elements, 24 KiB for float32 and widths of 32, which stay in the first-level cache.

A query's sum over keys is one chain of multiply-adds in ascending order of keys, whatever block the query is in: its
output is the same bits in every batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.registry import cpu_target

from thinrow.kernels.numba.jit import intrinsic, njit
from thinrow.kernels.prefix import BLOCK

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


class Tokens(NamedTuple):
    """A (tokens, heads, width) tensor: its memory as one line, and how far a token and a head lie apart in elements.

    The elements of one token and head are neighbours.
    """

    flat: Array
    token: int
    head: int


class Work(NamedTuple):
    """What is asked: ``visible`` of the layout, tensors of one type, ``scale`` of that type, heads, the widths of q and
    v (whole vectors)."""

    visible: Ints
    q: Tokens
    k: Tokens
    v: Tokens
    scale: Any
    heads: int
    d: int
    e: int


class Grads(NamedTuple):
    """Gradients: of the output (given), of q, k and v (made), and which of the three are needed; ``one`` is 1 of the
    tensors' type. What is not needed is never touched."""

    out: Tokens
    q: Tokens
    k: Tokens
    v: Tokens
    need_q: bool
    need_k: bool
    need_v: bool
    one: Any


class _Scratch(NamedTuple):
    """Of one thread: transposed queries and output gradients, scores, their gradients, visible keys by lane, zeros."""

    qT: Any
    gT: Any
    s: Any
    g: Any
    sees: Any
    zeros: Any


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
VECTOR_BYTES, _ROWS, _FUSED = _target()
_HALF = _ROWS // 2

#: Queries side by side in a block (at most) and keys in a step.
QUERIES, _KEYS = BLOCK, 64

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class _Emit:
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
        return self.builder.gep(address, [self.builder.mul(step, ir.Constant(_I64, times))])

    def load(self, address: Any, vector: int = 0) -> Any:
        """The vector that begins ``vector`` vectors after an address."""
        return self._load(address, self.vector, self.size, vector * self.lanes)

    def load_ints(self, address: Any) -> Any:
        """As many int32 as there are lanes."""
        return self._load(address, ir.VectorType(_I32, self.lanes), 4, 0)

    def _load(self, address: Any, kind: Any, align: int, ahead: int) -> Any:
        address = self.builder.gep(address, [ir.Constant(_I64, ahead)])
        loaded = self.builder.load(self.builder.bitcast(address, kind.as_pointer()))
        loaded.align = align
        return loaded

    def store(self, value: Any, address: Any, vector: int = 0) -> None:
        """The reverse of ``load``."""
        address = self.builder.gep(address, [ir.Constant(_I64, vector * self.lanes)])
        self.builder.store(value, self.builder.bitcast(address, self.vector.as_pointer())).align = self.size

    def variable(self) -> Any:
        """Room for a vector, in a register where the compiler can."""
        return cgutils.alloca_once(self.builder, self.vector)  # type: ignore[no-untyped-call]

    def splat(self, value: Any) -> Any:
        """A scalar in every lane."""
        nothing = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        one = self.builder.insert_element(nothing, value, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, nothing, self._order([0] * self.lanes))

    def merge(self, a: Any, b: Any, order: list[int]) -> Any:
        """Lanes of ``a`` (0 on) and ``b`` (``lanes`` on) in the given order."""
        return self.builder.shuffle_vector(a, b, self._order(order))

    def _order(self, order: list[int]) -> Any:
        return ir.Constant(ir.VectorType(_I32, self.lanes), [ir.Constant(_I32, i) for i in order])

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
            e = _Emit(context, builder, a)
            body = _tile_body(e, rows, vectors)
            starts = [e.start(kind, args[i], args[i + 1]) for kind, i in ((a, 0), (b, 4), (c, 8))]
            builder.call(body, [*starts, args[2], args[3], args[6], args[7], args[10], args[11]])
            return context.get_dummy_value()

        i = types.int64
        return types.void(a, i, i, i, b, i, i, i, c, i, i, types.boolean), emit

    return tile


def _tile_body(outer: _Emit, rows: int, vectors: int) -> Any:
    """The function that computes a tile; it stays a function, since its many copies take long to compile."""
    module, address = outer.builder.module, outer.element.as_pointer()
    name = f"thinrow_hstu_tile_{rows}_{vectors}_{outer.size}"
    if name in module.globals:
        return module.globals[name]
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [address] * 3 + [_I64] * 5 + [ir.IntType(1)]), name)
    body.linkage = "linkonce_odr"
    body.attributes.add("noinline")
    e = _Emit(outer.context, ir.IRBuilder(body.append_basic_block()), outer.kind)
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
    with cgutils.for_range(b, n, intp=_I64) as loop:
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


_tile_full_two, _tile_half_two, _tile_one_two = _tile(_ROWS, 2), _tile(_HALF, 2), _tile(1, 2)
_tile_full_one, _tile_half_one, _tile_one_one = _tile(_ROWS, 1), _tile(_HALF, 1), _tile(1, 1)


@njit
def _multiply(a: Any, a_at: int, a_row: int, a_sum: int, b: Any, b_at: int, b_sum: int, n: int,
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
                if left >= _ROWS:
                    _tile_full_two(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                elif left >= _HALF:
                    _tile_half_two(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                else:
                    _tile_one_two(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                column += 2 * lanes
            else:
                if left >= _ROWS:
                    _tile_full_one(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                elif left >= _HALF:
                    _tile_half_one(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                else:
                    _tile_one_one(a, x, a_row, a_sum, b, y, b_sum, n, c, w, c_row, keep)
                column += lanes
        row += _ROWS if left >= _ROWS else _HALF if left >= _HALF else 1


@intrinsic
def _transpose_square(typing: Any, a: Any, a_at: Any, a_row: Any, n: Any, factor: Any, b: Any, b_at: Any,
                      b_row: Any) -> Any:  # fmt: skip
    """``b[c, r] = a[r, c] * factor`` for as many rows and columns as lanes; rows from ``n`` on repeat row ``n - 1``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = _Emit(context, builder, a)
        first, target, times = e.start(a, args[0], args[1]), e.start(b, args[5], args[6]), e.splat(args[4])
        last = builder.sub(args[3], ir.Constant(_I64, 1))
        rows: list[Any] = []
        for r in range(e.lanes):
            at = ir.Constant(_I64, r)
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


def _activation(masked: bool, backward: bool) -> Any:
    @intrinsic
    def activate(typing: Any, s: Any, g: Any, at: Any, scale: Any, sees: Any, lane: Any, key: Any) -> Any:
        """One vector of ``s`` becomes its silu; that of ``g``, backward, is multiplied by the derivative and ``scale``.

        Where masked, both become 0 in lanes that see no more than ``key`` keys.
        """

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = _Emit(context, builder, s)
            scores = e.start(s, args[0], args[2])
            x = e.load(scores)
            gate = e.sigmoid(x)
            value = builder.fmul(x, gate)
            kept = None
            if masked:
                bound = e.load_ints(e.start(sees, args[4], args[5]))
                kept = builder.icmp_signed(">", bound, e.splat(builder.trunc(args[6], _I32)))
            if backward:
                above = e.start(g, args[1], args[2])
                # The derivative is gate + x * gate * (1 - gate).
                slope = e.fma(builder.fsub(x, value), gate, gate)
                passed = builder.fmul(builder.fmul(e.load(above), e.splat(args[3])), slope)
                e.store(passed if kept is None else builder.select(kept, passed, e.number(0.0)), above)
            e.store(value if kept is None else builder.select(kept, value, e.number(0.0)), scores)
            return context.get_dummy_value()

        i = types.int64
        return types.void(s, g, i, s.dtype, sees, i, i), emit

    return activate


_silu, _silu_masked = _activation(False, False), _activation(True, False)
_slope, _slope_masked = _activation(False, True), _activation(True, True)


@intrinsic
def _take_next(typing: Any, counter: Any) -> Any:
    """The value of ``counter[0]``, which grows by one: each thread that asks gets another number."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = context.make_array(counter)(context, builder, args[0]).data
        return builder.atomic_rmw("add", address, ir.Constant(_I64, 1), "monotonic")

    return types.int64(counter), emit


@njit
def _aligned(n: int, like: Any) -> Any:
    """(n,) uninitialised, of the type of ``like``, from a cache line's start: vectors across two lines load slowly."""
    size = like.itemsize
    line = np.empty(n + 64 // size, like.dtype)
    skip = -line.ctypes.data % 64 // size
    return line[skip : skip + n]


@njit
def _scratch(w: Any) -> Any:
    q = w.q.flat
    pairs = _KEYS * QUERIES
    qT, gT = _aligned(w.d * QUERIES, q), _aligned(w.e * QUERIES, q)
    zeros = np.zeros(max(w.d, w.e), q.dtype)
    return _Scratch(qT, gT, _aligned(pairs, q), _aligned(pairs, q), np.empty(QUERIES, np.int32), zeros)


@njit
def _transpose(x: Any, head: int, first: int, n: int, width: int, factor: Any, out: Any) -> None:
    """``out[c, r] = factor * x[first + r, head, c]`` for n tokens; ``out`` has rows of ``QUERIES``."""
    lanes = VECTOR_BYTES // out.itemsize
    for r in range(0, n, lanes):
        at = (first + r) * x.token + head * x.head
        for c in range(0, width, lanes):
            _transpose_square(x.flat, at + c, x.token, min(n - r, lanes), factor, out, c * QUERIES + r, QUERIES)


@njit
def _fill_lanes(visible: Ints, first: int, n: int, sees: Any) -> None:
    """Visible keys of n queries, then zeros."""
    sees[:] = 0
    for i in range(n):
        sees[i] = visible[first + i]


@njit
def _products(keys: Any, head: int, first: int, n_keys: int, width: int, across: Any, n: int, out: Any) -> None:
    """``out[j, i]`` = product of key ``first + j`` and column i of ``across``; n columns, rounded up to vectors."""
    lanes = VECTOR_BYTES // out.itemsize
    at = first * keys.token + head * keys.head
    columns = (n + lanes - 1) // lanes * lanes
    _multiply(keys.flat, at, keys.token, 1, across, 0, QUERIES, width, out, 0, QUERIES, n_keys, columns, False)


@njit
def _activate(z: Any, n: int, key: int, n_keys: int, low: int, scale: Any, backward: bool) -> None:
    """``_activation`` for the keys ``[key, key + n_keys)`` of a row; all n queries see the first ``low``."""
    lanes = VECTOR_BYTES // z.s.itemsize
    for j in range(n_keys):
        seen = key + j < low
        for lane in range(0, n, lanes):
            at = j * QUERIES + lane
            if backward:
                if seen:
                    _slope(z.s, z.g, at, scale, z.sees, lane, key + j)
                else:
                    _slope_masked(z.s, z.g, at, scale, z.sees, lane, key + j)
            elif seen:
                _silu(z.s, z.g, at, scale, z.sees, lane, key + j)
            else:
                _silu_masked(z.s, z.g, at, scale, z.sees, lane, key + j)


@njit
def _sum_over_keys(s: Any, sees: Any, n: int, key: int, n_keys: int, x: Any, row: int, out: Any, query: int, head: int,
                   width: int) -> None:  # fmt: skip
    """``out[query + i] = (what it was, if key > 0) + sum over j of s[j, i] * x[row + j]``, for n queries.

    Queries go in groups, each to the last key that one of them sees.
    """
    for i in range(0, n, _ROWS):
        rows = min(_ROWS, n - i)
        seen = 0
        for lane in range(i, i + rows):
            seen = max(seen, min(sees[lane] - key, n_keys))
        if seen > 0 or key == 0:
            _multiply(s, i, 1, QUERIES, x.flat, row * x.token + head * x.head, x.token, seen,
                      out.flat, (query + i) * out.token + head * out.head, out.token, rows, width, key > 0)  # fmt: skip


@njit
def _sum_over_queries(s: Any, sees: Any, n: int, key: int, n_keys: int, x: Any, query: int, out: Any, row: int,
                      head: int, width: int) -> None:  # fmt: skip
    """``out[row + j] += sum over i of s[j, i] * x[query + i]``, for the keys ``[key, key + n_keys)`` of a row.

    Keys go in groups, each from the first query that sees one of them.
    """
    skip = 0
    for j in range(0, n_keys, _ROWS):
        while skip < n and sees[skip] <= key + j:
            skip += 1
        if skip < n:
            _multiply(s, j * QUERIES + skip, QUERIES, 1, x.flat, (query + skip) * x.token + head * x.head, x.token,
                      n - skip, out.flat, (row + j) * out.token + head * out.head, out.token,
                      min(_ROWS, n_keys - j), width, True)  # fmt: skip


@njit
def _finite(zeros: Any, x: Any, head: int, first: int, n: int, width: int) -> bool:
    """Whether no value of n tokens is NaN or infinite: zero times such a value is NaN, and so is the sum."""
    _multiply(zeros, 0, 0, 0, x.flat, first * x.token + head * x.head, x.token, n, zeros, 0, 0, 1, width, False)
    clean = True
    for c in range(width):
        clean &= zeros[c] == 0
        zeros[c] = 0
    return clean


@njit
def _attend_block(w: Any, z: Any, out: Any, head: int, first: int, n: int, row: int, low: int, high: int) -> None:
    """Output of n queries of one row, whose keys begin at ``row``; all see ``low`` of them, none more than ``high``."""
    _fill_lanes(w.visible, first, n, z.sees)
    _transpose(w.q, head, first, n, w.d, w.scale, z.qT)
    for key in range(0, max(high, 1), _KEYS):
        n_keys = min(_KEYS, high - key)
        _products(w.k, head, row + key, n_keys, w.d, z.qT, n, z.s)
        _activate(z, n, key, n_keys, low, w.scale, False)
        _sum_over_keys(z.s, z.sees, n, key, n_keys, w.v, row + key, out, first, head, w.e)


@njit
def attend(counter: Ints, tasks: Ints, blocks: Ints, w: Any, out: Any) -> None:
    """Fill ``out`` (``Tokens``) for the tasks that this thread takes.

    Queries of a block that see different keys share tiles, where the keys that one does not see enter its sum times
    zero. Where that would not be nothing, because a value is NaN or infinite, such queries are taken one by one.

    Args:
        counter: (1,) int64, 0 at the start, shared by the threads of one call.
        tasks, blocks: of ``prefix.Plan``.
        w: ``Work``.
    """
    z = _scratch(w)
    while True:
        unit = _take_next(counter)
        task, head = unit // w.heads, unit % w.heads
        if task >= len(tasks) - 1:
            break
        for b in range(tasks[task], tasks[task + 1]):
            first, n, row, low, high = blocks[b, 0], blocks[b, 1], blocks[b, 2], blocks[b, 3], blocks[b, 4]
            together = low == high or _finite(z.zeros, w.v, head, row + low, high - low, w.e)
            step = n if together else 1
            for i in range(first, first + n, step):
                if step == 1:
                    low = high = w.visible[i]
                _attend_block(w, z, out, head, i, step, row, low, high)


@njit
def _back_block(w: Any, z: Any, grads: Any, head: int, first: int, n: int, row: int, low: int, high: int,
                shift: int) -> None:  # fmt: skip
    """Gradients from n queries of a row, arguments as in ``_attend_block``; those of key j go to row ``j + shift``."""
    _fill_lanes(w.visible, first, n, z.sees)
    _transpose(w.q, head, first, n, w.d, w.scale, z.qT)
    slopes = grads.need_q or grads.need_k
    if slopes:
        _transpose(grads.out, head, first, n, w.e, grads.one, z.gT)
    for key in range(0, max(high, 1), _KEYS):
        n_keys, at = min(_KEYS, high - key), row + key
        _products(w.k, head, at, n_keys, w.d, z.qT, n, z.s)
        if slopes:
            _products(w.v, head, at, n_keys, w.e, z.gT, n, z.g)
        _activate(z, n, key, n_keys, low, w.scale, slopes)
        if grads.need_q:
            _sum_over_keys(z.g, z.sees, n, key, n_keys, w.k, at, grads.q, first, head, w.d)
        if grads.need_k:
            _sum_over_queries(z.g, z.sees, n, key, n_keys, w.q, first, grads.k, at + shift, head, w.d)
        if grads.need_v:
            _sum_over_queries(z.s, z.sees, n, key, n_keys, grads.out, first, grads.v, at + shift, head, w.e)


@njit
def attend_backward(counter: Ints, tasks: Ints, chunks: Ints, blocks: Ints, w: Any, grads: Any) -> None:
    """Fill ``grads.q``, add to ``grads.k`` and ``grads.v`` (zeros at the start), for the tasks that this thread takes.

    Args:
        counter: (1,) int64, 0 at the start, shared by the threads of one call.
        tasks, chunks, blocks: ``chunk_tasks``, ``chunks`` and ``blocks`` of ``prefix.Plan``.
        w: ``Work``. grads: ``Grads``.
    """
    z = _scratch(w)
    while True:
        unit = _take_next(counter)
        task, head = unit // w.heads, unit % w.heads
        if task >= len(tasks) - 1:
            break
        for c in range(tasks[task], tasks[task + 1]):
            shift = chunks[c, 2]
            for b in range(chunks[c, 0], chunks[c, 1]):
                first, n, row, low, high = blocks[b, 0], blocks[b, 1], blocks[b, 2], blocks[b, 3], blocks[b, 4]
                together = low == high or (
                    _finite(z.zeros, w.k, head, row + low, high - low, w.d)
                    and _finite(z.zeros, w.q, head, first, n, w.d)
                    and _finite(z.zeros, grads.out, head, first, n, w.e)
                )
                step = n if together else 1
                for i in range(first, first + n, step):
                    if step == 1:
                        low = high = w.visible[i]
                    _back_block(w, z, grads, head, i, step, row, low, high, shift)
