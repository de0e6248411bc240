"""Topics of a Kafka broker (extra ``kafka``). Each record counts exactly once.

Each partition is a source with a watermark of its own. The journal has the records together with the partition's
offset. So a restart needs no record a second time, and no consumer group is used. All partitions of a topic share one
consumer, whose thread fetches and decodes. Partition 0 also looks for new partitions.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from edge.codecs import MessageDecoder, TextFormatName
from edge.config import TextConfig, TlsConfig, secret
from edge.records import Chunk, Position, Source
from edge.source_kinds import KeptSource, SourceContext
from edgewater.configuration import refusal
from edgewater.errors import InvalidConfig
from edgewater.streams import Delivery
from edgewater.wire import LossReason

log = logging.getLogger(__name__)

MAX_MESSAGES = 10_000
"""Messages that are decoded together."""
POLL_S = 0.1
MAX_QUEUED_BYTES = 4 << 20
"""A partition is paused when more bytes of its messages wait for the agent."""
PARTITIONS_EVERY_S = 30.0
REQUEST_S = 10.0
MAX_PARTITIONS = 1000
OLDEST = -2
"""librdkafka's offset of the oldest message."""
_RESERVED = (
    "group.id", "enable.auto.commit", "auto.offset.reset", "enable.partition.eof", "bootstrap.servers",
    "isolation.level", "security.protocol", "sasl.username", "sasl.password", "sasl.mechanisms",
)  # fmt: skip


class KafkaConfig(TextConfig):
    """The options below ``kafka:``.

    Attributes:
        brokers: host:port of one or more brokers.
        topic: name of the topic.
        start: where to begin in a partition that was never read: at its oldest record, or at records from now on.
        key: the column that gets the record's key as text.
        timestamp: the column that gets the record's timestamp in ms.
        headers: for each header, the column that gets the header's value as text.
        username: user of SASL. None: no SASL.
        password: password of SASL.
        mechanism: mechanism of SASL.
        tls: true means TLS with the system's CAs.
        properties: further properties of librdkafka.
    """

    brokers: list[str] = Field(min_length=1)
    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")
    format: TextFormatName = "ndjson"
    start: Literal["earliest", "latest"] = "earliest"
    key: str | None = None
    timestamp: str | None = None
    headers: dict[str, str] = {}
    username: str | None = None
    password: SecretStr | None = None
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    tls: TlsConfig | bool = False
    properties: dict[str, str] = {}

    _password = field_validator("password", mode="before")(secret)

    @field_validator("properties")
    @classmethod
    def _not_reserved(cls, properties: dict[str, str]) -> dict[str, str]:
        for name in properties:
            if name in _RESERVED:
                raise refusal(f"properties other than {', '.join(_RESERVED)}", f"the edge sets {name} itself")
        return properties

    @model_validator(mode="after")
    def _complete(self) -> KafkaConfig:
        if (self.username is None) != (self.password is None):
            raise refusal("username and password together")
        if self.format == "csv" and self.csv.header is None:
            raise refusal("csv: {header: […]}, as messages have no header line", "format is csv")
        return self

    @property
    def more(self) -> list[str]:
        """The columns that are not in the bodies of messages."""
        return [*filter(None, (self.key, self.timestamp)), *self.headers.values()]

    def column_fault(self, columns: Sequence[str]) -> tuple[str, str] | None:
        for name in self.more:
            if name not in columns:
                return f"columns of the stream or its time: {', '.join(columns)}", f"{name} is none of them"
            if self.more.count(name) > 1:
                return "one column for each of key, timestamp and headers", f"{name} is there twice"
        return super().column_fault([name for name in columns if name not in self.more])

    def client(self) -> dict[str, Any]:
        """Returns the properties of librdkafka's consumer."""
        tls = self.tls if isinstance(self.tls, TlsConfig) else TlsConfig()
        files = {"ssl.ca.location": tls.ca, "ssl.certificate.location": tls.cert, "ssl.key.location": tls.key}
        result: dict[str, Any] = {
            **{name: path for name, path in files.items() if path is not None},
            "queued.max.messages.kbytes": 4_096,
            "queued.min.messages": 10_000,
            "fetch.max.bytes": 4_194_304,
            **self.properties,
            "isolation.level": "read_committed",
            "bootstrap.servers": ",".join(self.brokers),
            "group.id": "edgewater",  # required, and not used: partitions are assigned, and no offset is committed
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "reconnect.backoff.ms": 1_000,
        }
        result["security.protocol"] = ("SASL_" if self.username else "") + ("SSL" if self.tls else "PLAINTEXT")
        if self.username is not None and self.password is not None:
            result |= {"sasl.username": self.username, "sasl.password": self.password.get_secret_value()}
            result["sasl.mechanisms"] = self.mechanism
        return result


class KafkaFailed(OSError):
    """The broker, the topic or a partition cannot be read at the moment."""


class OffsetGone(KafkaFailed):
    """The broker does not have, or no longer has, the messages at an offset."""


@dataclass(slots=True)
class _Arrived:
    """What the consumer's thread gives to a partition: a chunk, a failure, or the number of partitions."""

    chunk: Chunk | None = None
    failure: Exception | None = None
    partitions: int | None = None


@dataclass(slots=True)
class _Assigned:
    """A partition that is read.

    Attributes:
        queued_bytes: bytes of the messages in `arrived`; changed by both threads, under the topic's lock.
        at_end: the thread has found no further message.
    """

    offset: int
    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[_Arrived] = field(default_factory=asyncio.Queue)
    queued_bytes: int = 0
    is_paused: bool = False
    at_end: bool = False

    def give(self, arrived: _Arrived) -> None:
        self.loop.call_soon_threadsafe(self.arrived.put_nowait, arrived)


class KafkaTopic:
    """The consumer of a topic. Its thread runs while any partition is read."""

    def __init__(self, config: KafkaConfig, context: SourceContext) -> None:
        self.config, self.context = config, context
        self._decoder = MessageDecoder(config.text_format(context.schema), config.more, f"topic {config.topic}")
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[tuple[int, _Assigned | None]] = queue.SimpleQueue()
        self._assigned: dict[int, _Assigned] = {}
        self._thread: threading.Thread | None = None
        self._partitions_at_s = 0.0

    def source_name(self, partition: int) -> str:
        return f"{self.context.stream}:kafka:{self.config.topic}:{partition}"

    def consumer(self) -> Any:
        from confluent_kafka import Consumer  # an extra

        return Consumer(self.config.client(), logger=log)

    async def range_of(self, partition: int) -> tuple[int, int]:
        """Returns the offset of the oldest message, and the offset after the newest. Raises KafkaFailed."""

        def ask() -> tuple[int, int]:
            from confluent_kafka import KafkaException, TopicPartition

            consumer = self.consumer()
            try:
                low, high = consumer.get_watermark_offsets(
                    TopicPartition(self.config.topic, partition), timeout=REQUEST_S
                )
            except KafkaException as exc:
                raise KafkaFailed(self._says(exc.args[0])) from exc
            finally:
                consumer.close()
            return int(low), int(high)

        return await asyncio.to_thread(ask)

    def _says(self, error: Any) -> str:
        return f"topic {self.config.topic} at {', '.join(self.config.brokers)}: {error.name()}: {error.str()}"

    def assign(self, partition: int, offset: int) -> _Assigned:
        """Begins to read a partition at an offset."""
        assigned = _Assigned(offset, asyncio.get_running_loop())
        with self._lock:
            self._assigned[partition] = assigned
            self._requests.put((partition, assigned))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"kafka-{self.config.topic}", daemon=True)
                self._thread.start()
        return assigned

    def release(self, partition: int, assigned: _Assigned) -> None:
        """Stops reading a partition."""
        with self._lock:
            if self._assigned.get(partition) is assigned:
                del self._assigned[partition]
                self._requests.put((partition, None))

    def taken(self, partition: int, assigned: _Assigned, size: int) -> None:
        """Called when the agent has taken a chunk of `size` bytes."""
        with self._lock:
            assigned.queued_bytes -= size
            if assigned.is_paused and assigned.queued_bytes <= MAX_QUEUED_BYTES // 2:
                self._requests.put((partition, assigned))

    def _run(self) -> None:
        consumer = None
        try:
            consumer = self.consumer()
            while True:
                self._apply_requests(consumer)
                with self._lock:
                    if not self._assigned:
                        self._thread = None
                        return
                self._look_for_partitions(consumer)
                self._dispatch(consumer, consumer.consume(MAX_MESSAGES, POLL_S))
        except Exception as exc:  # the sources raise it on their loops
            with self._lock:
                self._partitions_at_s = 0.0
                assigned, self._assigned, self._thread = self._assigned, {}, None
                self._requests = queue.SimpleQueue()
            for each in assigned.values():
                each.give(_Arrived(failure=exc))
        finally:
            if consumer is not None:
                consumer.close()

    def _apply_requests(self, consumer: Any) -> None:
        from confluent_kafka import TopicPartition

        while True:
            try:
                partition, assigned = self._requests.get_nowait()
            except queue.Empty:
                return
            at = TopicPartition(self.config.topic, partition)
            if assigned is None:
                consumer.incremental_unassign([at])
            elif assigned.is_paused:
                assigned.is_paused = False
                consumer.resume([at])
            else:
                if any(each.partition == partition for each in consumer.assignment()):
                    consumer.incremental_unassign([at])
                consumer.incremental_assign([TopicPartition(self.config.topic, partition, assigned.offset)])

    def _look_for_partitions(self, consumer: Any) -> None:
        from confluent_kafka import KafkaException

        now_s = self.context.now_ms() / 1000
        first = self._assigned.get(0)
        if first is None or 0 <= now_s - self._partitions_at_s < PARTITIONS_EVERY_S:
            return
        try:
            topic = consumer.list_topics(self.config.topic, timeout=REQUEST_S).topics[self.config.topic]
        except KafkaException as exc:
            raise KafkaFailed(self._says(exc.args[0])) from exc
        if topic.error is not None:
            raise KafkaFailed(self._says(topic.error))
        self._partitions_at_s = now_s  # only now: after a failure the next attempt must ask again
        first.give(_Arrived(partitions=len(topic.partitions)))

    def _dispatch(self, consumer: Any, messages: Sequence[Any]) -> None:
        from confluent_kafka import KafkaError, TopicPartition

        by_partition: dict[int, list[Any]] = {}
        for message in messages:
            error = message.error()
            if error is None:
                by_partition.setdefault(message.partition(), []).append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                with self._lock:
                    assigned = self._assigned.get(message.partition())
                if assigned is not None:
                    assigned.at_end = True
                    assigned.give(_Arrived())
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                with self._lock:
                    assigned = self._assigned.get(message.partition())
                if assigned is not None:
                    assigned.give(_Arrived(failure=OffsetGone(self._says(error))))
            else:
                raise KafkaFailed(self._says(error))
        for partition, records in by_partition.items():
            with self._lock:
                assigned = self._assigned.get(partition)
            if assigned is None:
                continue
            assigned.at_end = False
            chunk = self._chunk(partition, records)
            with self._lock:
                assigned.queued_bytes += chunk.nbytes
                assigned.is_paused = assigned.queued_bytes > MAX_QUEUED_BYTES
                if assigned.is_paused:
                    consumer.pause([TopicPartition(self.config.topic, partition)])
            assigned.give(_Arrived(chunk))

    def _chunk(self, partition: int, messages: Sequence[Any]) -> Chunk:
        end = messages[-1].offset() + 1
        present = [message for message in messages if message.value() is not None]  # a tombstone is no record
        bodies = [message.value() for message in present]
        more = {name: read(present) for name, read in self._readers().items()}
        decoded = self._decoder.decode(bodies, more, self.context.now_ms())
        nbytes = sum(map(len, bodies))
        return Chunk(
            self.source_name(partition), decoded.batch, None, {"offset": end}, decoded.rejected, nbytes, keep=True
        )

    def _readers(self) -> dict[str, Callable[[Sequence[Any]], list[Any]]]:
        config = self.config
        result: dict[str, Callable[[Sequence[Any]], list[Any]]] = {}
        if config.key is not None:
            result[config.key] = lambda messages: [_text(message.key()) for message in messages]
        if config.timestamp is not None:
            result[config.timestamp] = lambda messages: [message.timestamp()[1] for message in messages]
        for header, column in config.headers.items():
            result[column] = lambda messages, header=header: [  # type: ignore[misc]
                _text(dict(message.headers() or ()).get(header)) for message in messages
            ]
        return result


def _text(value: bytes | str | None) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class KafkaPartition(KeptSource):
    """A `Source`: one partition of a topic."""

    delivery = Delivery.EXACTLY_ONCE

    def __init__(self, topic: KafkaTopic, partition: int) -> None:
        self.name, self.stream = topic.source_name(partition), topic.context.stream
        self._topic, self._partition = topic, partition

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        offset = OLDEST if position is None else int(position["offset"])
        if position is None and self._topic.config.start == "latest":
            _, offset = await self._topic.range_of(self._partition)
            yield self._empty(offset)  # so that a restart before the first record knows the place
        while True:
            try:
                async for chunk in self._read(offset):
                    yield chunk
            except OffsetGone as exc:
                low, _ = await self._topic.range_of(self._partition)
                log.error("%s; partition %d goes on at offset %d instead of %d", exc, self._partition, low, offset)
                offset = low
                yield self._empty(offset, losses=(str(LossReason.INPUT_GONE),))

    async def _read(self, offset: int) -> AsyncIterator[Chunk]:
        topic = self._topic
        assigned = topic.assign(self._partition, offset)
        try:
            while True:
                arrived = await self._next(assigned)
                if arrived.failure is not None:
                    raise arrived.failure
                if arrived.partitions is not None:
                    yield self._empty(offset, opens=self._others(arrived.partitions))
                if arrived.chunk is not None:
                    yield arrived.chunk
                    offset = arrived.chunk.end["offset"]  # type: ignore[index]
                    topic.taken(self._partition, assigned, arrived.chunk.nbytes)
        finally:
            topic.release(self._partition, assigned)

    async def _next(self, assigned: _Assigned) -> _Arrived:
        if not (assigned.at_end and assigned.arrived.empty()):
            return await assigned.arrived.get()
        with self._topic.context.idle(self.name):
            return await assigned.arrived.get()

    def _others(self, partitions: int) -> tuple[Source, ...]:
        if partitions > MAX_PARTITIONS:
            raise KafkaFailed(f"topic {self._topic.config.topic} has {partitions} partitions; at most {MAX_PARTITIONS}")
        return tuple(KafkaPartition(self._topic, number) for number in range(1, partitions))

    def _empty(self, offset: int, *, losses: tuple[str, ...] = (), opens: tuple[Source, ...] = ()) -> Chunk:
        """Returns a chunk without records."""
        end = {"offset": offset} if offset >= 0 else None
        batch = self._topic.context.schema.empty()
        return Chunk(self.name, batch, None, end, (), 0, losses, keep=True, opens=opens)


class Kafka:
    """The kind ``kafka``."""

    name = "kafka"
    config = KafkaConfig

    def sources(self, options: KafkaConfig, context: SourceContext) -> Sequence[Source]:
        try:
            import confluent_kafka  # noqa: F401
        except ImportError as exc:
            accepted = "the package confluent-kafka: pip install 'edgewater[kafka]'"
            raise InvalidConfig(f"streams.{context.stream}.sources.kafka", options.topic, accepted, str(exc)) from exc
        return [KafkaPartition(KafkaTopic(options, context), 0)]


KIND = Kafka()
