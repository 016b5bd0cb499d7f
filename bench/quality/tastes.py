"""Users with known tastes, shown long ago: a data set whose signal lies at a known distance in the history.

A user likes what is in category c with probability ``taste[c]``, drawn from Beta(1/2, 1/2). A history is made of blocks
of 64 events, each of one category, in an order of the user's own that comes round after 16 blocks. An event says which
item it was, at which place, and a verdict: its category and whether it was liked. A request shows an item of each
category, with the verdict "liked" of that category beside it; the item is liked with probability
``taste[c] * PLACES[place]``. So a match of verdicts counts what was liked, and one of categories how much there was.

So what there is to know of a category lies in one block, 0 to 15 blocks back. Worked example, the newest 64 events of a
user: they tell the taste of one category (two, in part), and of the 14 others nothing; 1,024 events tell all 16, each
from 64 events.

What can be known from the newest n events is the mean of the posterior, Beta(1/2 + liked, 1/2 + not liked); ``best``
has its normalized entropy and GAUC, which no model can beat but by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.examples.joiner import join_logs
from thinrow.examples.log import ImpressionLog, OutcomeLog
from thinrow.examples.records import Impressions, Outcomes
from thinrow.examples.table import ExampleTable
from thinrow.features import BagOfWords, Hash, MultiHash, Source
from thinrow.history.store import HistoryStore
from thinrow.recipes.data import DataSet
from thinrow.recipes.fields import ranking_plan, with_outputs
from thinrow.schema import EventSchema, ExampleSchema
from thinrow.training.metrics import gauc, normalized_entropy

CATEGORIES, BLOCK, PER_CATEGORY, STEP = 16, 64, 20, 16
WHOLE = CATEGORIES * BLOCK
PLACES = np.array([1.0, 0.7, 0.4])
EVERY_MS = 3_600_000
WINDOW_MS = 1_000
_START_MS = 1_000 * 86_400_000

EXAMPLES = ExampleSchema.of(
    context={"place": "string"},
    candidates={"item": "int64", "category": "string", "verdict": "string"},
    item="item",
    outcomes={"liked": WINDOW_MS},
)


def _data() -> DataSet:
    plan = ranking_plan(
        shared={"item": 1, "category": 2, "verdict": 3},
        candidate={},
        context={"place": 4},
        matched=("item", "category", "verdict"),
        seed=20,
    )
    beside = (("e", "history"), ("c", "cand"))
    argus = with_outputs(
        plan,
        e_place=Hash(Source("history.place"), seed=4),
        **{f"{p}_domain": Hash(Source(f"{d}.category"), 2, 41) for p, d in beside},
        **{f"{p}_item_twice": MultiHash(Source(f"{d}.item"), 1 << 16, (42, 43)) for p, d in beside},
        **{f"{p}_words": BagOfWords(Source(f"{d}.category"), 1 << 16, 44) for p, d in beside},
    )
    kinds = with_outputs(
        argus,
        e_feedback=Hash(Source("history.verdict"), 2, 45),
        e_kind=Hash(Source("history.place"), 2, 46),
        x_kind=Hash(Source("ctx.place"), 2, 46),
    )
    return DataSet(
        name="tastes",
        label="liked",
        rate=0.35,
        plan=plan,
        items=(("e_item", "c_item"), ("e_category", "c_category")),
        search=("e_category", "c_category"),
        argus_plan=argus,
        argus_items=(("e_item_twice", "c_item_twice"), ("e_words", "c_words")),
        contexts=(("e_place", "x_place"),),
        domain=("e_domain", "c_domain"),
        kinds_plan=kinds,
        kind=("e_kind", "x_kind"),
        feedback=("e_feedback", 2),
    )


TASTES = _data()


@dataclass(frozen=True, slots=True)
class _Drawn:
    """U users: events (U, L) with category, item, place and action; R requests of each, with C candidates."""

    category: npt.NDArray[np.int64]
    item: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    liked: npt.NDArray[np.bool_]
    asked_at: npt.NDArray[np.int64]
    asked_place: npt.NDArray[np.int64]
    shown: npt.NDArray[np.int64]
    label: npt.NDArray[np.bool_]


def _draw(users: int, requests: int, seed: int) -> _Drawn:
    rng = np.random.default_rng(seed)
    n = WHOLE + STEP * requests
    taste = rng.beta(0.5, 0.5, (users, CATEGORIES))
    turn = rng.permuted(np.tile(np.arange(CATEGORIES), (users, 1)), axis=1)
    shift = rng.integers(0, WHOLE, (users, 1))
    category = np.take_along_axis(turn, ((np.arange(n)[None] + shift) // BLOCK) % CATEGORIES, axis=1)
    item = category * PER_CATEGORY + rng.integers(0, PER_CATEGORY, category.shape)
    liked = rng.random(category.shape) < np.take_along_axis(taste, category, axis=1)
    asked_place = rng.integers(0, len(PLACES), (users, requests))
    shown = rng.permuted(np.broadcast_to(np.arange(CATEGORIES), (users, requests, CATEGORIES)), axis=2)
    chance = np.take_along_axis(taste[:, None], shown, axis=2) * PLACES[asked_place][..., None]
    label = rng.random(shown.shape) < chance
    shown = shown * PER_CATEGORY + rng.integers(0, PER_CATEGORY, shown.shape)
    place = rng.integers(0, len(PLACES), category.shape)
    return _Drawn(
        category, item, place, liked, WHOLE + STEP * np.arange(1, requests + 1), asked_place, shown, label
    )  # fmt: skip


def cut_ms(requests: int, held_out: int) -> int:
    """The time from which the newest ``held_out`` requests of each user are."""
    return _START_MS + (WHOLE + STEP * (requests - held_out + 1)) * EVERY_MS - 2 * WINDOW_MS


def best(users: int, requests: int, held_out: int, history: int, align: int, seed: int = 0) -> tuple[float, float]:
    """NE and GAUC, on the newest ``held_out`` requests of each user, of who knows everything but the tastes, and reads
    the newest ``history`` events, from a multiple of ``align`` on as a ``Projection`` does."""
    drawn = _draw(users, requests, seed)
    chance = np.empty((users, held_out, CATEGORIES))
    for i, r in enumerate(range(requests - held_out, requests)):
        at = int(drawn.asked_at[r])
        seen = slice(max(-(-(at - history) // align) * align, 0), at)
        for c in range(CATEGORIES):
            is_c = drawn.category[:, seen] == c
            liked = (is_c & drawn.liked[:, seen]).sum(1)
            taste = (0.5 + liked) / (1 + is_c.sum(1))
            where = drawn.shown[:, r] // PER_CATEGORY == c
            chance[:, i][where] = (taste * PLACES[drawn.asked_place[:, r]])[np.nonzero(where)[0]]
    logits, label = np.log(chance / (1 - chance)).reshape(-1), drawn.label[:, requests - held_out :].reshape(-1)
    user = np.repeat(np.arange(users), held_out * CATEGORIES)
    return normalized_entropy(logits, label), gauc(logits, label, user)


def make_tastes(folder: Path, users: int, requests: int, seed: int = 0) -> None:
    """``folder/store`` and ``folder/examples``, made as a service would: appends, snapshots, logs and a join."""
    drawn, ids = _draw(users, requests, seed), np.arange(users, dtype=np.int64)
    schema = EventSchema.infer(_events(drawn, slice(0, 0)).schema, user="user", time="ts")
    shown, liked = ImpressionLog(folder / "shown", schema, EXAMPLES), OutcomeLog(folder / "liked")
    with HistoryStore.create(folder / "store", schema, 4) as store:
        done = 0
        for r, at in enumerate(drawn.asked_at.tolist()):
            store.append(_events(drawn, slice(done, at)))
            if not done:
                store.compact()
            done, ask = at, _START_MS + at * EVERY_MS - WINDOW_MS
            request = ids * requests + r
            category = [_names("category", row // PER_CATEGORY) for row in drawn.shown[:, r]]
            verdict = [[f"{name} liked" for name in row] for row in category]
            rows = {"item": drawn.shown[:, r].tolist(), "category": category, "verdict": verdict}
            context = {"place": _names("place", drawn.asked_place[:, r])}
            seen = store.snapshot(ids, ask)
            shown.append(Impressions.of(EXAMPLES, request, seen, candidates=rows, context=context))
            who, which = np.nonzero(drawn.label[:, r])
            items = drawn.shown[who, r, which]
            liked.append(Outcomes.of("liked", request[who], items, np.full(len(who), ask + 1)))
        store.compact()
        table = ExampleTable.create(folder / "examples", event_schema=schema, example_schema=EXAMPLES, n_buckets=4)
        with table:
            join_logs(shown, liked, table, _START_MS + (done + 1) * EVERY_MS)
            table.cluster()


def _names(of: str, numbers: npt.NDArray[np.int64]) -> list[str]:
    return [f"{of} {i}" for i in numbers.tolist()]


def _events(drawn: _Drawn, part: slice) -> pa.Table:
    """Events ``part`` of every user, in order of time."""
    n_users, n = drawn.category[:, part].shape
    first = part.start
    values = {
        "user": np.tile(np.arange(n_users, dtype=np.int64), n),
        "ts": np.repeat(_START_MS + np.arange(first, first + n) * EVERY_MS, n_users),
        "item": drawn.item[:, part].T.reshape(-1),
    }
    category, liked = _names("category", drawn.category[:, part].T.reshape(-1)), drawn.liked[:, part].T.reshape(-1)
    text = {
        "category": category,
        "place": _names("place", drawn.place[:, part].T.reshape(-1)),
        "verdict": [f"{c} {'liked' if v else 'not'}" for c, v in zip(category, liked.tolist(), strict=True)],
    }
    return pa.table(values | {k: pa.array(v, pa.string()) for k, v in text.items()})
