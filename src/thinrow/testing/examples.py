"""Random schemas, impressions and outcomes from a seed, and equality of records, for tests of the training path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.core.ragged import offsets_of
from thinrow.core.users import UserKind, Users
from thinrow.examples.records import ExampleBatch, Impressions, Outcomes, text_column
from thinrow.history.requests import RequestBatch
from thinrow.jagged.column import Column
from thinrow.jagged.events import HIDE_DTYPE, Events, never_hidden
from thinrow.jagged.jagged import Jagged
from thinrow.schema.event_schema import DTYPES, ColumnSpec, DType, EventSchema, Trait
from thinrow.schema.example_schema import ExampleSchema, FieldSpec
from thinrow.schema.version import VERSION_DTYPE

_EVENT_COLUMNS: tuple[tuple[str, Trait, DType], ...] = (
    ("item", Trait.ID, "int64"),
    ("tiny", Trait.CATEGORICAL, "int8"),
    ("short", Trait.ID, "int16"),
    ("count", Trait.NUMERIC, "int32"),
    ("price", Trait.NUMERIC, "float32"),
    ("sales. value €", Trait.NUMERIC, "float64"),
    ("department", Trait.CATEGORICAL, "string"),
    ("blob", Trait.TEXT, "binary"),
    ("flags", Trait.BITMAP, "int16"),
    ("seen", Trait.ID_LIST, "int32"),
    ("tags", Trait.ID_LIST, "string"),
    ("spot", Trait.VECTOR, "float32"),
    ("words", Trait.VECTOR, "int64"),
)


def event_schema(user_kind: UserKind = "int64") -> EventSchema:
    """Columns of every dtype and shape, one of them with an awkward name, in two groups; the even ones nullable."""
    columns = [
        ColumnSpec(i, n, t, d, "item" if i < 4 else "rest", i % 2 == 0, 2 if t is Trait.VECTOR else 0)
        for i, (n, t, d) in enumerate(_EVENT_COLUMNS, 1)
    ]
    return EventSchema(tuple(columns), user_kind)


def example_schema() -> ExampleSchema:
    """Context and candidate fields of every dtype; outcomes ``click`` (10 ms) and ``buy`` (50 ms)."""
    return ExampleSchema(
        context=tuple(FieldSpec(f"c_{d}", d) for d in DTYPES),
        candidates=(FieldSpec("item", "int64"), *(FieldSpec(f"k_{d}", d) for d in DTYPES)),
        item="item",
        outcomes=(("click", 10), ("buy", 50)),
    )


def random_impressions(
    rng: np.random.Generator,
    n: int,
    events: EventSchema,
    examples: ExampleSchema,
    *,
    n_users: int = 5,
    max_ts: int = 200,
    first_id: int = 0,
) -> Impressions:
    """``n`` requests in random order of time with ids from ``first_id`` on; items are in ``[0, 8)``."""
    users = _users(rng.integers(0, n_users, n), events.user_kind)
    versions = np.zeros(n, VERSION_DTYPE)
    for name in VERSION_DTYPE.names or ():
        versions[name] = rng.integers(0, 1 << 31, n)
    versions["checksum"] = rng.integers(0, 1 << 64, n, dtype=np.uint64)
    offsets, hide_offsets, shown = (_offsets(rng, n, most) for most in (4, 2, 5))
    n_events = int(offsets[-1])
    columns = {c.name: random_shaped(rng, n_events, c) for c in events.columns}
    ts, arrival = rng.integers(0, max_ts, n_events), rng.integers(1, 1 << 40, n_events)
    hides = np.zeros(int(hide_offsets[-1]), HIDE_DTYPE)
    for name in HIDE_DTYPE.names or ():
        hides[name] = rng.integers(0, 1 << 40, len(hides))
    candidates = {
        f.name: Jagged(random_column(rng, int(shown[-1]), f.dtype, small=f.name == examples.item), shown)
        for f in examples.candidates
    }
    inline = Events(users, offsets, ts, arrival, never_hidden(n_events), columns)
    return Impressions(
        np.arange(first_id, first_id + n, dtype=np.int64),
        RequestBatch(users, rng.integers(0, max_ts, n), versions, inline, hides, hide_offsets, events),
        {f.name: random_column(rng, n, f.dtype) for f in examples.context},
        candidates,
        text_column("model-1", n),
        random_column(rng, n, "string"),
        rng.integers(0, 1 << 20, n),
    )


def random_examples(
    rng: np.random.Generator, n: int, events: EventSchema, examples: ExampleSchema, *, first_id: int = 0
) -> ExampleBatch:
    """``random_impressions`` with random labels."""
    impressions = random_impressions(rng, n, events, examples, first_id=first_id)
    shape = impressions.candidates[examples.item].offsets
    labels = {
        n_: Jagged(Column(rng.integers(-3, 4, int(shape[-1])).astype(np.int32)), shape) for n_, _ in examples.outcomes
    }
    return ExampleBatch.label(impressions, labels)


def random_outcomes(rng: np.random.Generator, n: int, n_requests: int, *, max_ts: int = 300) -> Outcomes:
    """``n`` outcomes of requests ``[0, n_requests + 2)`` and items ``[0, 8)``, one name in three unknown."""
    names = ("click", "buy", "other")
    name = Column(rng.integers(0, len(names), n).astype(np.int32), None, pa.array(names, pa.string()))
    ids = rng.integers(0, n_requests + 2, n)
    return Outcomes(ids, rng.integers(0, 8, n), name, rng.integers(0, max_ts, n), rng.integers(-5, 6, n))


def random_shaped(rng: np.random.Generator, n: int, spec: ColumnSpec) -> Column:
    """(n,) values of a column of any trait."""
    if not spec.ragged and not spec.size:
        return random_column(rng, n, spec.dtype, nullable=spec.nullable)
    valid = rng.random(n) < 0.8 if spec.nullable else None
    lengths = np.full(n, spec.size) if spec.size else rng.integers(0, 4, n) * (True if valid is None else valid)
    elements = random_column(rng, int(lengths.sum()), spec.dtype)
    if spec.size:
        return Column(elements.values.reshape(n, spec.size), valid)
    return Column(elements.values, valid, elements.dictionary, offsets_of(lengths))


def random_column(
    rng: np.random.Generator, n: int, dtype: DType, *, nullable: bool = False, small: bool = False
) -> Column:
    """(n,) values of a dtype, its extremes among them; ``small``: in ``[0, 8)``."""
    valid = rng.random(n) < 0.8 if nullable else None
    if dtype in ("string", "binary"):
        texts = ["", "a", "ü", "line\n", "日本"]
        values = pa.array(texts if dtype == "string" else [t.encode("utf-16") for t in texts])
        return Column(rng.integers(0, len(texts), n).astype(np.int32), valid, values)
    if dtype in ("float32", "float64"):
        floats = rng.choice(np.array([0.0, -0.0, 1.5, -2.25, np.inf, 1e30]), n).astype(dtype)
        return Column(floats, valid)
    bounds = np.iinfo(dtype)
    integers = rng.integers(0, 8, n) if small else rng.choice(np.array([bounds.min, bounds.max, 0, 7]), n)
    return Column(integers.astype(dtype), valid)


_EVENT_FIELDS = ("users", "offsets", "event_ts", "arrival", "hidden_from", "columns")


def same_records(a: Any, b: Any) -> bool:
    """Whether two records (or arrays, columns, mappings of them) hold the same, whatever their dictionaries."""
    if isinstance(a, Column):
        return isinstance(b, Column) and len(a) == len(b) and bool(a.to_arrow().equals(b.to_arrow()))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if a is None or isinstance(a, EventSchema):
        return bool(a == b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same_records(a[k], b[k]) for k in a)
    names = _EVENT_FIELDS if isinstance(a, Events) else a.__slots__
    return type(a) is type(b) and all(same_records(getattr(a, n), getattr(b, n)) for n in names)


def _users(codes: npt.NDArray[np.int64], kind: UserKind) -> Users:
    if kind == "int64":
        return codes * 1_000_003 - 7
    return np.array([f"user-é-{c}" for c in codes], object)


def _offsets(rng: np.random.Generator, n: int, most: int) -> npt.NDArray[np.int64]:
    return offsets_of(rng.integers(0, most + 1, n))
