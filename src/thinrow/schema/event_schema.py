"""The schema of a store's events: typed columns, each with a trait, in named feature groups.

A column is known by its id, not its name: renaming keeps the id, and an id is never used twice. Worked example, the
TOML form that ``thinrow ingest --schema`` reads::

    user = "household_id"              # int64 or string column
    time = "transaction_timestamp"     # int64 milliseconds, or an Arrow timestamp
    event_id = "line_id"               # optional: makes appends idempotent
    supersedes = "corrects"            # optional: the event_id of the event that this one corrects
    arrival_time = "committed_at"      # optional: replays append in this order

    [groups.item]
    product_id = { trait = "id", dtype = "int64" }
    department = { trait = "categorical", dtype = "string" }

    [groups.price]
    sales_value = { trait = "numeric", dtype = "float64", nullable = true }

    [groups.content]
    tags = { trait = "id_list", dtype = "string" }                    # any number of values an event
    embedding = { trait = "vector", dtype = "float32", size = 16 }    # 16 values an event
    flags = { trait = "bitmap", dtype = "int16" }                     # 16 yes-or-no flags, one a bit

More than 64 flags are a vector of int64 words, or a list of the numbers of those that are set.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from thinrow.core.check import checked, instance, mapping, shown
from thinrow.core.errors import SchemaError
from thinrow.core.users import UserKind

if TYPE_CHECKING:
    import pyarrow as pa

DType = Literal["int8", "int16", "int32", "int64", "float32", "float64", "string", "binary"]
DTYPES: tuple[DType, ...] = ("int8", "int16", "int32", "int64", "float32", "float64", "string", "binary")

#: Names of the key columns (group 0) and of the event id, which no schema column may take.
RESERVED_NAMES = ("user_id", "event_ts", "arrival", "hidden_from", "event_id", "supersedes")
#: Ids of the columns that every store has; schema columns have ids from 1 up.
EVENT_TS_ID, ARRIVAL_ID, HIDDEN_FROM_ID, EVENT_ID_ID = -1, -2, -3, -4
#: Group 0 (event_ts, arrival, hidden_from), read with every projection, and the group of the event ids.
KEYS_GROUP, IDS_GROUP = "keys", "ids"


#: Most elements of one list or vector: 512 of them, a stripe, stay within what a reader takes into memory at once.
MAX_ELEMENTS = 32_768


class Trait(str, Enum):
    """What a column's values mean; it bounds the dtypes that the column may have.

    An ID_LIST holds any number of values an event, a VECTOR as many as its ``size`` says, the others one.
    """

    TIMESTAMP = "timestamp"
    ID = "id"
    CATEGORICAL = "categorical"
    NUMERIC = "numeric"
    BITMAP = "bitmap"
    ID_LIST = "id_list"
    TEXT = "text"
    VECTOR = "vector"


_INTEGERS: tuple[DType, ...] = ("int8", "int16", "int32", "int64")
_DTYPES_OF_TRAIT: dict[Trait, tuple[DType, ...]] = {
    Trait.TIMESTAMP: ("int64",),
    Trait.ID: (*_INTEGERS, "string"),
    Trait.CATEGORICAL: (*_INTEGERS, "string"),
    Trait.NUMERIC: (*_INTEGERS, "float32", "float64"),
    Trait.BITMAP: _INTEGERS,
    Trait.ID_LIST: (*_INTEGERS, "string"),
    Trait.TEXT: ("string", "binary"),
    Trait.VECTOR: (*_INTEGERS, "float32", "float64"),
}


_NAME = instance(str, "give the name of a column")
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("name", "group", "dtype", "user_kind", "user_column", "time_column"), str),
    **dict.fromkeys(("id", "size", "schema_id"), int),
    **dict.fromkeys(
        ("event_id_column", "event_id_dtype", "supersedes_column", "arrival_time_column"), (str, type(None))
    ),
    "nullable": bool,
}


def check_new(columns: Iterable[ColumnSpec]) -> None:
    """Raises SchemaError where a column that is being made, or its group, has a name that readers need for themselves:
    what an overlay holds is read as a group "\\0overlay N". Stores that have such a name already open as before."""
    for column in columns:
        for what, name in (("column", column.name), ("group", column.group)):
            if "\0" in name:
                raise SchemaError(
                    f"{what} name {name!r} of column {column.name!r} holds the character NUL, which is kept for "
                    "thinrow's own names; leave it out"
                )


def _check_types(data: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError where a value of a schema read from JSON is of another type than written."""
    for key, kind in _JSON_TYPES.items():
        value = data.get(key)
        if key in data and (not isinstance(value, kind) or (kind is int and type(value) is not int)):
            raise TypeError(f"{key} is {value!r:.80}")
        if kind is int and key in data and not 0 <= data[key] < 1 << 31:
            raise ValueError(f"{key} is {value}")


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column: ``id`` (1 or more, never reused), ``name``, ``trait``, ``dtype`` (of an element, where an event has
    several), ``group``, ``nullable`` (as a whole: elements are never null), and ``size``, the elements of a vector
    (1 to ``MAX_ELEMENTS``; 0 for every other trait)."""

    id: int
    name: str
    trait: Trait
    dtype: DType
    group: str
    nullable: bool = False
    size: int = 0

    def __post_init__(self) -> None:
        if type(self.id) is not int or not 1 <= self.id < 1 << 31:
            raise SchemaError(f"column {self.name!r} has id {shown(self.id)}; ids are 1 or more, and below 2^31")
        for what, name in (("column", self.name), ("group", self.group)):
            if not isinstance(name, str):
                raise SchemaError(f"{what} name {name!r} is a {type(name).__name__}; give a string")
        if not self.name or self.name in RESERVED_NAMES:
            raise SchemaError(
                f"column name {self.name!r} is reserved; rename the column (reserved: {', '.join(RESERVED_NAMES)})"
            )
        if self.group in (KEYS_GROUP, IDS_GROUP) or not self.group:
            raise SchemaError(f"column {self.name!r} is in group {self.group!r}, a reserved name; name another group")
        if not isinstance(self.trait, Trait):
            raise SchemaError(f"column {self.name!r} has trait {shown(self.trait)}; give a Trait, such as Trait.ID")
        allowed = _DTYPES_OF_TRAIT[self.trait]
        if not isinstance(self.dtype, str) or self.dtype not in allowed:
            raise SchemaError(
                f"column {self.name!r}: trait {self.trait.value} with dtype {self.dtype!r}; allowed: "
                f"{', '.join(allowed)}"
            )
        if self.trait is Trait.VECTOR and not 1 <= self.size <= MAX_ELEMENTS:
            raise SchemaError(
                f"vector {self.name!r} has size {self.size}; give the number of its elements, 1 to {MAX_ELEMENTS}"
            )
        if self.trait is not Trait.VECTOR and self.size:
            raise SchemaError(f"column {self.name!r} has size {self.size}; only a vector has a size, leave it out")

    @property
    def ragged(self) -> bool:
        """Whether an event has any number of values."""
        return self.trait is Trait.ID_LIST

    @property
    def is_bytes(self) -> bool:
        """Whether values are of variable length (delivered as codes and a dictionary)."""
        return self.dtype in ("string", "binary")

    @property
    def numpy_dtype(self) -> npt.DTypeLike:
        """dtype of ``Column.values``: the column's own, or int32 codes for strings and bytes."""
        return np.dtype(np.int32 if self.is_bytes else self.dtype)


@dataclass(frozen=True, slots=True)
class EventSchema:
    """Columns of an event, and which input columns hold the user, the time and the ids.

    ``user_column`` ... ``arrival_time_column`` name *input* columns; inside thinrow they are always ``user_id``,
    ``event_ts``, ``event_id``, ``supersedes``. ``event_id_dtype`` is None where events carry no id.
    """

    columns: tuple[ColumnSpec, ...]
    user_kind: UserKind = "int64"
    schema_id: int = 1
    user_column: str = "user_id"
    time_column: str = "event_ts"
    event_id_column: str | None = None
    event_id_dtype: Literal["int64", "string"] | None = None
    supersedes_column: str | None = None
    arrival_time_column: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.columns, (tuple, list)) or not all(isinstance(c, ColumnSpec) for c in self.columns):
            raise SchemaError(f"columns is {shown(self.columns)}; give a tuple of ColumnSpec")
        for what in ("name", "id"):
            values = [str(getattr(c, what)) for c in self.columns]
            twice = sorted({v for v in values if values.count(v) > 1})
            if twice:
                raise SchemaError(f"column {what} {twice[0]!r} appears twice; each must be unique")
        for key, kind in (("user_kind", self.user_kind), ("event_id_dtype", self.event_id_dtype or "int64")):
            if kind not in ("int64", "string"):
                raise SchemaError(f"{key} is {kind!r}; allowed: int64, string")
        if (self.event_id_column is None) != (self.event_id_dtype is None):
            raise SchemaError("event_id_column and event_id_dtype go together; give both or neither")
        if self.supersedes_column is not None and self.event_id_column is None:
            raise SchemaError("supersedes needs event_id: a correction names the id of the event it corrects")

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the feature groups in order of first appearance (the key group not among them)."""
        return tuple(dict.fromkeys(c.group for c in self.columns))

    def column(self, name: str) -> ColumnSpec:
        """The column called ``name``. Raises SchemaError where there is none."""
        for c in self.columns:
            if c.name == name:
                return c
        raise SchemaError(f"no column {name!r}; the schema has {', '.join(c.name for c in self.columns)}")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_dict`` reverses it."""
        return {
            "schema_id": self.schema_id,
            "user_kind": self.user_kind,
            "user_column": self.user_column,
            "time_column": self.time_column,
            "event_id_column": self.event_id_column,
            "event_id_dtype": self.event_id_dtype,
            "supersedes_column": self.supersedes_column,
            "arrival_time_column": self.arrival_time_column,
            "columns": [
                {
                    "id": c.id,
                    "name": c.name,
                    "trait": c.trait.value,
                    "dtype": c.dtype,
                    "group": c.group,
                    "nullable": c.nullable,
                    **({"size": c.size} if c.size else {}),
                }
                for c in self.columns
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EventSchema:
        """Reverse of ``to_dict``. Raises SchemaError on anything else."""
        if not isinstance(data, Mapping):
            raise SchemaError(f"not an event schema: {shown(data)}; give the dict that to_dict returns")
        try:
            for c in (data, *data["columns"]):
                _check_types(c)
            columns = tuple(ColumnSpec(**{**c, "trait": Trait(c["trait"])}) for c in data["columns"])
            return cls(**{**data, "columns": columns})
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            if isinstance(e, SchemaError):
                raise
            raise SchemaError(f"not an event schema: {e}") from e

    def to_json(self) -> str:
        """Canonical JSON: equal schemas give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_toml(cls, text: str, arrow: pa.Schema) -> EventSchema:
        """Parse the TOML form of the module docstring; ``arrow`` (the input's schema) settles kinds of ids.

        Raises:
            SchemaError: the TOML is malformed, or names a column that the input lacks.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as e:
            raise SchemaError(f"schema is not TOML: {e}") from e
        known = {"user", "time", "event_id", "supersedes", "arrival_time", "groups"}
        extra = set(data) - known
        if extra:
            raise SchemaError(f"schema has an unknown key {sorted(extra)[0]!r}; known: {', '.join(sorted(known))}")
        columns: list[ColumnSpec] = []
        groups = data.get("groups", {})
        if not isinstance(groups, dict) or not groups:
            raise SchemaError("schema has no [groups.NAME] table; name at least one group with one column")
        for group, members in groups.items():
            if not isinstance(members, dict):
                raise SchemaError(f"group {group!r} is not a table; write [groups.{group}]")
            for name, spec in members.items():
                columns.append(_column_from_toml(group, name, spec, len(columns) + 1))
        _require(data, "user")
        _require(data, "time")
        return _bind(
            tuple(columns),
            arrow,
            user=data["user"],
            time=data["time"],
            event_id=data.get("event_id"),
            supersedes=data.get("supersedes"),
            arrival_time=data.get("arrival_time"),
        )

    @classmethod
    @checked(user=_NAME, time=_NAME, event_id=_NAME, supersedes=_NAME, arrival_time=_NAME, groups=mapping)
    def infer(
        cls,
        arrow: pa.Schema,
        *,
        user: str,
        time: str,
        event_id: str | None = None,
        supersedes: str | None = None,
        arrival_time: str | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> EventSchema:
        """A schema for a table: every other column, traits guessed from types (ints are ids, floats numeric,
        strings categorical, timestamps timestamp, lists id lists, lists of a fixed size vectors), all in one group
        ``main`` unless ``groups`` says otherwise.

        Raises:
            SchemaError: a named column is missing, one in ``groups`` too, or a column's type has no counterpart.
        """
        import pyarrow as pa

        if not isinstance(arrow, pa.Schema):
            raise SchemaError(f"the schema is {shown(arrow)}; give a pyarrow.Schema: table.schema")
        special = {user, time, event_id, supersedes, arrival_time}
        group_of = {name: g for g, names in (groups or {}).items() for name in names}
        unknown = [name for name in group_of if name not in arrow.names or name in special]
        if unknown:
            raise SchemaError(f"group {group_of[unknown[0]]!r} names {unknown[0]!r}, which is no column of the events")
        columns: list[ColumnSpec] = []
        for field in arrow:
            if field.name in special:
                continue
            dtype, trait, size = _guess(field)
            group = group_of.get(field.name, "main")
            columns.append(ColumnSpec(len(columns) + 1, field.name, trait, dtype, group, field.nullable, size))
        return _bind(
            tuple(columns),
            arrow,
            user=user,
            time=time,
            event_id=event_id,
            supersedes=supersedes,
            arrival_time=arrival_time,
        )

    @classmethod
    def load(cls, path: str | Path, arrow: pa.Schema) -> EventSchema:
        """Read a schema file: TOML, or Python that defines ``schema`` (an EventSchema).

        A Python schema file is *run*: use files you trust.
        """
        path = Path(path)
        if not path.is_file():
            raise SchemaError(f"no schema file at {path}; pass --schema FILE.toml or FILE.py")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise SchemaError(f"{path} is not UTF-8 text ({e}); pass a TOML or Python file") from e
        if path.suffix != ".py":
            return cls.from_toml(text, arrow)
        scope: dict[str, Any] = {}
        try:
            exec(compile(text, str(path), "exec"), scope)
        except SchemaError:
            raise
        except (Exception, SystemExit) as e:
            raise SchemaError(
                f"{path} does not run: {type(e).__name__}: {e}; mend it, or write the schema as TOML"
            ) from e
        schema = scope.get("schema")
        if not isinstance(schema, cls):
            raise SchemaError(f"{path} defines no `schema` of type EventSchema; add: schema = EventSchema(...)")
        return schema


def _require(data: Mapping[str, Any], key: str) -> None:
    if not isinstance(data.get(key), str):
        raise SchemaError(f'schema lacks {key!r}; add a line: {key} = "COLUMN"')


def _column_from_toml(group: str, name: str, spec: object, next_id: int) -> ColumnSpec:
    if not isinstance(spec, dict) or "trait" not in spec or "dtype" not in spec:
        raise SchemaError(f'column {name!r}: write {name} = {{ trait = "id", dtype = "int64" }}')
    known = ("trait", "dtype", "nullable", "id", "size")
    extra = set(spec) - set(known)
    if extra:
        raise SchemaError(f"column {name!r} has an unknown key {sorted(extra)[0]!r}; known: {', '.join(known)}")
    try:
        trait = Trait(spec["trait"])
    except ValueError:
        raise SchemaError(
            f"column {name!r}: unknown trait {spec['trait']!r}; known: {', '.join(t.value for t in Trait)}"
        ) from None
    column_id, nullable, size = spec.get("id", next_id), spec.get("nullable", False), spec.get("size", 0)
    for key, value, kind in (("id", column_id, int), ("nullable", nullable, bool), ("size", size, int)):
        if type(value) is not kind:
            raise SchemaError(f"column {name!r}: {key} is {value!r}; it must be of type {kind.__name__}")
    return ColumnSpec(column_id, name, trait, spec["dtype"], group, nullable, size)


def _guess(field: pa.Field) -> tuple[DType, Trait, int]:
    """Dtype, trait and size of the column that a field becomes."""
    import pyarrow.types as t

    kind, trait, size = field.type, None, 0
    if t.is_fixed_size_list(kind):
        trait, size = Trait.VECTOR, kind.list_size
    elif t.is_list(kind) or t.is_large_list(kind) or t.is_list_view(kind) or t.is_large_list_view(kind):
        trait = Trait.ID_LIST
    dtype, of_one = _guess_one(field, kind if trait is None else kind.value_type)
    return dtype, trait or of_one, size


def _guess_one(field: pa.Field, kind: pa.DataType) -> tuple[DType, Trait]:
    """Of one value of type ``kind``."""
    import pyarrow.types as t

    kind = kind.value_type if t.is_dictionary(kind) else kind
    if t.is_string(kind) or t.is_large_string(kind):
        return "string", Trait.CATEGORICAL
    if t.is_binary(kind) or t.is_large_binary(kind):
        return "binary", Trait.TEXT
    if t.is_timestamp(kind):
        return "int64", Trait.TIMESTAMP
    if t.is_boolean(kind):
        return "int8", Trait.CATEGORICAL
    widened = {"halffloat": "float32", "float": "float32", "double": "float64"}
    widened |= {"uint8": "int16", "uint16": "int32", "uint32": "int64"}
    name = widened.get(str(kind), str(kind))
    if name in DTYPES:
        return name, Trait.NUMERIC if name.startswith("float") else Trait.ID
    raise SchemaError(
        f"column {field.name!r} has type {field.type}, which has no counterpart; "
        f"cast it to one of {', '.join(DTYPES)} or leave it out"
    )


def _bind(
    columns: tuple[ColumnSpec, ...],
    arrow: pa.Schema,
    *,
    user: str,
    time: str,
    event_id: str | None,
    supersedes: str | None,
    arrival_time: str | None,
) -> EventSchema:
    import pyarrow.types as t

    check_new(columns)
    needed = [
        user,
        time,
        *(n for n in (event_id, supersedes, arrival_time) if n is not None),
        *(c.name for c in columns),
    ]
    for name in needed:
        if name not in arrow.names:
            raise SchemaError(f"input has no column {name!r}; it has {', '.join(arrow.names)}")
        if arrow.names.count(name) > 1:
            raise SchemaError(f"input has {arrow.names.count(name)} columns {name!r}; rename all but one")

    def is_text(name: str) -> bool:
        kind = arrow.field(name).type
        kind = kind.value_type if t.is_dictionary(kind) else kind
        return bool(t.is_string(kind) or t.is_large_string(kind))

    return EventSchema(
        columns=columns,
        user_kind="string" if is_text(user) else "int64",
        user_column=user,
        time_column=time,
        event_id_column=event_id,
        event_id_dtype=None if event_id is None else "string" if is_text(event_id) else "int64",
        supersedes_column=supersedes,
        arrival_time_column=arrival_time,
    )
