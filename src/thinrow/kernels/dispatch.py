"""One name, one function: finds a kernel in the active backend and imports that backend on first use.

Worked example::

    kernel("crc32c")(np.frombuffer(b"123456789", np.uint8))      # 0xE3069283, from thinrow.kernels.numba.crc
    with use("reference"):
        kernel("crc32c")(...)                                    # the same number, from thinrow.kernels.reference.crc

Every backend has the same modules with the same functions and signatures; ``reference`` is plain NumPy (for autograd,
plain torch) and the oracle of the others. Kernels that differentiate live in ``kernels.torch`` instead of ``numba``,
and hand tensors of CUDA devices to ``kernels.triton``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from thinrow.core.errors import InputError, MissingExtraError

#: Kernel -> module of the backend package that defines it. A new kernel is one line here.
KERNELS: dict[str, str] = {
    "crc32c": "crc",
    "crc32c_many": "crc",
    "check_crcs": "crc",
    "open_chunks": "crc",
    "copy_ranges": "copies",
    "decode_fixed": "blocks",
    "read_stripes": "stripes",
    "place_words": "codes",
    "decode_codes": "codes",
    "ranges_of_keys": "pages",
    "ranges_of_texts": "pages",
    "take_ranges": "pages",
    "take_records": "pages",
    "place_users": "batch",
    "plan_batch": "batch",
    "read_few": "batch",
    "read_live": "live",
    "distinct_keys": "plan",
    "buckets_of_keys": "plan",
    "pairs_of_users": "plan",
    "group_pieces": "plan",
    "mark_mixed": "plan",
    "rows_before": "plan",
    "summarize": "plan",
    "compare_versions": "plan",
    "read_ranges": "plan",
    "example_slices": "plan",
    "plan_blocks": "encode",
    "write_blocks": "encode",
    "group_keys": "sort",
    "places_by_code": "sort",
    "number_in_order": "sort",
    "scatter_rows": "sort",
    "find_sorted": "sort",
    "in_order": "sort",
    "count_words": "words",
    "stripe_words": "words",
    "identity_mix": "history",
    "content_digest": "history",
    "fold_bytes": "history",
    "apply_hides": "history",
    "tighten_pieces": "history",
    "merge_runs": "history",
    "piece_summaries": "history",
    "remap_codes": "history",
    "cut_stripes": "history",
    "distinct_words": "history",
    "code_words": "history",
    "user_runs": "recent",
    "pack_pairs": "recent",
    "open_pairs": "recent",
    "number_rows": "recent",
    "open_blocks": "recent",
    "follows": "recent",
    "fold_words": "align",
    "align_rows": "align",
    "pair_rows": "align",
    "event_states": "align",
    "find_in_rows": "align",
    "mix64": "features",
    "hash_ints": "features",
    "hash_parts": "features",
    "hash_bytes": "features",
    "hash_tuples": "features",
    "hash_words": "features",
    "mod_unsigned": "features",
    "history_candidate_cross": "features",
    "run_chain": "chain",
    "hstu_attention": "hstu",
    "group_layer_norm": "dense",
    "norm_multiply_dropout": "dense",
    "jagged_linear": "dense",
    "softmax_cross_entropy": "losses",
    "sampled_softmax": "losses",
    "find_keys": "keys",
    "insert_keys": "keys",
    "split_keys": "keys",
    "renumber_keys": "keys",
    "drop_keys": "keys",
    "start_rows": "table",
    "gather_rows": "table",
    "pool_rows": "table",
    "distinct_rows": "table",
    "sum_rows": "table",
    "count_keys": "keys",
    "touch_rows": "table",
    "sgd_rows": "table",
    "adagrad_rows": "table",
    "rowwise_adagrad_rows": "table",
    "adam_rows": "table",
    "find_words": "exported",
    "widen_half": "half",
    "count_batches": "budget",
    "cut_batches": "budget",
    "spread_units": "budget",
}

#: Kernel of tensors -> module of ``kernels.torch`` that defines it.
DEVICE_KERNELS: dict[str, str] = {
    "run_chain": "chain",
    "as_dtype": "chain",
    "hash_tuples": "chain",
    "hash_parts": "chain",
    "find_keys": "table",
    "number_keys": "table",
    "merge_keys": "table",
    "start_rows": "table",
    "gather_rows": "table",
    "pool_rows": "table",
    "group_rows": "table",
    "sum_groups": "table",
    "touch_rows": "table",
    "sgd_rows": "table",
    "adagrad_rows": "table",
    "rowwise_adagrad_rows": "table",
    "adam_rows": "table",
}

#: Kernel of tensors on a CUDA device -> module of ``kernels.triton`` that defines it.
CUDA_KERNELS: dict[str, str] = {"hstu_attention": "hstu"}

#: Compiled loop -> module of ``kernels.numba`` that defines it, on Linux. What these
#: loops of input and output do is defined by plain Python code of those who call them.
LOOPS: dict[str, str] = {
    "serve_frames": "engine",
    "add_shared": "sockets",
    "exchange_frames": "exchange",
}

#: Modules whose fast backend is written in torch, not numba.
_TORCH_MODULES = ("hstu", "dense", "losses")

BACKENDS = ("numba", "reference")

_active = BACKENDS[0]


def kernel(name: str) -> Callable[..., Any]:
    """The function ``name`` of the active backend.

    Raises:
        InputError: there is no such kernel.
    """
    return _find(_active, name)


def device_kernel(name: str) -> Callable[..., Any]:
    """The function ``name`` of tensors on any device, whatever the active backend. Needs torch.

    Raises:
        InputError: there is no such kernel.
    """
    if name not in DEVICE_KERNELS:
        raise InputError(f"no kernel {name!r} of tensors; add it to thinrow.kernels.dispatch.DEVICE_KERNELS")
    module = importlib.import_module(f"thinrow.kernels.torch.{DEVICE_KERNELS[name]}")
    found: Callable[..., Any] = getattr(module, name)
    return found


def cuda_kernel(name: str) -> Callable[..., Any]:
    """The function ``name`` of tensors on CUDA devices, for the functions of ``kernels.torch`` that meet such tensors.

    Raises:
        InputError: there is no such kernel.
        MissingExtraError: Triton is not installed; builds of torch for CUDA on Linux bring it.
    """
    if name not in CUDA_KERNELS:
        raise InputError(f"no kernel {name!r} of CUDA tensors; add it to thinrow.kernels.dispatch.CUDA_KERNELS")
    try:
        module = importlib.import_module(f"thinrow.kernels.triton.{CUDA_KERNELS[name]}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingExtraError("triton", "triton") from error
    found: Callable[..., Any] = getattr(module, name)
    return found


def compiled_loop(name: str) -> Callable[..., Any] | None:
    """The loop ``name``; None where there is none: on other systems than Linux, or with another backend than numba."""
    return _loop(name) if _active == "numba" and sys.platform == "linux" else None


def active() -> str:
    """The name of the active backend."""
    return _active


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Make ``backend`` the active one within the context, for every thread of the process.

    Raises:
        InputError: there is no such backend.
    """
    global _active
    if backend not in BACKENDS:
        raise InputError(f"no kernel backend {backend!r}; there are {', '.join(BACKENDS)}")
    previous, _active = _active, backend
    try:
        yield
    finally:
        _active = previous


@cache
def _loop(name: str) -> Callable[..., Any] | None:
    found: Callable[..., Any] = getattr(importlib.import_module(f"thinrow.kernels.numba.{LOOPS[name]}"), name)
    # With NUMBA_DISABLE_JIT it is a plain function, which calls no C.
    return found if hasattr(found, "py_func") else None


@cache
def _find(backend: str, name: str) -> Callable[..., Any]:
    if name not in KERNELS:
        raise InputError(f"no kernel {name!r}; add it to thinrow.kernels.dispatch.KERNELS")
    file = KERNELS[name]
    package = "torch" if backend == "numba" and file in _TORCH_MODULES else backend
    module = importlib.import_module(f"thinrow.kernels.{package}.{file}")
    found: Callable[..., Any] = getattr(module, name)
    return found
