"""Histories: the mutable recent tier, the immutable archive, and the version protocol that joins them."""
