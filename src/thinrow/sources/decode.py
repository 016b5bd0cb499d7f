"""From the values of messages to columns: a batch at a time where the format allows it.

Worked example, JSON: the values of a batch are joined, a line each, and parsed by Arrow in one call. Where that fails
the batch is halved until the culprits stand alone::

    [b'{"u":1}', b'{"u":', b'{"u":3}']  ->  rows 0 and 2; message 1: "JSON parse error: ..."
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.json as pa_json

from thinrow.sources.wanted import Wanted, as_numbers, choose

_PEEK = 256


@dataclass(frozen=True, slots=True)
class Decoded:
    """Attributes:
    table: one row for each message in ``rows``, columns as wanted.
    rows: numbers of messages, ascending.
    refused: message -> why it has no row.
    """

    table: pa.Table
    rows: list[int]
    refused: dict[int, str]


class Decoder(Protocol):
    """Decodes the values of messages."""

    def decode(self, values: Sequence[bytes], wanted: Wanted | None) -> Decoded:
        """Columns ``wanted`` of ``values``; all columns, of types that Arrow infers, for None.

        Raises:
            StoreError: what the decoder needs (a schema registry) does not answer. No message is to blame.
        """
        ...

    def describe(self) -> dict[str, str]:
        """How to make this decoder again: ``format`` and what it needs, without credentials."""
        ...


class JsonDecoder:
    """JSON objects, one a message, by Arrow's parser. Fields that nobody wants are not decoded."""

    def __init__(self) -> None:
        self._types: dict[str, pa.DataType] = {}

    def decode(self, values: Sequence[bytes], wanted: Wanted | None) -> Decoded:
        """See ``Decoder``."""
        schema = None if wanted is None else self._schema(values, wanted)
        whole = b"\n".join(values)
        if are_objects(whole, len(values)):
            try:
                return Decoded(_parsed(whole, len(values), schema), list(range(len(values))), {})
            except (pa.ArrowException, UnicodeDecodeError):
                pass
        refused: dict[int, str] = {}
        lines: list[bytes] = []
        rows: list[int] = []
        for i, value in enumerate(values):
            line = value.strip()
            if line[:1] == b"{" and line[-1:] == b"}":
                lines.append(line.replace(b"\n", b" ").replace(b"\r", b" "))
                rows.append(i)
            else:
                refused[i] = f"no JSON object: it begins with {value[:20]!r} and ends with {value[-20:]!r}"
        parts, bad = parse_halving(lines, partial(_joined, schema=schema))
        good = [at for at in range(len(lines)) if at not in bad]
        if wanted is not None and schema is not None and bad:
            parts, good = _otherwise(lines, wanted, schema, parts, good, bad)
        for at, reason in bad.items():
            refused[rows[at]] = reason
        if not parts:
            return Decoded((schema or pa.schema([])).empty_table(), [], refused)
        return Decoded(pa.concat_tables(parts, promote_options="permissive"), [rows[at] for at in good], refused)

    def _schema(self, lines: Sequence[bytes], wanted: Wanted) -> pa.Schema:
        """Of a column that may come in several ways, the way in which most of the first values come."""
        open_columns = [n for n, kinds in wanted.items() if len(kinds) > 1 and n not in self._types]
        if open_columns:
            self._types |= _types_of(islice(lines, _PEEK), {n: wanted[n] for n in open_columns})
        return pa.schema(
            [(n, kinds[0] if len(kinds) == 1 else self._types.get(n, kinds[0])) for n, kinds in wanted.items()]
        )

    def describe(self) -> dict[str, str]:
        """See ``Decoder``."""
        return {"format": "json"}


def _types_of(lines: Iterable[bytes], wanted: Wanted) -> dict[str, pa.DataType]:
    """Of each column the type that most of the lines have; none where no line has a value."""
    peeked: list[dict[str, Any]] = []
    for line in lines:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            peeked.append(found)
    chosen = {name: choose(kinds, (row.get(name) for row in peeked)) for name, kinds in wanted.items()}
    return {name: kind for name, kind in chosen.items() if kind is not None}


def _otherwise(
    lines: Sequence[bytes],
    wanted: Wanted,
    schema: pa.Schema,
    parts: list[pa.Table],
    good: list[int],
    bad: dict[int, str],
) -> tuple[list[pa.Table], list[int]]:
    """Lines that ``schema`` refuses, under the types that they themselves have: one producer may write times as
    numbers, another as texts. What can be parsed leaves ``bad``; returned are all tables and their lines, in order."""
    tried, n = {schema}, len(good)
    for at in list(bad):
        if at not in bad:
            continue
        own = _types_of([lines[at]], {name: kinds for name, kinds in wanted.items() if len(kinds) > 1})
        other = pa.schema([(field.name, own.get(field.name, field.type)) for field in schema])
        if other in tried:
            continue
        tried.add(other)
        left = list(bad)
        parse = partial(_joined, schema=other)
        more, still = parse_halving([lines[i] for i in left], parse)
        taken = [i for k, i in enumerate(left) if k not in still]
        parts, good = parts + more, good + taken
        for i in taken:
            del bad[i]
    if len(good) == n:
        return parts, good
    order = sorted(range(len(good)), key=good.__getitem__)
    table = pa.concat_tables([as_numbers(part) for part in parts], promote_options="permissive")
    return [table.take(pa.array(order, pa.int64()))], [good[i] for i in order]


def are_objects(lines: bytes, n: int) -> bool:
    """Whether ``lines`` are n lines that each begin with ``{`` and end with ``}``.

    Between such lines a parser cannot slip: what it joins is an error (after ``}`` no ``{`` may follow inside a value),
    and what it parts changes the number of objects.
    """
    between = lines.count(b"\n")
    return (
        n > 0
        and between == n - 1
        and lines[:1] == b"{"
        and lines[-1:] == b"}"
        and lines.count(b"\n{") == between == lines.count(b"}\n")
    )


def _joined(lines: Sequence[bytes], schema: pa.Schema | None) -> pa.Table:
    return _parsed(b"\n".join(lines), len(lines), schema)


def _parsed(lines: bytes, n: int, schema: pa.Schema | None) -> pa.Table:
    """Raises ArrowInvalid where not each of n lines is one object of ``schema``."""
    options = pa_json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    # A line that is larger than a block is refused by the parser, whatever it holds.
    block = 1 << 20
    if len(lines) > block:
        longest = max(map(len, lines.split(b"\n")))
        block = max(block, 2 * longest)
    table = pa_json.read_json(
        pa.BufferReader(lines), read_options=pa_json.ReadOptions(block_size=block), parse_options=options
    )
    if table.num_rows != n:
        raise pa.ArrowInvalid(f"{n} messages hold {table.num_rows} JSON objects; a message is one")
    if schema is not None:
        table = table.select(schema.names)
    table.validate(full=True)
    return table


def parse_halving(
    items: Sequence[bytes], parse: Callable[[Sequence[bytes]], pa.Table]
) -> tuple[list[pa.Table], dict[int, str]]:
    """Parse ``items`` in one call, or by halves where that fails: tables in order, and item -> why it has none."""
    parts: list[pa.Table] = []
    bad: dict[int, str] = {}
    todo = [(0, len(items))] if items else []
    while todo:
        first, last = todo.pop()
        try:
            parts.append(parse(items[first:last]))
        except (pa.ArrowException, UnicodeDecodeError) as e:
            if last - first == 1:
                bad[first] = str(e).partition("\n")[0][:300]
            else:
                half = (first + last) // 2
                todo += [(half, last), (first, half)]
    return parts, bad
