"""docs/your-own-model.md: what it says of the length of its first loop is true."""

from __future__ import annotations

from pathlib import Path

from thinrow.testing.snippets import snippets

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your-own-model.md"
MOST_LINES = 20


def test_a_plain_module_and_its_loop_are_at_most_20_lines() -> None:
    (block,) = [s for s in snippets(PAGE) if s.language == "python" and "class Taste(torch.nn.Module)" in s.code]
    lines = [line for line in block.code.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES
    # From opening the store to the last step, nothing of it is elsewhere.
    for part in ("import thinrow", "open_store", "TorchLoader(", ".backward()", "optimizer.step()"):
        assert part in block.code
    assert block.not_run is None
