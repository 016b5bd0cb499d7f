"""The training path's records: impression log, outcome join, and the thin training table in Iceberg.

``thinrow.examples.table`` (and all of pyiceberg with it) is imported only by those who name it.
"""
