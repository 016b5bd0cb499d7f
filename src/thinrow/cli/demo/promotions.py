"""What a store showed in a week, and the candidates of a request: bought products and a seeded sample of the others.

A store shows thousands of products a week. They are held once, in an array sorted by (store, week) *pair*, product;
candidates are positions in it. Worked example: pair 0 shows the products in rows 4, 7 and 9 of the product table, pair
1 shows 7. Then ``product = [4, 7, 9, 7]`` and ``offsets = [0, 3, 4]``. A request of pair 0 that bought product 7 and
samples one other has the candidates [0, 1] or [1, 2], in order of product, with labels [0, 1] or [1, 0].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from thinrow.core.wrap import GOLDEN64, mix64_words

#: Location codes of displays and mailers as the data has them, least to most; "0" is not displayed, not mailed.
LOCATIONS = tuple("0123456789ACDFHJLPXZ")

_LOCATION_BITS, _PRODUCT_BITS = 5, 20
_BATCH_ROWS = 1 << 20
_CHUNK_REQUESTS = 8_192


@dataclass(frozen=True, slots=True)
class Promotions:
    """Attributes:
    offsets: (pairs + 1,) int64; pair p shows ``[offsets[p], offsets[p + 1])``.
    product: (n,) int32 row of the product table, ascending within a pair, each once.
    display: (n,) int8 code into ``LOCATIONS``: where in the store.
    mailer: (n,) int8 code into ``LOCATIONS``: where in the mailed advertisement.
    """

    offsets: npt.NDArray[np.int64]
    product: npt.NDArray[np.int32]
    display: npt.NDArray[np.int8]
    mailer: npt.NDArray[np.int8]

    def find(self, pair: npt.NDArray[np.int64], product: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(n,) position of each (pair, product), -1 where the pair does not show it or ``pair`` is -1."""
        shown = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        keys = (shown << _PRODUCT_BITS) | self.product
        wanted = (pair << _PRODUCT_BITS) | product
        at = np.searchsorted(keys, wanted)
        at[at == len(keys)] = 0
        hit = (keys[at] == wanted) & (pair >= 0) & (product >= 0) if len(keys) else np.zeros(len(at), np.bool_)
        return np.where(hit, at, -1)


def read_promotions(
    path: Path, product_ids: npt.NDArray[np.int64], pairs: npt.NDArray[np.int64], weeks: range
) -> Promotions:
    """Stream the promotions of ``pairs`` (sorted ``pair_key`` values) from the data's file, a week at a time.

    A product that a pair shows at several places counts once, with its highest (display, mailer) codes. Products that
    ``product_ids`` (ascending) lacks are left out.
    """
    row_of = np.full(int(product_ids[-1]) + 2, -1, np.int32)
    row_of[product_ids] = np.arange(len(product_ids))
    parts = [np.empty(0, np.int64)]
    for batch in _batches(path, weeks):
        key = pair_key(_numbers(batch, "store_id"), _numbers(batch, "week"))
        pair = np.searchsorted(pairs, key)
        pair[pair == len(pairs)] = 0
        product = row_of[np.minimum(_numbers(batch, "product_id"), len(row_of) - 1)]
        keep = (pairs[pair] == key) & (product >= 0)
        place = (_locations(batch, "display_location") << _LOCATION_BITS) | _locations(batch, "mailer_location")
        packed = (((pair << _PRODUCT_BITS) | product) << (2 * _LOCATION_BITS)) | place
        parts.append(packed[keep])
    keys = np.concatenate(parts)
    del parts
    keys.sort()
    where = keys >> (2 * _LOCATION_BITS)
    keys = keys[np.append(where[1:] != where[:-1], True)] if len(keys) else keys
    mask = (1 << _LOCATION_BITS) - 1
    where = keys >> (2 * _LOCATION_BITS)
    return Promotions(
        offsets=np.searchsorted(where >> _PRODUCT_BITS, np.arange(len(pairs) + 1)),
        product=(where & ((1 << _PRODUCT_BITS) - 1)).astype(np.int32),
        display=((keys >> _LOCATION_BITS) & mask).astype(np.int8),
        mailer=(keys & mask).astype(np.int8),
    )


def pair_key(store_id: npt.NDArray[np.int64], week: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One number for a (store, week)."""
    return (store_id << 6) | week


def _batches(path: Path, weeks: range) -> Iterator[pa.RecordBatch]:
    # The file is sorted by week and is one row group, so reading stops where the last week ends.
    columns = ["product_id", "store_id", "display_location", "mailer_location", "week"]
    with pq.ParquetFile(path, read_dictionary=columns[2:4]) as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
            week = _numbers(batch, "week")
            if week[0] >= weeks.stop:
                return
            if week[-1] >= weeks.start:
                yield batch


def _numbers(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = batch.column(name).to_numpy(zero_copy_only=False)
    return values


def _locations(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    array = batch.column(name)
    codes = pc.index_in(array.dictionary, pa.array(LOCATIONS)).to_numpy(zero_copy_only=False).astype(np.int64)
    located: npt.NDArray[np.int64] = codes[array.indices.to_numpy(zero_copy_only=False)]
    return located


@dataclass(frozen=True, slots=True)
class Sample:
    """Candidates of requests.

    Attributes:
        offsets: (requests + 1,) int64.
        position: (n,) int64 positions in the promotions, ascending within a request.
        bought: (n,) int8, 1 where the request bought the product.
    """

    offsets: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    bought: npt.NDArray[np.int8]


def sample_candidates(
    promotions: Promotions,
    pair: npt.NDArray[np.int64],
    bought_request: npt.NDArray[np.int64],
    bought_position: npt.NDArray[np.int64],
    n_others: npt.NDArray[np.int64],
    request_id: npt.NDArray[np.int64],
    seed: int,
) -> Sample:
    """Every bought position of each request and ``n_others`` others of its pair, drawn without replacement.

    The draw of a request depends on ``seed`` and its id alone, not on the requests beside it. A request whose pair
    shows fewer than it asks for gets all. ``(bought_request, bought_position)`` are unique, ordered by request.
    """
    picked_request, picked_position = [bought_request], [bought_position]
    for first in range(0, len(pair), _CHUNK_REQUESTS):
        rows = np.arange(first, min(first + _CHUNK_REQUESTS, len(pair)))
        lo, hi = np.searchsorted(bought_request, [rows[0], rows[-1] + 1])
        taken = _join(bought_request[lo:hi], bought_position[lo:hi])
        n_bought = np.bincount(bought_request[lo:hi] - first, minlength=len(rows))
        shown = np.diff(promotions.offsets)[pair[rows]]
        wanted = np.minimum(n_others[rows], shown - n_bought)
        n_draws = 64
        while len(rows):
            request, position, n_kept = _draw(promotions, pair, request_id, rows, wanted, taken, seed, n_draws)
            done = n_kept == wanted
            keep = done[np.searchsorted(rows, request)]
            picked_request.append(request[keep])
            picked_position.append(position[keep])
            rows, wanted, n_draws = rows[~done], wanted[~done], 4 * n_draws
    request, position = np.concatenate(picked_request), np.concatenate(picked_position)
    is_bought = np.zeros(len(request), np.int8)
    is_bought[: len(bought_request)] = 1
    order = np.argsort(_join(request, position))
    offsets = np.searchsorted(request[order], np.arange(len(pair) + 1))
    return Sample(offsets, position[order], is_bought[order])


def _draw(
    promotions: Promotions,
    pair: npt.NDArray[np.int64],
    request_id: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.int64],
    taken: npt.NDArray[np.int64],
    seed: int,
    n_draws: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first ``wanted`` distinct, not taken positions among ``n_draws`` draws of each of ``rows``."""
    start = promotions.offsets[pair[rows]][:, None]
    shown = np.diff(promotions.offsets)[pair[rows]][:, None]
    word = splitmix64(request_id[rows].astype(np.uint64) ^ splitmix64(np.array([seed], np.uint64)))
    draws = splitmix64(np.add.outer(word, np.arange(1, n_draws + 1, dtype=np.uint64)))
    position = start + (draws % shown.astype(np.uint64)).astype(np.int64)
    # Sorted by (position, draw), a repeated position follows its first draw.
    order = np.argsort(position, axis=1, kind="stable")
    ordered = np.take_along_axis(position, order, 1)
    fresh = np.ones(ordered.shape, np.bool_)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    fresh &= ~np.isin(_join(np.broadcast_to(rows[:, None], ordered.shape), ordered), taken)
    keep = np.empty_like(fresh)
    np.put_along_axis(keep, order, fresh, 1)
    keep &= np.cumsum(keep, axis=1) <= wanted[:, None]
    row, _ = np.nonzero(keep)
    return rows[row], position[keep], keep.sum(axis=1)


def _join(request: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    # 32 bits hold every position: the data has 20.9 M promotions.
    return (request << 32) | position


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """What a SplitMix64 generator in state x gives next, for each element."""
    return mix64_words(x + np.uint64(GOLDEN64))
