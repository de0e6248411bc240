"""The memory and the threads of pushes in progress, divided among those who push.

One client alone may use all of it. If another one needs some, it comes next: for memory (`PushMemory`), the request of
the client with the most that has been arriving the longest is refused, until both have as much; for threads
(`DecodingThreads`), the next free one is for the client with the fewest. So slow or costly bodies of one client keep no
other client out.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass


class TooManyBytes(Exception):
    """The bodies in progress take all memory, and no client has more than this one."""


@dataclass(eq=False, slots=True)
class Reservation:
    """The memory of one body.

    Attributes:
        principal: who pushes it.
        nbytes: how much of it has arrived.
        deadline: while it arrives, the time-out of its arrival.
        is_refused: another client needs its memory: its deadline has passed.
    """

    principal: bytes | str
    nbytes: int = 0
    deadline: asyncio.Timeout | None = None
    is_refused: bool = False

    def refuse(self) -> None:
        assert self.deadline is not None
        self.is_refused, self.nbytes = True, 0
        if not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())


class PushMemory:
    """The reservations of the requests in progress, in the order in which they began.

    Args:
        limit_bytes: of all bodies, as far as they have arrived.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._reservations: dict[Reservation, None] = {}

    @property
    def nbytes(self) -> int:
        return sum(reservation.nbytes for reservation in self._reservations)

    @contextmanager
    def reservation(self, principal: bytes | str) -> Iterator[Reservation]:
        reservation = Reservation(principal)
        self._reservations[reservation] = None
        try:
            yield reservation
        finally:
            del self._reservations[reservation]

    def add(self, reservation: Reservation, count: int) -> None:
        """Reserves memory for more bytes of a body. Raises TooManyBytes."""
        while self.nbytes + count > self.limit_bytes:
            self._refuse_of_others(reservation.principal, count)
        reservation.nbytes += count

    def _refuse_of_others(self, principal: bytes | str, count: int) -> None:
        """Refuses the oldest arriving request of the client with the most, if that is more than this one would have."""
        held, arriving = Counter[bytes | str](), dict[bytes | str, Reservation]()
        for reservation in self._reservations:
            held[reservation.principal] += reservation.nbytes
            if reservation.deadline is not None and reservation.nbytes:
                arriving.setdefault(reservation.principal, reservation)
        largest = max(arriving, key=lambda p: held[p], default=principal)
        if largest == principal or held[largest] <= held[principal] + count:
            raise TooManyBytes
        arriving[largest].refuse()


class DecodingThreads:
    """Permits to decode. Of those who wait, the client with the fewest comes next, then the one who came first."""

    def __init__(self, permits: int) -> None:
        self._free = permits
        self._running = Counter[bytes | str]()
        self._waiting: deque[tuple[bytes | str, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def permit(self, principal: bytes | str) -> AsyncGenerator[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((principal, turn))
        self._start_next()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._running[principal] -= 1
            self._start_next()

    def _start_next(self) -> None:
        self._waiting = deque(w for w in self._waiting if not w[1].done())
        while self._free and self._waiting:
            chosen = min(self._waiting, key=lambda w: self._running[w[0]])
            self._waiting.remove(chosen)
            self._free -= 1
            self._running[chosen[0]] += 1
            chosen[1].set_result(None)
        self._running = +self._running  # forgets the clients that have none
