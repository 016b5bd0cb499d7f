"""SavedRanker: what a checkpoint holds of a ranker, checked and built, for whoever scores with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from torch import nn

from thinrow.core.errors import CheckpointMismatch
from thinrow.embeddings import DynamicTable
from thinrow.models.spec import RankerSpec
from thinrow.schema import EventSchema, ExampleSchema

_MAPPINGS = ("context", "candidates", "outcomes")


@dataclass(frozen=True, slots=True)
class SavedRanker:
    """Attributes:
    spec: what the weights mean.
    event_schema: of the store that it was trained on.
    example_schema: of the table that it was trained on.
    module: in evaluation mode.
    table: its embeddings.
    """

    spec: RankerSpec
    event_schema: EventSchema
    example_schema: ExampleSchema
    module: nn.Module
    table: DynamicTable

    @classmethod
    def of(
        cls, meta: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]], where: object, *, rows: bool = True
    ) -> SavedRanker:
        """From the two parts of a checkpoint; ``where`` names it in messages; ``rows`` as in ``RankerSpec.restore``.

        Raises:
            CheckpointMismatch: it holds something other than a ranker, or other weights than its description says.
        """
        try:
            spec = RankerSpec.from_dict(meta["ranker"])
            events = EventSchema.from_dict(meta["event_schema"])
            pairs = meta["example_schema"]
            examples = ExampleSchema.from_dict({n: dict(v) if n in _MAPPINGS else v for n, v in pairs.items()})
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CheckpointMismatch(
                f"{where} is not the checkpoint of a ranker ({e}); write one with `thinrow train`"
            ) from e
        module, table = spec.restore(tensors, rows=rows)
        return cls(spec, events, examples, module.eval(), table)

    @staticmethod
    def meta(spec: RankerSpec, events: EventSchema, examples: ExampleSchema) -> dict[str, Any]:
        """What ``of`` reads, JSON-ready."""
        plain = examples.to_dict()
        # As pairs, since a checkpoint sorts the keys of its mappings, and fields have an order.
        pairs = {n: [list(pair) for pair in v.items()] if n in _MAPPINGS else v for n, v in plain.items()}
        return {"ranker": spec.to_dict(), "event_schema": events.to_dict(), "example_schema": pairs}
