"""When queued records fill the memory: which sources wait, and which query runs first. Pure.

Sources whose batches do not fit have to wait. Memory that becomes free is given to the query with the least slack first
(`Scheduler.by_room`). So memory does not fill with records whose answers are not due. The thesis instead runs the
queries that shrink the queues most. That delays answers that are due and has no benefit: a core does the same work
whatever the queues contain. It is here for comparison (`reduction_first`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bench.scheduling.queries import ScheduledQuery

NEARLY_BEST = 0.99
"""Queries count as equal if their reduction is at least this share of the largest. The least slack then decides."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queues' memory.

    Attributes:
        cap_bytes: never exceeded: sources whose batches do not fit wait.
        record_bytes: memory of a queued record.
        threshold: share of the cap from which on memory is managed (the thesis' b).
        release: management ends at this share.
        longest_ms: management ends after this time at the latest, and pauses for as long. Meanwhile the policy decides.
        reduction_first: from the threshold on the queries with the largest reduction run, as in the thesis.
    """

    cap_bytes: float
    record_bytes: float = 100.0
    threshold: float = 0.8
    release: float = 0.7
    longest_ms: float = 500.0
    reduction_first: bool = False


class MemoryManager:
    """Decides when memory is managed, and by which query.

    Attributes:
        manages: whether slack decides which source gets room.
        used: queued records; `peak`: the maximum so far.
        activations: how often management began.
    """

    def __init__(self, limits: QueueLimits | None, *, manages: bool = True) -> None:
        self.limits = limits
        self.used = self.peak = 0.0
        self.activations = 0
        self._most = limits.cap_bytes / limits.record_bytes if limits else math.inf
        self.manages = manages
        runs_first = limits is not None and manages and limits.reduction_first
        self._threshold = limits.threshold * self._most if limits and runs_first else math.inf
        self._until_ms: float | None = None
        self._rests_until_ms = -math.inf

    def has_room(self, records: float) -> bool:
        return self.used + records <= self._most

    def add(self, records: float) -> None:
        self.used = used = self.used + records
        if used > self.peak:
            self.peak = used

    def is_active(self, queries: Iterable[ScheduledQuery], now_ms: float) -> bool:
        """Returns whether the next turn is for memory."""
        if self._until_ms is None and self.used < self._threshold:
            return False
        limits = self.limits
        assert limits is not None, "without limits the threshold is infinite"
        if self._until_ms is not None:
            if self.used > limits.release * self._most and now_ms < self._until_ms:
                return True
            self._rests_until_ms = now_ms + limits.longest_ms
            self._until_ms = None
            return False
        if now_ms < self._rests_until_ms:
            return False
        # Until the first answer would become late. If answers are already late, for `longest_ms`.
        slack_ms = min((query.slack_ms(now_ms) for query in queries if query.records), default=0.0)
        self._until_ms = now_ms + (min(slack_ms, limits.longest_ms) if slack_ms > 0 else limits.longest_ms)
        self.activations += 1
        return True

    def choose(
        self, queries: Iterable[ScheduledQuery], cycle_ms: float, now_ms: float
    ) -> tuple[ScheduledQuery, int] | None:
        """Returns the query to run, and how many of its operators: the least slack among the largest reductions.

        None if no query has records that processing would remove.
        """
        reductions = [(q, *q.costs.reduction(q.by_stage, cycle_ms)) for q in queries if q.records]
        reductions = [each for each in reductions if each[1] > 0]
        if not reductions:
            return None
        least = NEARLY_BEST * max(reduction for _, reduction, _ in reductions)
        best = [(query, through) for query, reduction, through in reductions if reduction >= least]
        return min(best, key=lambda each: each[0].slack_ms(now_ms))
