"""The one way in which kernels are compiled, typed so that callers keep their signatures.

What is compiled is kept on disk. numba itself drops it when the kernel's own file changes; here also when one changes
that this file imports from: what is compiled holds what it calls, and constants as they were. Worked example: after an
edit of ``unpack.py`` the kernels of ``blocks.py`` are compiled again, those of ``table.py`` are not; after one of the
fields in ``core/stripes.py`` those of ``stripes.py`` are.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.extending import intrinsic as _numba_intrinsic

F = TypeVar("F", bound=Callable[..., Any])

#: An import of this package, where modules have theirs: a constant does not say where it comes from.
_IMPORT = re.compile(rb"^from (thinrow[\w.]*) import", re.MULTILINE)


def njit(function: F) -> F:
    """Compile on first call for each set of argument types; cached on disk, runs without the GIL.

    Division follows NumPy (no exception on zero); indices are not checked: a kernel checks its input itself.
    """
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    # With NUMBA_DISABLE_JIT it is the function itself.
    if compiled is not function:
        compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return cast(F, compiled)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.extending.intrinsic`` with a type."""
    return cast(Callable[..., Any], _numba_intrinsic(function))


@cache
def _source(module: str) -> bytes:
    path = inspect.getsourcefile(sys.modules[module])
    return Path(path).read_bytes() if path else b""


def sources(module: str) -> list[str]:
    """Names of the modules whose code or constants that of ``module`` may hold once it is compiled, sorted."""
    found, waiting = {module}, [module]
    while waiting:
        named = {n.decode() for n in _IMPORT.findall(_source(waiting.pop()))} - found
        fresh = {n for n in named if n in sys.modules}
        found |= fresh
        waiting += fresh
    return sorted(found)


@cache
def _stamp(module: str) -> bytes:
    digest = hashlib.sha256()
    for name in sources(module):
        digest.update(_source(name))
    return digest.digest()


class _Impl(CompileResultCacheImpl):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._locator.get_source_stamp = lambda: _stamp(function.__module__)


class _Cache(FunctionCache):
    _impl_class = _Impl
