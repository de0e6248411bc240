"""The sink `kafka` writes a message per window and group to a compacted topic, in transactions.

The key has query, version, window and group, and the value has the revision. So a compacted topic has the newest
revision of each group. If a revision lacks a group of an earlier revision, a tombstone is written for the group. The
positions are messages in another topic, written in the same transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypedDict

import confluent_kafka
import pyarrow as pa
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from center.sinks.base import SinkAnswer, SinkContext, SinkQuery
from center.sinks.kinds import KafkaSinkConfig
from edgewater.answers.cells import plain
from edgewater.base.errors import StorageError
from edgewater.base.timestamps import rfc3339
from edgewater.model.json_types import Document, Json
from edgewater.model.own_columns import own_names
from edgewater.model.registered_query import query_key
from edgewater.model.table_texts import list_texts, plain_key
from edgewater.wire import QueryRef

TIMEOUT_S = 10.0  # limit: the wait for a broker
"""A limit of each call. A sink that waits longer is closed and opened again."""
CLOSE_S = 1.0  # limit: time of a stop
"""How long `close` waits for the broker, in seconds, once to abort a transaction and once for its messages."""
QUEUED = 200_000  # limit: memory of a sink
"""Messages that wait in librdkafka: a limit of the memory of the sink."""
POSITIONS = ".positions"
"""Suffix of the topic that has the positions of sinks."""
Setting: TypeAlias = str | int | float | bool | Callable[[confluent_kafka.KafkaError], None]
"""A value of a setting of librdkafka."""
_CONNECT = {"int64": "int64", "double": "double", "bool": "boolean"}


class Mark(TypedDict):
    """A position of a query in the topic, with the center and the sink that have written it."""

    answer_id: int
    center: int
    sink: str


class KafkaSink:
    """Writes answers to topics. Implements `center.sinks.base.Sink`."""

    def __init__(self, options: KafkaSinkConfig, context: SinkContext) -> None:
        self._options, self._context = options, context
        self._producer: confluent_kafka.Producer | None = None
        self._positions = options.topic.replace("{query}", "all") + POSITIONS
        self._topics: set[str] = set()
        self._problem = ""
        self._marks: dict[str, Mark] = {}
        self.refused, self.refusal = 0, ""

    def open(self, queries: Sequence[SinkQuery]) -> Mapping[QueryRef, int]:
        """Implements `Sink.open`. Raises StorageError."""
        try:
            self._create({self._positions, *(self._topic(query.ref) for query in queries)})
            if self._producer is None:
                transactions: dict[str, Setting] = {
                    "transactional.id": f"edgewater-sink-{self._context.center:x}-{self._context.name}",
                    "transaction.timeout.ms": 60_000,
                    "queue.buffering.max.messages": QUEUED,
                }
                self._producer = confluent_kafka.Producer({**self._connection(), **transactions})
                # Fences the producer of an earlier process, and ends its transaction.
                self._producer.init_transactions(TIMEOUT_S)
                self._marks = self._stored()
        except confluent_kafka.KafkaException as exc:
            raise self._failure(exc) from exc
        refs = [query.ref for query in queries]
        return {ref: position for ref in refs if (position := self._position(ref)) is not None}

    def _position(self, ref: QueryRef) -> int | None:
        """Returns the position of a query, or None. Raises StorageError for a query that another center writes."""
        name = self._context.name
        mark = self._marks.get(_key({"query": ref.name, "version": ref.version}))
        if mark is not None:
            self._context.require_own(self._target(ref), ref, mark["center"], mark["sink"])
            return int(mark["answer_id"])
        # A position of release 0.3 has the name of its sink as the key, and is about all queries.
        for sink in (key for key in self._marks if not key.startswith("{")):
            self._context.require_own(self._target(ref), ref, None, sink)
        return int(self._marks[name]["answer_id"]) if name in self._marks else None

    def _target(self, ref: QueryRef) -> str:
        return f"the topic {self._topic(ref)} at {', '.join(self._options.brokers)}"

    def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
        """Implements `Sink.write`. A message that is too large is counted. Raises StorageError."""
        assert self._producer is not None, "open comes first"
        refused: list[str] = []
        try:
            self._producer.begin_transaction()
            for answer in answers:
                topic = self._topic(answer.query)
                for key, value in self._messages(answer):
                    if not self._send(topic, key, value):
                        size, window = len((key + (value or "")).encode()), rfc3339(answer.window_start_ms)
                        refused.append(
                            f"query {query_key(answer.query)}, window {window}: a message of {size} bytes is too large"
                        )
                        self._send(topic, key, None)  # the topic must not keep an earlier revision
            for ref, answer_id in positions.items():
                key = _key({"query": ref.name, "version": ref.version})
                self._marks[key] = Mark(answer_id=answer_id, center=self._context.center, sink=self._context.name)
                self._send(self._positions, key, json.dumps(self._marks[key]))
            self._producer.commit_transaction(TIMEOUT_S)
        except confluent_kafka.KafkaException as exc:
            raise self._failure(exc) from exc
        self.refused += len(refused)
        self.refusal = refused[-1] if refused else self.refusal

    def close(self) -> None:
        """Implements `Sink.close`. Aborts an open transaction. If the broker does not answer, the next
        `init_transactions` aborts the transaction.
        """
        producer, self._producer = self._producer, None
        if producer is not None:
            # librdkafka may abort the process if a producer is destroyed inside a transaction.
            with suppress(confluent_kafka.KafkaException):  # no transaction is open, or the broker does not answer
                producer.abort_transaction(CLOSE_S)
            producer.purge()
            producer.flush(CLOSE_S)

    def _topic(self, ref: QueryRef) -> str:
        return self._options.topic.replace("{query}", ref.name)

    def _connection(self) -> dict[str, Any]:
        options = self._options
        sasl: dict[str, Setting] = {}
        if options.username is not None:
            password = "" if options.password is None else options.password.get_secret_value()
            sasl = {"sasl.username": options.username, "sasl.password": password, "sasl.mechanisms": "SCRAM-SHA-512",
                    "security.protocol": "SASL_SSL"}  # fmt: skip
        return {
            "bootstrap.servers": ",".join(options.brokers), "client.id": "edgewater sink", "error_cb": self._on_error,
            "log_level": 0, **sasl, **options.properties,
            **{name: value.get_secret_value() for name, value in options.secrets.items()},
        }  # fmt: skip

    def _on_error(self, error: confluent_kafka.KafkaError) -> None:
        self._problem = error.str()

    def _failure(self, exc: confluent_kafka.KafkaException) -> StorageError:
        reason = exc.args[0].str() if isinstance(exc.args[0], confluent_kafka.KafkaError) else str(exc)
        more = f" ({self._problem})" if self._problem and self._problem != reason else ""
        return StorageError(f"Kafka at {', '.join(self._options.brokers)}: {reason}{more}")

    def _create(self, topics: set[str]) -> None:
        if topics <= self._topics:
            return
        admin = AdminClient(self._connection())
        existing = set(admin.list_topics(timeout=TIMEOUT_S).topics)
        missing = [
            NewTopic(
                topic, 1 if topic == self._positions else self._options.partitions, self._options.replication,
                config={"cleanup.policy": "compact"},
            )
            for topic in sorted(topics - existing)
        ]  # fmt: skip
        for future in admin.create_topics(missing, request_timeout=TIMEOUT_S).values() if missing else ():
            try:
                future.result(TIMEOUT_S)
            except confluent_kafka.KafkaException as exc:
                if exc.args[0].code() != confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
        self._topics |= topics

    def _stored(self) -> dict[str, Mark]:
        """Returns the positions in the topic, by key. Brokers compact the topic, so it is short."""
        groups = {"group.id": "edgewater sink", "enable.auto.commit": False, "isolation.level": "read_committed"}
        ends = {"enable.partition.eof": True, "auto.offset.reset": "earliest"}
        found: dict[str, Mark] = {}
        consumer = confluent_kafka.Consumer({**self._connection(), **groups, **ends})
        try:
            consumer.assign([confluent_kafka.TopicPartition(self._positions, 0, confluent_kafka.OFFSET_BEGINNING)])
            while (message := consumer.poll(TIMEOUT_S)) is not None:
                error = message.error()
                if error is not None and error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                    return {key: mark for key, mark in found.items() if mark}
                if error is not None:
                    raise confluent_kafka.KafkaException(error)
                found[(message.key() or b"").decode()] = json.loads(message.value() or b"{}")
            raise StorageError(f"Kafka: topic {self._positions} could not be read within {TIMEOUT_S:g} s")
        finally:
            consumer.close()

    def _send(self, topic: str, key: str, value: str | None) -> bool:
        """Adds a message to the transaction. Returns False if the message is too large."""
        assert self._producer is not None
        while True:
            try:
                self._producer.produce(topic, key=key, value=value)
                return True
            except BufferError:  # the queue is full
                self._producer.poll(0.1)
            except confluent_kafka.KafkaException as exc:
                if exc.args[0].code() != confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE:
                    raise
                return False

    def _messages(self, answer: SinkAnswer) -> Iterator[tuple[str, str | None]]:
        """Yields key and value of messages: tombstones of removed groups, the groups of a window, and the statement."""
        window: dict[str, Json] = {
            "query": answer.query.name,
            "version": answer.query.version,
            "window_start": rfc3339(answer.window_start_ms),
        }
        types = {field.name: _CONNECT.get(str(field.type), "string") for field in answer.rows.schema}
        for group in answer.removed():
            yield _key({**window, "group": {name: plain_key(value) for name, value in group.items()}}), None
        names = own_names((*answer.group_columns, *answer.measure_columns))
        own: Document = {
            names["query"]: answer.query.name,
            names["version"]: answer.query.version,
            names["data_of"]: answer.data_of,
        }
        types |= dict.fromkeys((names["version"], names["data_of"]), "int64")
        for row in kafka_rows(answer.rows, answer.group_columns):
            key = _key({**window, "group": {name: row[name] for name in answer.group_columns}})
            yield key, self._value({**own, **row}, types)
        statement: Document = {
            **window,
            "window_end": rfc3339(answer.window_end_ms),
            "data_of": answer.data_of,
            "statement": json.dumps(answer.statement),
        }
        yield _key(window), self._value(statement, {"version": "int64", "data_of": "int64"})

    def _value(self, payload: Document, types: Mapping[str, str]) -> str:
        """Returns the JSON of a value. Columns without a type are texts."""
        if self._options.format == "json":
            return json.dumps(payload, separators=(",", ":"))
        # A key that is not finite is a text in JSON: null is another key.
        named = {name for name, value in payload.items() if isinstance(value, str)}
        fields = [
            {"field": n, "type": "string" if n in named else types.get(n, "string"), "optional": True} for n in payload
        ]
        schema = {"type": "struct", "name": "edgewater.answer", "optional": False, "fields": fields}
        return json.dumps({"schema": schema, "payload": payload}, separators=(",", ":"))


def _key(parts: Document) -> str:
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def kafka_rows(rows: pa.Table, keys: Sequence[str]) -> Iterator[dict[str, Json]]:
    columns: dict[str, list[Json]] = {}
    for name in rows.column_names:
        column = rows.column(name)
        if pa.types.is_list(column.type):
            column = list_texts(column)
        if pa.types.is_timestamp(column.type):
            times = column.cast(pa.timestamp("ms")).cast(pa.int64()).to_pylist()
            columns[name] = [None if t is None else rfc3339(t) for t in times]
        else:
            columns[name] = [plain_key(v) if name in keys else plain(v) for v in column.to_pylist()]
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))
