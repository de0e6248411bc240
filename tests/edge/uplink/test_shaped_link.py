"""The link model on shapers of the kernel, in a network namespace."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from center.edge_access import EdgeAccess
from tests.cells import at_night
from tests.edge.uplink.shaped_agent import TOKEN
from tests.edge.uplink_world import SPEC, gateway

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NETWORK = f"198.18.{os.getpid() % 250}"
HERE, THERE = f"{NETWORK}.1", f"{NETWORK}.2"
RATE, PATIENCE_S = 16_384, 150
SHAPERS = {
    "tbf 1600": ("tbf", "rate", f"{8 * RATE}bit", "burst", "1600", "limit", "16000"),
    "tbf 64 KiB": ("tbf", "rate", f"{8 * RATE}bit", "burst", "65536", "limit", "65536"),
    "htb": ("handle", "1:", "htb", "default", "1"),
}


@pytest.fixture(params=[next(iter(SHAPERS)), *at_night(*list(SHAPERS)[1:])])
def namespace(tc: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a network namespace behind a shaper."""
    number = f"{os.getpid()}{list(SHAPERS).index(request.param)}"  # the devices of an earlier one may still be there
    name, here, there = f"ew{number}", f"ewh{number}", f"ewt{number}"

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    with ExitStack() as stack:
        try:
            run("ip", "netns", "add", name)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this process may not create network namespaces")
        stack.callback(run, "ip", "netns", "del", name)
        run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        run("ip", "addr", "add", f"{HERE}/30", "dev", here)
        run("ip", "-n", name, "addr", "add", f"{THERE}/30", "dev", there)
        # a shaper drops a packet that is larger than its bucket
        run("ip", "-n", name, "link", "set", there, "gso_max_segs", "1")
        run("ip", "link", "set", here, "up")
        run("ip", "-n", name, "link", "set", there, "up")
        inside = ("ip", "netns", "exec", name, tc)
        run(*inside, "qdisc", "add", "dev", there, "root", *SHAPERS[request.param])
        if request.param == "htb":
            shape = ("htb", "rate", f"{8 * RATE}bit", "burst", "8000")
            run(*inside, "class", "add", "dev", there, "parent", "1:", "classid", "1:1", *shape)
        yield name


@pytest.mark.nightly
def test_the_rate_of_a_kernel_s_shaper_is_stated_and_frames_arrive_as_predicted(namespace: str, tmp_path: Path) -> None:
    (said,) = asyncio.run(sent_through(namespace, 750_000, tmp_path, ["jfk"]))
    # The kernel counts headers of Ethernet, too, and a busy machine delays arrivals.
    assert said["stated_bytes_s"] == pytest.approx(RATE, rel=0.15)
    assert said["in_time"] >= 0.85


@pytest.mark.nightly
@pytest.mark.parametrize("namespace", ["tbf 1600"], indirect=True)
def test_two_edges_that_always_send_have_about_half_of_their_link_each(namespace: str, tmp_path: Path) -> None:
    both = asyncio.run(sent_through(namespace, 300_000, tmp_path, ["jfk", "lga"], "ship"))
    took_s = sorted(said["took_s"] for said in both)
    assert took_s[1] <= 1.35 * took_s[0]
    assert min(said["in_time"] for said in both) >= 0.85


async def sent_through(
    namespace: str, size: int, path: Path, edges: Sequence[str], link: str = ""
) -> list[dict[str, float]]:
    """Sends so many bytes from each edge in the namespace; returns what they say of their link."""
    tokens = {edge: EdgeAccess.model_validate({"tokens": [TOKEN + edge]}) for edge in edges}
    async with gateway(path, f"{HERE}:0", heartbeat_ms=1_000, tokens=tokens) as (port, catalog):
        catalog.queries.register(SPEC, 1)
        words = ("ip", "netns", "exec", namespace, sys.executable, "-m", "tests.edge.uplink.shaped_agent")
        senders = [
            await asyncio.create_subprocess_exec(
                *words, f"{HERE}:{port}", str(size), edge, link, stdout=subprocess.PIPE
            )
            for edge in edges
        ]
        try:
            async with asyncio.timeout(PATIENCE_S):
                said = await asyncio.gather(*(sender.communicate() for sender in senders))
        finally:
            for sender in senders:
                if sender.returncode is None:
                    sender.kill()
    return [dict(json.loads(out)) for out, _ in said]
