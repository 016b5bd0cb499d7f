"""Bytes read for one tenant, newest 256 of one feature group, under those read for the longest one.

The longest tenant reads the newest 16,384 with all columns of the same requests. Keys start with
``vs_longest_tenant_bytes``: the small tenant over the long one, by pattern of requests and feature group.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.datagen.datasets import Work, load
from bench.datagen.requests import Batch, clustered_batches, random_users
from bench.harness import Options, Result
from bench.peers.thinrow import Thinrow
from thinrow.history.reconstruct import reconstruct
from thinrow.schema import Projection

SHORT, LONG = 256, 16_384


def run(options: Options) -> Result:
    """One measurement: bytes do not vary."""
    with Work(options.work) as work:
        data = load(options.data, work, quick=options.quick, git_file=options.git_file)
        result = Result("projection", {**data.parameters, "short": SHORT, "long": LONG})
        patterns = {
            "random": random_users(data, 2 if options.quick else 4, 24 if options.quick else 512),
            "k20": clustered_batches(data, options.quick),
        }
        for pattern, batches in patterns.items():
            ours = Thinrow(work, data, batches)
            longest = _bytes_read(ours, batches, Projection(max_len=LONG))
            read = {g: _bytes_read(ours, batches, Projection(groups=(g,), max_len=SHORT)) for g in data.schema.groups}
            result.figures[pattern] = {"longest": longest, **read}
            for group, n in read.items():
                result.ratios[f"vs_longest_tenant_bytes.{pattern}.{group}"] = n / longest
    return result


def _bytes_read(ours: Thinrow, batches: Sequence[Batch], projection: Projection) -> int:
    return sum(reconstruct(ours.generation, ours.requests(b), projection).stats.bytes_read for b in batches)
