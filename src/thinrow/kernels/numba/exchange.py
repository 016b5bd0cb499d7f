"""A client's side of its connections in compiled code: requests are framed and sent, answers awaited, read and checked,
without the interpreter.

Worked example: two shards are asked. Both requests are sent, then ``poll`` waits for either answer; the call returns
with the link whose frame is whole first, and is made again for the other. ``serving.lookups.links`` says what a link
does; its plain class reads the same frames with ``FrameReader``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from thinrow.kernels.lookups import (
    X_ADDRESS,
    X_BODY,
    X_EVENT,
    X_FD,
    X_FIELDS,
    X_GOT,
    X_HEADER,
    X_LENGTH,
    X_LIMIT,
    X_NEW,
    X_NUMBER,
    X_OUT,
    X_OUT_AT,
    X_OUT_END,
    X_RANK,
    X_ROOM,
    X_WHY,
    XE_BROKEN,
    XE_ENDED,
    XE_FAILED,
    XE_NONE,
    XE_ROOM,
    XE_WHOLE,
    XW_BODY,
    XW_HEADER,
    XW_KIND,
    XW_LENGTH,
    XW_MAGIC,
    XW_SHORT,
    XW_VERSION,
)
from thinrow.kernels.numba.intrinsics import address, pointer, word_at
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.queues import FRAME_PONG, FRAME_REQUEST, HEADER_BYTES, MAGIC, crc_of, write_header
from thinrow.kernels.numba.sockets import (
    DONTWAIT,
    EAGAIN,
    EINTR,
    IN,
    NOSIGNAL,
    OUT,
    clock_ns,
    last_error,
    poll,
    put_word,
    recv,
    send,
)

Ints = npt.NDArray[np.int64]

_LOW = np.uint64(0xFFFFFFFF)
_ENDED = IN | 8 | 16 | 32


@njit
def _event(link: Ints, event: int, why: int) -> int:
    link[X_EVENT], link[X_WHY] = event, why
    return event


@njit
def _send(link: Ints) -> int:
    if link[X_NEW]:
        size = link[X_OUT_END] - HEADER_BYTES
        crc = crc_of(link[X_OUT] + HEADER_BYTES, size)
        write_header(link[X_OUT], FRAME_REQUEST, link[X_RANK], link[X_NUMBER], size, crc)
        link[X_NEW] = 0
    while link[X_OUT_AT] < link[X_OUT_END]:
        left = link[X_OUT_END] - link[X_OUT_AT]
        n = send(np.int32(link[X_FD]), link[X_OUT] + link[X_OUT_AT], left, np.int32(DONTWAIT | NOSIGNAL))
        if n >= 0:
            link[X_OUT_AT] += n
        elif last_error() == EAGAIN:
            break
        elif last_error() != EINTR:
            return _event(link, XE_FAILED, last_error())
    return XE_NONE


@njit
def _check_header(link: Ints, at: int) -> int:
    """Why a header is none, or -1."""
    first, tail = word_at(at), word_at(at + 24)
    if (first & _LOW) != np.uint64(MAGIC):
        return XW_MAGIC
    if crc_of(at, 28) != np.int64(tail >> np.uint64(32)):
        return XW_HEADER
    if (first >> np.uint64(32)) & np.uint64(0xFF) != np.uint64(1):
        return XW_VERSION
    kind = np.int64((first >> np.uint64(40)) & np.uint64(0xFF))
    if (tail & _LOW) != np.uint64(0) or kind < 1 or kind > FRAME_PONG:
        return XW_KIND
    link[X_LENGTH] = np.int64(word_at(at + 16) & _LOW)
    return XW_LENGTH if link[X_LENGTH] > link[X_LIMIT] else -1


@njit
def _read(link: Ints) -> int:
    """Read on, up to the end of a frame."""
    header = link[X_ADDRESS] + 8 * X_HEADER
    while True:
        got = link[X_GOT]
        if got == HEADER_BYTES + link[X_LENGTH] and got >= HEADER_BYTES:
            if crc_of(link[X_BODY], link[X_LENGTH]) != np.int64(word_at(header + 16) >> np.uint64(32)):
                return _event(link, XE_BROKEN, XW_BODY)
            return _event(link, XE_WHOLE, 0)
        if got < HEADER_BYTES:
            at, room = header + got, HEADER_BYTES - got
        else:
            room = min(link[X_ROOM], link[X_LENGTH]) - (got - HEADER_BYTES)
            if room == 0:
                return _event(link, XE_ROOM, 0)
            at = link[X_BODY] + got - HEADER_BYTES
        n = recv(np.int32(link[X_FD]), at, room, np.int32(DONTWAIT))
        if n < 0:
            if last_error() == EAGAIN:
                return XE_NONE
            if last_error() == EINTR:
                continue
            return _event(link, XE_FAILED, last_error())
        if n == 0:
            return _event(link, XE_BROKEN, XW_SHORT) if got else _event(link, XE_ENDED, 0)
        link[X_GOT] += n
        if got < HEADER_BYTES and got + n == HEADER_BYTES:
            why = _check_header(link, header)
            if why >= 0:
                return _event(link, XE_BROKEN, why)


@njit
def exchange_frames(links: Ints, until_ns: int, room: Ints) -> int:
    """Send what is unsent, and wait until a link has a whole frame, needs Python or is of no more use.

    Args:
        links: (n,) addresses of the links' numbers.
        until_ns: of the monotonic clock.
        room: (n + 2,) memory for a look at the sockets and for the clock.

    Returns:
        which of ``links``, whose ``X_EVENT`` says what; -1 when the time is over.
    """
    n = len(links)
    polls, now_at = address(room) + 16, address(room)
    for i in range(n):
        link = carray(pointer(links[i]), (X_FIELDS,), np.int64)
        link[X_EVENT] = XE_NONE
        if link[X_OUT_AT] < link[X_OUT_END] and _send(link) != XE_NONE:
            return i
    while True:
        for i in range(n):
            link = carray(pointer(links[i]), (X_FIELDS,), np.int64)
            wants = IN | OUT if link[X_OUT_AT] < link[X_OUT_END] else IN
            put_word(polls + 8 * i, link[X_FD] | (wants << 32))
        left = until_ns - clock_ns(now_at)
        left_ms = max(0, min((left + 999_999) // 1_000_000, 1 << 30))
        ready = poll(polls, np.uint64(n), np.int32(left_ms))
        if ready == 0:
            return -1
        if ready < 0:
            if last_error() != EINTR:
                link = carray(pointer(links[0]), (X_FIELDS,), np.int64)
                _event(link, XE_FAILED, last_error())
                return 0
            continue
        for i in range(n):
            link = carray(pointer(links[i]), (X_FIELDS,), np.int64)
            what = np.int64(word_at(polls + 8 * i) >> np.uint64(48))
            if what & OUT and _send(link) != XE_NONE:
                return i
            if what & _ENDED and _read(link) != XE_NONE:
                return i
