"""Dense ops against the same written with torch's own: time, and what memory grows by at most in forward and backward.

- ``softmax``: cross entropy of queries over all items, ``torch.nn.functional.cross_entropy`` on held logits as peer.
- ``sampled``: of queries against sampled negatives; the peer concatenates, masks and calls ``cross_entropy``.
- ``gate``: HSTU's norm, product and dropout; the peer is ``dropout(layer_norm(x) * u)``.

Memory is the peak of the process's resident set during one call, over what it was before (Linux).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Options, Result, Work, peak_bytes, rates
from thinrow.kernels import kernel


def run(options: Options) -> Result:
    """2,048 queries, 100,000 items, 8,192 negatives, width 64; 65,536 tokens of width 128. With ``quick`` 1/64."""
    cut = 64 if options.quick else 1
    rounds = options.rounds or (1 if options.quick else 3)
    shapes = {"softmax": (2_048 // cut, 100_000 // cut), "sampled": (8_192 // cut, 8_192 // cut)}
    shapes["gate"] = (65_536 // cut, 128)
    parameters = {"shapes": shapes, "rounds": rounds, "threads": torch.get_num_threads(), "torch": torch.__version__}
    result = Result("dense", parameters)
    for name, (n, k) in shapes.items():
        works = _MAKE[name](n, k)
        grown = {w: peak_bytes(work) for w, work in works.items()}
        seen = rates(works, rounds)
        result.figures[name] = {"rows_per_s": seen, "peak_bytes": grown}
        result.ratios[f"vs_torch.{name}"] = seen["thinrow"]["median"] / seen["torch"]["median"]
        result.ratios[f"vs_torch_bytes.{name}"] = grown["thinrow"] / max(grown["torch"], 1)
    return result


def _softmax(n: int, k: int) -> dict[str, Work]:
    x, items = _leaf(n, 64), _leaf(k, 64)
    offset, target = torch.zeros(k), torch.randint(0, k, (n,))
    ours = kernel("softmax_cross_entropy")
    return {
        "thinrow": _step(lambda: ours(x, items, offset, target), x, items),
        "torch": _step(lambda: F.cross_entropy(x @ items.T + offset, target, reduction="none"), x, items),
    }


def _sampled(n: int, k: int) -> dict[str, Work]:
    x, positive, items = _leaf(n, 64), _leaf(n, 64), _leaf(k, 64)
    target, ids, logq = torch.randint(0, 10_000, (n,)), torch.randint(0, 10_000, (k,)), torch.randn(k)
    ours, first = kernel("sampled_softmax"), torch.zeros(n, dtype=torch.int64)

    def plain() -> Tensor:
        others = (x @ items.T - logq).masked_fill(target[:, None] == ids, -torch.inf)
        return F.cross_entropy(torch.cat([(x * positive).sum(1, keepdim=True), others], 1), first, reduction="none")

    return {
        "thinrow": _step(lambda: ours(x, positive, target, items, ids, logq), x, positive, items),
        "torch": _step(plain, x, positive, items),
    }


def _gate(n: int, width: int) -> dict[str, Work]:
    x, u, weight, bias = _leaf(n, width), _leaf(n, width), _leaf(1, width), _leaf(1, width)
    token, ours = torch.arange(n), kernel("norm_multiply_dropout")
    return {
        "thinrow": _step(lambda: ours(x, u, (0, n), weight, bias, token_T=token, seed=1, rate=0.2), x, u, weight, bias),
        "torch": _step(lambda: F.dropout(F.layer_norm(x, [width], weight[0], bias[0]) * u, 0.2), x, u, weight, bias),
    }


_MAKE: dict[str, Callable[[int, int], dict[str, Work]]] = {"softmax": _softmax, "sampled": _sampled, "gate": _gate}


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def _step(forward: Callable[[], Tensor], *leaves: Tensor) -> Work:
    def work() -> int:
        out = forward()
        torch.autograd.grad(out.sum(), leaves)
        return len(out)

    return work
