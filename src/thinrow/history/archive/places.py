"""Where the runs of rows that a read wants lie: in which stripes, chunks and files, and where in block and output.

Worked example: rows [100, 103) of a stripe of 512 are one run. Of a column of single values it wants the values
[100, 103) of its block; of vectors of 4, [400, 412); of lists, as many as the lengths of these rows say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinrow.core.buffers import Buffers
from thinrow.history.archive.lookup import Ints
from thinrow.storage.codecs import Headers


@dataclass(frozen=True, slots=True)
class Stripes:
    """The stripes that runs lie in, neighbours once.

    Attributes:
        of_run: (R,) stripe of each run.
        position, number: (C,) place of its segment in the set, and its number there.
        records: (C,) stripe records.
    """

    of_run: Ints
    position: Ints
    number: Ints
    records: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of one feature group (or of the overlays of a column), where they lie.

    Attributes:
        group: which.
        buffers: mapped segments, or one buffer with what was fetched.
        position: (C,) place of each chunk's segment in the set.
        source, rows: (C,) buffer of each chunk, rows of its stripe.
        headers: of the chunks.
        of_run: chunk of each run, -1 where its segment lacks the group.
        run_rows: rows of each run's stripe.
    """

    group: str
    buffers: Buffers
    position: Ints
    source: Ints
    rows: Ints
    headers: Headers
    of_run: Ints
    run_rows: Ints


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the chunks of one feature group lie.

    Attributes:
        of_run: chunk of each run, -1 where its segment lacks the group.
        position, records, chunk: (C,) place of each chunk's segment in the set, its stripe's record, its own.
        stripe: (C,) number of each chunk's stripe; one comes again where runs of other stripes lie between.
        files, sizes: names of the files, and their bytes.
        source: (C,) file of each chunk.
        buffers: the mapped files; None where they must be read.
    """

    of_run: Ints
    position: Ints
    records: npt.NDArray[np.void]
    chunk: npt.NDArray[np.void]
    stripe: Ints
    files: Sequence[str]
    sizes: Ints
    source: Ints
    buffers: Buffers | None


@dataclass(frozen=True, slots=True)
class Places:
    """Where the values of each run lie in its block and in the output.

    Attributes:
        n: (R,) values in the whole block; None where they are ``per_row`` for each row of the stripe.
        first, last: (R,) the values wanted, ``[first, last)`` of the block.
        out_pos: (R + 1,) where they go.
        row_off: (rows + 1,) offsets of the lists of all rows; None where they are none.
    """

    n: Ints | None
    first: Ints
    last: Ints
    out_pos: Ints
    row_off: Ints | None = None
    per_row: int = 1

    def times(self, per_row: int) -> Places:
        """The same rows with so many values each."""
        if per_row == 1:
            return self
        return Places(None, self.first * per_row, self.last * per_row, self.out_pos * per_row, None, per_row)

    def in_blocks(self, runs: Ints, rows: Ints) -> Ints:
        """Values in the blocks of ``runs``; ``rows`` (R,) are those of all runs' stripes."""
        return rows[runs] * self.per_row if self.n is None else self.n[runs]
