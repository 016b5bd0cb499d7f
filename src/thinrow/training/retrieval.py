"""Retrieval against the whole catalogue: where what was chosen stands among all items, not among those that were shown.

Worked example. A catalogue of five items, a request whose scores of them are .9 .7 .5 .3 .1, and the third and fifth
were chosen. The third has rank 3. The fifth has rank 4: another chosen item does not stand in its way. So hit rate at 3
is 1/2, and the request's reciprocal rank, that of its best, 1/3.

Scores are exact: every query meets every item, in tiles of at most 2^22 scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.dpp import RowFilter
from thinrow.dpp.client import Loader, Pinnable, loader
from thinrow.examples.table import ExampleTable
from thinrow.history.archive.generation import Generation
from thinrow.models import HSTURetrieval, RankerInputs, RankerSpec

_TILE = 1 << 22


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Attributes:
    catalogue: items.
    requests: that chose something.
    rank: (P,) int64, from 1, of each chosen item; equal scores stand before it, other chosen items do not count.
    request: (P,) int64, number of its request, ascending.
    """

    catalogue: int
    requests: int
    rank: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]

    def hit_rate(self, k: int) -> float:
        """Share of what was chosen that is among the first ``k``."""
        return float((self.rank <= k).mean())

    @property
    def mrr(self) -> float:
        """Mean over requests of 1 / rank of the best."""
        _, first = np.unique(self.request, return_index=True)
        return float((1 / np.minimum.reduceat(self.rank, first)).mean())


def retrieve(
    spec: RankerSpec,
    module: nn.Module,
    store: Pinnable | Generation,
    table: ExampleTable,
    rows: RowFilter | None = None,
    *,
    catalogue: RowFilter | None = None,
    threads: int | None = None,
) -> Retrieved:
    """Rank what the requests of ``rows`` chose (their label) among all items.

    Args:
        catalogue: requests whose candidates are the catalogue, each item once; None for all of the table.

    Raises:
        InputError: the module is no retrieval model, nothing passes a filter, or nothing was chosen.
    """
    if not isinstance(module, HSTURetrieval):
        raise InputError(f"{spec.name} compares no user with all items; score what was shown (score, evaluate)")
    spec.check_label(table.example_schema)
    module.eval()
    with torch.inference_mode():
        known, items_NW = _items(spec, module, _reader(spec, store, table, catalogue, threads))
        ranks, requests, seen = [], [], 0
        for batch in _reader(spec, store, table, rows, threads):
            inputs = RankerInputs(spec.inputs, batch.histories, batch.features, batch.request_ts)
            chosen = np.flatnonzero(batch.labels[spec.label].values == 1)
            request = inputs.example_of.numpy()[chosen]
            ids = module.item_ids(inputs).numpy()[chosen]
            item = np.searchsorted(known, ids)
            there = item < len(known)
            there[there] = known[item[there]] == ids[there]
            ranks.append(_ranks(module.queries(inputs), items_NW, request[there], item[there]))
            requests.append(request[there] + seen)
            seen += len(inputs)
    rank, request = np.concatenate(ranks), np.concatenate(requests)
    if not len(rank):
        raise InputError(f"no request of {rows} chose an item of the catalogue; widen rows or catalogue")
    return Retrieved(len(known), len(np.unique(request)), rank, request)


def _reader(
    spec: RankerSpec,
    store: Pinnable | Generation,
    table: ExampleTable,
    rows: RowFilter | None,
    threads: int | None,
) -> Loader:
    rows = rows or RowFilter()
    reader = loader(
        store, table, projection=spec.projection, plan=spec.plan, threads=threads, base_rows=256, block=1, rows=rows
    )
    if not len(reader):
        raise InputError(f"no example passes {rows}; widen the range of times")
    return reader


def _items(spec: RankerSpec, module: HSTURetrieval, reader: Loader) -> tuple[npt.NDArray[np.int64], Tensor]:
    """(N,) ids, ascending, and (N, W) vectors of the items that were shown; of one shown often, those of the first."""
    known, vectors = np.zeros(0, np.int64), torch.zeros(0, module.config.width)
    for batch in reader:
        inputs = RankerInputs(spec.inputs, batch.histories, batch.features, batch.request_ts)
        ids = np.concatenate([known, module.item_ids(inputs).numpy()])
        known, first = np.unique(ids, return_index=True)
        vectors = torch.cat([vectors, module.items(inputs)])[torch.from_numpy(first)]
    return known, vectors


def _ranks(
    query_XW: Tensor, item_NW: Tensor, request: npt.NDArray[np.int64], item: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """(P,) ranks of pairs of a request (ascending) and an item that it chose."""
    rank = np.empty(len(request), np.int64)
    step = max(_TILE // max(len(item_NW), 1), 1)
    for first in range(0, len(query_XW), step):
        scores = (query_XW[first : first + step] @ item_NW.T).numpy()
        low, high = np.searchsorted(request, [first, first + step])
        for p in range(low, high):
            row = scores[request[p] - first]
            others = item[low:high][request[low:high] == request[p]]
            own = row[item[p]]
            rank[p] = 1 + int((row >= own).sum()) - int((row[others] >= own).sum())
    return rank
