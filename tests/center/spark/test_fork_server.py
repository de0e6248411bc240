"""Spark's Python processes by fork: like interpreters of their own in all but what their start costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from center.spark import fork_client
from center.spark.fork_server import SINGLE_THREADED

WITHIN_S = 60
MODULE = """
import os, sys
print(os.getpid(), os.getppid(), flush=True)
said = sys.stdin.read()
files = len(os.listdir("/proc/self/fd"))
print(sys.argv[1:], __name__, os.environ.get("TOLD"), "OPENBLAS_NUM_THREADS" in os.environ, files)
sys.exit(said or None)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's pidfd")


def started(socket: Path, first: str = "") -> subprocess.Popen[bytes]:
    """A server over `socket`, which runs the code of `first` before it serves."""
    code = f"{first}\nimport sys; from center.spark.fork_server import serve; serve(sys.argv[1])"
    command = [sys.executable, "-u", "-c", code, str(socket)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | SINGLE_THREADED)
    while not socket.exists():
        assert process.poll() is None
        time.sleep(0.02)
    return process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    socket = tmp_path_factory.mktemp("fork") / "s"
    process = started(socket)
    yield process.pid, socket
    process.communicate(timeout=WITHIN_S)  # it ends with its standard input
    assert process.returncode == 0


class Forked:
    """The module `MODULE`, started as Spark starts its processes: by name, with its own environment and files."""

    def __init__(self, directory: Path, socket: Path, *arguments: str) -> None:
        (directory / "told.py").write_text(MODULE)
        self.client = subprocess.Popen(
            [sys.executable, "-IS", fork_client.__file__, socket, sys.executable, "-m", "told", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(directory), "TOLD": "é\udcff"},
            cwd=directory,
        )
        assert self.client.stdout is not None
        self.pid, self.parent = map(int, self.client.stdout.readline().split())

    def end(self, said: str = "") -> tuple[str, str, int]:
        """Its output, its errors and its client's exit code, after it has read `said`."""
        output, errors = self.client.communicate(said.encode(), timeout=WITHIN_S)
        return output.decode(errors="surrogateescape"), errors.decode(), self.client.returncode


@pytest.mark.parametrize("said", ["", "it failed"])
@pytest.mark.slow
def test_a_forked_process_is_like_an_interpreter_of_its_own(
    tmp_path: Path, server: tuple[int, Path], said: str
) -> None:
    own, forked = Forked(tmp_path, tmp_path / "none", "a", "--b"), Forked(tmp_path, server[1], "a", "--b")

    assert forked.parent == server[0] and own.parent == os.getpid()
    output, errors, code = own.end(said)
    assert forked.end(said) == (output, errors, code)
    assert output.startswith("['a', '--b'] __main__ é\udcff False") and errors.strip() == said
    assert code == bool(said)


def test_processes_run_beside_each_other_and_end_with_their_clients(tmp_path: Path, server: tuple[int, Path]) -> None:
    first, second, third = (Forked(tmp_path, server[1]) for _ in range(3))
    forked = psutil.Process(third.pid)

    os.kill(second.pid, signal.SIGKILL)
    assert second.end()[2] == -signal.SIGKILL & 0xFF
    third.client.kill()
    forked.wait(WITHIN_S)
    third.end()
    assert first.end()[2] == 0


@pytest.mark.parametrize("started_thread", [True, False])
@pytest.mark.slow
def test_without_a_server_that_can_fork_a_process_is_an_interpreter_of_its_own(
    tmp_path: Path, started_thread: bool
) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    process = started(tmp_path / "s", thread if started_thread else "")
    if started_thread:
        waiting = Forked(tmp_path, tmp_path / "s")  # it asks while modules are loaded
        assert process.wait(WITHIN_S) == 0
        assert waiting.parent == os.getpid() and waiting.end()[2] == 0
    else:
        running = Forked(tmp_path, tmp_path / "s")
        process.kill()
        process.wait(WITHIN_S)
        running.end()
        assert running.client.returncode == 1

    after = Forked(tmp_path, tmp_path / "s")
    assert after.parent == os.getpid() and after.end()[2] == 0
    assert process.stdin is not None
    process.stdin.close()
