"""The tables of a server: those of one or several exports, of one range of keys, renewed while they are read.

Worked example::

    served = ServedTables.open(["exports/model"], shard=0, routing=Routing.even(4))
    rows = served.answer(Request([Ask("user.", keys)]))     # all tables of one export from one version of it
    served.refresh()                                        # True where a newer version was picked up

A version is taken up when all tables of its export are mapped; the one before stays, so that servers which come to a
new one at different times can be asked for the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import ServingTable, Version, tensorfile
from thinrow.checkpoints.checkpoint import newest_of
from thinrow.checkpoints.export import WRITER
from thinrow.checkpoints.manifest import Manifest
from thinrow.checkpoints.shardfile import file_of
from thinrow.core.errors import InputError, StoreError
from thinrow.core.routing import Routing
from thinrow.core.wrap import mix64_words
from thinrow.kernels import kernel
from thinrow.serving.lookups.catalog import Catalog, catalog_of
from thinrow.serving.lookups.frames import Status
from thinrow.serving.lookups.messages import Ask, Floats, Pooling, Request, Rows, encoded

#: Versions of an export that can be asked for.
_KEPT = 2
_EVERYTHING = Routing.even(1)


class UnknownTable(InputError):
    """There is no such table here."""


class Misrouted(InputError):
    """A key is of another shard."""


class OtherVersion(InputError):
    """The version that was asked for is not here, or not any longer."""


#: Status of an error; the first that fits.
_STATUS = (
    (UnknownTable, Status.UNKNOWN_TABLE),
    (Misrouted, Status.MISROUTED),
    (OtherVersion, Status.OTHER_VERSION),
    (InputError, Status.INVALID),
)


def status_of(error: Exception) -> Status:
    """What a reply says of a request that failed so."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), Status.FAILED)


@dataclass(frozen=True, slots=True)
class _Set:
    """All tables of one version of one export.

    Attributes:
        fixed: no newer one is looked for.
    """

    version: Version
    tables: Mapping[str, ServingTable]
    fixed: bool

    @classmethod
    def of(cls, tables: Mapping[str, ServingTable], fixed: bool = False) -> _Set:
        """The newest version that all of ``tables`` have, or with ``fixed`` theirs.

        Raises:
            As ``ServingTable.open``. StoreError: it was written anew meanwhile.
        """
        found = dict(tables) if fixed else {name: table.newest() for name, table in tables.items()}
        if len({table.version for table in found.values()}) > 1:
            # It came between one table and the next, or is damaged in one: all take the oldest.
            path = min(found.values(), key=lambda table: table.version.step).path
            found = {name: table.at(path) for name, table in found.items()}
        versions = {table.version for table in found.values()}
        if len(versions) > 1:
            paths = sorted({str(table.path) for table in found.values()})
            raise StoreError(f"{', '.join(paths)}: written anew while its tables were opened; open them again")
        return cls(versions.pop(), found, fixed)

    def newest(self) -> _Set:
        """The newest version, or this one."""
        if self.fixed:
            return self
        found = _Set.of(self.tables)
        return self if found.version == self.version else found


class ServedTables:
    """Any number of threads may ask; one at a time refreshes.

    Attributes:
        low, end: the range of mixed keys that is answered for.
    """

    def __init__(self, sets: Sequence[_Set], low: int, end: int) -> None:
        # Of each export its versions, the newest first; replaced as a whole, so that a reader sees one or the other.
        self._exports: list[tuple[_Set, ...]] = [(one,) for one in sets]
        self._where = {name: number for number, one in enumerate(sets) for name in one.tables}
        self.low, self.end = low, end
        self._refreshing = threading.Lock()
        #: Called when there are newer versions.
        self.watchers: list[Callable[[], None]] = []

    @classmethod
    def open(
        cls,
        exports: Sequence[str | Path],
        *,
        shard: int = 0,
        routing: Routing = _EVERYTHING,
        tables: Sequence[str] | None = None,
        check: bool = True,
    ) -> ServedTables:
        """Map the newest version of each of ``exports``.

        Args:
            exports: folders of exports, or single exports, of which no newer version is taken up.
            shard, routing: the range that is answered for.
            tables: prefixes of those that are served; None for all.
            check: as ``ServingTable.open``.

        Raises:
            InputError: no export, a shard that is not of the routing, one table in two exports, or in none.
            As ``ServingTable.open``.
        """
        if not exports:
            raise InputError("no export; name at least one folder")
        if not 0 <= shard < len(routing):
            raise InputError(f"shard {shard} of {len(routing)}; it must be 0 to {len(routing) - 1}")
        sets, seen, there = [], dict[str, Path](), list[str]()
        for path in map(Path, exports):
            held = _tables_in(path)
            there += held
            names = [name for name in held if tables is None or name in tables]
            for name in names:
                if name in seen:
                    raise InputError(f"table {name!r} is in {seen[name]} and in {path}; serve one of them")
                seen[name] = path
            found = {n: ServingTable.open(path, n, shard=shard, routing=routing, check=check) for n in names}
            sets += [_Set.of(found, fixed=path == next(iter(found.values())).path)] if found else []
        missing = [name for name in tables or () if name not in seen]
        if missing or not sets:
            raise InputError(f"no table {missing} in {', '.join(map(str, exports))}; there are {sorted(there)}")
        return cls(sets, *routing.bounds(shard))

    def refresh(self) -> bool:
        """Take up newer versions. Returns whether there were any.

        Raises:
            As ``ServingTable.open``; what was served still is.
        """
        with self._refreshing:
            changed = False
            for number, kept in enumerate(self._exports):
                newest = kept[0].newest()
                if newest is not kept[0]:
                    self._exports[number] = (newest, *kept[: _KEPT - 1])
                    changed = True
            for watcher in self.watchers if changed else ():
                watcher()
            return changed

    def catalog(self) -> Catalog:
        """What is served now, for a compiled loop."""
        exports = list(self._exports)
        return catalog_of([[(one.version, one.tables) for one in kept] for kept in exports], self.low, self.end)

    def versions(self) -> dict[str, Version]:
        """Table -> its newest version here."""
        return {name: self._exports[number][0].version for name, number in self._where.items()}

    def describe(self) -> dict[str, Any]:
        """What a client must know: the range of mixed keys; of each table its default, and a name of its export."""
        tables = {
            name: {"default": table.default.tolist(), "export": min(kept[0].tables)}
            for kept in self._exports
            for name, table in kept[0].tables.items()
        }
        return {"low": str(self.low), "end": str(self.end), "tables": tables}

    def answer(self, request: Request) -> list[Rows]:
        """Rows of each ask, in order.

        Raises:
            UnknownTable, Misrouted, OtherVersion: as they say.
            InputError: a value that the asked-for type does not hold.
        """
        # Read once: what a refresh replaces meanwhile is not seen.
        exports = list(self._exports)
        chosen: dict[int, _Set] = {}
        for ask in request.asks:
            number = self._number(ask.table)
            one = _of_version(exports[number], ask)
            if chosen.setdefault(number, one) is not one:
                raise InputError("two tables of one export are asked for in two versions; ask for one")
        return [self._rows(ask, chosen[self._where[ask.table]], request.dtype) for ask in request.asks]

    def work_bytes(self, request: Request) -> int:
        """Bytes that answering takes: a row of float32 a key, and one a row of the answer. Raises UnknownTable."""
        return sum(4 * self._dim(ask.table) * (len(ask.keys) + ask.rows) for ask in request.asks)

    def _dim(self, name: str) -> int:
        return len(self._exports[self._number(name)][0].tables[name].default)

    def _number(self, name: str) -> int:
        number = self._where.get(name)
        if number is None:
            raise UnknownTable(f"no table {name!r} here; there are {', '.join(map(repr, self._where))}")
        return number

    def _rows(self, ask: Ask, of: _Set, dtype: str) -> Rows:
        self._check_range(ask)
        table = of.tables[ask.table]
        if dtype == "float16" and ask.lengths is None and table.holds_float16:
            values, found = table.read(ask.keys, "float16")
            return Rows(values, None, found, of.version)
        vectors, found = table.read(ask.keys)
        if ask.lengths is None:
            values, scales = encoded(vectors, dtype)
            return Rows(values, scales, found, of.version)
        sums, numbers = pooled(vectors, found, ask)
        values, scales = encoded(sums, dtype)
        return Rows(values, scales, numbers, of.version)

    def _check_range(self, ask: Ask) -> None:
        if self.low == 0 and self.end == 1 << 64:
            return
        words = mix64_words(ask.keys.view(np.uint64))
        if len(words) and not (int(words.min()) >= self.low and int(words.max()) < self.end):
            raise Misrouted(f"keys outside [{self.low}, {self.end}); the asker routes by other ranges")


def pooled(vectors: Floats, found: npt.NDArray[np.bool_], ask: Ask) -> tuple[Floats, npt.NDArray[np.uint32]]:
    """Sums (b, dim) of the bags of ``ask``, and how many keys of each were found (b,).

    A sum starts at zeros and takes the vectors in the order of the keys, in float32, each times its weight, rounded
    before it is added. ``vectors`` (n, dim) may be changed.
    """
    assert ask.lengths is not None
    if ask.pooling == Pooling.WEIGHTED:
        assert ask.weights is not None
        # What overflows is refused with the sums.
        with np.errstate(over="ignore"):
            np.multiply(vectors, ask.weights[:, None], out=vectors)
    bounds = np.concatenate([[0], np.cumsum(ask.lengths, dtype=np.int64)])
    sums = np.zeros((len(ask.lengths), vectors.shape[1]), np.float32)
    n = len(vectors)
    if n:
        # As the kernel takes rows: blocks of a power of two of them.
        half = 1 << (n.bit_length() - 1)
        kernel("pool_rows")([vectors[:half], vectors[half:]], n, np.arange(n), bounds, sums)
    before = np.concatenate([[0], np.cumsum(found)])
    return sums, (before[bounds[1:]] - before[bounds[:-1]]).astype(np.uint32)


def _of_version(kept: tuple[_Set, ...], ask: Ask) -> _Set:
    if ask.pin is None:
        return kept[0]
    for one in kept:
        if one.version == ask.pin:
            return one
    raise OtherVersion(f"table {ask.table!r} is at step {kept[0].version.step}, not at {ask.pin.step} as was asked")


def _tables_in(path: Path) -> list[str]:
    """Prefixes of the tables of the newest export at ``path``."""

    def names(chain: list[Manifest]) -> list[str]:
        newest = chain[-1]
        if newest.routing is None:
            raise InputError(f"{newest.path} is no export; write one with `{WRITER}`, or thinrow.checkpoints.export")
        held = tensorfile.mapped(newest.path / file_of(0, len(newest.routing)))
        return sorted(name.removesuffix("words") for name in held if name.endswith("words"))

    return newest_of(path, names, writer=WRITER)[1]


__all__ = ["Misrouted", "OtherVersion", "ServedTables", "UnknownTable", "pooled", "status_of"]
