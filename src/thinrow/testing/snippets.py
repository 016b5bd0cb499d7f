"""Run the code blocks of Markdown files, so that documentation stays true.

What happens to a fenced block, by its language and the comment on the line before it:

- ``python``: executed; the blocks of one file share a namespace, in order.
- ``<!-- output -->``: the block is what the ``python`` block before it prints.
- ``console``: each line that begins with ``$ `` is a command (a trailing backslash continues it), run by bash; lines
  after it are its output, standard error included. ``bash`` and ``sh``: the whole block is run by bash.
- ``<!-- file: NAME -->``: the block, of any language, is written to NAME in the working folder.
- ``<!-- not run: REASON -->``: the block is left alone.
- Any other language is left alone.

Output is compared as doctest compares it: ``...`` stands for anything, and runs of white space are equal. A command
without lines after it may print what it likes.

Commands are ``thinrow`` and a few of the shell's own (``SHELL_WORDS``); another one is an error, so that a block which
cannot run in a test says so with its reason. Worked example: a file with one ``python`` block ``x = 1`` and a second
``print(x)`` runs both in one namespace and prints 1; a NameError in it is reported at the line of the Markdown file.
"""

from __future__ import annotations

import contextlib
import doctest
import io
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
from thinrow.testing.forked import Commands

#: First words that a command in a block may have.
SHELL_WORDS = ("thinrow", "python", "cat", "cp", "curl", "echo", "head", "ls", "mkdir", "rm")

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[\w+-]*)")
_NOTE = re.compile(r"^ *<!-- *(?P<kind>not run|file|output):? *(?P<value>.*?) *-->$")
_COMPARED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
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
        is_output: whether the block is what the block before it prints.
    """

    path: Path
    line: int
    language: str
    code: str
    file: str | None = None
    not_run: str | None = None
    is_output: bool = False

    def commands(self) -> list[tuple[str, str]]:
        """The shell commands of a ``console``, ``bash`` or ``sh`` block, each with the output that it shows."""
        if self.language != "console":
            return [(self.code, "")]
        found: list[tuple[str, str]] = []
        for line in self.code.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((line[2:], ""))
            elif found:
                found[-1] = (found[-1][0], found[-1][1] + line + "\n")
        return found


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
        if note and not note["value"] and note["kind"] != "output":
            raise InputError(f"{path}:{number}: '{note['kind']}:' with nothing after it; say what or why")
        indent = len(opening["indent"])
        yield Snippet(
            path,
            number + 2,
            opening["language"],
            "".join(line[indent:] + "\n" for line in lines[number + 1 : end]),
            note["value"] if note and note["kind"] == "file" else None,
            note["value"] if note and note["kind"] == "not run" else None,
            note is not None and note["kind"] == "output",
        )
        number, note = end + 1, None


def run_file(path: Path, folder: Path) -> int:
    """Run the blocks of a Markdown file with ``folder`` as the working folder; returns how many were run.

    Raises:
        SnippetError: a block failed, or printed something else than the page shows.
        InputError: a block is malformed or has a command that is not allowed.
    """
    module = types.ModuleType(f"snippets_of_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}")
    sys.modules[module.__name__] = module
    before = os.getcwd()
    n_run, printed = 0, None
    path = path.absolute()
    try:
        os.chdir(folder)
        for snippet in snippets(path):
            if snippet.is_output:
                if printed is None:
                    raise InputError(f"{path}:{snippet.line}: output of what? put it after a python block that is run")
                _compare(f"{path}:{snippet.line}", snippet.code, printed)
                continue
            ran, printed = _run(snippet, module, folder)
            n_run += ran
    finally:
        os.chdir(before)
        del sys.modules[module.__name__]
    return n_run


def _run(snippet: Snippet, module: types.ModuleType, folder: Path) -> tuple[bool, str | None]:
    """Whether the block was run, and what it printed where it is Python."""
    if snippet.not_run is not None:
        return False, None
    if snippet.file is not None:
        target = folder / snippet.file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(snippet.code, encoding="utf-8")
        return True, None
    if snippet.language == "python":
        # Blank lines before the code give tracebacks the line numbers of the Markdown file.
        code = "\n" * (snippet.line - 1) + snippet.code
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(snippet.path), "exec", dont_inherit=True), module.__dict__)
        except Exception as e:
            raise SnippetError(f"{snippet.path}:{snippet.line}: {type(e).__name__}: {e}\n{out.getvalue()}") from e
        return True, out.getvalue()
    if snippet.language in ("console", "bash", "sh"):
        for command, shown in snippet.commands():
            printed = _shell(snippet, command, folder)
            if shown.strip():
                _compare(f"{snippet.path}:{snippet.line}: {command.strip()}", shown, printed)
        return True, None
    return False, None


def _compare(where: str, shown: str, printed: str) -> None:
    if not doctest.OutputChecker().check_output(shown, printed, _COMPARED):
        raise SnippetError(f"{where}: the page shows\n{shown}but this was printed:\n{printed}")


def _shell(snippet: Snippet, command: str, folder: Path) -> str:
    """What the command printed."""
    where = f"{snippet.path}:{snippet.line}"
    for line in command.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] not in SHELL_WORDS:
            allowed = ", ".join(SHELL_WORDS)
            raise InputError(
                f"{where}: command {words[0]!r} is not run here (allowed: {allowed}); mark the block 'not run'"
            )
    folders = (Commands.shared().folder, Path(sys.executable).parent, os.environ.get("PATH", ""))
    path = os.pathsep.join(map(str, folders))
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
    return done.stdout
