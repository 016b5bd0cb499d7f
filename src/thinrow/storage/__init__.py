"""Bytes on disk: object stores, block codecs, containers, paged tables and manifests. Knows no users and no schema."""
