"""Bulk load and compaction on Ray: the same bytes as in threads, also where a worker is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinrow.core.errors import CorruptionError, InputError
from thinrow.history.archive.verify import verify_generation
from thinrow.history.buckets import BucketTask, BucketWrite, write_bucket
from thinrow.history.engines import RayEngine, engine_of
from thinrow.history.store import HistoryStore
from thinrow.schema import EventSchema

ray = pytest.importorskip("ray")
SCHEMA = EventSchema.infer(
    pa.schema({"user": pa.int64(), "ts": pa.int64(), "item": pa.int64(), "city": pa.string()}), user="user", time="ts"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[RayEngine]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield RayEngine()
    ray.shutdown()


def table_of(seed: int, n: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    city = pa.array([f"city {c}" for c in rng.integers(0, 50, n)])
    who = rng.integers(0, 300, n)
    return pa.table({"user": who, "ts": rng.integers(0, 999, n), "item": rng.integers(0, 1 << 40, n), "city": city})


def segments(store: HistoryStore) -> dict[int, list[bytes]]:
    """What the files of each bucket hold; their names are random."""
    generation = store.pin()
    assert verify_generation(generation) == []
    found: dict[int, list[bytes]] = {}
    for bucket, info in generation.segments:
        found.setdefault(bucket, []).append(store.archive.objects.get(info.name))
    return found


def loaded(path: Path, files: Path, engine: Any) -> HistoryStore:
    store = HistoryStore.create(path, SCHEMA, 4, sync=False)
    store.append(table_of(7, 500))
    store.bulk_load(files, load_id="a", engine=engine)
    return store


def die_once(task: BucketTask) -> BucketWrite | None:
    """The first of these kills the process that it runs in."""
    marker = Path(str(task.base.objects.root)) / "died"  # type: ignore[attr-defined]
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return write_bucket(task)
    os.kill(os.getpid(), signal.SIGKILL)
    return None


class Mortal:
    """An engine, one of whose workers dies."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine, self.slots = engine, engine.slots

    def call(self, task: Callable[[Any], Any], argument: Any) -> Any:
        return self._engine.call(die_once, argument)


def test_both_engines_give_the_same_bytes_though_a_worker_dies(tmp_path: Path, engine: RayEngine) -> None:
    files = tmp_path / "in"
    files.mkdir()
    for i in range(3):
        pq.write_table(table_of(i, 4_000), files / f"{i}.parquet")
    with (
        loaded(tmp_path / "local", files, "local") as local,
        loaded(tmp_path / "ray", files, Mortal(engine)) as far,
    ):
        assert (tmp_path / "ray" / "archive" / "died").exists()
        wanted = segments(local)
        assert sum(map(len, wanted.values())) == 4
        assert segments(far) == wanted
        for store, chosen in ((local, "local"), (far, engine)):
            store.append(table_of(8, 900))
            report = store.compact(full=True, engine=chosen)  # type: ignore[arg-type]
            assert (report.events, report.segments) == (900, 4)
        assert segments(far) == segments(local)


def fail(task: str) -> None:
    raise CorruptionError("it is wrong", file=task, user=3)


def test_errors_come_back_as_they_were(engine: RayEngine) -> None:
    with pytest.raises(CorruptionError, match="it is wrong") as caught:
        engine.call(fail, "a.seg")
    assert (caught.value.file, caught.value.user) == ("a.seg", 3)
    with pytest.raises(InputError, match="no engine 'spark'; there are local and ray"):
        engine_of("spark")  # type: ignore[arg-type]
