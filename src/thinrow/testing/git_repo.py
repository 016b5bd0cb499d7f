"""Small git repositories with chosen authors, dates and changes, made in one go by ``git fast-import``.

Worked example: ``make_repo(path, [Commit("ann@example.org", 100, 500, (add("a"),))])`` is a repository of one commit
that Ann made 100 seconds after 1970 and that was committed at 500.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileChange:
    """``kind`` is "write", "delete" or "rename"; paths in bytes; ``content`` of what is written."""

    kind: str
    path: bytes
    old_path: bytes = b""
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Commit:
    """Attributes:
    author: e-mail address, as it is to stand in the commit.
    made_s: author date, seconds since 1970.
    taken_s: commit date.
    changes: in order.
    zone: of the author, as git writes it.
    branch: that the commit goes on.
    base: branch whose tip is its parent; None for the branch's own tip.
    merges: branch that is merged in; None for no merge.
    """

    author: str
    made_s: int
    taken_s: int
    changes: tuple[FileChange, ...]
    zone: str = "+0000"
    branch: str = "main"
    base: str | None = None
    merges: str | None = None


def write(path: str | bytes, version: int = 0) -> FileChange:
    """Add or modify a file: its content is its own, and mostly the same in every version."""
    name = path if isinstance(path, bytes) else path.encode()
    rng = random.Random(name)
    lines = b"".join(b"%d\n" % rng.getrandbits(64) for _ in range(20))
    return FileChange("write", name, content=lines + b"version %d\n" % version)


def delete(path: str | bytes) -> FileChange:
    """Delete a file."""
    return FileChange("delete", path if isinstance(path, bytes) else path.encode())


def rename(old: str, new: str) -> FileChange:
    """Rename a file, unchanged."""
    return FileChange("rename", new.encode(), old.encode())


def make_repo(path: Path, commits: Sequence[Commit]) -> Path:
    """A new repository at ``path`` with HEAD on the branch "main"; nothing is checked out. Returns ``path``."""
    run_git(path.parent, "init", "--quiet", "--initial-branch=main", str(path))
    stream = b"".join(_commit(c, i) for i, c in enumerate(commits))
    run_git(path, "fast-import", "--quiet", "--date-format=raw", stdin=stream)
    return path


def run_git(folder: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    """What git writes; no configuration of the machine's or the user's takes part."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment = kept | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, env=environment, check=True).stdout


def _commit(commit: Commit, number: int) -> bytes:
    message = b"commit %d" % number
    lines = [
        b"commit refs/heads/" + commit.branch.encode(),
        b"author Somebody <%s> %d %s" % (commit.author.encode(), commit.made_s, commit.zone.encode()),
        b"committer Taker <taker@example.org> %d +0000" % commit.taken_s,
        b"data %d" % len(message),
        message,
    ]
    if commit.base is not None:
        lines.append(b"from refs/heads/" + commit.base.encode())
    if commit.merges is not None:
        lines.append(b"merge refs/heads/" + commit.merges.encode())
    for change in commit.changes:
        match change.kind:
            case "write":
                lines.append(b"M 100644 inline " + _quoted(change.path))
                lines += [b"data %d" % len(change.content), change.content]
            case "delete":
                lines.append(b"D " + _quoted(change.path))
            case _:
                lines.append(b"R " + _quoted(change.old_path) + b" " + _quoted(change.path))
    return b"\n".join(lines) + b"\n\n"


def _quoted(path: bytes) -> bytes:
    return b'"' + b"".join(b"\\%03o" % byte for byte in path) + b'"'
