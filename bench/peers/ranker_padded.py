"""A ranker as it is mostly served: FastAPI (Starlette where it is not installed), PyTorch, a local table, padded input.

The model is thinrow's HSTU with the same weights, written for a rectangle: a user's newest events padded to ``length``,
the candidates behind them, one mask over all tokens. The histories are given: a dict of tensors in memory, so that
neither a store is read nor anything logged. ``python -m bench.peers.ranker_padded FOLDER`` prints its port when it
listens.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Padded(nn.Module):
    """``HSTURanker`` of causal events and candidate fields alone, of weights under its names."""

    def __init__(self, weights: dict[str, Tensor], vectors: Tensor, heads: int, periods: tuple[Any, Any]) -> None:
        super().__init__()
        self.w, self.heads = weights, heads
        self.embedding = nn.Embedding(vectors.shape[0], vectors.shape[1], _weight=vectors)
        self.layers = 1 + max(int(n.split(".")[1]) for n in weights if n.startswith("layers."))
        self.periods_ms, self.periods = (torch.as_tensor(p) for p in periods)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def forward(self, items: Tensor, times: Tensor, lengths: Tensor, shown: Tensor, now: Tensor) -> Tensor:
        """(B, C) logits of ``shown`` (B, C); ``items`` and ``times`` (B, L) padded behind ``lengths`` (B,)."""
        length, n = items.shape[1], shown.shape[1]
        events = self.linear("event_token", self.embedding(items))
        candidate = F.silu(self.linear("candidate_token.0", self.embedding(shown)))
        token = self.linear("candidate_token.2", candidate)
        x = torch.cat([events, token], dim=1)
        at = torch.arange(length)
        there = at[None] < lengths[:, None]
        total = length + n
        sees = torch.zeros(len(items), total, total, dtype=torch.bool)
        sees[:, :length, :length] = (at[None, :] <= at[:, None]) & there[:, None, :]
        sees[:, length:, :length] = there[:, None, :]
        sees[:, length:, length:] = torch.eye(n, dtype=torch.bool)
        share = 1 / sees.sum(2, keepdim=True).clamp(min=1)
        position = torch.cat([at.expand(len(items), -1), lengths[:, None].expand(-1, n)], dim=1)
        when = torch.cat([times, now[:, None].expand(-1, n)], dim=1)
        turn = self.rotation(when, position)
        for i in range(self.layers):
            x = x + self.layer(i, x, turn, sees, share, length, last=i == self.layers - 1)
        out = torch.cat([x[:, length:], token], dim=2)
        return self.head(out)

    def layer(self, i: int, x: Tensor, turn: Tensor, sees: Tensor, share: Tensor, length: int, last: bool) -> Tensor:
        """What the layer adds."""
        at = f"layers.{i}"
        normed = torch.cat(
            [self.norm(f"{at}.norm_event", x[:, :length]), self.norm(f"{at}.norm_candidate", x[:, length:])], dim=1
        )
        u, v, q, k = F.silu(self.linear(f"{at}.uvqk", normed)).chunk(4, dim=2)
        width = x.shape[2] // self.heads
        v, q, k = (t.view(*t.shape[:2], self.heads, width).transpose(1, 2) for t in (v, q, k))
        q, k = rotated(q, turn), rotated(k, turn)
        scores = F.silu(q @ k.transpose(2, 3) * width**-0.5) * sees[:, None]
        mixed = (scores @ v).transpose(1, 2).flatten(2) * share
        # The last layer's events are read by nobody, and have no gate of their own.
        gate = f"{at}.gate_candidate" if last else f"{at}.gate_event"
        events = self.norm(gate, mixed[:, :length])
        gated = torch.cat([events, self.norm(f"{at}.gate_candidate", mixed[:, length:])], dim=1) * u
        return self.linear(f"{at}.out", gated)

    def rotation(self, when: Tensor, position: Tensor) -> Tensor:
        """Complex turns (B, T, pairs)."""
        cycles = torch.cat(
            [when.double()[..., None] / self.periods_ms, position.double()[..., None] / self.periods], dim=2
        )
        angle = 2 * math.pi * (cycles - cycles.floor())
        return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)

    def head(self, x: Tensor) -> Tensor:
        """Logits of the first task."""
        names = sorted({n.rsplit(".", 1)[0] for n in self.w if n.startswith("head.")})
        for name in names[:-1]:
            x = F.silu(self.linear(name, x))
        return self.linear(names[-1], x)[..., 0]


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the first pairs of dimensions of (B, H, T, D)."""
    pairs = turn.shape[2]
    head = torch.view_as_complex(x[..., : 2 * pairs].reshape(*x.shape[:-1], pairs, 2)) * turn[:, None]
    return torch.cat([torch.view_as_real(head).flatten(3), x[..., 2 * pairs :]], dim=3)


def opened(folder: Path) -> tuple[Padded, dict[int, tuple[Tensor, Tensor]]]:
    """Model and histories, as ``bench.cases.ranker`` wrote them."""
    held = torch.load(folder / "peer.pt", weights_only=True)
    model = Padded(held["weights"], held["vectors"], held["heads"], (held["periods_ms"], held["periods"]))
    return model.eval(), {int(u): (items, times) for u, items, times in held["histories"]}


def best_threads(model: Padded, histories: dict[int, tuple[Tensor, Tensor]]) -> int:
    """One thread an operation or one a processor, whichever is faster here."""
    items, times = next(iter(histories.values()))
    took: dict[int, float] = {}
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        for _ in range(6):
            since = time.perf_counter()
            with torch.inference_mode():
                model(items[None], times[None], torch.tensor([len(items)]), items[None, :500], times[-1:])
            took[threads] = min(took.get(threads, math.inf), time.perf_counter() - since)
    return min(took, key=lambda threads: took[threads])


def fastapi_app(rank: Callable[..., dict[str, Any]]) -> Any:
    """``POST /rank`` as FastAPI has it: a validated body, on a pool of threads."""
    import fastapi
    import pydantic

    class Asked(pydantic.BaseModel):
        user: int
        request_ts: int
        item: list[int]
        k: int = 10

    def answer(asked: Any) -> dict[str, Any]:
        return rank(asked.user, asked.request_ts, asked.item, asked.k)

    # Not in the source: annotations are text here, and Asked is known within this function alone.
    answer.__annotations__["asked"] = Asked
    app = fastapi.FastAPI()
    app.post("/rank")(answer)
    return app


def starlette_app(rank: Callable[..., dict[str, Any]]) -> Any:
    """The same without validation."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(await run_in_threadpool(rank, **await request.json()))

    return Starlette(routes=[Route("/rank", answer, methods=["POST"])])


def main(folder: Path) -> None:
    """Serve until the process is killed."""
    import uvicorn

    model, histories = opened(folder)
    torch.set_num_threads(best_threads(model, histories))

    def rank(user: int, request_ts: int, item: list[int], k: int = 10) -> dict[str, Any]:
        items, times = histories[user]
        with torch.inference_mode():
            shown, now = torch.tensor([item]), torch.tensor([request_ts])
            logits = model(items[None], times[None], torch.tensor([len(items)]), shown, now)
            best = torch.topk(torch.sigmoid(logits[0]), min(k, shown.shape[1]))
        return {"item": shown[0, best.indices].tolist(), "score": best.values.tolist()}

    app = fastapi_app(rank) if importlib.util.find_spec("fastapi") else starlette_app(rank)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    started = server.startup

    async def startup(sockets: Any = None) -> None:
        await started(sockets)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)

    server.startup = startup  # type: ignore[method-assign]
    server.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
