"""HSTU attention in compiled loops: the tiles of ``kernels.torch.hstu``, which owns threads and autograd.

A block of up to 32 queries goes along the ranges of keys that its row shows it, 64 at a time. Scores lie with the
queries side by side, so that a vector holds one key's scores and a query is one lane::

    q (32, D) --transpose, * scale--> qT (D, 32)
    for each 64 keys:   s = k @ qT (64, 32)  ->  + biases  ->  silu, 0 where a query does not see it  ->  out += s^T @ v

Backward makes ``s`` again, ``g = v @ dout^T`` beside it, and adds to dv, dk and dq in the same step. The five products
are one routine, ``vectors.multiply``. A thread holds qT, dout^T, s and g and no larger part of the scores:
32 * (D + E + 128) elements, 24 KiB for float32 and widths of 32, which stay in the first-level cache.

A query's sum over keys is one chain of multiply-adds in ascending order of keys, whatever block the query is in: its
output is the same bits in every batch.

A bias is looked up in its table by the bucket of a distance (``kernels.distance``), in vectors too. Its gradient is a
sum for each bucket; a thread has one for each bucket and lane, so that the lanes of a vector never meet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from thinrow.kernels.cut import BLOCK
from thinrow.kernels.numba.jit import intrinsic, njit
from thinrow.kernels.numba.vectors import (
    I32,
    I64,
    ROWS,
    VECTOR_BYTES,
    Emit,
    aligned,
    multiply,
    take_next,
    transpose_square,
)

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

#: Queries side by side in a block (at most) and keys in a step.
QUERIES, _KEYS = BLOCK, 64

#: Keys after which a thread's sums for a bias are added up in double precision.
_FLUSH = 4096


class Tokens(NamedTuple):
    """A (tokens, heads, width) tensor: its memory as one line, and how far a token and a head lie apart in elements.

    The elements of one token and head are neighbours.
    """

    flat: Array
    token: int
    head: int


class Biases(NamedTuple):
    """B tables for one another after the other: ``table`` is (H, N) as one line; that of bias b has the columns
    ``[at[b], at[b + 1])``. ``q`` (B, T), ``k`` (B, S) int32 places and ``bits`` (B,): of ``distance.Distances``."""

    table: Array
    at: Ints
    q: Any
    k: Any
    bits: Ints


class Work(NamedTuple):
    """What is asked: ``bounds`` of the layout, tensors of one type, ``scale`` of that type, heads, the widths of q and
    v (whole vectors), biases."""

    bounds: Ints
    q: Tokens
    k: Tokens
    v: Tokens
    scale: Any
    heads: int
    d: int
    e: int
    biases: Biases


class Grads(NamedTuple):
    """Gradients: of the output (given), of q, k and v (made), and which of the three are needed; ``one`` is 1 of the
    tensors' type. What is not needed is never touched. ``bias`` is (chunk tasks * H, N) float64, for the gradients of
    the tables times ``scale``, or has no lines where they are not needed."""

    out: Tokens
    q: Tokens
    k: Tokens
    v: Tokens
    need_q: bool
    need_k: bool
    need_v: bool
    one: Any
    bias: Any


class _Scratch(NamedTuple):
    """Of one thread: transposed queries and output gradients, scores, their gradients, zeros; ``sees`` (below); the
    lanes' places, a line a bias; sums for each bucket of a bias and lane."""

    qT: Any
    gT: Any
    s: Any
    g: Any
    zeros: Any
    sees: Any
    places: Any
    sums: Any


#: What queries of a block see, in one int32 array, ``sees`` (each array costs a little wherever it is named): of the
#: range at hand, where the keys of a lane begin and end, and those of the lanes of a tile together; then the bounds of
#: the block's ranges, as in ``cut.Plan``.
_LO, _HI, _TILE_LO, _TILE_HI, _BOUNDS = (i * QUERIES for i in range(5))


def _activation(masked: bool, backward: bool) -> Any:
    @intrinsic
    def activate(typing: Any, s: Any, g: Any, at: Any, scale: Any, sees: Any, lane: Any, key: Any) -> Any:
        """One vector of ``s`` becomes its silu; that of ``g``, backward, is multiplied by the derivative and ``scale``.

        Where masked, both become 0 in lanes whose range does not have ``key``.
        """

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(context, builder, s)
            scores = e.start(s, args[0], args[2])
            x = e.load(scores)
            gate = e.sigmoid(x)
            value = builder.fmul(x, gate)
            kept = None
            if masked:
                at_key = e.splat(builder.trunc(args[6], I32))
                low, high = (e.load_ints(e.start(sees, args[4], builder.add(args[5], ir.Constant(I64, at))))
                             for at in (_LO, _HI))  # fmt: skip
                begun, going = builder.icmp_signed("<=", low, at_key), builder.icmp_signed(">", high, at_key)
                kept = builder.and_(begun, going)
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


def _bucket(e: Emit, kinds: tuple[Any, Any], args: Any) -> Any:
    """(lanes,) int32 from the arguments that ``_add_bias`` and ``_sum_bias`` share; the rule is in ``distance``."""
    b = e.builder
    places, lane, place, bits, last = args
    distance = b.sub(e.load_ints(e.start(kinds[0], places, lane)), e.splat(b.trunc(place, I32)))
    none = ir.Constant(distance.type, None)
    distance = b.select(b.icmp_signed(">", distance, none), distance, none)
    bits = b.trunc(bits, I32)
    shifted = b.add(distance, e.splat(b.shl(ir.Constant(I32, 1), bits)))
    word = b.bitcast(b.sitofp(shifted, ir.VectorType(ir.FloatType(), e.lanes)), distance.type)
    word = b.lshr(word, e.splat(b.sub(ir.Constant(I32, 23), bits)))
    bucket = b.sub(word, e.splat(b.shl(b.add(ir.Constant(I32, 127), bits), bits)))
    most = e.splat(b.trunc(last, I32))
    return b.select(b.icmp_signed("<", bucket, most), bucket, most)


@intrinsic
def _add_bias(typing: Any, s: Any, at: Any, places: Any, lane: Any, place: Any, bits: Any, last: Any, table: Any,
              table_at: Any) -> Any:  # fmt: skip
    """One vector of ``s`` grows by ``table[table_at + bucket]``, of lanes at ``places`` and a key at ``place``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emit(context, builder, s)
        found = e.gather(e.start(table, args[7], args[8]), _bucket(e, (places, None), args[2:7]))
        scores = e.start(s, args[0], args[1])
        e.store(builder.fadd(e.load(scores), found), scores)
        return context.get_dummy_value()

    i = types.int64
    return types.void(s, i, places, i, i, i, i, table, i), emit


@intrinsic
def _sum_bias(typing: Any, g: Any, at: Any, places: Any, lane: Any, place: Any, bits: Any, last: Any, sums: Any,
              sums_at: Any) -> Any:  # fmt: skip
    """``sums[sums_at + bucket * QUERIES + lane]`` grows by a lane of ``g``, for one vector."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emit(context, builder, g)
        bucket = _bucket(e, (places, None), args[2:7])
        index = builder.mul(bucket, e.splat(ir.Constant(I32, QUERIES)))
        index = builder.add(index, ir.Constant(index.type, [ir.Constant(I32, i) for i in range(e.lanes)]))
        first = e.start(sums, args[7], builder.add(args[8], args[3]))
        e.scatter(builder.fadd(e.gather(first, index), e.load(e.start(g, args[0], args[1]))), first, index)
        return context.get_dummy_value()

    i = types.int64
    return types.void(g, i, places, i, i, i, i, sums, i), emit


@njit
def _scratch(w: Any, n_sums: int) -> Any:
    q, n_biases = w.q.flat, len(w.biases.bits)
    pairs = _KEYS * QUERIES
    return _Scratch(
        aligned(w.d * QUERIES, q), aligned(w.e * QUERIES, q), aligned(pairs, q), aligned(pairs, q),
        np.zeros(max(w.d, w.e), q.dtype), np.zeros(_BOUNDS + 2 * w.bounds.shape[1], np.int32),
        np.zeros(n_biases * QUERIES, np.int32), np.zeros(n_sums * QUERIES, q.dtype),
    )  # fmt: skip


@njit
def _transpose(x: Any, head: int, first: int, n: int, width: int, factor: Any, out: Any) -> None:
    """``out[c, r] = factor * x[first + r, head, c]`` for n tokens; ``out`` has rows of ``QUERIES``."""
    lanes = VECTOR_BYTES // out.itemsize
    for r in range(0, n, lanes):
        at = (first + r) * x.token + head * x.head
        for c in range(0, width, lanes):
            transpose_square(x.flat, at + c, x.token, min(n - r, lanes), factor, out, c * QUERIES + r, QUERIES)


@njit
def _fill_block(blocks: Ints, b: int, sees: Any) -> bool:
    """The bounds of block b; whether each of its queries sees every key that one of them sees."""
    same = True
    for at in range(0, len(sees) - _BOUNDS, 4):
        for i in range(4):
            sees[_BOUNDS + at + i] = blocks[b, 3 + at + i]
        same &= blocks[b, 3 + at] == blocks[b, 4 + at] and blocks[b, 5 + at] == blocks[b, 6 + at]
    return same


@njit
def _fill_alone(bounds: Ints, query: int, sees: Any) -> None:
    """The bounds of a block of one query."""
    for at in range(0, len(sees) - _BOUNDS, 4):
        for i in range(4):
            sees[_BOUNDS + at + i] = bounds[query, (at + i) // 2]


@njit
def _fill_places(w: Any, z: Any, first: int, n: int) -> None:
    for b in range(len(w.biases.bits)):
        for i in range(n):
            z.places[b * QUERIES + i] = w.biases.q[b, first + i]


@njit
def _fill_lanes(bounds: Ints, sees: Any, first: int, n: int, r: int) -> None:
    """Range r of n queries, each and those of a tile's rows together; lanes after them have none."""
    at = _BOUNDS + 4 * r
    begin, end = sees[at], sees[at + 3]
    if begin == sees[at + 1] and end == sees[at + 2]:
        for lane in range(QUERIES):
            sees[_LO + lane] = sees[_TILE_LO + lane] = begin
            sees[_HI + lane] = sees[_TILE_HI + lane] = end
    else:
        for i in range(0, n, ROWS):
            least, most = int(end), 0
            for lane in range(i, min(i + ROWS, n)):
                start, stop = bounds[first + lane, 2 * r], bounds[first + lane, 2 * r + 1]
                sees[_LO + lane], sees[_HI + lane] = start, stop
                if start < stop:
                    least, most = min(least, start), max(most, stop)
            sees[_TILE_LO + i // ROWS], sees[_TILE_HI + i // ROWS] = least, most
    for lane in range(n, QUERIES):
        sees[_LO + lane] = sees[_HI + lane] = 0


@njit
def _products(keys: Any, head: int, first: int, n_keys: int, width: int, across: Any, n: int, out: Any) -> None:
    """``out[j, i]`` = product of key ``first + j`` and column i of ``across``; n columns, rounded up to vectors."""
    lanes = VECTOR_BYTES // out.itemsize
    at = first * keys.token + head * keys.head
    columns = (n + lanes - 1) // lanes * lanes
    multiply(keys.flat, at, keys.token, 1, across, 0, QUERIES, width, out, 0, QUERIES, n_keys, columns, False)


@njit
def _add_biases(w: Any, z: Any, n: int, row: int, n_keys: int, head: int) -> None:
    """Scores of n queries and the keys ``[row, row + n_keys)`` grow by all biases."""
    lanes, x = VECTOR_BYTES // z.s.itemsize, w.biases
    for b in range(len(x.bits)):
        at, last = head * x.at[-1] + x.at[b], x.at[b + 1] - x.at[b] - 1
        for j in range(n_keys):
            place = x.k[b, row + j]
            for lane in range(0, n, lanes):
                _add_bias(z.s, j * QUERIES + lane, z.places, b * QUERIES + lane, place, x.bits[b], last, x.table, at)


@njit
def _sum_biases(w: Any, z: Any, n: int, row: int, n_keys: int) -> None:
    """Add the gradients of scores to ``sums``. Lanes after the n queries hold zeros or are left out."""
    lanes, x = VECTOR_BYTES // z.s.itemsize, w.biases
    for b in range(len(x.bits)):
        last = x.at[b + 1] - x.at[b] - 1
        for j in range(n_keys):
            place = x.k[b, row + j]
            for lane in range(0, n, lanes):
                at = x.at[b] * QUERIES - b * QUERIES
                _sum_bias(z.g, j * QUERIES + lane, z.places, b * QUERIES + lane, place, x.bits[b], last, z.sums, at)


@njit
def _flush_sums(z: Any, out: Any, unit: int) -> None:
    """Move ``sums`` to line ``unit`` of ``out``, lanes in ascending order."""
    for i in range(out.shape[1]):
        total = out[unit, i]
        for lane in range(i * QUERIES, (i + 1) * QUERIES):
            total += z.sums[lane]
            z.sums[lane] = 0
        out[unit, i] = total


@njit
def _activate(s: Any, g: Any, sees: Any, n: int, key: int, n_keys: int, low: int, high: int, scale: Any,
              backward: bool) -> None:  # fmt: skip
    """``_activation`` for the keys ``[key, key + n_keys)`` of a row; all n queries see those of ``[low, high)``."""
    lanes = VECTOR_BYTES // s.itemsize
    for j in range(n_keys):
        seen = low <= key + j < high
        for lane in range(0, n, lanes):
            at = j * QUERIES + lane
            if backward:
                if seen:
                    _slope(s, g, at, scale, sees, lane, key + j)
                else:
                    _slope_masked(s, g, at, scale, sees, lane, key + j)
            elif seen:
                _silu(s, g, at, scale, sees, lane, key + j)
            else:
                _silu_masked(s, g, at, scale, sees, lane, key + j)


@njit
def _sum_over_keys(s: Any, sees: Any, n: int, key: int, n_keys: int, x: Any, row: int, out: Any, query: int, head: int,
                   width: int, keep: bool) -> None:  # fmt: skip
    """``out[query + i] = (what it was, if keep) + sum over j of s[j, i] * x[row + j]``, for n queries.

    Queries go in groups, each from the first key that one of them sees to the last.
    """
    for i in range(0, n, ROWS):
        skip, stop = max(sees[_TILE_LO + i // ROWS] - key, 0), min(sees[_TILE_HI + i // ROWS] - key, n_keys)
        if stop > skip or not keep:
            multiply(s, skip * QUERIES + i, 1, QUERIES, x.flat, (row + skip) * x.token + head * x.head, x.token,
                     stop - skip, out.flat, (query + i) * out.token + head * out.head, out.token, min(ROWS, n - i),
                     width, keep)  # fmt: skip


@njit
def _sum_over_queries(s: Any, sees: Any, n: int, key: int, n_keys: int, low: int, x: Any, query: int, out: Any,
                      row: int, head: int, width: int) -> None:  # fmt: skip
    """``out[row + j] += sum over i of s[j, i] * x[query + i]``, for the keys ``[key, key + n_keys)`` of a row.

    Keys go in groups, each from the first query that sees one of them to the last. No query starts after ``low``.
    """
    skip = 0
    for j in range(0, n_keys, ROWS):
        rows, stop = min(ROWS, n_keys - j), n
        while skip < n and sees[_HI + skip] <= key + j:
            skip += 1
        if key + j + rows <= low:
            while stop > skip and sees[_LO + stop - 1] >= key + j + rows:
                stop -= 1
        if skip < stop:
            multiply(s, j * QUERIES + skip, QUERIES, 1, x.flat, (query + skip) * x.token + head * x.head, x.token,
                     stop - skip, out.flat, (row + j) * out.token + head * out.head, out.token, rows, width,
                     True)  # fmt: skip


@njit
def _finite(zeros: Any, x: Any, head: int, first: int, n: int, width: int) -> bool:
    """Whether no value of n tokens is NaN or infinite: zero times such a value is NaN, and so is the sum."""
    if n == 0:
        return True
    multiply(zeros, 0, 0, 0, x.flat, first * x.token + head * x.head, x.token, n, zeros, 0, 0, 1, width, False)
    clean = True
    for c in range(width):
        clean &= zeros[c] == 0
        zeros[c] = 0
    return clean


@njit
def _finite_where_not_all_see(sees: Any, zeros: Any, x: Any, head: int, row: int, width: int) -> bool:
    """``_finite`` for the keys of a block that one of its queries sees and another does not."""
    for at in range(_BOUNDS, len(sees), 4):
        begin, low, high, end = sees[at], sees[at + 1], sees[at + 2], sees[at + 3]
        if low >= high:
            low = high = end
        if not (
            _finite(zeros, x, head, row + begin, low - begin, width)
            and _finite(zeros, x, head, row + high, end - high, width)
        ):
            return False
    return True


@njit
def _attend_block(w: Any, z: Any, out: Any, head: int, first: int, n: int, row: int) -> None:
    """Output of n queries of one row, whose keys begin at ``row``; ``z.sees`` has the bounds of what they see."""
    biased = len(w.biases.bits) > 0
    _transpose(w.q, head, first, n, w.d, w.scale, z.qT)
    if biased:
        _fill_places(w, z, first, n)
    keep = False
    for r in range(w.bounds.shape[1] // 2):
        at = _BOUNDS + 4 * r
        begin, low, high, end = int(z.sees[at]), z.sees[at + 1], z.sees[at + 2], int(z.sees[at + 3])
        _fill_lanes(w.bounds, z.sees, first, n, r)
        # One step at least: the first step of a block makes the output, if of zeros.
        for key in range(begin, end if keep else max(end, begin + 1), _KEYS):
            n_keys = min(_KEYS, end - key)
            _products(w.k, head, row + key, n_keys, w.d, z.qT, n, z.s)
            if biased:
                _add_biases(w, z, n, row + key, n_keys, head)
            _activate(z.s, z.g, z.sees, n, key, n_keys, low, high, w.scale, False)
            _sum_over_keys(z.s, z.sees, n, key, n_keys, w.v, row + key, out, first, head, w.e, keep)
            keep = True


@njit
def attend(counter: Ints, tasks: Ints, blocks: Ints, w: Any, out: Any) -> None:
    """Fill ``out`` (``Tokens``) for the tasks that this thread takes.

    Queries of a block that see different keys share tiles, where the keys that one does not see enter its sum times
    zero. Where that would not be nothing, because a value is NaN or infinite, such queries are taken one by one.

    Args:
        counter: (1,) int64, 0 at the start, shared by the threads of one call.
        tasks, blocks: of ``cut.Plan``.
        w: ``Work``.
    """
    z = _scratch(w, 0)
    while True:
        unit = take_next(counter)
        task, head = unit // w.heads, unit % w.heads
        if task >= len(tasks) - 1:
            break
        for b in range(tasks[task], tasks[task + 1]):
            first, n, row = blocks[b, 0], blocks[b, 1], blocks[b, 2]
            same = _fill_block(blocks, b, z.sees)
            if same or _finite_where_not_all_see(z.sees, z.zeros, w.v, head, row, w.e):
                _attend_block(w, z, out, head, first, n, row)
            else:
                for i in range(first, first + n):
                    _fill_alone(w.bounds, i, z.sees)
                    _attend_block(w, z, out, head, i, 1, row)


@njit
def _back_block(w: Any, z: Any, grads: Any, head: int, first: int, n: int, row: int, shift: int) -> int:
    """Gradients from n queries of a row, arguments as in ``_attend_block``; those of key j go to row ``j + shift``.

    How many keys it took.
    """
    biased = len(w.biases.bits) > 0
    _transpose(w.q, head, first, n, w.d, w.scale, z.qT)
    if biased:
        _fill_places(w, z, first, n)
    bias = len(grads.bias) > 0
    slopes = grads.need_q or grads.need_k or bias
    # Lanes after the n queries must hold zeros where a bias sums them.
    whole = not bias or n % (VECTOR_BYTES // z.s.itemsize) == 0
    if slopes:
        _transpose(grads.out, head, first, n, w.e, grads.one, z.gT)
    taken = 0
    for r in range(w.bounds.shape[1] // 2):
        at = _BOUNDS + 4 * r
        begin, low, high, end = int(z.sees[at]), z.sees[at + 1], z.sees[at + 2], int(z.sees[at + 3])
        _fill_lanes(w.bounds, z.sees, first, n, r)
        for key in range(begin, end if taken else max(end, begin + 1), _KEYS):
            n_keys, at = min(_KEYS, end - key), row + key
            _products(w.k, head, at, n_keys, w.d, z.qT, n, z.s)
            if biased:
                _add_biases(w, z, n, at, n_keys, head)
            if slopes:
                _products(w.v, head, at, n_keys, w.e, z.gT, n, z.g)
            _activate(z.s, z.g, z.sees, n, key, n_keys, low, high if whole else low, w.scale, slopes)
            if grads.need_q:
                _sum_over_keys(z.g, z.sees, n, key, n_keys, w.k, at, grads.q, first, head, w.d, taken > 0)
            if grads.need_k:
                _sum_over_queries(z.g, z.sees, n, key, n_keys, low, w.q, first, grads.k, at + shift, head, w.d)
            if grads.need_v:
                _sum_over_queries(z.s, z.sees, n, key, n_keys, low, grads.out, first, grads.v, at + shift, head, w.e)
            if bias:
                _sum_biases(w, z, n, at, n_keys)
            taken += _KEYS
    return taken


@njit
def attend_backward(counter: Ints, tasks: Ints, chunks: Ints, blocks: Ints, w: Any, grads: Any) -> None:
    """Fill ``grads.q``, add to ``grads.k``, ``grads.v`` and ``grads.bias`` (zeros at the start), for the tasks that
    this thread takes.

    Args:
        counter: (1,) int64, 0 at the start, shared by the threads of one call.
        tasks, chunks, blocks: ``chunk_tasks``, ``chunks`` and ``blocks`` of ``cut.Plan``.
        w: ``Work``. grads: ``Grads``.
    """
    bias = len(grads.bias) > 0
    z = _scratch(w, grads.bias.shape[1] if bias else 0)
    while True:
        unit = take_next(counter)
        task, head = unit // w.heads, unit % w.heads
        if task >= len(tasks) - 1:
            break
        taken = 0
        for c in range(tasks[task], tasks[task + 1]):
            shift = chunks[c, 2]
            for b in range(chunks[c, 0], chunks[c, 1]):
                first, n, row = blocks[b, 0], blocks[b, 1], blocks[b, 2]
                together = _fill_block(blocks, b, z.sees) or (
                    _finite_where_not_all_see(z.sees, z.zeros, w.k, head, row, w.d)
                    and _finite(z.zeros, w.q, head, first, n, w.d)
                    and _finite(z.zeros, grads.out, head, first, n, w.e)
                )
                step = n if together else 1
                for i in range(first, first + n, step):
                    if step < n:
                        _fill_alone(w.bounds, i, z.sees)
                    taken += _back_block(w, z, grads, head, i, step, row, shift)
                if bias and taken >= _FLUSH:
                    _flush_sums(z, grads.bias, unit)
                    taken = 0
        if bias:
            _flush_sums(z, grads.bias, unit)
