"""A link slower than the data: the newest values are sent, not a queue of old ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from edge.uplink import DailyQuota, LinkLimits
from edge.uplink.flow_control import QUEUE_S
from edgewater.wire import Frame, FrameBody, Partial
from tests.edge.uplink_world import MILES, SPEC, Agent, Proxy, gateway, running, uplink

pytestmark = [pytest.mark.e2e]

RATE = 128_000


@dataclass
class Insatiable:
    """When frames were built, and how large they are: there is always something to send."""

    built_at_s: dict[int, float] = field(default_factory=dict)
    ages_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Busy(Agent):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Insatiable()

    async def take(self, capacity_bytes: int) -> Sequence[Frame]:
        seq = len(self.seen.built_at_s)
        content = np.random.default_rng(seq).bytes(capacity_bytes)
        frame = Frame.pack(seq, MILES, FrameBody(seq, (Partial(0, content),)))
        self.seen.built_at_s[seq] = time.monotonic()
        self.seen.sizes.append(frame.wire_bytes)
        self.journal.append(frame)
        return [frame]

    def on_ack(self, through: int) -> None:
        for seq in range(self.acked + 1, through + 1):
            self.seen.ages_s.append(time.monotonic() - self.seen.built_at_s[seq])
        super().on_ack(through)


@pytest.mark.nightly
async def test_values_are_at_most_as_old_as_the_bytes_in_flight(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog), Proxy(port) as proxy:
        catalog.queries.register(SPEC, 1)
        proxy.rate_bytes_s = RATE
        agent = Busy()
        async with running(uplink(proxy.port, agent, LinkLimits(heartbeat_s=0.2))):
            await agent.until(lambda: sum(agent.seen.sizes[: agent.acked + 1]) > 5 * RATE)
        assert sorted(agent.seen.ages_s)[len(agent.seen.ages_s) * 9 // 10] < QUEUE_S + 0.7
        assert agent.forecast().mid_bytes_s == pytest.approx(RATE, rel=0.4), "and the link's bandwidth is known"


async def test_limits_count_all_bytes_on_the_wire(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog), Proxy(port) as proxy:
        catalog.queries.register(SPEC, 1)
        agent, daily = Busy(), 400_000
        counted: list[int] = []
        quota = DailyQuota(daily, None, lambda _, used: counted.append(used))
        limits = LinkLimits(heartbeat_s=0.2, bandwidth_bytes_s=200_000)
        async with running(uplink(proxy.port, agent, limits, daily_quota=quota)):
            began_s = time.monotonic()
            await agent.until(lambda: quota.delay_s(1_000) > 0 and agent.acked == len(agent.seen.sizes) - 1)
            took_s = time.monotonic() - began_s
        largest = max(agent.seen.sizes)
        assert proxy.passed <= daily + largest + 5_000, "by one frame at most, and a few heartbeats"
        assert proxy.passed <= 200_000 * took_s + largest + 5_000
        assert quota._used == pytest.approx(proxy.passed, rel=0.02)
