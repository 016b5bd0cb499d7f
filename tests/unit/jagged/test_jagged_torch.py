"""Tensors of shared histories against copies per example."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from thinrow.core.errors import InputError
from thinrow.jagged import Column, Jagged
from thinrow.jagged.torch import Columns, JaggedTensor, TorchHistories, tensor
from thinrow.testing.histories import random_histories


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_sum_mean_and_padded_equal_the_copies(seed: int, share: bool) -> None:
    rng = np.random.default_rng(seed)
    histories, _ = random_histories(rng, n_users=4, n_requests=40, max_len=(None, 5)[seed % 2], late=0.2)
    x = torch.randn(len(histories.events), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    seen = TorchHistories(histories, share=share)
    index, offsets = histories.positions()
    held = x[np.unique(index)]
    padded, mask = seen.padded(held, 4)
    for i in range(len(histories)):
        own = x[index[offsets[i] : offsets[i + 1]]]
        torch.testing.assert_close(seen.sum(held)[i], own.sum(0))
        torch.testing.assert_close(seen.mean(held)[i], own.mean(0) if len(own) else torch.zeros(3, dtype=torch.float64))
        newest = own[-4:]
        assert torch.equal(padded[i, : len(newest)], newest)
        assert mask[i].tolist() == [j < len(newest) for j in range(4)]
        assert not padded[i, len(newest) :].any()
    assert seen.lengths.tolist() == np.diff(offsets).tolist()


def test_the_gradient_of_a_sum_counts_the_requests_that_see_an_event() -> None:
    histories, _ = random_histories(np.random.default_rng(3), n_requests=20)
    index, _ = histories.positions()
    x = torch.zeros(len(np.unique(index)), 1, dtype=torch.float64, requires_grad=True)
    TorchHistories(histories).sum(x).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == np.bincount(index)[np.unique(index)].tolist()


def test_events_that_no_example_sees_are_left_out() -> None:
    histories, _ = random_histories(np.random.default_rng(3), n_requests=4, max_len=3)
    index, _ = histories.positions()
    assert len(np.unique(index)) < len(histories.events)
    seen = TorchHistories(histories)
    kept = histories.events.columns["item"].values[np.unique(index)]
    assert seen.columns["item"].tolist() == seen.numpy_columns["item"].values.tolist() == kept.tolist()
    assert len(seen.event_ts) == len(kept)
    with pytest.raises(KeyError, match="there are item"):
        seen.columns["price"]


def test_tensors_share_the_memory_of_their_columns() -> None:
    values = np.arange(4)
    jagged = JaggedTensor.of(Jagged(Column(values), np.array([0, 1, 4])))
    values[2] = 9
    assert jagged.values.tolist() == [0, 1, 9, 3]
    assert jagged.lengths.tolist() == [1, 3]
    assert jagged.row_of.tolist() == [0, 1, 1, 1]


def test_read_only_arrays_are_copied_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    values = np.arange(3)
    values.flags.writeable = False
    assert tensor(values).tolist() == [0, 1, 2]
    assert not recwarn.list


def test_text_has_no_tensor_and_the_error_says_what_to_do() -> None:
    columns = Columns({"brand": Column(np.zeros(1, np.int32), None, pa.array(["a"]))})
    assert list(columns) == ["brand"]
    with pytest.raises(InputError, match="'brand' is text; hash it"):
        columns["brand"]
    with pytest.raises(InputError, match=r"'brand' has no codes of integers; read it with Projection\(codes="):
        columns.codes("brand")


def test_codes_of_integers_are_values_unless_asked_for() -> None:
    column = Column(np.array([1, 0, 2], np.int32), None, pa.array([7, 9, 7]))
    columns = Columns({"item": column, "plain": Column(np.arange(2))})
    assert columns["item"].tolist() == [9, 7, 7]
    codes, entries = columns.codes("item")
    assert entries[codes].tolist() == [9, 7, 7]
    with pytest.raises(InputError, match="'plain' has no codes"):
        columns.codes("plain")
    assert JaggedTensor.of(Jagged(column, np.array([0, 1, 3]))).values.tolist() == [9, 7, 7]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_reaches_only_who_sees_it(bad: float) -> None:
    histories, _ = random_histories(np.random.default_rng(5), n_users=3, n_requests=20, max_len=6, late=0.3)
    seen = TorchHistories(histories)
    index, offsets = histories.positions()
    for at, event in enumerate(np.unique(index)):
        x = torch.ones(len(seen.event_ts), 2)
        x[at, 0] = bad
        sums, padded = seen.sum(x), seen.padded(x, 8)[0]
        for i in range(20):
            sees = event in index[offsets[i] : offsets[i + 1]]
            assert bool(sums[i, 0].isfinite()) != sees
            assert bool(padded[i].isfinite().all()) != sees


def test_values_must_be_one_an_event() -> None:
    histories, _ = random_histories(np.random.default_rng(5))
    seen = TorchHistories(histories)
    for wrong in (-1, 1):
        x = torch.ones(len(seen.event_ts) + wrong, 2)
        for work in (seen.sum, seen.mean, lambda v: seen.padded(v, 3)):
            with pytest.raises(InputError, match="give one for each unique event"):
                work(x)


def test_histories_without_events() -> None:
    histories, _ = random_histories(np.random.default_rng(0), max_events=0)
    seen = TorchHistories(histories)
    x = torch.empty(0, 2)
    assert not seen.mean(x).any()
    padded, mask = seen.padded(x, 3)
    assert padded.shape == (12, 3, 2)
    assert not mask.any()


def test_vectors_are_tensors_of_rows_and_lists_are_elements_and_offsets() -> None:
    columns = Columns(
        {
            "vector": Column(np.arange(6.0).reshape(3, 2)),
            "list": Column(np.array([5, 6, 7]), None, None, np.array([0, 2, 2, 3])),
        }
    )
    assert columns["vector"].shape == (3, 2)
    lists = columns.lists("list")
    assert lists.values.tolist() == [5, 6, 7]
    assert lists.lengths.tolist() == [2, 0, 1]
    with pytest.raises(InputError, match=r"'list' holds lists; take elements and offsets: columns.lists"):
        columns["list"]
    with pytest.raises(InputError, match=r"'vector' holds vectors of 2; take columns"):
        columns.lists("vector")
