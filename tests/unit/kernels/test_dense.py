"""Norms, grouped projections and softmax losses: equal to the reference, right in their gradients, and lean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinrow.core.errors import InputError
from thinrow.kernels import kernel, use
from thinrow.kernels.torch import losses

NAMES = ("group_layer_norm", "norm_multiply_dropout", "jagged_linear", "softmax_cross_entropy", "sampled_softmax")


def arguments(name: str, sizes: Sequence[int], width: int, seed: int) -> tuple[list[Any], dict[str, Any]]:
    """Of one kernel, float64: kinds of tokens of the given sizes; or queries and items of the first two."""
    torch.manual_seed(seed)
    n, k = sizes[0], sizes[1] if len(sizes) > 1 else 3
    rows, bounds = sum(sizes), tuple(itertools.accumulate(sizes, initial=0))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).requires_grad_()

    if name == "group_layer_norm":
        return [draw(rows, width), bounds, draw(len(sizes), width), draw(len(sizes), width)], {}
    if name == "norm_multiply_dropout":
        found = [draw(rows, width), draw(rows, width), bounds, draw(len(sizes), width), draw(len(sizes), width)]
        return found, {"token_T": torch.randint(-99, 99, (rows,)), "seed": seed * 2**61 + 7, "rate": 0.3}
    if name == "jagged_linear":
        return [draw(rows, width), bounds, draw(len(sizes), width, 3), draw(len(sizes), 3)], {}
    target = torch.randint(0, k, (n,)) if k else torch.zeros(n, dtype=torch.int64)
    if name == "softmax_cross_entropy":
        return [draw(n, width), draw(k, width), draw(k), target], {}
    return [draw(n, width), draw(n, width), target, draw(k, width), torch.randint(0, 4, (k,)), draw(k)], {}


def run(name: str, backend: str, positional: list[Any], named: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    leaves = [a for a in positional if isinstance(a, Tensor) and a.requires_grad]
    with use(backend):
        out = kernel(name)(*positional, **named)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    gradients = torch.autograd.grad((out * weight).sum(), leaves)
    return out.detach(), list(gradients)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 7, 40]), min_size=1, max_size=4),
    width=st.sampled_from([2, 5, 16]),
    seed=st.integers(0, 3),
    tile=st.sampled_from([1, 60, 1 << 20]),
)
def test_kernels_equal_the_reference_in_values_and_gradients(
    name: str, sizes: list[int], width: int, seed: int, tile: int
) -> None:
    if name == "softmax_cross_entropy" and len(sizes) > 1:
        sizes[1] = max(sizes[1], 1)
    positional, named = arguments(name, sizes, width, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_TILE", tile)
        patch.setattr(losses, "_ROWS", 6)
        out, gradients = run(name, "numba", positional, named)
    expected, expected_gradients = run(name, "reference", positional, named)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    for a, b in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_small_differences(name: str) -> None:
    positional, named = arguments(name, (3, 4), 3, 1)
    apply: Callable[..., Tensor] = kernel(name)
    assert torch.autograd.gradcheck(lambda *a: apply(*a, **named), positional)


def test_what_is_dropped_hangs_on_number_feature_and_seed_alone() -> None:
    def kept(token: list[int], seed: int, rate: float = 0.25) -> np.ndarray:
        n = len(token)
        ones, one = torch.ones(n, 64), torch.ones(1, 64)
        x = torch.randn(n, 64)
        numbers = torch.tensor(token)
        out = kernel("norm_multiply_dropout")(x, ones, (0, n), 0 * one, one, token_T=numbers, seed=seed, rate=rate)
        assert ((out - 1 / (1 - rate)).abs().minimum(out.abs()) < 1e-6).all()
        return (out != 0).numpy()

    mask = kept(list(range(500)), 3)
    assert mask.mean() == pytest.approx(0.75, abs=0.01)
    assert abs(mask.mean(0) - 0.75).max() < 0.1
    assert abs(np.corrcoef(mask.T) - np.eye(64)).max() < 0.25
    assert (kept([7, 400, 7], 3) == mask[[7, 400, 7]]).all()
    other = kept(list(range(500)), 4)
    assert (other != mask).any()
    # No layer has another one's masks, for other tokens: 64 features tell them apart.
    assert not {row.tobytes() for row in mask} & {row.tobytes() for row in other}
    assert kept([1, 2], 3, rate=0.0).all()


def test_sampled_softmax_of_all_items_once_is_the_full_softmax() -> None:
    torch.manual_seed(0)
    x, items, target = torch.randn(9, 4).double(), torch.randn(30, 4).double(), torch.randint(0, 30, (9,))
    offset = torch.zeros(30).double()
    full = kernel("softmax_cross_entropy")(x, items, offset, target)
    sampled = kernel("sampled_softmax")(x, items[target], target, items, torch.arange(30), offset)
    torch.testing.assert_close(sampled, full)
    torch.testing.assert_close(full, torch.nn.functional.cross_entropy(x @ items.T, target, reduction="none"))


def test_the_correction_makes_any_way_of_drawing_count_all_items_alike() -> None:
    """Draws by popularity: the mean of the denominators is that of the full softmax, whatever is drawn how often."""
    torch.manual_seed(1)
    x, items = torch.randn(1, 3).double(), torch.randn(6, 3).double()
    q = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.05, 0.05]).double()
    own = (x * items[2]).sum()
    denominators = []
    for a, b in itertools.product(range(6), repeat=2):
        ids = torch.tensor([a, b])
        loss = kernel("sampled_softmax")(x, items[2:3], torch.tensor([2]), items[ids], ids, (2 * q[ids]).log())
        denominators.append((loss[0] + own).exp() * q[a] * q[b])
    assert float(torch.stack(denominators).sum()) == pytest.approx(float((x @ items.T).exp().sum()))


def test_the_worked_example_of_the_losses() -> None:
    x, items = torch.ones(1, 1), torch.tensor([[1.0], [2.0], [0.0]])
    target = torch.zeros(1, dtype=torch.int64)
    full = kernel("softmax_cross_entropy")(x, items, torch.zeros(3), target)
    drawn = torch.tensor([1, 1, 0])
    sampled = kernel("sampled_softmax")(x, items[:1], target, items[drawn], drawn, torch.tensor([1.5, 1.5, 1.0]).log())
    assert (float(full), float(sampled)) == (pytest.approx(1.408, abs=1e-3), pytest.approx(1.531, abs=1e-3))
    nothing = kernel("sampled_softmax")(x, items[:1], target, items[:1], target, torch.zeros(1))
    assert float(nothing) == 0


def test_logits_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_TILE", 1 << 10)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple) else (out,):
                largest = max(largest, t.numel() if isinstance(t, Tensor) else 0)
            return out

    x, items = torch.randn(300, 4, requires_grad=True), torch.randn(400, 4, requires_grad=True)
    with Watch():
        kernel("softmax_cross_entropy")(x, items, torch.zeros(400), torch.arange(300)).sum().backward()
    assert largest <= 400 * 4 < 300 * 400


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("group_layer_norm", {1: (0, 4)}, r"bounds \(0, 4\)"),
        ("group_layer_norm", {1: (0, 9, 7)}, "ascend from 0 to T"),
        ("jagged_linear", {2: torch.zeros(2, 4, 3)}, "2 kinds of tokens of width 3"),
        ("norm_multiply_dropout", {1: torch.zeros(7, 2)}, "u must be like x"),
        ("softmax_cross_entropy", {1: torch.zeros(4, 5)}, "one width"),
        ("sampled_softmax", {5: torch.zeros(9)}, "9,"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, change: dict[int, Any], message: str) -> None:
    positional, named = arguments(name, (3, 4), 3, 0)
    for i, value in change.items():
        positional[i] = value
    for backend in ("numba", "reference"):
        with use(backend), pytest.raises(InputError, match=message):
            kernel(name)(*positional, **named)


@pytest.mark.parametrize("rate", [1.0, -0.1, math.nan])
def test_a_rate_out_of_range_is_refused(rate: float) -> None:
    positional, named = arguments("norm_multiply_dropout", (3, 4), 3, 0)
    with pytest.raises(InputError, match="dropout rate"):
        kernel("norm_multiply_dropout")(*positional, **{**named, "rate": rate})
