"""Every model: one pass for many requests is exact, nothing leaks; and sequence models are what their page says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from thinrow.core.errors import InputError
from thinrow.embeddings import DynamicTable
from thinrow.features import FeaturePlan, Hash, MultiHash, Source
from thinrow.jagged import Column, Jagged
from thinrow.models import HSTUConfig, HSTURanker, InputSpec, RankerInputs, RankerSpec
from thinrow.models.embed import InputEmbedding
from thinrow.models.items import targets_of
from thinrow.models.sim import find_events
from thinrow.models.spec import MODELS
from thinrow.testing.rankers import CONFIGS, NEXT_ITEM, Requests, memory_spec

every = pytest.mark.parametrize("name", sorted(CONFIGS))
next_item = pytest.mark.parametrize("name", NEXT_ITEM)


def exact_model(spec: RankerSpec, seed: int = 0, n_tasks: int = 1) -> tuple[nn.Module, DynamicTable]:
    """In float64, with vectors large enough to matter."""
    table = DynamicTable(spec.dim, seed=seed, init_scale=1.0, dtype=np.float64)
    torch.manual_seed(seed)
    return MODELS[spec.name][1](spec.model, spec.inputs, table, n_tasks).double(), table


def gradients(
    spec: RankerSpec, inputs: RankerInputs, *, pretrain: bool = False
) -> tuple[Tensor, list[Tensor], dict[int, np.ndarray]]:
    """Logits (or losses of next items), gradients of the weights, and gradients of the table's keys under a fixed
    random loss."""
    module, table = exact_model(spec)
    logits = module.next_item(inputs) if pretrain else module(inputs)
    weight = torch.linspace(-1, 1, len(logits), dtype=torch.float64)
    (logits * weight).sum().backward()
    rows, gradient = table.take_gradient()
    keys = table.state()["keys"][rows]
    return (
        logits.detach(),
        [p.grad for p in module.parameters() if p.grad is not None],
        dict(zip(keys.tolist(), gradient, strict=True)),
    )


@pytest.mark.parametrize(
    ("name", "pretrain"), [*((n, False) for n in sorted(CONFIGS)), *((n, True) for n in NEXT_ITEM)]
)
@pytest.mark.parametrize(("seed", "max_len", "align"), [(0, None, 1), (1, 5, 1), (2, 6, 3), (3, None, 1)])
def test_shared_and_separate_passes_are_equal_in_loss_and_gradients(
    name: str, pretrain: bool, seed: int, max_len: int | None, align: int
) -> None:
    spec = memory_spec(name)
    requests = Requests.random(seed, n_requests=24, max_len=max_len, align=align, late=0.15)
    one, many = (requests.inputs(spec, share=s) for s in (True, False))
    assert len(one.histories.passes) < len(many.histories.passes)
    logits, weights, keys = gradients(spec, one, pretrain=pretrain)
    logits_apart, weights_apart, keys_apart = gradients(spec, many, pretrain=pretrain)
    assert len(logits)
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


@pytest.mark.parametrize(("name", "seed", "max_len"), [*((n, 0, None) for n in sorted(CONFIGS)), ("mtgr", 1, 4)])
def test_an_event_changes_the_scores_of_the_requests_that_see_it_and_no_bit_of_the_others(
    name: str, seed: int, max_len: int | None
) -> None:
    requests = Requests.random(seed, n_users=2, n_requests=10, max_events=7, max_len=max_len, late=0.3)
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


@every
def test_a_candidate_changes_its_own_score_and_no_bit_of_another(name: str) -> None:
    requests = Requests.random(1)
    before = scores(name, requests)
    for i in range(0, len(before), 5):
        item = requests.candidates["item"]
        values = item.values.copy()
        values[i] += 1_000
        changed = {**requests.candidates, "item": Jagged(Column(values), item.offsets)}
        after = scores(name, replace(requests, candidates=changed))
        assert [j for j in range(len(before)) if before[j] != after[j]] == [i]


@every
def test_the_time_of_a_request_matters_to_those_that_read_it(name: str) -> None:
    requests = Requests.random(2, late=0.0)
    spec = memory_spec(name)
    module, _ = exact_model(spec)
    with torch.no_grad():
        inputs = requests.inputs(spec)
        before = module(inputs)
        inputs.request_ts = inputs.request_ts + 10 * 86_400_000
        moved = (module(inputs) != before).any()
    assert bool(moved) == (name.startswith(("hstu", "mtgr", "argus", "sim")) and name != "hstu_retrieval")


@every
def test_equal_seeds_build_equal_models_whatever_torch_drew_before(name: str) -> None:
    spec = memory_spec(name)
    first, _ = spec.build(seed=5)
    torch.rand(3)
    again, _ = spec.build(seed=5)
    other, _ = spec.build(seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@every
def test_requests_without_events_and_without_candidates(name: str) -> None:
    requests = Requests.random(0, max_events=0)
    spec = memory_spec(name)
    module, _ = spec.build()
    assert module(requests.inputs(spec)).isfinite().all()
    none = {n: Jagged(j.column.take(slice(0, 0)), np.zeros_like(j.offsets)) for n, j in requests.candidates.items()}
    assert len(module(replace(requests, candidates=none).inputs(spec))) == 0


def dense_sequence(module: HSTURanker, config: HSTUConfig, requests: Requests, inputs: RankerInputs, x: int) -> Tensor:
    """One request by the formulas of the page, one token at a time: kinds, states, and who sees whom."""
    embedded = module.inputs(inputs)
    index, offsets = requests.histories.positions()
    seen = index[offsets[x] : offsets[x + 1]]
    held = np.searchsorted(np.unique(index), seen)
    shown = range(inputs.offsets[x], inputs.offsets[x + 1])
    states = [module.event_token(torch.cat([embedded.event_EFd[e].flatten(), embedded.event_EN[e]])) for e in held]
    kinds, n = ["event"] * len(seen), len(seen)
    if module.n_user_tokens:
        states += list(module.user(embedded)[x])
        kinds += ["request"] * module.n_user_tokens
    beside = n + module.n_user_tokens
    context = [] if module.n_user_tokens else [embedded.context_XFd[x].flatten(), embedded.context_XN[x]]
    for i in shown:
        own = [embedded.candidate_CFd[i].flatten(), embedded.candidate_CN[i]]
        states.append(module.candidate_token(torch.cat([*own, *context])))
        kinds.append("candidate")
    tokens = states[beside:]
    static = config.static_events if n >= config.static_events else 0

    def visible(place: int, stop: int) -> list[int]:
        old = max(config.first, config.static_events)
        return [k for k in range(stop) if config.window is None or k < old or k >= place - config.window]

    asked = [*visible(n, n), *range(n, beside)]
    sees = [visible(j, max(j + 1, static)) for j in range(n)] + [asked] * module.n_user_tokens
    sees += [[*asked, beside + c] for c in range(len(tokens))]
    times = [int(t) for t in requests.histories.events.event_ts[seen]]
    times += [int(requests.request_ts[x])] * (len(states) - n)
    places = [*range(n), *[n] * (len(states) - n)]

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

    scale = (config.width // config.heads) ** -0.5
    for layer in module.layers:

        def of_kind(what: str, kind: str, layer: nn.Module = layer) -> nn.Module:
            found: nn.Module = getattr(layer, f"{what}_{kind if config.group_norm else 'event'}")
            return found

        made = []
        for state, kind, time_ms, place in zip(states, kinds, times, places, strict=True):
            u, v, q, k = nn.functional.silu(layer.uvqk(of_kind("norm", kind)(state))).chunk(4)
            v, q, k = (t.view(config.heads, -1) for t in (v, q, k))
            made.append((u, v, turn(q, time_ms, place), turn(k, time_ms, place)))
        moved = []
        for i, (state, kind) in enumerate(zip(states, kinds, strict=True)):
            mixed = sum(
                nn.functional.silu(scale * (made[i][2] * made[j][3]).sum(1, keepdim=True)) * made[j][1] for j in sees[i]
            )
            if kind == "event" and layer is module.layers[-1]:
                moved.append(state)
            else:
                moved.append(state + layer.out(of_kind("gate", kind)(mixed.flatten() / len(sees[i])) * made[i][0]))
        states = moved
    return torch.stack([module.head(torch.cat([s, t])[None])[0] for s, t in zip(states[beside:], tokens, strict=True)])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("hstu", {}),
        ("hstu", {"window": 0}),
        ("hstu", {"window": 2, "first": 1}),
        ("mtgr", {}),
        ("mtgr", {"window": 1, "static_events": 3}),
        ("mtgr_one_norm", {}),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_sequence_models_equal_their_formulas_one_request_at_a_time(
    name: str, changes: dict[str, int], seed: int
) -> None:
    spec = memory_spec(name)
    assert isinstance(spec.model, HSTUConfig)
    spec = replace(spec, model=replace(spec.model, dropout=0.0, **changes))  # type: ignore[arg-type]
    requests = Requests.random(seed, n_requests=8, max_events=7, late=0.2)
    module, _ = exact_model(spec)
    assert isinstance(module, HSTURanker)
    inputs = requests.inputs(spec)
    with torch.no_grad():
        found = module(inputs)
        for x in range(len(inputs)):
            if inputs.offsets[x] < inputs.offsets[x + 1]:
                expected = dense_sequence(module, spec.model, requests, inputs, x)
                torch.testing.assert_close(
                    found[inputs.offsets[x] : inputs.offsets[x + 1]], expected, rtol=1e-9, atol=1e-11
                )


@next_item
def test_what_is_predicted_reads_its_past_and_its_own_context_alone(name: str) -> None:
    """The state that predicts an event changes with those before it, not with the event's item nor with later ones."""
    spec = memory_spec(name)
    requests = Requests.random(5, n_users=2, n_requests=12, max_events=9, late=0.2)

    def queries(requests: Requests) -> Tensor:
        module, _ = spec.build(seed=3)
        kept: list[Tensor] = []
        module.query.register_forward_hook(lambda *a: kept.append(a[2]))
        inputs = requests.inputs(spec)
        with torch.no_grad():
            module.train().next_item(inputs)
        return kept[0]

    passes = requests.inputs(spec).histories.passes
    targets = targets_of(passes)
    kept_events = np.unique(requests.histories.positions()[0])
    begins = passes.offsets[np.searchsorted(passes.offsets, targets.slot, side="right") - 1]
    before = queries(requests)
    assert len(before) == len(targets.slot) > 5
    for event in range(len(kept_events)):
        columns = {**requests.histories.events.columns}
        values = columns["item"].values.copy()
        values[kept_events[event]] += 1_000
        columns["item"] = Column(values)
        events = requests.histories.events.with_columns(columns)
        after = queries(replace(requests, histories=replace(requests.histories, events=events)))
        for i in range(len(before)):
            past = passes.index[begins[i] : targets.slot[i]]
            assert torch.equal(before[i], after[i]) != (event in past)


def test_feedback_is_predicted_from_the_past_the_context_and_the_item() -> None:
    requests, spec = Requests.random(5, n_users=2, n_requests=12), memory_spec("argus_feedback")
    module, _ = exact_model(spec)
    inputs, kept = requests.inputs(spec), []
    module.feedback.register_forward_hook(lambda *a: kept.append((a[1][0], a[2])))
    module.eval()
    with torch.no_grad():
        both = module.next_item(inputs)
        module.feedback_weight = 0.0
        alone = module.next_item(inputs)
    read, logits = kept[0]
    came = inputs.event_keys[torch.from_numpy(targets_of(inputs.histories.passes).event), module.roles.feedback] % 3
    assert read.shape[1] == 2 * spec.model.width  # type: ignore[union-attr]
    expected = -logits.log_softmax(1)[torch.arange(len(came)), came]
    torch.testing.assert_close(both, alone + 0.5 * expected)


def test_contexts_of_a_kind_have_a_matrix_of_their_own() -> None:
    requests, spec = Requests.random(5), memory_spec("argus_feedback")
    module, _ = exact_model(spec)
    inputs = requests.inputs(spec)
    kind = inputs.context_keys[:, module.roles.kind[1]] % 3
    of_event = inputs.event_keys[:, module.roles.kind[0]] % 3
    with torch.no_grad():
        before = module(inputs)
        for k in range(3):
            module.context.out.weight[k, :, 0] += 1.0
            moved = before != module(inputs)
            module.context.out.weight[k, :, 0] -= 1.0
            passes = inputs.histories.passes
            for x in range(len(inputs)):
                first = passes.offsets[passes.pass_of[x]]
                seen = of_event[torch.from_numpy(passes.index[first : first + passes.visible[x]])]
                reads = bool(kind[x] == k or (seen == k).any())
                assert (moved[inputs.example_of == x] == reads).all()


def test_each_event_is_predicted_once_for_each_past() -> None:
    requests = Requests.random(5, n_users=2, n_requests=20, late=0.3)
    spec = memory_spec("hstu_retrieval")
    for share in (True, False):
        passes = requests.inputs(spec, share=share).histories.passes
        pasts = set()
        for p in range(len(passes)):
            row = passes.index[passes.offsets[p] : passes.offsets[p + 1]].tolist()
            pasts |= {tuple(row[: i + 1]) for i in range(1, len(row))}
        found = targets_of(passes)
        assert len(found.slot) == len(pasts)
        assert (passes.index[found.slot] == found.event).all()


def test_events_that_a_candidates_category_finds() -> None:
    spec = memory_spec("sim")
    requests = Requests.random(4, n_users=3, n_requests=16, late=0.2)
    inputs = requests.inputs(spec)
    search = spec.inputs.keys["history"].index("e_brand"), spec.inputs.keys["cand"].index("c_brand")
    passes = inputs.histories.passes
    for where in (search, None):
        slot, there = find_events(inputs, where, 3)
        for c, x in enumerate(inputs.example_of.tolist()):
            first = passes.offsets[passes.pass_of[x]]
            seen = range(first, first + passes.visible[x])
            like = [
                s
                for s in seen
                if where is None or inputs.event_keys[passes.index[s], where[0]] == inputs.candidate_keys[c, where[1]]
            ]
            assert slot[c][there[c]].tolist() == like[-3:]


@pytest.mark.parametrize("name", ["hstu", "mtgr", "argus", "dlrm", "moe", "wukong", "sim"])
def test_a_second_task_leaves_the_first_as_it_is(name: str) -> None:
    requests, spec = Requests.random(1), memory_spec(name)
    one, two = (exact_model(spec, n_tasks=n)[0] for n in (1, 2))
    two.load_state_dict(one.state_dict(), strict=False)
    inputs = requests.inputs(spec)
    with torch.no_grad():
        if hasattr(one, "steps"):
            one.steps, two.steps = torch.tensor(0), torch.tensor(0)
        logits = two(inputs)
        assert logits.shape == (len(inputs.example_of), 2)
        torch.testing.assert_close(logits[:, 0], one(inputs))
        assert not torch.allclose(logits[:, 0], logits[:, 1])


def test_bags_are_sums_of_their_keys() -> None:
    twice = {f"{d}_twice": MultiHash(Source(f"{d}.item"), 50, (7, 8)) for d in ("history", "cand")}
    parts = {f"{d}_{s}": Hash(Source(f"{d}.item"), 50, s) for d in ("history", "cand") for s in (7, 8)}
    requests = Requests.random(2)
    bagged, plain = (InputSpec.of(FeaturePlan(outputs)) for outputs in (twice, parts))
    assert (bagged.bags["history"], bagged.keys["history"]) == (("history_twice",), ())
    table = DynamicTable(4, init_scale=1.0)
    found = InputEmbedding(bagged, table)(
        requests.inputs(replace(memory_spec("dlrm"), plan=FeaturePlan(twice), numbers=()))
    )
    apart = InputEmbedding(plain, table)(
        requests.inputs(replace(memory_spec("dlrm"), plan=FeaturePlan(parts), numbers=()))
    )
    torch.testing.assert_close(found.event_EFd, apart.event_EFd.sum(1, keepdim=True))
    torch.testing.assert_close(found.candidate_CFd, apart.candidate_CFd.sum(1, keepdim=True))


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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mtgr", {"static_events": -1}, "static_events=-1"),
        ("mtgr", {"dropout": 1.0}, "dropout=1.0"),
        ("argus", {"contexts": ()}, "name pairs of outputs that describe a context"),
        ("argus", {"domain": None}, "domains=2 without a domain"),
        ("argus", {"temperature": 0.0}, "temperature=0.0"),
        ("argus", {"kinds": 2}, "kinds=2 without a kind"),
        ("argus", {"feedback": "e_nothing"}, "no key 'e_nothing' beside history"),
        ("argus_feedback", {"feedback_weight": 0.0}, "feedback_weight=0.0"),
        ("hstu_semi_local", {"window": -1}, "window=-1"),
        ("argus", {"contexts": (("e_where", "nowhere"),)}, "no key 'nowhere' beside ctx; there are x_city"),
        ("argus", {"items": (("e_twice", "c_twice"),)}, "'e_twice' holds several keys"),
        ("hstu_retrieval", {"items": ()}, "name pairs of outputs that describe an item"),
        ("multi_embedding", {"sets": 3}, "sets=3 does not divide the width 4"),
        ("moe", {"experts": 0}, "experts=0"),
        ("wukong", {"rank": 0}, "rank=0"),
        ("sim", {"search": ("e_item", "c_thing")}, "no key 'c_thing' beside cand"),
    ],
)
def test_bad_configurations_of_the_others(name: str, changes: dict[str, object], message: str) -> None:
    spec = memory_spec(name)
    with pytest.raises(InputError, match=message):
        replace(spec, model=replace(spec.model, **changes)).build()  # type: ignore[arg-type]
