"""Streams over TCP, unix sockets and memory behave alike."""

from thinrow.testing.streams import StreamContract


class TestTcp(StreamContract):
    address = "tcp:127.0.0.1:0"


class TestUnix(StreamContract):
    address = "unix:{folder}/socket"


class TestMemory(StreamContract):
    address = "memory:{folder}"
