"""One center for all tests of this folder: starting its JVM takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sim.demo.run import Demo

REPLAY_S = 15.0
WAREHOUSE_URL = "warehouse-url"
"""The file of the center's directory that sinks defined by the API may use."""
RUNNING = ExitStack()


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with RUNNING:
        demo = Demo(tmp_path_factory.mktemp("system"), REPLAY_S)
        demo.settings["sink"] = {"secrets": [str(demo.directory / WAREHOUSE_URL)]}
        RUNNING.callback(demo.stop)
        demo.start_center()
        yield demo


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ends the center after the last test of the folder. It would poll beside all further tests of its worker."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        RUNNING.close()
