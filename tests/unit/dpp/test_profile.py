"""A profile counts what was read and says what it cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from thinrow.cli.dpp import command
from thinrow.core.errors import InputError
from thinrow.dpp import BatchBudget, loader
from thinrow.dpp.profile import profile
from thinrow.schema import Projection
from thinrow.testing.world import World, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), users=6, days=8)


def test_figures_are_those_of_the_batches_that_were_counted(world: World) -> None:
    with world.store() as store, world.table() as table:
        options = {"base_rows": 4, "block": 2, "seed": 3}
        batches = list(loader(store, table, threads=1, **options))  # type: ignore[arg-type]
        found = profile(store, table, batches=100, **options)
        assert (found.batches, found.examples) == (len(batches) - 1, sum(map(len, batches[1:])))
        assert found.events == sum(int(b.histories.lengths().sum()) for b in batches[1:])
        assert profile(store, table, batches=2, **options).batches == 2
        assert 0 < found.cpu_s_per_million < 1e9
        assert sum(found.stage_s.values()) == pytest.approx(found.wall_s, rel=0.2)
        assert {"examples", "features", "batch"} <= found.stage_s.keys()
        assert {"event_ts", "item", "brand"} <= found.column_bytes.keys()
        # A column that is not read costs nothing, a budget goes the way of whole batches.
        narrow = profile(store, table, batches=100, projection=Projection(columns=("item",)), **options)
        assert "brand" not in narrow.column_bytes
        assert profile(store, table, batches=3, budget=BatchBudget(limit=20), **options).batches == 3
        one = profile(store, table, batches=3, base_rows=1000)
        assert (one.batches, one.examples) == (1, sum(map(len, batches)))
        assert one.column_bytes["item"] > 0
        assert one.stage_s["examples"] > 0
        with pytest.raises(InputError, match="there is no example to read"):
            profile(store, table, batches=3, base_rows=1000, block=1, interleave=1, until_ms=0)


def test_the_command_prints_stages_and_columns_of_what_a_recipe_reads(world: World, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from thinrow.testing.rankers import world_config\ndef mine():\n    return world_config('dlrm')\n"
    )
    words = ["profile", "--store", str(world.store_path), "--table", str(world.table_path)]
    shown = CliRunner().invoke(command, [*words, "--recipe", f"{recipe}:mine", "--batches", "2"])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].startswith("2 batches of 32 examples with ")
    assert "CPU s per million events" in lines[0]
    shares = [float(line.split()[-1].rstrip("%")) for line in lines if line.startswith("stage")]
    assert 80 <= sum(shares) <= 120
    assert {line.split()[1] for line in lines if line.startswith("column")} >= {"event_ts", "item", "brand"}
    refused = CliRunner().invoke(command, [*words, "--recipe", f"{recipe}:mine", "--max-len", "5"])
    assert isinstance(refused.exception, InputError)
    narrow = CliRunner().invoke(command, [*words, "--columns", "item", "--max-len", "5"])
    assert narrow.output.startswith("1 batches of 48 examples with ")
