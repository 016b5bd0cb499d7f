"""What a tier holds, as its bytes: how one tier becomes a copy of another, whatever both are.

All tiers hold the same pairs and blocks under the same keys (docs/format/recent-v2.md), so a copy is no translation,
and seals and check numbers stay what they were.

Worked example: user 42 has counter 7, five events in two blocks and seven event ids. Its part is one pair of ``users``,
two blocks and seven pairs of ``ids``; written into an empty tier it reads, and counts on, as in the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from thinrow.history.recent.transactions import Reading, Writing

Items: TypeAlias = list[tuple[bytes, bytes]]
#: Of one part, unless one user alone has more.
PART_BYTES = 8 << 20
PART_PAIRS = 65_536


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys and values of whole users, and of positions; by key ascending within a user.

    Attributes:
        users: counter and trimmed_through of each.
        blocks, ids: of these users.
        positions: of event sources.
    """

    users: Items = field(default_factory=list)
    blocks: Items = field(default_factory=list)
    ids: Items = field(default_factory=list)
    positions: Items = field(default_factory=list)

    def is_full(self, n_bytes: int) -> bool:
        """Whether it is a part already, with ``n_bytes`` of blocks."""
        return n_bytes >= PART_BYTES or len(self.users) + len(self.ids) >= PART_PAIRS

    def pieces(self, n: int = PART_PAIRS) -> Iterator[Stored]:
        """The same with at most ``n`` ids, and ``n`` blocks, each; the users come with every piece."""
        for a in range(0, max(len(self.ids), len(self.blocks), 1), n):
            yield Stored(self.users, self.blocks[a : a + n], self.ids[a : a + n], self.positions if a == 0 else [])


def parts_of(txn: Reading) -> Iterator[Stored]:
    """All users of a view, and the positions first: no position is beyond the events that come with it."""
    yield Stored(positions=list(txn.scan("positions")))
    part, n_bytes = Stored(), 0
    for key, pair in txn.scan("users"):
        keys: list[bytes] = []
        values: list[bytes] = []
        txn.blocks(key, 0, keys, values)
        part.users.append((key, pair))
        part.blocks.extend(zip(keys, values, strict=True))
        part.ids.extend(txn.scan("ids", key))
        n_bytes += sum(map(len, values))
        if part.is_full(n_bytes):
            yield part
            part, n_bytes = Stored(), 0
    yield part


def put_part(txn: Writing, part: Stored) -> None:
    """Write a part into a tier that knows nothing of its users."""
    keys = [key for key, _ in part.users]
    if keys:
        txn.fetch(keys)
        txn.put_pairs("users", part.users)
        txn.put_blocks(part.blocks)
        txn.put_pairs("ids", part.ids)
    if part.positions:
        txn.pairs("positions", [key for key, _ in part.positions])
        txn.put_pairs("positions", part.positions)
