"""Quality of the models: runs over seeds, kept as lines of JSON, and the page that is made of them (docs/quality.md).

Class / does / output: ``study`` lists ``Cell``s and trains them -> docs/quality.jsonl; ``page`` reads that file ->
docs/quality.md and its plots. ``tastes`` makes the synthetic data, whose best possible figures are known.
"""
