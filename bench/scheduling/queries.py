"""The scheduler's state of each query: its queue, the next window ends, its costs. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.scheduling.costs import CostEstimate, Operator
from edgewater.scheduling import IngestionHistory


@dataclass(frozen=True, slots=True)
class QueryProfile:
    """A query as the scheduler sees it.

    Attributes:
        operators: its pipeline, beginning at the source.
        period_ms: distance of the window ends: the length of tumbling windows, the step of sliding windows.
        offset_ms: the ends are at `offset_ms` plus multiples of the period.
        inputs: number of inputs, such as a join's streams or the edges of a window. A window fires when the watermarks
            of all inputs have passed its end.
        firing_ms: assumed cost of emitting a window.
    """

    name: str
    operators: Sequence[Operator]
    period_ms: float
    offset_ms: float = 0.0
    inputs: int = 1
    firing_ms: float = 0.0

    def next_end_ms(self, now_ms: float) -> float:
        """Returns the first window end after `now_ms`."""
        return self.offset_ms + (math.floor((now_ms - self.offset_ms) / self.period_ms) + 1) * self.period_ms


@dataclass(slots=True)
class Item:
    """An element of a query's queue: a batch of records, or a watermark that sweeps windows.

    Attributes:
        records: records of the batch that remain after the stages that have run; 0 for a watermark.
        ingested_ms: when it was queued.
        stage: number of operators that have processed it.
        end_ms: the last window end that the watermark sweeps; None for a batch.
        firings: number of windows that it sweeps.
    """

    records: float
    ingested_ms: float
    stage: int = 0
    end_ms: float | None = None
    firings: int = 0
    cost_ms: float = 0.0


@dataclass(slots=True)
class QueueInput:
    """One input of a query: the end of its epoch, and the history of its delays."""

    end_ms: float
    history: IngestionHistory


@dataclass(slots=True, eq=False)
class ScheduledQuery:
    """A registered query.

    Attributes:
        index: its place in the scheduler's arrays.
        end_ms: the first window end that not all inputs have swept.
        queue: its items, oldest first.
        records: queued records; `by_stage`: the same by the operator that they wait for.
        queued_ms: estimated cost of the queue.
        sweeps: (window end, ingestion) of the sweeping watermarks in the queue.
        turn: number of its last turn.
        swept: number of sweeping watermarks that it has processed.
    """

    profile: QueryProfile
    index: int
    costs: CostEstimate
    inputs: list[QueueInput]
    end_ms: float
    queue: deque[Item] = field(default_factory=deque)
    records: float = 0.0
    by_stage: list[float] = field(default_factory=list)
    queued_ms: float = 0.0
    sweeps: deque[tuple[float, float]] = field(default_factory=deque)
    turn: int = 0
    swept: int = 0

    @classmethod
    def of(cls, profile: QueryProfile, index: int, now_ms: float) -> ScheduledQuery:
        end_ms = profile.next_end_ms(now_ms)
        inputs = [QueueInput(end_ms, IngestionHistory()) for _ in range(profile.inputs)]
        costs = CostEstimate(profile.operators, profile.firing_ms)
        return cls(profile, index, costs, inputs, end_ms, by_stage=[0.0] * len(profile.operators))

    def expected_ingestion_ms(self, now_ms: float) -> float:
        """Returns when the next sweeping watermark is expected: the minimum over the inputs that have not sent it yet.

        This is the thesis' rule for joins (section 3.1.3). It also holds for a window of several edges.
        """
        end_ms = self.end_ms
        if len(self.inputs) == 1:
            return end_ms + self.inputs[0].history.expected_delay_ms(now_ms - end_ms)
        return min(
            end_ms + each.history.expected_delay_ms(now_ms - end_ms) for each in self.inputs if each.end_ms <= end_ms
        )

    @property
    def mean_ingestion_ms(self) -> float:
        """When the next sweeping watermark comes if its delay is the mean of past delays, independent of the time
        now.
        """
        end_ms = self.end_ms
        return min(end_ms + each.history.mean_delay_ms for each in self.inputs if each.end_ms <= end_ms)

    def slack_ms(self, now_ms: float) -> float:
        """Returns the expected slack (Eq.

        3.1, 3.8): how long the query can stay idle until its next answer becomes late.

        If a sweeping watermark is in the queue, the time since its ingestion is subtracted.
        """
        due_ms = self.sweeps[0][1] if self.sweeps else self.expected_ingestion_ms(now_ms)
        return due_ms - now_ms - self.queued_ms

    def advance(self, number: int, watermark_ms: float, now_ms: float) -> int:
        """Advances an input's watermark. Returns the number of windows that all inputs have swept by it."""
        this = self.inputs[number]
        if watermark_ms < this.end_ms:
            return 0
        period = self.profile.period_ms
        # Only the first end is observed. If one watermark sweeps several windows, the later ends are late by design.
        this.history.observe(now_ms - this.end_ms)
        this.end_ms += (math.floor((watermark_ms - this.end_ms) / period) + 1) * period
        end_ms = min(each.end_ms for each in self.inputs)
        firings = round((end_ms - self.end_ms) / period)
        self.end_ms = end_ms
        return firings
