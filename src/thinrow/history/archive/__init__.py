"""The immutable tier: segments, generations, compaction and verification (docs/format/archive-v2.md)."""
