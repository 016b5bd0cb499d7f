"""The journal of erasures: what is under way, so that it can be finished after a crash by anybody.

Worked example. ``begin`` writes ``erasures/<unique>.json`` with the users (and the arrivals, where it is about events)
before the first change; ``end`` removes it after the last. What it says is the ids that erasing was asked for, never
anything of the events but their arrival numbers.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from thinrow.core.errors import CorruptionError, InputError, ObjectNotFound
from thinrow.storage.objects import ObjectStore
from thinrow.storage.sealed import seal, unseal

FORMAT = 1
_FOLDER = "erasures/"
_KINDS = ("impressions", "outcomes", "splits", "tables")


@dataclass(frozen=True, slots=True)
class Pending:
    """An erasure that was begun.

    Attributes:
        users: whole users, and the number up to which each is erased.
        events: users, and the arrivals of theirs that are erased.
        also: whether something else is to be cleaned before it counts as done.
        paths: of that, by kind: "impressions", "outcomes", "splits", "tables"; empty where only the caller knows.
        name: of the journal's object.
    """

    users: Sequence[tuple[int | str, int]] = ()
    events: Sequence[tuple[int | str, Sequence[int]]] = ()
    paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    also: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for kind in self.paths:
            if kind not in _KINDS:
                raise InputError(f"paths of kind {kind!r}; the kinds are {', '.join(_KINDS)}")


class Journal:
    """The journal of one archive."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def begin(self, pending: Pending) -> Pending:
        """Write it down, durably; returns it with its name."""
        name = f"{_FOLDER}{uuid.uuid4().hex}.json"
        body = {
            "users": [list(u) for u in pending.users],
            "events": [[u, list(a)] for u, a in pending.events],
            "paths": {k: list(v) for k, v in pending.paths.items()},
            "also": pending.also,
        }
        self._objects.put(name, seal(body, FORMAT, "journal of an erasure"))
        return replace(pending, name=name)

    def end(self, pending: Pending) -> None:
        """Forget it: it is done."""
        self._objects.delete(pending.name)

    def pending(self) -> list[Pending]:
        """What was begun and not ended. Raises CorruptionError or NewerFormatError."""
        found = []
        for name in self._objects.list(_FOLDER):
            try:
                body = unseal(self._objects.get(name), FORMAT, "journal of an erasure", name)
            except ObjectNotFound:
                continue
            try:
                users = [(u, int(last)) for u, last in body["users"]]
                events = [(u, [int(a) for a in arrivals]) for u, arrivals in body["events"]]
                found.append(Pending(users, events, dict(body["paths"]), bool(body["also"]), name))
            except (KeyError, TypeError, ValueError) as e:
                raise CorruptionError(f"it is no journal of an erasure: {e}", file=name) from e
        return found
