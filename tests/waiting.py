"""Waiting for other threads and processes, which tell nothing when a state is reached."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], within_s: float = 120.0, pause_s: float = 0.05) -> None:
    """Returns once the condition holds. Raises `AssertionError` after a generous time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(pause_s)
