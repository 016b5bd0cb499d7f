"""Event sources: where events come from, and how they enter a store exactly once (docs/sources.md)."""
