"""Run the code blocks of Markdown files, so that documentation stays true.

What happens to a fenced block, by its language and the comment on the line before it:

- ``python``: executed; the blocks of one file share a namespace, in order.
- ``console``: each line that begins with ``$ `` is a command (a trailing backslash continues it), run by bash; other
  lines are its output and are not compared. ``bash`` and ``sh``: the whole block is run by bash.
- ``<!-- file: NAME -->``: the block, of any language, is written to NAME in the working folder.
- ``<!-- not run: REASON -->``: the block is left alone.
- Any other language is left alone.

Commands are ``thinrow`` and a few of the shell's own (``SHELL_WORDS``); another one is an error, so that a block which
cannot run in a test says so with its reason. Worked example: a file with one ``python`` block ``x = 1`` and a second
``print(x)`` runs both in one namespace and prints 1; a NameError in it is reported at the line of the Markdown file.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thinrow.core.errors import InputError

#: First words that a command in a block may have.
SHELL_WORDS = ("thinrow", "python", "cat", "cp", "echo", "head", "ls", "mkdir", "rm")

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[\w+-]*)")
_NOTE = re.compile(r"^ *<!-- *(?P<kind>not run|file): *(?P<value>.*?) *-->$")
_COMMAND_TIMEOUT_S = 300


class SnippetError(AssertionError):
    """A block did not run; the message has the file, the line and what the block printed."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """One fenced block.

    Attributes:
        path: the Markdown file.
        line: number of the block's first line of code, from 1.
        language: the word after the fence, may be empty.
        code: the block without its fences.
        file: name of the file that the block becomes, or None.
        not_run: why the block is not run, or None.
    """

    path: Path
    line: int
    language: str
    code: str
    file: str | None = None
    not_run: str | None = None

    def commands(self) -> list[str]:
        """The shell commands of a ``console``, ``bash`` or ``sh`` block."""
        if self.language != "console":
            return [self.code]
        joined = self.code.replace("\\\n", " ")
        return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def snippets(path: Path) -> Iterator[Snippet]:
    """The fenced blocks of a Markdown file, in order.

    Raises:
        InputError: a block is never closed, or a ``not run`` comment has no reason.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    number = 0
    note: re.Match[str] | None = None
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if not opening:
            note = _NOTE.match(lines[number]) if lines[number].strip() else note
            number += 1
            continue
        closing = re.compile(rf"^ *{re.escape(opening['fence'])} *$")
        end = next((k for k in range(number + 1, len(lines)) if closing.match(lines[k])), None)
        if end is None:
            raise InputError(f"{path}:{number + 1}: the block is never closed; end it with {opening['fence']}")
        if note and not note["value"]:
            raise InputError(f"{path}:{number}: '{note['kind']}:' with nothing after it; say what or why")
        indent = len(opening["indent"])
        yield Snippet(
            path,
            number + 2,
            opening["language"],
            "".join(line[indent:] + "\n" for line in lines[number + 1 : end]),
            note["value"] if note and note["kind"] == "file" else None,
            note["value"] if note and note["kind"] == "not run" else None,
        )
        number, note = end + 1, None


def run_file(path: Path, folder: Path) -> int:
    """Run the blocks of a Markdown file with ``folder`` as the working folder; returns how many were run.

    Raises:
        SnippetError: a block failed.
        InputError: a block is malformed or has a command that is not allowed.
    """
    module = types.ModuleType(f"snippets_of_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}")
    sys.modules[module.__name__] = module
    before = os.getcwd()
    n_run = 0
    try:
        os.chdir(folder)
        for snippet in snippets(path):
            n_run += _run(snippet, module, folder)
    finally:
        os.chdir(before)
        del sys.modules[module.__name__]
    return n_run


def _run(snippet: Snippet, module: types.ModuleType, folder: Path) -> bool:
    if snippet.not_run is not None:
        return False
    if snippet.file is not None:
        target = folder / snippet.file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(snippet.code, encoding="utf-8")
        return True
    if snippet.language == "python":
        # Blank lines before the code give tracebacks the line numbers of the Markdown file.
        code = "\n" * (snippet.line - 1) + snippet.code
        try:
            exec(compile(code, str(snippet.path), "exec", dont_inherit=True), module.__dict__)
        except Exception as e:
            raise SnippetError(f"{snippet.path}:{snippet.line}: {type(e).__name__}: {e}") from e
        return True
    if snippet.language in ("console", "bash", "sh"):
        for command in snippet.commands():
            _shell(snippet, command, folder)
        return True
    return False


def _shell(snippet: Snippet, command: str, folder: Path) -> None:
    where = f"{snippet.path}:{snippet.line}"
    for line in command.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] not in SHELL_WORDS:
            allowed = ", ".join(SHELL_WORDS)
            raise InputError(
                f"{where}: command {words[0]!r} is not run here (allowed: {allowed}); mark the block 'not run'"
            )
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SnippetError(f"{where}: exit status {done.returncode} of: {command.strip()}\n{done.stdout}")
