"""What a process keeps of memory that it has freed. Each case is a process of its own: glibc's settings are one's."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import numpy as np
from edgewater.runtime.allocator import take_less_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

if sys.argv[1] == "returns":
    take_less_memory()
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


WITHOUT_PANDAS = """
import sys
from edgewater.runtime.allocator import leave_out_pandas
leave_out_pandas()
import numpy as np
import pyarrow as pa
pa.array([1, 2]), pa.array(np.arange(2)), pa.scalar(1.5)
print("pandas" in sys.modules)
import pandas
print(pandas.__name__, pa.table({"a": [1]}).to_pandas().shape)
"""


def test_a_process_that_converts_nothing_to_pandas_does_not_import_it() -> None:
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", WITHOUT_PANDAS], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False", "pandas (1, 1)"]


START_CODE = """
from edgewater.runtime.allocator import release_start_code
import pyarrow as pa, pyarrow.compute as pc, numpy as np, grpc

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

before = resident()
release_start_code()
print(before - resident())
values = pc.sort_indices(pa.array(np.arange(1000)[::-1]).dictionary_encode().dictionary)
assert values[0].as_py() == 999 and np.linalg.inv(np.eye(3))[0, 0] == 1.0
release_start_code()
assert pc.sum(values).as_py() == 499_500 and grpc.insecure_channel("localhost:1") is not None
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_code_that_only_the_start_needs_is_given_back_and_all_of_it_still_runs() -> None:
    done = subprocess.run([sys.executable, "-c", START_CODE], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 10
