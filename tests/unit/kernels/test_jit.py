"""What is compiled and kept is of the sources that it holds."""

from __future__ import annotations

from thinrow.core import stripes as fields
from thinrow.kernels.numba import blocks, jit, nested, table
from thinrow.kernels.numba import stripes as compiled
from thinrow.kernels.reference import stripes
from thinrow.storage import codecs

_PACKAGE = "thinrow.kernels.numba"


def test_a_kernel_knows_the_files_whose_code_it_holds() -> None:
    names = [n.removeprefix(f"{_PACKAGE}.") for n in jit.sources(blocks.__name__)]
    assert {"blocks", "intrinsics", "nested", "unpack"} <= set(names)
    assert "table" not in names
    assert "blocks" not in [n.removeprefix(f"{_PACKAGE}.") for n in jit.sources(table.__name__)]


def test_an_edit_of_a_helper_is_another_stamp() -> None:
    """Kernels of two modules with different helpers are kept under different stamps, those of one under the same."""
    stamps = [f._cache._impl.locator.get_source_stamp() for f in (blocks._decode_runs, blocks._raw, table._address)]
    assert stamps[0] == stamps[1] != stamps[2]


def test_a_kernel_knows_the_files_of_its_constants() -> None:
    """Where fields stand in the tables that both sides share is compiled in, and the tables are read by address."""
    assert fields.__name__ in jit.sources(compiled.__name__)
    assert fields.__name__ not in jit.sources(table.__name__)


def test_kernels_and_format_know_the_same_codecs() -> None:
    assert nested.LAST_CODEC == stripes.LAST_CODEC == codecs.LAST_CODEC
