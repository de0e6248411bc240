"""Edges that only speak the protocol, as cheaply as Python can: many connections on one thread.

A client of grpc.aio costs as much per message as the gateway. On a shared machine such a load generator would measure
itself. Here an edge is a socket, bytes that are prepared once, and the few frames of HTTP/2 that a gRPC call needs (RFC
9113); response headers are not decoded. The timing is a real edge's: full jitter between attempts, the wait and the
interval of heartbeats that a gateway requests, and the end of a silent session.
"""

from __future__ import annotations

import heapq
import re
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edge.process import now_ms
from edge.uplink.client import MAX_SILENCE_S, RECONNECT_FIRST_S
from edge.uplink.flow_control import LinkLimits
from edgewater.wire import RETRY_METADATA, QueryRef
from edgewater.wire import uplink_pb2 as pb

_DATA, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 3, 4, 6, 7, 8
_ACK, _END_HEADERS, _INITIAL_WINDOW = 1, 4, 4
_HEADER = struct.Struct(">HBBBI")
"""Length in 16 and 8 bits, type, flags, stream."""
_LARGEST_WINDOW = (1 << 31) - 1
_DEFAULT_WINDOW = 65_535
_RETRY = re.compile(RETRY_METADATA.encode() + rb".(\d+)", re.DOTALL)
_LIMITS = LinkLimits()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def _literal(name: bytes, text: bytes) -> bytes:
    """Returns a header field that is not indexed; the name is its index in HPACK's static table, or its text."""
    return name + bytes([len(text)]) + text


_PREFACE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, _LARGEST_WINDOW))
    + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST_WINDOW - _DEFAULT_WINDOW))
    + _frame(
        1,
        _END_HEADERS,
        1,
        b"\x83\x86"  # POST, http
        + _literal(b"\x04", b"/edgewater.v1.Uplink/Session")
        + _literal(b"\x01", b"localhost")
        + _literal(b"\x0f\x10", b"application/grpc")
        + _literal(b"\x00\x02te", b"trailers"),
    )
)


def _message(message: pb.FromEdge) -> bytes:
    """Returns a gRPC message in one DATA frame."""
    body = message.SerializeToString()
    return _frame(_DATA, 0, 1, b"\0" + len(body).to_bytes(4, "big") + body)


@dataclass(slots=True)
class _Edge:
    """One edge; the fields after `patience_s` are its connection's."""

    number: int
    next_seq: int = 1
    unacked: dict[int, tuple[pb.Frame, float]] = field(default_factory=dict)
    attempts: int = 0
    patience_s: float = _LIMITS.silence_s
    sock: socket.socket | None = None
    received: bytearray = field(default_factory=bytearray)
    messages: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    waiting: list[bytes] = field(default_factory=list)
    window: int = _DEFAULT_WINDOW
    stream_window: int = _DEFAULT_WINDOW
    initial_window: int = _DEFAULT_WINDOW
    heard_s: float = 0.0
    every_s: float = 1.0
    joined: bool = False
    writes: bool = False


class RawEdges:
    """The edges ``e0`` to ``e(count - 1)``, all of one stream.

    Attributes:
        joined_at_s: for edges with a session, when they last got their queries, by `time.perf_counter`.
        acked_ms: how long each acknowledged frame took.
        echo_ms: how long each heartbeat's echo took, including the way back.
        refused: sessions that the gateway has asked to come later; lost: connections that ended otherwise.
    """

    def __init__(self, port: int, count: int, stream: pb.Stream) -> None:
        self._address = ("127.0.0.1", port)
        self._edges = [_Edge(number) for number in range(count)]
        self._stream = stream
        self._poll = select.epoll()
        self._of_fd: dict[int, _Edge] = {}
        self._timers: list[tuple[float, int, Callable[[_Edge], None], _Edge, socket.socket | None]] = []
        self._order = 0
        self._random = np.random.default_rng(1)
        self._statuses: dict[bytes, bytes] = {}
        self.refs: dict[str, QueryRef] = {}
        self.joined_at_s: dict[int, float] = {}
        self.acked_ms: list[float] = []
        self.echo_ms: list[float] = []
        self.heartbeats = self.refused = self.lost = self.unacked = 0

    def start(self) -> None:
        for edge in self._edges:
            self._retry(edge)

    def close(self) -> None:
        for edge in self._of_fd.values():
            if edge.sock is not None:
                edge.sock.close()
        self._of_fd.clear()
        self._poll.close()

    @property
    def all_joined(self) -> bool:
        return len(self.joined_at_s) == len(self._edges)

    def run(self, until: Callable[[], bool], within_s: float) -> None:
        """Serves the edges until the condition holds. Raises TimeoutError if it does not hold in time."""
        end_s = time.perf_counter() + within_s
        while not until():
            now_s = time.perf_counter()
            if now_s > end_s:
                joined = f"{len(self.joined_at_s)} of {len(self._edges)} edges have a session"
                raise TimeoutError(f"{joined}; {self.refused} were asked to come later, {self.lost} sessions were lost")
            while self._timers and self._timers[0][0] <= now_s:
                _, _, act, edge, sock = heapq.heappop(self._timers)
                if edge.sock is sock:
                    act(edge)
            wait_s = min(self._timers[0][0] - time.perf_counter() if self._timers else 0.05, 0.05)
            for fd, events in self._poll.poll(max(wait_s, 0), 4096):
                edge = self._of_fd[fd]
                try:
                    if events & select.EPOLLOUT:
                        self._flush(edge)
                    if events & ~select.EPOLLOUT:
                        self._on_readable(edge)
                except OSError:
                    self._drop(edge, None)

    def rest(self, seconds: float) -> None:
        """Serves the edges for this time."""
        end_s = time.perf_counter() + seconds
        self.run(lambda: time.perf_counter() >= end_s, seconds + 1)

    def ship(self, number: int, frame: pb.Frame) -> None:
        """Sends a frame, under the edge's next number."""
        edge = self._edges[number]
        frame.seq = edge.next_seq
        edge.next_seq += 1
        edge.unacked[frame.seq] = frame, time.perf_counter()
        self.unacked += 1
        if edge.joined:
            self._send_frame(edge, frame)

    def ship_at(self, at_s: float, number: int, make: Callable[[], pb.Frame]) -> None:
        """Ships a frame at a time of `time.perf_counter`, whatever happens to the connection until then."""
        self._order += 1
        heapq.heappush(self._timers, (at_s, self._order, lambda _: self.ship(number, make()), _Edge(number), None))

    def _after(self, seconds: float, act: Callable[[_Edge], None], edge: _Edge) -> None:
        """Calls `act` after a time, unless the edge has another connection by then."""
        self._order += 1
        heapq.heappush(self._timers, (time.perf_counter() + seconds, self._order, act, edge, edge.sock))

    def _retry(self, edge: _Edge, asked_s: float | None = None) -> None:
        longest_s = min(RECONNECT_FIRST_S * 2.0**edge.attempts, _LIMITS.reconnect_max_s)
        low_s, high_s = (0.0, longest_s) if asked_s is None else (asked_s, 1.1 * asked_s)
        edge.attempts += 1
        self._after(float(self._random.uniform(low_s, high_s)), self._connect, edge)

    def _connect(self, edge: _Edge) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect_ex(self._address)
        name = f"e{edge.number}"
        oldest = min(edge.unacked, default=edge.next_seq)
        hello = pb.Hello(
            protocol_min=1, protocol_max=1, edge=name, incarnation=name, streams=[self._stream], oldest_seq=oldest,
            next_seq=edge.next_seq, sent_at_ms=now_ms(),
        )  # fmt: skip
        edge.sock, edge.every_s, edge.heard_s = sock, _LIMITS.heartbeat_s, time.perf_counter()
        edge.joined, edge.writes = False, True
        edge.window = edge.stream_window = edge.initial_window = _DEFAULT_WINDOW
        edge.received, edge.messages, edge.waiting = bytearray(), bytearray(), []
        edge.unsent = bytearray(_PREFACE + _message(pb.FromEdge(hello=hello)))
        self._of_fd[sock.fileno()] = edge
        self._poll.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        self._after(edge.patience_s, self._check_silence, edge)

    def _check_silence(self, edge: _Edge) -> None:
        left_s = edge.heard_s + max(edge.patience_s, 3 * edge.every_s) - time.perf_counter()
        if left_s <= 0:
            edge.patience_s = min(2 * edge.patience_s, MAX_SILENCE_S)
            self._drop(edge, None)
        else:
            self._after(left_s, self._check_silence, edge)

    def _drop(self, edge: _Edge, asked_s: float | None) -> None:
        if edge.sock is None:
            return
        if asked_s is not None:
            self.refused += 1
        else:
            self.lost += 1
        del self._of_fd[edge.sock.fileno()]
        edge.sock.close()
        edge.sock, edge.joined = None, False
        self.joined_at_s.pop(edge.number, None)
        self._retry(edge, asked_s)

    def _send(self, edge: _Edge, data: bytes) -> None:
        """Sends bytes that flow control does not count, or has already counted."""
        waits = bool(edge.unsent)
        edge.unsent += data
        if not waits:
            self._flush(edge)

    def _flush(self, edge: _Edge) -> None:
        if edge.sock is None:
            return
        try:
            sent = edge.sock.send(edge.unsent) if edge.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(edge, None)
            return
        del edge.unsent[:sent]
        if bool(edge.unsent) != edge.writes:
            edge.writes = bool(edge.unsent)
            self._poll.modify(edge.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if edge.writes else 0))

    def _send_message(self, edge: _Edge, data: bytes) -> None:
        """Sends DATA, or stores it until the gateway has room for it."""
        size = len(data) - _HEADER.size
        if edge.waiting or min(edge.window, edge.stream_window) < size:
            edge.waiting.append(data)
            return
        edge.window -= size
        edge.stream_window -= size
        self._send(edge, data)

    def _send_frame(self, edge: _Edge, frame: pb.Frame) -> None:
        self._send_message(edge, _message(pb.FromEdge(frame=frame)))

    def _on_room(self, edge: _Edge) -> None:
        waiting, edge.waiting = edge.waiting, []
        for data in waiting:
            self._send_message(edge, data)

    def _beat(self, edge: _Edge) -> None:
        at_ms = now_ms()
        progress = pb.StreamProgress(stream=self._stream.name, watermark_ms=at_ms, records=edge.next_seq)
        beat = pb.Heartbeat(streams=[progress], bandwidth_bytes_s=1e6, rtt_ms=1, sent_at_ms=at_ms)
        self.heartbeats += 1
        self._send_message(edge, _message(pb.FromEdge(heartbeat=beat)))
        self._after(edge.every_s, self._beat, edge)

    def _on_readable(self, edge: _Edge) -> None:
        if edge.sock is None:
            return
        try:
            data = edge.sock.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._drop(edge, None)
            return
        edge.heard_s = time.perf_counter()
        edge.received += data
        at, received = 0, edge.received
        while len(received) - at >= _HEADER.size:
            high, low, kind, flags, stream = _HEADER.unpack_from(received, at)
            end = at + _HEADER.size + (high << 8) + low
            if len(received) < end:
                break
            self._on_frame(edge, kind, flags, stream, bytes(received[at + _HEADER.size : end]))
            if edge.sock is None:
                return
            at = end
        del received[:at]

    def _on_frame(self, edge: _Edge, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._on_data(edge, payload)
        elif kind == _PING and not flags & _ACK:
            self._send(edge, _frame(_PING, _ACK, 0, payload))
        elif kind == _SETTINGS and not flags & _ACK:
            for key, number in struct.iter_unpack(">HI", payload):
                if key == _INITIAL_WINDOW:
                    edge.stream_window += number - edge.initial_window
                    edge.initial_window = number
            self._send(edge, _frame(_SETTINGS, _ACK, 0, b""))
            self._on_room(edge)
        elif kind == _WINDOW_UPDATE:
            added = int.from_bytes(payload, "big")
            if stream:
                edge.stream_window += added
            else:
                edge.window += added
            self._on_room(edge)
        elif kind in (_RST_STREAM, _GOAWAY):
            self._drop(edge, None)
        elif (retry := _RETRY.search(payload)) is not None:
            self._drop(edge, int(retry[1]) / 1000)

    def _on_data(self, edge: _Edge, payload: bytes) -> None:
        messages = edge.messages
        messages += payload
        at = 0
        while len(messages) - at >= 5:
            end = at + 5 + int.from_bytes(messages[at + 1 : at + 5], "big")
            if len(messages) < end:
                break
            self._on_message(edge, bytes(messages[at + 5 : end]))
            at = end
        del messages[:at]

    def _on_message(self, edge: _Edge, body: bytes) -> None:
        message = pb.ToEdge.FromString(body)
        kind = message.WhichOneof("message")
        if kind == "time_echo":
            self.echo_ms.append(now_ms() - message.time_echo.edge_sent_at_ms)
            edge.every_s = max(_LIMITS.heartbeat_s, message.time_echo.heartbeat_ms / 1000)
        elif kind == "ack":
            now_s = time.perf_counter()
            for seq in [s for s in edge.unacked if s <= message.ack.through]:
                self.acked_ms.append((now_s - edge.unacked.pop(seq)[1]) * 1000)
                self.unacked -= 1
        elif kind == "queries":
            self._on_queries(edge, body, message.queries)

    def _on_queries(self, edge: _Edge, body: bytes, queries: pb.Queries) -> None:
        """Completes a session: the edge accepts every query, sends unacknowledged frames, and heartbeats."""
        if body not in self._statuses:
            self.refs = {q.name: QueryRef(q.name, q.version) for q in queries.queries}
            self._statuses.clear()
            self._statuses[body] = b"".join(
                _message(pb.FromEdge(query_status=pb.QueryStatus(query=q.name, query_version=q.version, accepted=True)))
                for q in queries.queries
            )
        first, edge.joined, edge.attempts = not edge.joined, True, 0
        self.joined_at_s.setdefault(edge.number, time.perf_counter())
        statuses = self._statuses[body]
        edge.window -= len(statuses)
        edge.stream_window -= len(statuses)
        self._send(edge, statuses)
        if first:
            for frame, _ in list(edge.unacked.values()):
                self._send_frame(edge, frame)
            self._beat(edge)
