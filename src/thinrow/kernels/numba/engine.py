"""The loop of an engine, which serves its connections without the interpreter: reads frames, checks and admits them,
answers look-ups in turn and sends what they come to.

Worked example: four connections have a request each. One ``epoll_wait`` says so, all four are read and wait in the
queue of their class; then one is answered and the sockets are looked at again, so that what may not wait is refused
while its header is fresh. ``serving.lookups.engine`` calls the loop, and does whatever it returns for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.kernels.lookups import (
    ADD,
    BROKEN,
    C_ANSWERED,
    C_BEGAN,
    C_FD,
    C_GOT,
    C_HEAD,
    C_HEADER,
    C_HELD,
    C_INSIDE,
    C_LENGTH,
    C_NODE,
    C_OUT_END,
    C_OUT_HELD,
    C_OUT_SINCE,
    C_PENDING,
    C_QUEUED,
    C_REFUSED,
    C_TAIL,
    C_WANTS,
    CLASSES,
    DROP,
    E_AT,
    E_BYTES_IN,
    E_CREDITS,
    E_ENGINES,
    E_EPOLL,
    E_FRAME_NS,
    E_HOT,
    E_KEYS,
    E_MIGRATES,
    E_NEXT_SCAN,
    E_NODE,
    E_NUMBER,
    E_REQUEST_BYTES,
    E_SCAN_NS,
    E_SCRATCH,
    E_SCRATCH_BYTES,
    E_SEND_NS,
    E_SLOT,
    E_STAGING,
    E_STATUS,
    E_SUM_NS,
    E_TARGET,
    E_TIMES,
    E_WAITING,
    E_WHY,
    ENDED,
    GIVE,
    LEFT,
    MOVED,
    N_CLASS,
    N_ID,
    N_LENGTH,
    N_NEXT,
    N_SINCE,
    N_UNTIL,
    NODE_BYTES,
    REPLY,
    S_DRAINING,
    S_IDLE,
    S_INSIDE,
    S_KEPT,
    S_MEMORY,
    S_STEP,
    S_TURNS,
    S_WHOLE,
    TAKE,
    TIMES,
    W_BODY,
    W_CRC,
    W_HEADER,
    W_KIND,
    W_MAGIC,
    W_SHORT,
    W_SLOW,
    W_SYSTEM,
    W_UNREAD,
    W_VERSION,
    WOKEN,
)
from thinrow.kernels.numba.answers import plan, write
from thinrow.kernels.numba.intrinsics import address, word_at
from thinrow.kernels.numba.jit import njit
from thinrow.kernels.numba.queues import (
    DRAINING,
    EVENTS,
    EXPIRED,
    FRAME_CANCEL,
    FRAME_PING,
    FRAME_PONG,
    FRAME_REPLY,
    FRAME_REQUEST,
    HEADER_BYTES,
    HEADER_ROOM,
    INVALID,
    MAGIC,
    OK,
    OVERLOADED,
    STAGING_BYTES,
    cancel,
    clock,
    crc_of,
    flush,
    forget,
    leave_rings,
    let_go,
    next_turn,
    push,
    put_bytes,
    refuse,
    take_head,
    watch,
    watch_wakes,
    write_header,
)
from thinrow.kernels.numba.sockets import ADD as ADD_FD
from thinrow.kernels.numba.sockets import (
    DELETE,
    DONTWAIT,
    EAGAIN,
    EINTR,
    EVENT_BYTES,
    EVENT_DATA,
    IN,
    add_shared,
    epoll_ctl,
    epoll_wait,
    free,
    last_error,
    malloc,
    memcpy,
    number_at,
    put_word,
    recv,
    take_shared,
)

Ints = npt.NDArray[np.int64]

#: Memory for an answer that is kept for the next.
_KEPT_BYTES = 1 << 22
_US, _MS = 1_000, 1_000_000
#: Requests that an engine answers while others of its own wait and another engine has nothing to do, before one of its
#: connections moves there.
_HOT = 4
#: Returned in place of an event: go on.
_ON = 0


@njit
def _take_place(shared: Ints, rank: int) -> bool:
    """A place among those that wait; what is less urgent leaves some for what is more."""
    return shared[S_INSIDE] > rank * shared[S_KEPT] and take_shared(shared, S_INSIDE, 1)


@njit
def _admit(engine: Ints, conns: Ints, shared: Ints, slot: int) -> int:
    """Decide on a header that is whole. Returns why the connection is of no more use, or -1."""
    at = address(conns) + 8 * (slot * conns.shape[1] + C_HEADER)
    first, tail = word_at(at), word_at(at + 24)
    if (first & np.uint64(0xFFFFFFFF)) != np.uint64(MAGIC):
        return W_MAGIC
    if crc_of(at, 28) != np.int64(tail >> np.uint64(32)):
        return W_HEADER
    if (first >> np.uint64(32)) & np.uint64(0xFF) != np.uint64(1):
        return W_VERSION
    kind, rank = (number_at(at) >> 40) & 0xFF, (number_at(at) >> 48) & 0xFFFF
    if (tail & np.uint64(0xFFFFFFFF)) != np.uint64(0) or (
        kind != FRAME_REQUEST and kind != FRAME_CANCEL and kind != FRAME_PING
    ):
        return W_KIND
    length = number_at(at + 16) & 0xFFFFFFFF
    if kind != FRAME_REQUEST:
        return W_BODY if length else -1
    # Of a class that is not known: the last.
    rank = min(rank, np.int64(CLASSES - 1))
    conns[slot, C_LENGTH], conns[slot, C_REFUSED], conns[slot, C_NODE] = length, OK, 0
    if length > engine[E_REQUEST_BYTES]:
        conns[slot, C_REFUSED] = INVALID
    elif shared[S_DRAINING] != 0:
        conns[slot, C_REFUSED] = DRAINING
    # The one whose turn it is does not wait.
    elif conns[slot, C_PENDING + rank] > engine[E_CREDITS] or not take_shared(shared, S_MEMORY, length):
        conns[slot, C_REFUSED] = OVERLOADED
    elif conns[slot, C_INSIDE] & (1 << rank) == 0 and not _take_place(shared, rank):
        add_shared(shared, S_MEMORY, length)
        conns[slot, C_REFUSED] = OVERLOADED
    else:
        conns[slot, C_INSIDE] |= 1 << rank
        conns[slot, C_HELD] += length
        node = malloc(np.uint64(NODE_BYTES + length))
        put_word(node + N_LENGTH, length)
        put_word(node + N_ID, number_at(at + 8))
        put_word(node + N_CLASS, rank)
        conns[slot, C_NODE] = node
    return -1


@njit
def _finish(engine: Ints, conns: Ints, rings: Ints, shared: Ints, texts: Ints, slot: int) -> int:
    """A frame is whole. Returns why the connection is of no more use, or -1."""
    at = address(conns) + 8 * (slot * conns.shape[1] + C_HEADER)
    kind, number = (number_at(at) >> 40) & 0xFF, number_at(at + 8)
    conns[slot, C_GOT] = conns[slot, C_BEGAN] = 0
    if kind == FRAME_CANCEL:
        cancel(engine, conns, shared, slot, number)
        return -1
    if kind == FRAME_PING:
        room = engine[E_STAGING] + HEADER_ROOM
        write_header(room, FRAME_PONG, DRAINING if shared[S_DRAINING] else OK, number, 0, 0)
        return -1 if put_bytes(engine, conns, slot, room, HEADER_BYTES) else W_SYSTEM
    if conns[slot, C_REFUSED] != OK:
        return -1 if refuse(engine, conns, texts, slot, number, conns[slot, C_REFUSED]) else W_SYSTEM
    node, length = conns[slot, C_NODE], conns[slot, C_LENGTH]
    if crc_of(node + NODE_BYTES, length) != (number_at(at + 16) >> 32) & 0xFFFFFFFF:
        return W_CRC
    engine[E_BYTES_IN] += HEADER_BYTES + length
    conns[slot, C_NODE] = 0
    now = clock(engine)
    left_us = (number_at(node + NODE_BYTES) >> 32) & 0xFFFFFFFF if length >= 8 else 0
    put_word(node + N_SINCE, now)
    put_word(node + N_UNTIL, now + left_us * _US if left_us else 0)
    put_word(node + N_NEXT, 0)
    rank = number_at(node + N_CLASS)
    if conns[slot, C_TAIL + rank]:
        put_word(conns[slot, C_TAIL + rank] + N_NEXT, node)
    else:
        conns[slot, C_HEAD + rank] = node
    conns[slot, C_TAIL + rank] = node
    conns[slot, C_PENDING + rank] += 1
    push(engine, conns, rings, slot, rank)
    return -1


@njit
def _feed(engine: Ints, conns: Ints, rings: Ints, shared: Ints, texts: Ints, slot: int, at: int, n: int) -> int:
    """Take ``n`` bytes that came. Returns as ``_finish``."""
    header = address(conns) + 8 * (slot * conns.shape[1] + C_HEADER)
    stop = at + n
    while True:
        got = conns[slot, C_GOT]
        if got < HEADER_BYTES:
            if at == stop:
                return -1
            if got == 0:
                conns[slot, C_BEGAN] = clock(engine)
            some = min(HEADER_BYTES - got, stop - at)
            memcpy(header + got, at, np.uint64(some))
            conns[slot, C_GOT] += some
            at += some
            if conns[slot, C_GOT] < HEADER_BYTES:
                return -1
            conns[slot, C_LENGTH] = 0
            why = _admit(engine, conns, shared, slot)
            if why >= 0:
                return why
        got = conns[slot, C_GOT] - HEADER_BYTES
        some = min(conns[slot, C_LENGTH] - got, stop - at)
        if conns[slot, C_LENGTH] and conns[slot, C_REFUSED] == OK:
            memcpy(conns[slot, C_NODE] + NODE_BYTES + got, at, np.uint64(some))
        conns[slot, C_GOT] += some
        at += some
        if got + some < conns[slot, C_LENGTH]:
            return -1
        why = _finish(engine, conns, rings, shared, texts, slot)
        if why >= 0:
            return why


@njit
def _read(engine: Ints, conns: Ints, rings: Ints, shared: Ints, texts: Ints, slot: int) -> int:
    """Read what is there, once. Returns an event."""
    left = conns[slot, C_LENGTH] - (conns[slot, C_GOT] - HEADER_BYTES)
    straight = conns[slot, C_GOT] >= HEADER_BYTES and conns[slot, C_NODE] != 0 and left >= STAGING_BYTES // 2
    at, room = engine[E_STAGING], STAGING_BYTES
    if straight:
        at, room = conns[slot, C_NODE] + NODE_BYTES + conns[slot, C_GOT] - HEADER_BYTES, left
    n = recv(np.int32(conns[slot, C_FD]), at, room, np.int32(DONTWAIT))
    engine[E_SLOT] = slot
    if n < 0:
        return _ON if last_error() == EAGAIN or last_error() == EINTR else ENDED
    if n == 0:
        engine[E_WHY] = W_SHORT
        return BROKEN if conns[slot, C_GOT] else ENDED
    why = -1
    if straight:
        conns[slot, C_GOT] += n
        if n == left:
            why = _finish(engine, conns, rings, shared, texts, slot)
    else:
        why = _feed(engine, conns, rings, shared, texts, slot, at, n)
    engine[E_WHY] = why
    return _ON if why < 0 else ENDED if why == W_SYSTEM else BROKEN


@njit
def _scan(engine: Ints, conns: Ints, now: int) -> int:
    """Look for what took too long. Returns an event."""
    for slot in range(len(conns)):
        if conns[slot, C_FD] < 0:
            continue
        late = conns[slot, C_BEGAN] and now - conns[slot, C_BEGAN] > engine[E_FRAME_NS]
        # While answers of it are unsent, nothing is read of it.
        late = late and conns[slot, C_OUT_END] == 0
        if late or (conns[slot, C_OUT_SINCE] and now - conns[slot, C_OUT_SINCE] > engine[E_SEND_NS]):
            engine[E_SLOT], engine[E_WHY] = slot, W_SLOW if late else W_UNREAD
            return BROKEN
    return _ON


@njit
def _time_of(engine: Ints, spent: int, buckets: Ints) -> None:
    place = 0
    while place < TIMES - 1 and spent > buckets[place]:
        place += 1
    engine[E_TIMES + place] += 1
    engine[E_SUM_NS] += spent


@njit
def _room(engine: Ints, size: int) -> Any:
    """Memory for an answer, which is kept for the next where it is not large."""
    if size > engine[E_SCRATCH_BYTES]:
        free(engine[E_SCRATCH])
        engine[E_SCRATCH_BYTES] = size + (size >> 2)
        engine[E_SCRATCH] = malloc(np.uint64(engine[E_SCRATCH_BYTES]))
    return engine[E_SCRATCH]


@njit
def _turn(
    engine: Ints, conns: Ints, rings: Ints, shared: Ints, texts: Ints, tables: Ints, newest: int, parts: Ints,
    names: npt.NDArray[np.uint8], chosen: Ints, asks: Ints, span: Any, buckets: Ints, slot: int, rank: int,
) -> int:  # fmt: skip
    """Answer the next request of a class of a connection, whose turn has been taken. Returns an event."""
    node = conns[slot, C_HEAD + rank]
    engine[E_SLOT], engine[E_NODE] = slot, node
    until = number_at(node + N_UNTIL)
    number, length = number_at(node + N_ID), number_at(node + N_LENGTH)
    lives = True
    if until and clock(engine) >= until:
        lives = refuse(engine, conns, texts, slot, number, EXPIRED)
    else:
        n, work, size, keys = plan(node + NODE_BYTES, length, tables, newest, address(names), chosen, asks)
        if n < 0 or work > shared[S_WHOLE]:
            return LEFT
        if not take_shared(shared, S_MEMORY, work):
            lives = refuse(engine, conns, texts, slot, number, OVERLOADED)
        else:
            at = _room(engine, HEADER_BYTES + size)
            if not write(node + NODE_BYTES, n, asks, tables, parts, span[0], span[1], at + HEADER_BYTES):
                add_shared(shared, S_MEMORY, work)
                return LEFT
            write_header(at, FRAME_REPLY, OK, number, size, crc_of(at + HEADER_BYTES, size))
            engine[E_STATUS + OK] += 1
            engine[E_KEYS] += keys
            _time_of(engine, clock(engine) - number_at(node + N_SINCE), buckets)
            lives = put_bytes(engine, conns, slot, at, HEADER_BYTES + size)
            if conns[slot, C_OUT_END]:
                conns[slot, C_OUT_HELD] += work
                conns[slot, C_HELD] += work
            else:
                add_shared(shared, S_MEMORY, work)
            if engine[E_SCRATCH_BYTES] > _KEPT_BYTES:
                free(engine[E_SCRATCH])
                engine[E_SCRATCH] = engine[E_SCRATCH_BYTES] = 0
    _after_turn(engine, conns, rings, shared, slot, rank)
    return _ON if lives else ENDED


@njit
def _after_turn(engine: Ints, conns: Ints, rings: Ints, shared: Ints, slot: int, rank: int) -> None:
    conns[slot, C_ANSWERED] += 1
    let_go(conns, shared, slot, take_head(conns, shared, slot, rank))
    add_shared(shared, S_TURNS, 1)
    push(engine, conns, rings, slot, rank)


@njit
def _idle_engine(engine: Ints, shared: Ints) -> int:
    for other in range(engine[E_ENGINES]):
        if other != engine[E_NUMBER] and shared[S_IDLE + S_STEP * other]:
            return other
    return -1


@njit
def _others_wait(engine: Ints) -> int:
    total = 0
    for rank in range(CLASSES):
        total += engine[E_WAITING + rank]
    return total


@njit
def _hand_over(engine: Ints, conns: Ints, rings: Ints, shared: Ints) -> bool:
    """Whether the connection ``E_SLOT`` should be the engine's ``E_TARGET``: this one has had more to do than one
    connection's look-ups, while that had nothing."""
    target = _idle_engine(engine, shared) if engine[E_MIGRATES] and _others_wait(engine) else -1
    engine[E_HOT] = engine[E_HOT] + 1 if target >= 0 else max(0, engine[E_HOT] - 1)
    if engine[E_HOT] < _HOT or target < 0:
        return False
    engine[E_HOT] = 0
    for rank in range(CLASSES):
        if engine[E_WAITING + rank]:
            engine[E_SLOT], engine[E_TARGET] = rings[rank, engine[E_AT + rank]], target
            return True
    return False


@njit
def _do(
    command: int, slot: int, data: npt.NDArray[np.uint8], engine: Ints, conns: Ints, rings: Ints, shared: Ints
) -> bool:
    """Carry out a command. Returns whether its connection lives."""
    lives = True
    if command == ADD:
        conns[slot, :] = 0
        conns[slot, C_FD] = number_at(address(data))
        watch(engine, conns, slot, IN, ADD_FD)
        lives = put_bytes(engine, conns, slot, address(data) + 8, len(data) - 8)
    elif command == DROP:
        forget(engine, conns, rings, shared, slot)
    elif command == REPLY:
        lives = put_bytes(engine, conns, slot, address(data), len(data))
        _after_turn(engine, conns, rings, shared, slot, number_at(engine[E_NODE] + N_CLASS))
    elif command == TAKE:
        leave_rings(engine, conns, rings, slot)
        epoll_ctl(np.int32(engine[E_EPOLL]), np.int32(DELETE), np.int32(conns[slot, C_FD]), engine[E_STAGING])
        memcpy(address(data), address(conns) + 8 * slot * conns.shape[1], np.uint64(8 * conns.shape[1]))
        conns[slot, :] = 0
        conns[slot, C_FD] = -1
    elif command == GIVE:
        memcpy(address(conns) + 8 * slot * conns.shape[1], address(data), np.uint64(8 * conns.shape[1]))
        watch(engine, conns, slot, conns[slot, C_WANTS], ADD_FD)
        for rank in range(CLASSES):
            push(engine, conns, rings, slot, rank)
    return lives


@njit
def _expire(engine: Ints, conns: Ints, rings: Ints, shared: Ints, texts: Ints, now: int) -> bool:
    """Refuse requests whose time is up while no turn is free. Returns whether a connection has ended by it."""
    for rank in range(CLASSES):
        for _ in range(engine[E_WAITING + rank]):
            slot = rings[rank, engine[E_AT + rank]]
            engine[E_AT + rank] = (engine[E_AT + rank] + 1) % rings.shape[1]
            engine[E_WAITING + rank] -= 1
            conns[slot, C_QUEUED + rank] = 0
            node = conns[slot, C_HEAD + rank]
            until = number_at(node + N_UNTIL) if node else 0
            lives = True
            if until and now >= until and conns[slot, C_OUT_END] == 0:
                lives = refuse(engine, conns, texts, slot, number_at(node + N_ID), EXPIRED)
                let_go(conns, shared, slot, take_head(conns, shared, slot, rank))
            push(engine, conns, rings, slot, rank)
            if not lives:
                engine[E_SLOT] = slot
                return True
    return False


@njit
def serve_frames(
    command: int, slot: int, data: npt.NDArray[np.uint8], engine: Ints, conns: Ints, rings: Ints, shared: Ints,
    texts: Ints, tables: Ints, newest: int, parts: Ints, names: npt.NDArray[np.uint8], chosen: Ints, asks: Ints,
    span: npt.NDArray[np.uint64], buckets: Ints,
) -> int:  # fmt: skip
    """Do what is commanded, then serve until there is something for Python to do.

    Args:
        command: and what it is about; the others are as ``kernels.lookups`` says.

    Returns:
        an event; ``engine`` says of what.
    """
    engine[E_SLOT] = slot
    if engine[E_NEXT_SCAN] == 0:
        watch_wakes(engine, len(conns))
    if command == TAKE:
        _do(command, slot, data, engine, conns, rings, shared)
        return _ON
    if not _do(command, slot, data, engine, conns, rings, shared):
        return ENDED
    events = engine[E_STAGING] + STAGING_BYTES
    idle = S_IDLE + S_STEP * engine[E_NUMBER]
    n = 0
    while True:
        now = clock(engine)
        if now >= engine[E_NEXT_SCAN]:
            engine[E_NEXT_SCAN] = now + engine[E_SCAN_NS]
            if _scan(engine, conns, now):
                return BROKEN
        timeout = engine[E_SCAN_NS] // _MS
        if _others_wait(engine):
            if take_shared(shared, S_TURNS, 1):
                slot, rank = next_turn(engine, conns, rings)
                if slot < 0:
                    add_shared(shared, S_TURNS, 1)
                else:
                    event = _turn(
                        engine, conns, rings, shared, texts, tables, newest, parts, names, chosen, asks, span, buckets,
                        slot, rank,
                    )  # fmt: skip
                    if event:
                        return event
                    if _hand_over(engine, conns, rings, shared):
                        return MOVED
                timeout = 0 if _others_wait(engine) else timeout
            else:
                timeout = 1
                if _expire(engine, conns, rings, shared, texts, now):
                    return ENDED
        if timeout > 1:
            shared[idle] = 1
        n = epoll_wait(np.int32(engine[E_EPOLL]), events, np.int32(EVENTS), np.int32(timeout))
        shared[idle] = 0
        woken = False
        for i in range(n):
            at = number_at(events + EVENT_BYTES * i + EVENT_DATA)
            what = word_at(events + EVENT_BYTES * i) & np.uint64(0xFFFFFFFF)
            if at >= len(conns):
                woken = True
                continue
            if conns[at, C_OUT_END]:
                engine[E_SLOT] = at
                if not flush(engine, conns, rings, shared, at):
                    return ENDED
            elif what:
                event = _read(engine, conns, rings, shared, texts, at)
                if event:
                    return event
        if woken:
            return WOKEN
