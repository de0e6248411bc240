"""The databases that the stores run on: what a test of theirs asserts holds on both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from center.catalog import Catalog
from center.spark.spark_session import SessionConfig, start_session
from tests.center.postgres import PostgresServer, serving
from tests.center.results_world import Job


@pytest.fixture(scope="session")
def postgres(postgres_binaries: Path) -> Iterator[PostgresServer]:
    """One server for all tests."""
    with serving(postgres_binaries) as server:
        yield server


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Spark session for all tests: a JVM takes seconds to start."""
    session = start_session(SessionConfig(master="local[2]", scratch_dir=tmp_path_factory.mktemp("spark")))
    yield session
    session.stop()


def databases(*postgresql: pytest.MarkDecorator) -> Any:
    """Returns a fixture that makes databases of both kinds. `postgresql` are the marks of tests on PostgreSQL."""

    @pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=postgresql)], name="new_database")
    def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
        """Makes an empty database and tells its URL; one after the other, if called again."""
        if request.param == "postgresql":
            server: PostgresServer = request.getfixturevalue("postgres")
            return server.new_database
        numbers = itertools.count(1)
        return lambda: f"sqlite:///{tmp_path}/database-{next(numbers)}/center.db"

    return new_database


new_database = databases(pytest.mark.slow)


@pytest.fixture
def url(new_database: Callable[[], str]) -> str:
    return new_database()


@pytest.fixture
def open_catalog(url: str) -> Iterator[Callable[[], Catalog]]:
    """Opens the test's catalog as one more process does."""
    with ExitStack() as stack:

        def open_catalog() -> Catalog:
            catalog = Catalog(url)
            stack.callback(catalog.close)
            return catalog

        yield open_catalog


@pytest.fixture
def catalog(open_catalog: Callable[[], Catalog]) -> Catalog:
    return open_catalog()


@pytest.fixture
def open_job(url: str) -> Iterator[Callable[..., Job]]:
    """Opens a job on the test's store, and another one as if it had been started again."""
    with ExitStack() as stack:

        def open_job(*edges: str, **query: object) -> Job:
            job = Job(url, *edges, **query)
            stack.callback(job.store.close)
            return job

        yield open_job
