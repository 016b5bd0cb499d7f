"""Lines of text files as columns: JSON objects and CSV records.

Worked example: the CSV lines ``7,1000,3.5`` and ``8,x,1.0`` under the header ``user,ts,price``, with ``ts`` wanted as
int64: row 0 is decoded, line 1 is refused ("column 'ts' is 'x', no int64").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from thinrow.core.errors import InputError, SchemaError
from thinrow.sources.decode import Decoded, JsonDecoder
from thinrow.sources.wanted import Wanted


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


def _filled(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
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
        texts = self._texts(body, names, wrong)
        refused = {number: f"{text!r:.80} has another number of values than the header" for number, text in wrong}
        kept = [i for i in range(texts.num_rows + len(wrong)) if i not in refused]
        self._last, self._bad = texts, {number: text.encode() for number, text in wrong}
        self._kept = {row: i for i, row in enumerate(kept)}
        if wanted is None:
            return Decoded(pa_csv.read_csv(pa.BufferReader(self._typed(texts))), kept, refused)
        table, good, bad = self._cast(texts, wanted)
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
            line = file.readline()
        if not line.strip():
            raise InputError(f"{self._path} has no header line; the first line names the columns")
        options = pa_csv.ParseOptions(delimiter=self._delimiter)
        names: list[str] = pa_csv.read_csv(pa.BufferReader(line), parse_options=options).column_names
        return names

    def _texts(self, body: bytes, names: list[str], wrong: list[tuple[int, str]]) -> pa.Table:
        """All values as text; records of another number of values go to ``wrong``, with their number."""

        def refuse(row: pa_csv.InvalidRow) -> str:
            wrong.append((row.number - 1, row.text))
            return "skip"

        return pa_csv.read_csv(
            pa.BufferReader(body),
            # Of several threads a record does not know its number.
            read_options=pa_csv.ReadOptions(
                column_names=names, use_threads=False, block_size=max(len(body) + 1, 1 << 20)
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=self._delimiter, newlines_in_values=b'"' in body, invalid_row_handler=refuse
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=[""],
            ),
        )

    def _cast(self, texts: pa.Table, wanted: Wanted) -> tuple[pa.Table, list[int], dict[int, str]]:
        bad: dict[int, str] = {}
        columns = {}
        for name, kinds in wanted.items():
            column = texts.column(name).combine_chunks()
            kind = self._types.get(name) or self._choose(name, kinds, column)
            try:
                columns[name] = pc.cast(column, kind)
            except pa.ArrowException:
                cells: list[pa.Scalar] = []
                for i, value in enumerate(column):
                    try:
                        cells.append(pc.cast(value, kind).as_py())
                    except pa.ArrowException:
                        bad.setdefault(i, f"column {name!r} is {value.as_py()!r:.80}, no {kind}")
                        cells.append(None)
                columns[name] = pa.array(cells, kind)
        table = pa.table(columns)
        good = [i for i in range(texts.num_rows) if i not in bad]
        return (table if not bad else table.take(pa.array(good))), good, bad

    def _choose(self, name: str, kinds: Sequence[pa.DataType], column: pa.Array) -> pa.DataType:
        """What the first value is."""
        first = next((v for v in column if v.is_valid), None)
        for kind in kinds if first is not None else ():
            try:
                pc.cast(first, kind)
            except pa.ArrowException:
                continue
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
        return json.dumps(self._last.slice(self._kept[row], 1).to_pylist()[0]).encode()
