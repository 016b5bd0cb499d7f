"""How often a history that is bounded by event time alone is not the one that was seen; and ours beside it.

Events are appended as they arrive, and requests snapshot users at 1,000 times on the way. When all is in the archive,
every request is rebuilt twice: by our version, and by the published rule (VeltAIR: start_ts, end_ts and length are
logged; the store is scanned by event time within these bounds, both inclusive, and the newest ``length`` events are
kept). What was seen is worked out from the input: ``event_ts < T``, arrived by T, not corrected by T.

- ``as_is``: the data. ``restated``: one event in fifty is restated within a week, at its own event time.
- ``requests``, ``users``: share with a mismatch (of users: in any of their requests). ``late``, ``tied``, ``restated``:
  share of requests with such a cause; one may have several. Late: an event within the bounds that arrived after the
  request. Tied: one at the very time of a bound. Restated: a correction, or what one hid.
- ``unnoticed``: share of requests whose length fits and whose events are others. ``newest_256``: share of requests
  whose newest 256 events are others. ``inline_day``: share of requests with a mismatch where what arrived since
  midnight (UTC) is logged inline, exact, and the rule is for the rest.

Worked example: seen are events at times 10 and 20; one at 15 arrives later. The rule finds 10, 15, 20 within
[10, 20], three where two were logged: a mismatch, and late.

Ratios: requests that come back exact, ours over the rule's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.datagen.datasets import Histories, Ints, Work, load
from bench.harness import Options, Result
from thinrow.core.units import DAY_MS, HOUR_MS, NEVER
from thinrow.history.reconstruct import reconstruct
from thinrow.history.requests import RequestBatch
from thinrow.history.store import HistoryStore
from thinrow.schema import ColumnSpec, EventSchema, Trait

_TIMES, _USERS_A_TIME, _COMPACTIONS, _CHUNK = 1_000, 20, 50, 500
_SCHEMA = EventSchema(
    (ColumnSpec(1, "row", Trait.ID, "int64", "item"),),
    event_id_column="event_id",
    event_id_dtype="int64",
    supersedes_column="supersedes",
)


@dataclass(frozen=True, slots=True)
class _Log:
    """(E,) events in order of arrival. ``target``: the row that an event restates, -1 where none; ``hidden_at``: when
    its correction arrives, NEVER where none does. ``rows_of``: of each user, in order of (event_ts, arrival)."""

    user: Ints
    event_ts: Ints
    arrival_ts: Ints
    target: Ints
    hidden_at: Ints
    rows_of: list[Ints]

    def seen(self, user: int, ts: int) -> Ints:
        """Rows that a request sees, oldest first."""
        mine = self.rows_of[user]
        return mine[(self.event_ts[mine] < ts) & (self.arrival_ts[mine] <= ts) & (self.hidden_at[mine] > ts)]

    def ruled(self, seen: Ints, user: int) -> Ints:
        """Rows that the published rule finds in the end, where ``seen`` were seen."""
        if not len(seen):
            return seen
        mine = self.rows_of[user]
        mine = mine[self.hidden_at[mine] == NEVER]
        times = self.event_ts[mine]
        begin = np.searchsorted(times, self.event_ts[seen[0]])
        end = np.searchsorted(times, self.event_ts[seen[-1]], side="right")
        found: Ints = mine[begin:end]
        return found


def run(options: Options) -> Result:
    """20,000 requests of each variant; with ``quick`` 400."""
    n_times = 20 if options.quick else _TIMES
    with Work(options.work) as work:
        data = load(options.data, work, quick=options.quick, git_file=options.git_file)
        parameters = {"data": data.name, "events": data.n_events, "requests": n_times * _USERS_A_TIME}
        result = Result("published_rule", parameters)
        for variant, share in (("as_is", 0.0), ("restated", 0.02)):
            log = _log(data, share)
            users, times = _requests(log, n_times)
            figures = _ruled(log, users, times)
            with Work(None) as folder, HistoryStore.create(folder.path / "store", _SCHEMA, 4, sync=False) as store:
                figures["thinrow_requests"] = _ours(log, users, times, store)
            result.figures[variant] = {k: round(v, 5) for k, v in figures.items()}
            result.ratios[f"vs_published_rule.{variant}"] = (1 - figures["thinrow_requests"]) / max(
                1 - figures["requests"], 1 / len(users)
            )
    return result


def _log(data: Histories, restated: float) -> _Log:
    """The data in order of arrival, a share of it restated; where it has no times of arrival, a seventh is late."""
    rng = np.random.default_rng(3)
    user, event_ts, n = data.users(), data.columns["event_ts"], data.n_events
    arrival_ts = event_ts if data.arrival_ts is None else data.arrival_ts
    if (arrival_ts <= event_ts).all():
        arrival_ts = event_ts + np.where(rng.random(n) < 1 / 7, rng.exponential(DAY_MS, n), 0).astype(np.int64)
    again = np.sort(rng.choice(n, int(n * restated), replace=False))
    user, event_ts = np.concatenate([user, user[again]]), np.concatenate([event_ts, event_ts[again]])
    arrival_ts = np.concatenate([arrival_ts, arrival_ts[again] + rng.integers(1, 7 * DAY_MS, len(again))])
    target = np.concatenate([np.full(n, -1), again])
    order = np.lexsort((np.arange(len(user)), arrival_ts))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    user, event_ts, arrival_ts, target = user[order], event_ts[order], arrival_ts[order], target[order]
    corrects = target >= 0
    target[corrects] = place[target[corrects]]
    hidden_at = np.full(len(user), NEVER)
    hidden_at[target[corrects]] = arrival_ts[corrects]
    by_user = np.lexsort((np.arange(len(user)), event_ts, user))
    rows_of = np.split(by_user, np.searchsorted(user[by_user], np.arange(1, data.n_users)))
    return _Log(user, event_ts, arrival_ts, target, hidden_at, rows_of)


def _requests(log: _Log, n_times: int) -> tuple[Ints, Ints]:
    """(X,) users and times, in order of time: at each time users whose events have just come, users of long histories,
    and any."""
    rng = np.random.default_rng(20)
    n, users, times = len(log.user), [], []
    at = np.sort(rng.choice(np.arange(n // 100, n), n_times, replace=False))
    for t in np.sort(log.arrival_ts[at] + rng.integers(0, HOUR_MS, n_times)).tolist():
        arrived = int(np.searchsorted(log.arrival_ts, t, side="right"))
        just, often = log.user[max(arrived - 500, 0) : arrived], log.user[rng.integers(0, arrived, 100)]
        third = _USERS_A_TIME // 3
        picked = [*rng.choice(just, third), *rng.choice(often, third)]
        users += picked + rng.integers(0, len(log.rows_of), _USERS_A_TIME - len(picked)).tolist()
        times += [t] * _USERS_A_TIME
    return np.array(users, np.int64), np.array(times, np.int64)


def _ruled(log: _Log, users: Ints, times: Ints) -> dict[str, float]:
    """Shares of mismatches of the published rule."""
    names = ("requests", "late", "tied", "restated", "unnoticed", "newest_256", "inline_day")
    wrong: dict[str, npt.NDArray[np.bool_]] = {n: np.zeros(len(users), np.bool_) for n in names}
    for i, (user, ts) in enumerate(zip(users.tolist(), times.tolist(), strict=True)):
        seen = log.seen(user, ts)
        found = log.ruled(seen, user)
        kept = found[max(len(found) - len(seen), 0) :]
        old = seen[log.arrival_ts[seen] <= ts - ts % DAY_MS]
        again = log.ruled(old, user)
        wrong["inline_day"][i] = bool(len(np.setdiff1d(again, seen)) + len(np.setdiff1d(old, again)))
        if np.array_equal(found, seen):
            continue
        extra, lost = np.setdiff1d(found, seen), np.setdiff1d(seen, found)
        edges = (log.event_ts[seen[0]], log.event_ts[seen[-1]])
        new = extra[log.target[extra] < 0]
        tied = np.isin(log.event_ts[new], edges)
        wrong["requests"][i] = True
        wrong["tied"][i], wrong["late"][i] = tied.any(), not tied.all()
        wrong["restated"][i] = len(lost) > 0 or len(new) < len(extra)
        wrong["unnoticed"][i] = len(found) == len(seen)
        wrong["newest_256"][i] = not np.array_equal(kept[-256:], seen[-256:])
    shares = {n: float(w.mean()) for n, w in wrong.items()}
    return shares | {"users": len(np.unique(users[wrong["requests"]])) / len(np.unique(users))}


def _ours(log: _Log, users: Ints, times: Ints, store: HistoryStore) -> float:
    """Share of requests that our versions, replayed and rebuilt from the last generation, give back otherwise."""
    done, parts, asked = 0, [], range(0, len(users), _USERS_A_TIME)
    every = max(len(asked) // _COMPACTIONS, 1)
    for k, begin in enumerate(asked):
        arrived = int(np.searchsorted(log.arrival_ts, times[begin], side="right"))
        store.append(_table(log, done, arrived))
        done = arrived
        if k % every == every - 1:
            store.compact()
        parts.append(store.snapshot(users[begin : begin + _USERS_A_TIME], int(times[begin])).requests)
    store.append(_table(log, done, len(log.user)))
    store.compact(full=True)
    logged, generation, wrong = RequestBatch.concat(parts), store.pin(), 0
    for begin in range(0, len(users), _CHUNK):
        rows = np.arange(begin, min(begin + _CHUNK, len(users)))
        got: Any = reconstruct(generation, logged.take(rows)).histories.to_jagged("row").to_arrow()
        for i, row in zip(rows.tolist(), got, strict=True):
            wrong += not np.array_equal(np.asarray(row.values), log.seen(int(users[i]), int(times[i])))
    return wrong / len(users)


def _table(log: _Log, begin: int, end: int) -> pa.Table:
    rows, target = np.arange(begin, end), log.target[begin:end]
    return pa.table(
        {
            "user_id": log.user[begin:end],
            "event_ts": log.event_ts[begin:end],
            "row": rows,
            "event_id": rows,
            "supersedes": pa.array(target, mask=target < 0),
        }
    )
