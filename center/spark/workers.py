"""Tunes the Python workers of Spark."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import Pipe
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
P = ParamSpec("P")

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


def in_background(work: Callable[P, Result], *args: P.args, **options: P.kwargs) -> Result:
    """Does work in a child process of low priority, which ends with this process. Returns the result.

    A process cannot raise its priority again, and Spark's workers do the next task. Raises RuntimeError if the child
    ends without a result.
    """
    parent, (results, to_parent) = os.getpid(), Pipe(duplex=False)
    if (child := os.fork()) == 0:
        try:
            if os.uname().sysname == "Linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                os.nice(LOW_PRIORITY)
                to_parent.send(work(*args, **options))
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
        raise RuntimeError(f"the process of a merge ended with {code} and without a result") from None
    os.waitpid(child, 0)
    return result
