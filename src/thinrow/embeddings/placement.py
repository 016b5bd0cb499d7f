"""Which tables are whole on every rank and which are spread over them: a plan from sizes, look-ups and measured rates.

A whole table is read without asking anybody, but takes memory on every rank, its gradients go to all, and each rank
updates what any of them touched. Worked example, on 4 ranks: of 1,000 stores a rank looks 900 up. Whole, it sends 2,700
ids with gradients; spread, 675 ids, 675 vectors and 675 ids with gradients, and it updates a quarter of the rows. So
few bytes are moved in less time than four ranks' worth of small calls take: it is whole. A table of 100 M items is
spread: its bytes are what counts, and it would not fit.

    plan = plan_tables(tables, ranks=ranks.size, memory_bytes=8 << 30, rates=Rates.measure(ranks))
    print(plan)
    items = ShardedEmbedding(DynamicTable(64), ranks, whole=plan["items"].whole)
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from thinrow.core.errors import InputError
from thinrow.embeddings.index import INDEX_BYTES
from thinrow.embeddings.optim import SparseAdagrad
from thinrow.embeddings.ranks import Ranks
from thinrow.embeddings.shards import WIRES, Lookup, Shard
from thinrow.embeddings.table import DynamicTable

_WIRE_BYTES = dict(zip(WIRES, (4, 8, 2), strict=True))
#: Bytes of state of a row of ``dim`` floats: so many for each, and so many once.
_STATE = {"sgd": (0, 0), "adagrad": (4, 0), "rowwise_adagrad": (0, 4), "adam": (8, 8), "adamw": (8, 8)}
_MEASURED_BYTES, _MEASURED_ROWS, _TRIES, _LEAST_S = 8 << 20, 200_000, 5, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLoad:
    """A float32 table and its use in one step.

    Attributes:
        name: of the table.
        rows: keys that it will have.
        dim: width of a vector.
        lookups: keys that one rank looks up.
        distinct: distinct ones of these; None for the most there can be on average, that of keys drawn evenly.
        optimizer: by name, as in the configuration of a training run.
    """

    name: str
    rows: int
    dim: int
    lookups: int
    distinct: int | None = None
    optimizer: str = "adagrad"

    def __post_init__(self) -> None:
        for name in ("rows", "dim", "lookups"):
            if getattr(self, name) < 1:
                raise InputError(f"table {self.name!r}: {name}={getattr(self, name)}; it must be 1 or more")
        if self.distinct is not None and not 1 <= self.distinct <= min(self.rows, self.lookups):
            raise InputError(
                f"table {self.name!r}: distinct={self.distinct}; it must be in [1, {min(self.rows, self.lookups)}], "
                "no more than rows and look-ups"
            )
        if self.optimizer not in _STATE:
            raise InputError(
                f"table {self.name!r}: optimizer={self.optimizer!r}; it must be one of {', '.join(_STATE)}"
            )

    @property
    def state_bytes(self) -> int:
        """Of a row."""
        each, once = _STATE[self.optimizer]
        return each * self.dim + once

    @property
    def row_bytes(self) -> int:
        """Of memory, with the index."""
        return 4 * self.dim + self.state_bytes + INDEX_BYTES

    def touched(self, ranks: int) -> float:
        """Distinct keys of a step of ``ranks`` ranks."""
        if self.distinct is None or self.lookups == 1:
            return -float(self.rows) * math.expm1(-self.lookups * ranks / self.rows)
        # Heaps' law: of n keys of a long tail about n^b are distinct.
        power = math.log(self.distinct) / math.log(self.lookups)
        return min(float(self.rows), self.distinct * math.pow(ranks, power))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank does in a second while the others do the same.

    Attributes:
        exchange_bytes: that it sends.
        exchanges: of next to nothing, one after another.
        keys: that it finds in a table.
        moved_bytes: of rows that it reads or writes.
        spread_tables: of next to no keys, that it looks up and trains where they are spread, beside the exchanges.
        whole_tables: the same where they are whole.
    """

    exchange_bytes: float
    exchanges: float
    keys: float
    moved_bytes: float
    spread_tables: float
    whole_tables: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 < value < math.inf:
                raise InputError(f"rates: {name}={value}; it must be finite and above 0")

    @classmethod
    def measure(cls, ranks: Ranks, dim: int = 64) -> Rates:
        """Those of ``ranks``, the slowest of them, so that all plan alike. It takes about a second and 100 MB, a table
        that no cache holds; all must call it."""
        others = max(ranks.size - 1, 1)
        part = np.zeros(_MEASURED_BYTES // others, np.uint8)
        exchange_s = _least_s(lambda: ranks.exchange("rates", [part[:8]] * ranks.size))
        sending_s = max(_least_s(lambda: ranks.exchange("rates", [part] * ranks.size)) - exchange_s, _LEAST_S)
        keys_s, moving_s, moved = _table_s(dim)
        spread_s = max(_few_keys_s(ranks, dim, whole=False) - 3 * exchange_s, _LEAST_S)
        whole_s = max(_few_keys_s(ranks, dim, whole=True) - exchange_s, _LEAST_S)
        own = len(part) * others / sending_s, 1 / exchange_s, 1 / keys_s, moved / moving_s, 8 / spread_s, 8 / whole_s
        return cls(
            **dict(zip(cls.__slots__, np.min(ranks.gather("rates", np.array(own)), axis=0).tolist(), strict=True))
        )


def _table_s(dim: int) -> tuple[float, float, int]:
    """Seconds to find a key; seconds to read and update rows, and bytes that these move."""
    table, random = DynamicTable(dim), np.random.default_rng(0)
    keys = random.permutation(_MEASURED_ROWS)
    table.rows(keys, insert=True)
    optimizer, wanted = SparseAdagrad(table), random.permutation(keys)[: _MEASURED_ROWS // 4]
    rows, gradient = table.rows(wanted, insert=False), np.ones((len(wanted), dim), table.dtype)

    def update() -> None:
        table.read(rows)
        table.add_gradient(rows, gradient)
        optimizer.step()

    keys_s = _least_s(lambda: table.rows(wanted, insert=False)) / len(wanted)
    before = table.traffic.total
    update()
    moved = table.traffic.total - before
    return keys_s, _least_s(update), moved


def _few_keys_s(ranks: Ranks, dim: int, *, whole: bool) -> float:
    """Seconds to look a few keys of 8 tables up and to train them."""
    shards = [Shard(DynamicTable(dim), ranks, whole=whole) for _ in range(8)]
    lookup, optimizer = Lookup(shards), SparseAdagrad(*shards)
    keys, gradient = np.arange(8), np.ones((8, dim), np.float32)

    def step() -> None:
        for shard, found in zip(shards, lookup([keys] * len(shards), insert=True), strict=True):
            shard.add_gradient(found.keys, found.places, gradient)
        optimizer.step()

    return _least_s(step)


@dataclass(frozen=True, slots=True)
class Placement:
    """Attributes:
    name: of the table.
    whole: on every rank; else spread over them, row by row.
    rows: of the table.
    dim: of the table.
    bytes_a_rank: memory.
    exchange_ms, lookup_ms, update_ms: of a step: what is sent; keys found and vectors read; gradients summed and rows
        updated.
    """

    name: str
    whole: bool
    rows: int
    dim: int
    bytes_a_rank: int
    exchange_ms: float
    lookup_ms: float
    update_ms: float

    @property
    def ms(self) -> float:
        """Of a step."""
        return self.exchange_ms + self.lookup_ms + self.update_ms


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    ranks: how many.
    memory_bytes: that tables may take on a rank.
    wire: what vectors travel as.
    tables: in the order given.
    waiting_ms: of a step, for exchanges to come about, whatever they carry.
    """

    ranks: int
    memory_bytes: int
    wire: str
    tables: tuple[Placement, ...]
    waiting_ms: float

    def __getitem__(self, name: str) -> Placement:
        """The table ``name``. Raises InputError where there is none."""
        for table in self.tables:
            if table.name == name:
                return table
        raise InputError(f"no table {name!r} in the plan, only {', '.join(t.name for t in self.tables)}")

    @property
    def bytes_a_rank(self) -> int:
        """Memory of all tables."""
        return sum(table.bytes_a_rank for table in self.tables)

    @property
    def ms(self) -> float:
        """Of the sparse half of a step."""
        return self.waiting_ms + sum(table.ms for table in self.tables)

    def __str__(self) -> str:
        widest = max(5, *(len(t.name) for t in self.tables))
        lines = [
            f"{self.ranks} ranks, {self.wire} on the wire, {self.bytes_a_rank / 1e6:,.0f} of "
            f"{self.memory_bytes / 1e6:,.0f} MB a rank, {self.ms:.2f} ms a step",
            f"{'table':{widest}} {'rows':>15} {'dim':>5}  {'placed':8} {'MB':>10} {'exchange':>9} {'look-up':>9} "
            f"{'update':>9} ms",
        ]
        lines += [
            f"{t.name:{widest}} {t.rows:>15,} {t.dim:>5}  {'whole' if t.whole else 'row-wise':8} "
            f"{t.bytes_a_rank / 1e6:>10,.1f} {t.exchange_ms:>9.3f} {t.lookup_ms:>9.3f} {t.update_ms:>9.3f}"
            for t in self.tables
        ]
        lines.append(f"{'waiting':{widest}} {'':>15} {'':>5}  {'':8} {'':>10} {self.waiting_ms:>9.3f}")
        return "\n".join(lines)


def plan_tables(
    tables: Sequence[TableLoad], *, ranks: int, memory_bytes: int, rates: Rates, wire: str = "float32"
) -> Plan:
    """The placement of ``tables`` on ``ranks`` ranks: those are whole that are faster so, as long as a rank has the
    memory, the most gained for a byte first; and all, where that is faster and there is memory for it, since then no
    look-up waits for an exchange.

    Raises:
        InputError: there is no table, two have one name, ``wire`` is unknown, or the tables do not fit in
            ``memory_bytes`` of each rank when all are spread (names the number of ranks that would do).
    """
    if ranks < 1 or not tables or len({t.name for t in tables}) < len(tables):
        raise InputError(
            f"ranks={ranks}, tables {[t.name for t in tables]}; there must be one of each at least, and no name twice"
        )
    if wire not in WIRES:
        raise InputError(f"wire={wire!r}; it must be one of {', '.join(WIRES)}")
    spread = [_place(t, False, ranks, rates, wire) for t in tables]
    whole = [_place(t, True, ranks, rates, wire) for t in tables]
    least = sum(t.bytes_a_rank for t in spread)
    if least > memory_bytes:
        needed = math.ceil(sum(t.rows * t.row_bytes for t in tables) / memory_bytes) if memory_bytes > 0 else "more"
        raise InputError(
            f"memory_bytes={memory_bytes:,}: spread over {ranks} ranks, the tables take {least:,} bytes of each; give "
            f"them more, take about {needed} ranks, a budget, or an optimizer with less state"
        )
    chosen, left = list(spread), memory_bytes - least
    # What is no larger whole than spread, on one rank, costs nothing.
    order = sorted(range(len(tables)), key=lambda i: (whole[i].ms - spread[i].ms) / max(_more(whole, spread, i), 1))
    for i in order:
        if whole[i].ms < spread[i].ms and _more(whole, spread, i) <= left:
            chosen[i] = whole[i]
            left -= _more(whole, spread, i)

    def plan(places: list[Placement]) -> Plan:
        exchanges = 1 if all(p.whole for p in places) else 3
        return Plan(ranks, memory_bytes, wire, tuple(places), 1e3 * exchanges / rates.exchanges if ranks > 1 else 0.0)

    plans = [plan(chosen)]
    if sum(t.bytes_a_rank for t in whole) <= memory_bytes:
        plans.append(plan(whole))
    return min(plans, key=lambda p: p.ms)


def _more(whole: Sequence[Placement], spread: Sequence[Placement], i: int) -> int:
    return whole[i].bytes_a_rank - spread[i].bytes_a_rank


def _place(table: TableLoad, whole: bool, ranks: int, rates: Rates, wire: str) -> Placement:
    """One table's share of a step of one rank."""
    distinct, updated = table.touched(1), table.touched(ranks)
    vector, message = 4 * table.dim, 8 + _WIRE_BYTES[wire] * table.dim
    if whole:
        sent = distinct * (ranks - 1) * message
        found = table.lookups + distinct + distinct * ranks
        received = distinct * ranks
    else:
        # Ids and vectors, then gradients with their ids, of all but this rank's own.
        sent = distinct * (ranks - 1) / ranks * 2 * message
        found = table.lookups + 2 * distinct
        updated, received = updated / ranks, distinct
    # What travels is packed, and put together where it arrives: read and written twice.
    packed = 2 * vector * (distinct + received)
    read = (distinct + table.lookups) * 2 * vector + (0 if whole else packed)
    call_s = 1 / (rates.whole_tables if whole else rates.spread_tables)
    written = (table.lookups + distinct + received) * vector + packed + updated * (3 * vector + 2 * table.state_bytes)
    return Placement(
        table.name,
        whole,
        table.rows,
        table.dim,
        table.row_bytes * (table.rows if whole else -(-table.rows // ranks)),
        1e3 * sent / rates.exchange_bytes,
        1e3 * (call_s + found / rates.keys + read / rates.moved_bytes),
        1e3 * written / rates.moved_bytes,
    )


def _least_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        since = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - since)
    return min(seconds)
