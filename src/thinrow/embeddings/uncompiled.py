"""Look-ups under ``torch.compile``: they change a table, which no graph can hold, so the graph breaks there and they
run as they are.

``torch.compiler.disable`` does that, but imports the compiler, for seconds, whether anybody compiles or not. So it is
called when the first look-up is about to be compiled, for the look-ups of all modules at once.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, TypeVar

import torch

_Module = TypeVar("_Module", bound=type[torch.nn.Module])

_looking_up: dict[type[torch.nn.Module], Any] = {}


def uncompiled(module: _Module) -> _Module:
    """The module class, whose ``forward`` is never compiled."""
    look_up = _looking_up[module] = module.forward

    @wraps(look_up)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _disable()
            return module.forward(self, *args, **kwargs)
        return look_up(self, *args, **kwargs)

    module.forward = forward
    return module


def _disable() -> None:
    for module, look_up in _looking_up.items():
        module.forward = torch.compiler.disable(look_up, reason="a look-up in an embedding table")  # type: ignore[no-untyped-call]
