"""Recipes: found by name or in a file, and changed one value at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from thinrow.cli.size import command as size_command
from thinrow.cli.train import command
from thinrow.core.errors import InputError
from thinrow.models.sizes import sizes_of
from thinrow.recipes.override import override
from thinrow.recipes.registry import RECIPES, find_recipe
from thinrow.training import TrainConfig


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_data_that_survives_json(name: str) -> None:
    config = find_recipe(name)()
    again = TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert sizes_of(config.ranker).parameters > 0


def test_the_commands_help_names_every_recipe() -> None:
    assert command.help is not None
    words = set(re.split(r"[\s,;.()]+", command.help))
    for name in RECIPES:
        # Of MODEL_retail_small and MODEL_git_small the model is named.
        assert re.sub(r"_(retail|git)_small$", "", name) in words


def test_a_recipe_of_a_thousand_million_weights_is_sized_and_runs_when_small() -> None:
    config = find_recipe("argus_retail_1b")()
    sizes = sizes_of(config.ranker)
    assert 0.95e9 < sizes.parameters < 1.05e9
    for name, text in (("time_pairs", "4"), ("position_pairs", "4"), ("heads", "1"), ("width", "32"), ("layers", "2")):
        config = override(config, f"ranker.model.{name}", text)
    small = sizes_of(config.ranker)
    module, _ = config.ranker.build()
    assert small.parameters == sum(p.numel() for p in module.parameters())
    layers = sum(p.numel() for p in module.layers.parameters())
    # Two tokens an event; each weight of a layer is multiplied and added once a token, each pair costs 4 W a layer.
    pairs = 4 * 32 * 2 * (20 * 21 / 2 + 3 * 21)
    assert small.forward_flops(10, 3) == 2 * layers * 23 + 2 * (small.parameters - layers) * 13 + pairs
    result = CliRunner().invoke(size_command, ["argus_retail_1b", "--events", "8192", "--keys", "1000"])
    assert result.exit_code == 0
    assert f"{sizes.parameters:,} weights" in result.output


def test_values_change_by_their_dotted_names() -> None:
    config = RECIPES["hstu_retail_small"]()
    assert override(config, "epochs", "2").epochs == 2
    assert override(config, "dense_lr", "1").dense_lr == 1.0
    assert override(config, "ranker.model.layers", "3").ranker.model.layers == 3  # type: ignore[union-attr]
    assert override(config, "ranker.projection.max_len", "64").ranker.projection.max_len == 64
    assert override(config, "sparse_optimizer", "adam").sparse_optimizer == "adam"
    assert override(RECIPES["dlrm_retail_small"](), "ranker.model.hidden", "[8, 4]").ranker.model.hidden == (8, 4)  # type: ignore[union-attr]
    assert override(config, "rows.until_ms", "null") == config
    argus = override(RECIPES["argus_retail_small"](), "ranker.model.items", '[["e_item", "c_item"]]')
    assert argus.ranker.model.items == (("e_item", "c_item"),)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("epoch", "2", "no value 'epoch'.*epochs"),
        ("ranker.model.layer", "2", "no value 'ranker.model.layer'"),
        ("epochs.x", "2", "holds no further values"),
        ("epochs", "two", "is of type str"),
        ("epochs", "true", "is of type bool"),
        ("epochs", "1.5", "is of type float"),
        ("epochs", "null", "must be of type int"),
        ("dense_lr", "null", "must be of type float"),
        ("ranker.projection.max_len", "2.5", "is of type float; it must be of type int | None"),
        ("ranker.projection.max_len", "abc", "is of type str"),
        ("rows.user_share", "abc", "is of type str"),
        ("ranker.model.shortest_ms", "0", "shortest_ms=0"),
        ("epochs", "0", "epochs=0; it must be from 1"),
        ("ranker.model", "3", "is a HSTUConfig; set one of its values"),
        ("ranker.plan", "3", "is a FeaturePlan"),
        ("sparse_optimizer", "lion", "there are adagrad, adam, adamw, rowwise_adagrad, sgd"),
    ],
)
def test_typos_fail(name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        override(RECIPES["hstu_retail_small"](), name, text)


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from thinrow.recipes.override import override\n"
        "from thinrow.recipes.registry import RECIPES\n"
        "def wide():\n    return override(RECIPES['hstu_retail_small'](), 'ranker.model.width', '64')\n"
        "def wrong():\n    return 3\n"
    )
    assert find_recipe(f"{file}:wide")().ranker.model.width == 64  # type: ignore[union-attr]
    with pytest.raises(InputError, match="returned a int"):
        find_recipe(f"{file}:wrong")()
    with pytest.raises(InputError, match="no function 'narrow'"):
        find_recipe(f"{file}:narrow")
    with pytest.raises(InputError, match="no file"):
        find_recipe(f"{tmp_path}/other.py:wide")
    with pytest.raises(InputError, match="no recipe 'hstu'; there are hstu_retail_small"):
        find_recipe("hstu")
