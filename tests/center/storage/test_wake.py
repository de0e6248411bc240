"""Gateways wake the drivers of their machine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from center.storage.wake import BEAT_S, BUSY_POLL_S, POLL_S, UNANNOUNCED_S, PollPace, Waker, WakeSocket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses /proc")


@pytest.fixture
def long_directory(tmp_path: Path) -> Path:
    """One whose path is longer than a socket's may be."""
    return tmp_path / ("d" * 100) / ("e" * 100)


@pytest.fixture
def driver(long_directory: Path) -> Iterator[WakeSocket]:
    with closing(WakeSocket(long_directory)) as driver:
        yield driver


def test_a_driver_learns_of_frames_and_of_beats(driver: WakeSocket, long_directory: Path) -> None:
    waker = Waker(long_directory)
    waker.beat()
    waker.wake()
    assert [driver.wait(), driver.wait()] == [False, True]


def test_all_drivers_are_woken_and_one_that_has_died_is_forgotten_by_the_next(
    driver: WakeSocket, long_directory: Path
) -> None:
    dead = WakeSocket(long_directory)
    dead._socket.close()  # its process is killed: the file stays
    Waker(long_directory).wake()
    with closing(WakeSocket(long_directory)) as other:
        assert len(list(long_directory.iterdir())) == 2
        Waker(long_directory).wake()
        assert driver.wait() and driver.wait() and other.wait()


def test_a_driver_listens_though_its_directory_has_entries_that_it_cannot_sweep(long_directory: Path) -> None:
    long_directory.mkdir(parents=True)
    (long_directory / "swept-meanwhile.wake").symlink_to("nowhere")  # as of another driver that begins now
    (long_directory / "directory.wake").mkdir()
    with closing(WakeSocket(long_directory)) as driver:
        Waker(long_directory).wake()
        assert driver.wait()


def test_a_waker_never_waits_and_needs_no_driver(driver: WakeSocket, long_directory: Path, tmp_path: Path) -> None:
    Waker(tmp_path / "nowhere").wake()
    waker = Waker(long_directory)
    for _ in range(10_000):  # more than its socket takes
        waker.wake()
    assert driver.wait()


def test_a_closed_driver_ends_its_wait(long_directory: Path) -> None:
    driver, ended = WakeSocket(long_directory), list[bool | None]()
    thread = threading.Thread(target=lambda: ended.append(driver.wait()))
    thread.start()
    driver.close()
    thread.join(60)
    assert ended == [None] and list(long_directory.iterdir()) == []


def test_a_driver_polls_seldom_only_while_gateways_announce_all_frames() -> None:
    pace = PollPace()
    assert pace.interval_s(0.0) == BUSY_POLL_S, "no gateway is known"
    at_s = 100.0
    for _ in range(20):
        at_s += BEAT_S
        pace.heard(at_s, has_frames=False)
        pace.found(at_s)  # a little before its announcement
        pace.heard(at_s + 0.01, has_frames=True)
        assert pace.interval_s(at_s + 0.9) == POLL_S
    pace.found(at_s + 3.0)
    pace.heard(at_s + 3.9, has_frames=False)
    assert pace.interval_s(at_s + 4.0) == BUSY_POLL_S, "of a gateway elsewhere"
    pace.heard(at_s + 4.0 + UNANNOUNCED_S, has_frames=False)
    assert pace.interval_s(at_s + 4.0 + UNANNOUNCED_S) == POLL_S
    assert pace.interval_s(at_s + 10.0 + UNANNOUNCED_S) == BUSY_POLL_S, "the gateways are silent"
