"""The files that exist as far as the commits that arrived so far tell, and draws from them.

A file keeps its number through renames; a path that is added again is another file. Commits arrive from all branches,
so a change may name a path that is not known (it gets a new file) or rename a file over another (which is then gone).
Worked example, paths by letter::

    add a, add b            a is file 0, b is file 1
    rename a to c, add a    c is file 0, a is file 2
    delete b                file 1 is gone
    modify b                on another branch: b is file 3
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from thinrow.cli.demo.git_log import DELETE, RENAME

#: The changes before now that are recent.
RECENT_CHANGES = 1_000


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a commit: its action, path and path before a rename (codes), its ``file``, and whether that file
    ``was_known`` before the commit."""

    action: int
    path: int
    old_path: int
    file: int
    was_known: bool


class KnownFiles:
    """The tree so far.

    Attributes:
        path: file -> code of its path; where it is gone, the last one.
        changes: file -> number of changes so far.
        changed_ms: file -> arrival of the newest of them, ms.
    """

    def __init__(self, n_paths: int) -> None:
        self.path: list[int] = []
        self.changes: list[int] = []
        self.changed_ms: list[int] = []
        self._file_at = [-1] * n_paths
        # The files that exist, in no order, and the place of each; -1 where it does not exist.
        self._existing: list[int] = []
        self._place: list[int] = []
        self._recent: list[int] = []

    def __len__(self) -> int:
        return len(self._existing)

    def resolve(self, actions: Sequence[int], paths: Sequence[int], old_paths: Sequence[int]) -> list[Change]:
        """Which files a commit changes; new files get their numbers. The tree stays as it is until ``apply``."""
        moved = set(old_paths)
        taken: set[int] = set()
        found = []
        for action, path, old_path in zip(actions, paths, old_paths, strict=True):
            file = self._file_at[old_path] if action == RENAME else -1
            if file < 0 and path not in moved:
                file = self._file_at[path]
            was_known = file >= 0 and file not in taken
            if not was_known:
                file = self._new(path)
            taken.add(file)
            found.append(Change(action, path, old_path, file, was_known))
        return found

    def apply(self, commit: Sequence[Change], arrival_ms: int) -> None:
        """The commit of ``resolve`` arrives."""
        for c in commit:
            left = c.old_path if c.action == RENAME else c.path if c.action == DELETE else -1
            if left >= 0 and self._file_at[left] == c.file:
                self._file_at[left] = -1
            if c.action == DELETE:
                self._remove(c.file)
        for c in commit:
            self.changes[c.file] += 1
            self.changed_ms[c.file] = arrival_ms
            if c.action == DELETE:
                continue
            displaced = self._file_at[c.path]
            if displaced >= 0 and displaced != c.file:
                self._remove(displaced)
            self._file_at[c.path] = c.file
            self.path[c.file] = c.path
            if self._place[c.file] < 0:
                self._place[c.file] = len(self._existing)
                self._existing.append(c.file)
            self._recent.append(c.file)

    def sample(self, rng: random.Random, n: int, touched: set[int]) -> list[int]:
        """``n`` existing files that are not ``touched`` (existing ones too), all of them where there are fewer: half
        are drawn from the recent changes, so often-changed files more often, the rest alike from all files."""
        found: set[int] = set()
        n_recent = min(len(self._recent), RECENT_CHANGES)
        for _ in range(2 * n if n_recent else 0):
            if len(found) >= n // 2:
                break
            file = self._recent[-1 - rng.randrange(n_recent)]
            if self._place[file] >= 0 and file not in touched:
                found.add(file)
        n_free = len(self._existing) - len(touched) - len(found)
        if n_free <= n - len(found) or 4 * n_free < len(self._existing):
            free = sorted(f for f in self._existing if f not in touched and f not in found)
            return [*found, *rng.sample(free, min(n - len(found), len(free)))]
        while len(found) < n:
            file = self._existing[rng.randrange(len(self._existing))]
            if file not in touched:
                found.add(file)
        return list(found)

    def _new(self, path: int) -> int:
        self.path.append(path)
        self.changes.append(0)
        self.changed_ms.append(0)
        self._place.append(-1)
        return len(self.path) - 1

    def _remove(self, file: int) -> None:
        place = self._place[file]
        if place < 0:
            return
        last = self._existing.pop()
        if last != file:
            self._existing[place] = last
            self._place[last] = place
        self._place[file] = -1
