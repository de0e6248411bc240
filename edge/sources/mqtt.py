"""Reads topics of an MQTT 5 broker (extra ``mqtt``) with QoS 1.

The broker keeps the session while the agent is not connected. The edge acknowledges a message when the journal has it.
After a crash of the agent, or a lost connection, the broker sends unacknowledged messages again, with the flag DUP. The
journal remembers the packet identifiers and digests of the newest messages, so a repeated message counts once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import ssl
import struct
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from pydantic import Field, field_validator, model_validator

from edge.codecs.formats import TextFormatName
from edge.codecs.messages import MessageDecoder
from edge.config import MessageConfig, TlsConfig
from edge.records import Chunk, Decoded, Position, Source, guesses
from edge.source_kinds import KeptSource, SourceCheck, SourceContext, SourceFailed, next_item, require_module
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import TIME_COLUMN, Delivery
from edgewater.runtime.configuration import Duration, RemoteAddress, Secret, refusal, split_address
from edgewater.wire import DropReason, LossReason

RECEIVE_MAXIMUM = 500  # limit: what the journal remembers of a session
"""The largest number of unacknowledged messages. The journal remembers as many."""
KEEPALIVE_S = 5  # limit: how late a silent broker is noticed
"""The interval of keep-alive packets, in seconds. A broker counts as unreachable twice this time after its last packet.
The default of the idle rule is as long.
"""
ANSWER_S = 4.0  # limit: the wait for an answer of the broker
"""The time, in seconds, for each answer of the broker: to the connection, the session and the subscriptions."""
CHECK_S = 2.0  # limit: the time of a check
_ENTRY = struct.Struct("<HQ")
_LEVEL = re.compile(r"\{(\w+)\}")


class MqttConfig(MessageConfig):
    """The options below ``mqtt:``.

    Attributes:
        broker: host:port of the broker.
        topics: filters. A level such as ``{device}`` matches as ``+`` does, and its text becomes the column ``device``.
        client_id: names the session at the broker. No other client may use the name.
        username: user at the broker. None: no credentials.
        password: password at the broker.
        tls: true means TLS with the system's CAs.
        session_ms: how long the broker keeps messages while the agent is not connected.
        retained: whether each new session also counts the message that the broker has retained for a topic.
    """

    broker: RemoteAddress
    topics: list[str] = Field(min_length=1, max_length=100)
    client_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    format: TextFormatName = "ndjson"
    username: str | None = None
    password: Secret | None = None
    tls: TlsConfig | bool = False
    session_ms: Duration = Field(default=86_400_000, ge=60_000, le=0xFFFF_FFFE * 1000)
    retained: bool = False

    @field_validator("topics")
    @classmethod
    def _filters(cls, topics: list[str]) -> list[str]:
        for topic in topics:
            if topic.startswith("$share/"):
                raise refusal(
                    "a topic of its own for each edge",
                    "the broker would give the messages of a lost session to another edge, and they could count twice",
                )
            levels = topic.split("/")
            if not topic or "\0" in topic or any("{" in level and not _LEVEL.fullmatch(level) for level in levels):
                raise refusal("a filter such as devices/{device}/temp; {…} is a whole level", f"got {topic!r}")
            if "#" in levels[:-1] or any(("#" in level or "+" in level) and len(level) > 1 for level in levels):
                raise refusal("a filter such as devices/{device}/temp, devices/+/temp or devices/#", f"got {topic!r}")
        for number, topic in enumerate(topics):
            if any(_overlap(topic.split("/"), other.split("/")) for other in topics[:number]):
                raise refusal("filters that no topic matches twice: its messages would count twice", f"got {topic!r}")
        return topics

    @model_validator(mode="after")
    def _complete(self) -> MqttConfig:
        names = [sorted(_LEVEL.findall(topic)) for topic in self.topics]
        if any(each != names[0] for each in names):
            raise refusal("the same columns in all topics, such as {device}", f"got {', '.join(self.topics)}")
        return self

    @property
    def more(self) -> list[str]:
        """The columns whose values are levels of the topic."""
        return _LEVEL.findall(self.topics[0])

    def broker_fault(self, reason: str) -> InvalidConfig:
        return InvalidConfig("broker", self.broker, "the address of an MQTT 5 broker, with tls if it needs it", reason)

    def tls_fault(self, error: Exception) -> InvalidConfig:
        shown = self.tls.model_dump(exclude_none=True) if isinstance(self.tls, TlsConfig) else self.tls
        accepted = "true, or {ca: …} with readable PEM files: the CA of the broker, and the edge's certificate and key"
        return InvalidConfig("tls", shown, accepted, str(error))

    def refusal_fault(self, reason: str) -> InvalidConfig:
        """Returns the error that names the option that may be wrong, for the reason with which the broker ended the
        session.
        """
        if reason in ("Bad user name or password", "Not authorized", "Bad authentication method", "Banned"):
            return InvalidConfig("username", self.username, "a user and a password that the broker accepts", reason)
        if reason in ("Client identifier not valid", "Session taken over"):
            return InvalidConfig("client_id", self.client_id, "a client_id that no other client uses", reason)
        return self.broker_fault(reason)


def _overlap(one: list[str], other: list[str]) -> bool:
    """Returns whether a topic may match both filters, which are given by their levels."""
    if "#" in (*one[:1], *other[:1]):
        return True
    if not one or not other:
        return one == other
    if one[0] != other[0] and not any(level == "+" or level.startswith("{") for level in (one[0], other[0])):
        return False
    return _overlap(one[1:], other[1:])


class Remembered:
    """The digests of the newest messages, by packet identifier."""

    def __init__(self, position: Position | None) -> None:
        data = base64.b64decode(position["packets"]) if position is not None else b""
        self._digests: OrderedDict[int, int] = OrderedDict(_ENTRY.iter_unpack(data))

    def knows(self, message: Any) -> bool:
        """Returns whether a message repeats a remembered message. Also remembers the message."""
        digest = int.from_bytes(
            blake2b(message.topic.encode() + b"\0" + message.payload, digest_size=8).digest(), "little"
        )
        is_known = bool(message.dup) and self._digests.get(message.mid) == digest
        self._digests[message.mid] = digest
        self._digests.move_to_end(message.mid)
        while len(self._digests) > RECEIVE_MAXIMUM:
            self._digests.popitem(last=False)
        return is_known

    def to_position(self) -> Position:
        return {"packets": base64.b64encode(b"".join(_ENTRY.pack(*each) for each in self._digests.items())).decode()}


@dataclass(frozen=True, slots=True)
class _Subscribed:
    """Says that the broker has confirmed the subscriptions.

    Attributes:
        is_new: whether the broker had no session of this client.
    """

    is_new: bool


class _BrokerConnection:
    """A connection to the broker. The thread of the client fills `arrived`. The methods `open` and `close` block.

    Attributes:
        arrived: messages, one `_Subscribed`, and a `SourceFailed` at the end if the connection fails. Messages of an
            old session may come before the `_Subscribed`.
    """

    def __init__(self, config: MqttConfig, coalesce_s: Callable[[], float]) -> None:
        import paho.mqtt.client as mqtt
        from paho.mqtt.enums import CallbackAPIVersion

        self._config, self._coalesce_s, self._loop = config, coalesce_s, asyncio.get_running_loop()
        self._lock, self._waiting = threading.Lock(), list[Any]()
        self.arrived = asyncio.Queue[Any]()
        self.client = client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            config.client_id,
            protocol=mqtt.MQTTv5,
            manual_ack=True,
            reconnect_on_failure=False,
        )
        client.on_connect, client.on_subscribe = self._connected, self._subscribed
        client.on_message = lambda _client, _userdata, message: self._give(message)
        client.on_disconnect = self._disconnected
        self._is_new = True

    def _give(self, item: Any) -> None:
        """Puts an item into `arrived`. Items that arrive soon after it are put together with it."""
        with self._lock:
            self._waiting.append(item)
            count = len(self._waiting)
        with contextlib.suppress(RuntimeError):  # the loop was closed before the thread ended
            if count == RECEIVE_MAXIMUM // 2:  # soon the broker will wait for acknowledgements
                self._loop.call_soon_threadsafe(self._hand_over)
            elif count == 1:
                self._loop.call_soon_threadsafe(self._hand_over_later)

    def _hand_over_later(self) -> None:
        self._loop.call_later(self._coalesce_s(), self._hand_over)

    def _hand_over(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for item in waiting:
            self.arrived.put_nowait(item)

    def open(self) -> None:
        """Connects and begins to subscribe. Raises SourceFailed."""
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        config, client = self._config, self.client
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval, properties.ReceiveMaximum = config.session_ms // 1000, RECEIVE_MAXIMUM
        host, port = split_address(config.broker)
        if config.username is not None:
            client.username_pw_set(config.username, config.password.get_secret_value() if config.password else None)
        if config.tls:
            tls = config.tls if isinstance(config.tls, TlsConfig) else TlsConfig()
            try:
                client.tls_set(tls.ca, tls.cert, tls.key, cert_reqs=ssl.CERT_REQUIRED)
            except (OSError, ValueError) as exc:
                raise SourceFailed(config.tls_fault(exc)) from exc
        client.connect_timeout = ANSWER_S
        try:
            client.connect(host, port, KEEPALIVE_S, clean_start=False, properties=properties)
        except ssl.SSLError as exc:
            raise SourceFailed(config.tls_fault(exc)) from exc
        except OSError as exc:
            raise SourceFailed(config.broker_fault(exc.strerror or str(exc) or type(exc).__name__)) from exc
        client.loop_start()

    def close(self) -> None:
        self.client.on_disconnect = None
        self.client.disconnect()
        self.client.loop_stop()

    def _connected(self, client: Any, _userdata: Any, flags: Any, reason: Any, _properties: Any) -> None:
        from paho.mqtt.subscribeoptions import SubscribeOptions

        config = self._config
        if reason.is_failure:
            self._give(SourceFailed(config.refusal_fault(str(reason))))
            return
        self._is_new = not flags.session_present
        handling = SubscribeOptions.RETAIN_SEND_IF_NEW_SUB if config.retained else SubscribeOptions.RETAIN_DO_NOT_SEND
        options = SubscribeOptions(qos=1, retainHandling=handling)
        client.subscribe([(_LEVEL.sub("+", topic), options) for topic in config.topics])

    def _subscribed(self, _client: Any, _userdata: Any, _mid: int, reasons: Any, _properties: Any) -> None:
        for reason, topic in zip(reasons, self._config.topics, strict=False):
            if reason.is_failure:
                accepted = "filters that the user may subscribe to"
                self._give(SourceFailed(InvalidConfig("topics", topic, accepted, f"the broker answers: {reason}")))
                return
        self._give(_Subscribed(self._is_new))

    def _disconnected(self, _client: Any, _userdata: Any, flags: Any, reason: Any, _properties: Any) -> None:
        if flags.is_disconnect_packet_from_server or str(reason) == "Keep alive timeout":
            fault = self._config.refusal_fault(str(reason))
        else:
            fault = self._config.broker_fault("the connection has ended; perhaps another client has the client_id")
        self._give(SourceFailed(fault))


class MqttSource(KeptSource):
    """A `Source` that reads all topics of one entry of ``sources``."""

    delivery = Delivery.AT_LEAST_ONCE

    def __init__(self, config: MqttConfig, context: SourceContext) -> None:
        self.stream = context.stream
        self.name = f"{context.stream}:mqtt:{config.broker}/{config.client_id}"
        self._config, self._context = config, context
        self._decoder = MessageDecoder(config.text_format(context.schema), config.more, f"broker {config.broker}")
        self._levels = [_pattern(topic) for topic in config.topics]
        self._client: Any = None
        self._unacknowledged: list[tuple[int, Any]] = []  # (number of the chunk, message)
        self._open: set[int] = set()  # packet identifiers of the last connection that the edge had not acknowledged
        self._doubtful: list[Any] = []  # repeated messages, unless the broker has used the packet identifier again
        self._chunk = self._committed = 0

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        self._open = {message.mid for _, message in self._unacknowledged}
        remembered, self._unacknowledged = Remembered(position), []
        connection = _BrokerConnection(self._config, lambda: self._context.coalesce_s(self.stream, self.name))
        self._client, arrived = connection.client, connection.arrived
        try:
            await asyncio.to_thread(connection.open)
            early = list[Any]()  # messages of an old session arrive before the answer to SUBSCRIBE
            while True:
                subscribed = await self._answer(arrived)
                if isinstance(subscribed, _Subscribed):
                    break
                early.append(subscribed)
            if subscribed.is_new:
                remembered, is_lost = Remembered(None), position is not None
                yield self._empty(remembered, (str(LossReason.INPUT_GONE),) if is_lost else ())
            for message in early:
                arrived.put_nowait(message)
            async for chunk in self._messages(arrived, remembered):
                yield chunk
        finally:
            self._client = None
            await asyncio.to_thread(connection.close)

    async def _answer(self, arrived: asyncio.Queue[Any]) -> Any:
        """Returns the next item. Raises SourceFailed if the broker does not answer or refuses the session."""
        try:
            async with asyncio.timeout(ANSWER_S):
                item = await arrived.get()
        except TimeoutError:
            raise SourceFailed(self._config.broker_fault(f"no answer within {ANSWER_S:g} s")) from None
        if isinstance(item, SourceFailed):
            raise item
        return item

    async def _messages(self, arrived: asyncio.Queue[Any], remembered: Remembered) -> AsyncIterator[Chunk]:
        while True:
            messages = [await next_item(self._context, self.name, arrived)]
            while not arrived.empty():
                messages.append(arrived.get_nowait())
            failure = next((m for m in messages if isinstance(m, SourceFailed)), None)
            new = [m for m in messages if not isinstance(m, SourceFailed) and self._is_new(remembered, m)]
            if new or self._doubtful:
                yield self._decoded(new, remembered)
            if failure is not None:
                raise failure

    def _empty(self, remembered: Remembered, losses: tuple[str, ...]) -> Chunk:
        """Returns a chunk without records. After a restart, its position tells that a session existed."""
        self._chunk += 1
        end = remembered.to_position() | {"chunk": self._chunk}
        return Chunk(self.name, self._context.schema.empty(), None, end, (), 0, losses, keep=True)

    def _is_new(self, remembered: Remembered, message: Any) -> bool:
        """Returns whether a message counts. A repeated message is acknowledged once the newest chunk is on disk."""
        # A session may still have subscriptions of an earlier configuration.
        is_read = any(each.fullmatch(message.topic) for each in self._levels)
        is_repeated = remembered.knows(message)
        is_known = is_repeated or not is_read
        if is_repeated and is_read and message.mid not in self._open:
            self._doubtful.append(message)
        self._unacknowledged.append((self._chunk if is_known else self._chunk + 1, message))
        if is_known and self._chunk <= self._committed:
            self._acknowledge()
        return not is_known

    def _decoded(self, messages: Sequence[Any], remembered: Remembered) -> Chunk:
        self._chunk += 1
        doubtful, self._doubtful = self._doubtful, []
        decoded, repeated = self._records(messages), self._records(doubtful)
        left_out = guesses(DropReason.ASSUMED_REPETITION, repeated.batch.column(TIME_COLUMN).to_numpy())
        guessed = (*decoded.guessed, *left_out)
        end, nbytes = remembered.to_position() | {"chunk": self._chunk}, sum(len(m.payload) for m in messages)
        return Chunk(self.name, decoded.batch, None, end, decoded.rejected, nbytes, keep=True, guessed=guessed)

    def _records(self, messages: Sequence[Any]) -> Decoded:
        bodies = [message.payload for message in messages]
        topics = [message.topic for message in messages]
        more = {name: [self._level(topic, name) for topic in topics] for name in self._config.more}
        return self._decoder.decode(bodies, more, self._context.now_ms(), lambda n: f"topic {topics[n]}")

    def _level(self, topic: str, name: str) -> str | None:
        found = next((match for pattern in self._levels if (match := pattern.fullmatch(topic))), None)
        return None if found is None else found[name]

    def committed(self, position: Position) -> None:
        self._committed = int(position["chunk"])
        self._acknowledge()

    def _acknowledge(self) -> None:
        client, kept = self._client, list[tuple[int, Any]]()
        for number, message in self._unacknowledged:
            if number > self._committed:
                kept.append((number, message))
            elif client is not None and message.qos:
                client.ack(message.mid, message.qos)
        self._unacknowledged = kept


def _pattern(topic: str) -> re.Pattern[str]:
    """Returns the regular expression that extracts the named levels of a topic."""
    parts = re.split(r"(\{\w+\}|\+|#)", topic)
    any_of = {"+": "[^/]*", "#": ".*"}
    named = (
        f"(?P<{part[1:-1]}>[^/]*)" if part.startswith("{") else any_of.get(part, re.escape(part)) for part in parts
    )
    return re.compile("".join(named))


class Mqtt:
    """The kind of sources ``mqtt``."""

    name = "mqtt"
    config = MqttConfig

    def sources(self, options: MqttConfig, context: SourceContext) -> Sequence[Source]:
        require_module("paho.mqtt.client", "paho-mqtt", "mqtt")
        return [MqttSource(options, context)]

    def check(self, options: MqttConfig, context: SourceContext, records: int) -> SourceCheck:
        """Subscribes in a temporary session and decodes the messages that arrive within `CHECK_S`."""
        checked = options.model_copy(update={"client_id": f"{options.client_id}-check"[-64:], "session_ms": 0})

        async def look() -> SourceCheck:
            source, samples, nbytes = MqttSource(checked, context), list[Decoded](), 0
            chunks = source.chunks(None)
            try:
                async with asyncio.timeout(CHECK_S):
                    async for chunk in chunks:
                        samples.append(Decoded(chunk.batch, chunk.rejected))
                        nbytes += chunk.nbytes
                        if sum(sample.batch.num_rows for sample in samples) >= records:
                            break
            except TimeoutError:
                pass
            finally:
                await chunks.aclose()  # type: ignore[attr-defined]
            count = sum(s.batch.num_rows + sum(r.count for r in s.rejected) for s in samples)
            facts = f"{options.broker} accepts the subscriptions; {count} message(s) came within {CHECK_S:g} s"
            return SourceCheck((facts,), tuple(samples), nbytes)

        try:
            return asyncio.run(look())
        except SourceFailed as exc:
            raise exc.fault from exc


KIND = Mqtt()
