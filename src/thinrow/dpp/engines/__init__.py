"""Engines run the production of base batches and deliver them in virtual order."""

from thinrow.dpp.engines.engine import Engine
from thinrow.dpp.engines.local import ThreadEngine

__all__ = ["Engine", "ThreadEngine"]
