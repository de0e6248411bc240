"""What a process keeps of memory that it has freed. Each case is a process of its own: glibc's settings are one's."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import numpy as np
from edgewater.allocator import return_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

if sys.argv[1] == "returns":
    return_large_blocks()
before = resident()
del_later = bytearray(30 << 20)
del del_later  # glibc: blocks up to this size are taken from the heap from now on
kept = []
for _ in range(20):
    frame = bytearray(4 << 20)
    kept.append(frame)
    kept.append(bytearray(64 << 10))  # behind it
kept = kept[1::2]
del frame
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other rules")
@pytest.mark.parametrize(("allocator", "least_mib", "most_mib"), [("default", 60, 1000), ("returns", -1000, 15)])
def test_small_blocks_behind_large_ones_do_not_keep_these_resident(
    allocator: str, least_mib: int, most_mib: int
) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, allocator], capture_output=True, text=True, check=True)
    assert least_mib <= int(done.stdout) <= most_mib
