"""SessionSpec: everything that settles what a run of the reader yields, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinrow.core.errors import InputError
from thinrow.dpp.budget import BatchBudget, RowSizes
from thinrow.dpp.budget_order import BudgetOrder
from thinrow.dpp.order import Order, SplitManifest, VirtualOrder
from thinrow.dpp.poison import OnPoison, check_poison
from thinrow.dpp.row_filter import RowFilter
from thinrow.features import FeaturePlan
from thinrow.history.missing import OnMissing, check_policy
from thinrow.schema import Projection

__all__ = ["RowFilter", "SessionSpec"]


def projection_of(projection: Projection | None, max_len: int | None) -> Projection:
    """The projection that was given, or the one that ``max_len`` is short for. Raises InputError where both are."""
    if projection is None:
        return Projection(max_len=max_len)
    if max_len is not None:
        raise InputError(f"both projection and max_len={max_len}; put max_len into the projection")
    return projection


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """With the defaults a batch is a block of four base batches: 1,024 examples, most users' all together.

    Attributes:
        table: name of the example table.
        snapshot_id: the table's snapshot; 0 for a table without one.
        generation: number of the archive generation that histories are rebuilt from. It does not touch the order, nor,
            by the version protocol, the content: any generation that holds what the examples saw gives the same.
        projection: what is read of a history.
        plan: feature ops; None for none.
        rows: which stored examples are read. The source applies it, so that its splits have the kept rows alone.
        base_rows: examples of a base batch, the unit of work.
        block: base batches whose examples are shuffled together.
        batch_rows: examples of a global batch, a constant number; None for one block a batch.
        budget: what a global batch may cost; the block is then the window in which examples are mixed and batches cut.
        epochs: passes over the table; None for no end.
        seed: of every permutation.
        interleave: buckets that are read in turn.
        workers: how many produce base batches. Any number gives the same batches.
        prefetch: base batches that a worker reads while it makes another one of the same batch; where the unit of work
            is the base batch, threads so many more a worker. It hides the latency of a distant store, for their memory.
        cache_bytes: of decoded rows of the table in its folder, which all readers of a machine share; 0 for none.
        verify: hold every history against its version.
        on_missing: what becomes of examples that saw events which were erased or have expired, and of examples that
            were erased themselves: "fail" raises; "skip" leaves them out, so that batches are shorter by them and
            otherwise the same; "shorten" leaves out erased examples and delivers of the others what is left.
        on_poison: what becomes of examples that cannot be made, since bytes of theirs are damaged or a feature op
            raises: "fail" raises; "skip" leaves them out and counts them; a ``Quarantine`` also writes them down.
    """

    table: str
    snapshot_id: int
    generation: int
    projection: Projection = field(default_factory=Projection)
    plan: FeaturePlan | None = None
    rows: RowFilter = field(default_factory=RowFilter)
    base_rows: int = 256
    block: int = 4
    batch_rows: int | None = None
    budget: BatchBudget | None = None
    epochs: int | None = 1
    seed: int = 0
    interleave: int = 4
    workers: int = 2
    prefetch: int = 0
    cache_bytes: int = 0
    verify: bool = True
    on_missing: OnMissing = "fail"
    on_poison: OnPoison = "fail"

    def __post_init__(self) -> None:
        check_policy(self.on_missing)
        check_poison(self.on_poison)
        for name in ("base_rows", "block", "interleave", "workers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}; it must be 1 or more")
        if self.cache_bytes < 0:
            raise InputError(f"cache_bytes={self.cache_bytes}; it must be 0 (nothing is kept) or more")
        if self.prefetch < 0:
            raise InputError(f"prefetch={self.prefetch}; it must be 0 (nothing is read ahead) or more")

    @property
    def window(self) -> int:
        """Base batches in flight at most: two blocks at least, four a worker."""
        return max(2 * self.block, 4 * self.workers)

    def order(self, split_rows: tuple[int, ...], sizes: RowSizes | None = None) -> Order:
        """The virtual order over splits of these numbers of rows.

        Raises:
            InputError: there is a budget and no sizes, or ``batch_rows`` beside it.
        """
        manifest = SplitManifest(self.table, self.snapshot_id, split_rows, self.base_rows)
        order = VirtualOrder(manifest, self.seed, self.interleave, self.block, self.batch_rows, self.epochs)
        if self.budget is None:
            return order
        if sizes is None:
            raise InputError(f"{self.budget} needs the sizes of all rows, which this source does not tell")
        return BudgetOrder(order, self.budget, sizes, self.projection.max_len)
