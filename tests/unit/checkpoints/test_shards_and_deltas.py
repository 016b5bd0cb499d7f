"""Shards and deltas: what is refused, what is read, what is kept, and that nothing unfinished is ever loaded."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from thinrow.checkpoints import commit, load, load_shard, save, save_shard, steps, tensorfile, version_of
from thinrow.checkpoints.manifest import MANIFEST, TENSORS, read
from thinrow.core.errors import CorruptionError, InputError, ObjectNotFound, StoreError
from thinrow.core.routing import Routing
from thinrow.embeddings import Budget, DynamicTable, SparseAdagrad
from thinrow.embeddings.states import join, pick, prefixed, replay, tables_of
from thinrow.storage.sealed import seal

Arrays = dict[str, npt.NDArray[Any]]


def train(table: DynamicTable, keys: npt.NDArray[np.int64]) -> DynamicTable:
    table.add_gradient(table.rows(keys, insert=True), np.ones((len(keys), table.dim), np.float32))
    SparseAdagrad(table, lr=0.1).step()
    return table


def state(keys: npt.NDArray[np.int64]) -> Arrays:
    return train(DynamicTable(2), keys).state()


def shard_states(n_shards: int, n_keys: int = 100) -> list[Arrays]:
    keys = np.arange(n_keys)
    shards = Routing.even(n_shards).shards(keys)
    return [prefixed("t.", state(keys[shards == shard])) for shard in range(n_shards)]


def save_sharded(folder: Path, step: int, n_shards: int, **named: Any) -> Path:
    routing = Routing.even(n_shards)
    for shard, tensors in enumerate(shard_states(n_shards)):
        save_shard(folder, step, shard, routing, tensors=tensors)
    return commit(folder, step, routing, **named)


def chain(folder: Path, *at: int, keep: int | None = None) -> list[Arrays]:
    """A full checkpoint at the first step, deltas at the others; the state at each."""
    table = train(DynamicTable(2), np.arange(50))
    changes, base, states = table.track(), None, []
    for step in at:
        train(table, np.arange(step % 40, step % 40 + 3))
        tensors = table.state() if base is None else table.delta(changes)
        base = version_of(save(folder, step, tensors=tensors, meta={"step": step}, base=base, keep=keep))
        changes.mark(base)
        states.append(table.state())
    return states


def same(left: Arrays, right: Arrays) -> bool:
    return left.keys() == right.keys() and all(
        (left[n].dtype, left[n].shape, left[n].tobytes()) == (right[n].dtype, right[n].shape, right[n].tobytes())
        for n in right
    )


def test_a_checkpoint_of_shards(tmp_path: Path) -> None:
    path = save_sharded(tmp_path, 7, 3, tensors={"w": np.eye(2)}, meta={"loss": 0.5})
    files = [f"shard-0000{i}-of-00003.safetensors" for i in range(3)]
    assert sorted(p.name for p in path.iterdir()) == sorted([MANIFEST, TENSORS, *files])
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]
    found = load(tmp_path)
    assert (found.step, found.meta, found.routing) == (7, {"loss": 0.5}, Routing.even(3))
    assert np.array_equal(found.tensors["w"], np.eye(2))
    together = state(np.arange(100))
    order = np.argsort(found.tensors["t.keys"])
    assert same(pick(tables_of(found.tensors)["t."], order), pick(together, np.argsort(together["keys"])))


@pytest.mark.parametrize(("before", "after"), [(4, 3), (1, 2), (2, 1), (3, 3)])
def test_shards_are_read_by_any_number(tmp_path: Path, before: int, after: int) -> None:
    save_sharded(tmp_path, 7, before)
    states = shard_states(before)
    routing = Routing.even(after)
    keys: list[int] = []
    for shard in range(after):
        found = tables_of(load_shard(tmp_path, shard, routing).tensors)["t."]
        expected = join([tables_of(s)["t."] for s in states])
        assert same(found, pick(expected, routing.shards(expected["keys"]) == shard))
        keys += found["keys"].tolist()
    assert sorted(keys) == list(range(100))


def test_only_files_of_the_range_are_read(tmp_path: Path) -> None:
    path = save_sharded(tmp_path, 7, 4)
    file = path / "shard-00003-of-00004.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert len(load_shard(path, 0, Routing.even(2)).tensors["t.keys"]) > 30
    for shard, routing in ((1, Routing.even(2)), (0, Routing.even(1))):
        with pytest.raises(CorruptionError, match=r"shard-00003-of-00004.*CRC does not match"):
            load_shard(path, shard, routing)


def test_what_is_no_shard_is_refused(tmp_path: Path) -> None:
    routing = Routing.even(2)
    first, second = shard_states(2)
    wrong = second["t.keys"][0]
    for shard, tensors, message in [
        (2, first, "shard 2; it must be from 0 to 1"),
        (0, second, rf"t\.keys has {wrong}, which is not in shard 0"),
        (0, first | {"w": np.eye(2)}, "'w' is of no table; pass it to commit"),
    ]:
        with pytest.raises(InputError, match=message):
            save_shard(tmp_path / "run", 7, shard, routing, tensors=tensors)
    assert not (tmp_path / "run").exists()
    save(tmp_path, 1, tensors=first, meta={})
    with pytest.raises(InputError, match="saved without shards; name the tables to split"):
        load_shard(tmp_path, 0, routing)


def test_shards_that_were_not_all_saved_are_no_checkpoint(tmp_path: Path) -> None:
    save_sharded(tmp_path, 5, 2)
    first, second = shard_states(2)
    save_shard(tmp_path, 7, 1, Routing.even(2), tensors=second)
    with pytest.raises(StoreError, match=r"shard-00000-of-00002.safetensors of step 7 was not saved"):
        commit(tmp_path, 7, Routing.even(2))
    other = Routing((0, 5))
    with pytest.raises(StoreError, match="shard-00000"):
        commit(tmp_path, 7, other)
    save_shard(tmp_path, 7, 0, Routing.even(2), tensors=first)
    with pytest.raises(StoreError, match="saved by another routing"):
        commit(tmp_path, 7, other)
    assert steps(tmp_path) == [5]
    assert load(tmp_path).step == 5
    # What was left of step 7 goes when ranks are past it.
    save_sharded(tmp_path, 9, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000009"]


def test_a_shard_that_was_cut_off_is_not_committed(tmp_path: Path) -> None:
    first, second = shard_states(2)
    for shard, tensors in enumerate((first, second)):
        save_shard(tmp_path, 7, shard, Routing.even(2), tensors=tensors)
    file = tmp_path / ".saving-step-00000007" / "shard-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=r"shard-00001-of-00002.*bytes, not"):
        commit(tmp_path, 7, Routing.even(2))
    assert steps(tmp_path) == []


def test_deltas_lead_to_the_state(tmp_path: Path) -> None:
    states = chain(tmp_path, 10, 11, 12, 14)
    for step, expected in zip((10, 11, 12, 14), states, strict=True):
        found = load(tmp_path / f"step-000000{step}")
        assert same(found.tensors, expected)
        assert found.meta == {"step": step}
    full, *deltas = [(tmp_path / f"step-000000{s}" / TENSORS).stat().st_size for s in (10, 11, 12, 14)]
    assert max(deltas) < full


def break_link(folder: Path) -> None:
    shutil.rmtree(folder / "step-00000011")


def replace_link(folder: Path) -> None:
    save(folder, 11, tensors=state(np.arange(3)), meta={})


def damage_link(folder: Path) -> None:
    file = folder / "step-00000011" / TENSORS
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("hurt", "error", "message", "left"),
    [
        (break_link, ObjectNotFound, "step 12 is a delta on step 11, which is not in", [10]),
        (replace_link, CorruptionError, "step 12 is a delta on step 11 with CRC [0-9a-f]{8}, and this one's", [10, 11]),
        (damage_link, CorruptionError, "step-00000011.*CRC does not match", [10, 11, 12]),
    ],
)
def test_deltas_are_replayed_in_order_or_not_at_all(
    tmp_path: Path, hurt: Any, error: type[Exception], message: str, left: list[int]
) -> None:
    chain(tmp_path, 10, 11, 12)
    hurt(tmp_path)
    assert steps(tmp_path) == left
    with pytest.raises(error, match=message):
        load(tmp_path / "step-00000012")
    with pytest.warns(RuntimeWarning, match=rf"is loaded in place of a newer one: .*{message}"):
        assert load(tmp_path).step == (11 if hurt is replace_link else 10)


def test_a_base_must_be_there_and_the_one(tmp_path: Path) -> None:
    table = train(DynamicTable(2), np.arange(50))
    changes = table.track()
    base = version_of(save(tmp_path, 5, tensors=table.state(), meta={}))
    with pytest.raises(InputError, match=r"table '' is a delta on an unknown checkpoint; .* changes\.mark\("):
        save(tmp_path, 6, tensors=table.delta(changes), meta={}, base=base)
    changes.mark(base)
    delta = table.delta(changes)
    with pytest.raises(InputError, match="step 5 cannot be a delta on step 5"):
        save(tmp_path, 5, tensors=delta, meta={}, base=base)
    with pytest.raises(InputError, match=r"Routing.* on step 5, which has None; save a full one"):
        commit(tmp_path, 6, Routing.even(1), base=base)
    save(tmp_path, 5, tensors=table.state(), meta={"again": 1})
    with pytest.raises(InputError, match=r"a delta on Version\(step=5.*save a full one"):
        save(tmp_path, 6, tensors=delta, meta={}, base=base)
    shutil.rmtree(tmp_path / "step-00000005")
    with pytest.raises(InputError, match=r"which is not whole in .*checkpoint.json is missing.*save a full one"):
        save(tmp_path, 6, tensors=delta, meta={}, base=base)
    assert steps(tmp_path) == []
    with pytest.raises(InputError, match=r"a delta on step 5 is among the tensors; pass the base"):
        save(tmp_path, 6, tensors=prefixed("t.", delta), meta={})
    save_shard(tmp_path, 6, 0, Routing.even(1), tensors=delta)
    with pytest.raises(InputError, match="of step 6: a delta on step 5 is among the tensors; pass the base"):
        commit(tmp_path, 6, Routing.even(1))
    other = version_of(save(tmp_path, 6, tensors={}, meta={}))
    with pytest.raises(InputError, match=r"marked at Version\(step=5.* cannot rest on Version\(step=6"):
        save(tmp_path, 7, tensors=delta, meta={}, base=other)
    changes.mark(other)
    with pytest.raises(InputError, match="a delta of table '', of which the base has no state there; save a full one"):
        save(tmp_path, 7, tensors=table.delta(changes), meta={}, base=other)


def forge(path: Path, **changes: Any) -> None:
    """Another ``checkpoint.json`` or, under ``tensors``, other tensors, under right CRCs."""
    found = read(path)
    files = dict(found.files)
    if (tensors := changes.pop("tensors", None)) is not None:
        (path / TENSORS).unlink()
        files[TENSORS] = tensorfile.write(path / TENSORS, tensors)
    body = {"files": files, "meta": {}, "step": found.step}
    if found.base is not None:
        body |= {"base": {"crc32c": found.base.crc32c, "step": found.base.step}, "routing": None}
    (path / MANIFEST).write_bytes(seal(body | changes, 2 if {"base", *changes} & {*body} else 1, "checkpoint"))


@pytest.mark.parametrize("left_out", ["delta.from_rows", "delta.n_rows"])
def test_a_delta_that_lacks_something_is_damage(tmp_path: Path, left_out: str) -> None:
    chain(tmp_path, 10, 11)
    path = tmp_path / "step-00000011"
    forge(path, tensors={n: a for n, a in tensorfile.read(path / TENSORS).items() if n != left_out})
    with pytest.raises(CorruptionError, match=left_out):
        load(path)
    with pytest.warns(RuntimeWarning, match="is loaded in place of a newer one"):
        assert load(tmp_path).step == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {}},
        {"files": {TENSORS: {}}},
        {"files": {TENSORS: {"bytes": 1.5, "crc32c": 0}}},
        {"files": {TENSORS: {"bytes": 1, "crc32c": 0}, "../x": {"bytes": 1, "crc32c": 0}}},
        {"files": [1]},
        {"meta": [1]},
        {"step": "1"},
        {"base": {"x": 1}, "routing": None},
        {"base": {"step": "a", "crc32c": 0}, "routing": None},
        {"base": None, "routing": ["zz"]},
        {"base": None, "routing": [5]},
        {"base": None, "routing": ["0" * 16, "0"]},
    ],
)
def test_a_forged_description_is_damage(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = save(tmp_path, 1, tensors={"w": np.ones(2)}, meta={})
    forge(path, **changes)
    assert steps(tmp_path) == []
    for call, argument in ((load, tmp_path), (version_of, path)):
        with pytest.raises(CorruptionError, match=r"it is not the JSON of a checkpoint|it describes step"):
            call(argument)


def test_what_is_kept_keeps_what_it_rests_on(tmp_path: Path) -> None:
    chain(tmp_path, 10, 11, 12, 14, keep=2)
    assert steps(tmp_path) == [10, 11, 12, 14]
    save(tmp_path, 20, tensors={}, meta={}, keep=2)
    assert steps(tmp_path) == [10, 11, 12, 14, 20]
    save(tmp_path, 21, tensors={}, meta={}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000020", "step-00000021"]


def test_a_delta_follows_only_what_it_was_taken_from() -> None:
    table = train(DynamicTable(2), np.arange(50))
    before, changes = table.state(), table.track()
    train(table, np.arange(48, 60))
    delta = table.delta(changes)
    assert same(replay(before, delta), table.state())
    for wrong in (state(np.arange(48)), state(np.arange(3))):
        with pytest.raises(InputError, match=r"that had 50 rows does not follow a state of (3|48)"):
            replay(wrong, delta)
    with pytest.raises(InputError, match="does not follow"):
        replay(before, delta | {"delta.rows": delta["delta.rows"][::-1]})
    with pytest.raises(InputError, match="shards differ in 'dim'"):
        join([before, {**before, "dim": np.array(3)}])


def test_changes_are_of_one_table_until_it_is_loaded_anew() -> None:
    table, other = train(DynamicTable(2), np.arange(5)), DynamicTable(2)
    changes = table.track()
    with pytest.raises(InputError, match="not of this table"):
        other.delta(changes)
    table.load_state(table.state())
    with pytest.raises(InputError, match=r"call track\(\) anew after load_state"):
        table.delta(changes)
    again = table.track()
    table.untrack(again)
    with pytest.raises(InputError, match="not of this table"):
        table.delta(again)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes cannot hold a header of 0"),
        (b"\xff" * 8, "8 bytes cannot hold a header"),
        (b"\x02" + bytes(7) + b"[]", "items"),
        (b"\x02" + bytes(7) + b"{x", "Expecting"),
        (b"\x3b" + bytes(7) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}     ' + bytes(8), "'a' of"),
        (b"\x3b" + bytes(7) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     ' + bytes(4), "ends within"),
        (b"\x3b" + bytes(7) + b'{"a":{"dtype":"F3","shape":[2],"data_offsets":[0,8]}}      ' + bytes(8), "F3"),
    ],
)
def test_what_is_no_file_of_tensors(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CorruptionError, match=message):
        tensorfile.read(tmp_path / "x")


@pytest.mark.parametrize(
    ("about", "n_bytes"),
    [
        ([([4], [0, 4]), ([4], [0, 4])], 4),
        ([([4], [0, 4]), ([4], [2, 6])], 6),
        ([([2], [0, 2]), ([2], [4, 6])], 6),
        ([([2], [0, 2])], 6),
        ([([2], [-2, 0])], 0),
        ([([0, 2**62, 4], [0, 0])], 0),
        ([([0, 2**70], [0, 0])], 0),
        ([([1] * 70, [0, 1])], 1),
        ([([1], [0.0, 1.0])], 1),
        ([([True], [0, 1])], 1),
        ([(["1"], [0, 1])], 1),
        ([([-1, -1], [0, 1])], 1),
    ],
)
def test_bytes_are_of_one_tensor_each_and_shapes_those_of_arrays(tmp_path: Path, about: Any, n_bytes: int) -> None:
    header = {f"t{i}": {"dtype": "U8", "shape": s, "data_offsets": at} for i, (s, at) in enumerate(about)}
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_bytes))
    for call in (tensorfile.read, tensorfile.mapped):
        with pytest.raises(CorruptionError, match="it is no safetensors file"):
            call(tmp_path / "x")


def test_a_budget_of_other_ranks(tmp_path: Path) -> None:
    budget, routing, keys = Budget(max_rows=1000, min_count=2, sketch_cells=1024), Routing.even(4), np.arange(880)
    for shard in range(4):
        table = DynamicTable(2, budget=budget.share(4))
        mine = keys[routing.shards(keys) == shard]
        for _ in range(2):
            table.rows(mine, insert=True)
        save_shard(tmp_path, 1, shard, routing, tensors=table.state())
    commit(tmp_path, 1, routing)
    found = load_shard(tmp_path, 0, Routing.even(1)).tensors
    with pytest.warns(RuntimeWarning, match=r"880 rows are loaded, .* all but 250 at most; .*put_in\(state\)"):
        assert DynamicTable.from_state(found).make_room() > 600
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = DynamicTable.from_state(budget.put_in(found))
        other = DynamicTable(2, budget=budget)
        other.load_state(found, keep_budget=True)
    assert same(other.state(), table.state())
    with pytest.raises(InputError, match="keep_budget=True of a table without a budget"):
        DynamicTable(2).load_state(found, keep_budget=True)
    assert (table.make_room(), len(table), table.budget) == (0, 880, budget)
    # The sketch is another one; where it is as large, it stays.
    assert not table.state()["sketch"].any()
    assert budget.share(4).put_in(found)["sketch"] is found["sketch"]
    assert "sketch" not in Budget(max_rows=1000).put_in(found)
    plain = train(DynamicTable(2), keys[:9])
    bounded = DynamicTable.from_state(budget.put_in(plain.state()))
    assert same(pick(plain.state(), np.arange(9)), {n: bounded.state()[n] for n in plain.state()})
