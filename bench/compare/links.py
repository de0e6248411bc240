"""The links of a run, one for each site of each way, and the bytes that they carried."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.compare.link_process import CENTER_ADDRESS

MIN_QUEUE_BYTES = 16 << 10
QUEUE_S = 0.5
"""The queue before a link holds the bytes of this time, and at least `MIN_QUEUE_BYTES`, as routers of small sites
do.
"""
INSIDE = "EDGEWATER_COMPARE_NAMESPACE"
"""Set in the process that runs in the center's network namespace."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The settings that all links of a run have in common.

    Attributes:
        rate_bytes_s: None: unlimited.
        delay_s: in each direction.
        bucket_bytes: depth of the kernel's token bucket that limits the rate; 0: the links have none. Needs network
            namespaces.
    """

    rate_bytes_s: float | None
    delay_s: float
    bucket_bytes: int = 0

    @property
    def queue_bytes(self) -> int:
        return max(MIN_QUEUE_BYTES, int(QUEUE_S * self.rate_bytes_s)) if self.rate_bytes_s is not None else 1 << 30


@dataclass
class Links:
    """Running links.

    Attributes:
        has_namespaces: whether each site runs in a network namespace of its own; otherwise a relay is its link.
        addresses: by (way, site), the address at which the site reaches its center.
    """

    has_namespaces: bool
    process: subprocess.Popen[str]
    keys: list[tuple[str, int]]
    addresses: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

    def command(self, way: str, site: int, words: Sequence[str]) -> list[str]:
        """Returns the command that runs a site's program behind the site's link."""
        prefix = ["ip", "netns", "exec", namespace(way, site)] if self.has_namespaces else []
        return [*prefix, *words]

    def counts(self) -> dict[str, int]:
        """Returns the bytes of each way's links, both directions together."""
        result: dict[str, int] = {}
        for (way, _), (up, down) in zip(self.keys, self._ask("counts"), strict=True):
            result[way] = result.get(way, 0) + up + down
        return result

    def set_cut(self, is_cut: bool) -> None:
        """Interrupts all links, or ends the interruption."""
        self._ask("cut" if is_cut else "mend")

    def _ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def namespace(way: str, site: int) -> str:
    return f"ewc{os.getpid()}-{way}-{site}"


def may_create_namespaces() -> bool:
    """Whether this process may create network devices and namespaces."""
    return (
        os.geteuid() == 0
        and os.access("/dev/net/tun", os.R_OK | os.W_OK)
        and shutil.which("ip") is not None
        and shutil.which("unshare") is not None
        and subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0
    )


def enter_namespace(arguments: Sequence[str]) -> None:
    """Runs this program again in a network namespace, if it may create one and is not in one.

    Then it does not return.

    The center's services then have the loopback addresses of that namespace, and disturb nothing on the machine.
    """
    if INSIDE not in os.environ and may_create_namespaces():
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-n", sys.executable, "-m", "bench.compare", *arguments])
    if INSIDE in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        subprocess.run(["ip", "addr", "replace", f"{CENTER_ADDRESS}/32", "dev", "lo"], check=True)


def center_address() -> str:
    """Returns the address at which centers listen for their sites."""
    return CENTER_ADDRESS if INSIDE in os.environ else "127.0.0.1"


@contextmanager
def running(settings: LinkSettings, ports: dict[tuple[str, int], int], log: Path) -> Iterator[Links]:
    """Starts the links.

    Args:
        ports: by (way, site), the port of the center's service.
        log: receives the errors of the process.
    """
    has_namespaces = INSIDE in os.environ
    names = [namespace(way, site) for way, site in ports]
    links = [
        {
            "rate_bytes_s": settings.rate_bytes_s,
            "delay_s": settings.delay_s,
            "queue_bytes": settings.queue_bytes,
            "bucket_bytes": settings.bucket_bytes if settings.rate_bytes_s is not None else 0,
            "target": [center_address(), port],
            "namespace": name,
        }
        for name, port in zip(names, ports.values(), strict=True)
    ]
    with ExitStack() as stack:
        for name in names if has_namespaces else []:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        process = stack.enter_context(_process(log))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"tun": has_namespaces, "links": links}) + "\n")
        process.stdin.flush()
        ready = process.stdout.readline()
        if not ready:
            raise RuntimeError(f"the links do not start; see {log}")
        addresses = {key: (host, port) for key, (host, port) in zip(ports, json.loads(ready), strict=True)}
        yield Links(has_namespaces, process, list(ports), addresses)


@contextmanager
def _process(log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.compare.link_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
