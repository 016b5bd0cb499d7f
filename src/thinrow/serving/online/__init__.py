"""The ranker as a service: requests of many callers, ranked in small batches, over HTTP or in process.

Class / does: ``Batcher`` bounds what waits and ranks together what came together; ``Live`` follows releases and swaps
the model whole; ``create_app`` is the HTTP side; ``process`` runs it, ``cluster`` runs it with embedding servers.
"""
