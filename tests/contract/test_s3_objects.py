"""The object store of S3 keeps the contract against a real server, straight and through a network that fails."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinrow.storage.fetch import FetchPolicy
from thinrow.storage.objects import ObjectStore
from thinrow.storage.s3 import S3Objects
from thinrow.testing.faults import Fault, FaultProxy, Request
from thinrow.testing.object_store import ObjectStoreContract
from thinrow.testing.s3 import S3Server

_buckets = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as s:
        yield s


class TestS3(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: S3Server) -> None:
        self.server = server

    def make(self, folder: Path) -> ObjectStore:
        url = self.server.make_bucket(f"contract-{next(_buckets)}").replace("?", "/deep/prefix?")
        return S3Objects(url)


class TestS3OverABadNetwork(ObjectStoreContract):
    """A tenth of all requests fails, in every way."""

    @pytest.fixture(autouse=True)
    def _proxy(self, server: S3Server) -> Iterator[None]:
        self.server = server
        rng = random.Random(7)
        kinds = [Fault("status", 503), Fault("drop"), Fault("drop_answer"), Fault("truncate"), Fault("status", 500)]

        def fault(request: Request) -> Fault | None:
            return rng.choice(kinds) if rng.random() < 0.1 else None

        with FaultProxy(server.endpoint, fault) as self.proxy:
            yield

    def make(self, folder: Path) -> ObjectStore:
        url = self.server.make_bucket(f"contract-{next(_buckets)}", self.proxy.endpoint)
        return S3Objects(url, FetchPolicy(tries=10, backoff_s=0.001, timeout_s=5.0))
