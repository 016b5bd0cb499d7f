"""Damage of a store, raw or sealed, as the number of a try says.

Worked example: ``damage(worlds, rng)`` sets the ``width`` of a header entry to 65, makes the CRC of the header, that of
the page of its stripe record and so on anew, and says so: ``sealed segments/00000/...: header.width 12 -> 65``.
"""

from __future__ import annotations

import json
import struct
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from thinrow.storage.container import crc_of
from thinrow.storage.sealed import seal
from thinrow.testing.fuzz.layout import Block, Layout, Span, close, mend, read_layout
from thinrow.testing.fuzz.world import Files, World

#: What comes of a try: an error that a CRC caused, any other typed error, the sound data, other data.
OUTCOMES = ("refused by a CRC", "refused behind the CRCs", "sound data", "other data, under right CRCs")
#: A file that can be changed where it lies.
Bytes: TypeAlias = bytearray | memoryview
#: Words that stand at the edges of what a field may hold.
_EDGES = (0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 511, 512, 4095, 4096, 32768, 65535, 1 << 20)
_WIDE = (
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 62),
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 8,
    (1 << 64) - 1,
)
_JSON: tuple[Any, ...] = (
    *(None, True, "", "x", "int64", "string", "\ud800".encode("utf-16", "surrogatepass").decode("latin-1")),
    *([], {}, [[]], [1, 2, 3], {"a": 1}, 0, 1, -1, 1.5, 1e300, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**30),
)


@dataclass(frozen=True)
class Damaged:
    """A damaged store.

    Attributes:
        files: name -> bytes.
        name: the file that was hit.
        sealed: whether CRCs were made anew.
        what: the damage in words.
        same: whether the bytes are, by chance, the sound ones.
    """

    files: Files
    name: str
    sealed: bool
    what: str
    same: bool


@dataclass(frozen=True)
class Failure:
    """A try that did not do what is promised: its number, the damage, the read, and what happened.

    ``where`` is short and the same for failures of one cause.
    """

    number: int
    damage: str
    probe: str
    what: str
    where: str


def failure_of(number: int, damage: str, probe: str, error: BaseException) -> Failure:
    """The failure that an error of the wrong kind is."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in frames[::-1] if "thinrow" in f.filename and "fuzz" not in f.filename), frames[-1])
    where = f"{type(error).__name__} at {last.filename.rpartition('thinrow/')[2]}:{last.lineno}"
    return Failure(number, damage, probe, f"{type(error).__name__}: {error}"[:300], where)


def copied(tree: Any) -> Any:
    """A copy of JSON, made in a tenth of the time that ``deepcopy`` takes."""
    return json.loads(json.dumps(tree))


@cache
def layout_of(data: bytes) -> Layout:
    """``read_layout``, once for each file."""
    return read_layout(data)


def damage(worlds: Sequence[World], world: World, rng: np.random.Generator) -> Damaged:
    """The store of ``world`` with one file damaged; ``worlds`` are those that bytes of others may come from."""
    name = world.live[int(rng.choice(len(world.live)))]
    if rng.random() < 0.35:
        name = world.live[int(np.argmax([len(world.files[n]) for n in world.live]))]
    if rng.random() < 0.4:
        data, what = _raw(worlds, world, name, rng)
        files = {n: d for n, d in world.files.items() if n != name}
        if data is not None:
            files[name] = data
        return Damaged(files, name, False, f"raw {name}: {what}", data == world.files[name])
    files, what = _sealed_manifest(world, rng) if name.endswith(".json") else _sealed(worlds, world, name, rng)
    return Damaged(files, name, True, what, files == world.files)


def pick(rng: np.random.Generator, items: Sequence[Any]) -> Any:
    """One of the items."""
    return items[int(rng.integers(len(items)))]


def _raw(worlds: Sequence[World], world: World, name: str, rng: np.random.Generator) -> tuple[bytes | None, str]:
    sound, json_file = world.files[name], name.endswith(".json")
    if rng.random() < 0.3:
        return resized(rng, worlds, sound, cut_only=json_file)
    data = bytearray(sound)
    what = scribble(rng, data, None if json_file else layout_of(sound))
    return bytes(data), what


def scribble(rng: np.random.Generator, data: Bytes, layout: Layout | None) -> str:
    """Change bytes of a file as a disk or a network changes them; its size stays. Returns the damage in words."""
    n = len(data)
    kind = pick(rng, ("flip", "flip", "flip", "set", "set", "copy", "zero", "field", "field"))
    at = int(rng.integers(n))
    size = int(min(n - at, 1 << int(rng.integers(13))))
    if kind == "field" and layout is not None:
        span = pick(rng, layout.fields)
        data[span.start : span.stop] = hostile(rng, data, span)
        return f"{span.what} at {span.start}"
    if kind == "set":
        size = min(size, 16)
        data[at : at + size] = rng.bytes(size)
    elif kind == "copy":
        to = int(rng.integers(n - size + 1))
        data[to : to + size] = bytes(data[at : at + size])
    elif kind == "zero":
        data[at : at + size] = bytes(size)
    else:
        for _ in range(int(rng.integers(1, 4))):
            at, size = int(rng.integers(n)), 1
            data[at] ^= 1 << int(rng.integers(8))
    return f"{kind} at {at}, {size} bytes"


def resized(
    rng: np.random.Generator, worlds: Sequence[World], sound: bytes, cut_only: bool = False
) -> tuple[bytes | None, str]:
    """A file cut, made longer, gone (None), or another in its place; and the damage in words."""
    # Another manifest of the same number, or an older one, is a sound store.
    kind = pick(rng, ("cut", "more") if cut_only else ("cut", "more", "file", "gone"))
    at = int(rng.integers(len(sound)))
    if kind == "cut":
        return sound[:at], f"cut at {at}"
    if kind == "more":
        extra = bytes(int(rng.integers(1, 64))) if rng.random() < 0.5 else sound[at : at + int(rng.integers(1, 4096))]
        return sound + extra, f"{len(extra)} bytes more"
    if kind == "gone":
        return None, "gone"
    other = pick(rng, worlds)
    source = pick(rng, sorted(other.files))
    return other.files[source], f"{source} of {other.kind} users in its place"


def hostile(rng: np.random.Generator, data: Bytes, span: Span) -> bytes:
    """Other bytes for a field, of the same number."""
    size = span.stop - span.start
    top = 1 << (8 * size)
    old = int.from_bytes(data[span.start : span.stop], "little")
    kind = int(rng.integers(8))
    if kind < 2:
        new = pick(rng, [e for e in (*_EDGES, *_WIDE, top - 1, top // 2, top // 2 - 1) if e < top])
    elif kind == 2:
        new = old + pick(rng, (-8, -2, -1, 1, 2, 8))
    elif kind == 3:
        new = old ^ (1 << int(rng.integers(8 * size)))
    elif kind == 4:
        new = -pick(rng, (1, 2, 8, 64, 4096, 1 << 31))
    elif kind == 5:
        new = old * 2 if rng.random() < 0.5 else old // 2
    elif kind == 6 and size >= 4:
        part = 8 * int(rng.integers(size))
        new = (old & ~(0xFF << part)) | pick(rng, (0, 1, 6, 11, 12, 64, 65, 127, 128, 192, 255)) << part
    else:
        new = int.from_bytes(rng.bytes(size), "little")
    return (int(new) % top).to_bytes(size, "little")


def _sealed(worlds: Sequence[World], world: World, name: str, rng: np.random.Generator) -> tuple[Files, str]:
    sound = world.files[name]
    layout = layout_of(sound)
    body, meta = bytearray(sound[: layout.body]), copied(layout.meta)
    said: list[str] = []
    for _ in range(int(rng.choice(4, p=[0.0, 0.7, 0.2, 0.1]))):
        change = pick(rng, CHANGES)
        said.append(change(worlds, body, meta, layout, rng))
    data = close(body, meta)
    body_of = json.loads(world.files[world.live[0]])["body"]
    # A writer that is at fault names its own sizes, and mostly its own digests.
    for entry in _entries(body_of):
        if entry["name"] == name:
            entry["bytes"] = len(data)
            if rng.random() < 0.5:
                for key in ("n_rows", "n_users", "digests"):
                    if key in entry and key in meta:
                        entry[key] = meta[key]
                if "digest" in entry and "digest" in meta:
                    entry["digest"] = meta["digest"]
    return {**world.files, name: data, world.live[0]: seal_anything(body_of)}, "sealed " + "; ".join(said)


def _entries(body: dict[str, Any]) -> list[dict[str, Any]]:
    """All entries of a sound manifest's body that name a file."""
    segments = [s for bucket in body["segments"] for s in bucket]
    overlays = [o for s in segments for o in s.get("overlays", ())]
    return [*segments, *overlays, *body.get("tombstones", {}).get("files", {}).values()]


def seal_anything(body: dict[str, Any]) -> bytes:
    """As ``seal``, of bodies too that no writer makes."""
    return seal(body, 2, "manifest")


def _field(worlds: Any, body: Bytes, meta: Any, layout: Layout, rng: np.random.Generator) -> str:
    """One field gets a hostile value; kinds of fields are picked evenly, so that rare ones are met."""
    by_kind = fields_by_kind(layout)
    span = pick(rng, by_kind[pick(rng, sorted(by_kind))])
    old = bytes(body[span.start : span.stop])
    new = hostile(rng, body, span)
    body[span.start : span.stop] = new
    mend(body, layout, [(span.start, span.stop)], {span.start} if "crc" in span.what else set())
    small = [int.from_bytes(b, "little") for b in (old, new)]
    return f"{span.what} at {span.start}: {small[0]} -> {small[1]}"


_by_kind: dict[int, dict[str, list[Span]]] = {}


def fields_by_kind(layout: Layout) -> dict[str, list[Span]]:
    """The fields of a layout by what they mean."""
    found = _by_kind.get(id(layout))
    if found is None:
        found = _by_kind[id(layout)] = {}
        for span in layout.fields:
            found.setdefault(span.what, []).append(span)
    return found


def _noise(worlds: Any, body: Bytes, meta: Any, layout: Layout, rng: np.random.Generator) -> str:
    """Bytes of a block, or of anything, change."""
    held = [b for b in layout.blocks if b.stop > b.start]
    start, stop = (0, len(body))
    if held and rng.random() < 0.8:
        block = pick(rng, held)
        start, stop = block.start, block.stop
    dirty = []
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(start, stop)) if rng.random() < 0.5 else min(start + int(rng.integers(24)), stop - 1)
        body[at] = int(rng.integers(256))
        dirty.append((at, at + 1))
    mend(body, layout, dirty, set())
    return f"bytes of [{start}, {stop})"


def _trade(worlds: Any, body: Bytes, meta: Any, layout: Layout, rng: np.random.Generator) -> str:
    """A record, entry, block or page becomes a copy of another of its kind, of this file or another."""
    source, data = layout, bytes(body)
    if rng.random() < 0.3:
        other = pick(rng, worlds)
        name = pick(rng, [n for n in other.live if not n.endswith(".json")])
        source, data = layout_of(other.files[name]), other.files[name]
    kinds = [k for k in layout.alike if k in source.alike and (source is not layout or len(layout.alike[k]) > 1)]
    if not kinds:
        return "nothing to trade"
    kind = kinds[int(rng.integers(len(kinds)))]
    one, two = pick(rng, layout.alike[kind]), pick(rng, source.alike[kind])
    body[one.start : one.stop] = data[two.start : two.stop]
    mend(body, layout, [(one.start, one.stop)], set())
    return f"{kind[0]} at {one.start} as that at {two.start}"


def _shift(worlds: Any, body: Bytes, meta: Any, layout: Layout, rng: np.random.Generator) -> str:
    """A block gives bytes to its neighbour: lengths that add up, and blocks that are too short or too long."""
    pairs = [(a, b) for a, b in zip(layout.blocks, layout.blocks[1:], strict=False) if a.stop == b.start]
    if not pairs:
        return "nothing to shift"
    a, b = pick(rng, pairs)
    low, high = -(a.stop - a.start) // 8, (b.stop - b.start) // 8
    few = int(np.clip(rng.integers(-2, 3), low, high))
    step = 8 * (int(rng.integers(low, high + 1)) if rng.random() < 0.5 else few)
    for block, start, stop in ((a, a.start, a.stop + step), (b, b.start + step, b.stop)):
        struct.pack_into("<II", body, block.entry + 4, stop - start, crc_of(bytes(body[start:stop])))
    kept = {a.entry + 8, b.entry + 8}
    mend(body, layout, [(a.entry, a.entry + 12), (b.entry, b.entry + 12)], kept)
    return f"block at {a.start} of {a.stream} longer by {step}"


def _recode(worlds: Any, body: Bytes, meta: Any, layout: Layout, rng: np.random.Generator) -> str:
    """A block becomes one of another codec whose sizes add up, as far as its length allows, with noise in it."""
    if not layout.blocks:
        return "no blocks"
    block: Block = pick(rng, [b for b in layout.blocks if b.stop > b.start] or layout.blocks)
    codec = int(rng.integers(14))
    width = int(pick(rng, (0, 1, 2, 3, 7, 8, 13, 31, 32, 57, 58, 63, 64))) | int(rng.integers(2)) << 7
    noise = np.frombuffer(rng.bytes(block.stop - block.start), "<u8") >> np.uint64(rng.integers(64))
    words = noise.copy()
    if len(words) and rng.random() < 0.8:
        count, inner = int(rng.integers(0, 90)), int(pick(rng, (0, 1, 2, 3, 4, 5, 6, 11, 12, 8, 31)))
        head = count | inner << 32 | width << 40
        if codec == 8:
            words[0] = head | int(rng.integers(0, 8)) << 48
        if codec == 9 and len(words) > 1:
            words[1] = head
        if codec == 12 and len(words) > 2:
            words[0], words[2] = count | int(rng.integers(0, 99)) << 32, width
        if codec == 5:
            words[0] = count
        if codec == 3 and len(words) > 3:
            words[2], words[3] = min(count, 3), int(rng.integers(0, 60)) << 32
        if codec == 11 and len(words) > 1:
            words[1] = int(rng.integers(0, 26)) | int(pick(rng, (32, 64, 0, 255))) << 8
        if codec == 7 and len(words) > 2:
            words[0], words[1] = int(rng.integers(0, 4000)), (len(words) - 2) * 8 - int(rng.integers(0, 8))
    body[block.start : block.stop] = words.tobytes()
    body[block.entry], body[block.entry + 1] = codec, width
    mend(body, layout, [(block.start, block.stop), (block.entry, block.entry + 2)], set())
    return f"block at {block.start} of {block.stream} with codec {codec}, width {width}"


def _zstd(worlds: Any, body: Bytes, meta: Any, layout: Layout, rng: np.random.Generator) -> str:
    """A frame with lengths that do not add up, bytes that are no UTF-8, or a claim of many bytes."""
    import zstandard

    held = [b for b in layout.blocks if b.codec == 7]
    if not held:
        return _field(worlds, body, meta, layout, rng)
    block = pick(rng, held)
    room = block.stop - block.start - 16
    raw_bytes, frame_bytes = struct.unpack_from("<QQ", body, block.start)
    try:
        frame = bytes(body[block.start + 16 : block.start + 16 + frame_bytes])
        raw = bytearray(zstandard.ZstdDecompressor().decompress(frame, 1 << 20))
    except (zstandard.ZstdError, MemoryError):
        return "no frame any more"
    if not raw:
        return "an empty frame"
    kind = int(rng.integers(4))
    if kind == 0:
        claim = int(pick(rng, (raw_bytes, 1 << 24, (1 << 32) - 8, 1 << 33, 1 << 50)))
        # A frame of one segment with a content size of 8 bytes, and blocks of 128 KiB of one repeated byte (RFC 8878).
        frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", claim)
        while len(frame) + 4 <= room:
            frame += ((131072 << 3) | 2).to_bytes(3, "little") + b"\0"
        raw_bytes = claim
    else:
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(min(len(raw), 400))) if kind == 1 else int(rng.integers(len(raw)))
            raw[at] = int(pick(rng, (0, 1, 127, 128, 195, 255, int(rng.integers(256)))))
        if kind == 3:
            raw += bytes(int(rng.integers(1, 40)))
        raw_bytes, frame = len(raw), zstandard.ZstdCompressor(level=19).compress(bytes(raw))
    if len(frame) > room:
        return "a frame that does not fit"
    body[block.start : block.stop] = struct.pack("<QQ", raw_bytes, room) + frame + bytes(room - len(frame))
    mend(body, layout, [(block.start, block.stop)], set())
    return f"zstd block at {block.start} of {block.stream}, kind {kind}, {raw_bytes} bytes"


def meta_changed(worlds: Any, body: Bytes, meta: dict[str, Any], layout: Layout, rng: np.random.Generator) -> str:
    return "meta " + _json(meta, rng)


def _json(tree: Any, rng: np.random.Generator) -> str:
    """One value anywhere in a tree of JSON gets another value or type, is doubled, or goes."""
    path, node = [], tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return "nothing"
        key = pick(rng, keys)
        path.append(key)
        inside = node[key]
        if not isinstance(inside, (dict, list)) or not inside or rng.random() < 0.15:
            break
        node = inside
    kind = int(rng.integers(5))
    if kind == 0:
        del node[key]
        return f"{path} goes"
    if kind == 1 and isinstance(node, list):
        node.append(copied(inside))
        return f"{path} twice"
    if kind <= 3 and type(inside) is int:
        node[key] = pick(rng, (inside + 1, inside - 1, -inside, inside * 2, *_EDGES, *_WIDE))
    elif kind <= 3 and isinstance(inside, str) and inside.isdigit():
        node[key] = str(pick(rng, (int(inside) + 1, -1, 2**64, 2**70)))
    else:
        node[key] = copied(pick(rng, _JSON))
    return f"{path}: {inside!r:.40} -> {node[key]!r:.40}"


def _sealed_manifest(world: World, rng: np.random.Generator) -> tuple[Files, str]:
    body = json.loads(world.files[world.live[0]])["body"]
    said = [_json(body, rng) for _ in range(int(rng.integers(1, 3)))]
    try:
        return {**world.files, world.live[0]: seal_anything(body)}, "sealed " + "; ".join(said)
    except ValueError:
        return world.files, "sealed: no JSON"


Change = Callable[[Any, Bytes, Any, Layout, np.random.Generator], str]
#: Changes of a body and its meta, with the CRCs of the body made anew.
CHANGES: tuple[Change, ...] = (_field, _field, _field, _noise, _trade, _trade, _shift, _recode, _zstd, meta_changed)
