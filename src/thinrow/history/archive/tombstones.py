"""Tombstones: which arrivals of a user were erased or have expired, by bucket (format section 11).

Worked example. User 7 had arrivals 1 to 9; events 3 and 4 were erased, 1 and 2 expired later, and at last the whole
user was erased, up to number 10, which was taken for that and given to no event::

    erased   [3, 4]  n 2
    expired  [1, 2]  n 2    erased [3, 4]  n 2
    whole    [1, 10] n 9                            the watermark of user 7 is 10; the next event is number 11

A tombstone has no event data: neither times nor values nor a digest (that of one event gives its time away). Users
stand under a keyed hash, so that no file has the id of an erased user in readable form.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import CorruptionError
from thinrow.core.ragged import ranges_index
from thinrow.core.users import Users
from thinrow.storage.container import Container, ContainerWriter, crc_of
from thinrow.storage.objects import ObjectStore

Ints = npt.NDArray[np.int64]

#: Kinds of tombstones. ``WHOLE`` ends at a number that no event has, so that requests before and after it differ.
ERASED, EXPIRED, WHOLE = 1, 2, 3

TOMBSTONE_DTYPE = np.dtype(
    [("key", "S16"), ("hash", "<u4"), ("kind", "<u4"), ("first", "<i8"), ("last", "<i8"), ("n", "<i8")]
)


@dataclass(frozen=True, slots=True)
class TombstoneFile:
    """A file of tombstones as the manifest names it: ``n`` records. ``crc`` is the CRC32C of them, so that another
    sound file is not taken for this one; None in manifests written before it was."""

    name: str
    bytes: int
    n: int
    crc: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {k: v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True, slots=True)
class TombstoneIndex:
    """What the manifest says of tombstones: ``files`` by bucket; ``salt`` keys the hashes of users; ``max_arrival`` is
    the highest number of any tombstone (inclusive); ``since`` is the generation that the last of them came with: lower
    ones still hold what they stand for."""

    salt: str = ""
    max_arrival: int = 0
    since: int = 0
    files: Mapping[int, TombstoneFile] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``from_dict`` reverses it."""
        files = {str(b): f.to_dict() for b, f in self.files.items()}
        return {"salt": self.salt, "max_arrival": self.max_arrival, "since": self.since, "files": files}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> TombstoneIndex:
        """Of a manifest's entry; None where it has none."""
        if data is None:
            return cls()
        files = {int(b): TombstoneFile(**f) for b, f in data["files"].items()}
        salt = str(data["salt"])
        bytes.fromhex(salt)
        for file in files.values():
            if not isinstance(file.name, str) or {type(file.bytes), type(file.n), type(file.crc or 0)} != {int}:
                raise TypeError(f"{file} is no file of tombstones")
        return cls(salt, int(data["max_arrival"]), int(data["since"]), files)

    def with_files(self, salt: str, files: Mapping[int, TombstoneFile], max_arrival: int, since: int) -> TombstoneIndex:
        """The same with the files of some buckets replaced, in generation ``since``."""
        return TombstoneIndex(salt, max(self.max_arrival, max_arrival), since, {**self.files, **files})


@dataclass(frozen=True, slots=True)
class Tombstones:
    """Tombstones of U users: those of user u are ``records[offsets[u]:offsets[u + 1]]`` (TOMBSTONE_DTYPE), disjoint, by
    ``first``. ``first`` and ``last`` are inclusive; ``n`` events of that interval were removed."""

    offsets: Ints
    records: npt.NDArray[np.void]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def owner(self) -> Ints:
        """(n,) user of each record."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def watermark(self) -> Ints:
        """(U,) the highest number that is covered; 0 where none is."""
        top = np.zeros(len(self.offsets) - 1, np.int64)
        np.maximum.at(top, self.owner, self.records["last"])
        return top

    def whole(self) -> Ints:
        """(U,) the number up to which the whole user was erased; 0 where never."""
        top = np.zeros(len(self.offsets) - 1, np.int64)
        hit = self.records["kind"] == WHOLE
        np.maximum.at(top, self.owner[hit], self.records["last"][hit])
        return top

    def record_of(self, owner: Ints, arrival: Ints) -> Ints:
        """(n,) the record that covers ``arrival[i]`` of user ``owner[i]``; -1 where none does."""
        found = np.full(len(owner), -1, np.int64)
        if not len(self.records) or not len(owner):
            return found
        m = len(self.records)
        who = np.concatenate([self.owner, owner])
        at = np.concatenate([self.records["first"], arrival])
        asked = np.concatenate([np.zeros(m, np.int8), np.ones(len(owner), np.int8)])
        order = np.lexsort((asked, at, who))
        last = np.maximum.accumulate(np.where(order < m, order, -1))
        # Records are in order, so the last one begun is the greatest.
        record = np.empty(len(order), np.int64)
        record[order] = last
        record = record[m:]
        hit = np.flatnonzero(record >= 0)
        near = record[hit]
        good = (self.owner[near] == owner[hit]) & (arrival[hit] <= self.records["last"][near])
        found[hit[good]] = near[good]
        return found

    def removed(self, owner: Ints, bound: Ints, kinds: Sequence[int] = (ERASED, EXPIRED, WHOLE)) -> Ints:
        """(X,) how many removed events of user ``owner[x]`` can have had a number up to ``bound[x]`` (inclusive)."""
        index = np.repeat(self.offsets[owner], self.offsets[owner + 1] - self.offsets[owner])
        example = np.repeat(np.arange(len(owner)), self.offsets[owner + 1] - self.offsets[owner])
        within = np.arange(len(index)) - np.searchsorted(example, example)
        records = self.records[index + within]
        most = np.clip(bound[example] - records["first"] + 1, 0, records["n"])
        total = np.zeros(len(owner), np.int64)
        np.add.at(total, example, np.where(np.isin(records["kind"], kinds), most, 0))
        return total


def no_tombstones(n_users: int) -> Tombstones:
    """None of any of ``n_users``."""
    return Tombstones(np.zeros(n_users + 1, np.int64), np.empty(0, TOMBSTONE_DTYPE))


def new_salt() -> str:
    """A key for the hashes of a store's users."""
    return secrets.token_hex(16)


def keys_of(users: Users, salt: str) -> npt.NDArray[np.bytes_]:
    """(U,) S16: the keyed BLAKE2b (RFC 7693) of each user, 128 bits."""
    key = bytes.fromhex(salt)
    encoded = [u.encode() if isinstance(u, str) else int(u).to_bytes(8, "little", signed=True) for u in users.tolist()]
    out = np.empty(len(users), "S16")
    out[:] = [hashlib.blake2b(e, digest_size=16, key=key).digest() for e in encoded]
    return out


def intervals(owner: Ints, arrival: Ints) -> tuple[Ints, Ints, Ints]:
    """Owner, first and last of the runs of successive numbers among distinct (owner, arrival) in any order."""
    order = np.lexsort((arrival, owner))
    owner, arrival = owner[order], arrival[order]
    new = np.ones(len(owner), np.bool_)
    new[1:] = (owner[1:] != owner[:-1]) | (arrival[1:] != arrival[:-1] + 1)
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(owner)) - 1
    return owner[starts], arrival[starts], arrival[ends if len(starts) else starts]


def unite(held: npt.NDArray[np.void], new: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Both, in order of (key, first): ``WHOLE`` takes in what it covers, neighbours of one kind become one.

    ``new`` covers nothing that ``held`` covers, except under ``WHOLE``.
    """
    records = np.concatenate([held, new])
    if not len(records):
        return records
    records = records[np.lexsort((records["first"], records["key"]))]
    whole = records[records["kind"] == WHOLE]
    if len(whole):
        keys, at = np.unique(whole["key"], return_inverse=True)
        top, count = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        np.maximum.at(top, at, whole["last"])
        place = np.minimum(np.searchsorted(keys, records["key"]), len(keys) - 1)
        covered = (keys[place] == records["key"]) & (records["last"] <= top[place])
        np.add.at(count, place[covered], records["n"][covered])
        one = whole[np.searchsorted(whole["key"], keys)].copy()
        one["last"], one["n"] = top, count
        records = np.concatenate([records[~covered], one])
        records = records[np.lexsort((records["first"], records["key"]))]
    joins = np.zeros(len(records), np.bool_)
    joins[1:] = (
        (records["key"][1:] == records["key"][:-1])
        & (records["kind"][1:] == records["kind"][:-1])
        & (records["kind"][1:] != WHOLE)
        & (records["first"][1:] == records["last"][:-1] + 1)
    )
    starts = np.flatnonzero(~joins)
    out = records[starts].copy()
    out["last"] = records["last"][np.append(starts[1:], len(records)) - 1]
    out["n"] = np.add.reduceat(records["n"], starts)
    return out


def write_tombstones(objects: ObjectStore, bucket: int, records: npt.NDArray[np.void]) -> TombstoneFile:
    """Write the tombstones of a bucket (in order of (key, first)) as a new file."""
    name = f"tombstones/{bucket:05d}/{secrets.token_hex(8)}.tmb"
    with objects.create(name) as writer:
        out = ContainerWriter(writer)
        out.begin_section("tombstones")
        data = records.tobytes()
        out.append(data)
        out.end_section(crc=True)
        out.finish({"kind": "tombstones", "bucket": bucket, "n": len(records)})
    return TombstoneFile(name, objects.size(name), len(records), crc_of(data))


def read_tombstones(objects: ObjectStore, bucket: int, file: TombstoneFile) -> npt.NDArray[np.void]:
    """The records of a file. Raises CorruptionError, NewerFormatError or ObjectNotFound."""
    container = Container.open(objects, file.name)
    data = container.read_section("tombstones")
    meta = container.meta
    if (meta.get("kind"), meta.get("bucket"), meta.get("n")) != ("tombstones", bucket, file.n):
        raise CorruptionError(f"it is not the tombstones of bucket {bucket}, {file.n} of them", file=file.name)
    if container.size != file.bytes or len(data) != file.n * TOMBSTONE_DTYPE.itemsize:
        raise CorruptionError(f"{container.size} bytes, the manifest says {file.bytes}", file=file.name)
    if file.crc is not None and crc_of(data) != file.crc:
        raise CorruptionError("its records are not those of the manifest's file", file=file.name)
    return np.frombuffer(data, TOMBSTONE_DTYPE)


def find(records: npt.NDArray[np.void], keys: npt.NDArray[np.bytes_], wanted: npt.NDArray[np.bytes_]) -> Tombstones:
    """Those of the users with keys ``wanted`` among the ``records`` of their bucket, which have ``keys``."""
    index, offsets = ranges_index(
        np.searchsorted(keys, wanted).astype(np.int64), np.searchsorted(keys, wanted, side="right").astype(np.int64)
    )
    return Tombstones(offsets, records[index])
