"""Epochs: ranges of arrival numbers, each of which at most one reign of a recent tier ever gives out.

Worked example: a new tier claims epoch 0 and counts from 1. Its server fails over to a replica that may lack the last
events: epoch 1 is claimed, and every user goes on from 2^40 + 1, whatever was lost. ``epochs/00000001.json`` says so to
all processes, however often the server loses its memory of it.
"""

from __future__ import annotations

from thinrow.core.errors import CommitConflict
from thinrow.core.units import EPOCH_BITS
from thinrow.storage.objects import ObjectStore
from thinrow.storage.sealed import seal

FOLDER = "epochs/"
_FORMAT = 1


def claim_epoch(objects: ObjectStore, at_least: int) -> int:
    """The number above which a new epoch counts: ``at_least`` or more, and claimed by nobody before or after."""
    held = objects.list(FOLDER)
    epoch = -(-at_least >> EPOCH_BITS)
    if held:
        epoch = max(epoch, int(held[-1].removeprefix(FOLDER).removesuffix(".json")) + 1)
    while True:
        try:
            objects.put_if_absent(f"{FOLDER}{epoch:08d}.json", seal({"epoch": epoch}, _FORMAT, "claim of an epoch"))
        except CommitConflict:
            epoch += 1
        else:
            return epoch << EPOCH_BITS
