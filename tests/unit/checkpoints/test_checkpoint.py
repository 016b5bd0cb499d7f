"""Checkpoints: values bit for bit, the newest whole one, and what is said of everything that is not one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy as library
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thinrow.checkpoints import load, save, steps, tensorfile
from thinrow.checkpoints.checkpoint import DTYPES, MANIFEST, TENSORS
from thinrow.core.errors import (
    CheckpointNotFound,
    CorruptionError,
    InputError,
    NewerFormatError,
    ObjectNotFound,
    StoreError,
)
from thinrow.storage.sealed import seal

META = {"loss": 0.1, "reader": {"t": 7}, "größe": [None, True, "\ud800", 2**70, -0.0, 1e-323]}
Arrays = dict[str, npt.NDArray[Any]]


def arrays(step: int) -> Arrays:
    rng = np.random.default_rng(step)
    return {
        "dense.weight": rng.normal(size=(3, 4)).astype(np.float32),
        "keys": rng.integers(-(2**63), 2**63 - 1, 5),
        "step": np.array(step),
    }


values = st.sampled_from(DTYPES).flatmap(
    lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


def put(folder: Path, step: int, **named: Any) -> Path:
    return save(folder, step, tensors=arrays(step), meta={"step": step}, **named)


def same(left: Arrays, right: Arrays) -> bool:
    return left.keys() == right.keys() and all(
        (left[n].dtype, left[n].shape, left[n].tobytes()) == (right[n].dtype, right[n].shape, right[n].tobytes())
        for n in right
    )


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "run", 123, tensors=arrays(123), meta=META)
    assert path == tmp_path / "new" / "run" / "step-00000123"
    assert names(path.parent) == ["step-00000123"]
    assert names(path) == [MANIFEST, TENSORS]
    for found in (load(path), load(path.parent), load(str(path.parent))):
        assert (found.path, found.step, found.meta) == (path, 123, META)
        assert str(found.meta["größe"][4]) == "-0.0"
        assert same(found.tensors, arrays(123))


def test_the_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = put(tmp_path, 1) / TENSORS
    assert same({n: t.numpy() for n, t in load_file(path).items()}, arrays(1))
    assert path.read_bytes() == library.save(arrays(1))


@given(st.dictionaries(st.text(max_size=3), values, max_size=5))
@settings(max_examples=30)
def test_the_files_are_those_of_the_library(tensors: Arrays) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        stated = tensorfile.write(path, tensors)
        assert path.read_bytes() == library.save(tensors)
        assert stated == {"bytes": path.stat().st_size, "crc32c": tensorfile.crc_of_file(path)}
        assert same(tensorfile.read(path), tensors)
        assert same(tensorfile.mapped(path), tensors)
        # What the library wrote with its own key in the header is read as well.
        path.write_bytes(library.save(tensors, {"format": "np"}))
        assert same(tensorfile.read(path), tensors)


layouts: st.SearchStrategy[Callable[[Any], Any]] = st.sampled_from(
    [
        lambda a: a,
        lambda a: a.T,
        lambda a: a[::-1] if a.ndim else a,
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        lambda a: np.broadcast_to(a, (2, *a.shape)),
    ]
)
texts = st.text(max_size=8).filter(lambda n: n != "__metadata__") | st.sampled_from(["", "a/b", "a\0", '"\\', "é\n"])


@given(st.dictionaries(texts, st.builds(lambda a, change: change(a), values, layouts), max_size=4))
@settings(max_examples=60)
def test_every_bit_and_every_name(tensors: Arrays) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = load(save(folder, 0, tensors=tensors, meta={})).tensors
    assert same(found, {n: np.asarray(a, a.dtype.newbyteorder("="), order="C") for n, a in tensors.items()})
    # Whoever resumes trains on them, in place.
    assert all(a.flags.writeable and a.flags.c_contiguous and a.flags.aligned for a in found.values())


def test_unusual_floats(tmp_path: Path) -> None:
    bits = np.array([0x7FC00001, 0xFFC00000, 0x7F800001, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    found = load(save(tmp_path, 1, tensors={"x": bits.view(np.float32), "s": np.float64(-0.0)}, meta={})).tensors
    assert found["x"].view(np.uint32).tolist() == bits.tolist()
    assert found["s"].shape == ()
    assert np.signbit(found["s"])


def test_torch_tensors(tmp_path: Path) -> None:
    tensors = {
        "parameter": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "zero": torch.tensor(3.5, dtype=torch.float64),
        "bits": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
    }
    found = load(save(tmp_path, 1, tensors=tensors, meta={})).tensors
    assert same(found, {n: np.asarray(t.detach().numpy(), order="C") for n, t in tensors.items()})
    assert torch.equal(torch.from_numpy(found["parameter"]), tensors["parameter"].detach())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"__metadata__": np.zeros(1)}, "'__metadata__'; it must be a string other than"),
        ({3: np.zeros(1)}, "name 3; it must be a string"),
        ({"\ud800": np.zeros(1)}, r"'\\ud800' is not Unicode text"),
        ({"a": [1.0]}, "'a' is a list; pass a NumPy array"),
        ({"a": np.array(["x"])}, "'a' is <U1, not one of uint64, int64"),
        ({"a": np.zeros(1, np.complex128)}, "'a' is complex128"),
        ({"a": np.array([object()])}, "'a' is object"),
        ({"a": torch.zeros(1, dtype=torch.bfloat16)}, "'a' is not one of .*BFloat16; cast it first"),
        ({"a": torch.zeros(2, device="meta")}, "'a' is not one of"),
    ],
)
def test_tensors_that_cannot_be_stored(tmp_path: Path, tensors: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        save(tmp_path / "run", 1, tensors=tensors, meta={})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"step": -1}, "step is -1; it must be an integer from 0 to"),
        ({"step": 1.0}, "step is 1.0"),
        ({"step": 10**18}, "step is 1000000000000000000"),
        ({"keep": 0}, "keep is 0; it must be an integer from 1 to"),
        ({"meta": {"loss": float("nan")}}, "is not JSON"),
        ({"meta": {"a": (1, 2)}}, "lists in place of tuples"),
        ({"meta": {1: 2}}, "string keys"),
        ({"meta": {"a": np.zeros(1)}}, "is not JSON"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path: Path, named: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        save(tmp_path / "run", **{"step": 1, "tensors": arrays(1), "meta": {}} | named)
    assert not (tmp_path / "run").exists()


def test_steps_and_the_newest(tmp_path: Path) -> None:
    assert steps(tmp_path) == steps(tmp_path / "none") == []
    for step in (9, 123456789, 10, 0):
        put(tmp_path, step)
    for other in ("step-1", "step-00000011x", "step-000000012", "notes"):
        (tmp_path / other).mkdir()
    (tmp_path / "step-00000013").write_text("a file")
    assert steps(tmp_path) == [0, 9, 10, 123456789]
    assert load(tmp_path).step == 123456789
    assert load(tmp_path / "step-00000009").step == 9


def test_one_checkpoint_may_be_copied_under_any_name(tmp_path: Path) -> None:
    shutil.copytree(put(tmp_path, 5), tmp_path / "best")
    assert load(tmp_path / "best").step == 5
    shutil.copytree(tmp_path / "best", tmp_path / "step-00000006")
    with pytest.raises(CorruptionError, match="it describes step 5"):
        load(tmp_path / "step-00000006")


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    put(tmp_path, 5)
    save(tmp_path, 5, tensors={"x": np.ones(2)}, meta={"second": 1})
    assert names(tmp_path) == ["step-00000005"]
    assert same(load(tmp_path).tensors, {"x": np.ones(2)})


def test_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        put(tmp_path, step)
    assert steps(tmp_path) == [1, 2, 3, 4]
    put(tmp_path, 5, keep=3)
    assert steps(tmp_path) == [3, 4, 5]
    # A run that went back to step 3: what it writes stays, and the later steps of the earlier run too.
    save(tmp_path, 4, tensors={}, meta={}, keep=1)
    assert steps(tmp_path) == [4, 5]
    put(tmp_path, 7, keep=np.int64(9))
    assert names(tmp_path) == ["step-00000004", "step-00000005", "step-00000007"]


def test_keep_does_not_count_damaged_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step)
    os.truncate(tmp_path / "step-00000003" / TENSORS, 10)
    (tmp_path / "step-00000004").mkdir()
    put(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [2, 5]
    put(tmp_path, 6, keep=2)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]


def truncate(path: Path) -> None:
    os.truncate(path / TENSORS, (path / TENSORS).stat().st_size - 1)


def grow(path: Path) -> None:
    with open(path / TENSORS, "ab") as file:
        file.write(b"\0")


def flip(path: Path) -> None:
    data = bytearray((path / TENSORS).read_bytes())
    data[-3] ^= 1
    (path / TENSORS).write_bytes(data)


def truncate_manifest(path: Path) -> None:
    os.truncate(path / MANIFEST, 40)


def other_json(path: Path) -> None:
    (path / MANIFEST).write_bytes(seal({"generation": 1}, 1, "manifest"))


def drop_tensors(path: Path) -> None:
    (path / TENSORS).unlink()


def drop_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


DAMAGE: list[tuple[Callable[[Path], None], type[Exception], str]] = [
    (
        truncate,
        CorruptionError,
        r"step-00000002/tensors.safetensors\): it has \d+ bytes, not \d+; restore it .* earlier",
    ),
    (grow, CorruptionError, "tensors.safetensors.* it has"),
    (flip, CorruptionError, "tensors.safetensors.* its CRC does not match"),
    (truncate_manifest, CorruptionError, "checkpoint.json.* it is no checkpoint"),
    (other_json, CorruptionError, "checkpoint.json.* it is not the JSON of a checkpoint"),
    (drop_tensors, ObjectNotFound, "step-00000002/tensors.safetensors is missing; restore it"),
    (drop_manifest, ObjectNotFound, "step-00000002/checkpoint.json is missing; restore it"),
]


@pytest.mark.parametrize(("hurt", "error", "message"), DAMAGE)
def test_damage(tmp_path: Path, hurt: Callable[[Path], None], error: type[Exception], message: str) -> None:
    path = put(tmp_path, 2)
    hurt(path)
    for place in (path, tmp_path):
        with pytest.raises(error, match=message):
            load(place)
    put(tmp_path, 1)
    with pytest.warns(RuntimeWarning, match=f"step 1 is loaded in place of a newer one: .*{message}"):
        found = load(tmp_path)
    assert same(found.tensors, arrays(1))
    # A run that resumed from step 1 comes to step 2 again.
    put(tmp_path, 2)
    assert same(load(tmp_path).tensors, arrays(2))


def test_no_flipped_byte_goes_unnoticed(tmp_path: Path) -> None:
    path = put(tmp_path, 2)
    for name in (TENSORS, MANIFEST):
        whole = (path / name).read_bytes()
        for i in range(len(whole)):
            (path / name).write_bytes(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :])
            with pytest.raises((CorruptionError, NewerFormatError)):
                load(path)
        (path / name).write_bytes(whole)
    assert same(load(path).tensors, arrays(2))


def test_a_newer_format(tmp_path: Path) -> None:
    put(tmp_path, 1)
    path = put(tmp_path, 2)
    envelope = json.loads((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_text(json.dumps(envelope | {"format": 3, "body": "who knows"}))
    for place in (path, tmp_path):
        with pytest.raises(NewerFormatError, match=r"step-00000002/checkpoint.json has format 3, .* update thinrow"):
            load(place)
    assert steps(tmp_path) == [1, 2]


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"it is empty; write one with `thinrow train`"):
        load(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"x")
    for path, message in [
        (tmp_path / "none", "there is no such folder"),
        (tmp_path / "step-00000001", "there is no such folder"),
        (tmp_path / "model.pt", "it is a file"),
        (tmp_path, r"it holds no step-\* folder"),
    ]:
        with pytest.raises(CheckpointNotFound, match=f"{message}; write one with `thinrow train`"):
            load(path)


def test_a_checkpoint_that_is_removed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinrow.checkpoints import checkpoint

    put(tmp_path, 1)
    whole = checkpoint._read_one

    def race(path: Path, read: Any) -> Any:
        monkeypatch.setattr(checkpoint, "_read_one", whole)
        put(tmp_path, 2, keep=1)
        return whole(path, read)

    monkeypatch.setattr(checkpoint, "_read_one", race)
    assert load(tmp_path).step == 2


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1)
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        events.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    put(tmp_path, 2)
    *files, folder, named, parent = events
    assert sorted(files) == [MANIFEST, TENSORS]
    assert folder.startswith(".tmp-")
    assert (named, parent) == ("rename to step-00000002", tmp_path.name)


def test_files_are_as_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = put(tmp_path, 1)
    finally:
        os.umask(before)
    assert [(path / n).stat().st_mode & 0o777 for n in (TENSORS, MANIFEST)] == [0o640, 0o640]


def in_a_process(code: str, *arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_disk_without_room(tmp_path: Path) -> None:
    put(tmp_path, 1)
    print_error = """
import resource, sys
import numpy as np
from thinrow.checkpoints import save
from thinrow.core.errors import StoreError
save(sys.argv[1], 2, tensors={}, meta={})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
for tensors, meta in [({"x": np.zeros(1 << 17, np.uint8)}, {}), ({}, {"x": "y" * (1 << 17)})]:
    try:
        save(sys.argv[1], 3, tensors=tensors, meta=meta)
    except StoreError as e:
        print(e)
"""
    told = in_a_process(print_error, tmp_path).splitlines()
    message = r"cannot save step 3 in .*File too large.*; earlier checkpoints are as they were, free space or check"
    assert [bool(re.match(message, line)) for line in told] == [True, True], told
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert load(tmp_path).step == 2


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Without root's right to write everywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_is_not_writable(as_nobody: None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder), 1)
        os.chmod(folder, 0o555)
        with pytest.raises(StoreError, match=r"cannot save step 2 in .*: Permission denied; .* check permissions"):
            put(Path(folder), 2)
        assert load(folder).step == 1
        os.chmod(folder, 0o755)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(StoreError, match=r"cannot save step 1 in .*run"):
        put(tmp_path / "run", 1)


def test_without_torch_and_safetensors(tmp_path: Path) -> None:
    without_either = """
import sys
sys.modules["torch"] = sys.modules["safetensors"] = None
import numpy as np
from thinrow.checkpoints import load, save
print(load(save(sys.argv[1], 7, tensors={"x": np.arange(3)}, meta={})).tensors["x"])
"""
    assert in_a_process(without_either, tmp_path) == "[0 1 2]\n"


@pytest.mark.parametrize(("call", "room", "fits"), [("save", 0.25, True), ("load", 1.25, True), ("load", 0.75, False)])
def test_large_tensors_are_in_memory_once(tmp_path: Path, call: str, room: float, fits: bool) -> None:
    within_bounds = """
import resource, sys
import numpy as np
from thinrow.checkpoints import load, save

folder, call, room = sys.argv[1:]
size = 1 << 27
tensors = {"x": np.ones(size, np.uint8)}
load(save(folder, 0, tensors={}, meta={}))
save(folder, 1, tensors=tensors, meta={})
if call == "load":
    del tensors
line = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
bound = int(line.split()[1]) * 1024 + int(float(room) * size)
resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
try:
    save(folder, 2, tensors=tensors, meta={}) if call == "save" else load(folder)
    print("fits")
except BaseException as e:
    print("fails", type(e))
"""
    assert in_a_process(within_bounds, tmp_path, call, room).startswith("fits" if fits else "fails")
