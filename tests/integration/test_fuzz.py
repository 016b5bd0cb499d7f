"""A sample of the reader's fuzzing, in this process and in workers; ``python -m thinrow.testing.fuzz`` goes on from it.

And what fuzzing found, each as a case of its own: fields whose CRCs are right and whose values no writer wrote.
"""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from thinrow.core.errors import CorruptionError, InputError, ThinrowError
from thinrow.core.users import plain
from thinrow.history.archive import few
from thinrow.history.archive.generation import Generation
from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.lookup import naming
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.verify import verify_generation
from thinrow.history.archive.window import read_everything
from thinrow.history.archive.writer import SegmentWriter
from thinrow.jagged import Events
from thinrow.kernels import kernel
from thinrow.schema import Trait
from thinrow.storage.objects import MemoryObjects
from thinrow.storage.sealed import seal
from thinrow.testing.fuzz.block_tries import BlockTries
from thinrow.testing.fuzz.damage import layout_of
from thinrow.testing.fuzz.guard import guarded
from thinrow.testing.fuzz.layout import Layout, close, mend
from thinrow.testing.fuzz.reads import Read, aimed
from thinrow.testing.fuzz.standing import Standing
from thinrow.testing.fuzz.tries import Tries
from thinrow.testing.fuzz.world import COLUMNS, World, opened, sound_worlds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guards memory with mprotect")


def read(generation: Generation, world: World) -> Events:
    columns = [c for c in stored_columns(generation.schema) if c.group != "keys"]
    return read_everything(generation, world.users, columns, ReadStats())


def test_a_sample_of_damaged_stores() -> None:
    tries = Tries(5)
    assert [f for f in map(tries.run, range(20)) if f is not None] == []


def test_a_sample_of_damaged_blocks() -> None:
    tries = BlockTries(5)
    assert [f for f in map(tries.run, range(2_000)) if f is not None] == []


def test_what_is_not_a_number_both_ways_is_the_same() -> None:
    """Once taken for a difference: damage that makes NaN, read from a mapped file and from fetched bytes."""
    assert Tries(42).run(21_526) is None


def test_a_try_is_the_same_every_time() -> None:
    tries = Tries(9)
    for number in range(20):
        a, b = tries.damaged(number)[1], tries.damaged(number)[1]
        assert (a.files, a.what) == (b.files, b.what)


@pytest.mark.parametrize("maps", [True, False])
def test_a_standing_store_is_sound_after_every_damage(maps: bool) -> None:
    world, rng = sound_worlds()[3], np.random.default_rng(4)
    store = Standing(sound_worlds(), world, maps)
    everything = read(store.generation, world)
    for _ in range(120):
        with store.damaged(rng) as hit, contextlib.suppress(ThinrowError):
            aimed(rng, hit, world, store.generation)(store.generation, world)
        again = read(store.generation, world)
        assert all(again.columns[n].to_arrow().equals(c.to_arrow()) for n, c in everything.columns.items()), hit
        assert np.array_equal(again.arrival, everything.arrival)
    assert verify_generation(store.generation) == []


def test_a_standing_store_reads_what_lies_there_now() -> None:
    world, rng = sound_worlds()[2], np.random.default_rng(6)
    store = Standing(sound_worlds(), world, True)
    read(store.generation, world)
    refused = sound = 0
    for _ in range(150):
        with store.damaged(rng) as hit:
            if hit.sealed or hit.same:
                continue
            try:
                read(store.generation, world)
                sound += 1
            except ThinrowError:
                refused += 1
    assert refused > 3 * sound


def test_most_tries_get_behind_the_crcs() -> None:
    tries = Tries(7)
    assert [f for f in map(tries.run, range(300)) if f is not None] == []
    by_crc, behind, _, other = tries.outcomes
    assert sum(tries.outcomes) >= 290
    assert by_crc < 0.45 * sum(tries.outcomes)
    assert behind > 0.2 * sum(tries.outcomes)
    assert other > 0


def test_no_byte_beside_a_guarded_array_can_be_touched() -> None:
    script = (
        "import ctypes\nfrom thinrow.testing.fuzz.guard import guarded\na = guarded(16)\na[:] = 1\n"
        "print('inside', flush=True)\nctypes.string_at(a.ctypes.data + 16, 1)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "inside\n"
    assert ran.returncode < 0
    assert guarded(0).nbytes == 0
    with pytest.raises(MemoryError):
        guarded(1 << 62)


@pytest.mark.slow
def test_a_longer_run_in_workers() -> None:
    command = [sys.executable, "-m", "thinrow.testing.fuzz", "--tries", "2000", "--blocks", "40000", "--seed", "3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=3_000)
    assert ran.returncode == 0, ran.stdout
    assert "blocks: 40,000 tries" in ran.stdout


#: A change of the body and meta of a segment; what it returns is changed too and gets its CRCs made anew.
Change = Callable[[bytearray, dict[str, Any], Layout], list[tuple[int, int]]]


def sealed(world: World, change: Change, which: int = 1) -> Generation:
    """The newest generation where file ``which`` of the live ones is changed, its CRCs and its size being right."""
    name = world.live[which]
    layout, data = layout_of(world.files[name]), world.files[name]
    body, meta = bytearray(data[: layout.body]), json.loads(json.dumps(layout.meta))
    mend(body, layout, change(body, meta, layout), set())
    changed = close(body, meta)
    manifest = json.loads(world.files[world.live[0]])["body"]
    segments = manifest["segments"][0]
    for entry in [*segments, *(o for s in segments for o in s.get("overlays", ()))]:
        if entry["name"] == name:
            entry["bytes"] = len(changed)
    return opened({**world.files, name: changed, world.live[0]: seal(manifest, 2, "manifest")}).pin()


def setting(what: str, value: int, nth: int = 0) -> Change:
    def change(body: bytearray, meta: dict[str, Any], layout: Layout) -> list[tuple[int, int]]:
        span = [s for s in layout.fields if s.what == what][nth]
        body[span.start : span.stop] = (value % (1 << 64)).to_bytes(8, "little")[: span.stop - span.start]
        return [(span.start, span.stop)]

    return change


def in_meta(*path: Any, value: Any) -> Change:
    def change(body: bytearray, meta: dict[str, Any], layout: Layout) -> list[tuple[int, int]]:
        node: Any = meta
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        return []

    return change


def in_text_dictionary(body: bytearray, meta: dict[str, Any], layout: Layout) -> list[tuple[int, int]]:
    """An offset of a dictionary of strings far beyond its bytes."""
    base = meta["sections"]["dictionaries"][0]
    (column,) = [c for c in meta["columns"] if c["name"] == "kind"]
    at = base + column["dictionary"]["offset"] + 8
    body[at : at + 8] = struct.pack("<q", 1 << 40)
    return [(at, at + 8)]


def no_utf8(body: bytearray, meta: dict[str, Any], layout: Layout) -> list[tuple[int, int]]:
    base = meta["sections"]["dictionaries"][0]
    (column,) = [c for c in meta["columns"] if c["name"] == "kind"]
    end = base + column["dictionary"]["offset"] + column["dictionary"]["length"]
    body[end - 1] = 0xFF
    return [(end - 1, end)]


CASES: dict[str, tuple[Change, str]] = {
    "rows of a piece": (setting("pieces.n_rows", 0xFFFFFFFF), "more than 65536 rows"),
    "rows beyond the stripe": (setting("pieces.n_rows", 65_536), "rows beyond the stripe"),
    "no rows in a piece": (setting("pieces.n_rows", 0), "of 0 or more"),
    "rows of a stripe": (setting("stripes.n_rows", 0xFFFFFFFF), "a stripe of 4294967295 rows"),
    "a stripe that wraps": (setting("stripes.chunk.offset", -4), "bytes beyond the file"),
    "records of a table": (setting("stripes.n_records", -3), "records of 'stripes'"),
    "first record of a page": (setting("pieces.page.first", 1 << 63), "records of 'pieces'"),
    "offsets of strings": (in_text_dictionary, "do not ascend"),
    "bytes of strings": (no_utf8, "holds no string"),
    "a dictionary's size": (in_meta("columns", 3, "dictionary", value={"offset": "x"}), "not described"),
    "kind of users": (in_meta("user_kind", value="x"), "users of kind 'x'"),
    "rows as text": (in_meta("n_rows", value="9"), "'9' rows"),
    "null of a column": (in_meta("schema", "columns", 0, "nullable", value="x"), "nullable is 'x'"),
    "size of a vector": (in_meta("schema", "columns", 9, "size", value=3), "vectors of 3"),
}  # fmt: skip


@pytest.mark.parametrize("world", sound_worlds()[:2], ids=["int64", "string"])
@pytest.mark.parametrize("case", CASES)
def test_hostile_values_under_right_crcs(case: str, world: World) -> None:
    change, message = CASES[case]
    generation = sealed(world, change)
    with pytest.raises((CorruptionError, InputError), match=message):
        read(generation, world)
    assert verify_generation(sealed(world, change))


@pytest.mark.parametrize(
    "value", [{"ragged": 10**30}, {"dtype": -1}, {"dtype": "string"}, {"size": 7}, {"nullable": 1}]
)
def test_an_overlay_of_another_shape_is_refused(value: dict[str, Any]) -> None:
    world = sound_worlds()[0]
    ((key, other),) = value.items()
    which = next(i for i, n in enumerate(world.live) if n.endswith(".ovl"))
    with pytest.raises(CorruptionError):
        read(sealed(world, in_meta("column", key, value=other), which), world)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("n_buckets",), -1),
        (("n_buckets",), 10**9),
        (("segments",), [[], []]),
        (("segments", 0, 0, "name"), 7),
        (("segments", 0, 0, "bytes"), "x"),
        (("segments", 0, 0, "n_rows"), -5),
        (("segments", 0, 0, "overlays", 0, "column"), None),
        (("tombstones", "salt"), "no hex"),
        (("tombstones", "files", "0", "name"), 4),
        (("schema", "columns", 0, "id"), 2**63),
        (("schema_log",), [[]]),
    ],
)
def test_a_manifest_of_other_types_is_refused(path: tuple[Any, ...], value: Any) -> None:
    world = sound_worlds()[0]
    body = json.loads(world.files[world.live[0]])["body"]
    node: Any = body
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises((CorruptionError, InputError)):
        opened({**world.files, world.live[0]: seal(body, 2, "manifest")}).pin()


def test_damage_that_hits_no_user_keeps_its_error() -> None:
    with pytest.raises(CorruptionError, match="damaged here") as caught, naming(None):
        raise CorruptionError("damaged here", file="a.seg")
    assert caught.value.user is None


def test_deep_nesting_is_no_manifest() -> None:
    world = sound_worlds()[0]
    with pytest.raises(CorruptionError):
        opened({**world.files, world.live[0]: b"[" * 200_000}).pin()


def test_stripes_have_a_most() -> None:
    world = sound_worlds()[0]
    schema = opened(world.files).pin().schema
    with pytest.raises(InputError, match="give 1 to 65536"):
        SegmentWriter(MemoryObjects(), "segments/00000/a.seg", schema, bucket=0, n_buckets=1, stripe_rows=1 << 17)


def test_sound_stores_are_sound() -> None:
    for world in sound_worlds():
        generation = opened(world.files).pin()
        assert verify_generation(generation) == []
        assert [plain(u) for u in read(generation, world).users] == [plain(u) for u in world.users]
    codecs = {b.codec for w in sound_worlds()[:2] for n in w.live[1:] for b in layout_of(w.files[n]).blocks}
    assert codecs >= set(range(14)) - {5}
    assert np.array([len(w.live) for w in sound_worlds()[:2]]).min() >= 11


def test_reads_of_a_few_requests_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column that one call can read is read by it in the last store, whole batches and single requests."""
    world, said = sound_worlds()[-1], []
    generation = Standing(sound_worlds(), world, True).generation

    def heard(name: str) -> Any:
        return lambda *args: said.append((name, kernel(name)(*args))) or said[-1][1]

    monkeypatch.setattr(few, "kernel", heard)
    for column in (c.name for c in COLUMNS if c.trait in (Trait.ID, Trait.NUMERIC, Trait.BITMAP)):
        for read in (Read("logged", 0, column, 200), Read("logged", 1, column, 1), Read("batch", 0, column, 200)):
            said.clear()
            read(generation, world)
            assert said[-1] == ("read_few", 0), (read, said)


def test_blocks_with_patches_are_tried_of_each_codec_that_has_them() -> None:
    held = {(b.codec, b.width) for blocks in BlockTries(1)._blocks for b in blocks}
    assert {(codec, 255) for codec in (2, 3, 4, 11, 13)} <= held
