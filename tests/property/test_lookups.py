"""What embedding servers answer is what the mapped table holds, pooled key by key."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrow.checkpoints import ServingTable
from thinrow.core.routing import Routing
from thinrow.serving.lookups import Bags, EmbeddingClient
from thinrow.serving.lookups.server import LOOPS
from thinrow.testing.lookups import over_the_wire, pooled_by_hand, servers, write_exports

_WAYS = list(itertools.product((0, 2), ("float32", "float16", "int8")))
_names = itertools.count()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[Path]]:
    """Two exports each: of two tables, in one to three shards, and of one table of another width."""
    out = {}
    for number, (deltas, dtype) in enumerate(_WAYS):
        folder = tmp_path_factory.mktemp("exports")
        write_exports(folder / "a", {"user.": 4, "item.": 9}, deltas=deltas, shards=1 + number % 3, dtype=dtype)
        write_exports(folder / "b", {"": 1}, deltas=deltas, dtype=dtype, keys=60)
        out[deltas, dtype] = [folder / "a", folder / "b"]
    return out


_keys = st.lists(st.integers(-3, 330), max_size=40).map(lambda keys: np.array(keys, np.int64))


@st.composite
def _bags(draw: st.DrawFn) -> Bags:
    keys = draw(_keys)
    cuts = draw(st.lists(st.integers(0, len(keys)), max_size=8))
    weights = None
    if draw(st.booleans()):
        weights = np.random.default_rng(draw(st.integers(0, 9))).normal(size=len(keys)).astype(np.float32)
    bounds = np.array([0, *sorted(cuts), len(keys)], np.int64)
    return Bags(keys, bounds, draw(st.sampled_from(["sum", "mean"])), weights)


@settings(max_examples=25)
@given(
    way=st.sampled_from(_WAYS),
    loop=st.sampled_from(LOOPS),
    cuts=st.lists(st.integers(1, (1 << 64) - 1), max_size=3, unique=True),
    wire=st.sampled_from(["float32", "float16", "int8"]),
    reads=st.lists(
        st.dictionaries(st.sampled_from(["user.", "item.", ""]), st.one_of(_keys, _bags()), min_size=1),
        min_size=1,
        max_size=3,
    ),
)
def test_answers_are_those_of_the_mapped_table(folders, way, loop, cuts, wire, reads) -> None:  # type: ignore[no-untyped-def]
    routing = Routing((0, *sorted(cuts)))
    # The compiled loop has sockets alone.
    address = "tcp:127.0.0.1:0" if loop == "compiled" else f"memory:lookups-{next(_names)}-%d"
    addresses = [address.replace("%d", str(shard)) for shard in range(len(routing))]
    where = {"user.": folders[way][0], "item.": folders[way][0], "": folders[way][1]}
    with (
        servers(folders[way], addresses, routing, loop=loop) as started,
        EmbeddingClient([[a] for _, a in started], routing=routing, deadline_s=60, dtype=wire) as client,
    ):
        for wanted in reads:
            answer = client.read(wanted)
            assert not answer.degraded
            for table, what in wanted.items():
                served = ServingTable.open(where[table], table)
                got, keys = answer[table], what.keys if isinstance(what, Bags) else what
                vectors, found = served.read(keys)
                if isinstance(what, Bags):
                    vectors = pooled_by_hand(where[table], table, what, routing, wire)
                    found = np.array([found[a:b].sum() for a, b in itertools.pairwise(what.bounds)], np.int64)
                else:
                    vectors = over_the_wire(vectors, wire)
                assert answer.versions[table] == served.version
                assert got.vectors.dtype == np.float32
                np.testing.assert_array_equal(got.vectors.view(np.uint32), vectors.view(np.uint32))
                np.testing.assert_array_equal(got.found, found)
                assert not got.degraded.any()
