"""The dispatcher: every kernel of the table exists in every backend with the same parameters; imports stay lazy."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from thinrow.core.errors import InputError
from thinrow.kernels import BACKENDS, KERNELS, active, kernel, use


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_backends_have_the_same_kernels(name: str) -> None:
    parameters: list[list[str]] = []
    for backend in BACKENDS:
        with use(backend):
            found = kernel(name)
        signature = inspect.signature(getattr(found, "py_func", found)).parameters
        if not any(p.kind is p.VAR_POSITIONAL for p in signature.values()):
            parameters.append(list(signature))
    assert all(p == parameters[0] for p in parameters)


def test_use_is_undone_after_an_exception() -> None:
    seen = []

    def fail_inside() -> None:
        with use("reference"):
            seen.append((active(), kernel("crc32c").__module__))
            with use("numba"):
                seen.append((active(), kernel("crc32c").__module__))
            seen.append((active(), kernel("crc32c").__module__))
            raise RuntimeError

    assert active() == "numba"
    with pytest.raises(RuntimeError):
        fail_inside()
    assert seen == [(b, f"thinrow.kernels.{b}.crc") for b in ("reference", "numba", "reference")]
    assert active() == "numba"


def test_unknown_names() -> None:
    with pytest.raises(InputError, match="no kernel 'nothing'"):
        kernel("nothing")
    with pytest.raises(InputError, match="'cuda'; there are numba, reference"), use("cuda"):
        pass


def test_numba_is_imported_on_first_use() -> None:
    program = """
import sys
import thinrow.kernels, thinrow.storage.codecs, thinrow.storage.pages, thinrow.storage.manifest
assert not {"numba", "zstandard", "pyarrow"} & set(sys.modules)
with thinrow.kernels.use("reference"):
    thinrow.kernels.kernel("crc32c")
assert "numba" not in sys.modules
thinrow.kernels.kernel("crc32c")
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
