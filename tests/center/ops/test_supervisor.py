"""The supervisor with real child processes: small ones that say what happens to them through files."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from center.ops.supervisor import Backoff, ComponentCommand, Supervisor, describe_exit, exclusive_lock
from edgewater.base.errors import InvalidConfig, StorageError
from tests.refusals import refused

WAIT_S = 120.0
SLEEPER = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
STUBBORN = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
while True: signal.pause()
"""


def python(code: str, *args: str) -> Callable[[], list[str]]:
    return lambda: [sys.executable, "-c", code, *args]


def supervise(tmp_path: Path, *commands: ComponentCommand, grace_s: float = 20.0) -> Supervisor:
    quick = Backoff(first_s=0.01, most_s=0.05)
    return Supervisor(commands, tmp_path / "pids", monotonic=time.monotonic, backoff=quick, grace_s=grace_s)


async def until(condition: Callable[[], object]) -> None:
    """Waits for another process: polls, since a file is all it can tell us by."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def run(supervisor: Supervisor, then: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    async def both() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(supervisor.run(stop))
        await then(stop)
        stop.set()
        await asyncio.wait_for(running, WAIT_S)

    asyncio.run(both())


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_component_that_is_killed_is_started_again_under_a_new_process_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pid_file = tmp_path / "pids" / "gateway.pid"
    supervisor = supervise(tmp_path, ComponentCommand("gateway", python(SLEEPER)))

    async def kill_it(_: asyncio.Event) -> None:
        await until(pid_file.exists)
        first = int(pid_file.read_text())
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.restarts["gateway"] == 1 and pid_file.exists())
        assert int(pid_file.read_text()) != first

    run(supervisor, kill_it)
    assert "gateway was killed by SIGKILL; starting it again" in caplog.text


def test_all_components_are_stopped_together_and_their_pid_files_removed(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, *(ComponentCommand(p, python(SLEEPER)) for p in ("gateway", "job", "api")))
    pids: dict[str, int] = {}

    async def note(_: asyncio.Event) -> None:
        await until(lambda: len(supervisor.pids) == 3)
        pids.update(supervisor.pids)

    run(supervisor, note)
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids.values())
    assert list((tmp_path / "pids").iterdir()) == []


def test_a_component_that_will_not_stop_is_killed_with_its_children(tmp_path: Path) -> None:
    begun, child_pid = tmp_path / "begun", tmp_path / "child.pid"
    code = f"""
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}, {str(begun)!r}])
pathlib.Path({str(child_pid)!r}).write_text(str(child.pid))
{STUBBORN}
"""
    supervisor = supervise(tmp_path, ComponentCommand("job", python(code, str(tmp_path / "parent"))), grace_s=0.2)

    async def wait(_: asyncio.Event) -> None:
        await until(lambda: begun.exists() and (tmp_path / "parent").exists())

    run(supervisor, wait)
    # Killed, but not ours to reap: the system takes a moment.
    asyncio.run(until(lambda: gone(int(child_pid.read_text()))))


def test_what_a_dead_component_left_behind_is_killed_before_it_starts_again(tmp_path: Path) -> None:
    begun, child_pid = tmp_path / "begun", tmp_path / "child.pid"
    # The first start leaves a child behind and dies; later ones stay.
    code = f"""
import os, pathlib, subprocess, sys, time
path = pathlib.Path({str(child_pid)!r})
if path.exists():
    {SLEEPER}
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}, {str(begun)!r}])
while not os.path.exists({str(begun)!r}): time.sleep(0.01)
path.write_text(str(child.pid))
os._exit(1)
"""
    supervisor = supervise(tmp_path, ComponentCommand("job", python(code)))

    async def wait(_: asyncio.Event) -> None:
        await until(lambda: supervisor.restarts["job"] == 1 and "job" in supervisor.pids)
        await until(lambda: gone(int(child_pid.read_text())))

    run(supervisor, wait)


def test_a_component_that_cannot_use_its_configuration_is_not_started_again_and_stops_the_others(
    tmp_path: Path,
) -> None:
    supervisor = supervise(
        tmp_path, ComponentCommand("api", python(SLEEPER)), ComponentCommand("job", python("import sys; sys.exit(2)"))
    )
    with refused(InvalidConfig, "job"):
        asyncio.run(asyncio.wait_for(supervisor.run(asyncio.Event()), WAIT_S))
    assert supervisor.restarts == {"api": 0, "job": 0}
    assert supervisor.pids == {}


def test_children_stop_when_the_supervisor_itself_is_killed(tmp_path: Path) -> None:
    child = (
        "import signal, sys; from center.ops.supervisor import stop_with_supervisor; stop_with_supervisor(); "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
    )
    parent = f"""
import asyncio, pathlib, sys, time
from center.ops.supervisor import ComponentCommand, Supervisor
command = ComponentCommand("api", lambda: [sys.executable, "-c", {child!r}])
asyncio.run(Supervisor([command], pathlib.Path({str(tmp_path)!r}), monotonic=time.monotonic).run(asyncio.Event()))
"""
    pid_file = tmp_path / "api.pid"
    with subprocess.Popen([sys.executable, "-c", parent]) as supervisor:
        asyncio.run(until(pid_file.exists))
        pid = int(pid_file.read_text())
        supervisor.kill()
        asyncio.run(until(lambda: gone(pid)))


def test_the_wait_before_a_restart_doubles_up_to_a_bound() -> None:
    backoff = Backoff(first_s=0.2, most_s=10.0)
    assert [backoff.delay_s(n) for n in (1, 2, 3, 4)] == [0.2, 0.4, 0.8, 1.6]
    assert backoff.delay_s(1000) == 10.0


def test_an_exit_is_described_by_its_code_or_its_signal() -> None:
    assert describe_exit(1) == "ended with code 1"
    assert describe_exit(-9) == "was killed by SIGKILL"


def test_two_supervisors_never_share_a_directory(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path), pytest.raises(StorageError), exclusive_lock(tmp_path):
        pass
    with exclusive_lock(tmp_path):
        pass
