"""Serving: from a request to a ranked list and its impression."""
