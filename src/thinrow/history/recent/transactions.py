"""What a tier brings to ``BlockTier``: views of a small transactional key-value store that are read or written.

Worked example: an append of user 7 asks ``pairs("users", [key])`` for the user's counter, writes ``put_blocks([(key +
arrival, block)])``, ``add_pairs("ids", ...)`` for ids that it takes for new, and the counter that it leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

Pairs: TypeAlias = Literal["users", "ids", "positions"]


class Reading(Protocol):
    """A view that is consistent for each user, and over users where the tier is ``atomic_over_users``."""

    def fetch(
        self,
        users: Sequence[bytes],
        ids: Sequence[bytes] = (),
        *,
        blocks: bool = False,
        through: Sequence[int] = (),
        new: bool = False,
    ) -> None:
        """Told what is about to be asked for, in one go: counters of ``users``, ``ids``, all ``blocks`` of the users,
        or what ``pop_blocks`` up to ``through[u]`` gives. Where asking takes no time it need do nothing.

        ``new``: rows with these ids are about to be added, so that a tier may guess what is there until it writes.
        """
        ...

    def pairs(self, name: Pairs, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Values of those ``keys`` that are there."""
        ...

    def blocks(self, user_key: bytes, after: int, into_keys: list[bytes], into_values: list[bytes]) -> int:
        """Add the user's blocks that may hold arrivals above ``after``, in order: at most one that holds none.

        Returns how many were added.
        """
        ...

    def held(self, user_key: bytes, into: list[bytes]) -> None:
        """Add key, value, key, value, ... of all of the user's blocks, in order."""
        ...

    def holders(self) -> list[bytes]:
        """Keys of the users that have a block, ascending."""
        ...

    def scan(self, name: Pairs, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All pairs whose key begins with ``prefix``, by key ascending."""
        ...


class Writing(Reading, Protocol):
    """A view that is written to; all of a user's writes hold, or none; and of all users where ``atomic_over_users``."""

    def put_pairs(self, name: Pairs, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Write pairs, replacing older ones."""
        ...

    def add_pairs(self, name: Pairs, items: Sequence[tuple[bytes, bytes]]) -> bool:
        """Write pairs whose keys are new; False where one is there already: then nothing of this view may be kept."""
        ...

    def put_blocks(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Add blocks."""
        ...

    def pop_blocks(self, user_key: bytes, through: int) -> tuple[bytes, bytes] | None:
        """Remove the user's blocks that begin at ``through`` or before; the last of them."""
        ...

    def drop_pairs(self, name: Pairs, keys: Sequence[bytes]) -> None:
        """Remove pairs."""
        ...

    def raise_floor(self, at_least: int) -> None:
        """Let no unknown user's first event get a number up to ``at_least`` (inclusive)."""
        ...
