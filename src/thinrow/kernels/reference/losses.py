"""Softmax losses over many items in plain torch, with all logits at once: the oracle.

One query x with x . item = (1, 2, 0) for three items, of which the first is the target::

    softmax_cross_entropy   log(e^1 + e^2 + e^0) - 1                                                    = 1.408
    sampled_softmax         negatives 1, 1, 0 (the target), of which three draws give 1.5, 1.5 and 1 on average:
                            log(e^1 + 2 * e^2 / 1.5) - 1                                                = 1.531

Shape letters: N queries, K items or negatives, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinrow.kernels.groups import check_rows


def softmax_cross_entropy(x_NW: Tensor, items_KW: Tensor, offset_K: Tensor, target_N: Tensor) -> Tensor:
    """(N,) ``log(sum over k of exp(x . items[k] + offset[k])) - (x . items[t] + offset[t])`` of each query's target t.

    Raises:
        InputError: shapes that do not fit each other.
    """
    check_rows(x_NW, items_KW, offset_K, target_N)
    logits = x_NW @ items_KW.T + offset_K
    return logits.logsumexp(1) - logits.gather(1, target_N[:, None])[:, 0]


def sampled_softmax(
    x_NW: Tensor, target_NW: Tensor, target_id_N: Tensor,
    items_KW: Tensor, item_id_K: Tensor, log_expected_K: Tensor,
) -> Tensor:  # fmt: skip
    """(N,) cross entropy of the target against K sampled negatives, corrected for how they were drawn (logQ)::

        loss = log(exp(own) + sum over k of exp(x . items[k] - log(expected[k]))) - own,    own = x . target

    over the k that are not the target itself. ``expected[k] = K * Q(id[k])`` is how often K draws from Q give that item
    (Bengio and Senecal 2008; Yi et al., "Sampling-bias-corrected neural modeling", RecSys 2019). Then the sum is, in
    expectation, that over all items but the target. The target itself is not corrected: it is there with probability
    1, not by a draw (Khrylchenko et al., "Correcting the logQ correction", arXiv 2507.09331).

    Args:
        target_NW: (N, W), the target of each query; ``target_id_N`` (N,) int64 says which item it is.
        items_KW: (K, W) negatives, the same for all queries; ``item_id_K`` (K,) int64.
        log_expected_K: (K,).

    Raises:
        InputError: shapes that do not fit each other.
    """
    check_rows(x_NW, items_KW, log_expected_K, target_id_N)
    own = (x_NW * target_NW).sum(1, keepdim=True)
    logits = x_NW @ items_KW.T - log_expected_K
    logits = logits.masked_fill(target_id_N[:, None] == item_id_K, -torch.inf)
    return torch.cat([own, logits], dim=1).logsumexp(1) - own[:, 0]
