"""docs/errors.md explains every error that there is."""

from __future__ import annotations

import re
from pathlib import Path

from thinrow.core import errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"


def test_every_error_is_explained() -> None:
    tree = {n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, errors.ThinrowError)}
    rows = "".join(line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("|"))
    explained = set(re.findall(r"`(\w+)`", rows)) - {"ValueError", "ImportError"}
    assert explained == tree - {"ThinrowError"}
