"""The agent's wall clock. Cores take the time as an argument. Only the shell reads this clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

CLOCK_STEP_S = 1.0  # limit: the skew of a clock that is not reported
"""In seconds. If the offset of the wall clock from the elapsed time changes by more than this, the change is a step."""
CLOCK_STEP_CONFIRMED_S = 60.0  # limit: reports of a step that is taken back
"""A step takes effect when the wall clock has kept it for this long, in seconds."""


class WallClock:
    """The wall clock with delayed steps: it follows the system's clock while that clock advances steadily.

    Watermarks never go back. Suppose a clock is set forward by mistake and corrected later. If watermarks had followed
    it, all records in between would be late. So a step takes effect only when it has lasted `CLOCK_STEP_CONFIRMED_S`.
    Until then, the time advances with the monotonic clock. Slewing, as by NTP, takes effect at once.

    Args:
        wall: returns the system's clock, seconds since the epoch, UTC.
        elapsed: returns the seconds since an arbitrary time, including the time in which the machine was suspended.
    """

    def __init__(self, wall: Callable[[], float], elapsed: Callable[[], float]) -> None:
        self._wall, self._elapsed = wall, elapsed
        self._offset_s = wall() - elapsed()
        self._step: tuple[float, float] | None = None  # the offset after a step, and when it was first seen

    def __call__(self) -> int:
        """Returns milliseconds since the epoch, UTC."""
        elapsed_s = self._elapsed()
        offset_s = self._wall() - elapsed_s
        if abs(offset_s - self._offset_s) <= CLOCK_STEP_S:
            if self._step is not None:
                log.warning("the system's clock was set back; the agent has not followed its step")
            self._offset_s, self._step = offset_s, None
        elif self._step is None or abs(offset_s - self._step[0]) > CLOCK_STEP_S:
            self._step = offset_s, elapsed_s
            log.warning(
                "the system's clock was set by %+.1f s; the agent follows if the clock keeps this step for %.0f s",
                offset_s - self._offset_s,
                CLOCK_STEP_CONFIRMED_S,
            )
        elif elapsed_s - self._step[1] >= CLOCK_STEP_CONFIRMED_S:
            log.warning("the system's clock has kept its step of %+.1f s; the agent follows", offset_s - self._offset_s)
            self._offset_s, self._step = offset_s, None
        return int((self._offset_s + elapsed_s) * 1000)

    @property
    def step_s(self) -> float:
        """The step of the system's clock that has not taken effect yet, in seconds; 0 if there is none."""
        return 0.0 if self._step is None else self._step[0] - self._offset_s


def _elapsed_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


now_ms = WallClock(time.time, _elapsed_s)  # noqa: TID251
