"""Marks of tests that start real servers: where one is not installed they are skipped, or fail with
``THINROW_SERVERS=required`` in the environment. Needs pytest."""

from __future__ import annotations

import os

import pytest

from thinrow.testing.redis_server import MISSING, redis_is_installed

_OPTIONAL = os.environ.get("THINROW_SERVERS") != "required"

needs_redis = pytest.mark.skipif(_OPTIONAL and not redis_is_installed(), reason=MISSING)
