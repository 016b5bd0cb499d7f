"""MemoryRecent: the tier in this process's memory, for tests, replays and small stores. It dies with the process."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from thinrow.core.errors import StoreError
from thinrow.history.recent.blocks import BlockTier
from thinrow.history.recent.evolution import check_evolution
from thinrow.history.recent.transactions import Pairs, Writing
from thinrow.schema import EventSchema

T = TypeVar("T")
Block = tuple[bytes, bytes]


class MemoryRecent(BlockTier):
    """A RecentTier in memory; one lock serves readers and writers."""

    _takes_ids_for_new = True

    def __init__(self, schema: EventSchema, floor: int = 0) -> None:
        """``floor``: no user's first event gets a number up to it (inclusive)."""
        super().__init__(schema, "memory")
        self._floor = floor
        # Reentrant, because `resolve` may read the tier during an append.
        self._lock = threading.RLock()
        self._tables: _Tables | None = _Tables()
        self._schemas = {schema.schema_id: schema}

    @contextmanager
    def _read(self) -> Iterator[_Tables]:
        with self._lock:
            yield self._held()

    def _write(self, work: Callable[[Writing], T]) -> T:
        with self._lock:
            staged = _Staged(self._held())
            result = work(staged)
            staged.apply()
            return result

    def _rewrite(self, work: Callable[[Writing], None]) -> None:
        with self._lock:
            self._write(work)
            self._floor = max(self._floor, self._held().floor)

    def _held(self) -> _Tables:
        if self._tables is None:
            raise StoreError("this recent tier is closed; make a new one")
        return self._tables

    def _schema_of(self, schema_id: int) -> EventSchema | None:
        return self._schemas.get(schema_id)

    def _newest_schema(self) -> EventSchema:
        return self._schemas[max(self._schemas)]

    def _learn(self, schema: EventSchema) -> None:
        with self._lock:
            for stored in self._schemas.values():
                check_evolution(schema, stored)
            self._schemas[schema.schema_id] = schema
            self._schema = self._newest_schema()

    def close(self) -> None:
        """Forget all events."""
        with self._lock:
            self._tables = None


class _Tables:
    """The named databases of the format as dicts; blocks by user, in order."""

    def __init__(self) -> None:
        self.of_pairs: dict[str, dict[bytes, bytes]] = {"users": {}, "ids": {}, "positions": {}}
        self.of_blocks: dict[bytes, list[Block]] = {}
        self.floor = 0

    def pairs(self, name: Pairs, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        table = self.of_pairs[name]
        return {key: table[key] for key in keys if key in table}

    def blocks(self, user_key: bytes, after: int, into_keys: list[bytes], into_values: list[bytes]) -> int:
        held = self.of_blocks.get(user_key, [])
        found = held[max(_blocks_up_to(held, user_key, after + 1) - 1, 0) :]
        into_keys += [key for key, _ in found]
        into_values += [value for _, value in found]
        return len(found)

    def held(self, user_key: bytes, into: list[bytes]) -> None:
        for key, value in self.of_blocks.get(user_key, ()):
            into += (key, value)

    def fetch(
        self,
        users: Sequence[bytes],
        ids: Sequence[bytes] = (),
        *,
        blocks: bool = False,
        through: Sequence[int] = (),
        new: bool = False,
    ) -> None:
        pass

    def holders(self) -> list[bytes]:
        return sorted(key for key, held in self.of_blocks.items() if held)

    def scan(self, name: Pairs, prefix: bytes = b"") -> Iterator[Block]:
        return iter(sorted(item for item in self.of_pairs[name].items() if item[0].startswith(prefix)))


class _Staged:
    """Changes that ``apply`` makes; reads see the tables as they were."""

    def __init__(self, tables: _Tables) -> None:
        self._tables = tables
        self._changes: list[Callable[[], None]] = []
        self.pairs = tables.pairs
        self.blocks = tables.blocks
        self.held = tables.held
        self.fetch = tables.fetch
        self.holders = tables.holders
        self.scan = tables.scan

    def put_pairs(self, name: Pairs, items: Iterable[Block]) -> None:
        listed = list(items)
        self._changes.append(lambda: self._tables.of_pairs[name].update(listed))

    def add_pairs(self, name: Pairs, items: Sequence[Block]) -> bool:
        self.put_pairs(name, items)
        return not any(key in self._tables.of_pairs[name] for key, _ in items)

    def put_blocks(self, items: Iterable[Block]) -> None:
        listed = list(items)

        def change() -> None:
            for key, value in listed:
                held = self._tables.of_blocks.setdefault(key[:-8], [])
                held.insert(bisect_right(held, key, key=_key_of), (key, value))

        self._changes.append(change)

    def pop_blocks(self, user_key: bytes, through: int) -> Block | None:
        held = self._tables.of_blocks.get(user_key, [])
        n = _blocks_up_to(held, user_key, through)
        if not n:
            return None
        gone = {key for key, _ in held[:n]}

        def change() -> None:
            self._tables.of_blocks[user_key] = [b for b in self._tables.of_blocks[user_key] if b[0] not in gone]

        self._changes.append(change)
        return held[n - 1]

    def drop_pairs(self, name: Pairs, keys: Sequence[bytes]) -> None:
        listed = list(keys)

        def change() -> None:
            for key in listed:
                self._tables.of_pairs[name].pop(key, None)

        self._changes.append(change)

    def raise_floor(self, at_least: int) -> None:
        self._changes.append(lambda: setattr(self._tables, "floor", at_least))

    def apply(self) -> None:
        for change in self._changes:
            change()


def _key_of(block: Block) -> bytes:
    return block[0]


def _blocks_up_to(held: list[Block], user_key: bytes, arrival: int) -> int:
    """How many blocks begin at ``arrival`` or before."""
    return bisect_right(held, user_key + arrival.to_bytes(8, "big"), key=_key_of)
