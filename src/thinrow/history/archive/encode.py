"""Encode one column of one segment: stripes come in order, the dictionary is known at the end.

Worked example: two calls of ``add`` for a string column, one stripe each, ``["a", "b"]`` and ``["b", "c"]``. The codes
are ``[0, 1]`` and ``[1, 2]``: an entry gets the next code when it first appears. ``finish`` gives the dictionary
``a, b, c``. Had the second call brought 70,000 new strings, its stripes would be of codec 7, the dictionary ``a, b``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import InputError, SchemaError
from thinrow.core.ragged import offsets_of, ranges_index
from thinrow.history.archive.layout import MAX_STRIPE_ELEMENTS, StoredColumn
from thinrow.jagged import Column, Events
from thinrow.jagged.column import ARROW_TYPES
from thinrow.kernels import kernel
from thinrow.schema.event_schema import MAX_ELEMENTS
from thinrow.storage.blocks import Planned, Values, encode_fixed, plan_fixed, plan_nullable
from thinrow.storage.codecs import NO_CODE, EncodedStream, encode_bytes, inner_codecs

#: A fixed-width column has a segment dictionary where its distinct values are at most this many.
_MAX_WORDS = 4_096
#: A string column has one where they are at most this many and few against the rows.
_MAX_STRINGS = 65_536
_ALWAYS_STRINGS = 256
#: A word of a fixed-width column is frequent that is there so often: in all rows, or of more than so many rows in every
#: fourth. Tables of all words of a larger part lie in no cache.
_OFTEN, _SAMPLE_FROM, _OFTEN_IN_SAMPLE, _SAMPLE_STEP = 5, 1 << 18, 3, 4
#: At least so many stripes (all, where there are fewer than twice as many) are planned to see whether such words pay.
_STRIPES = 32


@dataclass(frozen=True, slots=True)
class Stripes:
    """How some rows are cut.

    Attributes:
        user, rows, stripe, first: (P,) int64 of each piece: its user, rows, stripe and first row within the stripe.
        piece_off, stripe_off: (P + 1,) and (S + 1,) int64 rows of each piece and stripe.
    """

    user: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    stripe: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    piece_off: npt.NDArray[np.int64]
    stripe_off: npt.NDArray[np.int64]

    @classmethod
    def cut(cls, lengths: npt.NDArray[np.int64], stripe_rows: int) -> Stripes:
        """Users of ``lengths`` (U,) rows each, in stripes of at most ``stripe_rows`` (format section 2)."""
        user, rows, stripe, first = kernel("cut_stripes")(lengths, stripe_rows)
        piece_off = offsets_of(rows)
        starts = np.flatnonzero(np.diff(stripe, prepend=-1))
        stripe_off = np.concatenate([piece_off[:-1][starts], piece_off[-1:]])
        return cls(user, rows, stripe, first, piece_off, stripe_off)


@dataclass(frozen=True, slots=True)
class _Places:
    """The values of stripes: (S + 1,) int64 ``stripe_off`` of each, and ``restarts``, the first value of each piece."""

    stripe_off: npt.NDArray[np.int64]
    restarts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, column: Column, cut: Stripes) -> _Places:
        """Values of a column that ``cut`` cuts by rows."""
        if column.offsets is not None:
            starts = np.unique(column.offsets[cut.piece_off[:-1]])
            return cls(column.offsets[cut.stripe_off], starts[starts < len(column.values)])
        per_row = max(column.size, 1)
        return cls(cut.stripe_off * per_row, cut.piece_off[:-1] * per_row)


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """What a segment's meta says of a column.

    Attributes:
        dictionary: bytes of its segment dictionary (format section 5); None where no stripe refers to it.
        entries: entries of the dictionary, 0 where there is none.
        digest: content digest (format section 8), modulo 2^64.
        codec_counts: codec -> stripes whose values it holds.
        codec_bytes: codec -> bytes of their blocks.
        inner_counts: codec with a block within -> codec of that -> stripes.
    """

    dictionary: bytes | None
    entries: int
    digest: int
    codec_counts: dict[int, int]
    codec_bytes: dict[int, int]
    inner_counts: dict[int, dict[int, int]]


class ColumnEncoder:
    """Encodes one stored column of one segment; memory is that of one ``add`` and the dictionary."""

    def __init__(self, spec: StoredColumn) -> None:
        self.spec = spec
        self._digest = 0
        self._counts: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()
        self._inner: dict[int, Counter[int]] = {}
        self._rows = 0
        self._coding = spec.is_bytes or spec.id > 0
        self._used = False
        self._words = np.empty(0, np.uint64)
        self._looked_at = 0
        self._strings: list[pa.Array] = []
        self._n_strings = 0

    def add(self, column: Column, cut: Stripes, mix: npt.NDArray[np.uint64]) -> list[EncodedStream]:
        """Encode the next rows.

        Args:
            column: (R,) the rows of these stripes.
            cut: how they are cut.
            mix: (R,) uint64 identity of each event (format section 8).

        Returns:
            the streams of these stripes: nulls where the column is nullable, lengths where it holds lists, then values.

        Raises:
            InputError: a list of more than ``MAX_ELEMENTS`` elements, or a stripe of ``MAX_STRIPE_ELEMENTS``.
        """
        flat = column if column.offsets is None and not column.size else column.elements()
        words = None if self.spec.is_bytes else as_words(flat.values)
        self._digest += content_digest(self.spec, column, mix, words)
        self._rows += len(column.values)
        null = _null_of(self.spec, column)
        streams: list[EncodedStream] = []
        if column.offsets is not None:
            lengths = np.diff(column.offsets)
            if int(lengths.max(initial=0)) > MAX_ELEMENTS:
                raise InputError(
                    f"column {self.spec.name!r} holds a list of {lengths.max()} elements; at most {MAX_ELEMENTS} are "
                    "allowed: keep the ones that count"
                )
            stripes = np.diff(column.offsets[cut.stripe_off])
            if int(stripes.max(initial=0)) > MAX_STRIPE_ELEMENTS:
                raise InputError(
                    f"column {self.spec.name!r} has {stripes.max()} elements in a stripe; at most "
                    f"{MAX_STRIPE_ELEMENTS} are allowed: write stripes of fewer rows"
                )
            streams += self._encode(Values(lengths.astype(np.uint64), cut.stripe_off, cut.piece_off[:-1], 4), null)
        elif column.size and self.spec.nullable:
            streams.append(encode_fixed(Values(null.astype(np.uint64), cut.stripe_off, cut.piece_off[:-1], 1)))
        places = _Places.of(column, cut)
        # The elements of a null are none, or zeros already.
        null = null if flat is column else null[:0]
        streams += self._add_strings(flat, null, places) if words is None else self._add_words(words, null, places)
        counts = np.bincount(streams[-1].codec)
        sizes = np.bincount(streams[-1].codec, np.diff(streams[-1].offsets))
        for codec in np.flatnonzero(counts).tolist():
            self._counts[codec] += int(counts[codec])
            self._bytes[codec] += int(sizes[codec])
        for outer, inner in inner_codecs(streams[-1]).items():
            self._inner.setdefault(outer, Counter()).update(inner.tolist())
        return streams

    def _encode(self, values: Values, null: npt.NDArray[np.bool_]) -> list[EncodedStream]:
        """Nulls, where there can be some, and values."""
        return [plan.write() for plan in _plans(values, null)]

    def finish(self) -> EncodedColumn:
        """Dictionary, digest and counts of all that was added."""
        inner = {outer: dict(sorted(counts.items())) for outer, counts in sorted(self._inner.items())}
        counts = dict(sorted(self._counts.items())), dict(sorted(self._bytes.items())), inner
        digest = self._digest % (1 << 64)
        if not self._used:
            return EncodedColumn(None, 0, digest, *counts)
        if not self.spec.is_bytes:
            return EncodedColumn(self._words.astype("<u8").tobytes(), len(self._words), digest, *counts)
        entries = self._entries()
        if not len(entries):
            # Every row is null; a code needs an entry to refer to.
            entries = pa.array([_blank(self.spec)])
        offsets, data = bytes_of(entries)
        return EncodedColumn(offsets.astype("<u8").tobytes() + data.tobytes(), len(entries), digest, *counts)

    def _add_words(
        self, words: npt.NDArray[np.uint64], null: npt.NDArray[np.bool_], at: _Places
    ) -> list[EncodedStream]:
        if len(null):
            words = np.where(null, np.uint64(0), words)
        values = self._values(words, at)
        if self.spec.id <= 0:
            return self._encode(values, null)
        codes = self._codes_of_all(words) if self._coding else None
        if codes is None:
            self._coding = False
            fresh = self._frequent(words)
            if len(fresh) and self._pays(values, null, fresh):
                self._words = np.concatenate([self._words, fresh])
        streams = self._encode(_coded(values, self._words, codes), null)
        self._used = self._used or streams[-1].coded
        return streams

    def _pays(self, values: Values, null: npt.NDArray[np.bool_], fresh: npt.NDArray[np.uint64]) -> bool:
        """Whether some of the stripes say that ``fresh`` words save more bytes than they take in the dictionary."""
        n = len(values.stripe_off) - 1
        stripes = np.arange(0, n, max(1, n // _STRIPES))
        rows, off = ranges_index(values.stripe_off[stripes], values.stripe_off[stripes + 1])
        some = values.take(rows, np.diff(off))
        words = self._words, np.concatenate([self._words, fresh])
        without, with_ = (
            sum(p.n_bytes for p in _plans(_coded(some, w), null[rows] if len(null) else null)) for w in words
        )
        return (without - with_) * n > 8 * len(fresh) * len(stripes)

    def _codes_of_all(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32] | None:
        """Codes of all words, new ones added to the dictionary; None where they are too many."""
        limit = min(_MAX_WORDS, max(2, self._rows // 4))
        distinct, codes = kernel("distinct_words")(words, limit, self._words)
        if len(words) and not len(distinct):
            return None
        if len(distinct) > 1:
            self._words = distinct
        found: npt.NDArray[np.uint32] = codes
        return found

    def _frequent(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Words that the dictionary lacks and a sample holds several times, the most frequent first. Looked for
        whenever the rows have doubled."""
        if self._rows < 2 * self._looked_at:
            return words[:0]
        self._looked_at = self._rows
        if len(words) > _SAMPLE_FROM:
            found, counts = kernel("count_words")(words[::_SAMPLE_STEP].copy(), _OFTEN_IN_SAMPLE)
        else:
            found, counts = kernel("count_words")(words, _OFTEN)
        new = kernel("code_words")(found, self._words) == NO_CODE
        fresh: npt.NDArray[np.uint64] = found[new][np.argsort(-counts[new], kind="stable")]
        return fresh

    def _values(self, words: npt.NDArray[np.uint64], at: _Places) -> Values:
        kind = np.dtype(self.spec.dtype)
        bits = 8 * kind.itemsize if kind.kind == "f" else 0
        return Values(words, at.stripe_off, at.restarts, kind.itemsize, bits)

    def _add_strings(self, column: Column, null: npt.NDArray[np.bool_], at: _Places) -> list[EncodedStream]:
        assert column.dictionary is not None
        shown = column.values[~null] if len(null) else column.values
        used = np.flatnonzero(np.bincount(shown, minlength=len(column.dictionary)))
        entries = column.dictionary.take(pa.array(used, pa.int64()))
        if self._coding:
            codes = self._codes_of(entries)
            if codes is not None:
                self._used = True
                place = np.zeros(max(len(column.dictionary), 1), np.uint64)
                place[used] = codes
                coded = place[column.values]
                if len(null):
                    coded[null] = 0  # nulls take an entry that others use, so that they cost no entry
                return self._encode(Values(coded, at.stripe_off, at.restarts, 4), null)
            self._coding = False
        blank = _blank(self.spec)
        per_row = column.dictionary.take(pa.array(column.values)) if len(used) else pa.repeat(blank, len(column))
        if len(null):
            per_row = pc.if_else(pa.array(null), blank, per_row)
        values = encode_bytes(bytes_of(per_row), at.stripe_off)
        if not len(null):
            return [values]
        return [encode_fixed(Values(null.astype(np.uint64), at.stripe_off, at.restarts, 1)), values]

    def _codes_of(self, entries: pa.Array) -> npt.NDArray[np.int64] | None:
        """Codes of distinct ``entries``, new ones added; None where they would be too many for a dictionary."""
        known = self._entries()
        found = pc.index_in(entries, value_set=known).fill_null(-1)
        codes: npt.NDArray[np.int64] = found.to_numpy(zero_copy_only=False).astype(np.int64)
        new = np.flatnonzero(codes < 0)
        n = self._n_strings + len(new)
        if n > _ALWAYS_STRINGS and (n > _MAX_STRINGS or n > self._rows // 2):
            return None
        codes[new] = self._n_strings + np.arange(len(new))
        if len(new):
            self._strings.append(entries.take(pa.array(new)))
            self._n_strings = n
        return codes

    def _entries(self) -> pa.Array:
        """The dictionary so far."""
        kind = ARROW_TYPES[self.spec.dtype]
        self._strings = [pa.concat_arrays([pa.array([], kind), *(s.cast(kind) for s in self._strings)])]
        return self._strings[0]


def _coded(values: Values, dictionary: npt.NDArray[np.uint64], codes: npt.NDArray[np.uint32] | None = None) -> Values:
    """The values with their codes into a dictionary of words."""
    if len(dictionary) < 2:
        return values
    found = kernel("code_words")(values.words, dictionary) if codes is None else codes
    return replace(values, codes=found, n_words=len(dictionary))


def _plans(values: Values, null: npt.NDArray[np.bool_]) -> Sequence[Planned]:
    return plan_nullable(values, null) if len(null) else (plan_fixed(values),)


def column_of(events: Events, spec: StoredColumn) -> Column:
    """The rows of a stored column; nulls where ``events`` lacks it.

    Raises:
        SchemaError: a column that is not nullable is missing or holds a null.
    """
    if spec.name in ("event_ts", "arrival", "hidden_from"):
        return Column(getattr(events, spec.name))
    column = events.columns.get(spec.name)
    if column is None:
        if not spec.nullable:
            raise SchemaError(f"column {spec.name!r} is missing and not nullable; add it or make it nullable")
        return spec.nulls(len(events))
    if column.valid is not None and not spec.nullable and not column.valid.all():
        row = int(np.flatnonzero(~column.valid)[0])
        raise SchemaError(f"column {spec.name!r} is null in row {row} and not nullable; fill it or make it nullable")
    return column


def content_digest(
    spec: StoredColumn,
    column: Column,
    mix: npt.NDArray[np.uint64],
    words: npt.NDArray[np.uint64] | None = None,
) -> int:
    """Content digest (format section 8) of a column over events of identities ``mix`` (R,), modulo 2^64; ``words`` are
    those of its values, where somebody has them."""
    null = _null_of(spec, column)
    if column.dictionary is None:
        words = as_words(column.values) if words is None else words
    elif len(column.dictionary):
        words = kernel("fold_bytes")(*bytes_of(column.dictionary))[column.values]
    else:
        words = np.zeros(len(column.values), np.uint64)
    if column.offsets is not None or column.size:
        bounds = np.arange(len(column) + 1) * column.size if column.offsets is None else column.offsets
        words = kernel("fold_bytes")(bounds * 8, words.reshape(-1).view(np.uint8))
    return int(kernel("content_digest")(mix, words, null, spec.id))


def as_words(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Fixed-width values as the format's 64-bit words: integers sign-extended, floats by their bits."""
    if values.dtype == np.float64:
        return np.ascontiguousarray(values).view(np.uint64)
    if values.dtype == np.float32:
        return np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    return values.astype(np.int64, copy=False).view(np.uint64)


def bytes_of(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets and bytes of a string or binary array without nulls."""
    large = array.cast(pa.large_binary())
    _, offsets, data = large.buffers()
    off = (
        np.frombuffer(offsets, np.int64)[large.offset : large.offset + len(large) + 1]
        if offsets
        else np.zeros(1, np.int64)
    )
    raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return (off - off[0]).astype(np.int64), raw[off[0] : off[-1]]


def _null_of(spec: StoredColumn, column: Column) -> npt.NDArray[np.bool_]:
    """(n,) where null; empty for a column that cannot be."""
    if not spec.nullable:
        return np.zeros(0, np.bool_)
    return np.zeros(len(column), np.bool_) if column.valid is None else ~column.valid


def _blank(spec: StoredColumn) -> pa.Scalar:
    return pa.scalar("" if spec.dtype == "string" else b"", ARROW_TYPES[spec.dtype])
