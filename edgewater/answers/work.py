"""`Work`: the budget of one request. Reads, evaluations and formats of answers spend from it, and check it.

The budget of a thread is a context variable. So no function passes it on, and no loop over answers can lack it: stores
spend the bytes that they read, and each evaluation spends its cells. Outside a request, spending does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from edgewater.base.errors import ClientGone, Overspent

TURN_S = 0.02  # limit: how long other threads wait


class WorkEnded(BaseException):
    """Ends the work of a request. It is no `Exception`, because code that goes on after a failure must not catch it.

    Attributes:
        error: why the work ends. `Work.running` raises it.
    """

    def __init__(self, error: Overspent | ClientGone) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """What one request may spend.

    Attributes:
        cpu_s: CPU of its threads.
        cells: values that are evaluated, each with its bounds, or written.
        nbytes: bytes of stored synopses.
        less: what a request should ask for instead.
    """

    cpu_s: float = 5.0
    cells: int = 2_000_000
    nbytes: int = 512 << 20
    less: str = "fewer windows, groups or measures"


class Turns(Protocol):
    """Lets one of several requests work at a time."""

    def take(self) -> None:
        """Waits for a turn."""

    def give(self) -> None:
        """Ends the turn."""


class Work:
    """The work of one request. One thread at a time runs it.

    Args:
        cpu_s: returns the CPU time of the calling thread.
        clock_s: returns the seconds of a monotonic clock.
        is_gone: returns whether the client has left.
        turns: the requests that work in turns, each for `TURN_S` at a time.
    """

    def __init__(
        self,
        limits: WorkLimits,
        cpu_s: Callable[[], float],
        clock_s: Callable[[], float],
        is_gone: Callable[[], bool],
        turns: Turns,
    ) -> None:
        self._limits, self._cpu_s, self._clock_s, self._is_gone = limits, cpu_s, clock_s, is_gone
        self._turns, self._turn_ends_s = turns, 0.0
        self._cells = self._nbytes = 0
        self._left_s, self._since_s = self._limits.cpu_s, self._cpu_s()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets the calling thread work in turns, and spend from this budget, while entered.

        Raises:
            Overspent, ClientGone: the work has ended before its result.
        """
        token = _WORK.set(self)
        self._take()
        self._since_s = self._cpu_s()
        try:
            yield
        except WorkEnded as end:
            raise end.error from None
        finally:
            self._left_s -= self._cpu_s() - self._since_s
            self._turns.give()
            _WORK.reset(token)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._turns.give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._turns.take()
        self._turn_ends_s = self._clock_s() + TURN_S

    def require_client(self) -> None:
        if self._is_gone():
            raise WorkEnded(ClientGone("the client has gone"))

    def spend(self, cells: int = 0, nbytes: int = 0) -> None:
        """Counts work before it is done. Raises WorkEnded."""
        self._cells += cells
        self._nbytes += nbytes
        if self._clock_s() >= self._turn_ends_s:
            self._turns.give()
            self._take()
        self.require_client()
        limits = self._limits
        for needs, most, text in (
            (self._cells, limits.cells, f"{limits.cells:,} values"),
            (self._nbytes, limits.nbytes, f"{limits.nbytes >> 20} MiB of stored data"),
            (self._cpu_s() - self._since_s, self._left_s, f"{limits.cpu_s:g} s of CPU"),
        ):
            if needs > most:
                raise WorkEnded(Overspent(f"the request needs more than {text}; ask for {limits.less}"))


_WORK: ContextVar[Work | None] = ContextVar("work", default=None)


def spend(cells: int = 0, nbytes: int = 0) -> None:
    """Counts work of the request that the calling thread answers, before it is done; nothing outside a request.

    Args:
        cells: values that are evaluated or written; 0: only look at the CPU, and at the client.
        nbytes: bytes of stored synopses.

    Raises:
        WorkEnded: the request has spent its budget, or its client has gone.
    """
    work = _WORK.get()
    if work is not None:
        work.spend(cells, nbytes)


def require_client() -> None:
    """Raises WorkEnded if the client of the request has gone. For threads that wait."""
    work = _WORK.get()
    if work is not None:
        work.require_client()


def waiting() -> AbstractContextManager[None]:
    """Lets other requests work while entered, because the calling thread waits for another process."""
    work = _WORK.get()
    return nullcontext() if work is None else work.waiting()
