"""A center with one edge, receivers of notices and of series, and a Kafka broker for the tests of sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.brokers import KafkaBroker
from tests.center.api.conftest import Desk
from tests.center.sinks.alert_receivers import Receiver, SeriesReceiver


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.connect("jfk")
    return made


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().serving() as made:
        yield made


@pytest.fixture
def new_series() -> Iterator[Callable[[], SeriesReceiver]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(SeriesReceiver().serving())


@pytest.fixture
def series(new_series: Callable[[], SeriesReceiver]) -> SeriesReceiver:
    return new_series()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as made:
        yield made
