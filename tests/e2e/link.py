"""A link between edges and center that a test can cut, or silence in one direction: a TCP proxy on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Link:
    """Forwards connections to a port until it is cut; while cut, bytes go nowhere and nothing is refused,
    as behind a dead router. Healing it ends the connections that hung."""

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._open, self._answering = threading.Event(), threading.Event()
        self._open.set()
        self._answering.set()
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._run(self._accept)

    def _run(self, target: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def cut(self) -> None:
        self._open.clear()

    def hold_replies(self) -> None:
        """What the edges send arrives, replies do not: healed, the edges send what was not acknowledged again."""
        self._answering.clear()

    def heal(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.set()
        self._answering.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.heal()
        for thread in self._threads:
            thread.join(10)
        for end in [self._listener, *self._connections]:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._run(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        self._connections.append(near)
        self._open.wait()
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.shutdown(socket.SHUT_RDWR)
            return
        self._connections.append(far)
        self._run(self._forward, near, far)
        self._run(self._reply, far, near)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        self._copy(source, sink, self._open)

    def _reply(self, source: socket.socket, sink: socket.socket) -> None:
        self._copy(source, sink, self._open, self._answering)

    def _copy(self, source: socket.socket, sink: socket.socket, *gates: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for gate in gates:
                    gate.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
