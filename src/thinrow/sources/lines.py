"""Lines of text files as columns: JSON objects and CSV records.

Worked example: the CSV lines ``7,1000,3.5`` and ``8,x,1.0`` under the header ``user,ts,price``, with ``ts`` wanted as
int64: row 0 is decoded, line 1 is refused ("column 'ts' is 'x', no int64").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from thinrow.core.errors import InputError, SchemaError
from thinrow.sources.decode import Decoded, JsonDecoder
from thinrow.sources.wanted import Wanted, as_numbers


class Lines(Protocol):
    """How a kind of file is read."""

    quotes: ClassVar[bool]
    how: dict[str, str]

    def decode(self, data: bytes, at: int, wanted: Wanted | None) -> Decoded:
        """Whole lines ``data``, which begin at byte ``at`` of the file."""
        ...

    def payload(self, data: bytes, row: int) -> bytes:
        """The event of a row or line number that ``decode`` gave, as ``how`` says."""
        ...

    def is_half(self, tail: bytes) -> bool:
        """Whether a last line without an end cannot be all of a line."""
        ...


class JsonLines:
    """A JSON object a line; empty lines are none."""

    quotes: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        self.how = {"format": "json"}
        self._decoder = JsonDecoder()

    def decode(self, data: bytes, at: int, wanted: Wanted | None) -> Decoded:
        """See ``Lines``."""
        return self._decoder.decode(_filled(data), wanted)

    def payload(self, data: bytes, row: int) -> bytes:
        """See ``Lines``."""
        return _filled(data)[row]

    def is_half(self, tail: bytes) -> bool:
        """See ``Lines``."""
        try:
            json.loads(tail)
        except (ValueError, RecursionError):
            return True
        return False


def _filled(data: bytes) -> list[bytes]:
    # A mark of byte order, as some editors begin a file.
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return lines if all(lines) else [line for line in lines if line.strip()]


class CsvLines:
    """Records by a header line; commas, or tabs in a ``.tsv``. An empty value without quotes is null."""

    quotes: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        self.how = {"format": "json"}
        self._path = path
        self._delimiter = "\t" if path.suffix == ".tsv" else ","
        self._types: dict[str, pa.DataType] = {}
        self._last: pa.Table | None = None
        self._bad: dict[int, bytes] = {}
        self._numbers: set[str] = set()

    def decode(self, data: bytes, at: int, wanted: Wanted | None) -> Decoded:
        """See ``Lines``. Raises SchemaError where a wanted column is not in the header, or holds lists."""
        names = self._header()
        start = 0 if at else data.find(b"\n") + 1 or len(data)
        body = data[start:]
        if wanted is not None:
            self._check(wanted, names)
        if not body.strip():
            return Decoded(pa.table({n: pa.array([], k[0]) for n, k in (wanted or {}).items()}), [], {})
        wrong: list[tuple[int, str]] = []
        texts, unreadable = self._texts(body, names, wrong)
        self._numbers = {n for n, kinds in (wanted or {}).items() if not pa.types.is_string(kinds[0])}
        refused = {number: f"{text!r:.80} has another number of values than the header" for number, text in wrong}
        kept = [i for i in range(texts.num_rows + len(wrong)) if i not in refused]
        self._last, self._bad = texts, {number: text.encode() for number, text in wrong}
        # As they came: with escapes they would be other values.
        self._bad |= {kept[row]: raw for rows in unreadable.values() for row, raw in rows.items()}
        self._kept = {row: i for i, row in enumerate(kept)}
        if wanted is None:
            return Decoded(pa_csv.read_csv(pa.BufferReader(self._typed(texts))), kept, refused)
        bad = {row: f"column {name!r} is no UTF-8" for name in wanted for row in unreadable.get(name, ())}
        table, good = self._cast(texts, wanted, bad)
        refused |= {kept[i]: why for i, why in bad.items()}
        return Decoded(table, [kept[i] for i in good], refused)

    def _check(self, wanted: Wanted, names: Sequence[str]) -> None:
        for name, kinds in wanted.items():
            if pa.types.is_list(kinds[0]):
                raise SchemaError(f"column {name!r} holds lists, and CSV has none; use JSON lines or Parquet")
            if name not in names:
                raise SchemaError(f"{self._path} has no column {name!r}; its header names {', '.join(names)}")

    def _header(self) -> list[str]:
        with self._path.open("rb") as file:
            line = file.readline().rstrip(b"\r\n")
        if not line.strip():
            raise InputError(f"{self._path} has no header line; the first line names the columns")
        options = pa_csv.ParseOptions(delimiter=self._delimiter)
        try:
            names: list[str] = pa_csv.read_csv(pa.BufferReader(line + b"\n"), parse_options=options).column_names
        except (pa.ArrowException, UnicodeDecodeError) as e:
            raise InputError(f"{self._path} has a header line that is no CSV: {e}; mend it") from e
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SchemaError(f"{self._path} names column {twice[0]!r} twice in its header; rename one of them")
        return names

    def _texts(
        self, body: bytes, names: list[str], wrong: list[tuple[int, str]]
    ) -> tuple[pa.Table, dict[str, dict[int, bytes]]]:
        """All values as text, and the rows of each column whose bytes are none (they stand there with escapes), as they
        came; records of another number of values go to ``wrong``, with their number."""

        def refuse(row: pa_csv.InvalidRow) -> str:
            wrong.append((row.number - 1, row.text))
            return "skip"

        raw = pa_csv.read_csv(
            pa.BufferReader(body),
            # Of several threads a record does not know its number.
            read_options=pa_csv.ReadOptions(
                column_names=names, use_threads=False, block_size=max(len(body) + 1, 1 << 20)
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=self._delimiter, newlines_in_values=b'"' in body, invalid_row_handler=refuse
            ),
            convert_options=pa_csv.ConvertOptions(
                # A byte that is no text is the fault of its row, not of the file.
                column_types=dict.fromkeys(names, pa.binary()),
                check_utf8=False,
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=[""],
            ),
        )
        unreadable: dict[str, dict[int, bytes]] = {}
        columns = []
        for i, name in enumerate(names):
            try:
                columns.append(pc.cast(raw.column(i), pa.string()))
            except pa.ArrowException:
                cells = raw.column(i).to_pylist()
                bad = [row for row, v in enumerate(cells) if v is not None and not _is_text(v)]
                unreadable[name] = {row: self._joined(raw, row) for row in bad}
                values = [None if v is None else v.decode(errors="backslashreplace") for v in cells]
                columns.append(pa.chunked_array([pa.array(values, pa.string())]))
        return pa.table(columns, names), unreadable

    def _joined(self, raw: pa.Table, row: int) -> bytes:
        cells = raw.slice(row, 1).to_pylist()[0].values()
        return self._delimiter.encode().join(b"" if cell is None else cell for cell in cells)

    def _cast(self, texts: pa.Table, wanted: Wanted, bad: dict[int, str]) -> tuple[pa.Table, list[int]]:
        """Columns as wanted of the rows that are not ``bad``, to which those are added that have no such values."""
        columns = {}
        for name, kinds in wanted.items():
            column = texts.column(name).combine_chunks()
            kind = self._types.get(name) or self._choose(name, kinds, column)
            try:
                columns[name] = pc.cast(column, kind)
            except pa.ArrowException:
                columns[name] = _cell_by_cell(name, column, kind, kinds, bad)
        table = pa.table(columns)
        good = [i for i in range(texts.num_rows) if i not in bad]
        return (table if not bad else table.take(pa.array(good, pa.int64()))), good

    def _choose(self, name: str, kinds: Sequence[pa.DataType], column: pa.Array) -> pa.DataType:
        """What the first value is that is any of them."""
        if len(kinds) == 1:
            return kinds[0]
        for value in column:
            for kind in kinds if value.is_valid else ():
                if _cell(value, kind) is not None:
                    self._types[name] = kind
                    return kind
        return kinds[0]

    def _typed(self, texts: pa.Table) -> bytes:
        out = pa.BufferOutputStream()
        pa_csv.write_csv(texts, out)
        written: bytes = out.getvalue().to_pybytes()
        return written

    def payload(self, data: bytes, row: int) -> bytes:
        """See ``Lines``."""
        if row in self._bad:
            return self._bad[row]
        assert self._last is not None
        cells = self._last.slice(self._kept[row], 1).to_pylist()[0]
        return json.dumps({n: _number(v) if n in self._numbers else v for n, v in cells.items()}).encode()

    def is_half(self, tail: bytes) -> bool:
        """See ``Lines``."""
        few = tail.count(self._delimiter.encode()) < len(self._header()) - 1
        return few or bool(tail.count(b'"') % 2)


def _number(cell: str | None) -> Any:
    """The cell as JSON has it where it is a number or a truth value."""
    try:
        found = None if cell is None else json.loads(cell)
    except ValueError:
        return cell
    return found if isinstance(found, (bool, int, float)) else cell


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cell(value: pa.Scalar, kind: pa.DataType) -> pa.Scalar | None:
    try:
        return pc.cast(value, kind)
    except pa.ArrowException:
        return None


def _cell_by_cell(
    name: str, column: pa.Array, kind: pa.DataType, kinds: Sequence[pa.DataType], bad: dict[int, str]
) -> pa.Array:
    """The column, each value as ``kind`` or else as another of ``kinds``; as numbers where several were needed."""
    cells: dict[pa.DataType, list[Any]] = {}
    for i, value in enumerate(column):
        as_one = ((k, _cell(value, k)) for k in (kind, *(k for k in kinds if k != kind)))
        of, cell = next(((k, c) for k, c in as_one if c is not None), (kind, None))
        if cell is None:
            bad.setdefault(i, f"column {name!r} is {value.as_py()!r:.80}, no {kind}")
        elif value.is_valid:
            cells.setdefault(of, [None] * len(column))[i] = cell.as_py()
    arrays = [pa.array(values, of) for of, values in cells.items()] or [pa.nulls(len(column), kind)]
    if len(arrays) == 1:
        return arrays[0]
    numbers = [as_numbers(pa.table({name: array})).column(name).combine_chunks() for array in arrays]
    return pc.coalesce(*numbers)
