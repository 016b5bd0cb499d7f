"""Engines by name."""

from __future__ import annotations

from thinrow.core.check import shown
from thinrow.core.errors import InputError
from thinrow.dpp.engines.engine import EngineChoice, EngineName
from thinrow.dpp.engines.local import Threads
from thinrow.dpp.engines.processes import Processes
from thinrow.dpp.engines.ray import Ray

_ENGINES = {"threads": Threads, "processes": Processes, "ray": Ray}


def engine_of(engine: EngineName | EngineChoice) -> EngineChoice:
    """An engine by its name, with its defaults, or as it is.

    Raises:
        InputError: there is no engine of that name.
    """
    if isinstance(engine, str) and engine in _ENGINES:
        choice: EngineChoice = _ENGINES[engine]()
        return choice
    if isinstance(engine, str) or not callable(getattr(engine, "start", None)):
        raise InputError(f"engine={shown(engine)}; give 'threads', 'processes', 'ray' or one of these with settings")
    return engine
