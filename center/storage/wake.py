"""The processes of a center wake each other: drivers when frames are indexed, gateways when the catalog changes, APIs
when there are answers.

If the catalog is a file, all processes are on one machine. Each listener has a socket in a directory, and gets
datagrams. If the catalog is in PostgreSQL, a wake is a notification (NOTIFY). It has a connection of its own, because
PostgreSQL serialises all commits that notify. Behind a pooler of transactions no notification comes.

A wake is a hint. A process that is not woken finds the same when it polls.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy.exc import SQLAlchemyError

from center.storage.database import open_engine
from edgewater.model.errors import InvalidConfig, StorageError

POLL_S, BUSY_POLL_S = 1.0, 0.02
"""Intervals of polling, if all senders wake this process, and if not: half of it is added to the age of answers."""
BEAT_S = 1.0
SILENT_S = 5 * BEAT_S
"""If no sender has beaten for this long, none wakes this process."""
ANNOUNCED_S = 0.5
"""An announcement comes within this time of the news."""
UNANNOUNCED_S = 60.0
"""After news that nobody announced, further such news are expected for this long."""
NOTIFY_EVERY_S = 0.02
"""The least time between two notifications of one process."""
_SUFFIX = ".wake"
_NEWS = b"+"

log = logging.getLogger(__name__)


class Topic(StrEnum):
    """What a wake is about."""

    FRAMES = "frames"
    CATALOG = "catalog"
    ANSWERS = "answers"


Heard = Callable[[bool], object]
"""Called by a thread. True: there are news. False: a process that wakes this one works, and has no news."""


class Channel(Protocol):
    """The way in which wakes travel. Any thread may use it."""

    def send(self, topic: Topic, data: bytes) -> None:
        """Wakes all listeners of a topic. Never raises, and never waits."""

    def listen(self, topic: Topic, heard: Heard) -> contextlib.AbstractContextManager[None]:
        """Calls `heard` for each wake while the context is open."""


def channel_of(catalog_url: str, directory: Path) -> Channel:
    """Returns the channel of a center. Raises InvalidConfig or StorageError for a URL that cannot be used."""
    return SocketChannel(directory) if catalog_url.startswith("sqlite") else PostgresChannel(catalog_url)


class Waker:
    """Wakes the listeners of a topic. Any thread may call it. Without a channel, it does nothing."""

    def __init__(self, channel: Channel | None, topic: Topic) -> None:
        self._channel, self._topic, self._next_beat_s = channel, topic, 0.0

    def wake(self) -> None:
        """Says that there are news, after their commit."""
        if self._channel is not None:
            self._channel.send(self._topic, _NEWS)

    def beat(self) -> None:
        """Says that this process announces its news, at most once in `BEAT_S`."""
        if self._channel is not None and time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + BEAT_S
            self._channel.send(self._topic, b"")


class PollPace:
    """How often a process polls: seldom while senders announce all news. Pure.

    News that nobody announced come from processes that cannot wake this one.

    Args:
        busy_s: the interval if not all news are announced.
    """

    def __init__(self, busy_s: float = BUSY_POLL_S) -> None:
        self._busy_s = busy_s
        self._heard_s = self._announced_s = self._unannounced_s = -math.inf
        self._found_s: float | None = None

    def heard(self, now_s: float, *, has_news: bool) -> None:
        """A process has woken this one."""
        self._heard_s = now_s
        if has_news:
            self._announced_s = now_s

    def found(self, now_s: float) -> None:
        """A poll has found news. Their announcement may come a little later."""
        self._found_s = now_s if self._found_s is None else self._found_s

    def interval_s(self, now_s: float) -> float:
        if self._found_s is not None and now_s - self._found_s >= ANNOUNCED_S:
            if abs(self._announced_s - self._found_s) > 2 * ANNOUNCED_S:
                self._unannounced_s = self._found_s
            self._found_s = None
        is_woken = now_s - self._heard_s < SILENT_S and now_s - self._unannounced_s > UNANNOUNCED_S
        return POLL_S if is_woken else self._busy_s


def _short(directory: int, name: str) -> str:
    """Returns a path of few bytes: a socket's path has at most 107 bytes, and a data directory may have more."""
    return f"/proc/self/fd/{directory}/{name}"


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    opened = os.open(directory, os.O_PATH)
    try:
        yield opened
    finally:
        os.close(opened)


class SocketChannel:
    """Datagrams to sockets in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def send(self, topic: Topic, data: bytes) -> None:
        """As `Channel.send`: a listener whose socket is full is awake."""
        with contextlib.suppress(OSError):
            of_topic = f".{topic}{_SUFFIX}"
            names = [entry.name for entry in os.scandir(self._directory) if entry.name.endswith(of_topic)]
            if not names:
                return
            sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            with _opened(self._directory) as opened, sending:
                for name in names:
                    with contextlib.suppress(OSError):
                        sending.sendto(data, _short(opened, name))

    @contextlib.contextmanager
    def listen(self, topic: Topic, heard: Heard) -> Iterator[None]:
        """As `Channel.listen`. A machine without such sockets has no wakes."""
        try:
            listener = _SocketListener(self._directory, topic, heard)  # bound before the first poll
        except OSError as exc:
            log.warning("nobody can wake this process, which polls: %s", exc)
            yield
            return
        listener.start()
        try:
            yield
        finally:
            listener.close()


class _SocketListener(threading.Thread):
    """Raises OSError if the machine has no such sockets."""

    def __init__(self, directory: Path, topic: Topic, heard: Heard) -> None:
        super().__init__(name=f"wakes-{topic}", daemon=True)
        self._path = directory / f"{secrets.token_hex(8)}.{topic}{_SUFFIX}"
        self._heard, self._closing = heard, False
        self._socket = self._bound()

    def run(self) -> None:
        while not self._closing:
            data = None
            with contextlib.suppress(BlockingIOError):
                data = self._socket.recv(1)
            if data is not None:
                self._heard(data == _NEWS)
            if not self._closing and data != _NEWS and not self._path.exists():  # the directory was deleted
                with contextlib.suppress(OSError):
                    self._socket, deleted = self._bound(), self._socket
                    deleted.close()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        self.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _bound(self) -> socket.socket:
        """Returns a socket whose reads time out, so that a deleted directory is noticed."""
        directory = self._path.parent
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # Unlike a timeout of Python's, this ends at a `shutdown`.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *_timeval(SILENT_S)))
            with _opened(directory) as opened:
                for other in directory.glob(f"*{_SUFFIX}"):
                    with contextlib.suppress(OSError):  # another process may sweep, too
                        _sweep(other, _short(opened, other.name))
                bound.bind(_short(opened, self._path.name))
        except BaseException:
            bound.close()
            raise
        return bound


def _timeval(seconds: float) -> tuple[int, int]:
    return int(seconds), round(seconds % 1 * 1e6)


def _sweep(path: Path, address: str) -> None:
    """Deletes a socket whose process has died. Raises OSError if that cannot be known, or be done."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            path.unlink()


class PostgresChannel:
    """Notifications of PostgreSQL. Senders and listeners have connections of their own.

    Args:
        url: the catalog's.
    """

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        self._pending: dict[Topic, bytes] = {}
        self._due = threading.Condition()
        self._sender: threading.Thread | None = None

    def send(self, topic: Topic, data: bytes) -> None:
        with self._due:
            self._pending[topic] = max(data, self._pending.get(topic, b""))
            if self._sender is None:
                self._sender = threading.Thread(target=self._keep_sending, name="notify", daemon=True)
                self._sender.start()
            self._due.notify()

    def _keep_sending(self) -> None:
        while True:
            with contextlib.suppress(*self._errors), self._connected() as connection:
                while True:
                    with self._due:
                        self._due.wait_for(lambda: self._pending)
                        pending, self._pending = self._pending, {}
                    for topic, data in pending.items():
                        connection.execute("SELECT pg_notify(%s, %s)", (_name(topic), data.decode()))
                    time.sleep(NOTIFY_EVERY_S)
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def listen(self, topic: Topic, heard: Heard) -> Iterator[None]:
        closing = threading.Event()
        threading.Thread(target=self._keep_listening, args=(topic, heard, closing), daemon=True).start()
        try:
            yield
        finally:
            closing.set()  # the thread ends within `POLL_S`

    def _keep_listening(self, topic: Topic, heard: Heard, closing: threading.Event) -> None:
        while not closing.is_set():
            with contextlib.suppress(*self._errors), self._connected() as connection:
                connection.execute(f"LISTEN {_name(topic)}")
                while not closing.is_set():
                    for notification in connection.notifies(timeout=POLL_S, stop_after=1):
                        heard(notification.payload.encode() == _NEWS)
            closing.wait(POLL_S)

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error, OSError, StorageError, InvalidConfig

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        """Yields a connection of the driver that commits each statement."""
        pooled = self._engine.raw_connection()
        try:
            connection: Any = pooled.driver_connection
            connection.autocommit = True
            yield connection
        finally:
            pooled.invalidate()


def _name(topic: Topic) -> str:
    return f"edgewater_{topic}"
