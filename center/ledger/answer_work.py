"""The work of answering: how many answers of each query one event gives, so that no query makes the others wait."""

from __future__ import annotations

MAX_WORK = 200
"""Answers to windows of one small slice that one event gives of a query. An answer to a window of n slices counts as
1 + n / 8, and by the size of the slices. Measured: an answer takes 1 to 2 ms, each of its slices 0.2 ms, each KiB of
them 5 to 23 µs. The next event goes on; other queries come first."""
BYTES_PER_WORK = 64 << 10
UNWEIGHED_SHARE = 8
"""After a start the sizes of a query's slices are unknown: the query may make an eighth until its first answer."""
LEAST_SHARE = 16
"""Once the queries of one event have made twice `MAX_WORK`, the others may make a sixteenth of it: all wait for it."""


class AnswerWork:
    """What an answer of one query costs, and how many the next event may give. Not part of the state that is stored.

    Args:
        slices_per_answer: number of slices of a window.

    Attributes:
        max_answers: number of answers that the next event may give, at least 1.
    """

    def __init__(self, slices_per_answer: int) -> None:
        self._slices_per_answer = slices_per_answer
        self._slice_bytes: int | None = 0
        self.max_answers = 1
        self.allow(MAX_WORK)

    @property
    def per_answer(self) -> int:
        """What an answer counts as, in the unit of `MAX_WORK`."""
        return 1 + self._slices_per_answer // 8 + (self.answer_bytes or 0) // BYTES_PER_WORK

    @property
    def answer_bytes(self) -> int | None:
        """The expected size of an answer's slices; None: nothing is known since the state was loaded."""
        return None if self._slice_bytes is None else self._slices_per_answer * self._slice_bytes

    def weigh(self, size: int, slices: int | None = None) -> None:
        """Learns the size of slices. The largest ones count the longest.

        Args:
            size: bytes.
            slices: number of slices; None: as many as an answer has.
        """
        each = size // (slices or self._slices_per_answer)
        self._slice_bytes = max(each, (self._slice_bytes or 0) * 7 // 8)

    def forget(self) -> None:
        """Called when the state was loaded, which says nothing about the sizes of its slices."""
        self._slice_bytes = None

    def allow(self, work: int) -> None:
        """Sets the work that the next event may spend on the query, in the unit of `MAX_WORK`."""
        work = work // UNWEIGHED_SHARE if self._slice_bytes is None else work
        self.max_answers = max(1, work // self.per_answer)


class EventWork:
    """The work of answering that is left in one event, which all queries share."""

    def __init__(self) -> None:
        self._left = 2 * MAX_WORK

    def grant(self, query: AnswerWork) -> None:
        """Gives a query its share."""
        query.allow(max(MAX_WORK // LEAST_SHARE, min(MAX_WORK, self._left)))

    def spend(self, query: AnswerWork, answers: int) -> None:
        """Takes the work of so many answers of a query."""
        self._left -= answers * query.per_answer
