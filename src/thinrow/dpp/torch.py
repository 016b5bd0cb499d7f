"""The loader for torch: batches as tensors, an ``IterableDataset`` that resumes.

Worked example::

    loader = TorchLoader(thinrow.loader(store, table, plan=plan))
    for batch in loader:
        x = embedding(batch.histories.columns["item"])      # (E, d): each event of each user once
        user = batch.histories.mean(x)                      # (X, d): each example's own history
        item = batch.candidates["item"]                     # values (C,), offsets (X + 1,)
        click = batch.labels["click"].values                # (C,), one a candidate

Tensors share the memory of the NumPy batch; nothing is copied per example. Text has no tensor: hash it in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from thinrow.core.errors import InputError, MissingExtraError

try:
    from torch import Tensor
    from torch.utils.data import IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    raise MissingExtraError("torch", "train") from error

from thinrow.dpp.batch import Batch
from thinrow.dpp.client import Loader
from thinrow.jagged import Column, Jagged
from thinrow.jagged.torch import Columns, JaggedTensor, TorchHistories, tensor


class TorchBatch:
    """A ``Batch`` as tensors.

    Attributes:
        batch: the NumPy batch whose memory the tensors share.
        request_ts: (X,) int64 ms.
        histories: each user's events once, and what each example sees of them.
        context: name -> (X,) tensor.
        candidates: name -> X rows.
        labels: outcome name -> X rows, aligned with the candidates.
        features: name -> (X,) tensor or X rows, the outputs of the plan that stand beside examples or candidates; those
            that stand beside events are columns of ``histories``.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.request_ts = tensor(batch.request_ts)
        self.histories = TorchHistories(batch.histories)
        self.context: Mapping[str, Tensor] = Columns(batch.context)
        self.candidates: Mapping[str, JaggedTensor] = _Rows(batch.candidates)
        self.labels: Mapping[str, JaggedTensor] = _Rows(batch.labels)
        self.features: Mapping[str, Tensor | JaggedTensor] = _Features(batch.features)

    def __len__(self) -> int:
        return len(self.batch)


class TorchLoader(IterableDataset[TorchBatch]):
    """A ``Loader`` as a torch dataset, to iterate as it is or under ``torch.utils.data.DataLoader(loader,
    batch_size=None)`` (Lightning does): batches are made already, by the loader's own threads.

    ``state_dict`` and ``load_state_dict`` are the loader's: after loading, iteration goes on with the next batch.
    """

    def __init__(self, loader: Loader, *, repeat: bool = False) -> None:
        """``repeat``: each iteration begins with the first batch, as a loader for validation must. Otherwise it goes on
        behind the last one, to the end of the loader's ``epochs``."""
        self.loader, self._repeat = loader, repeat

    def __iter__(self) -> Iterator[TorchBatch]:
        """Batches after the last one yielded, or with ``repeat`` all of them.

        Raises:
            InputError: in a worker process of a DataLoader: each would read everything again.
        """
        worker = get_worker_info()
        if worker is not None:
            raise InputError(
                f"the loader runs in a worker process (num_workers={worker.num_workers}), and it reads with threads of "
                "its own; pass num_workers=0 to the DataLoader, and threads=... to thinrow.loader"
            )
        if self._repeat:
            self.loader.rewind()
        for batch in self.loader:
            yield TorchBatch(batch)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stands; see ``Loader.state_dict``."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that the state names; see ``Loader.load_state_dict``."""
        self.loader.load_state_dict(state)


class _Rows(Mapping[str, JaggedTensor]):
    def __init__(self, rows: Mapping[str, Jagged]) -> None:
        self._rows = rows

    def __getitem__(self, name: str) -> JaggedTensor:
        if name not in self._rows:
            raise KeyError(f"no rows {name!r}; there are {', '.join(self._rows)}")
        return JaggedTensor.of(self._rows[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class _Features(Mapping[str, "Tensor | JaggedTensor"]):
    def __init__(self, features: Mapping[str, Column | Jagged]) -> None:
        self._features = features

    def __getitem__(self, name: str) -> Tensor | JaggedTensor:
        if name not in self._features:
            named = ", ".join(self._features)
            raise KeyError(f"no feature {name!r}; there are {named}. What stands beside events is in histories.columns")
        found = self._features[name]
        return JaggedTensor.of(found, name) if isinstance(found, Jagged) else Columns({name: found})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)
