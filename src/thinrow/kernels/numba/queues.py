"""Connections of an engine and the queues of their requests, in compiled code: what is sent, what waits for its turn,
and what memory each holds; for ``engine``.

Worked example: a connection whose peer reads slowly has bytes unsent; none of its requests has a turn until they are
sent, and then all go to the end of the queues of their classes.

Memory of bodies and of answers that wait is the system's allocator's; the account of it (``S_MEMORY``) is charged with
a whole request when its header is there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.lookups import (
    C_FD,
    C_HEAD,
    C_HELD,
    C_INSIDE,
    C_NODE,
    C_OUT,
    C_OUT_AT,
    C_OUT_BYTES,
    C_OUT_END,
    C_OUT_HELD,
    C_OUT_SINCE,
    C_PENDING,
    C_QUEUED,
    C_TAIL,
    C_WANTS,
    CLASSES,
    E_AT,
    E_BYTES_OUT,
    E_CANCELLED,
    E_EPOLL,
    E_STAGING,
    E_STATUS,
    E_WAITING,
    E_WAKE,
    N_CLASS,
    N_ID,
    N_LENGTH,
    N_NEXT,
    S_INSIDE,
    S_MEMORY,
)
from thinrow.kernels.numba.crc import advance_at
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.sockets import ADD as ADD_FD
from thinrow.kernels.numba.sockets import (
    CHANGE,
    DELETE,
    DONTWAIT,
    EAGAIN,
    EINTR,
    EVENT_BYTES,
    EVENT_DATA,
    IN,
    NOSIGNAL,
    OUT,
    add_shared,
    clock_ns,
    epoll_ctl,
    free,
    last_error,
    malloc,
    memcpy,
    number_at,
    put_half_word,
    put_word,
    send,
)

Ints = npt.NDArray[np.int64]

#: Of the frames' header.
MAGIC = 0x776F7274
HEADER_BYTES = 32
FRAME_REQUEST, FRAME_REPLY, FRAME_CANCEL, FRAME_PING, FRAME_PONG = range(2, 7)
OK, OVERLOADED, EXPIRED, DRAINING, INVALID = 0, 1, 2, 4, 7
#: Bytes that one call reads; a longer body is read straight to its place.
STAGING_BYTES = 1 << 16
#: Events of one look at the sockets.
EVENTS = 64
#: Behind the staging: room for events, then 32 bytes for a clock or an event that is set, then those of a header.
_CLOCK = STAGING_BYTES + EVENT_BYTES * EVENTS
HEADER_ROOM = _CLOCK + 32


@njit
def crc_of(at: int, size: int) -> Any:
    return np.int64(~np.uint32(advance_at(np.uint32(0xFFFFFFFF), at, size)))


@njit
def clock(engine: Ints) -> Any:
    return clock_ns(engine[E_STAGING] + _CLOCK)


@njit
def write_header(at: int, kind: int, status: int, number: int, length: int, crc: int) -> None:
    put_word(at, MAGIC | (1 << 32) | (kind << 40) | (status << 48))
    put_word(at + 8, number)
    put_half_word(at + 16, length)
    put_half_word(at + 20, crc)
    put_half_word(at + 24, 0)
    put_half_word(at + 28, crc_of(at, 28))


@njit
def watch(engine: Ints, conns: Ints, slot: int, wants: int, how: int) -> None:
    """Wait for other events of a connection."""
    at = engine[E_STAGING] + _CLOCK
    put_half_word(at, wants)
    put_word(at + EVENT_DATA, slot)
    conns[slot, C_WANTS] = wants
    epoll_ctl(np.int32(engine[E_EPOLL]), np.int32(how), np.int32(conns[slot, C_FD]), at)


@njit
def push(engine: Ints, conns: Ints, rings: Ints, slot: int, rank: int) -> None:
    """Behind those that wait, where it has something that waits and nothing that is unsent."""
    if conns[slot, C_QUEUED + rank] == 0 and conns[slot, C_HEAD + rank] != 0 and conns[slot, C_OUT_END] == 0:
        n = rings.shape[1]
        rings[rank, (engine[E_AT + rank] + engine[E_WAITING + rank]) % n] = slot
        engine[E_WAITING + rank] += 1
        conns[slot, C_QUEUED + rank] = 1


@njit
def next_turn(engine: Ints, conns: Ints, rings: Ints) -> Any:
    """The next connection and the class of its turn; -1 where nobody waits."""
    for rank in range(CLASSES):
        while engine[E_WAITING + rank] > 0:
            slot = rings[rank, engine[E_AT + rank]]
            engine[E_AT + rank] = (engine[E_AT + rank] + 1) % rings.shape[1]
            engine[E_WAITING + rank] -= 1
            conns[slot, C_QUEUED + rank] = 0
            if conns[slot, C_HEAD + rank] != 0 and conns[slot, C_OUT_END] == 0:
                return slot, rank
    return -1, 0


@njit
def leave_rings(engine: Ints, conns: Ints, rings: Ints, slot: int) -> None:
    n = rings.shape[1]
    for rank in range(CLASSES):
        if conns[slot, C_QUEUED + rank]:
            kept = 0
            for i in range(engine[E_WAITING + rank]):
                one = rings[rank, (engine[E_AT + rank] + i) % n]
                if one != slot:
                    rings[rank, (engine[E_AT + rank] + kept) % n] = one
                    kept += 1
            engine[E_WAITING + rank] = kept
            conns[slot, C_QUEUED + rank] = 0


@njit
def put_bytes(engine: Ints, conns: Ints, slot: int, at: int, size: int) -> bool:
    """Send ``size`` bytes at an address, and keep what is not taken. Returns whether the connection lives."""
    sent = 0
    engine[E_BYTES_OUT] += size
    while conns[slot, C_OUT_END] == 0 and sent < size:
        n = send(np.int32(conns[slot, C_FD]), at + sent, size - sent, np.int32(DONTWAIT | NOSIGNAL))
        if n >= 0:
            sent += n
        elif last_error() == EAGAIN:
            break
        elif last_error() != EINTR:
            return False
    left = size - sent
    if left == 0:
        return True
    end, begin = conns[slot, C_OUT_END], conns[slot, C_OUT_AT]
    if end + left > conns[slot, C_OUT_BYTES]:
        room = 2 * (end - begin) + left
        memory = malloc(np.uint64(room))
        if end > begin:
            memcpy(memory, conns[slot, C_OUT] + begin, np.uint64(end - begin))
        free(conns[slot, C_OUT])
        conns[slot, C_OUT], conns[slot, C_OUT_BYTES] = memory, room
        conns[slot, C_OUT_AT], end = 0, end - begin
    memcpy(conns[slot, C_OUT] + end, at + sent, np.uint64(left))
    conns[slot, C_OUT_END] = end + left
    if conns[slot, C_OUT_SINCE] == 0:
        conns[slot, C_OUT_SINCE] = clock(engine)
    if conns[slot, C_WANTS] != OUT:
        watch(engine, conns, slot, OUT, CHANGE)
    return True


@njit
def flush(engine: Ints, conns: Ints, rings: Ints, shared: Ints, slot: int) -> bool:
    """Send on what waits. Returns whether the connection lives."""
    while conns[slot, C_OUT_AT] < conns[slot, C_OUT_END]:
        at, left = conns[slot, C_OUT] + conns[slot, C_OUT_AT], conns[slot, C_OUT_END] - conns[slot, C_OUT_AT]
        n = send(np.int32(conns[slot, C_FD]), at, left, np.int32(DONTWAIT | NOSIGNAL))
        if n >= 0:
            conns[slot, C_OUT_AT] += n
        elif last_error() == EAGAIN:
            return True
        elif last_error() != EINTR:
            return False
    free(conns[slot, C_OUT])
    conns[slot, C_OUT : C_OUT_SINCE + 1] = 0
    add_shared(shared, S_MEMORY, conns[slot, C_OUT_HELD])
    conns[slot, C_HELD] -= conns[slot, C_OUT_HELD]
    conns[slot, C_OUT_HELD] = 0
    watch(engine, conns, slot, IN, CHANGE)
    for rank in range(CLASSES):
        push(engine, conns, rings, slot, rank)
    return True


@njit
def refuse(engine: Ints, conns: Ints, texts: Ints, slot: int, number: int, status: int) -> bool:
    """Answer with a status and its text. ``texts[status]`` has address and bytes of a frame that needs but its id."""
    at, size = texts[status, 0], texts[status, 1]
    room = engine[E_STAGING] + HEADER_ROOM
    write_header(room, FRAME_REPLY, status, number, size, crc_of(at, size))
    engine[E_STATUS + status] += 1
    return put_bytes(engine, conns, slot, room, HEADER_BYTES) and put_bytes(engine, conns, slot, at, size)


@njit
def let_go(conns: Ints, shared: Ints, slot: int, node: int) -> None:
    """Of a request's memory."""
    size = number_at(node + N_LENGTH)
    add_shared(shared, S_MEMORY, size)
    conns[slot, C_HELD] -= size
    free(node)


@njit
def take_head(conns: Ints, shared: Ints, slot: int, rank: int) -> Any:
    node = conns[slot, C_HEAD + rank]
    conns[slot, C_HEAD + rank] = number_at(node + N_NEXT)
    conns[slot, C_PENDING + rank] -= 1
    if conns[slot, C_HEAD + rank] == 0:
        conns[slot, C_TAIL + rank] = 0
        coming = conns[slot, C_NODE]
        # One whose body is being read keeps the place.
        if coming == 0 or number_at(coming + N_CLASS) != rank:
            conns[slot, C_INSIDE] &= ~(1 << rank)
            add_shared(shared, S_INSIDE, 1)
    return node


@njit
def cancel(engine: Ints, conns: Ints, shared: Ints, slot: int, number: int) -> None:
    for rank in range(CLASSES):
        before, node = 0, conns[slot, C_HEAD + rank]
        while node != 0:
            later = number_at(node + N_NEXT)
            if number_at(node + N_ID) != number:
                before, node = node, later
                continue
            if before == 0:
                take_head(conns, shared, slot, rank)
            else:
                put_word(before + N_NEXT, later)
                conns[slot, C_PENDING + rank] -= 1
                if later == 0:
                    conns[slot, C_TAIL + rank] = before
            let_go(conns, shared, slot, node)
            engine[E_CANCELLED] += 1
            node = later


@njit
def forget(engine: Ints, conns: Ints, rings: Ints, shared: Ints, slot: int) -> None:
    """All that a connection holds, when it has ended."""
    leave_rings(engine, conns, rings, slot)
    for rank in range(CLASSES):
        while conns[slot, C_HEAD + rank]:
            let_go(conns, shared, slot, take_head(conns, shared, slot, rank))
    if conns[slot, C_NODE]:
        node = conns[slot, C_NODE]
        let_go(conns, shared, slot, node)
    for rank in range(CLASSES):
        if conns[slot, C_INSIDE] & (1 << rank):
            # Of a body that never was whole.
            add_shared(shared, S_INSIDE, 1)
    add_shared(shared, S_MEMORY, conns[slot, C_OUT_HELD])
    free(conns[slot, C_OUT])
    epoll_ctl(np.int32(engine[E_EPOLL]), np.int32(DELETE), np.int32(conns[slot, C_FD]), engine[E_STAGING])
    conns[slot, :] = 0
    conns[slot, C_FD] = -1


@njit
def watch_wakes(engine: Ints, mark: int) -> None:
    at = engine[E_STAGING] + _CLOCK
    put_half_word(at, IN)
    put_word(at + EVENT_DATA, mark)
    epoll_ctl(np.int32(engine[E_EPOLL]), np.int32(ADD_FD), np.int32(engine[E_WAKE]), at)
