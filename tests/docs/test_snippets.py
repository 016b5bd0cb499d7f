"""Every code block of the README and of docs/ runs; and the runner itself reports what fails, where."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinrow.core.errors import InputError
from thinrow.testing.snippets import SnippetError, run_file, snippets

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path) -> None:
    run_file(page, tmp_path)


def _page(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_blocks_share_a_namespace_and_a_folder(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        "```python\nx = 2\n```\n\n<!-- file: sub/a.txt -->\n```toml\na = 1\n```\n"
        "```python\nassert open('sub/a.txt').read() == 'a = 1\\n' and x == 2\n```\n"
        "```console\n$ echo one > b.txt\n$ cat \\\n  b.txt\none\n```\n```json\n{}\n```\n",
    )
    assert run_file(page, tmp_path) == 4
    assert (tmp_path / "b.txt").read_text() == "one\n"


def test_marked_block_is_left_alone(tmp_path: Path) -> None:
    page = _page(tmp_path, "<!-- not run: takes minutes -->\n```bash\nmake demo\n```\n```python\n1\n```\n")
    assert [s.not_run for s in snippets(page)] == ["takes minutes", None]
    assert run_file(page, tmp_path) == 1


def test_output_is_compared(tmp_path: Path) -> None:
    python = "```python\nprint('a', 7)\n```\n<!-- output -->\n```text\na  ...\n```\n"
    good = python + "```console\n$ echo x y z\nx ... z\n```\n"
    assert run_file(_page(tmp_path, good), tmp_path) == 2
    with pytest.raises(SnippetError, match=r"page\.md:6: the page shows\nb  \.\.\.\nbut this was printed:\na 7"):
        run_file(_page(tmp_path, good.replace("a  ...", "b  ...")), tmp_path)
    with pytest.raises(SnippetError, match=r"echo x y z: the page shows"):
        run_file(_page(tmp_path, good.replace("x ... z", "x ... y")), tmp_path)
    with pytest.raises(InputError, match="output of what"):
        run_file(_page(tmp_path, "<!-- output -->\n```text\na\n```\n"), tmp_path)


def test_failure_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(SnippetError, match=r"page\.md:4: ZeroDivisionError"):
        run_file(_page(tmp_path, "words\n\n```python\n1 / 0\n```\n"), tmp_path)
    with pytest.raises(SnippetError, match=r"page\.md:2: exit status 2 of: ls missing"):
        run_file(_page(tmp_path, "```console\n$ ls missing\n```\n"), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\n1\n", "never closed"),
        ("<!-- not run: -->\n```python\n1\n```\n", "nothing after it"),
        ("```bash\nmake demo\n```\n", "'make' is not run here"),
    ],
)
def test_malformed_page(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_file(_page(tmp_path, text), tmp_path)
