"""DictionaryMap: an integer or string -> the number that a dictionary has for it.

With ``{"shoes": 1, "hats": 2}`` and other 0: "hats" -> 2, "socks" -> 0; null stays null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thinrow.core.errors import InputError
from thinrow.features.node import Elementwise, Formula, as_integer, integers, within_int64
from thinrow.kernels.chain import Op, Step

_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class DictionaryMap(Elementwise):
    """int64.

    Attributes:
        entries: key -> number as a mapping or as pairs; keys are all integers, or all strings. Kept as ascending pairs.
        other: of a key that is not there.
    """

    entries: tuple[tuple[int | str, int], ...]
    other: int = 0
    op: ClassVar[str] = "dictionary_map"

    def __post_init__(self) -> None:
        given = self.entries.items() if isinstance(self.entries, Mapping) else [(k, v) for k, v in self.entries]
        pairs = [
            (int(k) if isinstance(k, np.integer) else k, as_integer(self.op, f"entries[{k!r}]", v)) for k, v in given
        ]
        object.__setattr__(self, "other", as_integer(self.op, "other", self.other))
        kinds = {type(k) for k, _ in pairs}
        if kinds not in ({int}, {str}):
            raise InputError(
                f"dictionary_map: keys of {', '.join(sorted(k.__name__ for k in kinds)) or 'no type'}; "
                "give one key or more, all integers or all strings"
            )
        pairs.sort(key=lambda pair: pair[0])
        twice = next((a for (a, _), (b, _) in pairwise(pairs) if a == b), None)
        if twice is not None:
            raise InputError(f"dictionary_map: key {twice!r} is there twice; give each once")
        object.__setattr__(self, "entries", tuple(pairs))
        numbers = [v for _, v in pairs] + [k for k, _ in pairs if isinstance(k, int)] + [self.other]
        outside = next((n for n in numbers if n not in _INT64), None)
        if outside is not None:
            raise InputError(f"dictionary_map: {outside} is not an int64")

    @property
    def _of_texts(self) -> bool:
        return isinstance(self.entries[0][0], str)

    def formula(self, dtype: np.dtype[Any]) -> Formula:
        integers(dtype, "dictionary_map", "bucketize floats first")
        within_int64(dtype, "dictionary_map")
        if self._of_texts:
            raise InputError(f"dictionary_map of a column of {dtype} by strings; give integers as keys")
        keys = [k for k, _ in self.entries if isinstance(k, int)]
        step = Step(Op.LOOK_UP, (self.other,), (*keys, *(v for _, v in self.entries)))
        return Formula(((step,),), np.dtype(np.int64))

    def texts(self, entries: pa.Array) -> npt.NDArray[Any]:
        if not self._of_texts:
            raise InputError(f"dictionary_map of a column of {entries.type} by integers; give strings as keys")
        keys = pa.array([k for k, _ in self.entries], pa.string()).cast(entries.type)
        held = np.array([*(v for _, v in self.entries), self.other], np.int64)
        at = pc.fill_null(pc.index_in(entries, value_set=keys), len(keys))
        return np.asarray(held[at.to_numpy(zero_copy_only=False)])
