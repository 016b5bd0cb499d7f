"""Units, the clock, and the 64-bit mix that formats are written in."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.core import units
from thinrow.core.clock import system_clock
from thinrow.core.units import format_bytes
from thinrow.core.wrap import MASK64, mix64
from thinrow.kernels import kernel, use

GOLDEN = 0x9E3779B97F4A7C15


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (999.6, "1.0 KB"),
        (1_000, "1.0 KB"),
        (1_536, "1.5 KB"),
        (999_949, "999.9 KB"),
        (999_999, "1.0 MB"),
        (1_000_000, "1.0 MB"),
        (2_340_000_000, "2.3 GB"),
        (5e12, "5.0 TB"),
        (7e15, "7000.0 TB"),
        (-1_536, "-1.5 KB"),
    ],
)
def test_bytes_are_shown_in_powers_of_1000(n: float, text: str) -> None:
    assert format_bytes(n) == text


@given(st.integers(0, 10**15 - 1))
def test_a_number_of_bytes_under_1000_of_its_unit_is_shown_so(n: int) -> None:
    number, unit = format_bytes(n).split()
    factor = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert float(number) < 1000 or unit == "TB"
    assert abs(float(number) * factor - n) <= 0.051 * factor


def test_units_are_in_milliseconds() -> None:
    assert (units.SECOND_MS, units.MINUTE_MS, units.HOUR_MS, units.DAY_MS) == (1_000, 60_000, 3_600_000, 86_400_000)
    assert np.iinfo(np.int64).max == units.NEVER


def test_the_clock_shows_whole_milliseconds() -> None:
    before, shown, after = time.time() * 1000, system_clock(), time.time() * 1000
    assert isinstance(shown, int)
    assert before - 1 <= shown <= after


def test_mix64_makes_splitmix64s_published_sequence() -> None:
    """The generator SplitMix64 from seed 0 yields ``mix64(k * golden)``."""
    first = [mix64(k * GOLDEN & MASK64) for k in (1, 2, 3)]
    assert first == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("backend", ["numba", "reference"])
@given(words=st.lists(st.integers(0, MASK64), min_size=1, max_size=50))
@settings(max_examples=30)
def test_mix64_is_the_mix_of_the_kernels(backend: str, words: list[int]) -> None:
    with use(backend):
        mixed = kernel("mix64")(np.array(words, np.uint64))
        folded = kernel("fold_bytes")(np.arange(len(words) + 1) * 8, np.array(words, "<u8").view(np.uint8))
        times, arrivals = np.array(words, np.uint64).view(np.int64), np.arange(len(words))
        identity = kernel("identity_mix")(times, arrivals)
    assert mixed.tolist() == [mix64(w) for w in words]
    # The kernels of the history have a mix of their own.
    assert folded.tolist() == [mix64(8 ^ w) for w in words]
    assert identity.tolist() == [mix64(mix64(w + GOLDEN & MASK64) + a & MASK64) for a, w in enumerate(words)]
