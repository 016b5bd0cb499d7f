"""Engines run the production of base batches and deliver them in virtual order."""

from thinrow.dpp.engines.choose import engine_of
from thinrow.dpp.engines.engine import Engine, EngineChoice, EngineName
from thinrow.dpp.engines.in_turn import InTurn
from thinrow.dpp.engines.local import ThreadEngine, Threads
from thinrow.dpp.engines.processes import Processes
from thinrow.dpp.engines.ray import Ray
from thinrow.dpp.engines.shared import Shared

__all__ = [
    "Engine",
    "EngineChoice",
    "EngineName",
    "InTurn",
    "Processes",
    "Ray",
    "Shared",
    "ThreadEngine",
    "Threads",
    "engine_of",
]
