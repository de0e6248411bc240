"""Topics of an MQTT 5 broker (extra ``mqtt``), with QoS 1.

The broker keeps the session while the agent is away. A message is acknowledged once the journal has it. After a crash
of the agent, or a lost connection, the broker sends unacknowledged messages again, with the flag DUP. The journal
remembers the packet identifiers and digests of the newest messages, so such a repetition counts once.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import ssl
import struct
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b
from typing import Any

from pydantic import Field, SecretStr, field_validator, model_validator

from edge.codecs import MessageDecoder, TextFormatName
from edge.config import TextConfig, TlsConfig, secret
from edge.records import Chunk, Position, Source
from edge.source_kinds import KeptSource, SourceContext
from edgewater.configuration import Duration, RemoteAddress, refusal, split_address
from edgewater.errors import InvalidConfig
from edgewater.streams import Delivery

log = logging.getLogger(__name__)

RECEIVE_MAXIMUM = 500
"""The most messages that are unacknowledged. The journal remembers as many."""
COALESCE_S = 0.05
KEEPALIVE_S = 30
_ENTRY = struct.Struct("<HQ")
_LEVEL = re.compile(r"\{(\w+)\}")


class MqttConfig(TextConfig):
    """The options below ``mqtt:``.

    Attributes:
        broker: host:port of the broker.
        topics: filters. A level such as ``{device}`` matches as ``+`` does; the column ``device`` gets its text.
        client_id: names the session at the broker; no other client may use it.
        username: user at the broker. None: no credentials.
        password: password at the broker.
        tls: true means TLS with the system's CAs.
        session: how long the broker keeps messages while the agent is away.
        retained: also count the message that the broker has retained for a topic, at each new session.
    """

    broker: RemoteAddress
    topics: list[str] = Field(min_length=1, max_length=100)
    client_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    format: TextFormatName = "ndjson"
    username: str | None = None
    password: SecretStr | None = None
    tls: TlsConfig | bool = False
    session: Duration = Field(default=86_400_000, ge=60_000, le=0xFFFF_FFFE * 1000)
    retained: bool = False

    _password = field_validator("password", mode="before")(secret)

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
        if self.format == "csv" and self.csv.header is None:
            raise refusal("csv: {header: […]}, as messages have no header line", "format is csv")
        names = [sorted(_LEVEL.findall(topic)) for topic in self.topics]
        if any(each != names[0] for each in names):
            raise refusal("the same columns in all topics, such as {device}", f"got {', '.join(self.topics)}")
        return self

    @property
    def more(self) -> list[str]:
        """The columns that are levels of the topic."""
        return _LEVEL.findall(self.topics[0])

    def column_fault(self, columns: Sequence[str]) -> tuple[str, str] | None:
        for name in self.more:
            if name not in columns or self.more.count(name) > 1:
                return f"each of {', '.join(columns)} once", f"the level {{{name}}} of the topic"
        return super().column_fault([name for name in columns if name not in self.more])


def _overlap(one: list[str], other: list[str]) -> bool:
    """Whether a topic may match both filters."""
    if "#" in (*one[:1], *other[:1]):
        return True
    if not one or not other:
        return one == other
    if one[0] != other[0] and not any(level == "+" or level.startswith("{") for level in (one[0], other[0])):
        return False
    return _overlap(one[1:], other[1:])


class MqttFailed(OSError):
    """The broker cannot be reached, or refuses the session."""


class Remembered:
    """The newest messages, by packet identifier."""

    def __init__(self, position: Position | None) -> None:
        data = base64.b64decode(position["packets"]) if position is not None else b""
        self._digests: OrderedDict[int, int] = OrderedDict(_ENTRY.iter_unpack(data))

    def knows(self, message: Any) -> bool:
        """Returns whether a message repeats a remembered message. Remembers the message."""
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


class MqttSource(KeptSource):
    """A `Source`: the messages of all topics of one entry of ``sources``."""

    delivery = Delivery.EXACTLY_ONCE

    def __init__(self, config: MqttConfig, context: SourceContext) -> None:
        self.stream = context.stream
        self.name = f"{context.stream}:mqtt:{config.broker}/{config.client_id}"
        self._config, self._context = config, context
        self._decoder = MessageDecoder(config.text_format(context.schema), config.more, f"topics {config.topics}")
        self._levels = [_pattern(topic) for topic in config.topics]
        self._client: Any = None
        self._unacknowledged: list[tuple[int, Any]] = []  # (number of the chunk, message)
        self._chunk = self._committed = 0

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        remembered, arrived = Remembered(position), asyncio.Queue[Any]()
        self._unacknowledged, client = [], self._connect(arrived)
        self._client = client
        try:
            while True:
                with self._context.idle(self.name):
                    message = await arrived.get()
                    await self._context.sleep(COALESCE_S)
                messages = [message]
                while not arrived.empty():
                    messages.append(arrived.get_nowait())
                failure = next((m for m in messages if isinstance(m, Exception)), None)
                new = [m for m in messages if not isinstance(m, Exception) and self._is_new(remembered, m)]
                if new:
                    yield self._decoded(new, remembered)
                if failure is not None:
                    raise failure
        finally:
            self._client = None
            await asyncio.to_thread(_stop, client)

    def _connect(self, arrived: asyncio.Queue[Any]) -> Any:
        import paho.mqtt.client as mqtt
        from paho.mqtt.enums import CallbackAPIVersion
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties
        from paho.mqtt.subscribeoptions import SubscribeOptions

        config, loop = self._config, asyncio.get_running_loop()

        def give(item: Any) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        def connected(client: Any, _userdata: Any, _flags: Any, reason: Any, _properties: Any) -> None:
            if reason.is_failure:
                give(MqttFailed(f"{config.broker} refuses the session: {reason}"))
            else:
                handling = (
                    SubscribeOptions.RETAIN_SEND_IF_NEW_SUB if config.retained else SubscribeOptions.RETAIN_DO_NOT_SEND
                )
                options = SubscribeOptions(qos=1, retainHandling=handling)
                client.subscribe([(_LEVEL.sub("+", topic), options) for topic in config.topics])

        def subscribed(_client: Any, _userdata: Any, _mid: int, reasons: Any, _properties: Any) -> None:
            for reason, topic in zip(reasons, config.topics, strict=False):
                if reason.is_failure:
                    give(MqttFailed(f"{config.broker} refuses the topic {topic}: {reason}"))

        client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            config.client_id,
            protocol=mqtt.MQTTv5,
            manual_ack=True,
            reconnect_on_failure=False,
        )
        client.on_connect, client.on_subscribe = connected, subscribed
        client.on_message = lambda _client, _userdata, message: give(message)
        client.on_disconnect = lambda *_: give(MqttFailed(f"{config.broker}: the connection has ended"))
        if config.username is not None:
            client.username_pw_set(config.username, config.password.get_secret_value() if config.password else None)
        if config.tls:
            tls = config.tls if isinstance(config.tls, TlsConfig) else TlsConfig()
            client.tls_set(tls.ca, tls.cert, tls.key, cert_reqs=ssl.CERT_REQUIRED)
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval, properties.ReceiveMaximum = config.session // 1000, RECEIVE_MAXIMUM
        host, port = split_address(config.broker)
        client.connect_async(host, port, KEEPALIVE_S, clean_start=False, properties=properties)
        client.on_connect_fail = lambda *_: give(MqttFailed(f"{config.broker} cannot be reached"))
        client.loop_start()
        return client

    def _is_new(self, remembered: Remembered, message: Any) -> bool:
        """Returns whether a message counts. A repetition is acknowledged once the newest chunk is on disk."""
        # A session may still have subscriptions of an earlier configuration.
        is_known = remembered.knows(message) or not any(each.fullmatch(message.topic) for each in self._levels)
        self._unacknowledged.append((self._chunk if is_known else self._chunk + 1, message))
        if is_known and self._chunk <= self._committed:
            self._acknowledge()
        return not is_known

    def _decoded(self, messages: Sequence[Any], remembered: Remembered) -> Chunk:
        self._chunk += 1
        bodies = [message.payload for message in messages]
        topics = [message.topic for message in messages]
        more = {name: [self._level(topic, name) for topic in topics] for name in self._config.more}
        decoded = self._decoder.decode(bodies, more, self._context.now_ms())
        end = remembered.to_position() | {"chunk": self._chunk}
        return Chunk(self.name, decoded.batch, None, end, decoded.rejected, sum(map(len, bodies)), keep=True)

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
    """Returns the expression that finds the levels of a topic."""
    parts = re.split(r"(\{\w+\}|\+|#)", topic)
    return re.compile("".join(
        f"(?P<{part[1:-1]}>[^/]*)" if part.startswith("{") else {"+": "[^/]*", "#": ".*"}.get(part, re.escape(part))
        for part in parts
    ))  # fmt: skip


def _stop(client: Any) -> None:
    client.on_disconnect = None
    client.disconnect()
    client.loop_stop()


class Mqtt:
    """The kind ``mqtt``."""

    name = "mqtt"
    config = MqttConfig

    def sources(self, options: MqttConfig, context: SourceContext) -> Sequence[Source]:
        try:
            import paho.mqtt.client  # noqa: F401
        except ImportError as exc:
            accepted = "the package paho-mqtt: pip install 'edgewater[mqtt]'"
            raise InvalidConfig(f"streams.{context.stream}.sources.mqtt", options.broker, accepted, str(exc)) from exc
        return [MqttSource(options, context)]


KIND = Mqtt()
