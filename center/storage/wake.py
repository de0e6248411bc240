"""The processes of a center wake each other: drivers when frames are indexed, gateways when the catalog changes, APIs
when there are answers.

If the catalog is a file, all processes are on one machine. Each listener has a socket in a directory beside the
catalog, and gets datagrams. If the catalog is in PostgreSQL, a wake is a notification (NOTIFY). It has a connection of
its own, because PostgreSQL serialises all commits that notify. Behind a pooler of transactions a process does not
listen: its LISTEN would stay on a connection that other clients use.

A wake is a hint. A process that is not woken finds the same when it polls. So no failure of a socket or a connection
is an error, and all of them are tried again.
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

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from center.storage.database import open_engine
from edgewater.base.errors import InvalidConfig, StorageError
from edgewater.runtime.tasks import Tasks

POLL_S, BUSY_POLL_S = 1.0, 0.02  # limit: reads at rest
"""Intervals of polling, if all senders wake this process, and if not: half of it is added to the age of answers."""
IDLE_SHARE, IDLE_POLLS = 1 / 50, 10  # limit: reads at rest
"""The second interval grows to this share of the time since the last news, and to at most so many times its length."""
BEAT_S = 1.0  # limit: notifications at rest
SILENT_S = 5 * BEAT_S
"""If no sender has beaten for this long, none wakes this process."""
ANNOUNCED_S = 0.5  # limit: how late an announcement may come
"""An announcement comes within this time of the news."""
POOLED_S = 60.0  # limit: how long a wrong guess about a pooler holds
"""A process behind a pooler looks again after this time whether it still is."""
UNANNOUNCED_S = 60.0  # limit: how long a wrong guess about senders holds
"""After news that nobody announced, further such news are expected for this long."""
NOTIFY_EVERY_S = 0.02  # limit: notifications of one process
"""The least time between two notifications of one process."""
_SUFFIX = ".wake"
_NEWS = b"+"
_NAME = "'edgewater_' || %s || '_' || md5(current_schema())"
"""SQL of the name of a topic's channel. Channels are of a database, in which each schema may have a center."""

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

    def listen(self, topic: Topic, heard: Heard, tasks: Tasks) -> contextlib.AbstractContextManager[None]:
        """Calls `heard` for each wake while the context is open.

        Args:
            tasks: the tasks of the process, which has the threads.
        """


def channel_of(catalog_url: str) -> Channel:
    """Returns the channel of a center. Raises InvalidConfig or StorageError for a URL that cannot be used."""
    engine = open_engine(catalog_url)
    if engine.dialect.name == "sqlite":
        return SocketChannel(Path(f"{engine.url.database}-wake").resolve())
    return PostgresChannel(engine)


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
        self._heard_s = self._announced_s = self._unannounced_s = self._newest_s = -math.inf
        self._found_s: float | None = None

    def heard(self, now_s: float, *, has_news: bool) -> None:
        """A process has woken this one."""
        self._heard_s = now_s
        if has_news:
            self._announced_s = now_s

    def found(self, now_s: float) -> None:
        """A poll has found news. Their announcement may come a little later."""
        self._newest_s = now_s
        self._found_s = now_s if self._found_s is None else self._found_s

    def interval_s(self, now_s: float) -> float:
        if self._found_s is not None and now_s - self._found_s >= ANNOUNCED_S:
            if self._found_s - self._announced_s > 2 * ANNOUNCED_S:  # a busy process may ask much later
                self._unannounced_s = self._found_s
            self._found_s = None
        is_woken = now_s - self._heard_s < SILENT_S and now_s - self._unannounced_s > UNANNOUNCED_S
        idle_s = IDLE_SHARE * (now_s - self._newest_s)
        return POLL_S if is_woken else max(self._busy_s, min(idle_s, IDLE_POLLS * self._busy_s))


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
    def listen(self, topic: Topic, heard: Heard, tasks: Tasks) -> Iterator[None]:
        """As `Channel.listen`. A machine without such sockets has no wakes."""
        listener = _SocketListener(self._directory, topic, heard)
        thread = tasks.thread(f"wakes-{topic}", listener.run)
        try:
            yield
        finally:
            listener.end(thread)


class _SocketListener:
    """Reads a socket. If it has no name, because it cannot have one or the directory was deleted, it tries again."""

    def __init__(self, directory: Path, topic: Topic, heard: Heard) -> None:
        self._path = directory / f"{secrets.token_hex(8)}.{topic}{_SUFFIX}"
        self._heard, self._ended = heard, threading.Event()
        self._socket = self._bound(logging.WARNING)  # before the first poll

    def run(self) -> None:
        while not self._ended.is_set():
            data = None
            with contextlib.suppress(BlockingIOError):
                data = self._socket.recv(1)
            if data is not None:
                self._heard(data == _NEWS)
            if data != _NEWS and not self._ended.is_set() and not os.access(self._path, os.F_OK):
                self._socket.close()
                self._socket = self._bound(logging.DEBUG)

    def end(self, thread: threading.Thread) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        thread.join()
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _bound(self, level: int) -> socket.socket:
        """Returns a socket whose reads time out. If it cannot have its name, logs why."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Unlike a timeout of Python's, this ends at a `shutdown`.
        timeval = struct.pack("ll", *divmod(round(SILENT_S * 1e6), 1_000_000))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _opened(self._path.parent) as opened:
                for other in self._path.parent.glob(f"*{_SUFFIX}"):
                    with contextlib.suppress(OSError):  # another process may sweep, too
                        _sweep(other, _short(opened, other.name))
                made.bind(_short(opened, self._path.name))
        except OSError as exc:
            log.log(level, "nobody can wake this process, which polls and tries again: %s", exc)
        return made


def _sweep(path: Path, address: str) -> None:
    """Deletes a socket whose process has died. Raises OSError if that cannot be known, or be done."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            path.unlink()


class PostgresChannel:
    """Notifications of PostgreSQL, of the centers in one schema. Sender and listener have connections of their own. The
    process sends while it listens.

    Args:
        engine: the catalog's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: dict[Topic, bytes] = {}
        self._due = threading.Condition()

    def send(self, topic: Topic, data: bytes) -> None:
        with self._due:
            self._pending[topic] = max(data, self._pending.get(topic, b""))
            self._due.notify()

    def _keep_sending(self) -> None:
        while True:
            with contextlib.suppress(*self._errors), self.connected() as connection:
                while True:
                    with self._due:
                        self._due.wait_for(lambda: self._pending)
                        pending, self._pending = self._pending, {}
                    for topic, data in pending.items():
                        connection.execute(f"SELECT pg_notify({_NAME}, %s)", (topic, data.decode()))
                    time.sleep(NOTIFY_EVERY_S)
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def listen(self, topic: Topic, heard: Heard, tasks: Tasks) -> Iterator[None]:
        closing = threading.Event()
        tasks.thread("notify", self._keep_sending)
        tasks.thread(f"wakes-{topic}", lambda: self._keep_listening(topic, heard, closing))
        try:
            yield
        finally:
            closing.set()  # the thread ends within `POLL_S`

    def _keep_listening(self, topic: Topic, heard: Heard, closing: threading.Event) -> None:
        while not closing.is_set():
            with contextlib.suppress(*self._errors), self.connected() as connection:
                if is_pooled(connection, self.connected):
                    closing.wait(POOLED_S)
                    continue
                (name,) = connection.execute(f"SELECT {_NAME}", (topic,)).fetchone()
                connection.execute(f"LISTEN {name}")
                while not closing.is_set():
                    for notification in connection.notifies(timeout=POLL_S, stop_after=1):
                        heard(notification.payload.encode() == _NEWS)
            closing.wait(POLL_S)

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error, OSError, StorageError, InvalidConfig

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """Yields a connection of the driver that commits each statement."""
        pooled = self._engine.raw_connection()
        try:
            connection: Any = pooled.driver_connection
            connection.autocommit = True
            yield connection
        finally:
            pooled.invalidate()


def is_pooled(connection: Any, connected: Callable[[], contextlib.AbstractContextManager[Any]]) -> bool:
    """Returns whether a pooler gives each transaction any session.

    A pooler states a number of its own as the session's. If it pools sessions, two connections have two sessions.

    Args:
        connected: opens another connection.
    """
    if _session(connection) == connection.info.backend_pid:
        return False
    with connected() as other:
        return len({_session(each) for each in (connection, other)}) < 2


def _session(connection: Any) -> int:
    (number,) = connection.execute("SELECT pg_backend_pid()").fetchone()
    return int(number)
