"""Training: a loop readable top to bottom, its metrics, and resuming."""
