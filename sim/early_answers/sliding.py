"""Sliding windows over a workload: its windows are the steps."""

from __future__ import annotations

from collections import deque

import numpy as np

from edgewater.errors import InvalidConfig
from sim.early_answers.workload import Events, Workload


class SlidingWorkload:
    """Windows of several of another workload's, one beginning with each of them.

    Args:
        steps: of tumbling windows, which become the steps. All but the last few begin a window.
        window_ms: a multiple of their length.
    """

    def __init__(self, steps: Workload, window_ms: int) -> None:
        if steps.step_ms != steps.window_ms or window_ms % steps.window_ms:
            raise InvalidConfig("--every", steps.window_ms, f"a divisor of the window, {window_ms} ms")
        self._steps, self._per_window = steps, window_ms // steps.window_ms
        self.sources, self.groups = steps.sources, steps.groups
        self.window_ms, self.step_ms = window_ms, steps.window_ms
        self.windows = steps.windows - self._per_window + 1
        if self.windows < 1 or steps.restarts_before(1):
            raise InvalidConfig("--every", steps.window_ms, "steps of which a window can be made, and no cold starts")
        self._made: deque[Events] = deque(maxlen=self._per_window)
        self._next = 0

    def step(self, index: int) -> Events:
        """Made once each, as sources go on where they were; what lies further back than a window is gone."""
        while self._next <= index:
            self._made.append(self._steps.window(self._next))
            self._next += 1
        return self._made[index - self._next]

    def window(self, index: int) -> Events:
        last = self.step(index + self._per_window - 1)
        each = [*(self.step(i) for i in range(index, index + self._per_window - 1)), last]
        columns = zip(*((e.source, e.event_ms, e.delay_ms, e.value, e.group, e.mark) for e in each), strict=True)
        return Events(*(np.concatenate(column) for column in columns))

    def restarts_before(self, index: int) -> bool:
        return False
