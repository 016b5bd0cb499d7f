"""Embedding servers and their client: look-ups and pooling apart from the rankers that need them.

Class / does: ``ServedTables`` maps exports and picks up newer ones; ``EmbeddingServer`` answers look-ups in them over
connections; ``EmbeddingClient`` asks all shards at once, before a deadline, and puts their answers together.
"""

from thinrow.serving.lookups.client import Answer, EmbeddingClient
from thinrow.serving.lookups.routed import Bags, Vectors
from thinrow.serving.lookups.served import ServedTables
from thinrow.serving.lookups.server import EmbeddingServer, ServerLimits

__all__ = ["Answer", "Bags", "EmbeddingClient", "EmbeddingServer", "ServedTables", "ServerLimits", "Vectors"]
