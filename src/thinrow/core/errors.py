"""The one exception tree of thinrow. Catch ``ThinrowError`` to catch all of it.

::

    ThinrowError
    ├── InputError (ValueError)      what a caller passed: the message has the value, the bound and the remedy
    │   ├── SchemaError              a schema that contradicts itself, the data or the store
    │   ├── UserKindError            string ids for a store of integer ids, or the reverse
    │   ├── CheckpointMismatch       a checkpoint of another model, feature plan or run than the one that is asked for
    │   ├── DuplicateEventError      one event id twice in one input
    │   └── UnknownEventError        a correction of an event that the store does not hold
    ├── StoreError                   the state of a store
    │   ├── StoreNotFound            no store at the path
    │   ├── StoreExists              a store is there already
    │   ├── NewerFormatError         written by a newer thinrow
    │   ├── CommitConflict           another writer committed this generation first
    │   ├── PositionConflict         another process reads this partition of a source, and was first
    │   ├── NothingNew               a log that is followed had no new split for as long as its reader waits
    │   ├── Overloaded               it takes no more for now; nothing of the call is there
    │   ├── Unacknowledged           rows of a call may be there, but it has not been acknowledged
    │   ├── ObjectNotFound           a file that the manifest names is missing
    │   └── CheckpointNotFound       no checkpoint at the path
    ├── Gone                         events that are no longer there because they were to go; never said of damage
    │   ├── Erased                   erased for good; also a pinned generation that held what was erased
    │   └── Expired                  older, or more, than the store's retention keeps
    ├── CorruptionError              bytes that are not what was written (file, and user and column where known)
    │   └── VersionMismatch          a rebuilt history that is not the one its version describes
    ├── WorkerLost                   workers of a reader ended, one after another, over one base batch, or opening
    ├── RankLost                     a process of a run over several ranks ended or did not answer
    ├── Unavailable                  embedding servers did not answer before the deadline
    ├── ProtocolError                bytes of a peer that are no frame, or not of this protocol
    └── MissingExtraError (ImportError)   an optional dependency that is not installed; names the extra
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class ThinrowError(Exception):
    """Base of every error that thinrow raises on purpose."""


class InputError(ThinrowError, ValueError):
    """The caller passed something that cannot be used; nothing was changed."""


class SchemaError(InputError):
    """A schema contradicts itself, the data or the store."""


class UserKindError(InputError):
    """User ids of the wrong kind: a store holds integer ids or string ids, never both."""


class CheckpointMismatch(InputError):
    """A checkpoint is whole, but of another model, feature plan or run than the one that is asked for."""


class DuplicateEventError(InputError):
    """One event id appears twice in one input."""


class UnknownEventError(InputError):
    """A correction names an event that the store does not hold.

    Attributes:
        rows: of the input, all that do, where that is known.
    """

    def __init__(self, message: str, rows: tuple[int, ...] = ()) -> None:
        self.rows = rows
        super().__init__(message)


class StoreError(ThinrowError):
    """The store is not in the state that the call needs."""


class StoreNotFound(StoreError):
    """There is no store at the path."""


class StoreExists(StoreError):
    """A store is at the path already."""


class NewerFormatError(StoreError):
    """The data was written by a newer thinrow than this one."""


class CommitConflict(StoreError):
    """Another writer committed the same generation first."""


class PositionConflict(StoreError):
    """A partition of a source stands elsewhere than its reader left it; nothing was appended."""


class NothingNew(StoreError):
    """A log that is followed had no new split for as long as its reader waits; iterating again goes on."""


class Overloaded(StoreError):
    """A store is full and takes no more for now; nothing of the call is there."""


class Unacknowledged(StoreError):
    """A call was cut short where a store cannot undo it: some of its rows may be there.

    Rows with an event id are appended again without harm.

    Attributes:
        appended: (n,) bool, the rows that are there, though not as durable as was asked.
        unknown: (n,) bool, the rows of which that is not known. All others are not there.
    """

    def __init__(
        self, message: str, appended: npt.NDArray[np.bool_] | None = None, unknown: npt.NDArray[np.bool_] | None = None
    ) -> None:
        nothing = np.empty(0, np.bool_)
        self.appended = nothing if appended is None else appended
        self.unknown = nothing if unknown is None else unknown
        super().__init__(message)


class ObjectNotFound(StoreError):
    """A file that should be in the store is missing."""


class CheckpointNotFound(StoreError):
    """There is no checkpoint at the path."""


class Gone(ThinrowError):
    """Events that a request saw are no longer there, because somebody meant them to go.

    Attributes:
        user: whose events, where it is about one user.
        request: position of the request in its batch, where it is about one.
    """

    def __init__(self, message: str, *, user: object | None = None, request: int | None = None) -> None:
        self.user, self.request = user, request
        super().__init__(message)


class Erased(Gone):
    """Events were erased, or a pinned generation was revoked because it held such events."""


class Expired(Gone):
    """Events are older, or more, than the store's retention keeps."""


class CorruptionError(ThinrowError):
    """Stored bytes are not what was written.

    Attributes:
        file: object name of the damaged file.
        user: the user whose data is hit, where it is known.
        column: the column that is hit, where it is known.
    """

    def __init__(
        self,
        what: str,
        *,
        file: str,
        user: object | None = None,
        column: str | None = None,
        remedy: str = "run `thinrow verify` on the store to list all damage",
    ) -> None:
        self.what, self.file, self.user, self.column = what, file, user, column
        where = f"file {file}"
        if user is not None:
            where += f", user {user!r}"
        if column is not None:
            where += f", column {column!r}"
        self.remedy = remedy
        super().__init__(f"corrupt data ({where}): {what}; {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel from the process that met them."""
        return _corruption, (type(self), self.what, self.file, self.user, self.column, self.remedy)


def _corruption(
    kind: type[CorruptionError], what: str, file: str, user: object, column: str | None, remedy: str
) -> CorruptionError:
    return kind(what, file=file, user=user, column=column, remedy=remedy)


class VersionMismatch(CorruptionError):
    """A rebuilt history differs from the one that its version describes."""


class WorkerLost(ThinrowError):
    """Worker processes or actors of a reader ended, one after another, without a word; what came before was delivered.

    Attributes:
        item: the base batch that they had begun, counted from 0 over the run; None where they did not come so far.
    """

    def __init__(self, message: str, *, item: int | None = None) -> None:
        self.item = item
        super().__init__(message)


class RankLost(ThinrowError):
    """A process of a run over several ranks ended, or did not answer in time; the step was not finished on any rank.

    Attributes:
        rank: which; -1 where that cannot be told, since not all of them came to the start.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        self.rank = rank
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rank_lost, (str(self), self.rank)


def _rank_lost(message: str, rank: int) -> RankLost:
    return RankLost(message, rank=rank)


class Unavailable(ThinrowError):
    """Embedding servers did not answer before the deadline, and the policy is to fail.

    Attributes:
        shards: which shards have no answer.
    """

    def __init__(self, message: str, *, shards: tuple[int, ...] = ()) -> None:
        self.shards = shards
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unavailable, (str(self), self.shards)


def _unavailable(message: str, shards: tuple[int, ...]) -> Unavailable:
    return Unavailable(message, shards=shards)


class ProtocolError(ThinrowError):
    """A peer sent bytes that are no frame, or that say what cannot be; the connection is of no more use."""


class MissingExtraError(ThinrowError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        self.module, self.extra = module, extra
        super().__init__(f"{module} is not installed; run: pip install 'thinrow[{extra}]'")

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingExtraError, (self.module, self.extra)
