"""Retrieval against the whole catalogue equals a count, item by item."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from thinrow.core.errors import InputError
from thinrow.dpp import RowFilter, loader
from thinrow.models import RankerInputs
from thinrow.testing.rankers import world_config
from thinrow.testing.world import make_world
from thinrow.training import Trainer, retrieval, retrieve


def test_ranks_are_those_of_a_count_over_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, users=6, days=6)
    with world.store() as store, world.table() as table:
        trainer = Trainer(world_config("hstu_retrieval", objective="next_item"), store, table, threads=1)
        trainer.run(stop_after=3)
        spec, module = trainer.config.ranker, trainer.module
        rows = RowFilter(since_ms=world.start_ms + 3 * 86_400_000)
        monkeypatch.setattr(retrieval, "_TILE", 100)
        found = retrieve(spec, module, store, table, rows, threads=1)
        vectors: dict[int, torch.Tensor] = {}
        asked = []
        with torch.no_grad():
            for which in (RowFilter(), rows):
                options = {"projection": spec.projection, "plan": spec.plan, "rows": which, "threads": 1}
                for batch in loader(store, table, base_rows=256, block=1, **options):
                    inputs = RankerInputs(spec.inputs, batch.histories, batch.features, batch.request_ts)
                    ids, scores = module.item_ids(inputs).tolist(), module(inputs)
                    query, items = module.queries(inputs), module.items(inputs)
                    torch.testing.assert_close((query[inputs.example_of] * items).sum(1), scores)
                    for i, vector in zip(ids, items, strict=True):
                        vectors.setdefault(i, vector)
                    if which is rows:
                        labels = batch.labels["buy"].values
                        for x in range(len(inputs)):
                            mine = range(inputs.offsets[x], inputs.offsets[x + 1])
                            asked.append((query[x], [ids[c] for c in mine if labels[c]]))
            expected, best = [], []
            for query, chosen in asked:
                score = {i: float((query * v).sum()) for i, v in vectors.items()}
                rank = [1 + sum(s > score[c] for i, s in score.items() if i not in chosen) for c in chosen]
                expected += rank
                best += [1 / min(rank)] if rank else []
        assert found.catalogue == len(vectors) > 40
        assert found.rank.tolist() == expected
        assert found.requests == len(best) > 5
        assert found.mrr == pytest.approx(np.mean(best))
        assert found.hit_rate(10) == np.mean([r <= 10 for r in expected])
        with pytest.raises(InputError, match="compares no user with all items"):
            retrieve(world_config("dlrm").ranker, torch.nn.Identity(), store, table)
        with pytest.raises(InputError, match="widen the range of times"):
            retrieve(spec, module, store, table, RowFilter(until_ms=0))
