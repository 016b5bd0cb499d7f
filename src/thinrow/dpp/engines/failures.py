"""How an error travels from the process that met it: itself, with its causes and where it was raised."""

from __future__ import annotations

import pickle
import traceback

from thinrow.core.errors import InputError, WorkerLost

#: Workers that one item may end before its production counts as failed.
MAX_ENDED = 3
#: Seconds until a new worker has imported everything and opened what it reads.
START_S = 300.0
_MAX_TEXT = 16_384


class WorkerTraceback(Exception):
    """The last cause of an error that was raised in a worker: its traceback there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def encode_error(error: BaseException) -> bytes:
    """The error, its causes and its traceback, as at most about 64 KB."""
    text = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    chain: list[bytes] = []
    at: BaseException | None = error
    while at is not None and len(chain) < 8:
        chain.append(_pickled(at))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    while sum(map(len, chain)) > 3 * _MAX_TEXT and len(chain) > 1:
        chain.pop()
    return pickle.dumps((chain, text))


def decode_error(data: bytes) -> BaseException:
    """The error of ``encode_error``, ready to be raised: the same type and attributes, caused by what caused it."""
    chain, text = pickle.loads(data)
    errors: list[BaseException] = [pickle.loads(e) for e in chain]
    for error, cause in zip(errors, [*errors[1:], WorkerTraceback(text)], strict=True):
        error.__cause__ = cause
    return errors[0]


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        if len(data) <= _MAX_TEXT and type(pickle.loads(data)) is type(error):
            return data
    except Exception:
        pass  # said below, in words
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"[:_MAX_TEXT]))


def worker_lost(item: int, how: str) -> WorkerLost:
    """The error of an item that ended ``MAX_ENDED`` workers."""
    return WorkerLost(
        f"base batch {item} was begun by {MAX_ENDED} workers, and each ended before it was done ({how}); look for what "
        "ends them: too little memory, a crash in a library, or a lease_s too short for the store",
        item=item,
    )


def start_lost(how: str) -> WorkerLost:
    """The error of workers that never open."""
    return WorkerLost(
        f"{MAX_ENDED} workers one after another ended before they had opened what they read ({how}); their standard "
        "error says why, else look for too little memory or a lease_s too short for the store"
    )


def check_settings(**values: float) -> None:
    """Raises InputError where a number is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise InputError(f"{name}={value}; it must be above 0")
