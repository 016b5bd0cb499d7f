"""Checkpoints: named tensors and JSON beside them, whole or absent. Training writes them, serving reads them.

One process writes with ``save``, several with ``save_shard`` and ``commit``; ``load`` and ``load_shard`` read what any
number wrote. ``Incremental`` writes a run's in the background, deltas between full ones. ``export`` writes vectors
alone, which a ``ServingTable`` maps.
"""

from thinrow.checkpoints.background import Background, snapshot
from thinrow.checkpoints.checkpoint import Checkpoint, has_checkpoints, load, save, steps
from thinrow.checkpoints.export import commit_export, export, export_shard
from thinrow.checkpoints.incremental import Incremental, RankIncremental
from thinrow.checkpoints.manifest import Version, version_of
from thinrow.checkpoints.serving_table import ServingTable
from thinrow.checkpoints.shards import commit, load_shard, save_shard

__all__ = [
    "Background",
    "Checkpoint",
    "Incremental",
    "RankIncremental",
    "ServingTable",
    "Version",
    "commit",
    "commit_export",
    "export",
    "export_shard",
    "has_checkpoints",
    "load",
    "load_shard",
    "save",
    "save_shard",
    "snapshot",
    "steps",
    "version_of",
]
