"""The wall clock of the edge. The cores take time as an argument; only the shell comes here."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return int(time.time() * 1000)  # noqa: TID251
