"""System calls from compiled loops, by name, so that what is compiled can be kept on disk; and numbers that threads
share.

Worked example: ``recv(fd, address, 4096, DONTWAIT)`` is what C's ``recv`` returns, and ``last_error()`` then says why
it is -1. Linux only.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from thinrow.kernels.numba.intrinsics import word_at
from thinrow.kernels.numba.jit import intrinsic, njit

_i32, _i64 = types.int32, types.intp


def _function(name: str, result: Any, *arguments: Any) -> Any:
    return types.ExternalFunction(name, result(*arguments))


recv = _function("recv", _i64, _i32, _i64, _i64, _i32)
send = _function("send", _i64, _i32, _i64, _i64, _i32)
epoll_wait = _function("epoll_wait", _i32, _i32, _i64, _i32, _i32)
epoll_ctl = _function("epoll_ctl", _i32, _i32, _i32, _i32, _i64)
poll = _function("poll", _i32, _i64, types.uint64, _i32)
malloc = _function("malloc", _i64, types.uint64)
free = _function("free", types.void, _i64)
memcpy = _function("memcpy", _i64, _i64, _i64, types.uint64)
_error_address = _function("__errno_location", _i64)
_clock = _function("clock_gettime", _i32, _i32, _i64)

DONTWAIT, NOSIGNAL = 0x40, 0x4000
EAGAIN, EINTR = 11, 4
IN, OUT, ERR, HUP = 1, 4, 8, 16
ADD, DELETE, CHANGE = 1, 2, 3
#: Bytes of an ``epoll_event``, which x86-64 packs, and where its 64 bits of data are.
EVENT_BYTES, EVENT_DATA = (12, 4) if platform.machine() in ("x86_64", "AMD64") else (16, 8)


@njit
def number_at(address: int) -> Any:
    """The 8 bytes at an address as an int64."""
    return np.int64(word_at(address))


@njit
def last_error() -> Any:
    """``errno`` of this thread."""
    return np.int64(word_at(_error_address()) & np.uint64(0xFFFFFFFF))


@njit
def clock_ns(room: int) -> Any:
    """Nanoseconds of the monotonic clock, as ``time.monotonic_ns``; ``room`` is an address of 16 bytes."""
    _clock(1, room)
    return number_at(room) * 1_000_000_000 + number_at(room + 8)


@intrinsic
def put_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Write 8 bytes at an address of any alignment."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), emit


@intrinsic
def put_half_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the low 4 bytes of a number at an address of any alignment."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = ir.IntType(32)
        builder.store(builder.trunc(args[1], half), builder.inttoptr(args[0], half.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), emit


@intrinsic
def _add_at(typingctx: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.IntType(64).as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), emit


@njit
def add_shared(numbers: Any, place: int, value: int) -> Any:
    """Add to a number that several threads write to; returns what it was."""
    return _add_at(np.int64(numbers.ctypes.data) + 8 * place, value)


@njit
def take_shared(numbers: Any, place: int, value: int) -> bool:
    """Take a part of such a number, where there is as much."""
    if add_shared(numbers, place, -value) >= value:
        return True
    add_shared(numbers, place, value)
    return False
