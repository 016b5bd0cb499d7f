"""The tiles of ``triton.hstu``: what one program does for a block of queries, or of keys, and one head.

Shape letters: Q queries and K keys of a tile, D and E widths. ``&`` and ``|`` only on tiles: ``and`` and ``or`` would
look at one element. A tile of keys begins at a multiple of its size in the row, so that a key's place in it, and so
the rounding of a query's sum, does not depend on who else is in the block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(x, token, head, first, n, at_head, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """(TOKENS, BLOCK) of the n tokens from ``first`` on, zeros after them and after their width."""
    i, d = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    at = (first + i).to(tl.int64)[:, None] * token + at_head * head + d[None, :]
    return tl.load(x + at, mask=(i < n)[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def _put(x, token, head, first, n, at_head, values, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """The reverse of ``_tile``."""
    i, d = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    at = (first + i).to(tl.int64)[:, None] * token + at_head * head + d[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=(i < n)[:, None] & (d < WIDTH)[None, :])


@triton.jit
def _seen(bounds, first, n, key, R: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(Q, K) whether a query sees a key, for the keys from place ``key`` of the row on."""
    i, j = tl.arange(0, QUERIES), key + tl.arange(0, KEYS)
    seen = (i < 0)[:, None] & (j < 0)[None, :]
    for r in tl.static_range(R):
        at = bounds + (first + i).to(tl.int64) * (2 * R) + 2 * r
        start, stop = tl.load(at, mask=i < n, other=0), tl.load(at + 1, mask=i < n, other=0)
        seen = seen | ((start[:, None] <= j[None, :]) & (j[None, :] < stop[:, None]))
    return seen


@triton.jit
def _bucket(places_q, places_k, tables, n_q, n_k, b, first, n, keys, n_keys, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(Q, K) buckets of bias b, counted from the first column of its table; the rule is in ``kernels.distance``."""
    i, j = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    last, bits = tl.load(tables + 3 * b + 1), tl.load(tables + 3 * b + 2)
    q = tl.load(places_q + b * n_q + first + i, mask=i < n, other=0)
    k = tl.load(places_k + b * n_k + keys + j, mask=j < n_keys, other=0)
    distance = tl.maximum(q[:, None] - k[None, :], 0)
    word = (distance + (1 << bits)).to(tl.float32).to(tl.int32, bitcast=True) >> (23 - bits)
    return tl.minimum(word - ((127 + bits) << bits), last)


@triton.jit
def _scores(q_QD, k_KD, table, n_columns, places_q, places_k, tables, n_q, n_k, scale, first, n, keys, n_keys, at_head,
            B: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """(Q, K) scores, biases added."""
    s = tl.dot(q_QD, tl.trans(k_KD), input_precision="ieee") * scale
    for b in tl.static_range(B):
        bucket = _bucket(places_q, places_k, tables, n_q, n_k, b, first, n, keys, n_keys, QUERIES, KEYS)
        s += tl.load(table + at_head * n_columns + tl.load(tables + 3 * b) + bucket)
    return s


@triton.jit
def forward(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, bounds, blocks, table, n_columns, places_q, places_k,
    tables, n_q, n_k, scale, out, out_token, out_head,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output of block ``program_id(0)`` and head ``program_id(1)``."""
    line, head = blocks + tl.program_id(0) * (4 + 2 * R), tl.program_id(1)
    first, n, row, row_keys = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    q_QD = _tile(q, q_token, q_head, first, n, head, D, QUERIES, BLOCK_D)
    sum_QE = tl.zeros((QUERIES, BLOCK_E), tl.float32)
    for r in tl.static_range(R):
        for key in range(tl.load(line + 4 + 2 * r), tl.load(line + 5 + 2 * r), KEYS):
            keys, n_keys = row + key, row_keys - key
            k_KD = _tile(k, k_token, k_head, keys, n_keys, head, D, KEYS, BLOCK_D)
            v_KE = _tile(v, v_token, v_head, keys, n_keys, head, E, KEYS, BLOCK_E)
            s_QK = _scores(q_QD, k_KD, table, n_columns, places_q, places_k, tables, n_q, n_k, scale, first, n, keys,
                           n_keys, head, B, QUERIES, KEYS)  # fmt: skip
            seen_QK = _seen(bounds, first, n, key, R, QUERIES, KEYS)
            weight_QK = tl.where(seen_QK, s_QK / (1 + tl.exp(-s_QK)), 0.0)
            sum_QE += tl.dot(weight_QK.to(v_KE.dtype), v_KE, input_precision="ieee")
    _put(out, out_token, out_head, first, n, head, sum_QE, E, QUERIES, BLOCK_E)


@triton.jit
def _slopes(s_QK, seen_QK, v_KE, dout_QE):
    """(Q, K) gradient of the scores."""
    gate = 1 / (1 + tl.exp(-s_QK))
    slope = gate + s_QK * gate * (1 - gate)
    return tl.where(seen_QK, tl.dot(dout_QE, tl.trans(v_KE), input_precision="ieee") * slope, 0.0)


@triton.jit
def backward_queries(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, bounds, blocks, table, n_columns, places_q, places_k,
    tables, n_q, n_k, scale, dout, dout_token, dout_head, dq, dq_token, dq_head, sums, NEED_TABLE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of block ``program_id(0)`` and head ``program_id(1)``, and into line (block, head) of
    ``sums`` those of the tables. A tile has few buckets, since its distances are near each other."""
    line, head = blocks + tl.program_id(0) * (4 + 2 * R), tl.program_id(1)
    first, n, row, row_keys = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    into = sums + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * n_columns
    q_QD = _tile(q, q_token, q_head, first, n, head, D, QUERIES, BLOCK_D)
    dout_QE = _tile(dout, dout_token, dout_head, first, n, head, E, QUERIES, BLOCK_E)
    sum_QD = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    for r in tl.static_range(R):
        for key in range(tl.load(line + 4 + 2 * r), tl.load(line + 5 + 2 * r), KEYS):
            keys, n_keys = row + key, row_keys - key
            k_KD = _tile(k, k_token, k_head, keys, n_keys, head, D, KEYS, BLOCK_D)
            v_KE = _tile(v, v_token, v_head, keys, n_keys, head, E, KEYS, BLOCK_E)
            s_QK = _scores(q_QD, k_KD, table, n_columns, places_q, places_k, tables, n_q, n_k, scale, first, n, keys,
                           n_keys, head, B, QUERIES, KEYS)  # fmt: skip
            seen_QK = _seen(bounds, first, n, key, R, QUERIES, KEYS)
            ds_QK = _slopes(s_QK, seen_QK, v_KE, dout_QE)
            sum_QD += tl.dot(ds_QK.to(k_KD.dtype), k_KD, input_precision="ieee")
            if NEED_TABLE:
                for b in tl.static_range(B):
                    bucket = _bucket(places_q, places_k, tables, n_q, n_k, b, first, n, keys, n_keys, QUERIES, KEYS)
                    least = tl.min(tl.min(tl.where(seen_QK, bucket, 1 << 30), axis=1), axis=0)
                    most = tl.max(tl.max(tl.where(seen_QK, bucket, -1), axis=1), axis=0)
                    for i in range(least, most + 1):
                        total = tl.sum(tl.sum(tl.where(bucket == i, ds_QK, 0.0), axis=1), axis=0)
                        # Nobody else adds to this line; an atomic addition is done once, not by each thread.
                        tl.atomic_add(into + tl.load(tables + 3 * b) + i, total)
    _put(dq, dq_token, dq_head, first, n, head, sum_QD * scale, D, QUERIES, BLOCK_D)


@triton.jit
def backward_keys(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, bounds, blocks, table, n_columns, places_q, places_k,
    tables, n_q, n_k, scale, dout, dout_token, dout_head, key_blocks, dk, dk_token, dk_head, dv, dv_token, dv_head,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of key block ``program_id(0)`` and head ``program_id(1)``."""
    mine, head = key_blocks + tl.program_id(0) * 5, tl.program_id(1)
    keys, n_keys, place = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2)
    k_KD = _tile(k, k_token, k_head, keys, n_keys, head, D, KEYS, BLOCK_D)
    v_KE = _tile(v, v_token, v_head, keys, n_keys, head, E, KEYS, BLOCK_E)
    sum_KD, sum_KE = tl.zeros((KEYS, BLOCK_D), tl.float32), tl.zeros((KEYS, BLOCK_E), tl.float32)
    for block in range(tl.load(mine + 3), tl.load(mine + 4)):
        line = blocks + block * (4 + 2 * R)
        sees = place < 0
        for r in tl.static_range(R):
            sees = sees | ((tl.load(line + 4 + 2 * r) <= place) & (place < tl.load(line + 5 + 2 * r)))
        if sees:
            first, n = tl.load(line), tl.load(line + 1)
            q_QD = _tile(q, q_token, q_head, first, n, head, D, QUERIES, BLOCK_D)
            dout_QE = _tile(dout, dout_token, dout_head, first, n, head, E, QUERIES, BLOCK_E)
            s_QK = _scores(q_QD, k_KD, table, n_columns, places_q, places_k, tables, n_q, n_k, scale, first, n, keys,
                           n_keys, head, B, QUERIES, KEYS)  # fmt: skip
            seen_QK = _seen(bounds, first, n, place, R, QUERIES, KEYS)
            ds_QK = _slopes(s_QK, seen_QK, v_KE, dout_QE)
            weight_QK = tl.where(seen_QK, s_QK / (1 + tl.exp(-s_QK)), 0.0)
            sum_KD += tl.dot(tl.trans(ds_QK).to(q_QD.dtype), q_QD, input_precision="ieee")
            sum_KE += tl.dot(tl.trans(weight_QK).to(dout_QE.dtype), dout_QE, input_precision="ieee")
    _put(dk, dk_token, dk_head, keys, n_keys, head, sum_KD * scale, D, KEYS, BLOCK_D)
    _put(dv, dv_token, dv_head, keys, n_keys, head, sum_KE, E, KEYS, BLOCK_E)
