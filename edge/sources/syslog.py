"""Receives messages of syslog over TCP, TLS or UDP.

Syslog has no acknowledgements. If the process ends, two kinds of messages are lost: those in the kernel's buffers, and
those that are not in the journal yet. Each message therefore counts at most once. While the edge is full, TCP makes
senders wait. Over UDP the kernel drops messages, and the edge cannot count them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pyarrow as pa
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from edge.codecs.formats import TextFormatName
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.messages import ColumnsSchema, MessageDecoder, joined
from edge.codecs.syslog import FIELDS as SYSLOG_FIELDS
from edge.codecs.syslog import SyslogFormat, is_field
from edge.config import HttpTlsConfig, MessageConfig, Zone
from edge.records import BLOCK_BYTES, Chunk, Decoded, Position, RejectionReason, Rejections, Source, split_rows
from edge.source_kinds import KeptSource, SourceContext
from edge.sources.syslog_framing import BadFrame, Framing
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import Delivery, type_name
from edgewater.runtime.configuration import Address, Duration, Size, is_loopback, refusal, split_address

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = BLOCK_BYTES
"""If more bytes wait to be decoded, the edge stops reading, so that senders wait."""
MAX_DATAGRAM = 65_535  # format: of UDP
DATAGRAMS_AT_ONCE = 256  # limit: the turn of the socket, so that other tasks run
HANDSHAKE_S = 10.0  # limit: connections that never finish their handshake
BACKLOG = 128  # limit: connections that wait to be accepted


class SyslogConfig(MessageConfig):
    """The options below ``syslog:``.

    Attributes:
        listen: the address at which messages arrive.
        protocol: the transport. With tcp, both framings of RFC 6587 are accepted. With tcp and `tls`, messages
            arrive over TLS (RFC 5425).
        tls: the server's certificate. With `client_ca`, senders must present a certificate.
        peers: networks whose machines may send. None: all machines that can reach the address.
        columns: by column, the field of the message. Without `format`, a column with a field's name needs no entry.
        format: the format of the text of each message. The text has the columns that are not in `columns`. None: the
            text is one column.
        zone: IANA name of the time zone for times of RFC 3164, which state no time zone. None: the stream's
            `time.zone`.
        max_message: the largest size of a message. Longer messages are rejected.
        max_connections: the largest number of connections that have sent a message, or have presented a certificate to
            `client_ca`. As many others may be open. Beyond either number, a connection of the address with the most
            connections is closed, the longest idle first.
        idle_ms: the edge closes a connection without a message for this time.
        receive_buffer: size of the kernel's buffer for UDP. None: the system's default.
    """

    listen: Address
    protocol: Literal["tcp", "udp"] = "tcp"
    tls: HttpTlsConfig | None = None
    peers: list[str] | None = None
    columns: dict[str, str] = {}
    format: TextFormatName | None = None  # type: ignore[assignment]
    zone: Zone | None = None
    max_message: Size = Field(default=64 << 10, ge=480, le=1 << 20)
    max_connections: int = Field(default=256, ge=1, le=10_000)
    idle_ms: Duration = Field(default=3_600_000, ge=1_000)
    receive_buffer: Size | None = Field(default=None, ge=4 << 10, le=1 << 30)

    @field_validator("peers")
    @classmethod
    def _networks(cls, peers: list[str] | None) -> list[str] | None:
        for peer in peers or ():
            try:
                ipaddress.ip_network(peer)
            except ValueError as exc:
                raise refusal("networks such as 10.1.0.0/16", str(exc)) from exc
        return peers

    @model_validator(mode="after")
    def _consistent(self) -> SyslogConfig:
        if self.protocol == "udp" and self.tls is not None:
            raise refusal("tls with protocol: tcp", "protocol is udp")
        if self.protocol == "tcp" and self.receive_buffer is not None:
            raise refusal("receive_buffer with protocol: udp", "TCP holds senders back")
        if self.peers is None and not is_loopback(self.listen) and (self.tls is None or self.tls.client_ca is None):
            raise refusal(
                "peers: the networks whose machines may send, tls.client_ca, or a loopback address in listen",
                "other machines could send messages without credentials",
            )
        for column, field in self.columns.items():
            if not is_field(field):
                accepted = f"one of the fields {', '.join(SYSLOG_FIELDS)}, or sd.ID.PARAMETER of structured data"
                raise refusal(accepted, f"columns.{column} is {field!r}")
        return self

    def column_fault(self, columns: Sequence[str]) -> tuple[str, str] | None:
        if self.format is None:
            return None
        return super().column_fault([name for name in columns if name not in self.columns])

    def fields(self, columns: Mapping[str, pa.DataType], time: str) -> dict[str, str]:
        """Returns the field of each column that is not in the text of a message.

        Args:
            time: the column of the event time.

        Raises:
            PydanticCustomError: the fields do not fit the columns.
        """
        fields = dict(self.columns)
        if self.format is None:
            fields = {time: "time"} | {name: name for name in columns} | fields
        for name, field in fields.items():
            if not is_field(field):
                raise refusal(f"columns: {{{name}: FIELD}}, with a field such as host", f"{name} is no field")
            if name not in columns and name != time:
                raise refusal(f"one of the columns {', '.join((*columns, time))}", f"columns.{name} is none of them")
            declared = type_name(columns[name]) if name in columns else ""
            if field in ("facility", "severity") and declared not in ("string", "int64"):
                raise refusal("the type string for names, or int64 for numbers", f"column {name} is {declared}")
            if (name == time) != (field in ("time", "arrival")) or (name == time and name in columns):
                raise refusal(
                    f"time or arrival for the event time {time}, which is none of the columns, and for nothing else",
                    f"columns.{name} is {field}",
                )
        return fields


class _Decoder:
    """Decodes blocks of messages."""

    def __init__(self, config: SyslogConfig, context: SourceContext) -> None:
        schema = context.schema
        if config.zone is not None:
            schema = replace(schema, time=replace(schema.time, zone=config.zone))
        time = schema.time
        self._fields = config.fields(schema.columns, time.column)
        if time.column in self._fields:
            schema = replace(schema, time=replace(time, unit="iso8601", time_of_day=None))
        self._columns = schema
        self._body: MessageDecoder | None = None
        if config.format is not None:
            more = list(self._fields)
            self._body = MessageDecoder(config.text_format(schema), more, f"messages at {config.listen}")
            types = {name: schema.textual[name] for name in more} | {_TEXT: pa.string()}
            self._columns = ColumnsSchema.of(schema, types)
            self._fields[_TEXT] = "message"

    def decode(self, messages: bytes, arrival_ms: int) -> Decoded:
        decoder = LineDecoder(SyslogFormat(self._columns, self._fields).codec(arrival_ms))
        if self._body is None:
            return decoder.decode(messages, arrival_ms)
        rejections = Rejections()
        table = decoder.parse(messages, rejections).combine_chunks()
        more = {name: _array(table, name) for name in table.column_names if name != _TEXT}
        # A message without a text is rejected here. Only a broker's empty message deletes something.
        bodies = [text or b"?" for text in _array(table, _TEXT).cast(pa.binary()).to_pylist()]
        return self._body.decode(bodies, more, arrival_ms, rejected=rejections.as_tuple())


_TEXT = "\0text"


def _array(table: pa.Table, name: str) -> pa.Array:
    chunks = table.column(name)
    return chunks.chunk(0) if chunks.num_chunks else pa.nulls(0, chunks.type)


class _Intake:
    """The open connections of a listener, and the messages that have arrived but are not decoded yet."""

    def __init__(self, config: SyslogConfig, now_s: Callable[[], float]) -> None:
        self.config, self.now_s = config, now_s
        self.filled = asyncio.Event()
        # Ordered by idle time, longest first. Silent connections have sent no message and shown no certificate.
        self.connections: dict[_Connection, None] = {}
        self.silent: dict[_Connection, None] = {}
        self.sockets: list[_Datagrams] = []
        self.is_full = False
        self.tls = None if config.tls is None else _tls(config.tls)
        self._networks = None if config.peers is None else [ipaddress.ip_network(peer) for peer in config.peers]
        self._blocks: list[bytes] = []
        self._nbytes = 0
        self._rejections = Rejections()

    def allows(self, host: str) -> bool:
        """Returns whether a machine may send."""
        if self._networks is None:
            return True
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        return any(mapped in network for network in self._networks)

    def admit(self, connection: _Connection, *, is_silent: bool) -> None:
        """Counts a connection as the newest one. If there are too many, closes one. A silent connection never closes a
        sender's connection.
        """
        self.forget(connection)
        group = self.silent if is_silent else self.connections
        group[connection] = None
        if len(group) > self.config.max_connections:
            most, _ = Counter(each.machine for each in group).most_common(1)[0]
            log.warning("syslog at %s: max_connections is reached; a connection of %s ends", self.config.listen, most)
            next(each for each in group if each.machine == most).close()

    def forget(self, connection: _Connection) -> None:
        self.silent.pop(connection, None)
        self.connections.pop(connection, None)

    def add(self, messages: bytes) -> None:
        """Adds messages, each with a line feed at its end."""
        if messages:
            self._blocks.append(messages)
            self._nbytes += len(messages)
            self.filled.set()
            self._hold(self._nbytes > MAX_WAITING_BYTES)

    def reject(self, reason: RejectionReason, example: bytes, message: str) -> None:
        self._rejections.add(reason, example, message)
        self.filled.set()

    def take(self) -> tuple[bytes, Rejections]:
        """Returns and removes all waiting messages, and lets senders continue."""
        messages, rejections = b"".join(self._blocks), self._rejections
        self._blocks, self._nbytes, self._rejections = [], 0, Rejections()
        self.filled.clear()
        self._hold(False)
        return messages, rejections

    def _hold(self, is_full: bool) -> None:
        if is_full != self.is_full:
            self.is_full = is_full
            for connection in (*self.connections, *self.silent):
                connection.hold(is_full)
            for datagrams in self.sockets:
                datagrams.hold(is_full)


class _Connection(asyncio.Protocol):
    """One sender over TCP or TLS. A connection in its TLS handshake already counts as a connection."""

    def __init__(self, intake: _Intake) -> None:
        self.machine = ""
        self._idle_since_s = intake.now_s()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._intake = intake
        self._framing = Framing(intake.config.max_message)
        self._transport: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        intake, self._transport = self._intake, transport
        host = transport.get_extra_info("peername")[0]
        if not intake.allows(host):
            log.warning("syslog at %s: %s is in none of the networks in peers", intake.config.listen, host)
            transport.abort()
            return
        self.machine = _machine(host)
        intake.admit(self, is_silent=True)
        self._close_if_idle()
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if intake.tls is not None:
            transport.pause_reading()
            self._handshake = asyncio.create_task(self._start_tls(transport, intake.tls))
        else:
            self.hold(intake.is_full)

    async def _start_tls(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
            if secured is None:  # the sender has left during the handshake
                return
            self._transport = secured
            if tls.verify_mode is ssl.CERT_REQUIRED and not secured.is_closing():
                self._intake.admit(self, is_silent=False)
            if self._intake.is_full:
                secured.pause_reading()
        except OSError as exc:  # also ssl.SSLError and time-outs
            log.warning("syslog at %s: a TLS handshake has failed: %s", self._intake.config.listen, exc)
            self._forget()
            transport.abort()

    def hold(self, is_held: bool) -> None:
        """Stops reading if `is_held`, otherwise continues."""
        is_in_handshake = self._handshake is not None and not self._handshake.done()
        if self._transport is not None and not self._transport.is_closing() and not is_in_handshake:
            (self._transport.pause_reading if is_held else self._transport.resume_reading)()

    def data_received(self, data: bytes) -> None:
        intake = self._intake
        self._idle_since_s = intake.now_s()
        try:
            messages = self._framing.feed(data)
            if messages or self in intake.connections:
                intake.admit(self, is_silent=False)
        except BadFrame as exc:
            intake.reject(RejectionReason.MALFORMED, exc.example, str(exc))
            messages = exc.before
            self.close()
        self._take(messages)

    def _take(self, messages: bytes) -> None:
        for example in self._framing.take_too_long():
            expected = f"expected at most {self._intake.config.max_message} bytes (max_message)"
            self._intake.reject(RejectionReason.TOO_LONG, example, f"a message that is too long; {expected}")
        self._intake.add(messages)

    def eof_received(self) -> None:
        self._has_ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        try:
            self._take(self._framing.end(is_cut=not self._has_ended))
        except BadFrame as part:
            self._intake.reject(RejectionReason.MALFORMED, part.example, str(part))

    def _forget(self) -> None:
        self._intake.forget(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _close_if_idle(self) -> None:
        """Closes the connection if no message has come for the time `idle`. Looks again when that time may be over."""
        intake, idle_s = self._intake, self._intake.config.idle_ms / 1000
        left_s = idle_s if intake.is_full else self._idle_since_s + idle_s - intake.now_s()
        if left_s <= 0:
            self.close()
        else:
            self._idle_timer = asyncio.get_running_loop().call_later(left_s, self._close_if_idle)

    def close(self) -> None:
        self._forget()
        if self._transport is not None:
            self._transport.close()


def _machine(host: str) -> str:
    """Returns the address of a machine. Of IPv6, returns the network, in which one machine may have any address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


class _Datagrams:
    """The UDP socket. It replaces asyncio's own datagram protocol, which cannot be paused."""

    def __init__(self, intake: _Intake, udp: socket.socket) -> None:
        self._intake, self._socket = intake, udp
        self._loop = asyncio.get_running_loop()
        self.hold(False)
        intake.sockets.append(self)

    def hold(self, is_held: bool) -> None:
        if is_held:
            self._loop.remove_reader(self._socket)
        else:
            self._loop.add_reader(self._socket, self._read)

    def _read(self) -> None:
        intake, received = self._intake, list[bytes]()
        with contextlib.suppress(BlockingIOError):
            for _ in range(DATAGRAMS_AT_ONCE):
                data, (host, *_) = self._socket.recvfrom(MAX_DATAGRAM)
                if not intake.allows(host):
                    continue
                if len(data) > intake.config.max_message:
                    intake.reject(RejectionReason.TOO_LONG, data, f"{len(data)} bytes; see max_message")
                else:
                    received.append(data)
        if received:
            intake.add(joined(received) + b"\n")

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()


class SyslogSource(KeptSource):
    """A `Source` of the messages that arrive at one address.

    Attributes:
        address: host and port while the source listens; None otherwise.
    """

    delivery = Delivery.AT_MOST_ONCE

    def __init__(self, config: SyslogConfig, context: SourceContext) -> None:
        self.stream = context.stream
        self.name = f"{context.stream}:syslog:{config.protocol}:{config.listen}"
        self.address: tuple[str, int] | None = None
        self._config, self._context = config, context
        self._decoder = _Decoder(config, context)

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        intake = _Intake(self._config, asyncio.get_running_loop().time)
        async with self._listening(intake):
            while True:
                with self._context.idle(self.name):
                    await intake.filled.wait()
                    await self._context.sleep(self._context.coalesce_s(self.stream, self.name))
                messages, rejections = intake.take()
                for chunk in split_rows(await asyncio.to_thread(self._decoded, messages, rejections)):
                    yield chunk

    def _decoded(self, messages: bytes, rejections: Rejections) -> Chunk:
        decoded = self._decoder.decode(messages, self._context.now_ms())
        rejections.extend(decoded.rejected)
        return Chunk(
            self.name, decoded.batch, None, None, rejections.as_tuple(), len(messages), guessed=decoded.guessed
        )

    @contextlib.asynccontextmanager
    async def _listening(self, intake: _Intake) -> AsyncIterator[None]:
        """Listens while the context is open. Raises OSError if the address cannot be used."""
        host, port = split_address(self._config.listen)
        loop = asyncio.get_running_loop()
        if self._config.protocol == "udp":
            (family, kind, number, _, address), *_ = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            udp = socket.socket(family, kind, number)
            udp.setblocking(False)
            if self._config.receive_buffer is not None:
                udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._config.receive_buffer)
            try:
                udp.bind(address)
            except OSError:
                udp.close()
                raise
            self.address = udp.getsockname()[:2]
            datagrams = _Datagrams(intake, udp)
            try:
                yield
            finally:
                self.address = None
                datagrams.close()
            return
        server = await loop.create_server(lambda: _Connection(intake), host, port, backlog=BACKLOG)
        self.address = server.sockets[0].getsockname()[:2]
        try:
            yield
        finally:
            self.address = None
            server.close()
            for connection in (*intake.connections, *intake.silent):
                connection.close()


def _tls(files: HttpTlsConfig) -> ssl.SSLContext:
    """Returns the TLS context of the server. Raises OSError if a file cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.client_ca)
    context.load_cert_chain(files.cert, files.key)
    context.verify_mode = ssl.CERT_NONE if files.client_ca is None else ssl.CERT_REQUIRED
    return context


class Syslog:
    """The kind of sources ``syslog``."""

    name = "syslog"
    config = SyslogConfig

    def sources(self, options: SyslogConfig, context: SourceContext) -> Sequence[Source]:
        try:
            if options.tls is not None:
                _tls(options.tls)
            return [SyslogSource(options, context)]
        except PydanticCustomError as exc:
            given = exc.context or {}
            raise InvalidConfig("columns", options.columns, given["accepted"], given["reason"]) from None
        except OSError as exc:  # also ssl.SSLError
            assert options.tls is not None
            accepted = "PEM files of a certificate, its key and the CA of clients"
            raise InvalidConfig("tls", options.tls.cert, accepted, str(exc)) from exc


KIND = Syslog()
