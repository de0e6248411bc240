"""A sender that uses the room of `LinkFlow` over a modelled link, in virtual time."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edge.uplink.flow_control import LinkFlow
from edgewater.wire import link_bytes
from sim.budgets.link import LinkSimulation, SimulatedLink

CREDIT = 64 << 20
EPOCH_S = 1_700_000_000.0


@dataclass
class Forecasted:
    """A frame: when it arrived, and by when it should have, by the edge's clock."""

    sent_s: float
    by_s: float
    size: int
    arrived_s: float = 0.0


@dataclass
class Sender:
    """Sends the demand of each window as soon as there is room.

    Args:
        link: in each direction. Its jitter is of the answers, too.
        clock_s: by time, the center's clock less the edge's.
        hold_s: draws the time that the center holds a frame.
        states_arrivals: the acknowledgements have the time of arrival.
        pause_s: mean length of the pauses of the center's process, a fifth of the time.
        cross_bytes_s: other traffic on the way up.
    """

    link: SimulatedLink
    demand: Callable[[int], float]
    window_s: float = 10.0
    clock_s: Callable[[float], float] = lambda _: 0.0
    hold_s: Callable[[np.random.Generator], float] = lambda rng: 0.012 + rng.exponential(0.01)
    states_arrivals: bool = True
    pause_s: float = 0.0
    cross_bytes_s: float = 0.0
    frame_bytes: int = 1 << 20
    limit_bytes_s: float = math.inf
    seed: int = 1
    frames: list[Forecasted] = field(default_factory=list)
    left: float = 0.0

    def __post_init__(self) -> None:
        self.now = 0.0
        self.flow = LinkFlow(lambda: int(1000 * (EPOCH_S + self.now)), self.limit_bytes_s)
        self.flow.begin_session(CREDIT)
        self.up, self.down = LinkSimulation(self.link, 0), LinkSimulation(self.link, 1)
        self.rng = np.random.default_rng(self.seed)
        self.events: list[tuple[float, int, Callable[[], object]]] = []
        self.count = self.seq = 0
        self.most_in_flight = 0
        self.pauses = deque[tuple[float, float]]()
        when_s = 0.0
        while self.pause_s and when_s < 1_000.0:
            when_s += self.rng.exponential(4 * self.pause_s)
            self.pauses.append((when_s, when_s + self.rng.exponential(self.pause_s)))
            when_s = self.pauses[-1][1]
        self.last_arrival_s = self.retry_at_s = 0.0

    def at(self, when_s: float, what: Callable[[], object]) -> None:
        self.count += 1
        heapq.heappush(self.events, (when_s, self.count, what))

    def run(self, windows: int) -> Sender:
        end_s = self.now + windows * self.window_s
        for number in range(windows):
            self.at(self.now + number * self.window_s, lambda n=number: self._begin(n))
        for beat in range(int(windows * self.window_s / 2.0)):
            self.at(self.now + 0.5 + 2.0 * beat, self._beat)
        if self.cross_bytes_s:
            when_s = self.now
            while when_s < end_s:
                when_s += self.rng.exponential(1_252 / self.cross_bytes_s)
                self.at(when_s, lambda: self.transmit(1_252))
        while self.events and self.events[0][0] <= end_s:
            self.now, _, what = heapq.heappop(self.events)
            what()
        self.now = end_s
        return self

    def transmit(self, wire_bytes: int) -> float:
        """Hands bytes to the link, packet by packet; returns their arrival. What is dropped is sent again."""
        while wire_bytes > 0:
            size, when_s = min(wire_bytes, 1_500), self.now
            while self.up.drops(size, 1000 * when_s):
                when_s += 0.3
            self.last_arrival_s = self.up.transmit(size, 1000 * when_s) / 1000
            wire_bytes -= size
        return self.last_arrival_s

    def _answer(self, arrived_s: float, held_s: float, receive: Callable[[float, float], None]) -> None:
        noticed_s = self._noticed_s(arrived_s)
        received_s = int(1000 * (EPOCH_S + noticed_s + self.clock_s(arrived_s))) / 1000

        def send() -> None:
            back_s = self.down.transmit(66, 1000 * self.now) / 1000
            self.at(back_s, lambda: receive(received_s, held_s))

        self.at(noticed_s + held_s, send)

    def _noticed_s(self, arrived_s: float) -> float:
        """Returns when the center's process, which pauses, notices a message."""
        while self.pauses and self.pauses[0][1] < arrived_s:
            self.pauses.popleft()
        return max(arrived_s, self.pauses[0][1]) if self.pauses and self.pauses[0][0] <= arrived_s else arrived_s

    def _beat(self) -> None:
        sent_s = self.now
        self.flow.on_sent(None, 60, sent_s)
        self._answer(self.transmit(link_bytes(60)), 0.0, lambda r, h: self.flow.on_echo(sent_s, self.now, r, h))

    def _begin(self, number: int) -> None:
        self.left = self.demand(number)
        self.send()

    def send(self) -> None:
        while self.left > 0:
            room = self.flow.room_bytes(self.frame_bytes, self.now)
            if room <= 0:
                retry_s = self.flow.retry_s(self.now)
                if retry_s is not None and not self.now < self.retry_at_s < self.now + retry_s:
                    self.retry_at_s = self.now + retry_s
                    self.at(self.retry_at_s, self.send)
                return
            self._frame(int(min(room, self.left, self.frame_bytes)))

    def _frame(self, size: int) -> None:
        self.left -= size
        self.seq += 1
        seq, sent_s = self.seq, self.now
        by_s = self.flow.on_sent(seq, size, sent_s)
        arrived_s = self.transmit(link_bytes(size))
        at_center_s = EPOCH_S + arrived_s + self.clock_s(arrived_s)
        self.frames.append(Forecasted(sent_s, by_s - at_center_s + arrived_s, size, arrived_s))
        self.most_in_flight = max(self.most_in_flight, self.flow.in_flight_bytes)

        def acknowledge(received_s: float, held_s: float) -> None:
            self.flow.on_acknowledged(seq, self.now, held_s, received_s if self.states_arrivals else 0.0)
            self.send()

        self._answer(arrived_s, self.hold_s(self.rng), acknowledge)

    def calibration(self, since_s: float) -> float:
        """Returns the share of frames that arrived by the time that was stated with 90 %."""
        frames = [f for f in self.frames if f.sent_s >= since_s]
        return float(np.mean([f.arrived_s <= f.by_s for f in frames])) if frames else 1.0

    def use(self, since_s: float, until_s: float) -> float:
        """Returns the wire bytes per second that arrived."""
        return sum(link_bytes(f.size) for f in self.frames if since_s <= f.arrived_s < until_s) / (until_s - since_s)
