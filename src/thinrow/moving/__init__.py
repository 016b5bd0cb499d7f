"""Moving over from fat rows: what an existing pipeline logs becomes histories, versions and thin examples, and both
sides are held against each other for as long as they run side by side.

Every name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinrow.moving.fat_rows import FatLayout, FatRows
    from thinrow.moving.importer import ImportOptions, ImportReport, import_fat_rows
    from thinrow.moving.shadow import CAUSES, ShadowReport, compare, evidence

_WHERE = {
    "CAUSES": "shadow",
    "FatLayout": "fat_rows",
    "FatRows": "fat_rows",
    "ImportOptions": "importer",
    "ImportReport": "importer",
    "ShadowReport": "shadow",
    "compare": "shadow",
    "evidence": "shadow",
    "import_fat_rows": "importer",
}

__all__ = [
    "CAUSES",
    "FatLayout",
    "FatRows",
    "ImportOptions",
    "ImportReport",
    "ShadowReport",
    "compare",
    "evidence",
    "import_fat_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinrow.moving' has no attribute {name!r}")
    return getattr(importlib.import_module(f"thinrow.moving.{_WHERE[name]}"), name)
