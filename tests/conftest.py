"""Set before anything imports torch: with its idle threads spinning, tests on a busy machine take ten times as long.

Nothing here is timed by hypothesis: the first example of a property compiles the kernel that it tests. Compiling is a
third of all work, and the processes of a run come to the same kernels together: one compiles, the others load it.
"""

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before anything imports triton: its kernels run without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("thinrow", deadline=None)
settings.load_profile("thinrow")


def _compile_once() -> None:
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.dispatcher import Dispatcher

    folder = Path(tempfile.gettempdir()) / f"thinrow-compiling-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    compile_alone = Dispatcher.compile

    def compile_once(self: Any, sig: Any) -> Any:
        code = self.py_func.__code__
        name = hashlib.sha256(f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}:{sig}".encode()).hexdigest()
        # In this order for all threads of a process. Among processes, callers come before what they call.
        with global_compiler_lock, open(folder / name, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return compile_alone(self, sig)
            finally:
                # Not by closing it: a process that was forked meanwhile has it open, too.
                fcntl.flock(lock, fcntl.LOCK_UN)

    Dispatcher.compile = compile_once


if "PYTEST_XDIST_WORKER" in os.environ:
    _compile_once()
