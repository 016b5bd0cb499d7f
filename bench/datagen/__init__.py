"""Seeded synthetic data, named by its parameters."""
