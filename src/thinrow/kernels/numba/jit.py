"""The one way in which kernels are compiled, typed so that callers keep their signatures.

numba notices edits of a kernel's own file only: a kernel and the compiled helpers that it calls live in one module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic as _numba_intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def njit(function: F) -> F:
    """Compile on first call for each set of argument types; cached on disk, runs without the GIL.

    Division follows NumPy (no exception on zero); indices are not checked: a kernel checks its input itself.
    """
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.extending.intrinsic`` with a type."""
    return cast(Callable[..., Any], _numba_intrinsic(function))
