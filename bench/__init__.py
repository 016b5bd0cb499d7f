"""Benchmarks: ``python -m bench CASE [--quick] --json -`` prints one JSON object with ratios as its last line."""
