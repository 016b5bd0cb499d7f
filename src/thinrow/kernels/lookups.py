"""Places of numbers that the compiled loops of embedding servers and clients share with who calls them.

Worked example: ``conns[7, C_FD]`` is the descriptor of the connection in slot 7 of an engine, and
``parts[2, P_SHIFT]`` says how the third file of the catalog finds the bucket of a mixed key.
"""

from __future__ import annotations

#: A table of one version: hash and place of its name, a number of its export, width, its parts ``[first, end)``, the
#: addresses of its default in float32 and float16, step and CRC of the version, whether it holds float16 alone, the
#: table of the same name in the version before (-1: none), how many versions of its export are newer.
(
    T_HASH,
    T_NAME,
    T_NAME_BYTES,
    T_EXPORT,
    T_DIM,
    T_FIRST,
    T_END,
    T_DEFAULT,
    T_DEFAULT16,
    T_STEP,
    T_CRC,
    T_HALF,
    T_BEFORE,
    T_DEPTH,
    T_FIELDS,
) = range(15)

#: One file of one version, the newest first: the first and the last mixed key of its range, how an index finds a
#: bucket, addresses of words, index and values, the type of the values, addresses of scales and of the keys that are
#: gone, how many of these (-1: it is no delta).
(
    P_LOW,
    P_LAST,
    P_SHIFT,
    P_WORDS,
    P_INDEX,
    P_BUCKETS,
    P_VALUES,
    P_KIND,
    P_SCALES,
    P_GONE,
    P_N_GONE,
    P_FIELDS,
) = range(12)

#: Types of numbers, as frames have them.
FLOAT32, FLOAT16, INT8 = range(3)
#: How requests are ranked; their credits, and queues, are apart.
CLASSES = 3

#: A connection.
(
    C_FD,
    C_WANTS,
    C_GOT,
    C_HEADER,
    _H1,
    _H2,
    _H3,
    C_INSIDE,
    C_NODE,
    C_LENGTH,
    C_REFUSED,
    C_BEGAN,
    C_HELD,
    C_OUT,
    C_OUT_BYTES,
    C_OUT_AT,
    C_OUT_END,
    C_OUT_SINCE,
    C_OUT_HELD,
    C_HEAD,
    _D1,
    _D2,
    C_TAIL,
    _T1,
    _T2,
    C_QUEUED,
    _Q1,
    _Q2,
    C_PENDING,
    _N1,
    _N2,
    C_ANSWERED,
    C_FIELDS,
) = range(33)

#: An engine: descriptors, memory, limits, queues, what an event is about, and from ``E_STATUS`` on what it counted.
(
    E_NUMBER,
    E_EPOLL,
    E_WAKE,
    E_STAGING,
    E_SCRATCH,
    E_SCRATCH_BYTES,
    E_CREDITS,
    E_REQUEST_BYTES,
    E_FRAME_NS,
    E_SEND_NS,
    E_SCAN_NS,
    E_NEXT_SCAN,
    E_AT,
    _A1,
    _A2,
    E_WAITING,
    _W1,
    _W2,
    E_HOT,
    E_ENGINES,
    E_MIGRATES,
    E_SLOT,
    E_NODE,
    E_TARGET,
    E_WHY,
    E_STATUS,
) = range(26)
STATUSES = 16
E_KEYS = E_STATUS + STATUSES
E_BYTES_IN, E_BYTES_OUT, E_CANCELLED, E_SUM_NS = range(E_KEYS + 1, E_KEYS + 5)
E_TIMES = E_SUM_NS + 1
TIMES = 15
E_FIELDS = E_TIMES + TIMES

#: What all engines of a server share, each in a cache line of its own; from ``S_IDLE`` on one an engine.
S_MEMORY, S_WHOLE, S_TURNS, S_INSIDE, S_DRAINING, S_KEPT, S_IDLE = range(0, 56, 8)
S_STEP = 8

#: A request that waits: the next of its connection, id, bytes, when it was whole, its class; its body follows.
N_NEXT, N_ID, N_LENGTH, N_SINCE, N_CLASS, N_UNTIL = range(0, 48, 8)
NODE_BYTES = 64

#: Commands to the loop of a server, each done before it goes on.
RUN, ADD, DROP, REPLY, TAKE, GIVE = range(6)
#: What it comes back with: somebody wrote to its descriptor, a request that it leaves to Python, a connection that has
#: ended or is of no more use, one that should be another engine's.
WOKEN, LEFT, ENDED, BROKEN, MOVED = range(1, 6)
#: Why a connection is of no more use, in words.
WHY = (
    "the system refused",
    "a frame does not begin with b'trow'; is this an embedding client?",
    "the header of a frame fails its CRC",
    "a frame of another version than 1",
    "a frame of a kind that clients do not send",
    "a CANCEL or PING frame with a body",
    "the body of a REQUEST frame fails its CRC",
    "the connection ended within a frame",
    "a frame had not ended in time",
    "an answer was not read in time",
)
(
    W_SYSTEM,
    W_MAGIC,
    W_HEADER,
    W_VERSION,
    W_KIND,
    W_BODY,
    W_CRC,
    W_SHORT,
    W_SLOW,
    W_UNREAD,
) = range(10)

#: A link of a client, and what its loop comes back with: a frame, memory that is full, an end, an error of the system,
#: what is no frame.
(
    X_ADDRESS,
    X_FD,
    X_OUT,
    X_OUT_AT,
    X_OUT_END,
    X_NEW,
    X_NUMBER,
    X_RANK,
    X_GOT,
    X_LENGTH,
    X_LIMIT,
    X_BODY,
    X_ROOM,
    X_EVENT,
    X_WHY,
    X_HEADER,
    _X1,
    _X2,
    _X3,
    X_FIELDS,
) = range(20)
XE_NONE, XE_WHOLE, XE_ROOM, XE_ENDED, XE_FAILED, XE_BROKEN = range(6)
#: Why it is none, in words.
XWHY = (
    "a frame does not begin with b'trow'; is this an embedding server?",
    "the header of a frame fails its CRC",
    "a frame of another version than 1; update the older side",
    "a frame of a kind that there is not",
    "a frame that is longer than an answer may be",
    "the body of a frame fails its CRC",
    "the connection ended within a frame",
)
XW_MAGIC, XW_HEADER, XW_VERSION, XW_KIND, XW_LENGTH, XW_BODY, XW_SHORT = range(7)
