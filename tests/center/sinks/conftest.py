"""A Kafka broker for the tests of sinks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sim.demo.brokers import KafkaBroker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as made:
        yield made
