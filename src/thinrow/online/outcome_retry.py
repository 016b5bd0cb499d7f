"""Dead letters of an outcome log: where they are, and how they are tried again.

Which file of letters holds is told by a position in the log's own files, under ``.dead`` and the name of the folder. So
the file of the log that holds what a retry took in says too that the letters are those of the next number.

Worked example: three letters, of which one still is no outcome. The other two become file 12 of the log, which moves
``clicks.dead`` from 0 to 1; ``letters-00001.jsonl``, written before, has the one that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from thinrow.core.clock import Clock, system_clock
from thinrow.core.errors import StoreError
from thinrow.core.units import NEVER
from thinrow.examples.log import OutcomeLog
from thinrow.history.dead_letters import SOURCE, DeadLetters
from thinrow.history.recent.tier import Advance
from thinrow.online.outcome_fields import OutcomeFields, outcomes_of
from thinrow.online.outcome_ids import KnownIds
from thinrow.sources.decode import Decoder
from thinrow.sources.places import make_decoder
from thinrow.sources.retry import RetryReport, decode_letters
from thinrow.sources.screen import screen


def outcome_letters(log: OutcomeLog, folder: str | Path) -> DeadLetters:
    """What was refused of the sources of ``log`` and is in ``folder``.

    Its methods raise StoreError where the folder is another one than the log knows by its name.
    """
    folder = Path(folder)

    def number() -> int:
        held = int(log.positions(SOURCE).get(folder.name, "0"))
        there = [int(path.stem.removeprefix("letters-")) for path in folder.glob("letters-*.jsonl")]
        if there and held not in there and max(there) > held:
            raise StoreError(
                f"{folder} has letters of number {max(there)}, and its log knows {held}: the folder was renamed, or "
                "is of another log; give it the name that it had"
            )
        return held

    return DeadLetters(folder, number)


def retry_outcomes(
    log: OutcomeLog,
    letters: str | Path,
    fields: OutcomeFields | None = None,
    decoder_of: Callable[[Mapping[str, str]], Decoder] = make_decoder,
    max_future_ms: int | None = 3_600_000,
    clock: Clock = system_clock,
) -> RetryReport:
    """Log what can be logged now of the letters in a folder; the others stay. Killed at any moment, the same call goes
    on. An outcome of which the log has request and id is a duplicate.

    Args:
        fields: as ``OutcomeIngest`` read by, or mended.
        decoder_of: makes a decoder of a letter's ``how``.
        max_future_ms: as in ``OutcomeOptions``.

    Raises:
        StoreError: log or registry refuse; nothing has changed.
        CorruptionError: a letter is damaged.
    """
    fields, dead = fields or OutcomeFields(), outcome_letters(log, letters)
    schema = fields.schema()
    with dead.retrying() as retry:
        if not retry.letters:
            return RetryReport(0, 0, 0)
        table, tried, stay = decode_letters(retry.letters, schema, decoder_of)
        found = screen(table, schema, NEVER if max_future_ms is None else clock() + max_future_ms)
        outcomes, wrong = outcomes_of(found, fields)
        stay += [replace(tried[row], reason=why) for row, why in sorted({**found.refused, **wrong}.items())]
        if not len(outcomes) and not found.repeated:
            return RetryReport(0, 0, len(stay))
        retry.leave(stay)
        held = str(retry.number) if retry.number else None
        advances = [Advance(SOURCE, Path(letters).name, held, str(retry.number + 1))]
        if fields.outcome_id is not None:
            logged, again = KnownIds(log).append(outcomes, advances)
        else:
            log.append(outcomes, advances)
            logged, again = len(outcomes), 0
        return RetryReport(logged, again + found.repeated, len(stay))
