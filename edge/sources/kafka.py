"""Reads topics of a Kafka broker (extra ``kafka``). Each record counts exactly once.

Each partition is a source with its own watermark. The journal has the records together with the offset of their
partition. So a restart reads no record a second time, and the edge uses no consumer group. All partitions of a topic
share one consumer. Its thread fetches and decodes messages, and looks for new partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edge.codecs.messages import MessageDecoder
from edge.records import Chunk, Decoded, Lag, Position, Source, guesses
from edge.source_kinds import KeptSource, SourceCheck, SourceContext, SourceFailed, next_item, require_module
from edge.sources.kafka_client import NO_END, OLDEST, KafkaConfig, KafkaConsumer, OffsetGone
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import MIN_TIME_MS, TIME_COLUMN, Delivery
from edgewater.wire import DropReason, LossReason

log = logging.getLogger(__name__)

MAX_MESSAGES = 10_000
"""The largest number of messages that are decoded together."""
LEAST_POLL_S = 0.1
"""The least time for which a poll collects messages, so that they are decoded together."""
MAX_QUEUED_BYTES, LEAST_QUEUED_BYTES = 8 << 20, 32 << 10
"""Limits for the bytes of a partition's messages that wait for the agent. The partition is paused above
`MAX_QUEUED_BYTES` / number of partitions, or above `LEAST_QUEUED_BYTES` if this is more.
"""
PARTITIONS_EVERY_S = 30.0  # limit: how late a new partition is read
PROBE_EVERY_S = 5.0  # limit: look-ups while brokers fail
"""After a connection has failed, the partitions are looked up at once. Two such look-ups are at least this time apart.
"""
CHECKED_PARTITIONS = 10  # limit: the time of a check
"""The number of partitions from which `check` reads."""
BACKFILL_MESSAGES = 4_000  # limit: how long live records wait for a batch of a backfill
"""The number of messages that a backfill decodes together."""


@dataclass(slots=True)
class _Arrived:
    """What the consumer's thread hands to a partition: a chunk, a failure, or the number of partitions of the topic."""

    chunk: Chunk | None = None
    newest_ms: int = 0
    failure: Exception | None = None
    partitions: int | None = None


@dataclass(slots=True)
class _Assigned:
    """A partition that is read.

    Attributes:
        offset: the offset of the next message that the thread reads.
        queued_bytes: bytes of the messages in `arrived`. Both threads change it, under the topic's lock.
        at_end: whether the thread has reached the end of the partition.
        high: the offset after the broker's newest message, at the last fetch; negative if unknown.
    """

    offset: int
    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[_Arrived] = field(default_factory=asyncio.Queue)
    queued_bytes: int = 0
    is_paused: bool = False
    at_end: bool = False
    high: int = -1

    def give(self, arrived: _Arrived) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before the thread ended
            self.loop.call_soon_threadsafe(self.arrived.put_nowait, arrived)


class KafkaTopic:
    """The consumer of a topic. Its thread runs while any partition is read."""

    def __init__(self, config: KafkaConfig, context: SourceContext) -> None:
        self.config, self.context = config, context
        self._decoder = MessageDecoder(config.text_format(context.schema), config.more, f"topic {config.topic}")
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[Callable[[KafkaConsumer], None]] = queue.SimpleQueue()
        self._assigned: dict[int, _Assigned] = {}
        self._thread: threading.Thread | None = None
        self._looked_s = self._probed_s = float("-inf")
        self._poll_s = LEAST_POLL_S

    def source_name(self, partition: int) -> str:
        return f"{self.context.stream}:kafka:{self.config.topic}:{partition}"

    async def range_of(self, partition: int) -> tuple[int, int]:
        """Returns the offset of the oldest message and the offset after the newest message. Raises SourceFailed."""

        def ask() -> tuple[int, int]:
            with contextlib.closing(KafkaConsumer(self.config)) as consumer:
                consumer.partitions()
                return consumer.range_of(partition)

        return await asyncio.to_thread(ask)

    def assign(self, partition: int, offset: int) -> _Assigned:
        """Begins to read a partition at an offset."""
        assigned = _Assigned(offset, asyncio.get_running_loop())
        with self._lock:
            self._assigned[partition] = assigned
            self._requests.put(lambda consumer: consumer.assign(partition, offset))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"kafka-{self.config.topic}", daemon=True)
                self._thread.start()
        return assigned

    def release(self, partition: int, assigned: _Assigned) -> None:
        """Stops reading a partition."""
        with self._lock:
            if self._assigned.get(partition) is assigned:
                del self._assigned[partition]
                self._requests.put(lambda consumer: consumer.unassign(partition))

    def taken(self, partition: int, assigned: _Assigned, size: int) -> None:
        """Subtracts `size` bytes from the queue, and resumes a paused partition. Called when the agent has taken a
        chunk.
        """
        self._poll_s = max(self.context.coalesce_s(self.context.stream, self.source_name(partition)), LEAST_POLL_S)
        with self._lock:
            assigned.queued_bytes -= size
            if assigned.is_paused and assigned.queued_bytes <= self._most_queued() // 2:
                assigned.is_paused = False
                self._requests.put(lambda consumer: consumer.resume(partition))

    def _most_queued(self) -> int:
        return max(LEAST_QUEUED_BYTES, MAX_QUEUED_BYTES // max(1, len(self._assigned)))

    def _run(self) -> None:
        consumer = None
        try:
            consumer = KafkaConsumer(self.config)
            self._looked_s = self._probed_s = float("-inf")
            while True:
                while not self._requests.empty():
                    self._requests.get_nowait()(consumer)
                with self._lock:
                    if not self._assigned:
                        self._thread = None
                        return
                self._look_for_partitions(consumer)
                self._dispatch(consumer, consumer.consume(MAX_MESSAGES, self._poll_s))
        except Exception as exc:  # each source raises the exception on its loop
            with self._lock:
                assigned, self._assigned, self._thread = self._assigned, {}, None
                self._requests = queue.SimpleQueue()
            for each in assigned.values():
                each.give(_Arrived(failure=exc))
        finally:
            if consumer is not None:
                consumer.close()

    def _look_for_partitions(self, consumer: KafkaConsumer) -> None:
        """Looks for new partitions. After a failed connection, also checks whether the brokers still answer."""
        now_s = time.monotonic()
        is_due = now_s - self._looked_s >= PARTITIONS_EVERY_S
        if not is_due and not (consumer.has_failed and now_s - self._probed_s >= PROBE_EVERY_S):
            return
        if consumer.has_failed:
            self._probed_s = now_s
        with self._lock:
            assigned = dict(self._assigned)
        if consumer.has_failed:
            consumer.has_failed = False
            for partition, each in assigned.items():
                # The client reports the end of the partition again only after a new assignment.
                each.at_end = False
                consumer.assign(partition, each.offset)
        partitions = consumer.partitions()
        self._looked_s = time.monotonic()  # set only after success, so that a failed look-up is repeated
        for partition, each in assigned.items():
            if partition not in partitions:
                accepted = "a topic that keeps its partitions; if it was created anew, delete the state of the edge"
                reason = f"partition {partition} is gone; the topic has {len(partitions)} partitions"
                failure: SourceFailed | None = SourceFailed(InvalidConfig("topic", self.config.topic, accepted, reason))
            else:
                failure = partitions[partition]
            if failure is not None:
                each.give(_Arrived(failure=failure))
            elif partition == 0:
                each.give(_Arrived(partitions=len(partitions)))

    def _dispatch(self, consumer: KafkaConsumer, messages: Sequence[Any]) -> None:
        from confluent_kafka import KafkaError

        by_partition: dict[int, list[Any]] = {}
        at_end: set[int] = set()
        for message in messages:
            error, partition = message.error(), message.partition()
            if error is None:
                by_partition.setdefault(partition, []).append(message)
                at_end.discard(partition)
            elif error.code() == KafkaError._PARTITION_EOF:
                at_end.add(partition)
            elif partition is None or partition < 0:
                raise consumer.failed(error)
            else:
                failed = consumer.failed(error)
                is_gone = error.code() == KafkaError._AUTO_OFFSET_RESET
                self._give(partition, _Arrived(failure=OffsetGone(failed.fault) if is_gone else failed))
        for partition, records in by_partition.items():
            self._give_records(consumer, partition, records)
        for partition in at_end:
            if assigned := self._give(partition, _Arrived()):
                assigned.at_end = True

    def _give(self, partition: int, arrived: _Arrived) -> _Assigned | None:
        """Hands something to a partition. Returns None if the partition is no longer read."""
        with self._lock:
            assigned = self._assigned.get(partition)
        if assigned is not None:
            assigned.give(arrived)
        return assigned

    def _give_records(self, consumer: KafkaConsumer, partition: int, records: Sequence[Any]) -> None:
        from confluent_kafka import TopicPartition

        with self._lock:
            assigned = self._assigned.get(partition)
        if assigned is None:
            return
        chunk = self.chunk(partition, records)
        assigned.offset, assigned.at_end = records[-1].offset() + 1, False
        at = TopicPartition(self.config.topic, partition)
        _, assigned.high = consumer.client.get_watermark_offsets(at, cached=True)
        with self._lock:
            assigned.queued_bytes += chunk.nbytes
            assigned.is_paused = assigned.queued_bytes > self._most_queued()
            if assigned.is_paused:
                consumer.client.pause([at])
        assigned.give(_Arrived(chunk, records[-1].timestamp()[1]))

    def chunk(self, partition: int, messages: Sequence[Any]) -> Chunk:
        """Decodes at least one message of one partition."""
        start, end = {"offset": messages[0].offset()}, {"offset": messages[-1].offset() + 1}
        bodies = [message.value() for message in messages]
        more = {name: read(messages) for name, read in self._readers().items()}
        decoded = self._decoder.decode(
            bodies, more, self.context.now_ms(), lambda n: f"partition {partition}, offset {messages[n].offset()}"
        )
        name, nbytes = self.source_name(partition), sum(len(body or b"") for body in bodies)
        return Chunk(name, decoded.batch, start, end, decoded.rejected, nbytes, keep=True, guessed=decoded.guessed)

    def _readers(self) -> dict[str, Callable[[Sequence[Any]], list[Any]]]:
        config = self.config
        result: dict[str, Callable[[Sequence[Any]], list[Any]]] = {}
        if config.key is not None:
            result[config.key] = lambda messages: [_text(message.key()) for message in messages]
        if config.timestamp is not None:
            result[config.timestamp] = lambda messages: [_time_ms(*message.timestamp()) for message in messages]
        for header, column in config.headers.items():
            result[column] = lambda messages, header=header: [  # type: ignore[misc]
                _text(dict(message.headers() or ()).get(header)) for message in messages
            ]
        return result


def _text(value: bytes | str | None) -> str | None:
    """Returns a key or the value of a header; None if it is no text."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return None


def _with_guesses(chunk: Chunk, again: int) -> Chunk:
    """Returns a chunk whose records before the offset `again` are a guess: the broker has lost its last messages, so
    these records may have been read before.
    """
    if chunk.end is None or (chunk.start or chunk.end)["offset"] >= again:
        return chunk
    times = chunk.batch.column(TIME_COLUMN).to_numpy()
    again_read = guesses(DropReason.READ_AGAIN, times)
    return replace(chunk, end=chunk.end | {"again": again}, guessed=(*chunk.guessed, *again_read))


def _time_ms(kind: int, time_ms: int) -> int | None:
    return time_ms if kind else None  # kind 0: the message has no timestamp


class KafkaPartition(KeptSource):
    """A `Source` that reads one partition of a topic."""

    delivery = Delivery.EXACTLY_ONCE
    replayable = True

    def __init__(self, topic: KafkaTopic, partition: int) -> None:
        self.name, self.stream = topic.source_name(partition), topic.context.stream
        self.entry = f"{topic.context.stream}:kafka:{topic.config.topic}"
        self._topic, self._partition = topic, partition
        self._lag: Callable[[], Lag] = Lag

    def lag(self) -> Lag:
        return self._lag()

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        offset = OLDEST if position is None else int(position["offset"])
        if position is None and self._topic.config.start == "latest":
            _, offset = await self._topic.range_of(self._partition)
            yield self._empty(offset)  # so that a restart before the first record begins at the same offset
        again = 0 if position is None else int(position.get("again", 0))
        while True:
            try:
                async for chunk in self._read(offset):
                    offset = offset if chunk.end is None else chunk.end["offset"]
                    yield _with_guesses(chunk, again)
            except OffsetGone as exc:
                low, _ = await self._topic.range_of(self._partition)
                log.error("%s; partition %d goes on at offset %d instead of %d", exc, self._partition, low, offset)
                again, offset = max(again, offset), low
                yield _with_guesses(self._empty(offset, losses=(str(LossReason.INPUT_GONE),)), again)

    async def _read(self, offset: int) -> AsyncIterator[Chunk]:
        topic = self._topic
        assigned = topic.assign(self._partition, offset)
        newest_ms = 0

        def lag() -> Lag:
            if assigned.at_end and assigned.arrived.empty():
                return Lag(0, 0.0)
            messages = assigned.high - offset if assigned.high >= offset >= 0 else None
            age_s = max(0, topic.context.now_ms() - newest_ms) / 1000
            return Lag(messages, 0.0 if messages == 0 else age_s if newest_ms > 0 else None)

        self._lag = lag
        try:
            while True:
                arrived = await next_item(topic.context, self.name, assigned.arrived, lambda: assigned.at_end)
                if arrived.failure is not None:
                    raise arrived.failure
                if arrived.partitions is not None:
                    yield self._empty(offset, opens=self._others(range(1, arrived.partitions)))
                if arrived.chunk is not None:
                    offset, newest_ms = arrived.chunk.end["offset"], arrived.newest_ms  # type: ignore[index]
                    yield arrived.chunk
                    topic.taken(self._partition, assigned, arrived.chunk.nbytes)
        finally:
            self._lag = Lag
            topic.release(self._partition, assigned)

    def opened_before(self, names: Iterable[str]) -> tuple[Source, ...]:
        if self._partition:
            return ()
        stem = self.name.removesuffix("0")
        ends = [name.removeprefix(stem) for name in names if name.startswith(stem) and name != self.name]
        return self._others(sorted(int(end) for end in ends if end.isdecimal()))

    def _others(self, partitions: Iterable[int]) -> tuple[Source, ...]:
        return tuple(KafkaPartition(self._topic, number) for number in partitions)

    def _empty(self, offset: int, *, losses: tuple[str, ...] = (), opens: tuple[Source, ...] = ()) -> Chunk:
        """Returns a chunk without records."""
        end = {"offset": offset} if offset >= 0 else None
        batch = self._topic.context.schema.empty()
        return Chunk(self.name, batch, None, end, (), 0, losses, keep=True, opens=opens)

    async def backfill(self, position: Position | None, until: Position, since_ms: int) -> AsyncGenerator[Chunk]:
        """Reads with a consumer of its own.

        The first message is looked up by its timestamp. This needs an event time that is the timestamp, or that exceeds
        it by at most `time.max_skew`. Otherwise reading begins at the oldest message.
        """
        topic, end = self._topic, int(until["offset"])
        consumer = await asyncio.to_thread(KafkaConsumer, topic.config)
        try:
            await asyncio.to_thread(consumer.partitions)
            offset = await asyncio.to_thread(self._first_offset, consumer, position, since_ms)
            while offset < end:
                try:
                    messages = await asyncio.to_thread(consumer.read, self._partition, offset, end, BACKFILL_MESSAGES)
                except OffsetGone:
                    low, _ = await asyncio.to_thread(consumer.range_of, self._partition)
                    if low <= offset:
                        raise
                    offset = low
                    continue
                if not messages:
                    return
                chunk = await asyncio.to_thread(topic.chunk, self._partition, messages)
                yield chunk
                offset = messages[-1].offset() + 1
        finally:
            await asyncio.to_thread(consumer.close)

    def _first_offset(self, consumer: KafkaConsumer, position: Position | None, since_ms: int) -> int:
        if position is not None:
            return int(position["offset"])
        time = self._topic.context.schema.time
        margin_ms = 0 if self._topic.config.timestamp == time.column else time.max_skew_ms
        if since_ms <= MIN_TIME_MS or margin_ms is None:
            return OLDEST
        return consumer.offset_at(self._partition, since_ms - margin_ms)


class Kafka:
    """The kind of sources ``kafka``."""

    name = "kafka"
    config = KafkaConfig

    def sources(self, options: KafkaConfig, context: SourceContext) -> Sequence[Source]:
        require_module("confluent_kafka", "confluent-kafka", "kafka")
        return [KafkaPartition(KafkaTopic(options, context), 0)]

    def check(self, options: KafkaConfig, context: SourceContext, records: int) -> SourceCheck:
        """Reads the newest messages of some partitions. Stores no offset anywhere."""
        topic = KafkaTopic(options, context)
        facts, samples, nbytes = [], [], 0
        try:
            with contextlib.closing(KafkaConsumer(options)) as consumer:
                partitions = consumer.partitions()
                facts.append(f"topic {options.topic} has {len(partitions)} partition(s)")
                problems = tuple(f"partition {n}: {failure}" for n, failure in partitions.items() if failure)
                checked = [n for n, failure in partitions.items() if failure is None][:CHECKED_PARTITIONS]
                for number in checked:
                    low, high = consumer.range_of(number)
                    first = max(low, high - max(1, records // len(checked)))
                    messages = consumer.read(number, first, NO_END, records) if high > low else []
                    high = max(high, messages[-1].offset() + 1 if messages else 0)
                    facts.append(f"partition {number}: oldest offset {low}, next offset {high}")
                    if messages:
                        chunk = topic.chunk(number, messages)
                        samples.append(Decoded(chunk.batch, chunk.rejected))
                        nbytes += chunk.nbytes
        except SourceFailed as exc:
            raise exc.fault from exc
        return SourceCheck(tuple(facts), tuple(samples), nbytes, problems)


KIND = Kafka()
