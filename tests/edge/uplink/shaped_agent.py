"""An agent behind a shaped link: `python -m tests.edge.uplink.shaped_agent HOST:PORT BYTES [EDGE [LINK]]`.

It always has something to send, until so many bytes are acknowledged. It prints what it knows of the link, and the
share of frames that arrived by the time that was predicted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from pydantic import SecretStr

from edge.process import now_ms
from edge.uplink import LinkLimits, Uplink
from edge.uplink.flow_control import LinkFlow
from edge.uplink.link_reports import LinkReports
from edgewater.wire import Frame, FrameBody, Partial
from edgewater.wire import uplink_pb2 as pb
from tests.edge.uplink_world import MILES, Agent, running

TOKEN = "a token of the test"


class Insatiable(Agent):
    """Makes a frame of random bytes whenever there is room."""

    def __init__(self, edge: str) -> None:
        super().__init__()
        self.edge = edge
        self.sizes: list[int] = []
        self.reports = LinkReports()

    def link_report(self, low_bytes_s: float, high_bytes_s: float, *, all_queries: bool) -> pb.LinkReport | None:
        return self.reports.due(low_bytes_s, high_bytes_s, {}, now_ms())

    async def take(self, capacity_bytes: int) -> Sequence[Frame]:
        seq = len(self.sizes)
        content = np.random.default_rng(seq).bytes(capacity_bytes)
        frame = Frame.pack(seq, MILES, FrameBody(seq, (Partial(0, content),)))
        self.sizes.append(frame.wire_bytes)
        self.journal.append(frame)
        return [frame]


class Recorded(LinkFlow):
    """Records the predictions."""

    due_s: dict[int, float]
    in_time: list[bool]

    def on_sent(self, seq: int | None, size: int, now_s: float) -> float:
        due_s = super().on_sent(seq, size, now_s)
        if seq is not None:
            self.due_s[seq] = due_s
        return due_s

    def on_acknowledged(self, through: int, now_s: float, held_s: float = 0.0, received_at_s: float = 0.0) -> None:
        super().on_acknowledged(through, now_s, held_s, received_at_s)
        self.in_time.append(received_at_s <= self.due_s[through])


async def main(address: str, size: int, edge: str = "jfk", name: str = "") -> None:
    agent, token, limits = Insatiable(edge), SecretStr(TOKEN + edge), LinkLimits(link=name)
    link = Uplink(address, agent, token=token, tls=None, limits=limits, now_ms=now_ms, monotonic=time.monotonic)
    began_s = time.monotonic()
    flow = Recorded(now_ms)
    flow.due_s, flow.in_time = {}, []
    link._pacing.link = flow
    async with running(link):
        await agent.until(lambda: sum(agent.sizes[: agent.acked + 1]) >= size)
        later = flow.in_time[len(flow.in_time) // 3 :]
        done = {"frames": len(agent.sizes), "took_s": time.monotonic() - began_s}
        print(json.dumps({**asdict(agent.forecast()), "in_time": float(np.mean(later)), **done}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
