"""Exports: vectors in three types, absent keys, ranges, deltas with tombstones; and what is no export is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.checkpoints import ServingTable, commit, export, save, save_shard, tensorfile, version_of
from thinrow.checkpoints.shards import write_shard
from thinrow.core.errors import CheckpointMismatch, CorruptionError, InputError, NewerFormatError
from thinrow.core.routing import Routing
from thinrow.core.wrap import mix64_words
from thinrow.embeddings import Budget, DynamicTable, SparseSGD

KEYS = np.array([7, -1, 0, 2**63 - 1, -(2**63), *range(100, 400)])


def made(keys: Any = KEYS, dim: int = 4) -> DynamicTable:
    table = DynamicTable(dim, seed=3, init="normal", init_scale=1.0)
    table.rows(np.asarray(keys), insert=True)
    return table


def vectors(table: DynamicTable, keys: Any = KEYS) -> Any:
    return table.read(table.rows(np.asarray(keys), insert=False))


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize(("dtype", "apart"), [("float32", 0.0), ("float16", 2**-11), ("int8", 0.5 / 127 * 1.001)])
def test_what_is_served_is_the_table(tmp_path: Path, dtype: str, apart: float, n_shards: int) -> None:
    table = made()
    path = export(tmp_path, 3, {"t.": table.state()}, dtype=dtype, routing=Routing.even(n_shards))
    served = ServingTable.open(tmp_path, "t.")
    assert (served.path, served.dim, len(served), served.version) == (path, 4, len(KEYS), version_of(path))
    found, known = served.read(np.array([99, *KEYS, 99, 5]))
    assert known.tolist() == [False, *[True] * len(KEYS), False, False]
    assert not found[~known].any()
    expected = vectors(table)
    bound = apart * (np.abs(expected) if dtype == "float16" else np.abs(expected).max(axis=1, keepdims=True))
    assert (np.abs(found[known] - expected) <= bound).all()
    assert served.read(np.empty(0, np.int64))[0].shape == (0, 4)


def test_a_file_is_in_the_order_of_the_mixed_key(tmp_path: Path) -> None:
    path = export(tmp_path, 3, {"": made().state()}, routing=Routing.even(2))
    words = [tensorfile.mapped(path / f"shard-0000{i}-of-00002.safetensors")["words"] for i in range(2)]
    assert np.array_equal(np.concatenate(words), np.sort(mix64_words(KEYS.view(np.uint64))))


def test_a_server_opens_the_files_of_its_range(tmp_path: Path) -> None:
    table, mine = made(), Routing.even(2)
    path = export(tmp_path, 3, {"": table.state()}, routing=Routing.even(4))
    file = path / "shard-00003-of-00004.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    served = ServingTable.open(path, shard=0, routing=mine)
    keys = KEYS[mine.shards(KEYS) == 0]
    found, known = served.read(keys)
    assert known.all()
    assert np.array_equal(found, vectors(table, keys))
    with pytest.raises(CorruptionError, match="CRC does not match"):
        ServingTable.open(path)


def test_deltas_change_add_and_take_away(tmp_path: Path) -> None:
    table = DynamicTable(4, budget=Budget(max_rows=60, keep=0.5))
    optimizer = SparseSGD(table, lr=0.5)
    changes, base, served = table.track(), None, None
    for step in range(1, 9):
        keys = np.arange(step * 10, step * 10 + 20)
        table.add_gradient(table.rows(keys, insert=True), np.ones((20, 4), np.float32))
        optimizer.step()
        state = table.delta(changes, row_states=False) if base else table.state()
        base = version_of(export(tmp_path, step, {"": state}, base=base, routing=Routing.even(2)))
        changes.mark(base)
        served = ServingTable.open(tmp_path) if served is None else served.newest()
        wanted = np.arange(0, 150)
        found, known = served.read(wanted)
        rows = table.rows(wanted, insert=False)
        assert known.tolist() == (rows >= 0).tolist()
        assert np.array_equal(found, table.read(rows))
    assert served is not None
    assert served.newest() is served
    assert len(table) < 60 < 90


def test_what_both_rest_on_is_not_read_again(tmp_path: Path) -> None:
    table = made()
    changes = table.track()
    base = version_of(export(tmp_path, 1, {"": table.state()}))
    changes.mark(base)
    served = ServingTable.open(tmp_path)
    export(tmp_path, 2, {"": table.delta(changes)}, base=base)
    assert served.newest()._layers[0] is served._layers[0]
    assert served.newest().version.step == 2


def test_a_default_of_ones_own(tmp_path: Path) -> None:
    export(tmp_path, 1, {"t.": made().state()}, default={"t.": np.array([1, 2, 3, 4])})
    found, known = ServingTable.open(tmp_path, "t.").read(np.array([5, 7]))
    assert found[0].tolist() == [1, 2, 3, 4]
    assert known.tolist() == [False, True]


def test_a_default_is_the_tables_and_stays_with_it(tmp_path: Path) -> None:
    table, ones = made(), {"t.": np.ones(4)}
    changes = table.track()
    base = version_of(export(tmp_path, 1, {"t.": table.state()}, default=ones))
    for vector in (np.ones(3), np.array([1, 2, 3, np.nan]), np.full(4, 1e300)):
        with pytest.raises(InputError, match=r"default of table 't\.' is .*; it must be 4 finite float32"):
            export(tmp_path, 2, {"t.": table.state()}, default={"t.": vector})
    with pytest.raises(InputError, match=r"default of table 'item\.', but there are only \['t\.'\]"):
        export(tmp_path, 2, {"t.": table.state()}, default={"item.": np.ones(4)})
    changes.mark(base)
    for step, default, expected in ((2, None, 1), (3, {"t.": np.zeros(4)}, 0)):
        export(tmp_path, step, {"t.": table.delta(changes)}, base=base, default=default)
        assert ServingTable.open(tmp_path, "t.").read(np.array([5]))[0].tolist() == [[expected] * 4]
    arrays = tensorfile.read(tmp_path / "step-00000001" / "shard-00000-of-00001.safetensors")
    write_shard(tmp_path, 4, 0, Routing.even(1), arrays, None)
    wrong = {"t.default": np.ones(3, np.float32)}
    commit(tmp_path, 4, Routing.even(1), tensors=wrong, meta={"export": 1})
    with pytest.raises(CorruptionError, match=r"its default is float32 \(3,\)"):
        ServingTable.open(tmp_path / "step-00000004", "t.")


def test_what_is_full_hides_what_it_rests_on(tmp_path: Path) -> None:
    table, new = DynamicTable(2, budget=Budget(max_rows=4, keep=0.5)), made([1, 2], dim=3)
    changes = table.track()
    table.rows(np.arange(4), insert=True)
    base = version_of(export(tmp_path, 1, {"t.": table.state()}))
    table.make_room()
    held = np.isin(np.arange(4), table.keys()).tolist()
    assert sum(held) == 2
    export(tmp_path, 2, {"t.": table.state(), "new.": new.state()}, base=base)
    assert ServingTable.open(tmp_path, "t.").read(np.arange(4))[1].tolist() == held
    # And a table of which the base knows nothing is there.
    vectors_, found = ServingTable.open(tmp_path, "new.").read(np.array([0, 1]))
    assert found.tolist() == [False, True]
    assert np.array_equal(vectors_[1:], vectors(new, [1]))
    changes.mark(base)
    delta = table.delta(changes)
    with pytest.raises(InputError, match=r"marked at Version\(step=1.* cannot rest on Version\(step=2"):
        export(tmp_path, 3, {"t.": delta}, base=version_of(tmp_path / "step-00000002"))


def test_the_largest_of_all_numbers_in_int8(tmp_path: Path) -> None:
    state, most = made([1, 2, 3], dim=1).state(), np.finfo(np.float32).max
    state["values"][:, 0] = most, -most, np.nextafter(most, np.float32(0))
    export(tmp_path, 1, {"": state}, dtype="int8")
    found, _ = ServingTable.open(tmp_path).read(np.array([1, 2, 3]))
    np.testing.assert_allclose(found, state["values"], rtol=1e-6)


def test_an_empty_table(tmp_path: Path) -> None:
    export(tmp_path, 1, {"": DynamicTable(3).state()}, dtype="int8", routing=Routing.even(2))
    found, known = ServingTable.open(tmp_path).read(KEYS)
    assert found.shape == (len(KEYS), 3)
    assert not known.any()


def test_vectors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state = made().state()
    for value, dtype, message in [
        (7e4, "float16", r"vector of key -1 has 70000.0; float16 holds finite values up to 65504"),
        (np.nan, "float32", "vector of key -1 has nan; float32 holds finite"),
        (np.inf, "int8", "vector of key -1 has inf"),
    ]:
        values = state["values"].copy()
        values[1, 2] = value
        with pytest.raises(InputError, match=message):
            export(tmp_path / "x", 1, {"": state | {"values": values}}, dtype=dtype)
    with pytest.raises(InputError, match="dtype='int4'; it must be one of float32, float16, int8"):
        export(tmp_path / "x", 1, {"": state}, dtype="int4")
    for routing in (Routing.even(1), Routing.even(2)):
        with pytest.raises(InputError, match=r"table 'i\.' has keys; pass DynamicTable.state\(\) or delta\(\)"):
            export(tmp_path / "x", 1, {"i.": {"keys": KEYS}}, routing=routing)
    assert not (tmp_path / "x").exists()
    export(tmp_path, 1, {"": state})
    with pytest.raises(InputError, match="one-dimensional int64"):
        ServingTable.open(tmp_path).read(np.zeros(3))


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, tensors=made().state(), meta={})
    with pytest.raises(CheckpointMismatch, match="is no export"):
        ServingTable.open(tmp_path / "run")
    path = export(tmp_path / "served", 1, {"a.": made().state(), "b.": made([1]).state()})
    with pytest.raises(CheckpointMismatch, match=r"has no table 't\.', only \['a\.', 'b\.'\]"):
        ServingTable.open(path, "t.")
    save_shard(tmp_path / "later", 1, 0, Routing.even(1), tensors={})
    later = commit(tmp_path / "later", 1, Routing.even(1), meta={"export": 2})
    with pytest.raises(NewerFormatError, match="is export format 2, this thinrow reads up to 1"):
        ServingTable.open(later)


@pytest.mark.parametrize("wrong", [[-1, 10], [0, 10**6], [5, 3]])
def test_a_damaged_index_sends_no_look_up_outside_the_file(tmp_path: Path, wrong: list[int]) -> None:
    path = export(tmp_path, 1, {"": made().state()})
    file = path / "shard-00000-of-00001.safetensors"
    index = tensorfile.mapped(file)["index"]
    data = bytearray(file.read_bytes())
    at = data.index(index.tobytes())
    data[at : at + 8] = np.array(wrong[:1], np.int64).tobytes()
    data[at + 16 : at + 24] = np.array(wrong[1:], np.int64).tobytes()
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="is not that of an export"):
        ServingTable.open(path, check=False)
    with pytest.raises(CorruptionError, match="CRC"):
        ServingTable.open(path)
