"""The loader for torch: the same batches as tensors, resumable at every step, one reader whoever iterates."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import thinrow
from thinrow.core.errors import InputError
from thinrow.dpp.device import OnDevice
from thinrow.dpp.torch import TorchBatch, TorchLoader
from thinrow.features import FeaturePlan, Hash, Source
from thinrow.jagged.torch import JaggedTensor
from thinrow.testing.world import World, make_world

PLAN = FeaturePlan(
    {
        "past": Hash(Source("history.item"), buckets=50),
        "shown": Hash(Source("cand.brand"), buckets=50),
        "where": Hash(Source("ctx.city"), buckets=50),
    }
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), users=6, days=6)


def reader(world: World) -> TorchLoader:
    store, table = world.store(), world.table()
    generation = store.pin()
    store.close()
    return TorchLoader(thinrow.loader(generation, table, plan=PLAN, base_rows=4, block=2, epochs=2, seed=3))


def numbers(batch: TorchBatch) -> list[list[float]]:
    shown = batch.features["shown"]
    assert not isinstance(shown, torch.Tensor)
    parts = batch.histories.columns["past"], batch.histories.lengths, shown.values, shown.offsets
    return [t.tolist() for t in (*parts, batch.labels["buy"].values, batch.request_ts, batch.features["where"])]  # type: ignore[union-attr]


def test_tensors_are_those_of_the_numpy_batch(world: World) -> None:
    for batch in reader(world):
        own = batch.batch
        np.testing.assert_array_equal(batch.candidates["item"].values, own.candidates["item"].values)
        np.testing.assert_array_equal(batch.labels["buy"].values, own.labels["buy"].values)
        np.testing.assert_array_equal(batch.histories.lengths, own.histories.lengths())
        seen = np.unique(own.histories.positions()[0])
        np.testing.assert_array_equal(
            batch.histories.columns["item"], own.histories.events.columns["item"].values[seen]
        )
        assert len(batch) == len(own)
        own.candidates["item"].values[:1] = 99
        assert batch.candidates["item"].values[0] == 99
        with pytest.raises(InputError, match="'brand' is text"):
            batch.candidates["brand"]
        with pytest.raises(InputError, match="'city' is text"):
            batch.context["city"]


def test_restored_at_every_step_the_rest_is_the_same(world: World) -> None:
    whole, states = [], []
    first = reader(world)
    assert len(first) > 5
    for batch in first:
        whole.append(numbers(batch))
        states.append(first.state_dict())
    assert len(whole) == len(first)
    for t, state in enumerate(states):
        again = reader(world)
        again.load_state_dict(state)
        assert [numbers(b) for b in again] == whole[t + 1 :]


def test_a_loader_that_ended_says_so_and_one_for_validation_begins_again(world: World) -> None:
    first = reader(world)
    whole = [numbers(b) for b in first]
    with pytest.warns(UserWarning, match=rf"delivered all of its {len(whole)} batches; begin again with rewind"):
        assert list(first) == []
    again = TorchLoader(reader(world).loader, repeat=True)
    next(iter(again))
    assert [[numbers(b) for b in again] for _ in range(2)] == [whole, whole]


def test_a_torch_dataloader_passes_batches_through(world: World) -> None:
    data = torch.utils.data.DataLoader(reader(world), batch_size=None)
    assert [numbers(b) for b in data] == [numbers(b) for b in reader(world)]


def test_worker_processes_of_a_dataloader_are_refused(world: World) -> None:
    data = torch.utils.data.DataLoader(reader(world), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(InputError, match="pass num_workers=0 to the DataLoader"):
        next(iter(data))


def picked(batch: TorchBatch) -> dict[str, Any]:
    return {"item": batch.candidates["item"], "more": [batch.request_ts, (batch.labels["buy"],)]}


def test_batches_are_copied_ahead_and_resume_where_they_were_yielded(world: World) -> None:
    plain = [batch.batch.request_id.tolist() for batch in reader(world)]
    device = OnDevice(reader(world), "cpu", picked)
    seen, states = [], []
    for batch, tensors in device:
        seen.append(batch.batch.request_id.tolist())
        states.append(device.state_dict())
        assert torch.equal(tensors["item"].values, batch.candidates["item"].values)
        assert torch.equal(tensors["more"][1][0].offsets, batch.labels["buy"].offsets)
    assert seen == plain
    assert len(device) == len(plain)
    for k in (0, 2, len(plain) - 1):
        resumed = OnDevice(reader(world), "cpu", picked)
        resumed.load_state_dict(states[k])
        assert [b.batch.request_id.tolist() for b, _ in resumed] == plain[k + 1 :]
    broken = OnDevice(reader(world), "cpu", picked)
    for batch, _ in broken:
        first = batch.batch.request_id.tolist()
        break
    # One more was read, and is not lost.
    assert [first, *(b.batch.request_id.tolist() for b, _ in broken)] == plain


def test_tensors_are_on_the_device(world: World) -> None:
    for batch, tensors in OnDevice(reader(world), "meta", picked):
        assert tensors["item"].values.device.type == "meta"
        assert tensors["more"][0].shape == batch.request_ts.shape


def test_bad_devices_and_tensors(world: World) -> None:
    with pytest.raises(InputError, match="device='gpu'"):
        OnDevice(reader(world), "gpu", picked)
    with pytest.raises(InputError, match="a str among the tensors of a batch"):
        next(iter(OnDevice(reader(world), "cpu", lambda batch: ["x"])))


class Pair(NamedTuple):
    item: JaggedTensor
    times: torch.Tensor


def test_an_error_before_the_first_batch_loses_none(world: World) -> None:
    plain = [batch.batch.request_id.tolist() for batch in reader(world)]
    calls: list[int] = []

    def once(batch: TorchBatch) -> Pair:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("once")
        return Pair(batch.candidates["item"], batch.request_ts)

    device = OnDevice(reader(world), "cpu", once)
    begun = device.state_dict()
    with pytest.raises(ValueError, match="once"):
        list(device)
    assert device.state_dict() == begun
    found = list(device)
    assert [b.batch.request_id.tolist() for b, _ in found] == plain
    assert isinstance(found[0][1], Pair)
