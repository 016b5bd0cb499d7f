"""ItemIndex: the items whose vectors have the largest products with a request's, without looking at all of them.

Worked example, three items of width 2 and a request whose vector is (1, 0)::

    index = ItemIndex.build(np.array([7, 8, 9]), np.array([[1, 0], [0, 1], [.6, .8]], np.float32))
    found = index.search(np.array([[1, 0]], np.float32), k=2)
    found.items.to_padded(2), found.scores          # [[7, 9]], (1.0, 0.6)

What it finds are the candidates of a ranking request: ``module.queries(inputs)`` of a retrieval model against
``module.items(inputs)`` of its catalogue. Items lie in lists around centres (inverted lists of faiss, decision 078); a
search looks at the nearest lists alone, and ``probe`` says at how many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError, MissingExtraError
from thinrow.core.ragged import offsets_of
from thinrow.jagged import Column, Jagged

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

#: Below so many items all are looked at: lists would be short, and there is little to save.
EXACT_BELOW = 4_096
#: Of the lists so many are looked at where the caller does not say.
_SHARE = 8


@dataclass(frozen=True, slots=True)
class Nearest:
    """Items for X requests, those of the largest products first.

    Attributes:
        items: X rows of int64, at most k each.
        scores: X rows of float32, their products.
    """

    items: Jagged
    scores: Jagged


class ItemIndex:
    """Any number of threads may search; ``replace`` and ``remove`` need the index to themselves.

    Attributes:
        dim: width of a vector.
        lists: how many there are; 1 where every search is exact.
    """

    def __init__(self, index: Any, dim: int, lists: int) -> None:
        """Not to be called: ``build`` makes one."""
        self._index, self.dim, self.lists = index, dim, lists

    @classmethod
    def build(cls, items: Ints, vectors: Floats, *, lists: int | None = None) -> ItemIndex:
        """
        Args:
            items: (n,) int64, each once.
            vectors: (n, d) float32, finite.
            lists: None for about the square root of n, 1 below ``EXACT_BELOW`` items.

        Raises:
            InputError: an array that is not as above, no item, or ``lists`` not in [1, n].
            MissingExtraError: faiss is not installed.
        """
        _check(items, vectors, vectors.shape[1] if isinstance(vectors, np.ndarray) and vectors.ndim == 2 else 0)
        n, dim = vectors.shape
        if not n or not dim:
            raise InputError(f"vectors of {vectors.shape}; an index needs an item and a number of each")
        if lists is None:
            lists = 1 if n < EXACT_BELOW else int(math.sqrt(n))
        if not 1 <= lists <= n:
            raise InputError(f"lists={lists}; it must be from 1 to {n}, the number of items")
        faiss = _faiss()
        if lists == 1:
            index = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        else:
            index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
            # A small catalogue is no reason to warn.
            index.cp.seed, index.cp.min_points_per_centroid = 1, 1
            index.train(np.ascontiguousarray(vectors))
        found = cls(index, dim, lists)
        found._add(items, vectors)
        return found

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def replace(self, items: Ints, vectors: Floats) -> None:
        """Give ``items`` (m,) these ``vectors`` (m, d), whether they are there or new.

        Raises:
            InputError: as ``build``.
        """
        _check(items, vectors, self.dim)
        self.remove(items)
        self._add(items, vectors)

    def remove(self, items: Ints) -> int:
        """Forget ``items`` (m,) int64; returns how many of them were there."""
        return int(self._index.remove_ids(np.ascontiguousarray(items, np.int64)))

    def search(self, queries: Floats, k: int, *, probe: int | None = None) -> Nearest:
        """The ``k`` items of the largest products for each of ``queries`` (X, d) float32, fewer where there are fewer.

        Args:
            probe: lists that are looked at; None for an eighth of them, ``lists`` for an exact answer.

        Raises:
            InputError: queries of another width or with a number that is not finite, k or probe below 1.
        """
        if not isinstance(queries, np.ndarray) or queries.dtype != np.float32 or queries.ndim != 2:
            raise InputError("queries must be a two-dimensional float32 array")
        if queries.shape[1] != self.dim or not np.isfinite(queries).all():
            raise InputError(f"queries of width {queries.shape[1]}; they must be finite and of width {self.dim}")
        if k < 1 or (probe is not None and probe < 1):
            raise InputError(f"k={k}, probe={probe}; both must be 1 or more")
        k = min(k, max(1, len(self)))
        options = {}
        if self.lists > 1:
            nprobe = min(self.lists, probe or max(1, self.lists // _SHARE))
            options = {"params": _faiss().SearchParametersIVF(nprobe=nprobe)}
        scores, items = self._index.search(np.ascontiguousarray(queries), k, **options)
        there = items >= 0
        offsets = offsets_of(there.sum(1))
        return Nearest(Jagged(Column(items[there]), offsets), Jagged(Column(scores[there]), offsets))

    def _add(self, items: Ints, vectors: Floats) -> None:
        self._index.add_with_ids(np.ascontiguousarray(vectors), np.ascontiguousarray(items))


def _check(items: Any, vectors: Any, dim: int) -> None:
    if not isinstance(items, np.ndarray) or items.dtype != np.int64 or items.ndim != 1:
        raise InputError("items must be a one-dimensional int64 array")
    if not isinstance(vectors, np.ndarray) or vectors.dtype != np.float32 or vectors.shape != (len(items), dim):
        raise InputError(f"vectors must be ({len(items)}, {dim or 'd'}) float32, one for each item")
    if (items < 0).any():
        raise InputError(f"item {items[items < 0][0]} is negative; number items from 0")
    if not np.isfinite(vectors).all():
        raise InputError(f"the vector of item {items[~np.isfinite(vectors).all(1)][0]} is not finite")
    ids, counts = np.unique(items, return_counts=True)
    if (counts > 1).any():
        raise InputError(f"item {ids[counts > 1][0]} is there twice; give each one vector")


def _faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise MissingExtraError("faiss", "nearest") from error
    return faiss


__all__ = ["EXACT_BELOW", "ItemIndex", "Nearest"]
