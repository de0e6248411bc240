"""Tunes the Python workers of Spark."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import Pipe
from typing import TypeVar

Result = TypeVar("Result")

SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""The environment in which NumPy and Arrow start no threads. A process with threads must not fork."""

LOW_PRIORITY = 10  # limit: about a tenth of the CPU time of another process, and all that nobody wants.
_PR_SET_PDEATHSIG = 1  # format: of prctl(2)


@cache
def settle() -> None:
    """Excludes all imported objects from garbage collection, once per process.

    Spark's workers run a full collection after every task. Scanning the objects of the imported modules takes up to 0.1
    s. This is more time than merging a usual batch takes.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Ends this process (SIGXCPU) if the block takes more CPU time.

    A limit of wall time would blame the block for a machine that is busy with something else.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (before, hard))


def in_background(seconds: float, work: Callable[[], Result]) -> Result:
    """Does work in a child process of low priority, which ends with this process. Returns the result.

    A process cannot raise its priority again, and Spark's workers do the next task. Raises RuntimeError if the child
    ends without a result.

    Args:
        seconds: CPU time that the child may take.
    """
    parent, (results, to_parent) = os.getpid(), Pipe(duplex=False)
    if (child := os.fork()) == 0:
        try:
            if os.uname().sysname == "Linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                os.nice(LOW_PRIORITY)
                to_parent.send(cpu_limit(seconds)(work)())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    to_parent.close()
    try:
        with results:
            result: Result = results.recv()
    except EOFError:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        why = f"took more than {seconds:g} s of CPU" if code == -signal.SIGXCPU else f"ended with {code}"
        raise RuntimeError(f"the process of a merge {why}, and has no result") from None
    os.waitpid(child, 0)
    return result
