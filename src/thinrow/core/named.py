"""What configurations name as ``module:name``."""

from __future__ import annotations

import importlib
from typing import Any

from thinrow.core.errors import InputError


def imported(path: str, what: str) -> Any:
    """The object at ``module:name``. Raises InputError, which begins with ``what``, where it cannot be imported."""
    module, name = path.split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise InputError(f"{what} cannot be imported ({e}); install the module that has it") from e
