"""A whole training job, reading included, against the same model as a PyTorch user writes it: padded rows of copies.

Users have histories of 256 to 1,024 events (geometric steps) and 20 requests each in the last half of theirs, with 32
candidates a request. Units are requests a second, from files to updated weights; both contestants take 40 requests a
step, of two users, and have two processors.

- ``thinrow``: ``Trainer`` on a store and a table of examples, whole histories, as they are.
- ``padded``: a Parquet file with a row a request that has a copy of its history, shuffled once, read by PyArrow in the
  worker of a ``DataLoader``, which pads a batch to its longest row; ``nn.Embedding`` (sparse, its ids numbered from 0
  beforehand); layers as the published PyTorch reference has them, all tokens in each, scores of all pairs by one
  batched product, SiLU, a mask multiplied in; Adam and Adagrad of torch.
- ``sorted_padded``: the same rows by user and time, as ours are read: a batch has two users, and little padding.

The weights of the two are set equal, and so are their scores of a batch, to single precision, before anything is timed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from bench.cases.shared import ranker
from bench.datagen.datasets import Work
from bench.harness import Options, Result, rates
from thinrow.core.ragged import offsets_of
from thinrow.core.units import DAY_MS, HOUR_MS
from thinrow.dpp import loader
from thinrow.examples.records import ExampleBatch, Impressions
from thinrow.examples.table import ExampleTable
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column, Jagged
from thinrow.models import RankerInputs
from thinrow.models.sequence import SequenceConfig
from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema, Trait
from thinrow.training import TrainConfig, Trainer

_ITEMS, _CANDIDATES, _K, _USERS_A_STEP = 50_000, 32, 20, 2
_EVENTS = EventSchema((ColumnSpec(1, "item", Trait.ID, "int64", "item"),))
_EXAMPLES = ExampleSchema.of(candidates={"item": "int64"}, item="item", outcomes={"click": DAY_MS})
_BATCH = _K * _USERS_A_STEP


def run(options: Options) -> Result:
    """24 users; quick: 8 with short histories."""
    quick = options.quick
    users, longest = (8, 64) if quick else (24, 1_024)
    steps = users // _USERS_A_STEP  # an epoch: users differ in length
    rounds = options.rounds or (1 if quick else 3)
    result = Result("train", {"users": users, "longest": longest, "requests_a_user": _K, "candidates": _CANDIDATES})
    result.parameters |= {"batch_rows": _BATCH, "steps": steps, "rounds": rounds, "model": repr(ranker().model)}
    result.parameters |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    with Work(options.work) as work, ExitStack() as stack:
        path = work.cached("train", {"users": users, "longest": longest}, lambda p: p.mkdir())
        if not (path / "rows.parquet").exists():
            _write(path, users, longest)
        store = stack.enter_context(HistoryStore.open(path / "store"))
        table = stack.enter_context(ExampleTable.open(path / "table"))
        config = TrainConfig(
            ranker=ranker(), epochs=1_000, base_rows=_K, block=_USERS_A_STEP, sparse_optimizer="adagrad"
        )
        trainer = Trainer(config, store, table, threads=2)
        peer = Padded(trainer.module)
        _check(trainer, peer, store, table)
        works = {"thinrow": _ours(trainer, steps)}
        for name, file in (("padded", "shuffled"), ("sorted_padded", "rows")):
            batches = _rows(path / f"{file}.parquet")
            stack.callback(batches.close)
            works[name] = _theirs(copy.deepcopy(peer), batches, steps)
        seen = rates(works, rounds)
    result.figures = {name: {m: round(v, 1) for m, v in rate.items()} for name, rate in seen.items()}
    ours = seen.pop("thinrow")["median"]
    result.ratios = {f"vs_{name}_fat_rows": ours / rate["median"] for name, rate in seen.items()}
    return result


def _write(path: Path, users: int, longest: int) -> None:
    """The store, the table, and the same requests as rows with copies."""
    rng = np.random.default_rng(0)
    lengths = np.geomspace(longest / 4, longest, users).astype(np.int64)
    user = np.repeat(np.arange(users), lengths)
    position = np.arange(len(user)) - np.repeat(offsets_of(lengths)[:-1], lengths)
    event_ts, item = 1_000 * DAY_MS + position * HOUR_MS, rng.zipf(1.2, len(user)) % _ITEMS
    seen = np.sort(rng.integers(lengths[:, None] // 2, lengths[:, None] + 1, (users, _K)), axis=1).reshape(-1)
    who = np.repeat(np.arange(users), _K)
    request_ts = 1_000 * DAY_MS + (seen - 1) * HOUR_MS + 1
    shown = rng.zipf(1.2, len(who) * _CANDIDATES) % _ITEMS
    clicked = (rng.random(len(shown)) < 0.1).astype(np.int32)
    with HistoryStore.create(path / "store", _EVENTS) as store:
        store.bulk_load(pa.table({"user_id": user, "event_ts": event_ts, "item": item}))
        store.compact(full=True)
        offsets = np.arange(len(who) + 1) * _CANDIDATES
        requests = store.snapshot(who, request_ts).requests
        impressions = Impressions.of(
            _EXAMPLES, np.arange(len(who)), requests, candidates={"item": Jagged(Column(shown), offsets)}
        )
        with ExampleTable.create(
            path / "table", event_schema=_EVENTS, example_schema=_EXAMPLES, n_buckets=store.pin().n_buckets
        ) as table:
            table.append(ExampleBatch.label(impressions, {"click": Jagged(Column(clicked), offsets)}))
            table.cluster()
    first = offsets_of(lengths)[:-1][who]
    columns = {
        "request_ts": pa.array(request_ts),
        "times": pa.array([event_ts[a : a + n] for a, n in zip(first, seen, strict=True)]),
        "items": pa.array([item[a : a + n] for a, n in zip(first, seen, strict=True)]),
        "shown": pa.array(list(shown.reshape(-1, _CANDIDATES))),
        "clicked": pa.array(list(clicked.reshape(-1, _CANDIDATES))),
    }
    rows = pa.table(columns)
    for name, table in (("shuffled", rows.take(rng.permutation(len(rows)))), ("rows", rows)):
        pq.write_table(table, path / f"{name}.parquet", compression="zstd", row_group_size=_BATCH)


class _Rows(IterableDataset[dict[str, Tensor]]):
    """Padded batches of the file, in its order, epoch after epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            for rows in pq.ParquetFile(self.path).iter_batches(_BATCH):
                yield _padded({name: rows[name] for name in rows.schema.names})


def _padded(columns: dict[str, Any]) -> dict[str, Tensor]:
    lengths = np.diff(columns["items"].offsets.to_numpy())
    there = np.arange(lengths.max(initial=1)) < lengths[:, None]
    out = {"length": lengths, "request_ts": columns["request_ts"].to_numpy()}
    for name in ("times", "items"):
        out[name] = np.zeros(there.shape, np.int64)
        out[name][there] = columns[name].values.to_numpy()
    for name in ("shown", "clicked"):
        out[name] = columns[name].values.to_numpy().reshape(len(lengths), -1)
    return {name: torch.from_numpy(np.array(values)) for name, values in out.items()}


def _rows(path: Path) -> Generator[dict[str, Tensor], None, None]:
    yield from DataLoader(_Rows(path), batch_size=None, num_workers=1, multiprocessing_context="spawn")


class Padded(nn.Module):
    """Our HSTU ranker of one key an event and a candidate, over (B, L) events and (B, C) candidates; B rows, L events
    of the longest, C candidates, T = L + C tokens, H heads, D width of a head, W width."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        self.config: SequenceConfig = ours.config
        self.items = nn.Embedding(_ITEMS, ours.inputs.embedding.table.dim, sparse=True)
        parts = ("event_token", "candidate_token", "layers", "head")
        self.event_token, self.candidate_token, self.layers, self.head = (
            copy.deepcopy(getattr(ours, n)) for n in parts
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, C) logits."""
        events_BLW, shown_BCW = (
            self.event_token(self.items(batch["items"])),
            self.candidate_token(self.items(batch["shown"])),
        )
        (_, L, _), (n_rows, C, _) = events_BLW.shape, shown_BCW.shape
        length = batch["length"][:, None]
        place = torch.arange(L).expand(n_rows, L)
        position = torch.cat([place, length.expand(n_rows, C)], dim=1)
        time = torch.cat([batch["times"], batch["request_ts"][:, None].expand(n_rows, C)], dim=1)
        mask = self._mask(length, place, C)
        share = 1 / mask.sum(2).clamp(min=1)
        turn = self._turn(time, position)
        x = torch.cat([events_BLW, shown_BCW], dim=1)
        for layer in self.layers:
            x = self._layer(layer, x, L, mask, share, turn)
        logits: Tensor = self.head(torch.cat([x[:, L:], shown_BCW], dim=2).flatten(0, 1))
        return logits.view(n_rows, C)

    @staticmethod
    def _mask(length: Tensor, place: Tensor, n_shown: int) -> Tensor:
        """(B, T, T): events see themselves and those before them, candidates the row's events and themselves."""
        n_rows, n_events = place.shape
        there = (place < length)[:, None]
        causal = (there & (torch.arange(n_events)[:, None] >= place[:1, None])).float()
        looks_back = there.float().expand(n_rows, n_shown, n_events)
        own = torch.eye(n_shown).expand(n_rows, n_shown, n_shown)
        upper = torch.cat([causal, torch.zeros(n_rows, n_events, n_shown)], dim=2)
        return torch.cat([upper, torch.cat([looks_back, own], dim=2)], dim=1)

    def _turn(self, time: Tensor, position: Tensor) -> Tensor:
        """(B, T, 1, pairs) complex turns by time and position."""
        config = self.config
        by_time = np.geomspace(config.shortest_ms, config.longest_ms, config.time_pairs)
        by_place = np.geomspace(4, 16_384, config.position_pairs)
        cycles = [x.double()[..., None] / torch.from_numpy(p) for x, p in ((time, by_time), (position, by_place))]
        angle = 2 * math.pi * torch.cat([c - c.floor() for c in cycles], dim=2)
        return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)[:, :, None]

    def _layer(self, layer: Any, x: Tensor, n_events: int, mask: Tensor, share: Tensor, turn: Tensor) -> Tensor:
        normed = torch.cat([layer.norm_event(x[:, :n_events]), layer.norm_candidate(x[:, n_events:])], dim=1)
        u, v, q, k = F.silu(layer.uvqk(normed)).chunk(4, dim=2)
        v, q, k = (t.view(*t.shape[:2], self.config.heads, -1) for t in (v, q, k))
        q, k = (self._rotated(t, turn) for t in (q, k))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
        mixed = torch.einsum("bhts,bshd->bthd", F.silu(scores) * mask[:, None], v).flatten(2) * share[:, :, None]
        # Ours has no norm there for events of the last layer, which nobody reads.
        gate_event = layer.gate_event or layer.gate_candidate
        gated = torch.cat([gate_event(mixed[:, :n_events]), layer.gate_candidate(mixed[:, n_events:])], dim=1)
        moved: Tensor = x + layer.out(gated * u)
        return moved

    @staticmethod
    def _rotated(x: Tensor, turn: Tensor) -> Tensor:
        rotated = 2 * turn.shape[3]
        pairs = torch.view_as_complex(x[..., :rotated].reshape(*x.shape[:3], -1, 2)) * turn
        return torch.cat([torch.view_as_real(pairs).flatten(3), x[..., rotated:]], dim=3)


def _check(trainer: Trainer, peer: Padded, store: HistoryStore, table: ExampleTable) -> None:
    """Give the peer our vectors, and hold its scores of a batch to ours."""
    spec = trainer.config.ranker
    for batch in loader(store, table, plan=spec.plan, projection=spec.projection, base_rows=_K, block=_USERS_A_STEP):
        inputs = RankerInputs(spec.inputs, batch.histories, batch.features, batch.request_ts)
        ours = trainer.module(inputs).detach()
        read = inputs.histories
        keys = torch.cat([inputs.event_keys[:, 0], inputs.candidate_keys[:, 0]])
        raw = torch.cat([read.columns["item"], torch.from_numpy(batch.candidates["item"].values)])
        with torch.no_grad():
            peer.items.weight[raw] = trainer.module.inputs.embedding(keys)  # type: ignore[operator,union-attr]
        arrays = {"items": batch.histories.to_jagged("item"), "times": batch.histories.to_jagged("event_ts")}
        columns: dict[str, Any] = {n: j.to_arrow() for n, j in arrays.items()}
        columns |= {"shown": batch.candidates["item"].to_arrow(), "clicked": batch.labels["click"].to_arrow()}
        padded = _padded(
            {n: c.cast(pa.list_(pa.int64())) for n, c in columns.items()} | {"request_ts": pa.array(batch.request_ts)}
        )
        torch.testing.assert_close(peer(padded).detach().flatten(), ours, rtol=1e-4, atol=1e-5)
        return


def _ours(trainer: Trainer, steps: int) -> Callable[[], int]:
    return lambda: trainer.run(stop_after=trainer.steps + steps).examples


def _theirs(model: Padded, batches: Generator[dict[str, Tensor], None, None], steps: int) -> Callable[[], int]:
    dense = torch.optim.Adam([p for n, p in model.named_parameters() if n != "items.weight"], lr=3e-3)
    sparse = torch.optim.Adagrad([model.items.weight], lr=0.05)

    def work() -> int:
        rows = 0
        for _ in range(steps):
            batch = next(batches)
            loss = F.binary_cross_entropy_with_logits(model(batch), batch["clicked"].float())
            dense.zero_grad()
            sparse.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            dense.step()
            sparse.step()
            rows += len(batch["length"])
        return rows

    return work
