"""Nearest items against all products: exact where it says so, nearly all of the best where it looks at a part."""

from __future__ import annotations

import numpy as np
import pytest

from thinrow.core.errors import InputError
from thinrow.serving.nearest import EXACT_BELOW, ItemIndex

pytest.importorskip("faiss")


def exact(vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k]


def world(n: int, dim: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(50, dim))
    near = [centres[rng.integers(0, 50, m)] + 0.5 * rng.normal(size=(m, dim)) for m in (n, 40)]
    vectors, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in near)
    return vectors.astype(np.float32), queries.astype(np.float32)


def test_few_items_are_found_exactly_with_their_products() -> None:
    vectors, queries = world(300)
    index = ItemIndex.build(np.arange(300) * 7, vectors)
    assert index.lists == 1
    found = index.search(queries, 10)
    assert np.array_equal(found.items.to_padded(10), exact(vectors, queries, 10) * 7)
    products = np.take_along_axis(queries @ vectors.T, exact(vectors, queries, 10), axis=1)
    np.testing.assert_allclose(found.scores.to_padded(10), products, atol=1e-5)
    assert index.search(queries, 1_000).items.lengths.tolist() == [300] * 40


def test_of_many_items_a_part_is_looked_at_and_nearly_all_of_the_best_are_found() -> None:
    vectors, queries = world(EXACT_BELOW + 2_000)
    index = ItemIndex.build(np.arange(len(vectors)), vectors)
    assert index.lists > 50
    best = exact(vectors, queries, 50)

    def recall(probe: int | None) -> float:
        rows = index.search(queries, 50, probe=probe).items.to_padded(50)
        return float(np.mean([len(np.intersect1d(a, b)) / 50 for a, b in zip(rows, best, strict=True)]))

    assert recall(None) > 0.9
    assert recall(index.lists) == 1
    assert recall(1) < recall(None)


@pytest.mark.parametrize("lists", [1, 8])
def test_items_change_and_go(lists: int) -> None:
    vectors, queries = world(300)
    index = ItemIndex.build(np.arange(300), vectors, lists=lists)
    assert index.remove(np.arange(100, 400)) == 200
    assert len(index) == 100
    index.replace(np.arange(50, 150), -vectors[50:150])
    now = np.concatenate([vectors[:50], -vectors[50:150]])
    found = index.search(queries, 10, probe=lists)
    assert np.array_equal(found.items.to_padded(10), exact(now, queries, 10))


def test_what_cannot_be_used_is_told() -> None:
    vectors, queries = world(20)
    items = np.arange(20)
    index = ItemIndex.build(items, vectors)
    broken = vectors.copy()
    broken[3, 0] = np.nan
    for wrong, match in (
        (lambda: ItemIndex.build(items[:19], vectors), "one for each"),
        (lambda: ItemIndex.build(np.zeros(20, np.int64), vectors), "item 0 is there twice"),
        (lambda: ItemIndex.build(items - 1, vectors), "item -1 is negative"),
        (lambda: ItemIndex.build(items, broken), "item 3 is not finite"),
        (lambda: ItemIndex.build(items[:0], vectors[:0]), "needs an item"),
        (lambda: ItemIndex.build(items, vectors, lists=21), "from 1 to 20"),
        (lambda: index.search(queries[:, :3], 2), "of width 16"),
        (lambda: index.search(queries, 0), "k=0"),
    ):
        with pytest.raises(InputError, match=match):
            wrong()
