"""A training run across an erasure: the rows of the erased user are missing, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinrow.core.errors import Erased, Expired
from thinrow.dpp import BatchBudget, loader
from thinrow.dpp.batch import Batch
from thinrow.examples.erase import erase_everywhere
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.history.erase import EventsOf, Retention
from thinrow.history.missing import COMPLETE, STATUS_ERASED, STATUS_EXPIRED
from thinrow.testing.world import EXAMPLES, World, make_world

OPTIONS: dict[str, Any] = {"batch_rows": 16, "base_rows": 8, "block": 2, "threads": 2, "seed": 3}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, users=6, days=10)


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    """Each example whole: id, user, its history, candidates and labels."""
    columns = [batch.histories.to_jagged(n).to_arrow().to_pylist() for n in ("event_ts", "arrival", "item", "brand")]
    items = [batch.candidates["item"].to_arrow().to_pylist(), batch.labels["buy"].to_arrow().to_pylist()]
    return list(zip(batch.request_id.tolist(), batch.users.tolist(), *map(_hashable, columns + items), strict=True))


def _hashable(rows: list[list[Any]]) -> list[tuple[Any, ...]]:
    return [tuple(r) for r in rows]


def also(world: World, table: Any, schema: Any) -> Any:
    folder = world.store_path.parent
    logs = [ImpressionLog(folder / "shown", schema, EXAMPLES)], [OutcomeLog(folder / "bought")]
    return lambda generation, whole: erase_everywhere(
        generation, whole, impressions=logs[0], outcomes=logs[1], tables=[table]
    )


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_running_and_a_resumed_loader_miss_the_erased_rows_alone(world: World, at: int) -> None:
    with world.store() as store, world.table() as table:
        snapshot = table.snapshot_id
        want = [rows_of(b) for b in loader(store, table, epochs=2, **OPTIONS)]
        running = loader(store, table, epochs=2, on_missing="skip", **OPTIONS)
        batches = iter(running)
        got = [rows_of(next(batches)) for _ in range(at)]
        state = running.state_dict()
        resumed = loader(store, table, snapshot_id=snapshot, epochs=2, on_missing="skip", **OPTIONS)
        assert got == want[:at]
        (victim,) = {r[1] for r in want[4]} & {want[4][0][1]}
        store.erase([victim], also=also(world, table, store.schema), grace_s=0)
        left = [[r for r in batch if r[1] != victim] for batch in want]
        assert sum(map(len, left)) < sum(map(len, want))
        # What was fetched before the erasure may still come; nothing else may differ.
        rest = [rows_of(b) for b in batches]
        assert [[r for r in b if r[1] != victim] for b in rest] == left[at:]
        assert rest[-1] == left[-1]
        resumed.load_state_dict(state)
        assert [rows_of(b) for b in resumed] == left[at:]
        again = loader(store, table, snapshot_id=snapshot, epochs=2, on_missing="skip", **OPTIONS)
        again.load_state_dict(state)
        assert [rows_of(b) for b in again] == left[at:]
        assert [b.t for b in again] == []
        failing = loader(store, table, snapshot_id=snapshot, epochs=1, **OPTIONS)
        with pytest.raises(Erased, match="were erased since; pass on_missing='skip'"):
            list(failing)
        fresh = loader(store, table, epochs=1, **OPTIONS)
        assert sorted(r[0] for b in fresh for r in rows_of(b)) == sorted({r[0] for b in left for r in b})


def test_examples_that_saw_an_erased_event_resolve_by_policy(world: World) -> None:
    with world.store() as store, world.table() as table:
        want = [rows_of(b) for b in loader(store, table, **OPTIONS)]
        user = want[0][0][1]
        store.erase(events=[EventsOf(user, arrivals=[1, 2, 3])], grace_s=0)
        with pytest.raises(Erased, match=f"of user {user} at"):
            list(loader(store, table, **OPTIONS))
        skipped = list(loader(store, table, on_missing="skip", **OPTIONS))
        touched = {r[0] for b in want for r in b if r[1] == user and {1, 2, 3} & set(r[3])}
        assert touched
        assert [rows_of(b) for b in skipped] == [[r for r in b if r[0] not in touched] for b in want]
        assert all((b.status == COMPLETE).all() for b in skipped)
        short = list(loader(store, table, on_missing="shorten", **OPTIONS))
        for batch, whole in zip(short, want, strict=True):
            assert batch.request_id.tolist() == [r[0] for r in whole]
            assert batch.status.tolist() == [STATUS_ERASED if r[0] in touched else COMPLETE for r in whole]
            arrivals = [[a for a in r[3] if r[1] != user or a > 3] for r in whole]
            assert batch.histories.to_jagged("arrival").to_arrow().to_pylist() == arrivals


def test_expired_examples(world: World) -> None:
    with world.store() as store, world.table() as table:
        want = [rows_of(b) for b in loader(store, table, **OPTIONS)]
        store.retain(Retention(max_events=20), grace_s=0)
        with pytest.raises(Expired):
            list(loader(store, table, **OPTIONS))
        short = list(loader(store, table, on_missing="shorten", **OPTIONS))
        assert {s for b in short for s in b.status.tolist()} == {STATUS_EXPIRED}
        assert [b.request_id.tolist() for b in short] == [[r[0] for r in b] for b in want]
        assert all(len(b) == 0 for b in loader(store, table, on_missing="skip", **OPTIONS))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"since_ms": 3 * 86_400_000}, "which of them a filter kept"),
        ({"batch_rows": None, "budget": BatchBudget(limit=100)}, "how a budget had cut them"),
    ],
)
def test_a_filtered_or_budgeted_reader_goes_on_while_it_runs(world: World, changes: dict[str, Any], why: str) -> None:
    with world.store() as store, world.table() as table:
        options = OPTIONS | changes
        if "since_ms" in changes:
            options["since_ms"] += world.start_ms
        snapshot = table.snapshot_id
        want = [rows_of(b) for b in loader(store, table, **options)]
        running = loader(store, table, on_missing="skip", **options)
        victim = want[-1][-1][1]
        store.erase([victim], also=also(world, table, store.schema), grace_s=0)
        assert [rows_of(b) for b in running] == [[r for r in b if r[1] != victim] for b in want]
        with pytest.raises(Erased, match="cannot be told " + why):
            loader(store, table, snapshot_id=snapshot, **options)
        assert np.isin(victim, store.users()).item() is False
