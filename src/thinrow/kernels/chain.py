"""Chain: elementwise steps on one column of numbers, as data that every backend walks in one pass.

Hash, remainder and bucket of a column whose hash two outputs share::

    chain = Chain()
    hashed = chain.add(0, Step(Op.HASH, (start_of_hash,)))      slot 1, of slot 0: the column itself
    bucket = chain.add(hashed, remainder(1000))                 slot 2
    chain.add(0, Step(Op.HASH, (start_of_hash,))) == hashed     an equal step is there once
    kernel("run_chain")(values, chain.program(), slots, outs)   writes slot i to its array

Slots hold int64 (read as unsigned words by HASH and MOD) or float64; what a step makes of them is ``Op``'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from thinrow.core.wrap import MASK64, mix64

#: The kind of value that a hash starts from: 5, "5" and the tuple (5,) differ.
INT, BYTES, TUPLE = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7

#: log(1 + f) = f - f^2/2 + s (f^2/2 + R(s^2)) with s = f / (2 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1), and the terms
#: of R (FreeBSD's e_log.c); ln 2 as a sum of two numbers, the first short enough for exact products.
LOG_TERMS = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
SQRT_HALF = 0.7071067811865476
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10


class Op(IntEnum):
    """What a step does with each value v; words are the step's parameters, in order."""

    #: ``mix64(word ^ v)``, ``mix64`` the finaliser of splitmix64.
    HASH = 0
    #: v as an unsigned word modulo the first word; the others are ``remainder``'s.
    MOD = 1
    #: int64 v -> the count of table entries <= v.
    BUCKETIZE_INTS = 2
    #: float64 v -> the count of table entries <= v, or with a word of 1 those < v; NaN is above them all.
    BUCKETIZE_FLOATS = 3
    #: int64 v -> between the two words, signed.
    CLIP_INTS = 4
    #: float64 v -> between the two words, bits of float64; NaN stays.
    CLIP_FLOATS = 5
    #: float64 v -> log(1 + v) rounded to float32; NaN below -1.
    LOG1P = 6
    #: int64 v -> the table's value beside the entry v, or the word where there is none. Ascending entries, then values.
    LOOK_UP = 7
    #: int64 v -> float64.
    TO_FLOAT = 8


#: Ops whose result is a float64.
FLOATS = frozenset((Op.CLIP_FLOATS, Op.LOG1P, Op.TO_FLOAT))


@dataclass(frozen=True, slots=True)
class Step:
    """Attributes:
    op: what is done.
    words: parameters, 64 bits each.
    table: int64 entries; those of BUCKETIZE_FLOATS are bits of float64.
    """

    op: Op
    words: tuple[int, ...] = ()
    table: tuple[int, ...] = ()


def hash_start(seed: int, kind: int) -> int:
    """The word that hashes of one kind of value start from: ``mix64(seed + kind)``."""
    return mix64((seed + kind) & MASK64)


def remainder(divisor: int) -> Step:
    """MOD by a divisor in [1, 2^63), with what makes it a multiplication: magic and shift, or 0 and the mask of a power
    of two (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994, figure 4.1)."""
    log = divisor.bit_length() - 1
    if divisor == 1 << log:
        return Step(Op.MOD, (divisor, 0, divisor - 1))
    magic, rest = divmod(1 << (64 + log), divisor)
    magic = (2 * magic + (2 * rest >= divisor) + 1) & MASK64
    return Step(Op.MOD, (divisor, magic, log))


def bits(value: float) -> int:
    """A float64 as the int64 of its bits."""
    return int(np.float64(value).view(np.int64))


@dataclass(frozen=True, slots=True)
class Program:
    """A chain as arrays; S steps, step i making slot i + 1.

    Attributes:
        op, source: (S,) int64, what is done and the slot that it is done to.
        words: (S, 3) uint64.
        table: (S + 1,) int64, bounds of each step's entries.
        entries: int64 of all tables.
    """

    op: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    words: npt.NDArray[np.uint64]
    table: npt.NDArray[np.int64]
    entries: npt.NDArray[np.int64]


class Chain:
    """Steps in the order in which they can be walked, each distinct one once."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, Step], int] = {}

    def add(self, source: int, step: Step) -> int:
        """The slot of ``step`` done to ``source``."""
        return self._slots.setdefault((source, step), len(self._slots) + 1)

    def add_all(self, source: int, steps: Sequence[Step]) -> int:
        """The slot of steps done one after another."""
        for step in steps:
            source = self.add(source, step)
        return source

    def program(self) -> Program:
        """The chain as arrays."""
        steps = [step for _, step in self._slots]
        words = np.zeros((len(steps), 3), np.uint64)
        for i, step in enumerate(steps):
            words[i, : len(step.words)] = [w & MASK64 for w in step.words]
        return Program(
            np.array([s.op for s in steps], np.int64),
            np.array([source for source, _ in self._slots], np.int64),
            words,
            np.cumsum([0, *(len(s.table) for s in steps)], dtype=np.int64),
            np.array([v for s in steps for v in s.table], np.int64),
        )
