"""What a tier on Redis holds, user by user, read while others append.

The list of a user is read by one command: record and blocks are of one moment. Its ids are read after it, a part at a
time, and those of events that came later are left out: an id whose event is not in the copy would make the event, when
its source delivers it again, a duplicate of nothing.

Worked example: user 42 has counter 7 when its list is read. Event 8 and its id are written, then the ids are read:
eight of them, of which the one with arrival 8 is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from thinrow.history.recent.keys import PAIR_DTYPE, unpack_pairs
from thinrow.history.recent.redis_link import RedisLink, pack
from thinrow.history.recent.redis_transaction import RedisKeys, RedisTransaction
from thinrow.history.recent.stored import Stored

_PAIR = PAIR_DTYPE.itemsize
_USERS_AT_ONCE = 1_024
#: Of one answer, unless one user alone has more; each is of 256 events at most.
_BLOCKS_AT_ONCE = 1_024
_IDS_AT_ONCE = b"4096"


def parts_on_server(link: RedisLink, keys: RedisKeys, txn: RedisTransaction, name: str) -> Iterator[Stored]:
    """As ``stored.parts_of``: each user as of a moment of its own, after this was called.

    Raises:
        CorruptionError: a counter or an id fails its check number.
        StoreError: the server does not answer.
    """
    yield Stored(positions=list(txn.scan("positions")))
    known = txn.known()
    for a in range(0, len(known), _USERS_AT_ONCE):
        some = known[a : a + _USERS_AT_ONCE]
        lists = dict(zip(some, keys.users(some), strict=True))
        sizes = link.read([pack(b"LLEN", lists[user]) for user in some])
        for group in _groups(some, sizes):
            yield _part(link, group, lists, name)


def _groups(users: list[bytes], sizes: list[int]) -> Iterator[list[bytes]]:
    """Users whose lists are read at once."""
    group: list[bytes] = []
    held = 0
    for user, size in zip(users, sizes, strict=True):
        if group and held + size > _BLOCKS_AT_ONCE:
            yield group
            group, held = [], 0
        group.append(user)
        held += size
    if group:
        yield group


def _part(link: RedisLink, users: list[bytes], lists: dict[bytes, bytes], name: str) -> Stored:
    read = link.read([pack(b"LRANGE", lists[u], b"0", b"-1") for u in users])
    there = [(user, held) for user, held in zip(users, read, strict=True) if held]
    part = Stored(users=[(user, held[0][:_PAIR]) for user, held in there])
    for user, held in there:
        part.blocks.extend((user + element[:8], element[8:]) for element in held[1:])
    counters, _ = unpack_pairs([pair for _, pair in part.users], name, "the user counters")
    found = _ids(link, {user: lists[user] + b":i" for user, _ in there})
    for (user, _), counter in zip(there, counters.tolist(), strict=True):
        names = sorted(found[user])
        pairs = [found[user][n] for n in names]
        arrivals, _ = unpack_pairs(pairs, name, "the event ids")
        kept = (arrivals <= counter).tolist()
        part.ids.extend((user + n, pair) for n, pair, keep in zip(names, pairs, kept, strict=True) if keep)
    return part


def _ids(link: RedisLink, hashes: dict[bytes, bytes]) -> dict[bytes, dict[bytes, bytes]]:
    """Ids of each user, a step of every hash that is not done at a time: the server stops for none of them."""
    found: dict[bytes, dict[bytes, bytes]] = {user: {} for user in hashes}
    cursors = dict.fromkeys(hashes, b"0")
    while cursors:
        asked = list(cursors)
        steps = link.read([pack(b"HSCAN", hashes[u], cursors[u], b"COUNT", _IDS_AT_ONCE) for u in asked])
        for user, (cursor, flat) in zip(asked, steps, strict=True):
            found[user].update(zip(flat[::2], flat[1::2], strict=True))
            if cursor == b"0":
                del cursors[user]
            else:
                cursors[user] = cursor
    return found
