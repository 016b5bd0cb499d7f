"""Threads deliver in order, within a window, with errors as they are, and end when closed."""

import threading
import time

import pytest

from thinrow.core.errors import InputError
from thinrow.dpp.engines import ThreadEngine


def drain(engine):
    items = []
    while True:
        try:
            items.append(engine.next())
        except StopIteration:
            return items


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("thinrow-dpp")]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_items_come_in_order_whichever_is_done_first(threads):
    def produce(i):
        time.sleep(0.004 * (i % 3 == 0))
        return i * i

    engine = ThreadEngine(produce, first=3, stop=30, threads=threads, window=6)
    assert drain(engine) == [i * i for i in range(3, 30)]
    engine.close()
    assert not workers()


def test_no_more_than_the_window_is_in_flight():
    made = []
    engine = ThreadEngine(lambda i: made.append(i) or i, first=0, stop=100, threads=4, window=5)
    time.sleep(0.05)
    assert sorted(made) == [0, 1, 2, 3, 4]
    assert engine.next() == 0
    time.sleep(0.05)
    assert sorted(made) == [0, 1, 2, 3, 4, 5]
    engine.close()
    assert not workers()


class Sized:
    def __init__(self, number, nbytes):
        self.number, self.nbytes = number, nbytes


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("buffer_bytes", [1, 100, 10_000])
def test_what_waits_has_no_more_bytes_than_the_buffer_and_an_item_a_thread(threads, buffer_bytes):
    sizes = [(7 * i) % 60 for i in range(200)]
    engine = ThreadEngine(
        lambda i: Sized(i, sizes[i]), first=0, stop=200, threads=threads, window=150, buffer_bytes=buffer_bytes
    )
    deadline = time.monotonic() + 60
    # A reader that takes nothing: as much as there is room for is made, and not all.
    while (engine.peak_bytes < buffer_bytes and len(engine._done) < 150) or engine.gauges().busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [item.number for item in drain(engine)] == list(range(200))
    assert engine.peak_bytes < buffer_bytes + threads * max(sizes)
    assert engine._held_bytes == 0
    engine.close()


def test_an_error_comes_as_it_is_at_its_turn():
    error = KeyError("as it is")

    def produce(i):
        if i == 3:
            raise error
        return i

    engine = ThreadEngine(produce, first=0, stop=None, threads=3, window=8)
    assert [engine.next() for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            engine.next()
        assert caught.value is error
    engine.close()
    assert not workers()


def test_the_lowest_error_wins_whichever_is_raised_first():
    late = threading.Event()

    def produce(i):
        if i == 0:
            late.wait(5)
            raise ValueError("item 0")
        if i == 1:
            late.set()
            raise ValueError("item 1")
        return i

    engine = ThreadEngine(produce, first=0, stop=None, threads=2, window=8)
    with pytest.raises(ValueError, match="item 0"):
        engine.next()
    engine.close()


def test_close_ends_waiting_and_working_threads():
    begun = threading.Event()

    def produce(i):
        begun.set()
        time.sleep(0.02)
        return i

    engine = ThreadEngine(produce, first=0, stop=None, threads=3, window=2)
    begun.wait(5)
    engine.close()
    engine.close()
    assert not workers()
    with pytest.raises(StopIteration):
        engine.next()


def test_close_wakes_a_reader():
    hold = threading.Event()
    engine = ThreadEngine(lambda i: hold.wait(60), first=0, stop=None, threads=1, window=1)
    ended = []

    def read():
        try:
            engine.next()
        except StopIteration:
            ended.append(True)

    reader = threading.Thread(target=read)
    reader.start()
    closer = threading.Thread(target=engine.close)
    closer.start()
    reader.join(60)
    assert ended == [True]
    hold.set()
    closer.join(60)
    assert not workers()


def test_waiting_is_measured_and_costs_no_cpu():
    engine = ThreadEngine(lambda i: time.sleep(0.1), first=0, stop=1, threads=2, window=4)
    cpu = time.process_time()
    engine.next()
    assert engine.waited_s > 0.05
    assert time.process_time() - cpu < 0.08
    engine.close()


def test_sizes_below_one_are_named():
    with pytest.raises(InputError, match="threads=0"):
        ThreadEngine(lambda i: i, first=0, stop=1, threads=0, window=1)
    with pytest.raises(InputError, match="window=0"):
        ThreadEngine(lambda i: i, first=0, stop=1, threads=1, window=0)


def test_closing_beside_a_resize_waits_for_threads_that_have_begun(monkeypatch):
    begin, starting = threading.Thread.start, threading.Event()

    def slowly(thread):
        if thread.name.startswith("thinrow-dpp-1"):
            starting.set()
            time.sleep(0.05)
        begin(thread)

    engine = ThreadEngine(lambda number: number, first=0, stop=None, threads=1, window=2)
    monkeypatch.setattr(threading.Thread, "start", slowly)
    grower = threading.Thread(target=engine.resize, args=(3,))
    grower.start()
    starting.wait(60)
    engine.close()
    grower.join()
    engine.resize(5)
    assert not [t for t in threading.enumerate() if t.name.startswith("thinrow-dpp-")]
