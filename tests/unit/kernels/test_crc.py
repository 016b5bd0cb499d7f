"""CRC-32C: the published vectors, and that instruction, tables and definition agree."""

from __future__ import annotations

import numpy as np
import pytest

from thinrow.kernels import BACKENDS, kernel, use
from thinrow.kernels.numba import crc

# RFC 3720, appendix B.4, and the check value of the CRC catalogue.
VECTORS = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
]


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("data", "value"), VECTORS)
def test_published_vectors(backend: str, data: bytes, value: int) -> None:
    with use(backend):
        assert int(kernel("crc32c")(array(data))) == value


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_crc_continues_from_another(backend: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100).astype(np.uint8)
    with use(backend):
        whole = int(kernel("crc32c")(data))
        for cut in range(101):
            assert int(kernel("crc32c")(data[cut:], int(kernel("crc32c")(data[:cut])))) == whole


@pytest.mark.skipif(not crc.has_crc_instruction(), reason="no crc32 instruction")
def test_instruction_and_tables_agree() -> None:
    data = np.random.default_rng(1).integers(0, 256, 200).astype(np.uint8)
    for start in range(9):
        for stop in range(start, 200):
            for state in (np.uint32(0), np.uint32(0xFFFFFFFF), np.uint32(0x12345678)):
                assert crc.advance_hardware(state, data, start, stop) == crc.advance_software(state, data, start, stop)


@pytest.mark.skipif(not crc.has_product_instruction(), reason="no carry-less product")
def test_thirds_and_tables_agree() -> None:
    data = np.random.default_rng(4).integers(0, 256, 40_000).astype(np.uint8)
    stops = [*range(90, 400), 3 * 512 * 8 - 1, 3 * 512 * 8, 3 * 512 * 8 + 1, 3 * 512 * 8 + 97, 39_999]
    for start in (0, 1, 8):
        for stop in stops:
            for state in (np.uint32(0), np.uint32(0xFFFFFFFF), np.uint32(0x12345678)):
                assert crc.advance_thirds(state, data, start, stop) == crc.advance_software(state, data, start, stop)


@pytest.mark.skipif(not crc.has_wide_product_instruction(), reason="no carry-less product of 512 bits")
def test_folding_and_tables_agree() -> None:
    data = np.random.default_rng(5).integers(0, 256, 10_000).astype(np.uint8)
    stops = [*range(100, 340), *range(500, 1_500, 7), *range(504, 1_600, 8), 9_999]
    for start in (0, 1, 8):
        for stop in stops:
            for state in (np.uint32(0), np.uint32(0xFFFFFFFF), np.uint32(0x12345678)):
                assert crc.advance_folded(state, data, start, stop) == crc.advance_software(state, data, start, stop)


def test_at_an_address_as_in_an_array() -> None:
    data = np.random.default_rng(6).integers(0, 256, 2_000).astype(np.uint8)
    for size in (0, 1, 8, 40, 111, 112, 113, 1_000, 1_999):
        found = crc.advance_at(np.uint32(0xFFFFFFFF), data.ctypes.data, size)
        assert found == crc.advance_software(np.uint32(0xFFFFFFFF), data, 0, size)


def test_tables_are_the_definition() -> None:
    data = np.random.default_rng(2).integers(0, 256, 300).astype(np.uint8)
    with use("reference"):
        for n in (0, 1, 7, 8, 9, 255, 300):
            wanted = int(kernel("crc32c")(data[:n]))
            assert int(crc.advance_software(np.uint32(0xFFFFFFFF), data, 0, n)) ^ 0xFFFFFFFF == wanted


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_ranges_and_those_outside(backend: str) -> None:
    data = array(b"..123456789..")
    offset = np.array([2, 0, 13, -1, 14, 5, 2, 1 << 62])
    length = np.array([9, 0, 0, 3, 0, 9, -1, 1 << 62])
    with use(backend):
        assert kernel("crc32c_many")(data, offset, length).tolist() == [0xE3069283, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("target", [None, ("aarch64-linux", "generic", "+sse4.2"), ("x86_64-linux", "generic", "")])
def test_the_instruction_is_used_only_where_the_compiler_knows_it(
    monkeypatch: pytest.MonkeyPatch, target: tuple[str, str, str] | None
) -> None:
    class Codegen:
        def magic_tuple(self) -> tuple[str, str, str]:
            if target is None:
                raise AttributeError("magic_tuple")
            return target

    monkeypatch.setattr(type(crc.cpu_target.target_context), "codegen", lambda self: Codegen())
    assert not crc.has_crc_instruction()
    assert not crc.has_wide_product_instruction()
