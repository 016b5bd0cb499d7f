"""The scripts beside files of released versions in the tests' data, which say what these files hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def generator(path: Path) -> ModuleType:
    """The script at ``path`` as a module, run."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
