"""Processes of a center wake each other: by datagrams, or by notifications of PostgreSQL."""

from __future__ import annotations

import queue
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from center.catalog import Catalog
from center.storage.wake import (
    BEAT_S,
    BUSY_POLL_S,
    IDLE_POLLS,
    POLL_S,
    UNANNOUNCED_S,
    Channel,
    PollPace,
    PostgresChannel,
    SocketChannel,
    Topic,
    Waker,
    channel_of,
    is_pooled,
)
from edgewater.runtime.tasks import Tasks
from tests.center.catalog_world import spec
from tests.center.postgres import PostgresServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses /proc")
WAIT_S = 60.0


class Heard:
    """What a listener has heard."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.on_wake = self._heard.put

    def next(self) -> bool:
        return self._heard.get(timeout=WAIT_S)

    def until_news(self, send: Callable[[], None]) -> None:
        """Repeats `send` until news have been heard."""
        for _ in range(round(WAIT_S / BEAT_S)):
            send()
            try:
                if self._heard.get(timeout=BEAT_S):
                    return
            except queue.Empty:
                continue
        raise AssertionError("no news")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """One whose path is longer than a socket's may be."""
    return tmp_path / ("d" * 100) / ("e" * 100)


@pytest.fixture(params=["datagrams", pytest.param("notifications", marks=pytest.mark.slow)])
def channel(request: pytest.FixtureRequest, directory: Path) -> Iterator[Channel]:
    if request.param == "datagrams":
        yield channel_of(f"sqlite:///{directory}/catalog.db")
        return
    postgres: PostgresServer = request.getfixturevalue("postgres")
    yield channel_of(postgres.new_database())


def test_listeners_of_a_topic_hear_news_and_beats(channel: Channel) -> None:
    first, second, other = Heard(), Heard(), Heard()
    frames = Waker(channel, Topic.FRAMES)
    with (
        channel.listen(Topic.FRAMES, first.on_wake, Tasks()),
        channel.listen(Topic.FRAMES, second.on_wake, Tasks()),
        channel.listen(Topic.ANSWERS, other.on_wake, Tasks()),
    ):
        first.until_news(frames.wake)
        second.until_news(frames.wake)
        Waker(channel, Topic.FRAMES).beat()
        while first.next():  # a wake of before
            Waker(channel, Topic.FRAMES).beat()
        other.until_news(Waker(channel, Topic.ANSWERS).wake)


def test_a_listener_whose_directory_is_deleted_hears_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("center.storage.wake.SILENT_S", 0.05)
    channel, heard = SocketChannel(directory), Heard()
    monkeypatch.setattr(sys.modules[__name__], "BEAT_S", 0.05)
    with channel.listen(Topic.FRAMES, heard.on_wake, Tasks()):
        heard.until_news(Waker(channel, Topic.FRAMES).wake)
        shutil.rmtree(directory)
        heard.until_news(Waker(channel, Topic.FRAMES).wake)
    assert list(directory.iterdir()) == []


def test_a_listener_that_cannot_have_a_socket_at_first_gets_one_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("center.storage.wake.SILENT_S", 0.05)
    monkeypatch.setattr(sys.modules[__name__], "BEAT_S", 0.05)
    directory.parent.mkdir(parents=True)
    directory.write_text("not a directory")
    channel, heard, tasks = SocketChannel(directory), Heard(), Tasks()
    with channel.listen(Topic.FRAMES, heard.on_wake, tasks):
        directory.unlink()
        heard.until_news(Waker(channel, Topic.FRAMES).wake)
    assert not tasks.missing()


@pytest.mark.parametrize("url", ["sqlite:///{}/catalog.db", "postgresql://nowhere.invalid/catalog"])
def test_a_thread_of_wakes_that_fails_ends_its_process(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = queue.SimpleQueue[bool]()
    tasks = Tasks(lambda: ends.put(True))
    for of in ("_keep_sending", "_keep_listening"):
        monkeypatch.setattr(f"center.storage.wake.PostgresChannel.{of}", lambda *_: 1 / 0)
    channel = channel_of(url.format(directory))
    with channel.listen(Topic.FRAMES, lambda _: 1 / 0, tasks):
        channel.send(Topic.FRAMES, b"+")
        assert ends.get(timeout=WAIT_S)
    assert {line.split()[1] for line in tasks.missing()} <= {"notify", "wakes-frames"}


@pytest.mark.slow
def test_centers_in_two_schemas_of_a_database_wake_only_themselves(postgres: PostgresServer) -> None:
    one, other = channel_of(postgres.new_database()), channel_of(postgres.new_database())
    of_one, of_other = Heard(), Heard()
    with one.listen(Topic.FRAMES, of_one.on_wake, Tasks()), other.listen(Topic.FRAMES, of_other.on_wake, Tasks()):
        of_other.until_news(Waker(other, Topic.FRAMES).wake)
        Waker(other, Topic.FRAMES).beat()
        while of_other.next():  # a wake of before
            pass
        of_one.until_news(Waker(one, Topic.FRAMES).wake)
        Waker(other, Topic.FRAMES).beat()
        assert not of_other.next(), "news of one"


def test_a_listener_sweeps_sockets_of_the_dead_and_minds_no_other_entries(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "swept-meanwhile.frames.wake").symlink_to("nowhere")  # as of another process that begins now
    (directory / "directory.frames.wake").mkdir()
    channel, heard = SocketChannel(directory), Heard()
    with channel.listen(Topic.FRAMES, heard.on_wake, Tasks()):
        heard.until_news(Waker(channel, Topic.FRAMES).wake)


def test_a_waker_never_waits_and_needs_no_listener(directory: Path) -> None:
    channel, heard = SocketChannel(directory), Heard()
    waker = Waker(channel, Topic.FRAMES)
    waker.wake()
    with channel.listen(Topic.FRAMES, heard.on_wake, Tasks()):
        for _ in range(10_000):  # more than its socket takes
            waker.wake()
        assert heard.next()
    Waker(None, Topic.FRAMES).wake()


def test_a_catalog_says_when_its_version_has_increased(tmp_path: Path) -> None:
    changes: list[int] = []
    catalog = Catalog(f"sqlite:///{tmp_path}/catalog.db", changed=lambda: changes.append(catalog.version()))
    catalog.queries.register(spec(), 1)
    catalog.queries.all()
    assert changes == [catalog.version()]
    catalog.close()


@pytest.mark.slow
def test_a_pooler_of_transactions_is_recognised_so_that_nobody_listens_behind_it(
    postgres: PostgresServer, pgbouncer: str
) -> None:
    def recognised(url: str) -> bool:
        channel = channel_of(url)
        assert isinstance(channel, PostgresChannel)
        with channel.connected() as connection:
            return is_pooled(connection, channel.connected)

    assert not recognised(postgres.new_database())
    with postgres.pooled(pgbouncer) as url:
        assert recognised(url)


def test_a_process_polls_seldom_only_while_all_news_are_announced() -> None:
    pace = PollPace()
    assert pace.interval_s(0.0) == IDLE_POLLS * BUSY_POLL_S, "no sender is known, and there are no news"
    pace.found(0.0)
    assert pace.interval_s(0.1) == BUSY_POLL_S
    at_s = 100.0
    for _ in range(20):
        at_s += BEAT_S
        pace.heard(at_s, has_news=False)
        pace.found(at_s)  # a little before its announcement
        pace.heard(at_s + 0.01, has_news=True)
        assert pace.interval_s(at_s + 0.9) == POLL_S
    pace.found(at_s + 3.0)
    pace.heard(at_s + 3.9, has_news=False)
    assert pace.interval_s(at_s + 4.0) == BUSY_POLL_S, "of a gateway elsewhere"
    pace.heard(at_s + 4.0 + UNANNOUNCED_S, has_news=False)
    assert pace.interval_s(at_s + 4.0 + UNANNOUNCED_S) == POLL_S
    assert pace.interval_s(at_s + 10.0 + UNANNOUNCED_S) == IDLE_POLLS * BUSY_POLL_S, "the senders are silent"


def test_news_that_were_announced_while_the_process_was_busy_are_announced() -> None:
    pace = PollPace()
    pace.found(10.0)
    pace.heard(10.01, has_news=True)
    pace.heard(13.0, has_news=True)  # of further news
    assert pace.interval_s(13.1) == POLL_S
