"""Flow control of the uplink: estimates of the link, the limit of bytes in flight, and the daily quota.

Bytes in flight are fixed, while values in the primary cache are still updated until they are sent. So the limit of
bytes in flight is just enough to keep the link busy: ``1.25 × bandwidth × round trip``, as in BBR (Cardwell et al.,
CACM 60(2), 2017). The bandwidth is the windowed maximum of the delivery rate, the round trip the recent minimum. Both
are measured from acknowledgements, so they include the center's time to make a frame durable.

The extra 25 % detect a link that has become faster, but also build a queue. When the minimum expires, the queue would
count as a longer round trip, which would allow a longer queue, and so on up to the credit. So a minimum older than ten
seconds is measured again after draining the link (BBR's ProbeRTT). Frames are paced at 1.25 times the bandwidth. If all
were sent at once into an empty link, they would build that queue.

An edge on a narrow link often has less to send than the link carries, so it never fills the link. But a frame that is
sent into an empty link also shows the bandwidth. It takes longer than a heartbeat by the time that its additional bytes
take to pass. The time until the center's acknowledgement, which the acknowledgement states, is subtracted. Until the
bandwidth is known, bytes in flight start with two small frames and double per round trip (BBR's Startup).

Pure: time is an argument, in seconds of a monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edge.core import MAX_FRAME_BYTES

MIN_IN_FLIGHT_BYTES = 4 << 10
"""Bytes in flight before anything has been measured."""
IN_FLIGHT_GAIN, STARTUP_GAIN = 1.25, 2.0
STARTUP_ROUNDS, STARTUP_GROWTH = 3, 1.25
"""Startup ends when the bandwidth has not grown by this factor in this many full round trips."""
ESTIMATE_WINDOW_S = 10.0
ESTIMATE_SAMPLES = 8
"""The bandwidth is the maximum of at least this many samples, however old, because rare frames give few samples."""
ECHO_SAMPLES = 5
"""The round trip is the minimum of at least this many heartbeats: a single one may have waited behind frames."""
BASE_WINDOW_S = 60.0
"""The minimum over this time is the round trip of a heartbeat on an empty link."""
SLOW_FRAMES = 3
"""This many frames in a row must be slow before they show the bandwidth, because a busy process delays some of them,
too."""
FASTER_LINK = 1.25
"""If a frame passes this many times faster than the estimated link allows, the link is not narrow."""
MIN_TRANSIT_S = 0.05
"""A frame must take at least this much longer than a heartbeat to show the bandwidth. Other delays are shorter."""
PACING_SLACK_S = 0.002
"""Frames that are due within this time are sent together: timers have no finer resolution."""

MIN_FRAME_BYTES = 8 << 10
LEAST_FRAMES_IN_FLIGHT = 4
"""The limit of bytes in flight allows at least this many frames, unless frames are small."""
UNKNOWN_IN_FLIGHT_S, MAX_UNKNOWN_IN_FLIGHT_BYTES = 1.0, 64 << 10
"""If frames have passed without showing the bandwidth, this much may be in flight: the bytes that the link has been
shown to carry in this time, limited by the second number. A frame of a few bytes passes quickly on a narrow link, too.
"""
SMALLEST_FRAME_BYTES, SMALL_FRAME_S = 1 << 10, 0.25
"""A small frame has `MIN_FRAME_BYTES`. On a narrow link it has the bytes that the link carries in `SMALL_FRAME_S`."""
PACKING_MEMORY_BYTES = 32 << 10
"""Plain bytes after which a message counts half in the estimate of how frames are compressed."""
LEAST_PACKED_FRACTION = 1 / 16
"""A smaller fraction is not used, because the next values may be less repetitive."""
LARGE_FRAME_S = 0.5
"""A frame that takes longer is a frame of closed slices (`edge.core`). The next frame must not wait until it has
passed."""
DAY_MS = 86_400_000
DAILY_RESERVATIONS = 100
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
        reconnect_max_s: upper bound of the wait before a reconnect; the actual wait is random.
        goodbye_s: how long a clean stop waits for the last acknowledgements.
    """

    bandwidth_bytes_s: int | None = None
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    reconnect_max_s: float = 10.0
    goodbye_s: float = 2.0


class WindowedExtreme:
    """The largest (or smallest) of the recent samples.

    Recent are the samples of the last `window_s` seconds, and the last `least` samples even if they are older.
    """

    def __init__(self, which: Literal["max", "min"], window_s: float = ESTIMATE_WINDOW_S, least: int = 1) -> None:
        self._sign = 1.0 if which == "max" else -1.0
        self._window_s, self._least, self._count = window_s, least, 0
        # (time, number, value). Times ascend and values become less extreme. When the first sample expires, the next
        # one is the extreme.
        self._samples: deque[tuple[float, int, float]] = deque()

    def add(self, value: float, now_s: float) -> None:
        while self._samples and self._sign * self._samples[-1][2] <= self._sign * value:
            self._samples.pop()
        self._samples.append((now_s, self._count, value))
        self._count += 1
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        while (
            len(self._samples) > 1
            and self._samples[0][0] < now_s - self._window_s
            and self._count - self._samples[0][1] > self._least
        ):
            self._samples.popleft()

    @property
    def value(self) -> float | None:
        return self._samples[0][2] if self._samples else None


@dataclass(frozen=True, slots=True)
class _Sent:
    """A frame in flight, with the delivery state when it was sent."""

    seq: int
    wire_bytes: int
    sent_at_s: float
    delivered_bytes: int
    delivered_at_s: float
    in_flight_bytes: int
    link_was_full: bool


class LinkEstimator:
    """Estimates bandwidth and round trip, and limits the bytes in flight. One object for all sessions of an uplink."""

    def __init__(self) -> None:
        self._bandwidth = WindowedExtreme("max", least=ESTIMATE_SAMPLES)
        self._is_known = False
        self._at_least = WindowedExtreme("max", least=ESTIMATE_SAMPLES)
        self._transit = WindowedExtreme("max", least=ESTIMATE_SAMPLES)
        self._slow_frames = 0
        self._startup_best_bytes_s, self._startup_rounds, self._round_ends_bytes = 0.0, 0, 0
        self._rtt_s: float | None = None
        self._rtt_at_s = 0.0
        self._draining = False
        self._slowest_ack = WindowedExtreme("max")
        self._echo_rtt = WindowedExtreme("min", least=ECHO_SAMPLES)
        self._base = WindowedExtreme("min", BASE_WINDOW_S)
        self._echo_bytes = 0
        self._in_flight: deque[_Sent] = deque()
        self._delivered_bytes = 0
        self._delivered_at_s = 0.0
        self._credit_bytes = MIN_IN_FLIGHT_BYTES
        self._paced_until_s = 0.0
        self.in_flight_bytes = 0

    def begin_session(self, credit_bytes: int) -> None:
        """Resets the bytes in flight for a new session; keeps the estimates."""
        self._in_flight.clear()
        self.in_flight_bytes = 0
        self._credit_bytes = credit_bytes

    def set_credit(self, credit_bytes: int) -> None:
        """Sets the center's limit of bytes in flight."""
        self._credit_bytes = credit_bytes

    @property
    def bandwidth_bytes_s(self) -> float:
        """The recent maximum of the delivery rate; 0 before the first acknowledgement."""
        return self._bandwidth.value or 0.0

    @property
    def capacity_bytes_s(self) -> float:
        """`bandwidth_bytes_s`, if the link was full or a frame has shown its bandwidth; 0: unknown."""
        return self.bandwidth_bytes_s if self._is_known else 0.0

    @property
    def least_bytes_s(self) -> float:
        """A lower bound of the link's bandwidth that frames have shown, while `capacity_bytes_s` is unknown; 0: no
        bound.
        """
        return (self._at_least.value or 0.0) if not self._is_known else 0.0

    @property
    def rtt_ms(self) -> float:
        """The round trip without the center's disk, if heartbeats have measured it, else with it; 0 if unknown."""
        value = self._echo_rtt.value if self._echo_rtt.value is not None else self._rtt_s
        return (value or 0.0) * 1000

    @property
    def slowest_ack_s(self) -> float:
        """The recent maximum of the time from sending a frame to its acknowledgement."""
        return self._slowest_ack.value or 0.0

    @property
    def in_flight_limit_bytes(self) -> int:
        """The limit of bytes in flight."""
        gain, small = IN_FLIGHT_GAIN if self._is_known else STARTUP_GAIN, self._small_frame_bytes
        if self._draining:
            return min(self._credit_bytes, small)
        target = int(gain * self.bandwidth_bytes_s * (self._rtt_s or 0.0))
        if not self._is_known and self._at_least.value is not None:
            target = max(target, min(int(UNKNOWN_IN_FLIGHT_S * self._at_least.value), MAX_UNKNOWN_IN_FLIGHT_BYTES))
        # The frame that is being sent is added to the bytes that keep the link busy until it arrives.
        newest = self._in_flight[-1].wire_bytes if self._in_flight and self._is_known else 0
        sending = newest if newest > LARGE_FRAME_S * self.bandwidth_bytes_s else small
        return min(self._credit_bytes, sending + max(small, target))

    @property
    def _small_frame_bytes(self) -> int:
        """The size below which a frame is mostly overhead. A frame of this size delays later frames little."""
        if not self._is_known:
            return min(
                max(MIN_IN_FLIGHT_BYTES // 2, int(SMALL_FRAME_S * (self._at_least.value or 0.0))), MIN_FRAME_BYTES
            )
        return min(max(SMALLEST_FRAME_BYTES, int(SMALL_FRAME_S * self.bandwidth_bytes_s)), MIN_FRAME_BYTES)

    def room_bytes(self, max_frame_bytes: int) -> int:
        """Returns the maximum size of the next frame; 0: none may be sent now.

        An empty link always has room for one frame. A frame is at most as large as the link delivers in a second, so
        that it does not delay the fresher values of the next frame.
        """
        room, small = self.in_flight_limit_bytes - self.in_flight_bytes, self._small_frame_bytes
        if self._in_flight and room < small:
            return 0
        # If one frame filled the limit, the link would carry nothing while its acknowledgement returns.
        is_wide = not self._is_known and self._at_least.value is not None
        several = self.in_flight_limit_bytes // (1 if is_wide else LEAST_FRAMES_IN_FLIGHT)
        one_second = int(self.bandwidth_bytes_s) or MAX_FRAME_BYTES
        return min(max(small, min(room, several, one_second)), MAX_FRAME_BYTES, max_frame_bytes)

    def delay_s(self, now_s: float) -> float:
        """Returns how long to wait before the next frame, for pacing."""
        delay = self._paced_until_s - now_s
        return delay if delay > PACING_SLACK_S else 0.0

    def on_sent(self, seq: int, wire_bytes: int, now_s: float) -> None:
        """Records that a frame was sent."""
        if not self._in_flight:
            self._delivered_at_s = now_s  # the link was idle until now, which must not lower the delivery rate
        if self._rtt_s is not None:
            gain = IN_FLIGHT_GAIN if self._is_known else STARTUP_GAIN
            # Until the bandwidth is known, the pace must allow the whole limit of bytes in flight.
            least = 2 * self._small_frame_bytes if self._is_known else self.in_flight_limit_bytes
            rate = gain * max(self.bandwidth_bytes_s, least / self._rtt_s)
            self._paced_until_s = max(self._paced_until_s, now_s) + wire_bytes / rate
        self.in_flight_bytes += wire_bytes
        full = self.in_flight_bytes + self._small_frame_bytes > self.in_flight_limit_bytes
        self._in_flight.append(
            _Sent(seq, wire_bytes, now_s, self._delivered_bytes, self._delivered_at_s, self.in_flight_bytes, full)
        )

    def on_acknowledged(self, through: int, now_s: float, held_s: float = 0.0) -> None:
        """Records that all frames up to `through` were acknowledged.

        Args:
            held_s: the time between the arrival of frame `through` at the center and its acknowledgement.
        """
        newest: _Sent | None = None
        while self._in_flight and self._in_flight[0].seq <= through:
            newest = self._in_flight.popleft()
            self.in_flight_bytes -= newest.wire_bytes
            self._delivered_bytes += newest.wire_bytes
        if newest is None:
            return
        rtt_s = max(now_s - newest.sent_at_s, 1e-6)
        # A frame larger than a small one also shows the round trip, less the time that its other bytes take to pass.
        is_alone = self._is_known and newest.in_flight_bytes == newest.wire_bytes
        more_bytes = max(newest.wire_bytes - self._small_frame_bytes, 0) if is_alone else 0
        less_s = more_bytes / max(self.bandwidth_bytes_s, 1.0)
        self._update_rtt(max(rtt_s - less_s, 1e-6), newest.in_flight_bytes - more_bytes, now_s)
        self._slowest_ack.add(rtt_s, now_s)
        rate = (self._delivered_bytes - newest.delivered_bytes) / max(now_s - newest.delivered_at_s, 1e-6)
        # The delivery rate of a link that was not full is limited by the sender, not by the link.
        if newest.link_was_full or rate > self.bandwidth_bytes_s:
            self._bandwidth.add(rate, now_s)
        if newest.in_flight_bytes == newest.wire_bytes:
            self._learn_from_transit(newest.wire_bytes, rtt_s - held_s, now_s)
        if newest.link_was_full and not self._is_known:
            self._end_round(newest.delivered_bytes)
        self._delivered_at_s = now_s

    def _learn_from_transit(self, wire_bytes: int, rtt_s: float, now_s: float) -> None:
        """Estimates the bandwidth from a frame that was sent into an empty link."""
        base_s, more_bytes = self._base.value, wire_bytes - self._echo_bytes
        if base_s is None or more_bytes <= 0:
            return
        if rtt_s - base_s >= MIN_TRANSIT_S:
            self._slow_frames += 1
            self._transit.add(more_bytes / (rtt_s - base_s), now_s)
            if self._slow_frames >= SLOW_FRAMES:
                self._bandwidth.add(self._transit.value or 0.0, now_s)
                self._is_known = True
        else:
            self._slow_frames = 0
            self._at_least.add(more_bytes / MIN_TRANSIT_S, now_s)
            if (self._at_least.value or 0.0) > FASTER_LINK * self.bandwidth_bytes_s:
                self._is_known = False  # a pause of a process looked like a narrow link

    def _end_round(self, delivered_bytes: int) -> None:
        """Ends Startup when the bandwidth has stopped growing.

        Args:
            delivered_bytes: bytes that had been delivered when the acknowledged frame was sent.
        """
        if delivered_bytes < self._round_ends_bytes:
            return
        self._round_ends_bytes = self._delivered_bytes
        if self.bandwidth_bytes_s >= STARTUP_GROWTH * self._startup_best_bytes_s:
            self._startup_best_bytes_s, self._startup_rounds = self.bandwidth_bytes_s, 0
        else:
            self._startup_rounds += 1
            self._is_known = self._startup_rounds >= STARTUP_ROUNDS

    def _update_rtt(self, rtt_s: float, in_flight_bytes: int, now_s: float) -> None:
        drained = self._draining and in_flight_bytes <= self._small_frame_bytes
        if self._rtt_s is None or rtt_s <= self._rtt_s or drained:
            self._rtt_s, self._rtt_at_s, self._draining = rtt_s, now_s, False
        elif now_s - self._rtt_at_s > ESTIMATE_WINDOW_S:
            self._draining = True

    def on_echo(self, rtt_s: float, now_s: float, wire_bytes: int = 0) -> None:
        """Records the round trip of a heartbeat of `wire_bytes`, less the time between its arrival and the center's
        answer.
        """
        self._echo_rtt.add(max(rtt_s, 0.0), now_s)
        self._base.add(max(rtt_s, 0.0), now_s)
        self._echo_bytes = wire_bytes


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
