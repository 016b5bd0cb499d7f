"""Two folders change names in one step: what is at ``step-7`` is the old one or the new one, at any moment.

A module of its own, called through it, so that simulated power cuts see the call (``thinrow.testing.power_cut``);
``os`` has none for it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

#: AT_FDCWD and RENAME_EXCHANGE of renameat2.
_HERE, _EXCHANGE = -100, 2


def folders(one: Path, other: Path) -> bool:
    """Let two folders change names, and say whether the system can; durable when their parents are synced."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0
