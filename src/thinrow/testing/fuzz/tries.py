"""One try: a damaged store, some reads of it, and whether each did what is promised.

Worked example: ``Tries(seed=1).run(7)`` is None where all was well, else a ``Failure`` with the damage and the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.errors import CorruptionError, NewerFormatError, ObjectNotFound, ThinrowError
from thinrow.core.users import plain
from thinrow.history.archive.find import find_event
from thinrow.history.archive.generation import Archive, Generation
from thinrow.history.archive.layout import stored_columns
from thinrow.history.archive.lookup import look_up
from thinrow.history.archive.reader import ReadStats
from thinrow.history.archive.verify import verify_generation, verify_tombstones
from thinrow.history.archive.window import read_everything
from thinrow.history.compact import compact
from thinrow.history.recent.memory import MemoryRecent
from thinrow.history.reconstruct import reconstruct
from thinrow.jagged import Column, Jagged
from thinrow.kernels import use
from thinrow.schema import EventSchema, Projection
from thinrow.storage.objects import MemoryObjects
from thinrow.testing.fuzz.damage import Damaged, Failure, damage, failure_of
from thinrow.testing.fuzz.guard import guard_pool, guarded
from thinrow.testing.fuzz.world import Files, World, sound_worlds

#: Tries that read a whole store; the others read a part, which is quicker.
_WHOLE_SHARE = 0.06
#: What damage may be called.
RAW_ERRORS = (CorruptionError, NewerFormatError, ObjectNotFound)


class Guarded(MemoryObjects):
    """Objects whose maps lie between forbidden pages, or that cannot be mapped."""

    def __init__(self, files: Files, maps: bool) -> None:
        super().__init__()
        self._maps = maps
        for name, data in files.items():
            self.put(name, data)

    def mapped(self, names: Sequence[str]) -> tuple[npt.NDArray[np.uint8], ...] | None:
        """(n,) maps, or None as a store over a network has it."""
        if not self._maps:
            return None
        found = []
        for name in names:
            data = np.frombuffer(self.get(name), np.uint8)
            area = guarded(len(data))
            area[:] = data
            found.append(area)
        return tuple(found)


class Tries:
    """Tries of one seed."""

    def __init__(self, seed: int) -> None:
        """Builds the sound stores and reads what they hold."""
        self.seed = seed
        self.worlds = sound_worlds()
        self._truth = {
            (k, probe): _PROBES[probe](_open(world.files, True), world)
            for k, world in enumerate(self.worlds)
            for probe in _PROBES
        }

    def damaged(self, number: int) -> tuple[int, Damaged, np.random.Generator]:
        """What try ``number`` reads, and the generator of what is left to chance."""
        rng = np.random.default_rng([self.seed, number])
        world = int(rng.integers(2) if rng.random() < _WHOLE_SHARE else rng.integers(2, len(self.worlds)))
        return world, damage(self.worlds, self.worlds[world], rng), rng

    def run(self, number: int) -> Failure | None:
        """Do try ``number``."""
        world, damaged, rng = self.damaged(number)
        probes = [str(rng.choice(_READS, p=_SHARES))]
        if rng.random() < 0.12:
            probes.append("verify")
        with ExitStack() as stack:
            stack.enter_context(guard_pool())
            if rng.random() < 1 / 16:
                stack.enter_context(use("reference"))
            maps = bool(rng.random() < 0.6)
            for probe in probes:
                failure = self._judge(number, world, damaged, probe, maps)
                if failure is not None:
                    return failure
        return None

    def _judge(self, number: int, k: int, damaged: Damaged, probe: str, maps: bool) -> Failure | None:
        world = self.worlds[k]
        try:
            found = _PROBES[probe](_open(damaged.files, maps), world)
        except ThinrowError as e:
            if damaged.sealed or isinstance(e, RAW_ERRORS):
                return None
            return failure_of(number, damaged.what, probe, e)
        except Exception as e:
            return failure_of(number, damaged.what, probe, e)
        wrong = None
        if damaged.same or not damaged.sealed:
            sound = _equal(found, self._truth[k, probe])
            if probe == "verify":
                sound = damaged.same == sound
            wrong = None if sound else "wrong data"
        elif probe == "everything" and self._should_be_reported(k, damaged, found):
            with suppress(ThinrowError):
                if not _PROBES["verify"](_open(damaged.files, maps), world):
                    wrong = "wrong values of the same events, and verify reports nothing"
        return None if wrong is None else Failure(number, damaged.what, probe, wrong, f"{wrong} {probe}")

    def _should_be_reported(self, k: int, damaged: Damaged, found: Any) -> bool:
        """Whether digests cover what is wrong: values of events that are the same, under a sound manifest's digests."""
        if not damaged.name.endswith((".seg", ".ovl")) or "digest" in damaged.what:
            return False
        truth = self._truth[k, "everything"]
        if "meta" in damaged.what or found.keys() != truth.keys():
            return False
        keys = [k for k in truth if k.startswith("key ")]
        same = all(_equal(found[k], truth[k]) for k in keys)
        return same and not all(_equal(found[k], truth[k]) for k in truth if k not in keys)


def _open(files: Files, maps: bool) -> Archive:
    return Archive(Guarded(files, maps))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, (pa.Array, pa.ChunkedArray)):
        return bool(a.equals(b))
    return bool(a == b)


def _seen(column: Column | Jagged) -> Any:
    """A column as something to compare, every offset of it followed."""
    array = column.to_arrow()
    array.validate(full=True)
    if isinstance(column, Column) and column.dictionary is None and column.offsets is None and column.valid is None:
        # By their bits: -0.0 is not 0.0.
        return column.values.tobytes()
    return array


def _everything(archive: Archive, world: World) -> dict[str, Any]:
    generation = archive.pin()
    columns = [c for c in stored_columns(generation.schema) if c.group != "keys"]
    return _contents(read_everything(generation, world.users, columns, ReadStats()))


def _contents(events: Any) -> dict[str, Any]:
    found = {f"key {n}": getattr(events, n) for n in ("offsets", "event_ts", "arrival", "hidden_from")}
    found.update({name: _seen(column) for name, column in events.columns.items()})
    return found


def _logged(max_len: int | None, columns: Sequence[str] | None, one: bool) -> Callable[[Archive, World], Any]:
    def read(archive: Archive, world: World) -> list[Any]:
        batch = world.batch.take(np.array([0, 4])) if one else world.batch
        projection = Projection(max_len=max_len, columns=None if columns is None else tuple(columns))
        histories = reconstruct(archive.pin(), batch, projection).histories
        names = [c.name for c in archive.pin().schema.columns] if columns is None else columns
        return [_seen(histories.to_jagged(n)) for n in ("event_ts", "arrival", *names)]

    return read


def _coded(archive: Archive, world: World) -> list[Any]:
    """Integers as codes and a dictionary, the texts too."""
    projection = Projection(codes=("item", "session", "surface", "coupon"))
    histories = reconstruct(archive.pin(), world.batch, projection).histories
    return [_seen(histories.to_jagged(n)) for n in ("event_ts", *projection.codes, "kind")]


def _look_up(archive: Archive, world: World) -> list[Any]:
    generation = archive.pin()
    pieces = look_up(generation, world.users)
    return [np.asarray(generation.users()), pieces.records.tobytes(), pieces.watermark, pieces.hides.tobytes()]


def _find(archive: Archive, world: World) -> list[Any]:
    ids: Iterable[Any] = ("4", "77", "x") if world.kind == "int64" else (4, 77, -9)
    return [find_event(archive.pin(), plain(world.users[0]), i) for i in ids]


def _arrow(archive: Archive, world: World) -> Any:
    table = archive.pin().to_arrow(batch_rows=90).read_all()
    table.validate(full=True)
    return [table.column(i) for i in range(table.num_columns)]


def _verify(archive: Archive, world: World) -> list[Any]:
    generation = archive.pin()
    return [*verify_generation(generation), *verify_tombstones(generation)]


def _merge(archive: Archive, world: World) -> Any:
    generation: Generation = archive.pin()
    compact(archive, MemoryRecent(EventSchema.from_dict(generation.schema.to_dict())), full=True)
    return _everything(archive, world)


_PROBES: dict[str, Callable[[Archive, World], Any]] = {
    "everything": _everything,
    "logged": _logged(None, None, False),
    "newest": _logged(3, None, False),
    "one column": _logged(2, ("kind",), True),
    "codes": _coded,
    "look up": _look_up,
    "find": _find,
    "arrow": _arrow,
    "verify": _verify,
    "merge": _merge,
}
_READS = ("everything", "logged", "newest", "one column", "codes", "look up", "find", "arrow", "merge")
_SHARES = (0.4, 0.1, 0.08, 0.06, 0.12, 0.06, 0.05, 0.08, 0.05)
