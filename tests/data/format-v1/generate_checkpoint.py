"""Makes the folder ``checkpoint`` beside it: one checkpoint of format version 1, every dtype.

Run once, with the release that introduced the format; never again for the same version. Every later release must read
it (tests/unit/checkpoints/test_format_v1.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinrow.checkpoints import save

META = {"model": "hstu", "reader": {"t": 7}, "loss": 0.1, "größe": [None, True, 2**70]}
WHOLE = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [*WHOLE, "float16", "float32", "float64"]


def arrays() -> dict[str, npt.NDArray[Any]]:
    """Name -> array, a function of nothing."""
    counting = {d: (np.arange(6) % 2 if d == "bool" else np.arange(6)).astype(d).reshape(2, 3) for d in DTYPES}
    return counting | {"no row": np.empty((0, 4), np.float32), "a/number": np.array(-0.0)}


if __name__ == "__main__":
    save(Path(__file__).parent / "checkpoint", 7, tensors=arrays(), meta=META)
