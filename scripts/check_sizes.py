"""Check that no module and no function outgrows its bound; print each offender with its value and the bound.

Lines are counted as they stand in the file, blank lines, comments and docstrings included.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "bench", "tests", "scripts")
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 80


def offenders(path: Path, name: str) -> Iterator[str]:
    """One message for each bound that the file at ``path`` (shown as ``name``) exceeds."""
    text = path.read_text(encoding="utf-8")
    n_lines = len(text.splitlines())
    if n_lines > MAX_MODULE_LINES:
        yield f"{name}: {n_lines} lines, at most {MAX_MODULE_LINES}; split the module"
    for node in ast.walk(ast.parse(text, name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                where = f"{name}:{node.lineno}: {node.name}"
                yield f"{where} has {length} lines, at most {MAX_FUNCTION_LINES}; split the function"


def main() -> int:
    """Exit status: 0 when every bound holds, else 1."""
    paths = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    found = [message for p in paths for message in offenders(p, str(p.relative_to(ROOT)))]
    for message in found:
        print(message)
    print(f"sizes: {len(paths)} modules checked, {len(found)} over a bound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
