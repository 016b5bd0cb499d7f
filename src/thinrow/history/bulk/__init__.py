"""Bulk load with bounded memory: sources, sorted runs, numbers, merge, journal. ``history.load`` joins them."""
