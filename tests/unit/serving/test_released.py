"""Rankers whose rows are on embedding servers: the scores of a table in memory, one version a request, and degraded
answers that say so."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinrow.checkpoints import Checkpoint, ServingTable, load, save, steps
from thinrow.cli.release import _publish_newer
from thinrow.core.errors import CheckpointMismatch, CheckpointNotFound, InputError, SchemaError, Unavailable
from thinrow.core.routing import Routing
from thinrow.core.units import DAY_MS
from thinrow.examples import ExampleTable, ImpressionLog, OutcomeLog, join_logs
from thinrow.history.store import HistoryStore
from thinrow.serving import Ranked, Ranker, Release, ServerRows, compare, publish
from thinrow.serving.lookups import EmbeddingClient, EmbeddingServer, ServedTables
from thinrow.serving.release import is_published, models_at, roll_back
from thinrow.testing.rankers import world_config
from thinrow.testing.world import World, brand_of, make_world
from thinrow.training import train

USERS, ITEMS = [1, 4, 7], [[3, 9, 27], [40, 41], [5]]
#: The second has bags.
MODELS = ("hstu", "argus")
WAIT_S = 60.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(world: World, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("run")
    with world.store() as store, world.table() as table:
        train(world_config(request.param, epochs=1), store, table, out=out)
    return load(out)


def moved(checkpoint: Checkpoint, step: int, rows: slice = slice(None), by: float = 0.125) -> Checkpoint:
    """A later checkpoint: some vectors and all weights are others."""
    tensors = {n: a.copy() for n, a in checkpoint.tensors.items()}
    tensors["table.values"][rows] += np.float32(by)
    for name, weight in tensors.items():
        if name.startswith("model.") and weight.dtype.kind == "f":
            weight += np.float32(by / 8)
    return dataclasses.replace(checkpoint, step=step, tensors=tensors)


@contextmanager
def serving(folder: Path, n: int = 2, **options: Any) -> Iterator[tuple[list[EmbeddingServer], EmbeddingClient]]:
    with ExitStack() as stack:
        routing = Routing.even(n)
        servers = [EmbeddingServer(ServedTables.open([folder], shard=i, routing=routing)) for i in range(n)]
        for server in servers:
            stack.callback(server.close)
        addresses = [[server.listen("tcp:127.0.0.1:0").address] for server in servers]
        yield servers, stack.enter_context(EmbeddingClient(addresses, **{"deadline_s": WAIT_S, **options}))


def on_servers(release: Release, client: EmbeddingClient, **options: Any) -> Any:
    return release.model(ServerRows(client, release.table, release.version, release.dim, **options))


def rank(ranker: Ranker, now_ms: int, first_id: int = 0, users: list[int] = USERS) -> Ranked:
    shown = ITEMS[: len(users)]
    return ranker.rank(
        np.arange(first_id, first_id + len(users)),
        users,
        now_ms,
        candidates={"item": shown, "brand": [brand_of(np.array(row)) for row in shown]},
        context={"city": ["city 0", "city 1", "nowhere"][: len(users)]},
    )


def test_scores_from_servers_are_those_of_a_table_in_memory_bit_for_bit(
    world: World, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    publish(checkpoint, tmp_path / "releases", shards=3)
    release = Release.open(tmp_path / "releases")
    with world.store() as store, serving(tmp_path / "releases") as (_, client):
        here, there = Ranker(store, checkpoint), Ranker(store, on_servers(release, client))
        mapped = Ranker(store, release.model())
        for users in ([1], [4], USERS):
            expected = rank(here, world.end_ms, users=users)
            for ranker in (there, mapped):
                found = rank(ranker, world.end_ms, users=users)
                assert found.scores.values.tobytes() == expected.scores.values.tobytes()
                assert not found.degraded.any()
    assert there.model_version == f"{checkpoint.meta['ranker']['model']['name']}@{release.version.step}-" + (
        f"{release.version.crc32c:08x}"
    )


def test_a_day_of_what_was_served_by_two_releases_is_rebuilt_without_a_difference(
    world: World, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    shutil.copytree(world.store_path, tmp_path / "store")
    folder = tmp_path / "releases"
    publish(checkpoint, folder, shards=2)
    first = Release.open(folder)
    with HistoryStore.open(tmp_path / "store") as store, serving(folder) as (servers, client):
        ranker = Ranker(store, on_servers(first, client), log=tmp_path / "shown")
        shown = ranker.log
        assert shown is not None
        rank(ranker, world.end_ms)
        publish(moved(checkpoint, checkpoint.step + 1, slice(0, 4)), folder, shards=2, delta=True)
        second = first.newest()
        assert second.version.step == checkpoint.step + 1
        # One server is ahead, one is not: the first release is still answered by both, the second by one of them.
        assert servers[0].tables.refresh()
        assert not rank(ranker, world.end_ms + 1, 10).degraded.any()
        before = ranker.swap(on_servers(second, client))
        half = rank(ranker, world.end_ms + 2, 20)
        assert half.degraded.any()
        assert servers[1].tables.refresh()
        assert not rank(ranker, world.end_ms + 3, 30).degraded.any()
        # And back.
        ranker.swap(before)
        assert not rank(ranker, world.end_ms + 4, 40).degraded.any()
        late = {"user": USERS, "ts": [world.end_ms - 9] * 3, "item": [1, 2, 3], "brand": brand_of(np.arange(3))}
        store.append(pa.table(late))
        store.compact()
        names = {"event_schema": store.schema, "example_schema": ranker.schema}
        with ExampleTable.create(tmp_path / "served", **names, n_buckets=2) as table:
            join_logs(shown, OutcomeLog(tmp_path / "none"), table, world.end_ms + 30 * DAY_MS)
            parity = compare(models_at(folder), store, table)
            assert parity.same
            assert parity.requests == 15
            assert parity.degraded == int((half.degraded > 0).sum())
            assert parity.unknown == 0
            assert compare([first.model()], store, table).unknown == 6
            # The wrong model's scores are found out.
            assert not compare(second.model(), store, table).same


def test_a_server_that_is_down_gives_defaults_that_are_counted_or_fails(
    world: World, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    publish(checkpoint, tmp_path / "releases", shards=2)
    release = Release.open(tmp_path / "releases")
    with world.store() as store, serving(tmp_path / "releases", deadline_s=5) as (servers, client):
        lax, strict = Ranker(store, on_servers(release, client)), Ranker(store, on_servers(release, client, fail=True))
        whole = rank(lax, world.end_ms)
        servers[1].close()
        found = rank(lax, world.end_ms)
        assert (found.degraded > 0).all()
        assert found.impressions.context["degraded_rows"].values.tolist() == found.degraded.tolist()
        assert found.scores.values.tobytes() != whole.scores.values.tobytes()
        with pytest.raises(Unavailable):
            rank(strict, world.end_ms)
        servers[0].close()
    with world.store() as store, EmbeddingClient([["tcp:127.0.0.1:9"]], deadline_s=5) as nobody:
        found = rank(Ranker(store, on_servers(release, nobody)), world.end_ms)
        assert (found.degraded > 0).all()
        with pytest.raises(Unavailable):
            rank(Ranker(store, on_servers(release, nobody, fail=True)), world.end_ms)


def test_degraded_rows_are_those_that_a_request_reads(world: World, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A request alone counts what it counts among others, as its rows do not depend on these."""
    publish(checkpoint, tmp_path / "releases", shards=2)
    release = Release.open(tmp_path / "releases")
    with world.store() as store, serving(tmp_path / "releases") as (servers, client):
        ranker = Ranker(store, on_servers(release, client))
        rank(ranker, world.end_ms)
        servers[0].close()
        together = rank(ranker, world.end_ms).degraded
        for row, user in enumerate(USERS):
            shown = [ITEMS[row]]
            alone = ranker.rank(
                [0],
                [user],
                world.end_ms,
                candidates={"item": shown, "brand": [brand_of(np.array(shown[0]))]},
                context={"city": [["city 0", "city 1", "nowhere"][row]]},
            )
            assert alone.degraded.tolist() == [together[row]]


def test_a_delta_has_what_changed_and_reads_as_a_full_release(checkpoint: Checkpoint, tmp_path: Path) -> None:
    later = moved(checkpoint, checkpoint.step + 5, slice(3, 6))
    for dtype in ("float32", "float16", "int8"):
        both, full = tmp_path / dtype, tmp_path / f"full-{dtype}"
        publish(checkpoint, both, dtype=dtype)
        path = publish(later, both, dtype=dtype, delta=True)
        publish(later, full, dtype=dtype)
        table, whole = (Release.open(f).model()._source._table for f in (both, full))  # type: ignore[union-attr]
        keys = checkpoint.tensors["table.keys"]
        assert table.read(keys)[0].tobytes() == whole.read(keys)[0].tobytes()
        size = sum(f.stat().st_size for f in path.glob("shard-*"))
        smaller = size < sum(f.stat().st_size for f in (full / path.name).glob("shard-*"))
        assert smaller == (dtype != "int8")
    # A key that is gone cannot be said by rows alone: the release is whole.
    fewer = {n: a[1:] if n in ("table.keys", "table.values") else a for n, a in later.tensors.items()}
    publish(dataclasses.replace(later, step=later.step + 1, tensors=fewer), tmp_path / "float32", delta=True)
    gone = Release.open(tmp_path / "float32").model()._source._table  # type: ignore[union-attr]
    assert not gone.read(later.tensors["table.keys"][:1])[1].any()


def test_an_earlier_release_is_made_the_newest_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    step, keys = checkpoint.step, checkpoint.tensors["table.keys"]
    first = Release.open(publish(checkpoint, tmp_path, shards=2))
    with pytest.raises(InputError, match=f"there are {step}$"):
        roll_back(tmp_path)
    delta = Release.open(publish(moved(checkpoint, step + 1, slice(0, 4)), tmp_path, shards=2, delta=True))
    publish(moved(checkpoint, step + 2), tmp_path, shards=2)
    served = ServedTables.open([tmp_path])
    for wanted, of in ((None, delta), (step, first)):
        again = Release.open(roll_back(tmp_path, wanted))
        assert again.version.step == Release.open(tmp_path).version.step
        assert again.name != of.name
        assert all(again.weights[n].tobytes() == a.tobytes() for n, a in of.weights.items())
        tables = [ServingTable.open(one.path, "table.") for one in (again, of)]
        assert tables[0].read(keys)[0].tobytes() == tables[1].read(keys)[0].tobytes()
        # As of any newer one.
        assert served.refresh()
        assert served.versions()["table."] == again.version
    # What is released later may rest on it.
    assert Release.open(publish(moved(checkpoint, step + 9), tmp_path, shards=2, delta=True)).version.step == step + 9


def test_newer_checkpoints_are_published_as_they_come_and_not_again_after_a_rollback(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    run, folder = tmp_path / "run", tmp_path / "releases"

    def trained(step: int) -> None:
        save(run, step, tensors=moved(checkpoint, step, by=step / 64).tensors, meta=checkpoint.meta)

    options: dict[str, Any] = {"shards": 2, "dtype": "float32", "keep": None, "delta": True}
    _publish_newer(run, folder, options)
    assert not steps(folder)
    for step in (10, 20):
        trained(step)
        _publish_newer(run, folder, options)
        _publish_newer(run, folder, options)
    assert steps(folder) == [10, 20]
    assert is_published(load(run).version, folder)
    roll_back(folder)
    _publish_newer(run, folder, options)
    assert steps(folder) == [10, 20, 21]
    # A checkpoint of an earlier step than the newest release is the newest release all the same.
    trained(20)
    assert is_published(load(run).version, folder)
    save(run, 20, tensors=moved(checkpoint, 20, by=3.0).tensors, meta=checkpoint.meta)
    _publish_newer(run, folder, options)
    assert steps(folder) == [10, 20, 21, 22]
    assert Release.open(folder).version.step == 22


def test_what_is_no_release_is_named(world: World, checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match=r"it is empty; write one with `thinrow release`"):
        Release.open(tmp_path / "empty")
    with pytest.raises(CheckpointNotFound, match=r"write one with `thinrow release`"):
        ServedTables.open([tmp_path / "empty"])
    with pytest.raises(CheckpointMismatch, match="is no release of a ranker"):
        Release.open(checkpoint.path)
    save(tmp_path / "other", 1, tensors={}, meta={})
    with pytest.raises(CheckpointMismatch, match="is not the checkpoint of a ranker"):
        publish(load(tmp_path / "other"), tmp_path / "releases")
    assert not steps(tmp_path / "releases")
    publish(checkpoint, tmp_path / "releases")
    release = Release.open(tmp_path / "releases")
    with world.store() as store, serving(tmp_path / "releases", 1) as (_, client):
        with pytest.raises(InputError, match="of a Model, which has a name"):
            Ranker(store, release.model(), model_version="m")
        narrow = release.model(ServerRows(client, release.table, release.version, release.dim + 1))
        with pytest.raises(InputError, match="serve the release that the model is of"):
            rank(Ranker(store, narrow), world.end_ms)
        ranker = Ranker(store, release.model())
        with pytest.raises(SchemaError, match="reads other fields of requests"):
            Ranker(store, checkpoint).swap(release.model())
        log = ImpressionLog(tmp_path / "log", store.schema, Ranker(store, checkpoint).schema)
        with pytest.raises(SchemaError, match=r"make it with ranker\.schema"):
            Ranker(store, release.model(), log=log)
        assert ranker.swap(release.model()).name == release.name
