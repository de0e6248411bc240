"""The wall clock of processes. Cores and components get the time as an argument."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Returns the system's wall clock, ms since the epoch. It may step."""
    return int(time.time() * 1000)  # noqa: TID251
