"""A model of the link: what a token bucket behind a queue lets pass, learned from when messages arrive.

Providers and routers limit a link with a token bucket (`tc tbf`, `htb`, policers, cellular plans): up to its depth,
bytes pass at the speed of the line, the rest at the rate. So the speed of a small frame does not show the rate.
The model has a grid of hypotheses, rate × depth. Each predicts when a message leaves the link, and is weighted by how
well earlier predictions held (a clipped log-likelihood). A decision is a quantile over the hypotheses: what is sent
must arrive in time with 90 %, and an entry may wait if half of the weight says so.

With a bucket of 64 KiB and a few KB a window, 4 KiB/s and 1 MiB/s give the same arrivals. No estimator can tell these
apart, and no decision needs it: the quantiles then differ, and the rate is not stated.

Roads not taken: the largest of recent delivery rates (BBR) is the speed of the line while the bucket is full; probes at
the speed of the line (ShaperProbe) empty the bucket that a close needs.

Pure: time is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from edgewater.synopses import FloatArray

RATES_BYTES_S = np.r_[
    np.geomspace(470.0, 1e5, 201, endpoint=False),
    np.geomspace(1e5, 1e6, 58, endpoint=False),
    np.geomspace(1e6, 16e6, 36),
]
"""2.7 % apart where a wrong neighbour costs a deadline, and up to 8 % apart on wide links."""
DEPTHS_BYTES = np.concatenate(([0.0], np.geomspace(1500.0, 500e3, 12)))
TOLERANCE_S, TOLERANCE_SHARE = 0.012, 0.08
"""A prediction may be wrong by the first, and by this share of the predicted time in the queue."""
LATE_EXTRA_S = 0.02
"""A late arrival counts half as much as an early one: a process or other traffic may delay it, nothing hastens it."""
MOST_PENALTY, LEAST_LIKELIHOOD = 6.0, -14.0
"""One arrival cannot refute a hypothesis, and three can restore it: the link may have changed."""
IGNORED_LIKELIHOOD = -9.0  # limit: time of a question
"""Hypotheses below it have together less than 1 % of the weight."""
MOST_COMPARED = 256
"""More hypotheses of weight are compared in groups of neighbouring rates: then their differences do not matter."""
BASE_WINDOW_S = 60.0  # limit: how long the delay of an earlier route counts
"""The least delay of this time is the delay of an empty link."""
STEP_S = 0.05  # limit: the jitter that is no other route
"""A delay that falls by more shows that a clock has been set, or another route."""
IDLE_S = 1.0  # format: of TCP (RFC 6298, the least timeout)
FIRST_WINDOW_BYTES = 10 * 1448.0  # format: of TCP
"""After a second without data, TCP sends ten segments in the first round trip, and twice as many in each next one."""
LOW, MID, HIGH = 0.1, 0.5, 0.9  # format: what forecasts and reports of links state


class RecentLeast:
    """The least delay of the last `BASE_WINDOW_S` seconds; of the last empty link if there was none."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()  # (time, value), both ascending

    def add(self, value: float, now_s: float, *, is_empty: bool) -> bool:
        """Adds a value; returns whether it is so small that the earlier values no longer hold."""
        if self._values and value >= self._values[0][1] and not is_empty:
            return False
        is_step = bool(self._values) and value < self._values[0][1] - STEP_S
        while self._values and self._values[-1][1] >= value:
            self._values.pop()
        self._values.append((now_s, value))
        while len(self._values) > 1 and self._values[0][0] < now_s - BASE_WINDOW_S:
            self._values.popleft()
        return is_step

    def clear(self) -> None:
        self._values.clear()

    @property
    def value(self) -> float | None:
        return self._values[0][1] if self._values else None


@dataclass(slots=True)
class _Sent:
    """Bytes under way.

    Attributes:
        seq: None: bytes whose arrival nobody states.
        predicted_s: by hypothesis, the departure that was predicted when they were sent.
    """

    seq: int | None
    size: int
    at_s: float
    predicted_s: FloatArray | None = None


class LinkModel:
    """Predicts when bytes leave the link.

    A call of `sent` takes about 10 µs of a processor, of `arrived` 80 µs, and a question 10 µs.
    """

    def __init__(self) -> None:
        depths, rates = (each.ravel() for each in np.meshgrid(DEPTHS_BYTES, RATES_BYTES_S, indexing="ij"))
        self._rates, self._depths, self._s_per_byte, self._spare_s = rates, depths, 1.0 / rates, depths / rates
        # A bucket is paid until `now - spare_s` if it is full, and until `now` if it is empty. Later: bytes wait.
        # `_paid_s` is the state behind the last message that has arrived, `_end_s` behind the last one that was sent.
        self._paid_s = np.full(rates.size, -np.inf)
        self._end_s = self._paid_s.copy()
        self._scratch = np.empty(rates.size)
        self._likelihood = np.zeros(rates.size)
        self._left_s = self._sent_at_s = -np.inf
        self._under_way: deque[_Sent] = deque()
        self._regroup()

    def _regroup(self) -> None:
        """Selects the hypotheses that quantiles compare."""
        chosen = np.flatnonzero(self._likelihood > IGNORED_LIKELIHOOD)
        weights = np.exp(self._likelihood[chosen])
        step = -(-len(chosen) // MOST_COMPARED)
        if step > 1:
            weights = np.add.reduceat(weights, np.arange(0, len(chosen), step))
            chosen = chosen[np.minimum(np.arange(len(weights)) * step + step // 2, len(chosen) - 1)]
        self._chosen, self._weights = chosen, weights / weights.sum()
        self._rate_quantiles = {share: self._quantile(self._rates[chosen], share) for share in (LOW, MID, HIGH)}

    def _quantile(self, values: FloatArray, share: float) -> float:
        order = np.argsort(values)
        at = np.searchsorted(np.cumsum(self._weights[order]), share)
        return float(values[order[min(int(at), len(order) - 1)]])

    def begin_session(self) -> None:
        """Forgets the bytes under way: the connection is another one."""
        self._under_way.clear()
        np.copyto(self._paid_s, self._end_s)

    def sent(self, seq: int | None, size: int, now_s: float) -> None:
        """Notes that `size` bytes were handed to the link.

        Args:
            seq: `arrived` names it later; None: it will not, as for heartbeats and TCP's acknowledgements.
        """
        self._advance(self._end_s, size, now_s)
        if seq is not None:
            self._under_way.append(_Sent(seq, size, now_s, np.maximum(self._end_s, now_s)))
        elif not self._under_way:
            np.copyto(self._paid_s, self._end_s)
        elif self._under_way[-1].seq is None:
            self._under_way[-1].size += size
        else:
            self._under_way.append(_Sent(None, size, now_s))
        self._sent_at_s = now_s

    def _advance(self, paid_s: FloatArray, size: int, now_s: float) -> None:
        np.subtract(now_s, self._spare_s, out=self._scratch)
        np.maximum(paid_s, self._scratch, out=paid_s)
        np.multiply(self._s_per_byte, size, out=self._scratch)
        paid_s += self._scratch

    def arrived(self, through: int, left_s: float) -> None:
        """Notes that all messages up to `through` have left the link, the last one at `left_s`.

        Arrivals that are later than predicted are other traffic or a pause: the hypothesis goes on behind it. Earlier
        ones mean that the queue was shorter. Early counts against the prediction at the time of sending only: TCP joins
        small messages behind a queue, so that one seems late and the next one early.
        """
        last: _Sent | None = None
        numbers = [sent.seq for sent in self._under_way]
        for _ in range(
            max((at + 1 for at, seq in enumerate(numbers) if seq is not None and seq <= through), default=0)
        ):
            last = self._under_way.popleft()
            self._advance(self._paid_s, last.size, last.at_s)
        if last is None or last.predicted_s is None:
            return
        departure_s = np.maximum(self._paid_s, max(last.at_s, self._left_s))
        error_s = left_s - departure_s
        tolerance_s = TOLERANCE_S + TOLERANCE_SHARE * (departure_s - last.at_s)
        is_late, is_early = error_s > tolerance_s, error_s < -tolerance_s
        early_s = np.minimum(departure_s, last.predicted_s) - left_s
        late_share = error_s / (2.0 * tolerance_s + LATE_EXTRA_S)
        penalty = np.where(error_s < 0.0, np.maximum(early_s, 0.0) / tolerance_s, late_share)
        self._likelihood -= np.minimum(penalty, MOST_PENALTY)
        self._likelihood -= self._likelihood.max()
        np.maximum(self._likelihood, LEAST_LIKELIHOOD, out=self._likelihood)
        # `where=` of NumPy's functions takes ten times as long as `np.where`.
        later_s, most_s = np.where(is_late, error_s, 0.0), np.where(is_early, left_s, np.inf)
        after = sum(sent.size for sent in self._under_way)
        for paid_s, most in ((self._paid_s, most_s), (self._end_s, most_s + after * self._s_per_byte)):
            paid_s += later_s
            np.minimum(paid_s, most, out=paid_s)
        self._left_s = left_s
        self._regroup()

    def bytes_within(self, now_s: float, after_s: float, share: float, round_trip_s: float = 0.0) -> float:
        """Returns how many bytes that are sent from now on leave the link within `after_s`.

        Args:
            share: of the hypotheses' weight that says less: `LOW` for bytes that must arrive, `MID` for a forecast.
            round_trip_s: TCP's window grows once per round trip after idle time; 0: unknown.
        """
        chosen = self._chosen
        start_s = np.maximum(self._end_s[chosen], now_s - self._spare_s[chosen])
        result = max(self._quantile(self._rates[chosen] * (now_s + after_s - start_s), share), 0.0)
        if round_trip_s > 0.0 and now_s - self._sent_at_s > IDLE_S:
            rounds = 1.0 + min(after_s // round_trip_s, 40.0)
            result = min(result, FIRST_WINDOW_BYTES * (2.0**rounds - 1.0))
        return result

    def queue_s(self, now_s: float, share: float) -> float:
        """Returns how long the bytes under way still need, which with a probability of `share` is not exceeded."""
        return max(self._quantile(self._end_s[self._chosen], share) - now_s, 0.0)

    def rate_bytes_s(self, share: float) -> float:
        """Returns a quantile of the rate, which the link has when its bucket is empty: `LOW`, `MID` or `HIGH`."""
        return self._rate_quantiles[share]

    def depth_bytes(self, share: float) -> float:
        """Returns a quantile of the bucket's depth."""
        return self._quantile(self._depths[self._chosen], share)
