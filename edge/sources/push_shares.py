"""Divides the memory and the threads of pushes in progress among the clients.

One client alone may use all memory and all threads.

- If another client needs memory (`PushMemory`), the client with the most memory loses its oldest arriving request. This
  repeats until both clients have equal memory.
- If clients wait for a thread (`DecodingThreads`), the next free thread goes to the client with the fewest threads.

So slow or costly bodies of one client block no other client.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass


class TooManyBytes(Exception):
    """The bodies in progress take all memory, and no other client has more memory than the requesting one."""


@dataclass(eq=False, slots=True)
class Reservation:
    """The memory of one body.

    Attributes:
        principal: the client that pushes the body.
        nbytes: the bytes that have arrived so far.
        deadline: the time-out of the body's arrival; None after it has arrived.
        is_refused: whether the request was refused, because another client needs its memory.
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
        limit_bytes: the largest total of the arrived bytes of all bodies.
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
        """Refuses the oldest arriving request of the client with the most memory.

        Raises TooManyBytes if that client would have no more memory than this one.
        """
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
    """Permits to decode. The next permit goes to the waiting client with the fewest permits, then to the longest
    waiting one.
    """

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
        self._running = +self._running  # removes the clients without permits
