"""Measures what each query costs per record while queries run (`QueryCosts`), and how long CPU is short
(`CpuShortage`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from edge.core import EdgeCore
from edge.worker.tuning import Tuning
from edgewater.scheduling import ScheduledQuery
from edgewater.wire import QueryRef

Lap = tuple[QueryRef | None, int, float]
"""(query, records, time): by this CPU time, in seconds, the query has processed this number of records. `begin` appends
(None, 0, time).
"""


class QueryCosts:
    """Measures the queries of one core, as its `CostMeter`, and updates their cost estimates.

    Args:
        scheduled: the queries of the scheduler. The worker changes this mapping.
        clock: returns CPU time in seconds.
        answer_delay_ms: returns the time in ms from a query's frames to the answer; 0 if unknown. It reduces the
            query's slack.
    """

    def __init__(
        self,
        core: EdgeCore,
        scheduled: Mapping[QueryRef, ScheduledQuery],
        clock: Callable[[], float],
        answer_delay_ms: Callable[[QueryRef], float],
        tuning: Tuning,
    ) -> None:
        self._core, self._scheduled, self._clock, self._answer_delay_ms = core, scheduled, clock, answer_delay_ms
        self._tuning = tuning
        self._laps: deque[Lap] = deque(maxlen=2 * tuning.max_laps)
        self._known: set[QueryRef] = set()
        self._stream_ms: dict[str, float] = {}
        self._folded_s = clock()
        core.cost_meter = self

    def begin(self) -> None:
        """Starts a measurement (see `CostMeter.begin`)."""
        self._laps.append((None, 0, self._clock()))

    def end(self, query: QueryRef, records: int) -> None:
        """Ends the measurement of one query (see `CostMeter.end`)."""
        self._laps.append((query, records, self._clock()))

    @property
    def laps(self) -> int:
        """The number of calls of `begin` and `end` since the last `fold`."""
        return len(self._laps)

    def spent_ms_since(self, laps: int) -> dict[QueryRef, float]:
        """Returns the time in ms per query in the measurements after the first `laps`."""
        return {ref: spent_ms for ref, (_, spent_ms) in _measured(islice(self._laps, laps, None)).items()}

    def is_known(self, query: QueryRef) -> bool:
        """Returns whether a cost of the query has been measured."""
        return query in self._known

    @property
    def is_any_known(self) -> bool:
        return bool(self._known)

    def stream_ms(self, stream: str) -> float:
        """Returns the time in ms that all queries of a stream need for one record; 0 if unknown."""
        return self._stream_ms.get(stream, 0.0)

    def forget(self, query: QueryRef) -> None:
        """Removes a query that was deleted."""
        self._known.discard(query)

    @property
    def is_old(self) -> bool:
        """Whether the last `fold` was longer ago than `Tuning.fold_s`."""
        return self._clock() - self._folded_s >= self._tuning.fold_s

    @property
    def is_due(self) -> bool:
        """Whether `fold` should be called before the next batch."""
        return self.is_old or len(self._laps) >= self._tuning.max_laps or not self._known

    def fold(self) -> None:
        """Adds the measurements to the cost estimates."""
        self._folded_s = self._clock()
        measured = _measured(self._laps)
        self._laps.clear()
        for ref, (count, spent_ms) in measured.items():
            query = self._scheduled.get(ref)
            if query is None or not count:
                continue
            if ref not in self._known:
                self._known.add(ref)
                query.costs.assume(0, spent_ms / count)
            else:
                query.costs.observe(0, count, 0, spent_ms)
        for ref, query in self._scheduled.items():
            query.costs.report_downstream(self._answer_delay_ms(ref))
        self._stream_ms = {
            name: sum(self._scheduled[p.ref].costs.remaining_ms[0] for p in self._core.queries_of(name))
            for name in self._core.streams
        }


class CpuShortage:
    """Measures how long the edge is short of CPU.

    Args:
        now_ms: wall time.
    """

    def __init__(self, now_ms: int) -> None:
        self._watched_ms = self._asked_ms = now_ms
        self._short_ms, self._is_short = 0.0, False

    def watch(self, now_ms: int, *, is_short: bool) -> None:
        """Adds the time since the last call, if the edge was short of CPU at the last call.

        Args:
            now_ms: wall time.
            is_short: whether the edge is short of CPU now.
        """
        self._short_ms += max(now_ms - self._watched_ms, 0) if self._is_short else 0
        self._watched_ms, self._is_short = now_ms, is_short

    def take_share(self) -> float:
        """Returns the fraction of time, 0 to 1, in which CPU was short since the last call of `take_share`. Call
        `watch` before.
        """
        now_ms = self._watched_ms
        share = self._short_ms / (now_ms - self._asked_ms) if now_ms > self._asked_ms else float(self._is_short)
        self._asked_ms, self._short_ms = now_ms, 0.0
        return min(share, 1.0)


def _measured(laps: Iterable[Lap]) -> dict[QueryRef, tuple[int, float]]:
    """Returns, for each query, the number of records that it has processed and the time in ms."""
    measured: dict[QueryRef, tuple[int, float]] = {}
    began_s = 0.0
    for ref, records, at_s in laps:
        if ref is not None:
            count, spent_ms = measured.get(ref, (0, 0.0))
            measured[ref] = count + records, spent_ms + 1000.0 * (at_s - began_s)
        began_s = at_s
    return measured
