"""The wall clock of processes. Cores and components get the time as an argument."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Returns the wall time of the system's clock, in ms since the epoch. The clock may step."""
    return int(time.time() * 1000)  # noqa: TID251
