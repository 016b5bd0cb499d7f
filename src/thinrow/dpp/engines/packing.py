"""Packing: an object as one run of bytes, whose arrays are read where they lie.

Pickle protocol 5 gives the object without the memory of its arrays (NumPy, Arrow), and that memory apart. Layout, every
part on a multiple of 64 bytes::

    int64  number of parts, n
    int64  n + 1 pairs (offset, length): the pickle, then the memory of each array
    ...    the parts

``unpack`` gives arrays that are views into the bytes, writable where they are.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.core.errors import InputError
from thinrow.core.ragged import offsets_of

_ALIGN = 64
U8 = npt.NDArray[np.uint8]


class Packed:
    """A packed object, whose arrays are still where they were.

    Attributes:
        parts: (n + 1,) bytes of the pickle, and of each array, where they are.
        size: bytes that ``write`` takes.
    """

    def __init__(self, item: object, pickler: Callable[..., pickle.Pickler] = pickle.Pickler) -> None:
        out, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        pickler(out, 5, buffer_callback=buffers.append).dump(item)
        parts = [np.frombuffer(out.getbuffer(), np.uint8)]
        parts += [np.frombuffer(b.raw(), np.uint8) if b.raw().nbytes else np.empty(0, np.uint8) for b in buffers]
        lengths = np.array([len(p) for p in parts], np.int64)
        head = 8 * (1 + 2 * len(parts))
        starts = offsets_of(np.append(head, lengths) + _ALIGN - 1 & -_ALIGN)
        self.size = int(starts[-1])
        self._head = np.concatenate([[len(parts) - 1], np.stack([starts[1:-1], lengths], axis=1).reshape(-1)])
        self.parts, self._starts = parts, starts[1:-1].tolist()

    def write(self, into: U8) -> None:
        """Put everything into ``into``, (size,) or longer: the only time that the memory of arrays is copied."""
        into[: self._head.nbytes] = self._head.astype("<i8").view(np.uint8)
        for start, part in zip(self._starts, self.parts, strict=True):
            into[start : start + len(part)] = part

    def data(self) -> U8:
        """All of it in new memory."""
        data = np.zeros(self.size, np.uint8)
        self.write(data)
        return data


def unpack(data: memoryview) -> Any:
    """The object; its arrays keep what ``data`` is a view of alive."""
    n = int.from_bytes(data[:8], "little")
    pairs = np.frombuffer(data[8 : 8 + 16 * (n + 1)], "<i8").tolist()
    parts = [data[at : at + length] for at, length in zip(pairs[::2], pairs[1::2], strict=True)]
    return pickle.loads(parts[0], buffers=parts[1:])


class _JobPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) or callable(obj):
            where = getattr(obj, "__module__", None)
            if where == "__main__":
                raise InputError(
                    f"{getattr(obj, '__qualname__', obj)} is defined in the script that runs (__main__), which workers "
                    "do not run; move it into a module that they can import"
                )
        return NotImplemented


def pack_job(produce: Callable[[int], Any]) -> Packed:
    """What a worker elsewhere is to run.

    Raises:
        InputError: it cannot be sent: something in it is defined in ``__main__``, or exists in this process only.
    """
    try:
        return Packed(produce, _JobPickler)
    except InputError:
        raise
    except Exception as e:
        raise InputError(
            f"workers elsewhere cannot open what this loader reads ({type(e).__name__}: {e}); stores in a folder or "
            "bucket and tables can be opened there, for anything else pass engine='threads'"
        ) from e
