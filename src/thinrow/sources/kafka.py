"""A topic of a broker that speaks the Kafka protocol, read by confluent-kafka.

Worked example, ``kafka://broker:9092/clicks?format=json``: partition 0 stands at ``{"offset": 120, "topic":
"AaIq..."}`` in the store. When the group gives this process partition 0, it is assigned *there*, whatever the broker
believes; what the broker is told afterwards (a commit once the store holds the events) serves its monitoring alone.

The topic's id tells a topic that was deleted and made again, or a broker that came back empty, from the one that was
read: its offsets begin anew, and so do we. Between two readers of a partition the stored position decides
(``PositionConflict``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from thinrow.core.errors import InputError, MissingExtraError, StoreError
from thinrow.schema import EventSchema
from thinrow.sources.decode import Decoder
from thinrow.sources.source import (
    SOURCE_ID,
    SOURCE_KEY,
    SOURCE_TS,
    Batch,
    Move,
    Origin,
    Positions,
    Refused,
    position,
    position_text,
)
from thinrow.sources.wanted import Wanted, added_by_source, wanted_of

try:
    import confluent_kafka as ck
    from confluent_kafka.admin import AdminClient
except ImportError as e:
    raise MissingExtraError("confluent-kafka", "kafka") from e

#: The broker is asked so often whether the topic is still the one that was read.
_CHECK_S = 10.0
_ANSWER_S = 10.0
#: About as much is read at once, judged by the mean of what was read last.
_BATCH_BYTES = 32 << 20
#: Mapped over the messages of a batch: a call from C, at half the time of a method looked up for each.
_ERROR, _PARTITION, _OFFSET, _VALUE = ck.Message.error, ck.Message.partition, ck.Message.offset, ck.Message.value


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """Attributes:
    brokers: ``host:port``, several with commas.
    topic: its name.
    group: readers of one group share the partitions.
    partitions: these alone, without a group; empty for the group's choice.
    begin: "earliest" or "latest": where a partition begins that has no position.
    config: further settings of librdkafka (security, fetch sizes).
    """

    brokers: str
    topic: str
    group: str = "thinrow"
    partitions: tuple[int, ...] = ()
    begin: str = "earliest"
    config: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.begin not in ("earliest", "latest"):
            raise InputError(f"begin is {self.begin!r}; it must be 'earliest' or 'latest'")


class KafkaSource:
    """See the module."""

    reads_ahead = True

    def __init__(self, name: str, options: KafkaOptions, decoder: Decoder) -> None:
        """Connects in ``start``."""
        self.name = name
        self._options, self._decoder = options, decoder
        self._consumer: Any = None
        self._admin: Any = None
        self._topic = self._lost = ""
        self._next: dict[int, int] = {}
        self._stored: dict[int, str | None] = {}
        self._assignments = 0
        self._at_end: set[int] = set()
        self._suspect = False
        self._checked = 0.0
        self._mean_bytes = 0
        self._wanted: Wanted = {}
        self._added: list[str] = []

    def start(self, schema: EventSchema, positions: Positions) -> None:
        """See ``Source``."""
        self.use(schema)
        self._positions = positions
        if self._consumer is None:
            self._connect()
        self._topic = self._topic_id()
        self._checked, self._suspect, self._lost = time.monotonic(), False, ""
        if self._options.partitions:
            self._assign([ck.TopicPartition(self._options.topic, p) for p in self._options.partitions])
        elif self._consumer.assignment():
            self._assign(self._consumer.assignment())
        else:
            self._consumer.subscribe(
                [self._options.topic],
                on_assign=lambda _, found: self._assign(found),
                on_revoke=lambda *_: self._let_go(),
                on_lost=lambda *_: self._let_go(),
            )

    def sample(self, n: int) -> pa.Table:
        """About ``n`` of the topic's first messages, decoded; see ``sample.Sampled``. Raises StoreError."""
        self._connect()
        self._topic = self._topic_id()
        topic = self._consumer.list_topics(self._options.topic, timeout=_ANSWER_S).topics[self._options.topic]
        found = [ck.TopicPartition(self._options.topic, p, self._end(p)[0]) for p in topic.partitions]
        self._consumer.assign(found)
        values: list[bytes] = []
        ended: set[int] = set()
        until = time.monotonic() + _ANSWER_S
        while len(values) < n and len(ended) < len(found) and time.monotonic() < until:
            for m in self._consumer.consume(n - len(values), 0.2):
                if m.error() is None and m.value() is not None:
                    values.append(m.value())
                elif m.error() is not None and m.error().code() == ck.KafkaError._PARTITION_EOF:
                    ended.add(m.partition())
        self.close()
        return self._decoder.decode(values, None).table

    def use(self, schema: EventSchema) -> None:
        """See ``Source``."""
        self._wanted, self._added = wanted_of(schema), added_by_source(schema)

    def _connect(self) -> None:
        options = self._options
        common: dict[str, Any] = {"bootstrap.servers": options.brokers, "error_cb": self._on_error, **options.config}
        self._admin = AdminClient({**common, "logger": _quiet()})
        self._consumer = ck.Consumer(
            {
                "fetch.wait.max.ms": 50,
                "session.timeout.ms": 10_000,
                **common,
                "group.id": options.group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                # A position that the broker no longer has is for a person to decide on.
                "auto.offset.reset": "error",
                "logger": _quiet(),
            }
        )

    def _on_error(self, error: Any) -> None:
        # Whoever answers next may be another broker, with another topic of the name.
        self._suspect = True

    def _topic_id(self) -> str:
        """The topic's id; empty where the broker has none. Raises StoreError where there is no such topic."""
        name = self._options.topic
        try:
            found = self._admin.describe_topics(ck.TopicCollection([name]), request_timeout=_ANSWER_S)[name].result()
        except ck.KafkaException as e:
            raise StoreError(f"topic {name!r} at {self._options.brokers}: {e.args[0].str()}; check both") from e
        text = str(found.topic_id or "")
        return "" if set(text) <= {"A", "="} else text

    def _assign(self, found: Sequence[Any]) -> None:
        """Begin at the stored positions."""
        stored = self._positions()
        self._assignments += 1
        self._let_go()
        places = []
        for part in found:
            text = stored.get(str(part.partition))
            held = position(text)
            self._stored[part.partition] = text
            if held and _may_be(held.get("topic", ""), self._topic):
                offset = int(held["offset"])
            elif held:
                # Another topic under this name: nothing of it is in the store.
                offset = self._end(part.partition)[0]
            else:
                offset = self._end(part.partition)[0 if self._options.begin == "earliest" else 1]
            self._next[part.partition] = offset
            places.append(ck.TopicPartition(self._options.topic, part.partition, offset))
        self._consumer.assign(places)

    def _end(self, partition: int) -> tuple[int, int]:
        """First offset, and the one after the last."""
        try:
            low, high = self._consumer.get_watermark_offsets(
                ck.TopicPartition(self._options.topic, partition), timeout=_ANSWER_S
            )
        except (ck.KafkaException, TypeError) as e:
            raise StoreError(f"the broker does not tell the offsets of {self._options.topic}/{partition}: {e}") from e
        return low, high

    def _gap(self, partition: int, offset: int, low: int, high: int) -> str:
        """What to say where the broker has the offsets ``[low, high)``, and reading is to go on at ``offset``."""
        return (
            f"offset {offset} of {self._options.topic}/{partition} is not there: the broker has {low} to {high - 1}. "
            "What lies between is lost to its retention, or it lost its log. To go on with what it has, give the "
            "source another name"
        )

    def _look_for_gaps(self) -> None:
        """Some brokers do not answer at all where they are asked for what is beyond their end."""
        for partition, offset in self._next.items():
            part = ck.TopicPartition(self._options.topic, partition)
            try:
                low, high = self._consumer.get_watermark_offsets(part, cached=True)
            except ck.KafkaException:
                # Asked again when there is nothing again.
                continue
            if 0 <= high < offset:
                self._lost = self._gap(partition, offset, max(low, 0), high)

    def _let_go(self) -> None:
        self._next, self._stored, self._at_end = {}, {}, set()

    def read(self, max_events: int, timeout_s: float) -> Batch | None:
        """See ``Source``. Raises StoreError where events are gone from the broker that were never read."""
        if self._suspect or time.monotonic() - self._checked > _CHECK_S:
            self._check_topic()
        before = self._assignments
        if self._mean_bytes:
            max_events = max(1, min(max_events, _BATCH_BYTES // self._mean_bytes))
        messages = [] if self._lost else self._consumer.consume(max_events, timeout_s)
        if not messages:
            self._look_for_gaps()
        if self._lost:
            raise StoreError(self._lost)
        if self._assignments != before or self._suspect:
            # Some may be of before the new assignment, some of after it: an offset may be followed by a lower one.
            if self._assignments != before and self._next and messages:
                self._assign([ck.TopicPartition(self._options.topic, p) for p in list(self._next)])
            elif messages:
                self._check_topic(again=True)
            return None
        return self._batch(messages) if messages else None

    def _check_topic(self, again: bool = False) -> None:
        """Begin anew where the topic is another one; ``again``: messages were dropped, so read them again anyway."""
        self._suspect = False
        try:
            found = self._topic_id()
        except StoreError:
            # A broker that is away, or has no such topic yet, may come back.
            self._suspect = True
            time.sleep(0.1)
            return
        self._checked = time.monotonic()
        another = not _may_be(self._topic, found)
        self._topic = found
        if (another or again) and self._next:
            self._assign([ck.TopicPartition(self._options.topic, p) for p in list(self._next)])

    def _batch(self, messages: Sequence[Any]) -> Batch | None:
        errors = list(map(_ERROR, messages))
        # By type: an error of the client cannot be compared with None.
        whole = set(map(type, errors)) == {type(None)}
        if not whole:
            # The end of a partition comes after its messages, and counts only there.
            for m, error in zip(messages, errors, strict=True):
                self._at_end.discard(m.partition())
                if error is not None:
                    self._hear(m.partition(), error)
            messages = [m for m, error in zip(messages, errors, strict=True) if error is None]
        messages, last = self._new(messages, whole)
        if not last:
            return None
        moves = {}
        for partition, offset in last.items():
            after = position_text(offset=offset + 1, topic=self._topic)
            moves[str(partition)] = Move(self._stored[partition], after)
            self._next[partition], self._stored[partition] = offset + 1, after
        values: list[Any] = list(map(_VALUE, messages))
        good = messages
        if None in values:
            good = [m for m, value in zip(messages, values, strict=True) if value is not None]
            values = [value for value in values if value is not None]
        n_bytes = sum(map(len, values))
        self._mean_bytes = n_bytes // len(messages)
        decoded = self._decoder.decode(values, self._wanted)
        kept = good if len(decoded.rows) == len(good) else [good[i] for i in decoded.rows]
        # Asked for later, when the topic may be another one.
        origin = partial(_origin, topic=self._topic)
        return Batch(
            self._with_added(decoded.table, kept),
            moves,
            lambda row: origin(kept[row]),
            [Refused(origin(good[i]), why) for i, why in sorted(decoded.refused.items())],
            len(messages) - len(good),
            n_bytes,
            how=self._decoder.describe(),
        )

    def _new(self, messages: Sequence[Any], goes_on: bool) -> tuple[Sequence[Any], dict[int, int]]:
        """Messages that were not read yet, and the last offset of each partition. ``goes_on``: no partition that has
        some is at its end."""
        partitions = np.fromiter(map(_PARTITION, messages), np.int64, len(messages))
        offsets = np.fromiter(map(_OFFSET, messages), np.int64, len(messages))
        fresh = np.zeros(len(messages), np.bool_)
        last: dict[int, int] = {}
        present: list[int] = np.unique(partitions).tolist()
        if goes_on:
            self._at_end -= set(present)
        for partition in present:
            at = np.flatnonzero(partitions == partition)
            if partition not in self._next:
                continue
            highest = np.maximum.accumulate(np.concatenate([[self._next[partition] - 1], offsets[at]]))
            fresh[at] = offsets[at] > highest[:-1]
            if fresh[at].any():
                last[partition] = int(highest[-1])
        return (messages if fresh.all() else [messages[i] for i in np.flatnonzero(fresh).tolist()]), last

    def _hear(self, partition: int, error: Any) -> None:
        code = error.code()
        if code == ck.KafkaError._PARTITION_EOF:
            self._at_end.add(partition)
        elif code in (ck.KafkaError._AUTO_OFFSET_RESET, ck.KafkaError.OFFSET_OUT_OF_RANGE):
            if not _may_be(self._topic, self._topic_id()):
                self._suspect = True
                return
            self._lost = self._gap(partition, self._next.get(partition, -1), *self._end(partition))
        elif error.fatal():
            raise StoreError(f"the client of {self._options.brokers} gave up: {error.str()}")
        else:
            self._suspect = True

    def _with_added(self, table: pa.Table, messages: Sequence[Any]) -> pa.Table:
        topic = f"{self._options.topic}@{self._topic}" if self._topic else self._options.topic
        for name in self._added:
            if name == SOURCE_ID:
                column = pa.array([f"{topic}/{m.partition()}/{m.offset()}" for m in messages], pa.string())
            elif name == SOURCE_KEY:
                column = pa.array([_text(m.key()) for m in messages], pa.string())
            else:
                assert name == SOURCE_TS
                column = pa.array([m.timestamp()[1] if m.timestamp()[0] else None for m in messages], pa.int64())
            table = table.append_column(name, column)
        return table

    def acknowledge(self, batch: Batch) -> None:
        """Tell the broker, for who watches the group's lag. Nothing rests on it."""
        if self._options.partitions:
            return
        offsets = [
            ck.TopicPartition(self._options.topic, int(p), int(position(m.after)["offset"]))
            for p, m in batch.moves.items()
        ]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except ck.KafkaException:
            return

    def ended(self) -> bool:
        """See ``Source``: of the partitions that this process has."""
        return bool(self._next) and self._at_end >= set(self._next)

    def lag(self) -> int | None:
        """Messages that the broker has beyond what was read, as far as the client knows."""
        behind = 0
        for partition, at in self._next.items():
            try:
                part = ck.TopicPartition(self._options.topic, partition)
                high = self._consumer.get_watermark_offsets(part, cached=True)[1]
            except (ck.KafkaException, TypeError):
                return None
            behind += max(0, high - at)
        return behind

    def close(self) -> None:
        """Leave the group."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


def _may_be(topic: str, other: str) -> bool:
    """Whether two ids may be of one topic: a broker that knows no ids gives none, and some one day learn them."""
    return topic == other or not topic or not other


def _origin(message: Any, topic: str) -> Origin:
    where = position_text(offset=message.offset(), topic=topic)
    return Origin(str(message.partition()), where, message.value(), message.key())


def _text(key: bytes | None) -> str | None:
    if key is None:
        return None
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None


def _quiet() -> Any:
    """librdkafka's own log lines; errors come to ``error_cb``."""
    import logging

    log = logging.getLogger("thinrow.kafka")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    return log
