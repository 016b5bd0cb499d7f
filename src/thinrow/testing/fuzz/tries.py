"""One try: a damaged store, some reads of it, and whether each did what is promised.

Worked example: ``Tries(seed=1).run(7)`` is None where all was well, else a ``Failure`` with the damage and the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
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
from thinrow.kernels import use
from thinrow.schema import EventSchema, Projection
from thinrow.testing.fuzz.damage import OUTCOMES, Damaged, Failure, damage, failure_of
from thinrow.testing.fuzz.guard import guard_pool
from thinrow.testing.fuzz.reads import Read, aimed, contents, seen
from thinrow.testing.fuzz.standing import GuardedObjects, Hit, Standing
from thinrow.testing.fuzz.world import Files, World, sound_worlds

#: Tries that open a store of their own: what no file of a standing one can show, such as damage of the manifest.
_OPENED_SHARE = 0.03
#: Of those, tries with all segments of a store; the others read a part, which is quicker.
_WHOLE_SHARE = 0.06
#: Standing stores that are read as if over a network; and tries with the plain kernels.
_FETCHED_SHARE, _PLAIN_SHARE = 0.2, 0.03
#: Tries whose data, if any comes, is compared with what the other way of reading finds.
_TWICE_SHARE = 0.12
#: What damage may be called.
RAW_ERRORS = (CorruptionError, NewerFormatError, ObjectNotFound)
_CRC, _BEHIND, _SOUND, _OTHER = range(len(OUTCOMES))


class Tries:
    """Tries of one seed.

    Attributes:
        outcomes: how many tries came to which of ``OUTCOMES``.
    """

    def __init__(self, seed: int) -> None:
        """Builds the sound stores and reads what they hold."""
        self.seed = seed
        self.worlds = sound_worlds()
        self.outcomes = [0] * len(OUTCOMES)
        self._truth: dict[tuple[int, str | Read], Any] = {
            (k, probe): _PROBES[probe](_open(world.files, True), world)
            for k, world in enumerate(self.worlds)
            for probe in _PROBES
        }
        self._sound = [_open(world.files, True).pin() for world in self.worlds]
        self._standing = [[Standing(self.worlds, w, maps) for maps in (False, True)] for w in self.worlds]

    def damaged(self, number: int) -> tuple[int, Damaged, np.random.Generator]:
        """What try ``number`` reads where it opens a store of its own, and the generator of what is left to chance."""
        rng = np.random.default_rng([self.seed, number])
        rng.random()
        world = int(rng.integers(2) if rng.random() < _WHOLE_SHARE else rng.integers(2, len(self.worlds)))
        return world, damage(self.worlds, self.worlds[world], rng), rng

    def run(self, number: int) -> Failure | None:
        """Do try ``number``."""
        rng = np.random.default_rng([self.seed, number])
        if rng.random() < _OPENED_SHARE:
            return self._run_opened(number)
        k = int(rng.integers(2) if rng.random() < _WHOLE_SHARE else rng.integers(2, len(self.worlds)))
        maps = bool(rng.random() >= _FETCHED_SHARE)
        with ExitStack() as stack:
            stack.enter_context(guard_pool())
            if rng.random() < _PLAIN_SHARE:
                stack.enter_context(use("reference"))
            store = self._standing[k][maps]
            with store.damaged(rng) as hit:
                read = aimed(rng, hit, store.world, store.generation)
                failure, found = self._judge_standing(number, k, store, hit, read)
                # What a verification finds may be one and the same damage told once or twice.
                once = read.kind == "verify" or rng.random() >= _TWICE_SHARE
                if failure is not None or found is None or once:
                    return failure
                return self._read_twice(number, store, hit, read, found)

    def _judge_standing(self, number: int, k: int, store: Standing, hit: Hit, read: Read) -> tuple[Failure | None, Any]:
        """The failure, if it is one; and what was read, if anything was."""
        try:
            found = read(store.generation, store.world)
        except ThinrowError as e:
            self.outcomes[_CRC if "CRC" in str(e) else _BEHIND] += 1
            fits = hit.sealed or isinstance(e, RAW_ERRORS)
            return None if fits else failure_of(number, hit.what, str(read), e), None
        except Exception as e:
            return failure_of(number, hit.what, str(read), e), None
        sound = _equal(found, self._truth_of(k, read))
        self.outcomes[_SOUND if sound else _OTHER] += 1
        if read.kind == "verify" and not hit.sealed:
            # Damage has to be reported; but not what is in files that no check of this generation reads.
            sound = sound == hit.same
        if (hit.same or not hit.sealed) and not sound:
            return Failure(number, hit.what, str(read), "wrong data", f"wrong data {read.kind}"), found
        return None, found

    def _read_twice(self, number: int, store: Standing, hit: Hit, read: Read, found: Any) -> Failure | None:
        """What the mapped file gives and what its fetched bytes give is the same, if both give anything."""
        with store.the_other_way() as other:
            try:
                again = read(other, store.world)
            except ThinrowError:
                return None
            except Exception as e:
                return failure_of(number, hit.what, f"{read}, the other way", e)
        if _equal(found, again):
            return None
        return Failure(
            number, hit.what, str(read), "mapped and fetched differ", f"mapped and fetched differ {read.kind}"
        )

    def _truth_of(self, k: int, read: Read) -> Any:
        if (k, read) not in self._truth:
            with use("numba"):
                self._truth[k, read] = read(self._sound[k], self.worlds[k])
        return self._truth[k, read]

    def _run_opened(self, number: int) -> Failure | None:
        world, damaged, rng = self.damaged(number)
        probes = [str(rng.choice(_READS, p=_SHARES))]
        if rng.random() < 0.12:
            probes.append("verify")
        with ExitStack() as stack:
            stack.enter_context(guard_pool())
            if rng.random() < _PLAIN_SHARE:
                stack.enter_context(use("reference"))
            maps = bool(rng.random() >= _FETCHED_SHARE)
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
            self.outcomes[_CRC if "CRC" in str(e) else _BEHIND] += probe != "verify"
            if damaged.sealed or isinstance(e, RAW_ERRORS):
                return None
            return failure_of(number, damaged.what, probe, e)
        except Exception as e:
            return failure_of(number, damaged.what, probe, e)
        wrong = None
        self.outcomes[_SOUND if _equal(found, self._truth[k, probe]) else _OTHER] += probe != "verify"
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
    return Archive(GuardedObjects(files, maps))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, (pa.Array, pa.ChunkedArray)):
        # Not a number, which damage may well make, is equal to itself here.
        return bool(a.equals(b) or (_is_floating(a.type) and repr(a.to_pylist()) == repr(b.to_pylist())))
    return bool(a == b)


def _is_floating(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_floating(kind))


def _everything(archive: Archive, world: World) -> dict[str, Any]:
    generation = archive.pin()
    columns = [c for c in stored_columns(generation.schema) if c.group != "keys"]
    return contents(read_everything(generation, world.users, columns, ReadStats()))


def _logged(max_len: int | None, columns: Sequence[str] | None, one: bool) -> Callable[[Archive, World], Any]:
    def read(archive: Archive, world: World) -> list[Any]:
        batch = world.batch.take(np.array([0, 4])) if one else world.batch
        projection = Projection(max_len=max_len, columns=None if columns is None else tuple(columns))
        histories = reconstruct(archive.pin(), batch, projection).histories
        names = [c.name for c in archive.pin().schema.columns] if columns is None else columns
        return [seen(histories.to_jagged(n)) for n in ("event_ts", "arrival", *names)]

    return read


def _coded(archive: Archive, world: World) -> list[Any]:
    """Integers as codes and a dictionary, the texts too."""
    projection = Projection(codes=("item", "session", "surface", "coupon"))
    histories = reconstruct(archive.pin(), world.batch, projection).histories
    return [seen(histories.to_jagged(n)) for n in ("event_ts", *projection.codes, "kind")]


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
