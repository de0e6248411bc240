"""Runs an edge whose wall clock a test can step: ``python -m tests.e2e.soak.stepped_edge OFFSET_FILE edge run CONFIG``.

OFFSET_FILE has 8 bytes, a little-endian float64: seconds that are added to the process' wall clock at every read.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path


def step_clock(offset_file: Path) -> None:
    """Makes `time.time` and `time.time_ns` of this process add the file's offset."""
    with offset_file.open("rb") as file:
        shared = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real, real_ns = time.time, time.time_ns  # noqa: TID251

    def offset_s() -> float:
        value: float = struct.unpack("<d", shared[:8])[0]
        return value

    time.time = lambda: real() + offset_s()  # noqa: TID251
    time.time_ns = lambda: real_ns() + int(offset_s() * 1e9)


if __name__ == "__main__":
    step_clock(Path(sys.argv[1]))
    sys.argv = ["edgewater", *sys.argv[2:]]
    from edgewater.__main__ import main

    main()
