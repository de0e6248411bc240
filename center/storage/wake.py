"""Wakes the drivers of this machine when frames are indexed: one datagram to each driver's socket in a directory.

A wake is a hint. A driver that is not woken finds the frames when it polls the index.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import time
from pathlib import Path

POLL_S, BUSY_POLL_S = 1.0, 0.02
"""Intervals of polling the frame index, if all gateways wake the driver, and if not: half of it is added to the age of
answers."""
BEAT_S = 1.0
ANNOUNCED_S = 0.5
"""An announcement comes within this time of the frames."""
UNANNOUNCED_S = 60.0
"""After frames that nobody announced, further such frames are expected for this long."""
_SUFFIX = ".wake"
_FRAMES = b"+"


def _short(directory: int, name: str) -> str:
    """Returns a path of few bytes: a socket's path has at most 107 bytes, and a data directory may have more."""
    return f"/proc/self/fd/{directory}/{name}"


def _sweep(path: Path, address: str) -> None:
    """Deletes a socket whose driver has died. Raises OSError if that cannot be known, or be done."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            path.unlink()


class Waker:
    """Wakes all drivers that listen in a directory. Any thread may call it."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._next_beat_s = directory, 0.0

    def wake(self) -> None:
        """Says that frames were indexed. Never raises, and never waits: a driver whose socket is full is awake."""
        self._send(_FRAMES)

    def beat(self) -> None:
        """Says that this process works and wakes drivers, at most once in `BEAT_S`. As `wake`."""
        if time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + BEAT_S
            self._send(b"")

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            names = [entry.name for entry in os.scandir(self._directory) if entry.name.endswith(_SUFFIX)]
            if not names:
                return
            opened = os.open(self._directory, os.O_PATH)
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as waking:
                    for name in names:
                        with contextlib.suppress(OSError):
                            waking.sendto(data, _short(opened, name))
            finally:
                os.close(opened)


class PollPace:
    """How often a driver polls the frame index: seldom while gateways announce all frames. Pure.

    Frames that nobody announced come from gateways of other machines, which cannot wake this driver.
    """

    def __init__(self) -> None:
        self._heard_s = self._announced_s = self._unannounced_s = -math.inf
        self._found_s: float | None = None

    def heard(self, now_s: float, *, has_frames: bool) -> None:
        """A gateway of this machine has sent a datagram."""
        self._heard_s = now_s
        if has_frames:
            self._announced_s = now_s

    def found(self, now_s: float) -> None:
        """The index had new frames. Their announcement may come a little later."""
        self._found_s = now_s if self._found_s is None else self._found_s

    def interval_s(self, now_s: float) -> float:
        if self._found_s is not None and now_s - self._found_s >= ANNOUNCED_S:
            if abs(self._announced_s - self._found_s) > 2 * ANNOUNCED_S:
                self._unannounced_s = self._found_s
            self._found_s = None
        is_woken = now_s - self._heard_s < 5 * BEAT_S and now_s - self._unannounced_s > UNANNOUNCED_S
        return POLL_S if is_woken else BUSY_POLL_S


class WakeSocket:
    """The socket of a driver. `wait` is called by one thread.

    Raises:
        OSError: the machine has no such sockets.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = directory / f"{secrets.token_hex(8)}{_SUFFIX}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        opened = os.open(directory, os.O_PATH)
        try:
            for path in directory.glob(f"*{_SUFFIX}"):
                with contextlib.suppress(OSError):  # another driver may sweep, too
                    _sweep(path, _short(opened, path.name))
            self._socket.bind(_short(opened, self._path.name))
        except BaseException:
            self._socket.close()
            raise
        finally:
            os.close(opened)

    def wait(self) -> bool | None:
        """Waits for a gateway of this machine. True: it has indexed frames. False: it beats. None: after `close`."""
        try:
            data = self._socket.recv(1)
        except OSError:
            return None
        return data == _FRAMES if self._path.exists() else None

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        self._socket.close()
