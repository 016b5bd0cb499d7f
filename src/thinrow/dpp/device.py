"""Batches on a device, copied while the batch before is trained on.

Worked example::

    loader = TorchLoader(thinrow.loader(store, table, plan=plan))
    for batch, (item, click) in OnDevice(loader, "cuda", lambda b: (b.candidates["item"], b.labels["click"])):
        loss = model(item.values, item.offsets, click.values)    # tensors of the device

On a CUDA device a batch's tensors go to pinned memory and from there over a stream of their own; the stream that
computes waits for the copy, the process does not. On others the copy is made ahead all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from thinrow.core.errors import InputError, MissingExtraError

try:
    import torch
    from torch import Tensor
    from torch.utils.data import IterableDataset
except ModuleNotFoundError as error:
    raise MissingExtraError("torch", "train") from error

from thinrow.dpp.torch import TorchBatch, TorchLoader
from thinrow.jagged.torch import JaggedTensor


class OnDevice(IterableDataset[tuple[TorchBatch, Any]]):
    """Each batch with its tensors on a device.

    ``state_dict`` is that of the batch yielded last, though the next one is read by then.
    """

    def __init__(self, loader: TorchLoader, device: str | torch.device, tensors: Callable[[TorchBatch], Any]) -> None:
        """Args:
            device: as ``torch.device`` takes it.
            tensors: what a step needs of a batch: tensors and ``JaggedTensor`` in dicts, lists and tuples.

        Raises:
            InputError: torch knows no such device.
        """
        try:
            self.device = torch.device(device)
        except RuntimeError as e:
            raise InputError(f"device={device!r}: {e}") from e
        self.loader, self._tensors = loader, tensors
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[tuple[TorchBatch, Any]]:
        """Batches after the last one yielded.

        Raises:
            InputError: ``tensors`` gave something that is no tensor.
        """
        if self._state is None:
            self._state = self.loader.state_dict()
        else:
            self.loader.load_state_dict(self._state)
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        ready: tuple[TorchBatch, Any, dict[str, Any], Any] | None = None
        for batch in self.loader:
            state = self.loader.state_dict()
            with torch.cuda.stream(stream):
                copied = _mapped(self._tensors(batch), lambda t: _copied(t, self.device, stream is not None))
            if ready is not None:
                yield self._given(*ready)
            ready = batch, copied, state, None if stream is None else stream.record_event()
        if ready is not None:
            yield self._given(*ready)

    def _given(self, batch: TorchBatch, copied: Any, state: dict[str, Any], done: Any) -> tuple[TorchBatch, Any]:
        self._state = state
        if done is not None:
            # What computes on these tensors comes after their copy, and their memory is not taken for another's before.
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            _mapped(copied, partial(_used_on, current))
        return batch, copied

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stands after the batch yielded last; see ``Loader.state_dict``."""
        return self.loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that the state names; see ``Loader.load_state_dict``."""
        self.loader.load_state_dict(state)
        self._state = dict(state)


def _used_on(stream: Any, tensor: Tensor) -> Tensor:
    tensor.record_stream(stream)
    return tensor


def _copied(tensor: Tensor, device: torch.device, pinned: bool) -> Tensor:
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)


def _mapped(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with each tensor changed."""
    if isinstance(found, Tensor):
        return change(found)
    if isinstance(found, JaggedTensor):
        return JaggedTensor(change(found.values), change(found.offsets))
    if isinstance(found, Mapping):
        return {name: _mapped(each, change) for name, each in found.items()}
    if isinstance(found, list | tuple):
        changed = [_mapped(each, change) for each in found]
        return type(found)(*changed) if hasattr(found, "_fields") else type(found)(changed)
    raise InputError(
        f"a {type(found).__name__} among the tensors of a batch; give tensors and JaggedTensor, in dicts, lists and "
        "tuples"
    )
