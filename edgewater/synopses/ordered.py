"""The base of order-based synopses of a signal: questions about indices, and bytes."""

from __future__ import annotations

import math
from typing import ClassVar, Self

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.base import Count, Estimate, Mean, Properties, Question, Questions, Sum
from edgewater.synopses.checks import check_whole
from edgewater.synopses.encoding import codec
from edgewater.synopses.questions import Point, RangeSum
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage


class OrderedSynopsis:
    """A `Synopsis` of a signal, values by index from 0. It has no groups, so there is no stack of it.

    Subclasses define `records` (the number of values), `_range_sum`, `to_message` and `from_message`.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    properties: ClassVar[Properties]
    questions: ClassVar[Questions] = (RangeSum, Point, Sum, Mean, Count)

    @property
    def records(self) -> int:
        raise NotImplementedError

    def _length(self) -> int:
        """Returns the length of the signal. It is longer than `records` if values are missing."""
        return self.records

    def _range_sum(self, first: int, last: int) -> Estimate:
        """Returns the sum of the values at valid indices `first` to `last`, both included."""
        raise NotImplementedError

    def query(self, question: Question | None = None) -> Estimate:
        """Returns the answer with deterministic bounds; the default question is the sum of the signal.

        Raises:
            InvalidRequest: the question is not one of `questions`, an index is outside the signal, or values are
                missing.
        """
        n = self.records
        match question:
            case Count():
                return Estimate(n, n, n)
            case Point(index):
                return self._range_sum(check_whole("index", index, 0, self._length() - 1), index)
            case RangeSum(first, last):
                check_whole("last", last, 0, self._length() - 1)
                return self._range_sum(check_whole("first", first, 0, last), last)
            case None | Sum() | Mean():
                if not n:
                    return Estimate(math.nan, math.nan, math.nan)
                total = self._range_sum(0, self._length() - 1)
                size = n if isinstance(question, Mean) else 1
                lower, upper = total.lower / size, total.upper / size
                return Estimate(total.value / size, lower, upper, total.confidence, self.kind)
        able = ", ".join(q.__name__ for q in self.questions)
        raise InvalidRequest("question", question, f"one of {able}", f"{self.kind} cannot answer it")

    def to_message(self) -> SynopsisMessage:
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        return codec.seal(self.to_message())

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        return cls.from_message(codec.unseal(data))
