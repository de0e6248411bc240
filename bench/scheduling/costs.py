"""The cost of a query's records, measured while they are processed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT = 0.1
"""Weight of a new measurement in the moving average."""
MAX_FACTOR = 8.0
"""A single measurement changes no average by more than this factor. One pause of the process must not send a query to
the end."""
_LEAST_MS = 1e-6  # limit: divisions by zero


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a query's pipeline, with the values that are assumed until it has been measured.

    Attributes:
        cost_ms: processing time per record that reaches it.
        selectivity: records out per record in.
        stores: it stores its records until the window fires, as a join does, so that processing frees no memory. A
            window that aggregates online (partial computation) does not.
    """

    cost_ms: float
    selectivity: float = 1.0
    stores: bool = False


class CostEstimate:
    """Cost and selectivity per operator of one query, and of one firing of its windows.

    Outliers are bounded by `MAX_FACTOR`.

    Attributes:
        remaining_ms: per stage, the cost of one record from there to the end; one more entry than operators, the last
            is 0.
        kept: per stage, how many records reach it for one record that enters the pipeline.
        firing_ms: cost of emitting a window.
    """

    __slots__ = ("_costs", "_selectivities", "_stores", "firing_ms", "kept", "remaining_ms")

    def __init__(self, operators: Sequence[Operator], firing_ms: float = 0.0) -> None:
        self._costs = [o.cost_ms for o in operators]
        self._selectivities = [o.selectivity for o in operators]
        self._stores = [o.stores for o in operators]
        self.firing_ms = firing_ms
        self._derive()

    def observe(self, stage: int, records_in: float, records_out: float, spent_ms: float) -> None:
        """Adds a measurement of the operator at `stage`."""
        if records_in <= 0:
            return
        cost, selectivity = spent_ms / records_in, records_out / records_in
        self._costs[stage] = _moved(self._costs[stage], cost, _LEAST_MS)
        self._selectivities[stage] = _moved(self._selectivities[stage], selectivity, 1e-3)
        self._derive()

    def observe_firing(self, spent_ms: float) -> None:
        self.firing_ms = _moved(self.firing_ms, spent_ms, _LEAST_MS)

    def reduction(self, by_stage: Sequence[float], budget_ms: float) -> tuple[float, int]:
        """Returns by how many records the queues shrink at most if this query runs, and how many operators to run for
        it.

        The thesis' p_k = size · (1 - product of the first k selectivities), for as many records as `budget_ms` pays.

        Args:
            by_stage: queued records that wait for the operator of each stage.

        Returns:
            The reduction in records, 0 if no prefix of the pipeline reduces them, and the number of operators.
        """
        best, through = 0.0, len(by_stage)
        freed = spent_ms = 0.0
        reached = 0.0
        for stage, waiting in enumerate(by_stage):
            reached += waiting
            spent_ms += reached * self._costs[stage]
            if not self._stores[stage]:
                freed += reached * (1.0 - self._selectivities[stage])
            reached *= self._selectivities[stage]
            paid = freed * min(1.0, budget_ms / spent_ms) if spent_ms > 0 else freed
            if paid > best:
                best, through = paid, stage + 1
        return best, through

    @property
    def output_rate(self) -> float:
        """Records out per ms of processing, end to end: the priority of the policy Highest Rate."""
        return self.kept[-1] / max(self.remaining_ms[0], _LEAST_MS)

    def _derive(self) -> None:
        remaining, kept = [0.0], [1.0]
        for cost, selectivity in zip(reversed(self._costs), reversed(self._selectivities), strict=True):
            remaining.append(cost + selectivity * remaining[-1])
        for selectivity in self._selectivities:
            kept.append(kept[-1] * selectivity)
        self.remaining_ms, self.kept = remaining[::-1], kept


def _moved(average: float, measured: float, least: float) -> float:
    anchor = max(average, least)
    return average + WEIGHT * (min(max(measured, anchor / MAX_FACTOR), anchor * MAX_FACTOR) - average)
