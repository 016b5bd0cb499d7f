"""A compiled model with tables in it does what the model does: the look-ups run as they are, the rest is compiled."""

import numpy as np
import pytest
import torch

from thinrow.embeddings import (
    DeviceTable,
    DynamicTable,
    Embedding,
    EmbeddingBag,
    GroupEmbedding,
    SparseAdagrad,
    TableGroup,
)
from thinrow.kernels import use


class Model(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(0)
        self.group, self.bag = GroupEmbedding(TableGroup(("a",)), Embedding(table)), EmbeddingBag(table)
        self.linear = torch.nn.Linear(6, 1)

    def forward(self, keys, bounds):
        vectors = self.group({"a": keys})["a"].tanh() * 2
        bags = self.bag(keys, bounds)
        return self.linear(torch.cat([vectors.mean(0), bags.sin().sum(0)])).square().sum()


def trained(table, run):
    model = Model(table)
    optimizer, losses, run = SparseAdagrad(table, lr=0.1), [], run(model)
    for step in range(3):
        loss = run(torch.arange(step, step + 5), torch.tensor([0, 2, 5]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    losses.append(run(torch.arange(90, 95), torch.tensor([0, 2, 5])).item())
    return losses, model.linear.weight.grad, table.state()


def compare(kind, backend, **tolerance):
    torch._dynamo.reset()
    # Once for training, once for evaluation: tables beyond that would meet the compiler's limit, and end compiling.
    limits = torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
    with use("reference"), limits:
        plain = trained(kind(3), lambda model: model)
        compiled = trained(kind(3), lambda model: torch.compile(model, backend=backend))
    np.testing.assert_allclose(compiled[0], plain[0], **tolerance)
    torch.testing.assert_close(compiled[1], plain[1], rtol=1e-4, atol=1e-6)
    assert compiled[2].keys() == plain[2].keys()
    assert len(plain[2]["keys"]) == 14
    for name in plain[2]:
        np.testing.assert_allclose(compiled[2][name], plain[2][name], **tolerance)


class Doubled(Embedding):
    def forward(self, keys):
        return 2 * super().forward(keys)


def test_what_is_around_a_look_up_is_compiled():
    torch._dynamo.reset()
    graphs, tables, seen = [], [DynamicTable(2), DynamicTable(2)], []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    for table in tables:
        embedding = Doubled(table)
        run = torch.compile(lambda k, e=embedding: e(k + 1).sin(), backend=backend) if table is tables[0] else None
        for keys in (torch.tensor([4, 5]), torch.tensor([5, -7])):
            with use("reference"):
                out = run(keys) if run else embedding(keys + 1).sin()
                out.sum().backward()
                SparseAdagrad(table, lr=0.1).step()
            seen.append(out.detach())
    assert [len(ops) for ops in graphs] == [1, 1, 1]  # the sum, the product, the sine
    assert torch.equal(torch.stack(seen[:2]), torch.stack(seen[2:]))
    states = [table.state() for table in tables]
    assert len(tables[0]) == 3
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DynamicTable, DeviceTable])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_trains_as_it_would_by_any_backend(kind, backend):
    compare(kind, backend, rtol=1e-4, atol=1e-6)
