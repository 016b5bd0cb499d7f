"""ServingTable: an exported table, mapped from its files: keys in, vectors out, and nothing to load.

    table = ServingTable.open("served", "table.")
    vectors, found = table.read(np.array([7, 99]))      # (2, dim) float32 and (2,) bool; the default where not found
    table = table.newest()                              # a later delta, where there is one

A key is looked for in the newest delta first, then in what that rests on; one that a delta says is gone is absent.
A full export of the table hides what it rests on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import tensorfile
from thinrow.checkpoints.checkpoint import newest_of
from thinrow.checkpoints.export import DTYPES, FORMAT, WRITER, shift_of
from thinrow.checkpoints.manifest import REMEDY, TENSORS, Manifest, Version
from thinrow.checkpoints.shardfile import file_of
from thinrow.core.errors import CheckpointMismatch, CorruptionError, InputError, NewerFormatError
from thinrow.core.half import widen
from thinrow.core.pool import empty
from thinrow.core.routing import Routing
from thinrow.core.wrap import mix64_words
from thinrow.kernels import kernel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_EVERYTHING = Routing.even(1)


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard of one export, mapped."""

    low: int
    shift: int
    words: npt.NDArray[np.uint64]
    index: Ints
    values: npt.NDArray[Any]
    scales: Floats | None
    gone: npt.NDArray[np.uint64] | None
    """Of a delta; a full part, which has all there is, has none."""

    def find(self, keys: Ints) -> Ints:
        """(n,) place of each of ``keys``, -1 where it is not here."""
        places: Ints = kernel("find_words")(self.words, self.index, self.low, self.shift, keys)
        return places

    def take(self, places: Ints, out: npt.NDArray[Any]) -> None:
        """Write the vectors at ``places`` (n,) to ``out`` (n, dim), float32 or the type that they have; place -1 is
        zeros."""
        if not len(self.values):
            out[:] = 0
            return
        if self.values.dtype == out.dtype == np.float16:
            blocks = _blocks(self.values.view(np.uint8))
            kernel("gather_rows")(blocks, len(self.values), places, out.view(np.uint8))
            return
        if self.values.dtype == np.float32:
            kernel("gather_rows")(_blocks(self.values), len(self.values), places, out)
            return
        packed = empty(out.size, self.values.dtype).reshape(out.shape)
        kernel("gather_rows")(_blocks(self.values.view(np.uint8)), len(self.values), places, packed.view(np.uint8))
        if packed.dtype == np.float16:
            widen(packed, out)
        else:
            assert self.scales is not None
            np.multiply(packed, np.take(self.scales, places, mode="clip")[:, None], out=out)

    def is_gone(self, keys: Ints) -> npt.NDArray[np.bool_]:
        """(n,) which of ``keys``, none of which is here, older exports must not answer."""
        if self.gone is None:
            return np.ones(len(keys), np.bool_)
        if not len(self.gone):
            return np.zeros(len(keys), np.bool_)
        words = mix64_words(keys.view(np.uint64))
        at = np.minimum(np.searchsorted(self.gone, words), len(self.gone) - 1)
        return np.asarray(self.gone[at] == words)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One export of a chain: the parts that hold keys of the reader's range, by shard."""

    version: Version
    routing: Routing
    parts: dict[int, _Part]
    default: Floats | None


class ServingTable:
    """Read only; any number of threads may read at once.

    Attributes:
        path: the export.
        version: which one it is.
        dim: width of a vector.
        routing: of the shards that it was exported by.
        default: (dim,) float32, what a key that is not there reads as.
        holds_float16: all vectors and the default are float16 numbers, so that they can be read as such.
    """

    def __init__(
        self, path: Path, prefix: str, layers: Sequence[_Layer], serve: tuple[int, Routing], check: bool
    ) -> None:
        self.path, self._prefix, self._layers, self._serve, self._check = path, prefix, list(layers), serve, check
        newest = layers[-1]
        self.version, self.routing = newest.version, newest.routing
        widths = {part.values.shape[1] for layer in layers for part in layer.parts.values()}
        if len(widths) > 1:
            raise CorruptionError(f"vectors of widths {sorted(widths)} in one table", file=str(path), remedy=REMEDY)
        self.dim = widths.pop()
        self.default = np.zeros(self.dim, np.float32) if newest.default is None else newest.default
        shape, dtype = self.default.shape, self.default.dtype
        if (shape, dtype) != ((self.dim,), np.float32) or not np.isfinite(self.default).all():
            raise CorruptionError(f"its default is {dtype} {shape}: {self.default}", file=str(path), remedy=REMEDY)
        with np.errstate(over="ignore"):
            exact = bool((self.default.astype(np.float16) == self.default).all())
        halves = [part.values.dtype == np.float16 for layer in layers for part in layer.parts.values()]
        self.holds_float16 = exact and all(halves)

    @classmethod
    def open(
        cls,
        path: str | Path,
        prefix: str = "",
        *,
        shard: int = 0,
        routing: Routing = _EVERYTHING,
        check: bool = True,
    ) -> ServingTable:
        """Map an export.

        Args:
            path: one export, or a folder of them: the newest whole one.
            prefix: of the table.
            shard, routing: what this server answers for; files without such keys are not opened. By default all.
            check: read every byte once, against its CRC; without it opening takes no time, and damage is not seen.

        Raises:
            CheckpointNotFound, CorruptionError, ObjectNotFound, NewerFormatError: as ``load``.
            CheckpointMismatch: it is no export, or has no such table.
        """
        return cls._open(Path(path), prefix, (shard, routing), check, {})

    @classmethod
    def _open(
        cls, path: Path, prefix: str, serve: tuple[int, Routing], check: bool, known: dict[Version, _Layer]
    ) -> ServingTable:
        def layers(chain: list[Manifest]) -> list[_Layer]:
            found: list[_Layer] = []
            for link in reversed(chain):
                found.append(known.get(link.version) or _layer(link, prefix, serve, check))
                if all(part.gone is None for part in found[-1].parts.values()):
                    # All of the table, whatever is below.
                    break
            return found[::-1]

        found, opened = newest_of(path, layers, writer=WRITER)
        return cls(found.path, prefix, opened, serve, check)

    def mapped_parts(self) -> list[tuple[int, int, _Part]]:
        """The first and last mixed key of each file's range, and what of it is mapped; the newest first."""
        found = []
        for layer in reversed(self._layers):
            for shard, part in layer.parts.items():
                first, end = layer.routing.bounds(shard)
                found.append((first, end - 1, part))
        return found

    def newest(self) -> ServingTable:
        """The newest whole export beside this one, or this one; what both rest on is not read again.

        Raises:
            As ``open``.
        """
        return self.at(self.path.parent)

    def at(self, path: Path) -> ServingTable:
        """This table of another export, or of the newest in a folder, or this one; what both rest on is not read again.

        Raises:
            As ``open``.
        """
        known = {layer.version: layer for layer in self._layers}
        found = self._open(path, self._prefix, self._serve, self._check, known)
        return self if found.version == self.version else found

    def __len__(self) -> int:
        """Rows in all files, so a key that a delta changed counts again."""
        return sum(len(part.words) for layer in self._layers for part in layer.parts.values())

    def read(self, keys: Ints, dtype: str = "float32") -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Vectors (n, dim) of ``keys`` (n,) int64, and (n,) which were found; the others are ``default``.

        Args:
            dtype: ``float32``, or ``float16`` where the table ``holds_float16``: the same numbers in half the bytes.

        Raises:
            InputError: ``keys`` is not one-dimensional int64; the table does not hold float16.
        """
        if dtype != "float32" and not (dtype == "float16" and self.holds_float16):
            raise InputError(f"dtype={dtype!r}; it must be float32, or float16 where all that is stored is float16")
        if not isinstance(keys, np.ndarray) or keys.dtype != np.int64 or keys.ndim != 1:
            raise InputError("keys must be a one-dimensional int64 array")
        out = empty(len(keys) * self.dim, dtype).reshape(-1, self.dim)
        parts = [part for layer in self._layers for part in layer.parts.values()]
        if len(parts) == 1:
            places = parts[0].find(keys)
            parts[0].take(places, out)
            found = places >= 0
        else:
            found = self._read_layers(keys, out)
        if self.default.any():
            out[~found] = self.default
        return out, found

    def _read_layers(self, keys: Ints, out: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Write the vectors of ``keys`` to ``out``, zeros where they are not found; (n,) which are."""
        hits: list[tuple[_Part, Ints, Ints]] = []
        left = np.arange(len(keys))
        for layer in reversed(self._layers):
            left = _look(layer, keys, left, hits)
        found = np.zeros(len(keys), np.bool_)
        # The oldest layer, most of a table, is copied straight to where it belongs; it writes zeros elsewhere.
        for number, (part, at, places) in enumerate(reversed(hits)):
            found[at] = True
            if number:
                vectors = np.empty((len(at), self.dim), out.dtype)
                part.take(places, vectors)
                out[at] = vectors
            else:
                everywhere = np.full(len(keys), -1)
                everywhere[at] = places
                part.take(everywhere, out)
        return found


def _look(layer: _Layer, keys: Ints, left: Ints, hits: list[tuple[_Part, Ints, Ints]]) -> Ints:
    """Look for the keys at the positions ``left``; what is here goes to ``hits``, what older layers must answer is
    returned."""
    many = len(layer.routing) > 1
    shards = layer.routing.shards(keys[left]) if many else np.empty(0)
    older = []
    for shard, part in layer.parts.items():
        at = left[shards == shard] if many else left
        places = part.find(keys[at])
        here = places >= 0
        hits.append((part, at[here], places[here]))
        rest = at[~here]
        older.append(rest[~part.is_gone(keys[rest])])
    return np.concatenate(older)


def _blocks(values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """``values`` as ``gather_rows`` takes them: blocks of a power of two rows."""
    rows = 1 << max(0, len(values).bit_length() - 1)
    return [values[:rows], values[rows:]]


def _layer(link: Manifest, prefix: str, serve: tuple[int, Routing], check: bool) -> _Layer:
    stated = link.meta.get("export")
    if link.routing is None or type(stated) is not int:
        raise CheckpointMismatch(f"{link.path} is no export; write one with `{WRITER}`, or thinrow.checkpoints.export")
    if stated > FORMAT:
        raise NewerFormatError(f"{link.path} is export format {stated}, this thinrow reads up to {FORMAT}; update it")
    first, end = serve[1].bounds(serve[0])
    parts = {}
    for number in range(len(link.routing)):
        low, stop = link.routing.bounds(number)
        if low < end and first < stop:
            name = file_of(number, len(link.routing))
            parts[number] = _part(link.checked(name) if check else link.path / name, prefix, low, stop)
    shared = tensorfile.read(link.checked(TENSORS))
    return _Layer(link.version, link.routing, parts, shared.get(f"{prefix}default"))


def _part(file: Path, prefix: str, low: int, end: int) -> _Part:
    tensors = tensorfile.mapped(file)
    words, index, values = (tensors.get(prefix + name) for name in ("words", "index", "values"))
    if words is None or index is None or values is None:
        there = sorted({n.removesuffix("words") for n in tensors if n.endswith("words")})
        raise CheckpointMismatch(f"{file} has no table {prefix!r}, only {there}; pass the prefix of one")
    scales = tensors.get(f"{prefix}scales")
    gone = tensors.get(f"{prefix}gone")
    n_buckets = len(index) - 1
    shift = shift_of(n_buckets, low, end)
    # A damaged index must not send a look-up outside the file, whether or not CRCs are checked.
    sound = (
        words.dtype == np.uint64
        and index.dtype == np.int64
        and words.ndim == index.ndim == 1
        and (gone is None or (gone.dtype == np.uint64 and gone.ndim == 1))
        and values.ndim == 2
        and values.dtype.name in DTYPES
        and len(values) == len(words)
        and (scales is None) == (values.dtype != np.int8)
        and (scales is None or (scales.dtype == np.float32 and scales.shape == words.shape))
        and n_buckets == ((end - low - 1) >> shift) + 1
        and (index[0], index[-1]) == (0, len(words))
        and bool((np.diff(index) >= 0).all())
    )
    if not sound:
        raise CorruptionError(f"table {prefix!r} in it is not that of an export", file=str(file), remedy=REMEDY)
    return _Part(low, shift, words, index, values, scales, gone)
