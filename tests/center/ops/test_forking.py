"""Components that are forked, with real ones: each test's supervisor is a process of its own, without threads."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from center.spark.workers import SINGLE_THREADED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="components are forked on Linux only")

SUPERVISOR = """
import asyncio, json, os, pathlib, signal, sys, threading, time
from center.ops.forking import fork_components
from center.ops.supervisor import ComponentCommand, Supervisor, exclusive_lock

data_dir = pathlib.Path(sys.argv[1])

def command(name, *flags):
    argv = [sys.executable, "-m", "edgewater", "center", name, "--supervised", "--data-dir", str(data_dir), *flags]
    return ComponentCommand(name, lambda: argv)

def show(**found):
    print(json.dumps(found))
"""


def supervise(tmp_path: Path, script: str) -> dict[str, Any]:
    """Runs a script after the lines of `SUPERVISOR`, and returns what it shows."""
    ended = subprocess.run(
        [sys.executable, "-c", SUPERVISOR + textwrap.dedent(script), str(tmp_path)],
        env=os.environ | SINGLE_THREADED,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout.splitlines()[-1]), said=ended.stderr)


@pytest.mark.nightly
def test_a_forked_component_shows_its_own_command_line_holds_no_lock_and_ends_with_its_exit_code(
    tmp_path: Path,
) -> None:
    found = supervise(
        tmp_path,
        """
        from center.catalog import ComponentRegistry

        with exclusive_lock(data_dir) as lock:
            commands = [command("api", "--set", "api.prot=1")]
            commands += [command("gateway", "--set", "gateway.listen=127.0.0.1:0")]
            forked = fork_components(commands, lock)
        gateway = forked["gateway"]
        registry = ComponentRegistry(f"sqlite:///{data_dir}/catalog.db")

        async def main():
            code = await forked["api"].wait()
            while not (beats := registry.heartbeats()):
                await asyncio.sleep(0.05)
            with exclusive_lock(data_dir):  # though the gateway runs
                pass
            shown = pathlib.Path(f"/proc/{gateway.pid}/cmdline").read_text().split("\\0")
            gateway.terminate()
            show(order=list(forked), api=code, shown=shown, beat=beats[0].instance, pid=gateway.pid,
                 group=os.getpgid(gateway.pid), gateway=await gateway.wait())

        asyncio.run(main())
        """,
    )
    assert found["order"] == ["api", "gateway"]  # the one that loads gRPC is the last
    assert (found["api"], found["gateway"]) == (2, 0)
    assert "api.prot: '1' is not accepted" in found["said"]
    assert found["beat"].endswith(f":{found['pid']}") and found["group"] == found["pid"]
    assert "center" in found["shown"] and "gateway" in found["shown"]


@pytest.mark.nightly
def test_a_forked_component_that_is_killed_is_started_again_as_an_interpreter_of_its_own(tmp_path: Path) -> None:
    found = supervise(
        tmp_path,
        """
        commands = [command("gateway", "--set", "gateway.listen=127.0.0.1:0")]
        with exclusive_lock(data_dir) as lock:
            forked = fork_components(commands, lock)
            first = forked["gateway"].pid
            supervisor = Supervisor(commands, data_dir / "pids", monotonic=time.monotonic, started=forked)

            async def main():
                stop = asyncio.Event()
                running = asyncio.create_task(supervisor.run(stop))
                while not supervisor.pids:
                    await asyncio.sleep(0.01)
                before = dict(supervisor.pids)
                os.kill(first, signal.SIGKILL)
                while supervisor.pids.get("gateway", first) == first:
                    await asyncio.sleep(0.01)
                show(first=first, before=before, restarts=dict(supervisor.restarts))
                stop.set()
                await running

            asyncio.run(main())
        """,
    )
    assert found["before"] == {"gateway": found["first"]}
    assert found["restarts"] == {"gateway": 1}
    assert "gateway was killed by SIGKILL" in found["said"]


@pytest.mark.slow
def test_each_forked_component_stops_when_the_pipe_of_the_supervisor_ends(tmp_path: Path) -> None:
    found = supervise(
        tmp_path,
        """
        import select

        commands = [command(name, "--set", f"{name}.listen=127.0.0.1:0") for name in ("gateway", "api")]
        with exclusive_lock(data_dir) as lock:
            forked = fork_components(commands, lock)
        ended = []
        for process in forked.values():  # the one that was forked later holds no end of the other's pipe
            process.stdin.close()
            ended.append(bool(select.select([os.pidfd_open(process.pid)], [], [], 300)[0]))
        show(ended=ended)
        """,
    )
    assert found["ended"] == [True, True]


@pytest.mark.slow
def test_a_process_with_a_thread_does_not_fork(tmp_path: Path) -> None:
    found = supervise(
        tmp_path,
        """
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        thread.start()
        with exclusive_lock(data_dir) as lock:
            forked = fork_components([command("gateway")], lock)
        end.set()
        thread.join()
        show(forked=list(forked))
        """,
    )
    assert found["forked"] == []
