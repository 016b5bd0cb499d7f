"""What several models stand on: MLPs, heads of tasks, cross layers, and a number drawn by hash for each step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.kernels import kernel


def mlp(widths: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    """Linear layers between the widths, an activation after each."""
    return [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), activation())]


def last_layer(width: int, base_rate: float) -> nn.Linear:
    """One output that begins at the logit of ``base_rate``."""
    layer = nn.Linear(width, 1)
    nn.init.constant_(layer.bias, math.log(base_rate / (1 - base_rate)))
    return layer


class Heads(nn.Sequential):
    """An MLP for each task: (n, widths[0]) -> (n,) of one task, (n, T) of several.

    The layers of the first task are the module's own, so that a model of one task has the weights that it always had.
    """

    def __init__(
        self, widths: Sequence[int], base_rate: float, n_tasks: int = 1, activation: type[nn.Module] = nn.ReLU
    ) -> None:
        super().__init__(*mlp(widths, activation), last_layer(widths[-1], base_rate))
        self.n_layers = len(self)
        for t in range(1, n_tasks):
            self.add_module(f"task{t}", nn.Sequential(*mlp(widths, activation), last_layer(widths[-1], base_rate)))

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.children())
        first = x
        for layer in layers[: self.n_layers]:
            first = layer(first)
        rest = [layer(x) for layer in layers[self.n_layers :]]
        return torch.cat([first, *rest], dim=1) if rest else first[:, 0]


class CrossLayers(nn.Module):
    """DCN-V2 (Wang et al., arXiv 2008.13535) with weights for each of G kinds: ``x = x0 * (x @ W[g] + b[g]) + x``.

    Rows of a kind stand together, as ``jagged_linear`` takes them.
    """

    def __init__(self, width: int, layers: int, kinds: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KindLinear(width, width, kinds) for _ in range(layers))

    def forward(self, x0: Tensor, bounds: Sequence[int]) -> Tensor:
        """(n, width) -> (n, width); ``bounds`` (G + 1,) of the kinds."""
        x = x0
        for layer in self.layers:
            x = x0 * layer(x, bounds) + x
        return x


class KindLinear(nn.Module):
    """A linear layer for each of G kinds of rows, which stand together."""

    def __init__(self, n_in: int, n_out: int, kinds: int) -> None:
        super().__init__()
        bound = max(n_in, 1) ** -0.5
        self.weight = nn.Parameter(torch.empty(kinds, n_in, n_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(kinds, n_out))

    def forward(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """(n, n_in) -> (n, n_out)."""
        out: Tensor = kernel("jagged_linear")(x, bounds, self.weight, self.bias)
        return out


def check_rate(name: str, value: float) -> None:
    """Raises InputError unless it lies between 0 and 1, both exclusive."""
    if not 0 < value < 1:
        raise InputError(f"{name}={value}; it must be between 0 and 1")


def check_counts(config: object, *names: str) -> None:
    """Raises InputError unless the named values of a configuration are 1 or more."""
    for name in names:
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)}; it must be 1 or more")
