"""Training: a loop readable top to bottom, its metrics, and resuming.

Class / does / output: ``Trainer`` reads batches, steps both optimizers, writes checkpoints -> ``TrainResult``;
``score`` and ``evaluate`` -> ``Evaluation``.
"""

from thinrow.core.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("torch", "train") from error

from thinrow.training.config import TrainConfig
from thinrow.training.evaluate import Evaluation, Scored, evaluate, score
from thinrow.training.loop import Trainer, TrainResult, train
from thinrow.training.ranks import launched
from thinrow.training.retrieval import Retrieved, retrieve
from thinrow.training.stream import StreamTrainer, train_stream

__all__ = [
    "Evaluation",
    "Retrieved",
    "Scored",
    "StreamTrainer",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "evaluate",
    "launched",
    "retrieve",
    "score",
    "train",
    "train_stream",
]
