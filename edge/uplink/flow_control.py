"""Flow control of the uplink: the limits of bytes in flight, and the daily quota.

Bytes in flight are fixed, while values in the primary cache are still updated until they are sent. So no more is in
flight than leaves the link within `QUEUE_S` with 90 % (`edge.uplink.link_model`). A second bound holds while a bucket
may be deep: when it empties, what is in flight waits at the lower rate. So at most `SMALL_ROUND_BYTES_S` are in flight,
or what has been shown to pass at once, and a quarter more.

Pure: time is an argument, in seconds of a monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from edge.core.pull_planner import MAX_FRAME_BYTES
from edge.uplink.link_model import HIGH, IDLE_S, LOW, MID, RATES_BYTES_S, TOLERANCE_S, LinkModel, RecentLeast
from edgewater.wire.link_bytes import PACKET_HEADER_BYTES, link_bytes

QUEUE_S = 0.4  # limit: for how long values are fixed before they arrive
"""What is in flight leaves the link within this time with 90 %."""
SMALL_FRAME_BYTES = 1 << 10  # measured: bench.constants; half of it is 20 % more frames
"""A smaller frame is mostly overhead. A link without frames in flight always has room for one such frame."""
FRAME_S, MOST_LEAST_FRAME_BYTES = QUEUE_S / 2, 8 << 10
"""Behind others, a frame waits until there is room for the bytes of this time, and at most for so many."""
LEAST_IN_FLIGHT_BYTES, SMALL_ROUND_BYTES_S = 2_560, 54_000.0  # measured: bench.constants
"""The bytes in flight on an unknown link: at least the first, and this rate for a round trip and the center's disk."""
ROUND_EXTRA_S = 0.03  # measured: pytest tests/sim/wire/test_deadlines.py
"""The time of the center's disk. Without it, eight queries of four edges on one link of 4 KiB/s have errors of 9 %
instead of 7 %."""
GROWTH = 1 / 4  # measured: bench.constants; with 0, the first window of a wide link takes 5 s instead of 1 s
"""The bytes in flight may exceed the bytes that have passed at once by this fraction. If the bucket is empty then, the
delay is in proportion to the bytes that have passed."""
LATE_S = QUEUE_S / 2
"""If an arrival is later than predicted by more, the bucket was empty. Until it arrives, nothing is sent, because the
link may be gone."""
LATE_SHARE = 0.07  # measured: bench.constants; with 0.14, up to 18 % of the frames are late
GUARD_STEP_S, MOST_GUARD_S = QUEUE_S / 4, 2.0
"""The guard time is added to predictions. With each arrival it falls by `LATE_SHARE` of a step, and grows by a step if
the arrival is later still. So no larger share is late, even beside traffic that the model lacks."""
FADES = 0.9  # limit: for how long one slow acknowledgement counts
"""The longest times of acknowledgements count less with each further one."""
LEAST_RETRY_S = 0.01  # limit: processor time while waiting
UNSEEN_BYTES_S, UNSEEN_BYTES = 1e3, 4 << 10  # limit: what an unknown link gets early
"""Before so many bytes have arrived, entries of open slices leave as on a narrow link, which shows what the link is."""
STATED_RATIO, STATED_S, STATED_WINDOWS = 1.25, 10.0, 2.0  # limit: the error of a rate that is stated
"""A rate is stated if the quantiles of 10 % and 90 % agree within the first, for so many times the bytes that empty the
bucket and fill the link for `STATED_S`."""
MOST_STATED_BYTES_S = RATES_BYTES_S[-1] / 2
"""A faster link has a rate beyond the hypotheses, or the processes limit the rate."""
HORIZON_S = 1.0  # limit: for how long what a bucket has counts in a forecast
"""A forecast is what the link carries within this time, and then the rate."""
PACKING_MEMORY_BYTES = 32 << 10  # limit: for how long a message counts
"""Plain bytes after which a message counts half in the estimate of how frames are compressed."""
LEAST_PACKED_FRACTION = 1 / 16
"""A smaller fraction is not used, because the next values may be less repetitive."""
DAY_MS = 86_400_000
DAILY_RESERVATIONS = 100  # limit: writes to the disk, and what a crash costs of the quota
"""The daily quota is recorded on disk in steps of this fraction."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits and timeouts of an uplink.

    Attributes:
        bandwidth_bytes_s: limit of wire bytes per second; None: unlimited.
        heartbeat_s: interval between heartbeats.
        silence_s: a session ends if nothing arrives from the center for this long. The timeout doubles after
            each session that ended this way without an acknowledgement, so that a frame that takes longer
            than the timeout is eventually delivered.
        link: the name of the link that other edges use, too; empty: none does.
        reconnect_max_s: upper bound of the wait before a reconnect; the actual wait is random.
        goodbye_s: how long a clean stop waits for the last acknowledgements.
    """

    bandwidth_bytes_s: int | None = None
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    reconnect_max_s: float = 10.0
    goodbye_s: float = 2.0
    link: str = ""


@dataclass(frozen=True, slots=True)
class LinkForecast:
    """What the link carries from now on, in wire bytes.

    Attributes:
        low_bytes_s, path_delay_ms: with 90 %, what is sent now arrives as over a link of this rate, after this delay.
            A frame arrives when the center's clock is at this edge's clock and the delay. It is negative if a bucket
            lets bytes pass at once, or if the center's clock is behind.
        mid_bytes_s: the median of the rate.
        stated_bytes_s: the rate, if it is known; 0: it is at least `low_bytes_s`.
        delay_ms: the time until a small frame that is sent now arrives.
        rtt_ms: round trip of a heartbeat without the center's disk; 0: unknown.
        packed_fraction: as in `PackingEstimator.fraction`.
    """

    low_bytes_s: float = UNSEEN_BYTES_S
    path_delay_ms: int = 0
    mid_bytes_s: float = UNSEEN_BYTES_S
    stated_bytes_s: float = 0.0
    delay_ms: float = 0.0
    rtt_ms: float = 0.0
    packed_fraction: float = 1.0


@dataclass(frozen=True, slots=True)
class _InFlight:
    seq: int
    wire_bytes: int
    sent_at_s: float
    leaves_s: float
    was_alone: bool


class LinkFlow:
    """Limits the bytes in flight, and forecasts the link. One object for all sessions of an uplink.

    Args:
        now_ms: the edge's wall clock at the time of a call, for delays in the center's clock.
        limit_bytes_s: the configured limit. Forecasts do not exceed it.
    """

    def __init__(self, now_ms: Callable[[], int], limit_bytes_s: float = math.inf) -> None:
        self._now_ms, self._limit_bytes_s, self._share_bytes_s = now_ms, limit_bytes_s, math.inf
        self.model = LinkModel()
        self._to_center, self._from_center, self._round = RecentLeast(), RecentLeast(), RecentLeast()
        self._in_flight: deque[_InFlight] = deque()
        self._credit_bytes = 0
        self._arrived_bytes = self._agreed_bytes = 0.0
        self._burst_bytes = self._passed_at_once_bytes = 0.0
        self._rested_s = 0.0
        self._held_s, self._guard_s = 0.0, TOLERANCE_S
        self.in_flight_bytes = 0
        self.slowest_ack_s = 0.0
        """The recent maximum of the time from sending a frame to its acknowledgement."""

    def begin_session(self, credit_bytes: int) -> None:
        """Resets the bytes in flight for a new session; keeps what is known of the link."""
        self._in_flight.clear()
        self.model.begin_session()
        self._share_bytes_s = math.inf  # the center states it again
        self.in_flight_bytes = 0
        self._credit_bytes = credit_bytes

    def set_share(self, share_bytes_s: float) -> None:
        """Sets the rate that other edges leave of a link that they use, too; infinite: the link is not divided."""
        self._share_bytes_s = share_bytes_s

    @property
    def _cap_bytes_s(self) -> float:
        return min(self._limit_bytes_s, self._share_bytes_s)

    @property
    def bounds_bytes_s(self) -> tuple[float, float]:
        """The rates that the link has at least and at most, with 90 % each, whatever the limit and the share are; 0
        before the first frames."""
        if self._arrived_bytes < UNSEEN_BYTES:
            return 0.0, 0.0
        return self.model.rate_bytes_s(LOW), self.model.rate_bytes_s(HIGH)

    def set_credit(self, credit_bytes: int) -> None:
        """Sets the center's limit of bytes in flight."""
        self._credit_bytes = credit_bytes

    @property
    def rtt_ms(self) -> float:
        """The round trip without the center's disk, if heartbeats have measured it; 0 if unknown."""
        return 1000.0 * self._round_trip_s

    @property
    def most_bytes_s(self) -> float:
        """The rate that the link does not exceed with 90 %."""
        return self.model.rate_bytes_s(HIGH)

    @property
    def stated_bytes_s(self) -> float:
        """The rate of the link; 0: it is not known."""
        rate = self.model.rate_bytes_s(MID)
        enough = STATED_WINDOWS * (self.model.depth_bytes(MID) + STATED_S * rate)
        return rate if self._agreed_bytes > enough and rate < MOST_STATED_BYTES_S else 0.0

    def forecast(self, now_s: float) -> LinkForecast:
        """Forecasts the link for frames that are sent from now on."""
        soon = self.model.bytes_within(now_s, HORIZON_S, LOW, self._round_trip_s)
        low = min(self.model.rate_bytes_s(LOW), self._cap_bytes_s)
        lead_s = HORIZON_S - min(soon, self._cap_bytes_s * HORIZON_S) / low + self._guard_s
        mid = self.model.rate_bytes_s(MID) if self._arrived_bytes >= UNSEEN_BYTES else UNSEEN_BYTES_S
        mid = min(mid, self._cap_bytes_s)
        delay_s = self.rtt_ms / 2000.0
        path_s = self._one_way_s + now_s - self._now_ms() / 1000.0 if self._to_center.value is not None else delay_s
        queue_s = self.model.queue_s(now_s, MID)
        return LinkForecast(
            low, round(1000.0 * (lead_s + path_s)), mid, self.stated_bytes_s, 1000.0 * (delay_s + queue_s), self.rtt_ms
        )

    @property
    def _one_way_s(self) -> float:
        """The delay of an empty link and the difference of the clocks."""
        return self._to_center.value if self._to_center.value is not None else self._round_trip_s / 2.0

    @property
    def _round_trip_s(self) -> float:
        return self._round.value or 0.0

    def _limit_bytes(self) -> float:
        """Returns how many bytes may be unacknowledged, whatever the model predicts."""
        usual = max(LEAST_IN_FLIGHT_BYTES, SMALL_ROUND_BYTES_S * (self._round_trip_s + ROUND_EXTRA_S))
        shown, burst = self._passed_at_once_bytes, self._burst_bytes
        usual, shown = usual + GROWTH * max(shown, burst), shown - burst
        busy_s = QUEUE_S + self._round_trip_s + self._held_s
        most = max(usual, shown, busy_s * self.model.rate_bytes_s(LOW))
        return min(most, max(LEAST_IN_FLIGHT_BYTES, busy_s * self._share_bytes_s), self._credit_bytes)

    def room_bytes(self, max_frame_bytes: int, now_s: float) -> int:
        """Returns the maximum size of the next frame; 0: none may be sent now.

        There is always room for one frame if none is in flight.
        """
        limit = self._limit_bytes()
        if self._is_overdue(now_s):
            return 0
        room = self.model.bytes_within(now_s, QUEUE_S, LOW, self._round_trip_s)
        room = min(room, limit - self.in_flight_bytes, QUEUE_S * self._share_bytes_s)
        if self._in_flight and room < self._least_frame_bytes:
            return 0
        # If one frame filled the limit, the link would carry nothing while its acknowledgement returns.
        return int(min(max(SMALL_FRAME_BYTES, min(room, limit / 2)), MAX_FRAME_BYTES, max_frame_bytes))

    @property
    def _least_frame_bytes(self) -> float:
        """The least size of a frame that follows others. Smaller frames are more messages for the same bytes."""
        return min(max(SMALL_FRAME_BYTES, FRAME_S * self.model.rate_bytes_s(LOW)), MOST_LEAST_FRAME_BYTES)

    def _is_overdue(self, now_s: float) -> bool:
        due_s = LATE_S + self._round_trip_s + self._guard_s + self._held_s
        return bool(self._in_flight) and self._in_flight[0].leaves_s + due_s < now_s

    def retry_s(self, now_s: float) -> float | None:
        """Returns after which time there may be room without an acknowledgement; None: never."""
        least = self._least_frame_bytes
        if self._is_overdue(now_s) or self._limit_bytes() < self.in_flight_bytes + least:
            return None
        missing = least - self.model.bytes_within(now_s, QUEUE_S, LOW)
        return min(max(missing / self.model.rate_bytes_s(LOW), LEAST_RETRY_S), QUEUE_S)

    def on_sent(self, seq: int | None, size: int, now_s: float) -> float:
        """Records that a message of `size` bytes was sent; returns by when it arrives with 90 %, by the center's clock.

        Args:
            seq: of the last frame in it; None: a message without a frame.
        """
        is_behind = bool(self._in_flight) and now_s < self._in_flight[-1].leaves_s
        wire_bytes = link_bytes(size, is_behind=is_behind)
        self.model.sent(seq, wire_bytes, now_s)
        leaves_s = now_s + self.model.queue_s(now_s, HIGH)
        if seq is not None:
            if not self._in_flight and now_s - self._rested_s > IDLE_S:
                self._burst_bytes = 0.0
            is_alone = not self._in_flight
            self._in_flight.append(_InFlight(seq, wire_bytes, now_s, leaves_s, is_alone))
            self.in_flight_bytes += wire_bytes
        return leaves_s + self._one_way_s + self._guard_s

    def on_received(self, now_s: float) -> None:
        """Records a message from the center, which TCP acknowledges."""
        self.model.sent(None, PACKET_HEADER_BYTES, now_s)

    def on_acknowledged(self, through: int, now_s: float, held_s: float = 0.0, received_at_s: float = 0.0) -> None:
        """Records that all frames up to `through` were acknowledged.

        Args:
            held_s: the time between the arrival of frame `through` at the center and its acknowledgement.
            received_at_s: the arrival by the center's clock; 0: a center before 0.4.0 does not state it.
        """
        newest: _InFlight | None = None
        arrived = 0
        while self._in_flight and self._in_flight[0].seq <= through:
            newest = self._in_flight.popleft()
            arrived += newest.wire_bytes
        if newest is None:
            return
        self.in_flight_bytes -= arrived
        self._arrived_bytes += arrived
        self._burst_bytes += arrived
        self.slowest_ack_s = max(now_s - newest.sent_at_s, FADES * self.slowest_ack_s)
        self._held_s = max(held_s, FADES * self._held_s)
        left_s = self._add_delays(newest.sent_at_s, received_at_s, now_s - held_s, now_s, is_empty=newest.was_alone)
        self._rested_s = now_s
        is_late = left_s > newest.leaves_s + LATE_S
        is_in_time = left_s <= newest.leaves_s + self._guard_s
        step_s = GUARD_STEP_S * (0.0 if is_in_time else 1.0) - GUARD_STEP_S * LATE_SHARE
        self._guard_s = min(max(self._guard_s + step_s, TOLERANCE_S), MOST_GUARD_S)
        self._passed_at_once_bytes = 0.0 if is_late else max(self._passed_at_once_bytes, self._burst_bytes)
        if is_late:
            self._burst_bytes = 0.0
        self.model.arrived(through, left_s)
        agrees = self.model.rate_bytes_s(HIGH) <= STATED_RATIO * self.model.rate_bytes_s(LOW)
        self._agreed_bytes = self._agreed_bytes + arrived if agrees else 0.0

    def on_echo(self, sent_at_s: float, now_s: float, received_at_s: float, held_s: float) -> None:
        """Records the answer to a heartbeat.

        Args:
            sent_at_s: when the heartbeat was sent.
            received_at_s: its arrival by the center's clock.
            held_s: the time between its arrival and the center's answer.
        """
        is_empty = self._rested_s <= sent_at_s and (not self._in_flight or self._in_flight[0].sent_at_s >= sent_at_s)
        self._add_delays(sent_at_s, received_at_s, now_s - held_s, now_s, is_empty=is_empty)

    def _add_delays(
        self, sent_at_s: float, received_at_s: float, back_s: float, now_s: float, *, is_empty: bool
    ) -> float:
        """Learns the delays of an empty link from a message; returns when it left the link, by the edge's clock.

        Args:
            back_s: when the answer came back, less the time that the center took.
            is_empty: no other frame was under way. Otherwise the delay may be longer than of an empty link, for as long
                as the link is full.
        """
        self._round.add(max(back_s - sent_at_s, 0.0), now_s, is_empty=is_empty)
        if not received_at_s:
            return back_s - self._round_trip_s
        ways = (self._to_center, received_at_s - sent_at_s), (self._from_center, back_s - received_at_s)
        are_steps = [way.add(delay_s, now_s, is_empty=is_empty) for way, delay_s in ways]
        if any(are_steps):
            # A clock was set: earlier delays contain the old difference of the clocks.
            for way, delay_s in ways:
                way.clear()
                way.add(delay_s, now_s, is_empty=True)
        return received_at_s - self._one_way_s


class PackingEstimator:
    """The bytes that a session sends for a byte of frames before compression, estimated from recent messages.

    The core plans in bytes before compression, so it gets the link's capacity in these bytes. It must not depend on a
    compressor, whose output differs with the history of a session.
    """

    def __init__(self) -> None:
        self._plain_bytes = self._packed_bytes = 0.0

    def add(self, plain_bytes: int, packed_bytes: int) -> None:
        """Counts a message with frames."""
        if self._plain_bytes > PACKING_MEMORY_BYTES:
            self._plain_bytes, self._packed_bytes = self._plain_bytes / 2, self._packed_bytes / 2
        self._plain_bytes += plain_bytes
        self._packed_bytes += packed_bytes

    @property
    def fraction(self) -> float:
        """1 before the first message."""
        if not self._plain_bytes:
            return 1.0
        return min(max(self._packed_bytes / self._plain_bytes, LEAST_PACKED_FRACTION), 1.0)


class DailyQuota:
    """A limit of bytes per UTC day that survives restarts.

    The stored number is larger than the bytes sent: it is increased in steps in advance, so that not every
    message waits for the disk. After a crash the reserved bytes count as sent.

    Args:
        stored: the last stored (day, bytes), or None.
        store: stores (day, bytes). `consume` raises its exceptions before the bytes are sent.
    """

    def __init__(self, limit_bytes: int, stored: tuple[int, int] | None, store: Callable[[int, int], None]) -> None:
        self._limit = limit_bytes
        self._step = max(1, limit_bytes // DAILY_RESERVATIONS)
        self._store = store
        self._day, self._used = stored or (-1, 0)
        self._reserved = self._used

    def delay_s(self, now_ms: int) -> float:
        """Returns how long to wait before sending: until midnight, if the quota is used up."""
        self._roll_over(now_ms)
        return 0.0 if self._used < self._limit else (DAY_MS - now_ms % DAY_MS) / 1000

    def consume(self, size: int, now_ms: int) -> None:
        """Counts bytes that are about to be sent."""
        self._roll_over(now_ms)
        if self._used + size > self._reserved:
            reserved = self._used + size + self._step
            self._store(self._day, reserved)
            self._reserved = reserved
        self._used += size

    def close(self) -> None:
        """Stores the number of bytes actually sent."""
        if self._reserved > self._used:
            self._store(self._day, self._used)
            self._reserved = self._used

    def _roll_over(self, now_ms: int) -> None:
        day = now_ms // DAY_MS
        # A clock that is set back across midnight must not grant a day's quota twice. After a larger
        # correction of the clock the old day is meaningless.
        if day not in (self._day, self._day - 1):
            self._day, self._used, self._reserved = day, 0, 0
