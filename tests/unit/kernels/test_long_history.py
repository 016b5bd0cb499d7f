"""A history of 100,000 events runs forward and backward in memory that grows with its length, biases and all."""

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, resource, sys, time
import numpy as np, torch
from thinrow.kernels import kernel
from thinrow.kernels.distance import Bias, Distances
from thinrow.kernels.sequence import SequenceLayout

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def step(n):
    layout, position = SequenceLayout([0, n]), np.arange(n)
    leaves = [torch.randn(n, 1, 32).requires_grad_() for _ in range(3)]
    tables = [torch.zeros(1, 128).requires_grad_() for _ in range(2)]
    biases = [Bias(tables[0], Distances.of(position, position, 3)),
              Bias(tables[1], Distances.of_times(position * 60_000, position * 60_000, 2))]
    out = kernel("hstu_attention")(*leaves, layout, 32**-0.5, biases)
    out.backward(torch.randn_like(out))
    assert all(bool(x.grad.isfinite().all()) for x in leaves + tables)

step(256)
before, started = peak_mb(), time.perf_counter()
step(int(sys.argv[1]))
print(json.dumps({"before_mb": before, "peak_mb": peak_mb(), "seconds": time.perf_counter() - started}))
"""


@pytest.mark.slow
def test_a_hundred_thousand_events_take_three_hundred_megabytes():
    """One head of width 32, float32. q, k, v, the output and all gradients are 90 MB of it; what the parts of a long
    row sum apart is 130 MB. The scores of all pairs would be 40 GB."""
    run = subprocess.run([sys.executable, "-c", _PROGRAM, "100000"], check=True, capture_output=True, timeout=900)
    found = json.loads(run.stdout)
    print(found)
    assert found["peak_mb"] - found["before_mb"] < 300
