"""Ranker: from a request to a ranked list and its impression, in one call.

request -> snapshot of the history -> the plan that the model was trained with -> scores -> the best k -> impression
log.

Worked example. Users 7 and 9 ask at 3,000 ms, with two candidates and three, and the best two are wanted::

    ranked = ranker.rank([100, 101], [7, 9], 3000, candidates={"item": [[12, 13], [11, 14, 15]]}, k=2)
    ranked.candidates["item"]    [[13, 12], [14, 11]]      best first
    ranked.scores                [[0.4, 0.1], [0.7, 0.3]]  probabilities

The log then holds the two lists with the versions of both histories: training rebuilds exactly what was read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thinrow.checkpoints import Checkpoint, load
from thinrow.core.errors import InputError, SchemaError
from thinrow.core.ragged import offsets_of
from thinrow.core.users import as_users
from thinrow.examples.log import ImpressionLog
from thinrow.examples.records import Impressions
from thinrow.features.featurize import featurize
from thinrow.history.intake import request_times
from thinrow.history.reconstruct import reconstruct
from thinrow.history.snapshot import Snapshot
from thinrow.history.store import HistoryStore
from thinrow.jagged import Column, Jagged
from thinrow.models import RankerInputs, RankerSpec
from thinrow.schema import ExampleSchema, FieldSpec
from thinrow.serving.scoring import Model, Scores

#: A candidate field of the log's schema that the ranker fills: the probability it gave.
SCORE = FieldSpec("score", "float32")
#: A context field of the log's schema that the ranker fills: 32 hex digits over all that the list's scores depend on.
INPUT_DIGEST = FieldSpec("input_digest", "string")
#: One more where rows are on servers: how many of the request's rows a default stood in for.
DEGRADED = FieldSpec("degraded_rows", "int64")


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best candidates of X requests, best first.

    Attributes:
        request_id: (X,) int64.
        candidates: name -> X rows.
        scores: X rows of float32, the probability of the label.
        position: X rows of int64, where each stood among the candidates of its request.
        degraded: (X,) int64, rows for which a default stood in since their server did not answer.
        seconds: of each shard of embedding servers that answered.
        impressions: what was logged, or would be.
    """

    request_id: npt.NDArray[np.int64]
    candidates: dict[str, Jagged]
    scores: Jagged
    position: Jagged
    degraded: npt.NDArray[np.int64]
    seconds: Mapping[int, float]
    impressions: Impressions


def served_schema(trained: ExampleSchema, spec: RankerSpec, *, remote: bool = False) -> ExampleSchema:
    """The schema of a ranker's impression log: what its plan reads of a request, the item, score and input digest; of
    one whose rows are ``remote``, how many of them were missing, too."""
    context, candidates = spec.request_fields(trained)
    wanted = {*candidates, trained.item}
    filled = (INPUT_DIGEST, DEGRADED) if remote else (INPUT_DIGEST,)
    return replace(
        trained,
        context=(*(f for f in trained.context if f.name in context), *filled),
        candidates=(*(f for f in trained.candidates if f.name in wanted), SCORE),
    )


class Ranker:
    """Ranks with a checkpoint of ``thinrow train``, or a release of one, on a store. Any number of threads may rank.

    Args:
        store: whose histories are read.
        model: a checkpoint, a folder of them (the newest), or a ``Model``: of a release, whose rows are on servers.
        log: where impressions go: a folder, or a log whose example schema is ``schema``. None to log nothing.
        arm: of the experiment, written into each impression.
        model_version: written into each impression; by default the model's name and step.

    Attributes:
        model: what scores now.
        schema: of the impressions.
        log: where they go.
        arm: of the experiment.
        request_schema: the fields of them that ``rank`` takes; it adds ``score``, ``input_digest`` and, where rows are
            on servers, ``degraded_rows``.

    Raises:
        CheckpointNotFound, CorruptionError, CheckpointMismatch: there is no whole checkpoint of a ranker.
        SchemaError: the store's columns are not those that the model was trained on, or the log has another schema.
    """

    def __init__(
        self,
        store: HistoryStore,
        model: Model | Checkpoint | str | os.PathLike[str],
        *,
        log: ImpressionLog | str | os.PathLike[str] | None = None,
        arm: str = "",
        model_version: str | None = None,
    ) -> None:
        if not isinstance(model, Model):
            checkpoint = model if isinstance(model, Checkpoint) else load(Path(model))
            model = Model.of_checkpoint(checkpoint, model_version)
        elif model_version is not None:
            raise InputError(f"model_version={model_version!r} of a Model, which has a name; leave it out")
        model.spec.check(store.schema, model.event_schema)
        self.model = model
        self.schema = served_schema(model.example_schema, model.spec, remote=model.remote)
        if isinstance(log, (str, os.PathLike)):
            log = ImpressionLog(Path(log), store.schema, self.schema)
        if log is not None and log.example_schema != self.schema:
            raise SchemaError("the log has another example schema than this ranker; make it with ranker.schema")
        self.request_schema = replace(
            self.schema,
            context=tuple(f for f in self.schema.context if f not in (INPUT_DIGEST, DEGRADED)),
            candidates=tuple(f for f in self.schema.candidates if f != SCORE),
        )
        self._store, self.log, self.arm = store, log, arm

    @property
    def spec(self) -> RankerSpec:
        """What the model reads."""
        return self.model.spec

    @property
    def model_version(self) -> str:
        """What impressions say of the model."""
        return self.model.name

    def swap(self, model: Model) -> Model:
        """Rank with ``model`` from the next call on; those under way end with the one before, which is returned.

        Raises:
            SchemaError: it reads other fields of a request, or other columns, so that it needs a ranker of its own.
        """
        model.spec.check(self._store.schema, model.event_schema)
        if served_schema(model.example_schema, model.spec, remote=model.remote) != self.schema:
            raise SchemaError(
                f"{model.name} reads other fields of requests than {self.model.name}; start a ranker of its own"
            )
        before, self.model = self.model, model
        return before

    def rank(
        self,
        request_id: npt.ArrayLike,
        users: object,
        request_ts: npt.ArrayLike,
        *,
        candidates: Mapping[str, Jagged | Sequence[Sequence[Any]]],
        context: Mapping[str, Column | Sequence[Any]] | None = None,
        k: int | Sequence[int] = 10,
        seen: Snapshot | None = None,
        took: Callable[[str], None] | None = None,
    ) -> Ranked:
        """Rank each request's candidates, and log the best ``k`` as its impression. Equal scores keep their order.

        Args:
            request_id: (X,) unique.
            users: (X,) distinct ids of the store's kind: a user who asks twice needs two calls.
            request_ts: (X,) ms, or one for all; events before it (exclusive) are read.
            candidates: name -> X rows, for each candidate field of ``request_schema``.
            context: name -> X values, for each context field.
            k: how many to return, for all or one each; a request with fewer candidates gets all of them.
            seen: a snapshot of just these requests, where the caller has taken it.
            took: called with ``snapshot``, ``features``, ``score`` and ``best`` when each is done.

        Raises:
            Unavailable: rows are on servers that do not answer, and the model is to fail then.
            InputError: k below 1, a user twice, a field is missing or unknown, rows do not match.
            SchemaError: a value is not of its field's dtype.
        """
        most = [k] if isinstance(k, int) else list(k)
        for one in most:
            if type(one) is not int or one < 1:
                raise InputError(f"k={one!r}; it must be a whole number, 1 or more")
        ids, counts = np.unique(np.asarray(request_id), return_counts=True)
        if (counts > 1).any():
            raise InputError(f"request_id {ids[counts > 1][0]} appears twice; each request needs an id of its own")
        took = took or _nothing
        if seen is None:
            seen = self._store.snapshot(users, request_ts)
        self._check_seen(seen, users, request_ts)
        if len(np.unique(seen.requests.users)) < len(seen.requests):
            raise InputError("a user appears twice in one call; rank the later request in another call")
        took("snapshot")
        # Read once: it may be replaced meanwhile.
        model = self.model
        asked = Impressions.of(
            self.request_schema,
            request_id,
            seen,
            candidates=candidates,
            context=context,
            model_version=model.name,
            arm=self.arm,
            boundary=np.zeros(len(seen.requests), np.int64),
        )
        if len(most) not in (1, len(asked)):
            raise InputError(f"{len(most)} values of k for {len(asked)} requests; give one each, or one for all")
        inputs = read_inputs(model, seen, asked)
        took("features")
        scores = model.score(inputs)
        wrong = np.flatnonzero(~np.isfinite(scores.probability))
        if len(wrong):
            row = int(np.searchsorted(inputs.offsets, wrong[0], side="right")) - 1
            raise InputError(
                f"request {asked.request_id[row]} has a score of {scores.probability[wrong[0]]}: an input of it is NaN "
                "or infinite, or the model is; check the numbers of candidates and events. Nothing was logged"
            )
        took("score")
        ranked = _ranked(asked, inputs, scores, np.array(most, np.int64), model.remote)
        if self.log is not None:
            self.log.append(ranked.impressions)
        took("best")
        return ranked

    def _check_seen(self, seen: Snapshot, users: object, request_ts: npt.ArrayLike) -> None:
        asked = as_users(users, self._store.schema.user_kind)
        times = request_times(request_ts, len(asked))
        if not np.array_equal(seen.requests.users, asked) or not np.array_equal(seen.requests.request_ts, times):
            raise InputError("the snapshot is of other users or times than the requests; pass that of these requests")


def read_inputs(model: Model, seen: Snapshot, asked: Impressions) -> RankerInputs:
    """What ``model`` reads of requests and of the histories that they see."""
    histories = reconstruct(seen.generation, seen.requests, model.spec.projection).histories
    times = seen.requests.request_ts
    read = featurize(model.spec.plan, histories, asked.context, asked.candidates, times)
    return RankerInputs(model.inputs, *read, times)


def _nothing(_: str) -> None:
    """What is done with times that nobody asked for."""


def _ranked(asked: Impressions, inputs: RankerInputs, found: Scores, k: npt.NDArray[np.int64], remote: bool) -> Ranked:
    probability = found.probability
    rows, offsets = best(probability, inputs.offsets, k)
    chosen = {n: Jagged(j.column.take(rows), offsets) for n, j in asked.candidates.items()}
    scores = Jagged(Column(probability[rows]), offsets)
    # The digest is that of the list as it is logged: what training will rebuild.
    digest = pa.array(inputs.with_candidates(rows, offsets).fingerprints(), pa.string())
    filled = {INPUT_DIGEST.name: Column.from_arrow(digest, "string")}
    if remote:
        filled[DEGRADED.name] = Column(found.degraded)
    impressions = replace(asked, candidates=chosen | {SCORE.name: scores}, context=asked.context | filled)
    first = np.repeat(inputs.offsets[:-1], np.diff(offsets))
    position = Jagged(Column(rows - first), offsets)
    return Ranked(asked.request_id, chosen, scores, position, found.degraded, found.seconds, impressions)


def best(
    scores: npt.NDArray[np.float32], offsets: npt.NDArray[np.int64], k: int | npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of each row's ``k`` (one, or one a row) highest scores, the highest first, equal ones in their order;
    and the new offsets.

    ``best([.1, .9, .5, .2], [0, 3, 4], 2)`` is ``([1, 2, 3], [0, 2, 3])``.
    """
    lengths = np.diff(offsets)
    row = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((-scores, row))
    rank = np.arange(len(order)) - np.repeat(offsets[:-1], lengths)
    wanted = np.minimum(lengths, k)
    return order[rank < np.repeat(wanted, lengths)], offsets_of(wanted)
