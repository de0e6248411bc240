"""One center for all tests of this folder: starting its JVM takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sim.demo.run import Demo

REPLAY_S = 15.0
WAREHOUSE_URL = "warehouse-url"
"""The file of the center's directory that sinks defined by the API may use."""


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    demo = Demo(tmp_path_factory.mktemp("system"), REPLAY_S)
    demo.settings["sink"] = {"secrets": [str(demo.directory / WAREHOUSE_URL)]}
    try:
        demo.start_center()
        yield demo
    finally:
        demo.stop()
