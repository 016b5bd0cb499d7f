"""The immutable tier: segments, generations, tombstones and verification (docs/format/archive-v2.md)."""
