"""Programs of the system that some tests run. Each is a fixture of the session, which comes before other fixtures.

A test that runs a program, or a fixture that starts one, requests the fixture with the program's name. So the test is
skipped, with the name of Debian's package, before anything is started. With `CI` set, it fails instead: there, all
programs are installed. Tests with such a fixture have the marker `program`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
NAMES = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "alertmanager": ("prometheus-alertmanager", "alertmanager"),
    "stunnel": ("stunnel4", "stunnel"),
    "systemd_analyze": ("systemd-analyze",),
}
"""Names that a program has in different distributions, if they are not the fixture's name."""
PACKAGES = {
    "alertmanager": "prometheus-alertmanager", "chromium": "chromium", "kubectl": "kubernetes-client",
    "logger": "bsdutils", "mosquitto": "mosquitto", "mosquitto_passwd": "mosquitto", "pgbouncer": "pgbouncer",
    "prometheus": "prometheus", "promtool": "prometheus", "rsyslogd": "rsyslog", "stunnel": "stunnel4",
    "systemd_analyze": "systemd", "tc": "iproute2",
}  # fmt: skip
"""Debian's package of each program."""
NEEDED = frozenset({*PACKAGES, "postgres_binaries", "postgres", "postgresql"})
"""Fixtures, and parameters of fixtures, for which a program is started."""


def find(program: str) -> str | None:
    """Returns the path of a program, or None if it is not installed."""
    return next(filter(None, (shutil.which(name, path=SEARCHED) for name in NAMES.get(program, (program,)))), None)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test that requests a program, itself or by a parameter of a fixture."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    requested = {*getattr(item, "fixturenames", ()), *(each for each in parameters if isinstance(each, str))}
    if not NEEDED.isdisjoint(requested):
        item.add_marker("program")


def missing(program: str, package: str) -> None:
    """Skips the test that needs a program, or fails it in CI."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{program} is not installed (Debian's package {package})")


def _fixture_of(program: str) -> Callable[[], str]:
    @pytest.fixture(scope="session", name=program)
    def path() -> str:
        found = find(program)
        if found is None:
            missing(program, PACKAGES[program])
        assert found is not None
        return found

    return path


for _program in PACKAGES:
    globals()[f"_{_program}"] = _fixture_of(_program)


@pytest.fixture(scope="session")
def postgres_binaries() -> Path:
    """The directory of PostgreSQL's server programs."""
    from tests.center.postgres import OLDEST, find_binaries

    found = find_binaries()
    if found is None:
        missing(f"PostgreSQL {OLDEST} or newer", "postgresql")
    assert found is not None
    return found


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process while entered. It is killed at the end, whatever happens. `options` are those of Popen."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
