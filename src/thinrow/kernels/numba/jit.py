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
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding  # type: ignore[import-untyped]
from numba.core import cgutils, sigutils, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.extending import intrinsic as _numba_intrinsic

F = TypeVar("F", bound=Callable[..., Any])

#: An import of this package, where modules have theirs: a constant does not say where it comes from.
_IMPORT = re.compile(rb"^from (thinrow[\w.]*) import", re.MULTILINE)


def njit(function: F) -> F:
    """Compile on first call for each set of argument types; cached on disk, runs without the GIL.

    Division follows NumPy (no exception on zero); indices are not checked: a kernel checks its input itself.
    """
    compiled: Any = specialized(function)
    if compiled is not function:
        compiled.compile = partial(_compile, compiled.compile)
    return cast(F, compiled)


def specialized(function: F) -> F:
    """As ``njit``, but once more for each constant integer that a caller gives: where that makes another loop of it."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    # With NUMBA_DISABLE_JIT it is the function itself.
    if compiled is not function:
        compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return cast(F, compiled)


def _compile(compile_one: Callable[[Any], Any], signature: Any) -> Any:
    """numba would compile once for each constant integer that a caller gives, which is a fifth of all compiling."""
    arguments, result = sigutils.normalize_signature(signature)  # type: ignore[no-untyped-call]
    arguments = tuple(types.unliteral(a) for a in arguments)  # type: ignore[no-untyped-call]
    return compile_one(arguments if result is None else result(*arguments))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.extending.intrinsic`` with a type."""
    return cast(Callable[..., Any], _numba_intrinsic(function))


def linked(function: F) -> F:
    """Compile once, now, what kernels call by its address: int64 arguments to an int64.

    numba puts a copy of whatever a kernel calls into the kernel, and optimises each copy anew. Worked example: with the
    decoders linked, all that two property tests of reads use is compiled in 165 s in place of 234. A call costs 4 ns.
    What is linked raises nothing and allocates nothing. (decision 048)
    """
    compiled: Any = njit(function)
    if compiled is function:
        return function
    name, parameters = f"{function.__module__}.{function.__name__}", inspect.signature(function).parameters.values()
    arguments = (types.int64,) * len(parameters)
    signature = types.int64(*arguments)
    compiled.compile(signature)
    found = compiled.overloads[arguments]
    # Where the linker finds it for kernels that are compiled, and for those that come from disk.
    binding.add_symbol(name, found.library.get_pointer_to_function(found.fndesc.llvm_func_name))

    def emit(context: Any, builder: Any, _: Any, given: Any) -> Any:
        kind = context.call_conv.get_function_type(types.int64, arguments)
        callee = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
        return context.call_conv.call_function(builder, callee, types.int64, arguments, given)[1]

    def typed(*_: Any) -> Any:
        return signature, emit

    context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    typed.__signature__ = inspect.Signature([context, *plain])  # type: ignore[attr-defined]
    call: Any = intrinsic(typed)
    # Its code must not be collected.
    call.compiled = compiled
    return cast(F, call)


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
