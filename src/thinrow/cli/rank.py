"""``thinrow rank``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinrow.cli.common import parse_time, store_option
from thinrow.core.errors import InputError

if TYPE_CHECKING:
    from thinrow.serving import Ranked

#: Requests that are ranked together.
_BATCH = 256


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("requests", type=click.File("r", encoding="utf-8"))
@store_option
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Candidates to return a request.")
@click.option("--log", "log_path", type=click.Path(path_type=Path), help="Folder of an impression log to append to.")
@click.option("--arm", default="", help="Experiment arm, written into each impression.")
def command(checkpoint: Path, requests: Any, store_path: Path, top: int, log_path: Path | None, arm: str) -> None:
    """Rank the candidates of REQUESTS (JSON lines, or - for standard input) with CHECKPOINT; one JSON line each.

    A request has a request_id, a user, a time (ms or ISO 8601), the context fields that the model reads, and candidates
    with theirs. A user's history is read as it is now, up to the request's time (exclusive).

    \b
    Example of a request, and of a run:
      {"request_id": 1, "user": 7, "time": "2017-12-01", "context": {}, "candidates": [{"item": 11}, {"item": 12}]}
      thinrow rank run requests.jsonl --store S --top 5 --log impressions --arm A
    """
    from thinrow.history.store import HistoryStore
    from thinrow.serving import Ranker

    with HistoryStore.open(store_path) as store:
        ranker = Ranker(store, checkpoint, arm=arm, log=log_path)
        fields = ranker.request_schema
        context, shown = [f.name for f in fields.context], [f.name for f in fields.candidates]
        for batch in _batches(_parse(requests, context, shown)):
            ranked = ranker.rank(
                [r["request_id"] for r in batch],
                [r["user"] for r in batch],
                [r["time"] for r in batch],
                candidates={n: [[c[n] for c in r["candidates"]] for r in batch] for n in shown},
                context={n: [r["context"][n] for r in batch] for n in context},
                k=top,
            )
            for request, line in zip(batch, _lines(ranked), strict=True):
                click.echo(json.dumps({"request_id": request["request_id"], "user": request["user"], "ranked": line}))


def _parse(lines: Iterable[str], context: Sequence[str], shown: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Checked requests, their times in ms."""
    for number, line in enumerate(_decoded(lines), 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
            given = {"context": {}, **request}
            ids = {n: given[n] for n in ("request_id", "user")}
            if type(ids["request_id"]) is not int or not 0 <= ids["request_id"] < 1 << 63:
                raise TypeError(f"request_id {ids['request_id']!r} is no integer from 0 to 2^63 - 1")
            if type(ids["user"]) not in (int, str):
                raise TypeError(f"user {ids['user']!r} is neither an integer nor text")
            candidates = [{n: c[n] for n in shown} for c in given["candidates"]]
            read = {n: given["context"][n] for n in context}
            time = parse_time(str(given["time"]))
        except InputError as e:
            raise InputError(f"line {number} of the requests: {e}") from e
        except json.JSONDecodeError as e:
            raise InputError(f"line {number} of the requests is no JSON ({e}); write one object a line") from e
        except KeyError as e:
            raise InputError(
                f"line {number} of the requests lacks {e}; it needs request_id, user, time, a context with "
                f"{', '.join(context) or 'nothing'}, and candidates with {', '.join(shown)}"
            ) from e
        except (TypeError, AttributeError, ValueError, RecursionError) as e:
            raise InputError(f"line {number} of the requests has another shape ({e}); see thinrow rank --help") from e
        yield {**ids, "time": time, "candidates": candidates, "context": read}


def _decoded(lines: Iterable[str]) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as e:
        raise InputError(f"the requests are not UTF-8 text: {e}; write JSON lines in UTF-8") from e


def _batches(requests: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Requests in their order, each user at most once a batch."""
    batch: dict[Any, dict[str, Any]] = {}
    for request in requests:
        if request["user"] in batch or len(batch) == _BATCH:
            yield list(batch.values())
            batch = {}
        batch[request["user"]] = request
    if batch:
        yield list(batch.values())


def _lines(ranked: Ranked) -> Iterator[list[dict[str, Any]]]:
    columns = {n: j.column.to_arrow().to_pylist() for n, j in ranked.candidates.items()}
    columns["score"] = ranked.scores.values.tolist()
    offsets = ranked.scores.offsets.tolist()
    for start, stop in itertools.pairwise(offsets):
        yield [{n: values[i] for n, values in columns.items()} for i in range(start, stop)]
