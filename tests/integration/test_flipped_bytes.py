"""A byte of a segment or manifest is changed: a typed error names file, user and column, and no read is ever wrong.

Small stores of integer and of string users hold every kind of section: dictionaries, zstd blocks, nulls, event ids,
hide-lists, several segments a bucket. ``make test`` changes a seeded sample of bytes that meets every section of every
file; ``-m slow`` changes each byte twice.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest

from thinrow.core.errors import CorruptionError, NewerFormatError, ObjectNotFound, StoreError, ThinrowError
from thinrow.history import buckets as buckets_module
from thinrow.history.archive import encode as encode_module
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.segment import Segment
from thinrow.history.archive.verify import verify_generation
from thinrow.history.archive.window import read_everything
from thinrow.history.compact import compact
from thinrow.history.intake import check_table
from thinrow.history.recent.memory import MemoryRecent
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.snapshot import take_snapshot
from thinrow.schema import ColumnSpec, EventSchema, Projection, Trait
from thinrow.storage.codecs import ENTRY_DTYPE, header_bytes
from thinrow.storage.container import VERSION, crc_of
from thinrow.storage.objects import MemoryObjects

KINDS = ("int64", "string")
COLUMNS = (
    ColumnSpec(1, "item", Trait.ID, "int64", "item"),
    ColumnSpec(2, "kind", Trait.CATEGORICAL, "string", "item", nullable=True),
    ColumnSpec(3, "price", Trait.NUMERIC, "float32", "price", nullable=True),
    ColumnSpec(4, "weight", Trait.NUMERIC, "float64", "price"),
    ColumnSpec(5, "note", Trait.TEXT, "string", "text", nullable=True),
    ColumnSpec(6, "blob", Trait.TEXT, "binary", "text"),
    ColumnSpec(7, "flag", Trait.CATEGORICAL, "int8", "flag"),
    ColumnSpec(8, "seen", Trait.ID_LIST, "int16", "more", nullable=True),
    ColumnSpec(9, "tags", Trait.ID_LIST, "string", "more"),
    ColumnSpec(10, "spot", Trait.VECTOR, "float32", "more", nullable=True, size=2),
    ColumnSpec(11, "rare", Trait.NUMERIC, "int64", "more", nullable=True),
    ColumnSpec(12, "session", Trait.ID, "int64", "more"),
    ColumnSpec(13, "cents", Trait.NUMERIC, "float64", "more"),
)
Files = dict[str, bytes]
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """A sound store: its files, what reading all of it gives, and what logged requests saw."""

    schema: EventSchema
    files: Files
    users: Any
    batch: RequestBatch
    truth: list[Any]
    little: list[Any]

    def segments(self) -> list[str]:
        """Those of the newest generation; older ones may be merged away."""
        return [info.name for _, info in opened(self.files).segments]

    def newest_manifest(self) -> str:
        return max(n for n in self.files if n.startswith("manifests/"))


def table(rng: np.random.Generator, kind: str, owners: list[int], corrects: list[int | None]) -> pa.Table:
    """One event of each of the newest ``len(corrects)`` owners; an event's id is its place in ``owners``."""
    n = len(corrects)
    numbers = range(len(owners) - n, len(owners))
    ids: list[Any] = list(numbers)
    targets: list[Any] = list(corrects)
    users: list[Any] = owners[-n:]
    if kind == "int64":
        # Ids are strings where users are not.
        ids, targets = [str(i) for i in ids], [None if c is None else str(c) for c in corrects]
    else:
        users = [f"user {u} é" for u in users]
    notes = [None if rng.random() < 0.2 else f"note {i} " * int(rng.integers(0, 4)) for i in ids]
    return pa.table(
        {
            "user_id": users,
            "event_ts": rng.integers(0, 5_000, n),
            "event_id": ids,
            "supersedes": pa.array(targets, pa.string() if kind == "int64" else pa.int64()),
            "item": rng.integers(-4, 2**40, n),
            "kind": rng.choice(["a", "bb", "é"], n),
            "price": pa.array(rng.choice([0.5, -0.0, 3.25], n), pa.float32(), mask=rng.random(n) < 0.2),
            "weight": rng.random(n),
            "note": pa.array(notes, pa.string()),
            "blob": pa.array([rng.bytes(int(rng.integers(0, 9))) for _ in range(n)], pa.binary()),
            "flag": pa.array(rng.integers(0, 2, n), pa.int8()),
            "seen": pa.array([None if i % 5 == 0 else [i % 7] * (i % 4) for i in numbers], pa.list_(pa.int16())),
            "tags": pa.array([["a", "", "é"][: i % 4] for i in range(n)], pa.list_(pa.string())),
            "spot": pa.array([None if i % 6 == 0 else [i / 2, -0.0] for i in range(n)], pa.list_(pa.float32(), 2)),
            "rare": pa.array(rng.integers(0, 2**60, n), mask=rng.random(n) < 0.9),
            "session": np.array(owners[-n:]) * (2**55 - 1),
            "cents": np.round(rng.random(n), 2),
        }
    )


def build(kind: str) -> World:
    rng = np.random.default_rng(11)
    schema = EventSchema(
        COLUMNS,
        user_kind=kind,  # type: ignore[arg-type]
        event_id_column="event_id",
        event_id_dtype="string" if kind == "int64" else "int64",
        supersedes_column="supersedes",
    )
    objects = MemoryObjects()
    archive, recent = Archive.create(objects, schema, 2, lambda: 0), MemoryRecent(schema)
    batches: list[RequestBatch] = []
    owners: list[int] = []
    users: Any = None
    for n, compacts in ((100, True), (22, True), (4, True), (9, False)):
        known = list(owners)
        owners += rng.integers(-3, 4, n).tolist()
        corrects: list[int | None] = [None] * n
        for row in range(0, n, 3):
            mine = [i for i, owner in enumerate(known) if owner == owners[len(known) + row]]
            corrects[row] = int(rng.choice(mine)) if mine else None
        events = check_table(table(rng, kind, owners, corrects), schema)
        recent.append(events.users, events.event_ts, events.columns, events.event_ids, events.supersedes)
        users = recent.known_users()
        batches.append(take_snapshot(archive.pin, recent, users, rng.integers(2_000, 6_000, len(users))).requests)
        if compacts:
            compact(archive, recent)
    batch = RequestBatch.concat(batches)
    files = {n: objects.get(n) for n in objects.list("")}
    return World(schema, files, users, batch, read_all(files, users, batch), read_little(files, batch))


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest) -> World:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets_module, "STRIPE_ROWS", 16)
        # So that few rows meet the codec of long strings.
        patch.setattr(encode_module, "_ALWAYS_STRINGS", 3)
        world = build(request.param)
    generation = opened(world.files)
    for number, (_, info) in enumerate(generation.segments):
        SOUND[info.name, id(world.files[info.name])] = generation.segment(number)
    return world


#: Sound segments, opened once: (name, identity of its bytes) -> segment. To open all others anew for every byte of one
#: would take most of the time.
SOUND: dict[tuple[str, int], Segment] = {}


def opened(files: Files) -> Generation:
    objects = MemoryObjects()
    for name, data in files.items():
        objects.put(name, data)
    archive = Archive(objects)
    generation = archive.pin()
    for _, info in generation.segments:
        sound = SOUND.get((info.name, id(files.get(info.name))))
        if sound is not None:
            archive._open[info.name] = sound
    return generation


def read_all(files: Files, users: Any, batch: RequestBatch) -> list[Any]:
    """Every column of every event, hidden ones included, and what each request saw: newest 3, and all."""
    generation = opened(files)
    events = read_everything(
        generation, users, [c for c in stored_columns(generation.schema) if c.group != "keys"], ReadStats()
    )
    found = [a.tolist() for a in (events.offsets, events.event_ts, events.arrival, events.hidden_from)]
    found += [c.to_arrow().to_pylist() for c in events.columns.values()]
    for n in (3, None):
        histories = reconstruct(generation, batch, Projection(max_len=n)).histories
        found += [histories.to_jagged(c).to_arrow().to_pylist() for c in ("arrival", *(c.name for c in COLUMNS))]
    return found


def read_little(files: Files, batch: RequestBatch) -> list[Any]:
    """One column, newest 2, of one request: most bytes are none of its business."""
    one = batch.take(np.array([-1]))
    histories = reconstruct(opened(files), one, Projection(columns=("kind",), max_len=2)).histories
    return [histories.to_jagged(c).to_arrow().to_pylist() for c in ("event_ts", "kind")]


def attempt(read: Callable[[], T]) -> T | CorruptionError | NewerFormatError | ObjectNotFound:
    """What ``read`` gives, or one of the three errors that damage may be; any other error is a failure."""
    try:
        return read()
    except (CorruptionError, NewerFormatError, ObjectNotFound) as e:
        return e


def only_that(generation: Generation, name: str) -> Generation:
    """The generation with segment ``name`` alone: to verify the sound ones too would take most of the time."""
    return generation.only([i for i, (_, info) in enumerate(generation.segments) if info.name == name])


def names_file(error: object, name: str) -> bool:
    if isinstance(error, CorruptionError):
        return error.file == name and name in str(error)
    return isinstance(error, ThinrowError) and name in str(error)


def check(world: World, files: Files, name: str, block: tuple[set[Any], str] | None = None) -> None:
    """Hold a store whose file ``name`` is damaged to the promise. ``block``: users and column of the block hit."""
    damages = attempt(lambda: verify_generation(only_that(opened(files), name)))
    if isinstance(damages, list):
        assert any(d.file == name for d in damages), f"verify reports {damages}"
        if block is not None:
            assert any(d.user in block[0] and d.column == block[1] for d in damages), f"verify reports {damages}"
    else:
        assert names_file(damages, name), str(damages)
        assert block is None, f"verify does not open the store: {damages}"
    everything = attempt(lambda: read_all(files, world.users, world.batch))
    assert names_file(everything, name), f"all was read: {everything}"
    if block is not None:
        assert isinstance(everything, CorruptionError)
        assert everything.user in block[0]
        assert everything.column == block[1]
    little = attempt(lambda: read_little(files, world.batch))
    assert little == world.little or names_file(little, name), str(little)


def blocks_of(world: World, name: str) -> list[tuple[int, int, set[Any], str]]:
    """(first byte, last byte exclusive, users, column) of every block of a segment, and of chunk headers by group."""
    objects = MemoryObjects()
    objects.put(name, world.files[name])
    segment = Segment(objects, name)
    pieces = np.concatenate([records for _, records, _ in segment.pieces.scan()])
    users = segment.pieces.keys()
    found = []
    for stripe, record in enumerate(r for _, records, _ in segment.stripes.scan() for r in records):
        owners = set(users[pieces["stripe"] == stripe].tolist())
        for g, group in enumerate(segment.groups):
            start, names = int(record["chunks"][g]["offset"]), segment.stream_names(group)
            entries = np.frombuffer(world.files[name], ENTRY_DTYPE, len(names), start)
            at = start + header_bytes(len(names))
            found.append((start, at, owners, f"group {group}"))
            for entry, column in zip(entries, names, strict=True):
                found.append((at, at + int(entry["length"]), owners, column))
                at += int(entry["length"])
    return found


def flipped(files: Files, name: str, at: int, mask: int) -> Files:
    data = bytearray(files[name])
    data[at] ^= mask
    return {**files, name: bytes(data)}


def flip_and_check(world: World, name: str, places: list[tuple[int, int]]) -> None:
    blocks = blocks_of(world, name) if name.endswith(".seg") else []
    for at, mask in places:
        hit = next(((users, column) for a, b, users, column in blocks if a <= at < b), None)
        try:
            check(world, flipped(world.files, name, at, mask), name, hit)
        except BaseException as e:
            e.add_note(f"byte {at} of {len(world.files[name])} in {name}, mask {mask:#x}")
            raise


def test_the_store_has_all_that_can_be_hit(world: World) -> None:
    generation = opened(world.files)
    assert max(len(generation.segments_of(b)) for b in range(2)) >= 3
    segments = [generation.segment(i) for i in range(len(generation.segments))]
    assert any(len(s.hides.users) for s in segments)
    assert any(s.container.section("dictionaries")[1] for s in segments)
    codecs = {int(k) for s in segments for c in s.meta["columns"] for k in c["codec_counts"]}
    assert {0, 1, 2, 4, 6, 7, 11} <= codecs
    assert verify_generation(generation) == []
    assert len(world.batch.inline)
    assert len(world.batch.hides)
    assert read_all(world.files, world.users, world.batch) == world.truth


def test_a_sample_of_flipped_bytes(world: World) -> None:
    """Bytes of every section, header and block kind of every segment, and of every kind of byte of the manifest."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = np.random.default_rng(5)
    for name in world.segments():
        size = len(world.files[name])
        objects = MemoryObjects()
        objects.put(name, world.files[name])
        container = Segment(objects, name).container
        regions = [(a, b) for a, b, _, _ in blocks_of(world, name)]
        regions = [regions[i] for i in rng.permutation(len(regions))[:16]]
        regions += [(o, o + n) for o, n, _ in map(container.section, container.sections)]
        regions += [(0, 8), (8, 10), (10, 16), (size - 32, size - 24), (size - 24, size - 20), (size - 20, size - 14)]
        regions += [(size - 14, size - 8), (size - 8, size), (max(o for _, o in regions[:-6]), size - 32)]
        places = [(int(rng.integers(a, b)), 1 << int(rng.integers(0, 8))) for a, b in regions if b > a]
        flip_and_check(world, name, places)
    manifest = world.newest_manifest()
    size = len(world.files[manifest])
    places = [(int(at), int(rng.integers(1, 256))) for at in rng.integers(0, size, 150)]
    flip_and_check(world, manifest, places)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000, "KiB more than before"


def test_verify_names_every_user_that_is_hit(world: World) -> None:
    """One byte in the item block of every second stripe; a dictionary is damaged too."""
    name = max(world.segments(), key=lambda n: len(world.files[n]))
    blocks = [b for b in blocks_of(world, name) if b[3] == "item" and b[1] > b[0]]
    files = world.files
    for start, _, _, _ in blocks[::2]:
        files = flipped(files, name, start, 4)
    objects = MemoryObjects()
    objects.put(name, files[name])
    offset, length, _ = Segment(objects, name).container.section("dictionaries")
    files = flipped(files, name, offset + length - 1, 4)
    damages = verify_generation(opened(files))
    hit = {u for _, _, users, _ in blocks[::2] for u in users}
    assert {d.user for d in damages if d.column == "item"} == hit
    assert len(blocks) > 3
    assert {(d.file, d.user) for d in damages if d.column != "item"} == {(name, None)}


def test_spaces_of_a_manifest_are_vouched_for_too(world: World) -> None:
    """A space that becomes a newline or a tab, and an escape in other letters, leave the JSON as it was."""
    name = world.newest_manifest()
    data = world.files[name]
    at = data.index(b" ")
    for mask in (ord(" ") ^ ord("\n"), ord(" ") ^ ord("\t")):
        changed = flipped(world.files, name, at, mask)
        assert json.loads(changed[name]) == json.loads(data)
        check(world, changed, name)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_every_byte_flipped(world: World, mask: int) -> None:
    for name in (*world.segments(), world.newest_manifest()):
        flip_and_check(world, name, [(at, mask) for at in range(len(world.files[name]))])


def lengths(data: bytes, n: int, seed: int) -> list[int]:
    near = [0, 1, 15, 16, 17, 47, 48, len(data) - 33, len(data) - 32, len(data) - 8, len(data) - 1]
    some = np.random.default_rng(seed).integers(0, len(data), n).tolist()
    return sorted({a for a in (*near, *some) if 0 <= a < len(data)})


def test_truncated_files(world: World) -> None:
    for name in (*world.segments(), world.newest_manifest()):
        for length in lengths(world.files[name], 5, 3):
            check(world, {**world.files, name: world.files[name][:length]}, name)


@pytest.mark.slow
def test_truncated_at_every_length(world: World) -> None:
    for name in (*world.segments(), world.newest_manifest()):
        for length in range(len(world.files[name])):
            check(world, {**world.files, name: world.files[name][:length]}, name)


def test_bytes_too_many(world: World) -> None:
    for name in (*world.segments(), world.newest_manifest()):
        for more in (b"\0", b" ", b"\n", world.files[name]):
            check(world, {**world.files, name: world.files[name] + more}, name)


def test_empty_and_missing_files(world: World) -> None:
    for name in (*world.segments(), world.newest_manifest()):
        check(world, {**world.files, name: b""}, name)
    for name in world.segments():
        check(world, {n: d for n, d in world.files.items() if n != name}, name)


def test_segments_in_each_others_place(world: World) -> None:
    """Sound files all: only the manifest can tell that each is not the one that it names."""
    names = world.segments()
    for one in names:
        for other in names:
            if one != other:
                check(world, {**world.files, one: world.files[other]}, one)
    check(world, {**world.files, names[0]: world.files[names[1]], names[1]: world.files[names[0]]}, names[0])


def test_a_manifest_under_another_number(world: World) -> None:
    older = min(n for n in world.files if n.startswith("manifests/"))
    check(world, {**world.files, world.newest_manifest(): world.files[older]}, world.newest_manifest())


def test_a_manifest_of_another_store(world: World) -> None:
    """Its own CRC is sound; the files that it names are not here."""
    other = build("string" if world.schema.user_kind == "int64" else "int64")
    name = other.newest_manifest()
    files = {**world.files, world.newest_manifest(): other.files[name]}
    assert verify_generation(opened(files))
    with pytest.raises(StoreError, match="segments/"):
        read_all(files, other.users, other.batch)


def test_a_newer_format(world: World) -> None:
    name = world.newest_manifest()
    envelope = json.loads(world.files[name])
    newer = json.dumps({**envelope, "format": 3}, sort_keys=True, indent=1).encode()
    with pytest.raises(NewerFormatError, match=f"{name} has format 3, this thinrow reads up to 2; update thinrow"):
        opened({**world.files, name: newer})
    segment = world.segments()[0]
    data = bytearray(world.files[segment])
    data[8:10] = data[-16:-14] = (VERSION + 1).to_bytes(2, "little")
    files = {**world.files, segment: bytes(data)}
    with pytest.raises(NewerFormatError, match=f"{segment} has format version {VERSION + 1}"):
        read_all(files, world.users, world.batch)
    # No damage to mend: verifying says the one thing that helps.
    with pytest.raises(NewerFormatError, match=f"{segment} has format version {VERSION + 1}"):
        verify_generation(opened(files))


def test_wrong_bytes_under_a_right_crc_do_not_pass_for_data(world: World) -> None:
    """A manifest whose body is sound JSON of the wrong shape, with its CRC made anew."""
    name = world.newest_manifest()
    body = json.loads(world.files[name])["body"]
    for change in ({"segments": []}, {"segments": [[{}], []]}, {"n_buckets": "x"}, {"schema": None}, {"schema": {}}):
        changed = {**body, **change}
        crc = crc_of(json.dumps(changed, sort_keys=True, separators=(",", ":")).encode())
        data = json.dumps({"format": 1, "crc32c": crc, "body": changed}, sort_keys=True, indent=1).encode()
        with pytest.raises(CorruptionError, match=name):
            opened({**world.files, name: data})
