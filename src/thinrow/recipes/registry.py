"""Find a recipe by name, or in a file of the reader's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

from thinrow.core.errors import InputError
from thinrow.recipes import rankers
from thinrow.recipes.git import GIT
from thinrow.recipes.retail import RETAIL
from thinrow.training import TrainConfig

Recipe = Callable[[], TrainConfig]

#: Model -> its recipe for any data set.
SMALL = {
    f.__name__: f
    for f in (
        rankers.hstu,
        rankers.hstu_plain,
        rankers.hstu_semi_local,
        rankers.hstu_sampled,
        rankers.mtgr,
        rankers.argus,
        rankers.argus_kinds,
        rankers.hstu_retrieval,
        rankers.dlrm,
        rankers.moe,
        rankers.multi_embedding,
        rankers.wukong,
        rankers.sim,
        rankers.recis_click,
        rankers.recis_next,
    )
}

#: Named model_data_scale.
RECIPES: dict[str, Recipe] = {
    **{f"{name}_{data.name}_small": partial(recipe, data) for data in (RETAIL, GIT) for name, recipe in SMALL.items()},
    **{f"argus_{data.name}_pretrain": partial(rankers.argus_pretrain, data) for data in (RETAIL, GIT)},
    **{f"argus_feedback_{data.name}_pretrain": partial(rankers.argus_feedback, data) for data in (RETAIL, GIT)},
    "argus_retail_1b": partial(rankers.argus_1b, RETAIL),
}


def find_recipe(name: str) -> Recipe:
    """The recipe ``name``, or ``path/to/file.py:function``, whose file is run.

    Raises:
        InputError: there is none.
    """
    if name in RECIPES:
        return RECIPES[name]
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        raise InputError(f"no recipe {name!r}; there are {', '.join(RECIPES)}, or give path/to/file.py:function")
    if not Path(file).is_file():
        raise InputError(f"no file {file!r} to take the recipe {function!r} from; check the path")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise InputError(f"{file} cannot be run: {type(e).__name__}: {e}") from e
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"{file} has no function {function!r}; write `def {function}() -> TrainConfig`")

    def recipe() -> TrainConfig:
        try:
            config = found()
        except InputError:
            raise
        except Exception as e:
            raise InputError(f"{name} failed: {type(e).__name__}: {e}; a recipe is called without arguments") from e
        if not isinstance(config, TrainConfig):
            raise InputError(f"{name} returned a {type(config).__name__}; a recipe returns a TrainConfig")
        return config

    return recipe
