"""The link as measured: how fast it delivers, how long it takes, and so how much may be in flight.

What is in flight cannot be improved any more, while what still lies in the primary cache can: a newer
value replaces an older one there. So just enough is put on the way to keep the link busy, ``1.25 ×
bandwidth × round trip`` as in BBR (Cardwell et al., CACM 60(2), 2017): bandwidth is the windowed maximum
of the delivery rate, the round trip the least of late, both seen from acknowledgements, so a center
that takes its time to make a frame durable is part of the link. The 25 % over it find out whether the
link has become faster. They also stand in a queue, which would pass for a longer round trip once the
least has grown old, and so allow a longer queue, and so on up to the credit; therefore a least that is
older than ten seconds is measured anew with the link drained first (BBR's ProbeRTT). Into an empty link
frames leave paced, at 1.25 times its bandwidth: at once they would stand in the very queue avoided here.

Pure: time is an argument, in seconds of a monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MIN_IN_FLIGHT_BYTES = 64 << 10
IN_FLIGHT_GAIN = 1.25
ESTIMATE_WINDOW_S = 10.0
PACING_SLACK_S = 0.002
"""Frames that are due within this leave together: timers are no finer."""

MIN_FRAME_BYTES = 8 << 10
MAX_FRAME_BYTES = 256 << 10
DAY_MS = 86_400_000
DAILY_PIECES = 100


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """What an uplink keeps to.

    Attributes:
        bandwidth_bytes_s: cap of wire bytes per second; None: none.
        heartbeat_s: time between heartbeats.
        silence_s: a session on which nothing comes from the center for so long is given up. Twice as
            long after each session that ended so without an acknowledgement, so that a link on which
            one frame takes longer than that gets its frame through in the end.
        reconnect_max_s: the longest wait before connecting again; the actual one is random below it.
        goodbye_s: how long a clean stop waits for the last acknowledgements.
    """

    bandwidth_bytes_s: int | None = None
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    reconnect_max_s: float = 10.0
    goodbye_s: float = 2.0


class WindowedExtreme:
    """The largest (or smallest) of the samples of the last `window_s` seconds; the last one if none is so new."""

    def __init__(self, which: Literal["max", "min"], window_s: float = ESTIMATE_WINDOW_S) -> None:
        self._sign = 1.0 if which == "max" else -1.0
        self._window_s = window_s
        # Times ascend and values get worse: all but the first are candidates for when it expires.
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, value: float, now_s: float) -> None:
        while self._samples and self._sign * self._samples[-1][1] <= self._sign * value:
            self._samples.pop()
        self._samples.append((now_s, value))
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        while len(self._samples) > 1 and self._samples[0][0] < now_s - self._window_s:
            self._samples.popleft()

    @property
    def value(self) -> float | None:
        return self._samples[0][1] if self._samples else None


@dataclass(frozen=True, slots=True)
class _Sent:
    """A frame in flight, with the state of delivery when it left."""

    seq: int
    wire_bytes: int
    sent_at_s: float
    delivered_bytes: int
    delivered_at_s: float
    in_flight_bytes: int
    link_was_full: bool


class Link:
    """Estimates, and the bound of what may be in flight. One object for all sessions of an uplink."""

    def __init__(self) -> None:
        self._bandwidth = WindowedExtreme("max")
        self._was_full = False
        self._rtt_s: float | None = None
        self._rtt_at_s = 0.0
        self._draining = False
        self._slowest_ack = WindowedExtreme("max")
        self._echo_rtt = WindowedExtreme("min")
        self._in_flight: deque[_Sent] = deque()
        self._delivered_bytes = 0
        self._delivered_at_s = 0.0
        self._credit_bytes = MIN_IN_FLIGHT_BYTES
        self._paced_until_s = 0.0
        self.in_flight_bytes = 0

    def begin(self, credit_bytes: int) -> None:
        """A new session: nothing is in flight; what was measured stays."""
        self._in_flight.clear()
        self.in_flight_bytes = 0
        self._credit_bytes = credit_bytes

    def credit(self, credit_bytes: int) -> None:
        """The center's bound of what may be in flight, replacing the earlier one."""
        self._credit_bytes = credit_bytes

    @property
    def bandwidth_bytes_s(self) -> float:
        """Bytes per second delivered, at best, of late; 0 as long as nothing has been."""
        return self._bandwidth.value or 0.0

    @property
    def capacity_bytes_s(self) -> float:
        """`bandwidth_bytes_s` once the link has been filled; before, 0: how much more it can carry is unknown."""
        return self.bandwidth_bytes_s if self._was_full else 0.0

    @property
    def rtt_ms(self) -> float:
        """The way to the center and back, without its disk, as far as that is known; 0 if nothing is."""
        value = self._echo_rtt.value if self._echo_rtt.value is not None else self._rtt_s
        return (value or 0.0) * 1000

    @property
    def slowest_ack_s(self) -> float:
        """The longest that an acknowledgement has taken of late."""
        return self._slowest_ack.value or 0.0

    @property
    def bound_bytes(self) -> int:
        """How much may be in flight."""
        on_the_way = 0.0 if self._draining else IN_FLIGHT_GAIN * self.bandwidth_bytes_s * (self._rtt_s or 0.0)
        return min(self._credit_bytes, max(MIN_IN_FLIGHT_BYTES, int(on_the_way)))

    def room_bytes(self, max_frame_bytes: int) -> int:
        """Bytes that the next frame may have; 0: none may be sent now.

        An empty link always has room for one frame, whatever the bound. A frame is kept below what the
        link delivers in a second, so that it does not stand in the way of the next one's fresher values.
        """
        room = self.bound_bytes - self.in_flight_bytes
        if self._in_flight and room < MIN_FRAME_BYTES:
            return 0
        a_second = int(self.bandwidth_bytes_s) or MAX_FRAME_BYTES
        return min(max(MIN_FRAME_BYTES, min(room, a_second)), MAX_FRAME_BYTES, max_frame_bytes)

    def delay_s(self, now_s: float) -> float:
        """How long to wait before the next frame, so that frames do not leave faster than the link takes them."""
        delay = self._paced_until_s - now_s
        return delay if delay > PACING_SLACK_S else 0.0

    def sent(self, seq: int, wire_bytes: int, now_s: float) -> None:
        """A frame has left."""
        if not self._in_flight:
            self._delivered_at_s = now_s  # The link was idle: time before this says nothing of its rate.
        if self._rtt_s is not None:
            rate = IN_FLIGHT_GAIN * max(self.bandwidth_bytes_s, MIN_IN_FLIGHT_BYTES / self._rtt_s)
            self._paced_until_s = max(self._paced_until_s, now_s) + wire_bytes / rate
        self.in_flight_bytes += wire_bytes
        full = self.in_flight_bytes + MIN_FRAME_BYTES > self.bound_bytes
        self._in_flight.append(
            _Sent(seq, wire_bytes, now_s, self._delivered_bytes, self._delivered_at_s, self.in_flight_bytes, full)
        )

    def acknowledged(self, through: int, now_s: float) -> None:
        """Everything up to `through` has arrived."""
        newest: _Sent | None = None
        while self._in_flight and self._in_flight[0].seq <= through:
            newest = self._in_flight.popleft()
            self.in_flight_bytes -= newest.wire_bytes
            self._delivered_bytes += newest.wire_bytes
        if newest is None:
            return
        rtt_s = max(now_s - newest.sent_at_s, 1e-6)
        self._note_rtt(rtt_s, newest.in_flight_bytes, now_s)
        self._slowest_ack.add(rtt_s, now_s)
        rate = (self._delivered_bytes - newest.delivered_bytes) / max(now_s - newest.delivered_at_s, 1e-6)
        # A link that was not kept busy shows how much there was to send, not how much it can carry.
        if newest.link_was_full or rate > self.bandwidth_bytes_s:
            self._bandwidth.add(rate, now_s)
        self._was_full |= newest.link_was_full
        self._delivered_at_s = now_s

    def _note_rtt(self, rtt_s: float, in_flight_bytes: int, now_s: float) -> None:
        drained = self._draining and in_flight_bytes <= MIN_IN_FLIGHT_BYTES
        if self._rtt_s is None or rtt_s <= self._rtt_s or drained:
            self._rtt_s, self._rtt_at_s, self._draining = rtt_s, now_s, False
        elif now_s - self._rtt_at_s > ESTIMATE_WINDOW_S:
            self._draining = True

    def echoed(self, rtt_s: float, now_s: float) -> None:
        """A heartbeat's echo is back, `rtt_s` after it left, the center's own time taken off."""
        self._echo_rtt.add(max(rtt_s, 0.0), now_s)


class TokenBucket:
    """A cap of bytes per second: over any time t at most ``rate × t`` bytes and one message are sent.

    A message may leave once those before it are paid for, whatever its own size, and what was not used is
    not saved up.
    """

    def __init__(self, rate_bytes_s: int, now_s: float) -> None:
        self._rate = rate_bytes_s
        self._paid_at_s = now_s

    def delay_s(self, now_s: float) -> float:
        """How long to wait before sending."""
        return max(0.0, self._paid_at_s - now_s)

    def spend(self, size: int, now_s: float) -> None:
        self._paid_at_s = max(self._paid_at_s, now_s) + size / self._rate


class DailyCap:
    """A cap of bytes per UTC day, which a restart does not forget.

    What is kept is a little more than what was sent: a piece is written down ahead, so that not every
    message waits for the disk. After a crash the piece counts as sent.

    Args:
        kept: (day, bytes) as `keep` was told last, or None.
        keep: writes (day, bytes) down; what it raises, `spend` raises before the bytes have left.
    """

    def __init__(self, limit_bytes: int, kept: tuple[int, int] | None, keep: Callable[[int, int], None]) -> None:
        self._limit = limit_bytes
        self._piece = max(1, limit_bytes // DAILY_PIECES)
        self._keep = keep
        self._day, self._spent = kept or (-1, 0)
        self._kept = self._spent

    def delay_s(self, now_ms: int) -> float:
        """How long to wait before sending: until midnight, once the day's bytes are spent."""
        self._turn(now_ms)
        return 0.0 if self._spent < self._limit else (DAY_MS - now_ms % DAY_MS) / 1000

    def spend(self, size: int, now_ms: int) -> None:
        """Counts bytes that are about to leave."""
        self._turn(now_ms)
        if self._spent + size > self._kept:
            kept = self._spent + size + self._piece
            self._keep(self._day, kept)
            self._kept = kept
        self._spent += size

    def close(self) -> None:
        """Writes down what was really sent."""
        if self._kept > self._spent:
            self._keep(self._day, self._spent)
            self._kept = self._spent

    def _turn(self, now_ms: int) -> None:
        day = now_ms // DAY_MS
        # A clock that is set back over midnight must not give a day's bytes a second time. One that was
        # wrong by more says nothing of what was sent when.
        if day not in (self._day, self._day - 1):
            self._day, self._spent, self._kept = day, 0, 0
