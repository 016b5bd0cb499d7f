"""The commits of a git checkout, as git itself lists them: ``git log --name-status``, streamed and parsed.

Merges are left out: what they bring in is listed with the commits that made it. Renames are found as git finds them
(50% alike). With ``-z`` nothing is quoted and a name may hold any byte but NUL; a commit's header begins with 0x01, as
no status does. Worked example, two commits, newest first, ``|`` for NUL and ``^`` for 0x01::

    ^9f1c...^1700000300 +0200^1700000400 +0000^ann@example.org^Ann|\\nR100|lib/a.py|lib/b.py|M|README|
    ^03ab...^1700000000 +0000^1700000000 +0000^bob@example.org^Bob|\\nA|lib/a.py|A|README|

gives, oldest first, the changes ``add lib/a.py, add README`` by Bob and ``rename lib/a.py to lib/b.py, modify README``
by Ann, made at 1700000300 s and known from 1700000400 s on.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import InputError
from thinrow.core.ragged import ranges_index

#: What a change does, by the first letter of git's status.
ACTIONS = {"A": "add", "M": "modify", "D": "delete", "R": "rename", "T": "type"}
_OTHER = len(ACTIONS)
ACTION_NAMES = (*ACTIONS.values(), "other")
ADD, MODIFY, DELETE, RENAME = range(4)

#: A copy adds a file.
_CODES = {letter.encode(): code for code, letter in enumerate(ACTIONS)} | {b"C": ADD}
_HEADER = b"\x01"
#: Raw dates: git converts none of them, and some have no calendar date.
_FORMAT = "%x01%H%x01%ad%x01%cd%x01%aE%x01%aN"
_CHUNK_BYTES = 1 << 20
#: Variables by which a surrounding git command would point at another repository.
_FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_EXTERNAL_DIFF")


@dataclass(frozen=True, slots=True)
class CommitLog:
    """C commits in order of arrival (their commit date; git's own order among equal ones), E changes.

    Attributes:
        hashes: C names of commits, hexadecimal.
        authors: C e-mail addresses in lower case; the name in brackets where there is none.
        author_ts: (C,) int64 ms, when it was made; at most ``commit_ts``.
        commit_ts: (C,) int64 ms, ascending, when it became part of the history.
        zone_minutes: (C,) int64, what the author's clock is ahead of UTC.
        offsets: (C + 1,) int64; the changes of commit c are ``[offsets[c], offsets[c + 1])``; none is empty.
        action: (E,) int8 codes into ``ACTION_NAMES``.
        path: (E,) int64 codes into ``paths``, the file's name after the change (before it, where it was deleted).
        old_path: (E,) int64 codes into ``paths``, the name before a rename; -1 elsewhere.
        paths: the distinct names, in bytes as git has them.
        is_capped: older commits were left out.
        n_clamped: commits with a date that cannot be: before 1970, after the present, or an author date after the
            commit date. The nearest possible one is taken.
    """

    hashes: list[str]
    authors: list[str]
    author_ts: npt.NDArray[np.int64]
    commit_ts: npt.NDArray[np.int64]
    zone_minutes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    action: npt.NDArray[np.int8]
    path: npt.NDArray[np.int64]
    old_path: npt.NDArray[np.int64]
    paths: list[bytes]
    is_capped: bool
    n_clamped: int


def read_log(checkout: Path, max_commits: int, clock: Clock = system_clock) -> CommitLog:
    """The newest ``max_commits`` commits that HEAD reaches, merges and empty commits left out.

    Raises:
        InputError: git is missing; ``checkout`` is no git repository, shallow, without a commit, or unreadable.
    """
    if max_commits < 1:
        raise InputError(f"max_commits={max_commits}; it must be 1 or more")
    if not checkout.is_dir():
        raise InputError(f"{checkout} is not a folder; pass a git checkout with --git")
    found, answer = _ask(checkout, "rev-parse", "--is-shallow-repository")
    if not found:
        raise InputError(f"{checkout} is no git repository that git can read ({answer}); pass a checkout with --git")
    if answer == "true":
        raise InputError(f"{checkout} is a shallow clone, its history is cut off; run there: git fetch --unshallow")
    if not _ask(checkout, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")[0]:
        raise InputError(f"{checkout} has no commit yet; commit something, or pass another checkout with --git")
    # A clone without contents cannot tell how alike two files are, and must not fetch them one by one.
    partial, _ = _ask(checkout, "config", "--get-regexp", r"^(extensions\.partialclone|remote\..*\.promisor)$")
    options = ["--no-merges", "--name-status", "-z", "--no-show-signature", "--no-notes", "--no-relative"]
    limits = [f"--max-count={max_commits + 1}", f"--find-renames={100 if partial else 50}%", "-l1000"]
    settings = ["-c", "log.showRoot=true", "-c", "i18n.logOutputEncoding=UTF-8"]
    command = _git(checkout, *settings, "log", *options, *limits, "--date=raw", f"--format={_FORMAT}", "HEAD", "--")
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=_environment()) as process:
            assert process.stdout is not None
            parsed = _Parser()
            parsed.read(_tokens(process.stdout))
        if process.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise InputError(f"git log of {checkout} failed ({said[-1]}); run there: git fsck")
    return parsed.log(max_commits, clock())


def _git(checkout: Path, *arguments: str) -> list[str]:
    return ["git", "-C", str(checkout), "--no-pager", *arguments]


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
    return kept | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}


def _ask(checkout: Path, *arguments: str) -> tuple[bool, str]:
    """Whether git agreed, and the first line of what it said."""
    try:
        done = subprocess.run(
            _git(checkout, *arguments), capture_output=True, env=_environment(), check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise InputError("git was not found on the PATH, and --git needs it; install git") from None
    said = (done.stderr if done.returncode else done.stdout).decode(errors="replace").strip()
    return done.returncode == 0, (said.splitlines() or [""])[0]


def _tokens(stream: IO[bytes]) -> Iterator[bytes]:
    """What stands between NULs, without reading the whole stream into memory."""
    rest = b""
    while chunk := stream.read(_CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\0")
        yield from whole
    if rest:
        yield rest


class _Parser:
    """Collects commits, newest first."""

    def __init__(self) -> None:
        self.headers: list[bytes] = []
        self.counts: list[int] = []
        self.action: list[int] = []
        self.path: list[int] = []
        self.old_path: list[int] = []
        self.code_of: dict[bytes, int] = {}

    def read(self, tokens: Iterable[bytes]) -> None:
        code_of = self.code_of
        stream = iter(tokens)
        for token in stream:
            if token.startswith(_HEADER):
                self.headers.append(token)
                self.counts.append(0)
                continue
            status = token.lstrip(b"\n")[:1]
            if not status:
                continue
            code = _CODES.get(status, _OTHER)
            old = code_of.setdefault(next(stream), len(code_of)) if status in (b"R", b"C") else -1
            self.path.append(code_of.setdefault(next(stream), len(code_of)))
            self.old_path.append(old if code == RENAME else -1)
            self.action.append(code)
            self.counts[-1] += 1

    def log(self, max_commits: int, now_ms: int) -> CommitLog:
        """The newest ``max_commits``, oldest first, dates put right."""
        is_capped = len(self.headers) > max_commits
        counts = np.array(self.counts, np.int64)
        starts = np.cumsum(counts) - counts
        kept = np.flatnonzero(counts[:max_commits])[::-1]
        parts = [self.headers[c][1:].split(_HEADER, 4) for c in kept.tolist()]
        dates = np.array([[_seconds(p[1] or p[2]), _seconds(p[2])] for p in parts], np.int64).reshape(-1, 2) * 1000
        commit_ts = np.clip(dates[:, 1], 0, now_ms)
        author_ts = np.clip(dates[:, 0], 0, commit_ts)
        n_clamped = int(((commit_ts != dates[:, 1]) | (author_ts != dates[:, 0])).sum())
        order = np.argsort(commit_ts, kind="stable")
        rows, offsets = ranges_index(starts[kept[order]], starts[kept[order]] + counts[kept[order]])
        ordered = [parts[i] for i in order.tolist()]
        return CommitLog(
            hashes=[p[0].decode("ascii") for p in ordered],
            authors=[_author(p[3], p[4]) for p in ordered],
            author_ts=author_ts[order],
            commit_ts=commit_ts[order],
            zone_minutes=np.array([_zone(p[1]) for p in ordered], np.int64),
            offsets=offsets,
            action=np.array(self.action, np.int8)[rows],
            path=np.array(self.path, np.int64)[rows],
            old_path=np.array(self.old_path, np.int64)[rows],
            paths=list(self.code_of),
            is_capped=is_capped,
            n_clamped=n_clamped,
        )


def _seconds(date: bytes) -> int:
    """``b"1700000300 +0200"`` -> 1700000300. What git could not read, or what has no place in 64 bits of milliseconds,
    is before 1970."""
    try:
        seconds = int(date.split(b" ")[0])
    except ValueError:
        return -1
    return seconds if -(1 << 40) < seconds < 1 << 40 else -1


def _zone(date: bytes) -> int:
    """``b"1700000300 +0530"`` -> 330; 0 where there is none."""
    sign, digits = date[-5:-4], date[-4:]
    if sign not in (b"+", b"-") or not digits.isdigit():
        return 0
    minutes = int(digits[:2]) * 60 + int(digits[2:])
    return minutes if sign == b"+" else -minutes


def _author(email: bytes, name: bytes) -> str:
    """A user id: 1 to 255 bytes of UTF-8. Bytes that are not UTF-8 become escapes, so that two authors stay two."""
    text = (email.strip().lower() or b"(" + name.strip() + b")").decode("utf-8", "backslashreplace")
    return text.encode()[:255].decode("utf-8", "ignore")
