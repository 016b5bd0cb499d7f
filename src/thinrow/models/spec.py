"""RankerSpec: all that a ranker's weights mean, as data: model, feature plan, projection, names of the inputs.

It travels in the checkpoint, so that who loads one asks the same columns, runs the same plan and builds the same
module.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from thinrow.core.errors import CheckpointMismatch, InputError, SchemaError
from thinrow.embeddings import DynamicTable
from thinrow.features import REQUEST_TS, FeaturePlan
from thinrow.jagged.torch import tensor
from thinrow.models.argus import ARGUS, ARGUSConfig
from thinrow.models.dlrm import DLRM, DLRMConfig
from thinrow.models.hstu import HSTUConfig, HSTURanker, MTGRConfig
from thinrow.models.inputs import InputSpec
from thinrow.models.retrieval import HSTURetrieval, RetrievalConfig
from thinrow.models.sim import SIM, SIMConfig
from thinrow.models.wukong import Wukong, WukongConfig
from thinrow.schema import EventSchema, ExampleSchema, Projection

ModelConfig = HSTUConfig | MTGRConfig | ARGUSConfig | RetrievalConfig | DLRMConfig | WukongConfig | SIMConfig

#: Name in a checkpoint -> configuration and module, which is made of configuration, inputs, table and number of tasks.
MODELS: dict[str, tuple[type[Any], type[nn.Module]]] = {
    "hstu": (HSTUConfig, HSTURanker),
    "mtgr": (MTGRConfig, HSTURanker),
    "argus": (ARGUSConfig, ARGUS),
    "hstu_retrieval": (RetrievalConfig, HSTURetrieval),
    "dlrm": (DLRMConfig, DLRM),
    "wukong": (WukongConfig, Wukong),
    "sim": (SIMConfig, SIM),
}

#: Values that models got after checkpoints of them were written: left out of what is written where they say what their
#: absence says, so that a run of before resumes.
_SEMI_LOCAL = ("window", "first")
_LATER = {
    "hstu": ("group_norm", "dropout", "cross_features", "user_tokens", "static_events", *_SEMI_LOCAL),
    "mtgr": _SEMI_LOCAL,
    "argus": ("kind", "kinds", "feedback", "feedbacks", "feedback_weight", *_SEMI_LOCAL),
    "hstu_retrieval": _SEMI_LOCAL,
    "dlrm": ("sets", "experts", "cross_features"),
}

#: Prefixes of a checkpoint's tensors.
_MODEL, TABLE = "model.", "table."


@dataclass(frozen=True, slots=True, kw_only=True)
class RankerSpec:
    """Attributes:
    model: configuration of the module.
    plan: its outputs are the inputs of the module.
    projection: what it reads of a history.
    label: the outcome that it predicts.
    numbers: outputs of the plan that are dense numbers; the others are keys to embed.
    dim: width of an embedding.
    given: outcomes that are learned too, on the candidates that have the label: conversion given a click, say.
    """

    model: ModelConfig
    plan: FeaturePlan
    projection: Projection
    label: str
    numbers: tuple[str, ...] = ()
    dim: int = 16
    given: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The model's name in ``MODELS``."""
        return next(n for n, (config, _) in MODELS.items() if type(self.model) is config)

    @property
    def labels(self) -> tuple[str, ...]:
        """The label and the outcomes given it: one task each."""
        return (self.label, *self.given)

    @property
    def inputs(self) -> InputSpec:
        """Which outputs of the plan are read as what."""
        static = getattr(self.model, "static_events", 0)
        return InputSpec.of(self.plan, self.numbers, cross=self.model.cross_features, static=static)

    def build(self, seed: int = 0) -> tuple[nn.Module, DynamicTable]:
        """A new module and its table; equal seeds give equal weights, whatever torch drew before."""
        table = DynamicTable(self.dim, seed=seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = MODELS[self.name][1](self.model, self.inputs, table, len(self.labels))
        return module, table

    def restore(self, tensors: Mapping[str, npt.NDArray[Any]], *, rows: bool = True) -> tuple[nn.Module, DynamicTable]:
        """Module and table with the weights of a checkpoint (``saved`` reversed).

        Args:
            rows: False where the table's rows are kept elsewhere; the table is empty then.

        Raises:
            CheckpointMismatch: the weights are not those of such a module.
        """
        module, table = self.build()
        try:
            state = {n.removeprefix(TABLE): t for n, t in tensors.items() if n.startswith(TABLE)}
            if rows:
                table.load_state(state)
        except InputError as e:
            raise CheckpointMismatch(f"the checkpoint's table is not that of this model: {e}") from e
        weights = {n.removeprefix(_MODEL): tensor(t) for n, t in tensors.items() if n.startswith(_MODEL)}
        wanted = module.state_dict()
        for name, value in wanted.items():
            if name not in weights or weights[name].shape != value.shape:
                found = tuple(weights[name].shape) if name in weights else "nothing"
                raise CheckpointMismatch(
                    f"the checkpoint has {found} for the weight {name!r} of the {self.name} model, which has "
                    f"{tuple(value.shape)}; it was written for another model: train again with `thinrow train`"
                )
        unknown = sorted(set(weights) - set(wanted))
        if unknown:
            raise CheckpointMismatch(
                f"the checkpoint has a weight {unknown[0]!r}, which the {self.name} model has not; it was written for "
                "another model: train again with `thinrow train`"
            )
        module.load_state_dict(weights)
        return module, table

    def check(self, events: EventSchema, trained_on: EventSchema) -> None:
        """Hold a store's schema against that of the training run, for the columns that the model reads.

        Raises:
            SchemaError: a column is missing, or is another one under the same name.
        """
        for name in (c.name for c in self.projection.resolve(trained_on)):
            ours = trained_on.column(name)
            theirs = next((c for c in events.columns if c.name == name), None)
            if theirs is None or (theirs.id, theirs.dtype) != (ours.id, ours.dtype):
                found = "is missing" if theirs is None else f"has id {theirs.id} and dtype {theirs.dtype}"
                raise SchemaError(
                    f"column {name!r} of the store {found}; it was {ours.id} and {ours.dtype} in training; "
                    "open the store that it was trained on, or train again with `thinrow train`"
                )

    def check_label(self, schema: ExampleSchema) -> None:
        """Raises InputError unless the schema of the examples has the label, and what is learned given it."""
        outcomes = dict(schema.outcomes)
        for label in self.labels:
            if label not in outcomes:
                raise InputError(
                    f"label={label!r}; the table has the outcomes {', '.join(outcomes)}; pass the model's own"
                )

    def request_fields(self, schema: ExampleSchema) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the context fields and of the candidate fields that the plan reads, in the schema's order.

        Raises:
            SchemaError: the plan reads a field that the schema does not have.
        """
        sources = set(self.plan.sources)
        context = tuple(f.name for f in schema.context if f"ctx.{f.name}" in sources)
        candidates = tuple(f.name for f in schema.candidates if f"cand.{f.name}" in sources)
        known = {REQUEST_TS} | {f"ctx.{n}" for n in context} | {f"cand.{n}" for n in candidates}
        lacking = sorted(s for s in sources if not s.startswith("history.") and s not in known)
        if lacking:
            raise SchemaError(f"the plan reads {lacking[0]!r}, which the schema of the examples does not have")
        return context, candidates

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_dict`` reverses it."""
        defaults = {f.name: f.default for f in dataclasses.fields(self.model) if f.name in _LATER.get(self.name, ())}
        model = {n: v for n, v in dataclasses.asdict(self.model).items() if n not in defaults or v != defaults[n]}
        plain = {
            "model": {"name": self.name, **model},
            "plan": self.plan.to_dict(),
            "projection": dataclasses.asdict(self.projection),
            "label": self.label,
            "numbers": list(self.numbers),
            "dim": self.dim,
            **({"given": list(self.given)} if self.given else {}),
        }
        # Tuples become the lists that a JSON file gives back.
        read_back: dict[str, Any] = json.loads(json.dumps(plain))
        return read_back

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankerSpec:
        """Reverse of ``to_dict``. Raises InputError on anything else."""
        try:
            model = dict(data["model"])
            name = model.pop("name")
            if name not in MODELS:
                raise InputError(f"no model {name!r}; there are {', '.join(MODELS)}")
            projection: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in data["projection"].items()
            }
            return cls(
                model=MODELS[name][0](**model),
                plan=FeaturePlan.from_dict(data["plan"]),
                projection=Projection(**projection),
                label=data["label"],
                numbers=tuple(data["numbers"]),
                dim=data["dim"],
                given=tuple(data.get("given", ())),
            )
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise InputError(f"not a ranker's specification: {e!r}; write it with RankerSpec.to_dict") from e


def saved(module: nn.Module, table: DynamicTable) -> dict[str, npt.NDArray[Any]]:
    """The weights of both under the names that ``RankerSpec.restore`` reads."""
    return weights_of(module) | {f"{TABLE}{n}": a for n, a in table.state().items()}


def weights_of(module: nn.Module) -> dict[str, npt.NDArray[Any]]:
    """Of these, the module's; they share its memory. Those that are spread over ranks (FSDP2) are put together: all
    ranks must ask."""
    return {f"{_MODEL}{n}": whole(t).detach().numpy() for n, t in module.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    """``tensor``, or what all ranks hold of it put together."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
