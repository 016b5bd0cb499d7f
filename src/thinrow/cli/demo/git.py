"""The history of any git checkout as events, requests and candidates.

- *Users* are authors, by e-mail address (as .mailmap has it). *Events* are changes of files: one for each file of each
  commit. An event happens at the author date and becomes known at the commit date: where a patch waited for months, its
  events are late by months.
- A *request* is a commit whose author has a history by then, and asks: which files will it touch? It is made when the
  commit arrives, at its author date, and sees what that author did before (strictly) and was known.
- *Candidates* are files that exist as far as is known: those that the commit touches (label 1), and a seeded sample of
  others. New files cannot be guessed and are no candidates.

Worked example: Ann writes commit 1 on Monday, commit 2 on Tuesday; 2 is taken on Wednesday, 1 on Friday. The request of
commit 2 sees nothing of commit 1, which is not known yet; that of commit 1 sees nothing of commit 2, which she wrote
later. Her next request sees both, in the order in which she wrote them.
"""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.cli.demo.data import DemoData, Requests, Words, cross_fields, cut_at_share
from thinrow.cli.demo.findings import count, percent
from thinrow.cli.demo.git_log import ACTION_NAMES, CommitLog, read_log
from thinrow.cli.demo.git_tree import Change, KnownFiles
from thinrow.core.clock import Clock, system_clock
from thinrow.core.ragged import offsets_of
from thinrow.core.units import DAY_MS, HOUR_MS, MINUTE_MS
from thinrow.core.users import as_users
from thinrow.core.wrap import mix64_words
from thinrow.jagged import Column, Jagged
from thinrow.schema import ColumnSpec, EventSchema, ExampleSchema, FieldSpec, Trait

#: Commits that are replayed unless more are asked for, the newest.
MAX_COMMITS = 20_000
#: A request needs so many visible events.
MIN_EVENTS = 5
#: A request has at least so many candidates, at least so many that were not touched, at most so many that were.
MIN_CANDIDATES, MIN_OTHERS, MAX_TOUCHED = 20, 10, 20
#: Where all histories together would hold more events than this, requests are kept by lot: every fat row is a copy.
MAX_HISTORY_EVENTS = 100_000_000
#: A change within an hour of the request counts as its outcome; here it follows at once.
OUTCOME_WINDOW_MS = HOUR_MS
_STEPS = 365

EVENT_SCHEMA = EventSchema(
    columns=(
        ColumnSpec(1, "file_id", Trait.ID, "int32", "item"),
        ColumnSpec(2, "folder", Trait.CATEGORICAL, "string", "item"),
        ColumnSpec(3, "top_folder", Trait.CATEGORICAL, "string", "item"),
        ColumnSpec(4, "extension", Trait.CATEGORICAL, "string", "item"),
        ColumnSpec(5, "action", Trait.CATEGORICAL, "string", "item"),
        ColumnSpec(6, "path", Trait.ID, "string", "path"),
        ColumnSpec(7, "commit_id", Trait.ID, "int64", "commit"),
        ColumnSpec(8, "commit_files", Trait.NUMERIC, "int32", "commit"),
        ColumnSpec(9, "hour", Trait.CATEGORICAL, "int8", "commit"),
    ),
    user_column="author",
    time_column="authored",
    user_kind="string",
)

CROSS_NAMES = ("touched_before", "days_since_touched", "times_touched", "folder_count")
#: Candidate fields as they stand when the commit arrives: ``changes`` of the file by anybody, days since the last one.
ITEM_FIELDS = (
    FieldSpec("file_id", "int64"),
    FieldSpec("folder", "string"),
    FieldSpec("top_folder", "string"),
    FieldSpec("extension", "string"),
    FieldSpec("changes", "int32"),
    FieldSpec("days_since_change", "int32"),
)

EXAMPLE_SCHEMA = ExampleSchema(
    context=(FieldSpec("hour", "int8"), FieldSpec("weekday", "int8"), FieldSpec("email_domain", "string")),
    candidates=ITEM_FIELDS + cross_fields(CROSS_NAMES),
    item="file_id",
    outcomes=(("touched", OUTCOME_WINDOW_MS),),
)


def load_git(checkout: Path, max_commits: int | None = None, seed: int = 0, *, clock: Clock = system_clock) -> DemoData:
    """Read the history of ``checkout`` and build its events and requests.

    Args:
        max_commits: the newest so many commits (1 or more); None for ``MAX_COMMITS``.
        seed: of the sample of candidates.

    Raises:
        InputError: as ``read_log``.
    """
    log = read_log(checkout, MAX_COMMITS if max_commits is None else max_commits, clock)
    seen, n_late = _count_seen(log)
    asks, kept_share = _choose(log, seen, seed)
    walk = _Walk(log, seed)
    for commit in range(len(log.hashes)):
        walk.arrive(commit, bool(asks[commit]))
    users = as_users(log.authors, "string")
    lengths = np.diff(log.offsets)
    requests = _requests(log, walk)
    step_ms, steps = _steps(log.commit_ts)
    name = checkout.resolve().name.removesuffix(".git")
    return DemoData(
        event_schema=EVENT_SCHEMA,
        example_schema=EXAMPLE_SCHEMA,
        users=users[np.repeat(np.arange(len(users)), lengths)],
        event_ts=np.repeat(log.author_ts, lengths),
        columns=_columns(log, np.array(walk.file, np.int32)),
        bundle_offsets=log.offsets,
        arrival_ts=log.commit_ts,
        requests=requests,
        item="file_id",
        group="folder",
        cross=CROSS_NAMES,
        outcome="touched",
        step_ms=step_ms,
        cut_ms=cut_at_share(log.commit_ts[requests.bundle]),
        words=Words(
            source=f"git history of {name or 'a repository'}, {count(len(log.hashes))} commits",
            events="changes of files",
            users="authors",
            steps=steps,
            notes=_notes(log, n_late, kept_share),
        ),
    )


def _count_seen(log: CommitLog) -> tuple[npt.NDArray[np.int64], int]:
    """(C,) events that each commit's request sees, and how many events are late: a later one of their author was
    known before them."""
    times: dict[str, list[int]] = {}
    seen = np.zeros(len(log.hashes), np.int64)
    n_late = 0
    lengths = np.diff(log.offsets).tolist()
    for i, (author, ts, n) in enumerate(zip(log.authors, log.author_ts.tolist(), lengths, strict=True)):
        known = times.setdefault(author, [])
        seen[i] = bisect.bisect_left(known, ts)
        at = bisect.bisect_right(known, ts)
        n_late += n if at < len(known) else 0
        known[at:at] = [ts] * n
    return seen, n_late


def _choose(log: CommitLog, seen: npt.NDArray[np.int64], seed: int) -> tuple[npt.NDArray[np.bool_], float]:
    """(C,) which commits may be requests, and the share of those with a history that was kept."""
    asks = seen >= MIN_EVENTS
    share = min(1.0, MAX_HISTORY_EVENTS / max(int(seen[asks].sum()), 1))
    if share < 1:
        word = np.array([int(h[:16], 16) for h in log.hashes], np.uint64)
        lot = mix64_words(word ^ mix64_words(np.array([seed], np.uint64)))
        asks &= lot < np.uint64(share * 2**64)
    return asks, share


@dataclass(slots=True)
class _Picked:
    """Candidates of all requests one after another."""

    commit: list[int] = field(default_factory=list)
    n: list[int] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    changed_ms: list[int] = field(default_factory=list)
    touched: list[bool] = field(default_factory=list)


class _Walk:
    """Commits in order of arrival: the file of each change, and the candidates of each request."""

    def __init__(self, log: CommitLog, seed: int) -> None:
        self._log, self._seed = log, seed
        self._columns = log.action.tolist(), log.path.tolist(), log.old_path.tolist()
        self._offsets, self._arrival = log.offsets.tolist(), log.commit_ts.tolist()
        self._tree = KnownFiles(len(log.paths))
        self.file: list[int] = []
        self.picked = _Picked()

    def arrive(self, commit: int, asks: bool) -> None:
        rows = slice(self._offsets[commit], self._offsets[commit + 1])
        actions, paths, old_paths = (c[rows] for c in self._columns)
        changes = self._tree.resolve(actions, paths, old_paths)
        if asks:
            self._ask(commit, changes)
        self._tree.apply(changes, self._arrival[commit])
        self.file += [c.file for c in changes]

    def _ask(self, commit: int, changes: list[Change]) -> None:
        """A request, where the commit touches a file that is known and there are others to choose from."""
        tree, picked = self._tree, self.picked
        touched = sorted(c.file for c in changes if c.was_known)
        if not touched or len(tree) == len(touched):
            return
        # The draw depends on the seed, the commit and the tree alone.
        rng = random.Random(f"{self._seed}/{self._log.hashes[commit]}")
        shown = touched if len(touched) <= MAX_TOUCHED else rng.sample(touched, MAX_TOUCHED)
        others = tree.sample(rng, max(MIN_CANDIDATES - len(shown), MIN_OTHERS), set(touched))
        files = sorted([*shown, *others])
        picked.commit.append(commit)
        picked.n.append(len(files))
        picked.file += files
        picked.path += [tree.path[f] for f in files]
        picked.changes += [tree.changes[f] for f in files]
        picked.changed_ms += [tree.changed_ms[f] for f in files]
        positive = set(shown)
        picked.touched += [f in positive for f in files]


def _columns(log: CommitLog, file: npt.NDArray[np.int32]) -> dict[str, Column]:
    lengths = np.diff(log.offsets)
    actions = Column(log.action.astype(np.int32), None, pa.array(ACTION_NAMES))
    fixed: dict[str, npt.NDArray[Any]] = {
        "commit_id": _commit_ids(log),
        "commit_files": lengths.astype(np.int32),
        "hour": (_local_hours(log) % 24).astype(np.int8),
    }
    columns = {"file_id": Column(file), "action": actions}
    columns |= {n: c.take(log.path) for n, c in _path_columns(log).items()}
    columns |= {n: Column(np.repeat(v, lengths)) for n, v in fixed.items()}
    return {spec.name: columns[spec.name] for spec in EVENT_SCHEMA.columns}


def _path_columns(log: CommitLog) -> dict[str, Column]:
    """What a path says, for each of ``log.paths``. Bytes that are not UTF-8 become escapes."""
    paths = [p.decode("utf-8", "backslashreplace") for p in log.paths]
    folders = [p.rpartition("/")[0] for p in paths]
    files = [p.rpartition("/")[2] for p in paths]
    texts = {
        "path": paths,
        "folder": folders,
        "top_folder": [f.partition("/")[0] for f in folders],
        # Of ".gitignore" the whole name is the stem.
        "extension": [f[1:].rpartition(".")[2].lower() if "." in f[1:] else "" for f in files],
    }
    return {n: Column.from_arrow(pa.array(v, pa.string()), "string") for n, v in texts.items()}


def _requests(log: CommitLog, walk: _Walk) -> Requests:
    picked = walk.picked
    commit = np.array(picked.commit, np.int64)
    offsets = offsets_of(picked.n)
    arrival = np.repeat(log.commit_ts[commit], picked.n)
    columns = {
        "file_id": Column(np.array(picked.file, np.int64)),
        "changes": Column(np.array(picked.changes, np.int32)),
        "days_since_change": Column(((arrival - np.array(picked.changed_ms, np.int64)) // DAY_MS).astype(np.int32)),
    }
    columns |= {n: c.take(np.array(picked.path, np.int64)) for n, c in _path_columns(log).items()}
    users = as_users(log.authors, "string")[commit]
    hours = _local_hours(log)[commit]
    domains = pa.array([u.rpartition("@")[2] if "@" in u else "" for u in users], pa.string())
    context = {
        "hour": Column((hours % 24).astype(np.int8)),
        # Day 0 of 1970 was a Thursday; Monday is 0.
        "weekday": Column(((hours // 24 + 3) % 7).astype(np.int8)),
        "email_domain": Column.from_arrow(domains, "string"),
    }
    return Requests(
        request_id=_commit_ids(log)[commit],
        users=users,
        request_ts=log.author_ts[commit],
        bundle=commit,
        context=context,
        candidates={f.name: Jagged(columns[f.name], offsets) for f in ITEM_FIELDS},
        labels={"touched": Jagged(Column(np.array(picked.touched, np.int8)), offsets)},
    )


def _commit_ids(log: CommitLog) -> npt.NDArray[np.int64]:
    """The first 15 hexadecimal digits of each hash, so that ``git show`` finds the commit of a request."""
    return np.array([int(h[:15], 16) for h in log.hashes], np.int64)


def _local_hours(log: CommitLog) -> npt.NDArray[np.int64]:
    """(C,) hours since 1970 on the author's clock."""
    return (log.author_ts // MINUTE_MS + log.zone_minutes) // 60


def _steps(commit_ts: npt.NDArray[np.int64]) -> tuple[int, str]:
    """About a year's days of steps over the time of most commits: a step's length, and the plural of its name."""
    if not len(commit_ts):
        return DAY_MS, "days"
    # The first and last in a hundred may be stray dates.
    margin = len(commit_ts) // 100
    span = int(commit_ts[len(commit_ts) - 1 - margin] - commit_ts[margin])
    unit, name = (DAY_MS, "days") if span >= 60 * DAY_MS else (HOUR_MS, "hours")
    n = max(1, -(-span // (_STEPS * unit)))
    return n * unit, name if n == 1 else f"steps of {n} {name}"


def _notes(log: CommitLog, n_late: int, kept_share: float) -> tuple[str, ...]:
    n = int(log.offsets[-1])
    notes = [
        "Events happen at the author date and become known at the commit date; "
        f"{count(n_late)} of them ({percent(n_late / max(n, 1))}) came after a later one of their author."
    ]
    if log.is_capped:
        notes.append(f"These are the newest {count(len(log.hashes))} commits; --max-commits takes more.")
    if kept_share < 1:
        notes.append(f"{percent(kept_share)} of the requests were kept, by lot: fat rows of all would be too large.")
    if log.n_clamped:
        notes.append(
            f"Commits with a date that cannot be (before 1970, in the future, or of the commit before the author's): "
            f"{count(log.n_clamped)}; the nearest possible one was taken."
        )
    return tuple(notes)
