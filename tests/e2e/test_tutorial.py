"""The tutorial and the README as a newcomer types them: every command, and every output that they show."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sim.demo.ports import free_port
from tests.installations import install, installed_extras

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL, README = ROOT / "docs" / "tutorial.md", ROOT / "README.md"
SERVERS = ("edgewater center run", "edgewater edge run")
INSTALLATION = ("python3 -m venv", "pip install")
"""Commands that are not run: `install` makes the environment that they make, without a download."""
WITHIN_S = 300.0

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Command:
    """A command of the page, with the text that its output has to match."""

    text: str
    shown: str


def commands(page: str) -> list[Command]:
    found = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            until = 1
            if heredoc := re.search(r"<<'(\w+)'", lines[0]):
                until = lines.index(heredoc[1]) + 1
            found.append(Command("\n".join(lines[:until]), "\n".join(lines[until:])))
    return found


def with_any_numbers(command: Command) -> Command:
    """Returns a command whose output may have other numbers: which groups are withheld depends on the time."""
    return Command(command.text, re.sub(r"\d[\d.,]*", "…", command.shown))


def matches(shown: str, output: str) -> bool:
    """Whether an output is as shown; `…` stands for any text, also of several lines."""
    pattern = ".*?".join(re.escape(piece.strip()) for piece in shown.split("…"))
    pattern = re.sub(r"(\\\s)+", r"\\s+", pattern)
    return re.search(pattern.replace("\\\n", r"\s+"), output, re.DOTALL) is not None


class Terminals:
    """The directory of a newcomer, with free ports instead of the page's."""

    def __init__(self, directory: Path, extras: frozenset[str]) -> None:
        self.directory = directory
        self.ports = dict(zip(("7400", "7480", "7410"), (str(free_port()) for _ in range(3)), strict=True))
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": f"{install(directory / '.venv', extras)}:{os.environ['PATH']}",
            "EDGEWATER_CENTER__GATEWAY__LISTEN": f"127.0.0.1:{self.ports['7400']}",
            "EDGEWATER_CENTER__API__LISTEN": f"127.0.0.1:{self.ports['7480']}",
            "EDGEWATER_URL": f"http://127.0.0.1:{self.ports['7480']}",
        }

    def with_ports(self, text: str) -> str:
        text = text.replace("state_dir:", "http: {listen: 127.0.0.1:7410}\nstate_dir:")
        return re.sub("|".join(self.ports), lambda found: self.ports[found[0]], text)

    def type(self, command: Command) -> None:
        if command.text.startswith(SERVERS):
            self.serve(command)
            return
        # A query is answered, and a status is known, a moment after what it depends on.
        deadline = time.monotonic() + WITHIN_S
        repeatable = "--data-binary" not in command.text
        while True:
            done = subprocess.run(
                self.with_ports(command.text), shell=True, cwd=self.directory, env=self.env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
            if matches(self.with_ports(command.shown), done.stdout):
                return
            assert repeatable and time.monotonic() < deadline, f"$ {command.text}\n{done.stdout}\n\n{command.shown}"
            time.sleep(2)  # each try starts an interpreter, for a second of CPU time

    def serve(self, command: Command) -> None:
        """Starts a server in a terminal of its own; one edge at a time, as the page says."""
        kind = next(s for s in SERVERS if command.text.startswith(s))
        self.stop(kind)
        log = self.directory / f"{len(list(self.directory.glob('*.log')))}.log"
        with log.open("wb") as file:
            self.servers[kind] = subprocess.Popen(
                command.text.split(), cwd=self.directory, env=self.env,
                stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        deadline = time.monotonic() + WITHIN_S
        while not matches(self.with_ports(command.shown), log.read_text()):
            assert self.servers[kind].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def stop(self, kind: str) -> None:
        server = self.servers.pop(kind, None)
        if server is not None:
            server.send_signal(signal.SIGINT)
            server.wait(WITHIN_S)


@contextmanager
def terminals(directory: Path, extras: frozenset[str]) -> Iterator[Terminals]:
    opened = Terminals(directory, extras)
    try:
        yield opened
    finally:
        for kind in list(opened.servers):
            opened.stop(kind)


def test_every_command_and_every_output_of_the_tutorial_and_the_readme(tmp_path: Path) -> None:
    page = commands(TUTORIAL.read_text())
    (extras,) = {installed_extras(c.text) for c in page if c.text.startswith("pip install")}
    page = [c for c in page if not c.text.startswith(INSTALLATION)]
    assert len(page) >= 15
    # The README's own query, at the same center and with what the README installs.
    section = README.read_text().split("## Ask your own question")[1].split("\n## ")[0]
    assert {installed_extras(c.text) for c in commands(section) if c.text.startswith("pip install")} == {extras}
    readme = [c for c in commands(section) if not c.text.startswith((*INSTALLATION, "edgewater center run"))]
    assert len(readme) >= 7
    with terminals(tmp_path, extras) as terminal:
        for command in page:
            terminal.type(command)
        for command in readme:
            terminal.type(with_any_numbers(command))


def test_the_comparison_of_outputs_finds_differences() -> None:
    assert matches('{\n  "n": 7…,\n…\n}', '{\n  "n": 7.25,\n  "m": 1\n}')
    assert not matches('{\n  "n": 7…,\n…\n}', '{\n  "n": 8.25,\n  "m": 1\n}')
    assert not matches("a\nb", "a\nc\nb")
