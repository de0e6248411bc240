"""What part of its records a function of a sample needs of each edge, learnt from window to window. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from center.early_trigger import plan_rate
from center.results import AnswerRecord
from center.sampling import RATE_MARGIN
from center.serving import SEED, function_confidence
from edgewater.query import QuerySpec
from edgewater.synopses import GroupedAggregate, RowSampleStack

RECENT = 5
"""Windows of which the neediest decides: they differ, and rows that were passed over cannot be had afterwards."""


class FunctionRates:
    """One query's plan: 1, until a window has been looked at."""

    def __init__(self) -> None:
        self._needed: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._seen: tuple[int, int] | None = None

    @property
    def rate(self) -> float:
        """In (0, 1], for the windows to come."""
        return min(1.0, RATE_MARGIN * max(rate for _, rate in self._needed)) if self._needed else 1.0

    def knows(self, record: AnswerRecord) -> bool:
        return self._seen == (record.window_start_ms, record.revision)

    def note(self, record: AnswerRecord, spec: QuerySpec) -> None:
        """Learns from an answer what its window would have needed. Raises SynopsisError for damaged bytes."""
        self._seen = record.window_start_ms, record.revision
        if record.synopsis is None:
            return
        needed = list(needed_rates(GroupedAggregate.from_bytes(record.synopsis), spec))
        if needed:
            if self._needed and self._needed[-1][0] == record.window_start_ms:
                self._needed.pop()
            self._needed.append((record.window_start_ms, max(needed)))


def needed_rates(aggregate: GroupedAggregate, spec: QuerySpec) -> Iterable[float]:
    """The rate that each group of a window needs for the query's accuracy."""
    accuracy = spec.accuracy
    assert accuracy is not None
    measure = next(m for m in spec.measures if m.name == accuracy.measure)
    function, stack = measure.function.sample, aggregate.measures[measure.name]
    assert function is not None and isinstance(stack, RowSampleStack)
    parameters, rng = dict(measure.parameters), np.random.default_rng(SEED)
    confidence = function_confidence(spec, measure, len(stack))
    for rows, rate in zip(stack.rows_by_group(), stack.rates(), strict=True):
        yield plan_rate(function, parameters, rows, float(rate), accuracy.error, rng, confidence=confidence)
