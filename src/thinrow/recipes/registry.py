"""Find a recipe by name, or in a file of the reader's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from thinrow.core.errors import InputError
from thinrow.recipes import git, retail
from thinrow.training import TrainConfig

Recipe = Callable[[], TrainConfig]

#: The functions of ``thinrow.recipes.retail`` and ``thinrow.recipes.git`` that are named model_data_scale.
RECIPES: dict[str, Recipe] = {
    name: recipe
    for data in (retail, git)
    for name, recipe in vars(data).items()
    if name.endswith(("_small", "_pretrain", "_1b")) and recipe.__module__ == data.__name__
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
