"""Both rankers: one pass for many requests is exact, nothing leaks, and HSTU is what its page says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.embeddings import DynamicTable
from thinrow.jagged import Column, Jagged
from thinrow.models import HSTUConfig, HSTURanker, RankerInputs, RankerSpec
from thinrow.models.spec import MODELS
from thinrow.testing.rankers import CONFIGS, Requests, memory_spec

both = pytest.mark.parametrize("name", sorted(CONFIGS))


def exact_model(spec: RankerSpec, seed: int = 0) -> tuple[nn.Module, DynamicTable]:
    """In float64, with vectors large enough to matter."""
    table = DynamicTable(spec.dim, seed=seed, init_scale=1.0, dtype=np.float64)
    torch.manual_seed(seed)
    return MODELS[spec.name][1](spec.model, spec.inputs, table).double(), table


def gradients(spec: RankerSpec, inputs: RankerInputs) -> tuple[Tensor, list[Tensor], dict[int, np.ndarray]]:
    """Logits, gradients of the weights, and gradients of the table's keys under a fixed random loss."""
    module, table = exact_model(spec)
    logits = module(inputs)
    weight = torch.linspace(-1, 1, len(logits), dtype=torch.float64)
    (logits * weight).sum().backward()
    rows, gradient = table.take_gradient()
    keys = table.state()["keys"][rows]
    return (
        logits.detach(),
        [p.grad for p in module.parameters() if p.grad is not None],
        dict(zip(keys.tolist(), gradient, strict=True)),
    )


@both
@pytest.mark.parametrize(("max_len", "align"), [(None, 1), (5, 1), (6, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_shared_and_separate_passes_are_equal_in_loss_and_gradients(
    name: str, seed: int, max_len: int | None, align: int
) -> None:
    spec = memory_spec(name)
    requests = Requests.random(seed, n_requests=24, max_len=max_len, align=align, late=0.15)
    one, many = (requests.inputs(spec, share=s) for s in (True, False))
    assert len(one.histories.passes) < len(many.histories.passes)
    logits, weights, keys = gradients(spec, one)
    logits_apart, weights_apart, keys_apart = gradients(spec, many)
    torch.testing.assert_close(logits, logits_apart, rtol=1e-12, atol=1e-12)
    for a, b in zip(weights, weights_apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert keys.keys() == keys_apart.keys()
    for key, gradient in keys.items():
        np.testing.assert_allclose(gradient, keys_apart[key], rtol=1e-9, atol=1e-11)


def scores(name: str, requests: Requests) -> Tensor:
    spec = memory_spec(name)
    module, table = spec.build(seed=3)
    table_keys = torch.arange(-5, 5)  # Something is known, most is not: both kinds of keys are read.
    table.rows(table_keys.numpy(), insert=True)
    with torch.no_grad():
        # Training mode, so that every key has a vector of its own.
        return module.train()(requests.inputs(spec))


def changed_event(requests: Requests, event: int) -> Requests:
    columns = {}
    for name, column in requests.histories.events.columns.items():
        values = column.values.copy()
        values[event] += 1_000
        columns[name] = Column(values)
    return replace(
        requests, histories=replace(requests.histories, events=requests.histories.events.with_columns(columns))
    )


@both
@pytest.mark.parametrize("max_len", [None, 4])
@pytest.mark.parametrize("seed", range(3))
def test_an_event_changes_the_scores_of_the_requests_that_see_it_and_no_bit_of_the_others(
    name: str, seed: int, max_len: int | None
) -> None:
    requests = Requests.random(seed, n_users=2, n_requests=10, max_events=9, max_len=max_len, late=0.3)
    before = scores(name, requests)
    index, offsets = requests.histories.positions()
    shown = requests.candidates["item"].offsets
    for event in range(len(requests.histories.events)):
        after = scores(name, changed_event(requests, event))
        for x in range(len(requests.histories)):
            mine = slice(shown[x], shown[x + 1])
            sees = event in index[offsets[x] : offsets[x + 1]]
            same = torch.equal(before[mine], after[mine])
            assert same != (sees and shown[x] < shown[x + 1])


@both
def test_a_candidate_changes_its_own_score_and_no_bit_of_another(name: str) -> None:
    requests = Requests.random(1)
    before = scores(name, requests)
    for i in range(len(before)):
        item = requests.candidates["item"]
        values = item.values.copy()
        values[i] += 1_000
        changed = {**requests.candidates, "item": Jagged(Column(values), item.offsets)}
        after = scores(name, replace(requests, candidates=changed))
        assert [j for j in range(len(before)) if before[j] != after[j]] == [i]


@both
def test_the_time_of_a_request_matters_to_hstu_alone(name: str) -> None:
    requests = Requests.random(2, late=0.0)
    spec = memory_spec(name)
    module, _ = exact_model(spec)
    with torch.no_grad():
        inputs = requests.inputs(spec)
        before = module(inputs)
        inputs.request_ts = inputs.request_ts + 10 * 86_400_000
        moved = (module(inputs) != before).any()
    assert bool(moved) == (name == "hstu")


@both
def test_equal_seeds_build_equal_models_whatever_torch_drew_before(name: str) -> None:
    spec = memory_spec(name)
    first, _ = spec.build(seed=5)
    torch.rand(3)
    again, _ = spec.build(seed=5)
    other, _ = spec.build(seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@both
def test_requests_without_events_and_without_candidates(name: str) -> None:
    requests = Requests.random(0, max_events=0)
    spec = memory_spec(name)
    module, _ = spec.build()
    assert module(requests.inputs(spec)).isfinite().all()
    none = {n: Jagged(j.column.take(slice(0, 0)), np.zeros_like(j.offsets)) for n, j in requests.candidates.items()}
    assert len(module(replace(requests, candidates=none).inputs(spec))) == 0


def dense_hstu(module: HSTURanker, config: HSTUConfig, requests: Requests, inputs: RankerInputs, x: int) -> Tensor:
    """One request by the formulas of the page, one candidate and one event at a time."""
    embedded = module.inputs(inputs)
    index, offsets = requests.histories.positions()
    seen = index[offsets[x] : offsets[x + 1]]
    shown = range(inputs.offsets[x], inputs.offsets[x + 1])
    context = torch.cat([embedded.context_XFd[x].flatten(), embedded.context_XN[x]])

    def token(i: int) -> Tensor:
        own = torch.cat([embedded.candidate_CFd[i].flatten(), embedded.candidate_CN[i]])
        return module.candidate_token(torch.cat([own, context]))

    def turn(vector: Tensor, time_ms: int, position: int) -> Tensor:
        periods = [
            *np.geomspace(config.shortest_ms, config.longest_ms, config.time_pairs),
            *np.geomspace(4, 16_384, config.position_pairs),
        ]
        where = [time_ms] * config.time_pairs + [position] * config.position_pairs
        out = vector.clone()
        for j, (p, at) in enumerate(zip(periods, where, strict=True)):
            a, (s, t) = 2 * math.pi * at / p, (vector[:, 2 * j], vector[:, 2 * j + 1])
            out[:, 2 * j], out[:, 2 * j + 1] = s * math.cos(a) - t * math.sin(a), s * math.sin(a) + t * math.cos(a)
        return out

    def uvqk(layer: nn.Module, norm: nn.Module, state: Tensor, time_ms: int, position: int) -> list[Tensor]:
        u, v, q, k = nn.functional.silu(layer.uvqk(norm(state))).chunk(4)
        v, q, k = (t.view(config.heads, -1) for t in (v, q, k))
        return [u, v, turn(q, time_ms, position), turn(k, time_ms, position)]

    held = np.searchsorted(np.unique(index), seen)
    states = [module.event_token(torch.cat([embedded.event_EFd[e].flatten(), embedded.event_EN[e]])) for e in held]
    times = [int(t) for t in requests.histories.events.event_ts[seen]]
    tokens = {i: token(i) for i in shown}
    candidates = dict(tokens)
    scale = (config.width // config.heads) ** -0.5
    for layer in module.layers:
        of_events = [uvqk(layer, layer.norm_event, s, t, j) for j, (s, t) in enumerate(zip(states, times, strict=True))]

        def attend(q: Tensor, keys: list[list[Tensor]]) -> Tensor:
            mixed = sum(nn.functional.silu(scale * (q * k).sum(1, keepdim=True)) * v for _, v, _, k in keys)
            return mixed.flatten() / len(keys)

        for i in shown:
            own = uvqk(layer, layer.norm_candidate, candidates[i], int(requests.request_ts[x]), len(seen))
            mixed = attend(own[2], [*of_events, own])
            candidates[i] = candidates[i] + layer.out(layer.gate_candidate(mixed) * own[0])
        if layer.gate_event is not None:
            states = [
                s + layer.out(layer.gate_event(attend(of_events[j][2], of_events[: j + 1])) * of_events[j][0])
                for j, s in enumerate(states)
            ]
    return torch.stack([module.head(torch.cat([candidates[i], tokens[i]]))[0] for i in shown])


@pytest.mark.parametrize("seed", range(3))
def test_hstu_equals_its_formulas_one_request_at_a_time(seed: int) -> None:
    spec = memory_spec("hstu")
    requests = Requests.random(seed, n_requests=8, max_events=6, late=0.2)
    module, _ = exact_model(spec)
    assert isinstance(module, HSTURanker)
    assert isinstance(spec.model, HSTUConfig)
    inputs = requests.inputs(spec)
    with torch.no_grad():
        found = module(inputs)
        for x in range(len(inputs)):
            if inputs.offsets[x] < inputs.offsets[x + 1]:
                expected = dense_hstu(module, spec.model, requests, inputs, x)
                torch.testing.assert_close(
                    found[inputs.offsets[x] : inputs.offsets[x + 1]], expected, rtol=1e-9, atol=1e-11
                )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width=0"),
        ({"width": 10, "heads": 4}, "not a multiple"),
        ({"width": 8, "time_pairs": 3, "position_pairs": 2}, "lower them"),
        ({"base_rate": 1.0}, "base_rate=1.0"),
    ],
)
def test_bad_configurations(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HSTUConfig(**changes)  # type: ignore[arg-type]
