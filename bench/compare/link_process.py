"""The process that carries the bytes of all links of a run: `python -m bench.compare.link_process`.

It reads its configuration as one line of JSON from standard input, and prints one line when the links are up. Then each
line of input is a command: `counts` prints the bytes of each link, `cut` interrupts all links, and `mend` ends that.

- With the right to create network devices, each link is a pair of TUN devices, one of them in the network namespace of
  its site. The packets of the kernel's own TCP pass through this process, so bytes include the headers of TCP and IP.
  With a bucket, the kernel's `tbf` limits the rate of both devices, and this process only adds the delay.
- Otherwise each link is a TCP relay on loopback. Bytes are then the connection's payload.
"""

from __future__ import annotations

import asyncio
import fcntl
import heapq
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench.compare.shaping import Shaper

CENTER_ADDRESS = "198.18.255.254"
"""The address of the center in its namespace; the block is reserved for benchmarks (RFC 2544)."""
MTU = 1500
RELAY_CHUNK_BYTES = 1448
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def shapers(link: dict[str, Any]) -> tuple[Shaper, Shaper]:
    """Returns the two directions of a configured link: to the center, and back."""
    rate = None if link["bucket_bytes"] else link["rate_bytes_s"]
    settings = rate, link["delay_s"], link["queue_bytes"]
    return Shaper(*settings), Shaper(*settings)


@dataclass
class Link:
    """A running link."""

    up: Shaper
    down: Shaper

    def set_cut(self, is_cut: bool) -> None:
        self.up.is_cut = self.down.is_cut = is_cut

    def counts(self) -> list[int]:
        return [self.up.passed_bytes, self.down.passed_bytes]


def command(line: str, links: list[Link]) -> None:
    """Executes one line of input."""
    if line == "counts":
        print(json.dumps([link.counts() for link in links]), flush=True)
    elif line in ("cut", "mend"):
        for link in links:
            link.set_cut(line == "cut")
        print(json.dumps(line), flush=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


def limit_rate(device: str, link: dict[str, Any], *prefix: str) -> None:
    """Puts a token bucket before a device."""
    rate = ("rate", f"{int(8 * link['rate_bytes_s'])}bit", "burst", str(link["bucket_bytes"]))
    words = ("tc", "qdisc", "add", "dev", device, "root", "tbf", *rate, "limit", str(link["queue_bytes"]))
    subprocess.run([*prefix, *words], check=True, capture_output=True)


def connect_site(number: int, link: dict[str, Any]) -> tuple[int, int]:
    """Creates the devices of one site, numbered from 1; returns their descriptors: the site's and the center's."""
    namespace: str = link["namespace"]
    site_fd, center_fd = open_tun(f"s{number}"), open_tun(f"c{number}")
    here, there = f"198.18.{number}.1", f"198.18.{number}.2"
    ip("addr", "add", here, "peer", there, "dev", f"c{number}")
    ip("link", "set", f"c{number}", "mtu", str(MTU), "up")
    ip("link", "set", f"s{number}", "netns", namespace, "name", "eth0")
    inside = ("-n", namespace)
    ip(*inside, "link", "set", "lo", "up")
    ip(*inside, "addr", "add", there, "peer", here, "dev", "eth0")
    ip(*inside, "link", "set", "eth0", "mtu", str(MTU), "up")
    ip(*inside, "route", "add", "default", "dev", "eth0")
    if link["bucket_bytes"]:
        limit_rate(f"c{number}", link)
        limit_rate("eth0", link, "ip", "netns", "exec", namespace)
    return site_fd, center_fd


def run_tun(config: dict[str, Any]) -> None:
    with suppress(OSError):
        os.nice(-15)  # a packet that is late because the processor is busy would count as a slower link
    links, routes = list[Link](), dict[int, tuple[Shaper, int]]()
    for number, settings in enumerate(config["links"], 1):
        link = Link(*shapers(settings))
        site_fd, center_fd = connect_site(number, settings)
        routes[site_fd], routes[center_fd] = (link.up, center_fd), (link.down, site_fd)
        links.append(link)
    print(json.dumps([[CENTER_ADDRESS, settings["target"][1]] for settings in config["links"]]), flush=True)
    forward(links, routes)


def forward(links: list[Link], routes: dict[int, tuple[Shaper, int]]) -> None:
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for fd in routes:
        selector.register(fd, selectors.EVENT_READ)
    under_way: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        timeout = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
        for key, _ in selector.select(timeout):
            if key.fd == sys.stdin.fileno():
                line = sys.stdin.readline()
                if not line:
                    return
                command(line.strip(), links)
                continue
            shaper, target = routes[key.fd]
            packet = os.read(key.fd, MTU)
            if packet[0] >> 4 != 4:
                continue  # the kernel's announcements of IPv6
            arrival_s = shaper.offer(len(packet), time.monotonic())
            if arrival_s is not None:
                heapq.heappush(under_way, (arrival_s, number, target, packet))
                number += 1
        now_s = time.monotonic()
        while under_way and under_way[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(under_way)
            with suppress(OSError):
                os.write(target, packet)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shaper: Shaper) -> None:
    """Copies one direction. Nothing is dropped: a connection whose link is cut waits."""
    arrivals: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            arrival_s, data = await arrivals.get()
            await asyncio.sleep(arrival_s - time.monotonic())
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    delivering = asyncio.create_task(deliver())
    while data := await reader.read(RELAY_CHUNK_BYTES):
        while (arrival_s := shaper.offer(len(data), time.monotonic())) is None:
            await asyncio.sleep(0.005)
        await arrivals.put((arrival_s, data))
    await arrivals.put((time.monotonic() + shaper.delay_s, b""))
    with suppress(ConnectionError):
        await delivering


async def relay(link: Link, target: tuple[str, int]) -> int:
    """Starts the relay of a link; returns its port."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*target)
        except OSError:
            writer.close()
            return
        with suppress(ConnectionError):
            await asyncio.gather(pump(reader, far_writer, link.up), pump(far_reader, writer, link.down))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    return int(server.sockets[0].getsockname()[1])


async def run_relays(config: dict[str, Any]) -> None:
    links = [Link(*shapers(settings)) for settings in config["links"]]
    ports = [
        await relay(link, tuple(settings["target"])) for link, settings in zip(links, config["links"], strict=True)
    ]
    print(json.dumps([["127.0.0.1", port] for port in ports]), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command(line.strip(), links)


if __name__ == "__main__":
    configuration = json.loads(sys.stdin.readline())
    if configuration["tun"]:
        run_tun(configuration)
    else:
        asyncio.run(run_relays(configuration))
