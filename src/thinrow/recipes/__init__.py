"""Runs as functions that return frozen dataclasses, named model_data_scale."""
