"""Fixed-width columns as codes and a dictionary: what is done once for a word is done once, not for each row.

Worked example. Segment words ``[7, 9]``; a block of codec 12 with the words ``[40]`` of its own and the codes
``[0, 2, 1]``; a raw block of the values ``[9, 5]``. The dictionary is ``[7, 9, 40, 9, 5]`` and the codes are
``[0, 2, 1, 3, 4]``: values of a block without codes are entries themselves. Nothing is hashed, so 9 has two codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core import pool
from thinrow.core.buffers import Buffers
from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of
from thinrow.kernels import kernel
from thinrow.storage.codecs import I64, U8, U64, BadBlock

_MAX_WORDS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """n runs of rows in C blocks, as the kernel ``decode_fixed`` takes them.

    Attributes:
        buffers, source, off, length, codec, width: (C,) where each block lies, and what it is.
        dict_off, dict_n: (C,) the segment dictionary that each block uses; or empty.
        block, n_rows, first, last: (n,) block of each run, values in the whole of it, those wanted ``[first, last)``.
        out_pos: (n,) where they go.
    """

    buffers: Buffers
    source: I64
    off: I64
    length: I64
    codec: U8
    width: U8
    dict_off: I64
    dict_n: I64
    block: I64
    n_rows: I64
    first: I64
    last: I64
    out_pos: I64

    @property
    def blocks(self) -> tuple[Any, ...]:
        """What the kernels take first."""
        return self.buffers, self.source, self.off, self.length, self.codec, self.width


def decode_codes(
    parts: Sequence[BlockRuns], words: U64, dtype: npt.DTypeLike, out: npt.NDArray[np.int32]
) -> npt.NDArray[Any]:
    """Codes of the rows of all ``parts`` into ``out`` (int32), and the values of ``dtype`` that they refer to.

    The dictionary begins with ``words``, those of the segment dictionaries; an entry may be there more than once.

    Raises:
        BadBlock: a run of part ``stream`` whose block or rows are impossible.
        InputError: the dictionary has 2^31 entries or more.
    """
    placed = []
    for k, part in enumerate(parts):
        place, values = np.empty(len(part.block), np.int64), np.empty(len(part.block), np.int64)
        bad, total = kernel("place_words")(
            *part.blocks, part.dict_n, part.block, part.n_rows, part.first, part.last, place, values
        )
        if bad >= 0:
            raise BadBlock(bad, k, "the block does not decode")
        placed.append((place, values, total))
    start = len(words) + offsets_of([total for _, _, total in placed])
    if start[-1] > _MAX_WORDS:
        raise InputError(f"{start[-1]} values in a dictionary of codes; {_MAX_WORDS} at most, read fewer users at once")
    dictionary = pool.empty(int(start[-1]), dtype)
    dictionary[: len(words)] = words.view(np.int64).astype(dictionary.dtype)
    for k, (part, (place, values, _)) in enumerate(zip(parts, placed, strict=True)):
        tail = dictionary[start[k] :]
        own = np.flatnonzero(values)
        if len(own):
            first = part.first[own]
            bad = kernel("decode_fixed")(
                *part.blocks, words, part.dict_off, part.dict_n, part.block[own], part.n_rows[own], first,
                first + values[own], place[own], tail.view(f"i{tail.itemsize}"),
            )  # fmt: skip
            if bad >= 0:
                raise BadBlock(int(own[bad]), k, "the block does not decode")
        bad = kernel("decode_codes")(
            *part.blocks, len(words), part.dict_off, part.dict_n, part.block, part.n_rows, part.first, part.last,
            part.out_pos, place + (start[k] - len(words)), dictionary[len(words) :], out,
        )  # fmt: skip
        if bad >= 0:
            raise BadBlock(bad, k, "the block does not decode")
    return dictionary
