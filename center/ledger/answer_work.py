"""Limits how many answers to a query one event gives, so that other queries do not wait."""

from __future__ import annotations

MAX_WORK = 1_000
"""The most work of one event for one query. The unit is an answer to a window of one small slice.

An answer to a window of n slices counts as 1 + 2 n / 3, and more if its slices are large. In measurements
(`bench.scale --only windows`), an answer took 0.2 to 0.4 ms, each further slice 0.2 ms, and each KiB of the slices 5 to
23 µs. The next event gives further answers. Before it, other queries are answered."""
BYTES_PER_WORK = 16 << 10
UNWEIGHED_SHARE = 8
"""Divisor of `MAX_WORK` until the first answer to a query after a start, because the sizes of its slices are not known
yet."""
LEAST_SHARE = 16
"""Divisor of `MAX_WORK` for each further query if queries have used twice `MAX_WORK` in one event, because all queries
wait for the event."""


class AnswerWork:
    """The cost of an answer to one query, and the number of answers that the next event may give. It is not stored.

    Args:
        slices_per_answer: number of slices of a window.

    Attributes:
        max_answers: number of answers that the next event may give, at least 1.
        is_costly: tasks merge the answers before they are given. So frames give none, but `TimeAdvanced` does.
    """

    def __init__(self, slices_per_answer: int) -> None:
        self._slices_per_answer = slices_per_answer
        self._slice_bytes: int | None = 0
        self.max_answers, self.is_costly = 1, False
        self.allow(MAX_WORK)

    @property
    def per_answer(self) -> int:
        """The work of one answer, in the unit of `MAX_WORK`."""
        return 1 + 2 * self._slices_per_answer // 3 + (self.answer_bytes or 0) // BYTES_PER_WORK

    @property
    def answer_bytes(self) -> int | None:
        """The expected size of an answer's slices in bytes; None if it is not known since the state was loaded."""
        return None if self._slice_bytes is None else self._slices_per_answer * self._slice_bytes

    def weigh(self, size: int, slices: int | None = None) -> None:
        """Updates the expected size of slices. A large size has an effect for longer than a small size.

        Args:
            size: size of the slices in bytes.
            slices: number of slices; None for the number of slices of one answer.
        """
        each = size // (slices or self._slices_per_answer)
        self._slice_bytes = max(each, (self._slice_bytes or 0) * 7 // 8)

    def forget(self) -> None:
        """Removes the expected size of slices. Called when the state was loaded, because the state has no sizes."""
        self._slice_bytes = None

    def allow(self, work: int) -> None:
        """Sets the work that the next event may spend on the query, in the unit of `MAX_WORK`."""
        work = work // UNWEIGHED_SHARE if self._slice_bytes is None else work
        self.max_answers = max(1, work // self.per_answer)


class EventWork:
    """The work for answers that is left in one event. All queries share it."""

    def __init__(self) -> None:
        self._left = 2 * MAX_WORK

    def grant(self, query: AnswerWork) -> None:
        """Sets the work that a query may spend to the query's share of the remaining work."""
        query.allow(max(MAX_WORK // LEAST_SHARE, min(MAX_WORK, self._left)))

    def spend(self, query: AnswerWork, answers: int) -> None:
        """Subtracts the work of a number of answers to a query."""
        self._left -= answers * query.per_answer
