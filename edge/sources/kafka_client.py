"""The client of Kafka brokers: its options, a consumer of one topic, and what may be wrong after a failure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from edge.codecs.formats import TextFormatName
from edge.config import MessageConfig, TlsConfig
from edge.source_kinds import SourceFailed
from edgewater.base.errors import InvalidConfig
from edgewater.runtime.configuration import Secret, refusal
from edgewater.runtime.kafka_properties import require_allowed

REQUEST_S = 8.0  # limit: the wait for an answer of a broker
FIRST_SLICE_S = 0.25  # limit: how late an unreachable broker is noticed
"""The timeout of the first try of a request, in seconds. It doubles with each try. Between two tries, the client may
report that no broker can be reached.
"""
RECOVERY_S = 2.0  # limit: the wait for brokers that failed before
"""If no broker could be reached before, a request waits at least this long."""
SOCKET_TIMEOUT_MS = int(1000 * REQUEST_S) + 1_000
"""A broker counts as unreachable if it sends nothing for this long. The default of the idle rule is longer."""
MAX_PARTITIONS = 1000  # limit: sources of a topic
OLDEST = -2  # format: of librdkafka
"""librdkafka's offset of the oldest message."""
NO_END = 1 << 62  # format: above all offsets
"""An offset after all messages."""
_RESERVED = tuple(
    (
        "group.id enable.auto.commit auto.offset.reset enable.partition.eof bootstrap.servers isolation.level "
        "security.protocol sasl.username sasl.password sasl.mechanisms"
    ).split()
)
_AFTER = re.compile(r" \(after \d+ms.*$")
_THREAD = re.compile(r"^\[thrd:[^]]*\]: |after \d+ms ")


class KafkaConfig(MessageConfig):
    """The options below ``kafka:``.

    Attributes:
        brokers: host:port of one or more brokers.
        topic: name of the topic.
        start: where a partition begins that was never read: ``earliest`` at its oldest record, ``latest`` after its
            newest.
        key: the column for the record's key as text.
        timestamp: the column for the record's timestamp in ms.
        headers: for each header, the column for the header's value as text.
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
    password: Secret | None = None
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    tls: TlsConfig | bool = False
    properties: dict[str, str] = {}

    @field_validator("properties")
    @classmethod
    def _not_reserved(cls, properties: dict[str, str]) -> dict[str, str]:
        for name in properties:
            if name in _RESERVED:
                raise refusal(f"properties other than {', '.join(_RESERVED)}", f"the edge sets {name} itself")
        require_allowed(properties)
        return properties

    @model_validator(mode="after")
    def _complete(self) -> KafkaConfig:
        if (self.username is None) != (self.password is None):
            raise refusal("username and password together")
        return self

    @property
    def more(self) -> list[str]:
        return [*filter(None, (self.key, self.timestamp)), *self.headers.values()]

    def client(self) -> dict[str, Any]:
        """Returns the properties of librdkafka's consumer."""
        tls = self.tls if isinstance(self.tls, TlsConfig) else TlsConfig()
        files = {"ssl.ca.location": tls.ca, "ssl.certificate.location": tls.cert, "ssl.key.location": tls.key}
        result: dict[str, Any] = {
            **{name: path for name, path in files.items() if path is not None},
            "queued.max.messages.kbytes": 4_096,
            "queued.min.messages": 10_000,
            "fetch.max.bytes": 4_194_304,
            "socket.timeout.ms": SOCKET_TIMEOUT_MS,
            **self.properties,
            "isolation.level": "read_committed",
            "bootstrap.servers": ",".join(self.brokers),
            "group.id": "edgewater",  # required, but without effect: partitions are assigned, offsets not committed
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

    def refused_by_client(self, reason: str) -> InvalidConfig:
        """Returns the error for a reason with which librdkafka refuses the options before it connects."""
        if "ssl." in reason or (self.tls and not self.properties):
            shown = self.tls.model_dump() if isinstance(self.tls, TlsConfig) else self.tls
            return InvalidConfig("tls", shown, "readable PEM files of the CA, the certificate and its key", reason)
        return InvalidConfig("properties", sorted(self.properties), "properties of librdkafka's consumer", reason)

    def fault(self, code: str, reason: str) -> InvalidConfig:
        """Returns the error that names the option that may be wrong.

        Args:
            code: a code of librdkafka such as ``_TRANSPORT``.
        """
        if "AUTHENTICATION" in code or "SASL" in code:
            accepted = f"a user and a password that the brokers accept with the mechanism {self.mechanism}"
            return InvalidConfig("username", self.username, accepted, reason)
        if code == "_SSL" or "SSL" in reason:
            shown = self.tls.ca if isinstance(self.tls, TlsConfig) else self.tls
            accepted = "true if a CA of the system has signed the certificates of the brokers, or {ca: …} with their CA"
            return InvalidConfig("tls.ca" if isinstance(self.tls, TlsConfig) else "tls", shown, accepted, reason)
        if "TOPIC" in code or "PARTITION" in code:
            return InvalidConfig("topic", self.topic, "a topic of the brokers that the user may read", reason)
        accepted = "addresses of Kafka brokers that answer, such as kafka-1:9092, with tls and username if they need it"
        return InvalidConfig("brokers", ", ".join(self.brokers), accepted, reason)


class OffsetGone(SourceFailed):
    """The broker does not have, or no longer has, the messages at an offset."""


class _LastLine:
    """The logger of a client. It passes the lines about failed connections to a function."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def log(self, _level: int, _pattern: str, *details: str) -> None:
        if details and details[0] == "FAIL":
            self._note(details[-1])


class KafkaConsumer:
    """A consumer of one topic. One thread at a time may use it. Each method blocks for at most `REQUEST_S`.

    Attributes:
        client: the consumer of confluent-kafka.
        has_failed: whether a connection has failed since the attribute was last reset. If so, the reported ends of
            partitions may be outdated.
    """

    def __init__(self, config: KafkaConfig) -> None:
        from confluent_kafka import Consumer, KafkaException  # only with the extra `kafka`

        self._config = config
        self._cause: Any = None
        self._line = ""
        self._next: tuple[int, int] | None = None  # the partition that `read` has assigned, and its next offset
        self._polled: list[Any] = []  # messages that `_serve_callbacks` has taken from the client
        self._is_unreachable = False
        self.has_failed = False
        try:
            # The log has a line for each attempt to connect. Only the last line is needed.
            self.client = Consumer({**config.client(), "error_cb": self._note}, logger=_LastLine(self._note_line))
        except KafkaException as exc:  # librdkafka refuses a property, a file, or a combination of them
            raise SourceFailed(config.refused_by_client(exc.args[0].str())) from exc

    def _note(self, error: Any) -> None:
        """Remembers a failed connection. librdkafka calls it within a call of this consumer."""
        self.has_failed = True
        if error.name() == "_ALL_BROKERS_DOWN":
            self._is_unreachable = True
        else:
            self._cause = error

    def _serve_callbacks(self) -> None:
        """Lets the client call `_note`. If the client returns a message, `consume` returns the message later."""
        message = self.client.poll(0)
        if message is not None:
            self._polled.append(message)

    def consume(self, most: int, timeout_s: float) -> list[Any]:
        """Returns the next messages of the assigned partitions, and errors. Waits for at most `timeout_s`."""
        messages, self._polled = self._polled[:most], self._polled[most:]
        if len(messages) < most:
            messages += self.client.consume(most - len(messages), 0 if messages else timeout_s)
        return messages

    def assign(self, partition: int, offset: int) -> None:
        """Assigns a partition from an offset on, in addition to the assigned partitions."""
        from confluent_kafka import TopicPartition

        self.unassign(partition)
        self.client.incremental_assign([TopicPartition(self._config.topic, partition, offset)])

    def unassign(self, partition: int) -> None:
        """Ends the assignment of a partition, if it is assigned. No further message of the partition is returned."""
        from confluent_kafka import TopicPartition

        self._polled = [message for message in self._polled if message.partition() != partition]
        if self._is_assigned(partition):
            self.client.incremental_unassign([TopicPartition(self._config.topic, partition)])

    def resume(self, partition: int) -> None:
        """Resumes a paused partition, if it is assigned."""
        from confluent_kafka import TopicPartition

        if self._is_assigned(partition):
            self.client.resume([TopicPartition(self._config.topic, partition)])

    def _is_assigned(self, partition: int) -> bool:
        return any(each.partition == partition for each in self.client.assignment())

    def _note_line(self, line: str) -> None:
        self._line = line

    def failed(self, error: Any) -> SourceFailed:
        """Returns the exception for an error of librdkafka. It states the cause that librdkafka reported before."""
        if "TOPIC" in error.name() or "PARTITION" in error.name():
            return SourceFailed(self._config.fault(error.name(), error.str()))
        if self._cause is not None:
            return SourceFailed(self._config.fault(self._cause.name(), _AFTER.sub("", self._cause.str())))
        return SourceFailed(self._config.fault(error.name(), _THREAD.sub("", self._line) or error.str()))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        from confluent_kafka import KafkaException

        try:
            yield
        except KafkaException as exc:
            self._serve_callbacks()
            raise self.failed(exc.args[0]) from exc

    def partitions(self) -> dict[int, SourceFailed | None]:
        """Returns the partitions of the topic. The value is None for a readable partition, otherwise the reason.

        Raises SourceFailed.
        """
        from confluent_kafka import KafkaException

        began_s, slice_s = time.monotonic(), FIRST_SLICE_S
        patience_s = RECOVERY_S if self._is_unreachable else 0.0  # the brokers may be reachable again
        while True:
            try:
                topic = self.client.list_topics(self._config.topic, timeout=slice_s).topics[self._config.topic]
                break
            except KafkaException as exc:
                self._serve_callbacks()
                passed_s = time.monotonic() - began_s
                slice_s = min(2 * slice_s, REQUEST_S - passed_s)
                if slice_s <= 0 or (self._is_unreachable and passed_s >= patience_s):
                    raise self.failed(exc.args[0]) from exc
        if topic.error is not None:
            raise self.failed(topic.error)
        if len(topic.partitions) > MAX_PARTITIONS:
            accepted = f"a topic of at most {MAX_PARTITIONS} partitions"
            reason = f"it has {len(topic.partitions)} partitions; expected at most {MAX_PARTITIONS}"
            raise SourceFailed(InvalidConfig("topic", self._config.topic, accepted, reason))
        self._cause, self._line, self._is_unreachable = None, "", False
        return {
            number: None if partition.error is None else self.failed(partition.error)
            for number, partition in topic.partitions.items()
        }

    def range_of(self, partition: int) -> tuple[int, int]:
        """Returns the offset of the oldest message and the offset after the newest message. Raises SourceFailed."""
        from confluent_kafka import TopicPartition

        with self._asking():
            low, high = self.client.get_watermark_offsets(
                TopicPartition(self._config.topic, partition), timeout=REQUEST_S
            )
        return int(low), int(high)

    def offset_at(self, partition: int, time_ms: int) -> int:
        """Returns the offset of the first message with a timestamp of at least `time_ms`; `OLDEST` if the broker does
        not tell.
        """
        from confluent_kafka import KafkaException, TopicPartition

        wanted = TopicPartition(self._config.topic, partition, max(time_ms, 0))
        try:
            (found,) = self.client.offsets_for_times([wanted], timeout=REQUEST_S)
        except KafkaException:
            return OLDEST
        return OLDEST if found.error is not None or found.offset < 0 else int(found.offset)

    def read(self, partition: int, offset: int, until: int, most: int) -> list[Any]:
        """Returns the next messages of one partition; [] at its end. No other partition may be assigned.

        Args:
            until: the offset at which reading ends, exclusive.
            most: the largest number of messages.

        Raises:
            OffsetGone: the broker does not have the offset.
            SourceFailed: the partition cannot be read.
        """
        from confluent_kafka import KafkaError, TopicPartition

        deadline_s = time.monotonic() + REQUEST_S
        if self._next != (partition, offset):
            self._polled = []
            self.client.assign([TopicPartition(self._config.topic, partition, offset)])
        self._next, result = None, list[Any]()
        while True:
            for message in self.consume(most - len(result), 0.1):
                error, at = message.error(), message.offset()
                if error is None and at is not None and at < until:
                    result.append(message)
                elif error is None or error.code() == KafkaError._PARTITION_EOF:
                    return result
                elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                    raise OffsetGone(self.failed(error).fault)
                else:
                    raise self.failed(error)
            if result and (len(result) == most or result[-1].offset() + 1 >= until or time.monotonic() >= deadline_s):
                break
            if time.monotonic() >= deadline_s:
                raise self.failed(KafkaError(KafkaError._TIMED_OUT))
        self._next = partition, result[-1].offset() + 1
        return result

    def close(self) -> None:
        self.client.close()
