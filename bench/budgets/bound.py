"""`python -m bench.budgets --only bound`: the least staleness of any policy that does not know the future.

Records of a group are a Poisson process, values are lognormal, and the policy knows the rate of every group and the
distribution of the values (`sim.budgets.trace.zipf`). At the end of a window each group whose pending sum exceeds the
limit takes one more send. The link's sends are priced instead of limited: at a price μ(t) per send the groups are
independent, and the best policy of each follows by dynamic programming over time and pending sum. Take the cost of
these policies less the price of all sends of the link. It is at most the cost of any policy that keeps within the link
(Lagrangian relaxation: Whittle, "Restless bandits", J. Appl. Prob. 25A, 1988; Adelman and Mersereau, Operations
Research 56, 2008), for any μ; the best μ is found by supergradients. Time has steps, at whose ends the policy knows all
records of the step, which only lowers the bound. Pending sums are rounded to a grid at random; their means stay.

The offline optimum knows when each group's last record comes. The bound shows how much of the distance to the optimum
no forecast can close.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.budgets.cells import BANDWIDTHS, DEFAULT, OPTIMAL, UPDATE_BYTES, WARM_UP
from bench.budgets.workload import BudgetsSize, work
from edgewater.synopses import FloatArray
from sim.budgets.experiment import run
from sim.budgets.link import LinkModel
from sim.budgets.outcome import truth_per_window
from sim.budgets.trace import ZIPF_EXPONENT

RATE_CLASSES = 70
LEVELS = 24
"""Levels of a pending sum up to the limit. A limit of 0 has one level, which any record exceeds."""
STEPS = 400
FINEST = 1e-4
"""The last step is this fraction of a window. Steps grow in proportion to the remaining time."""
PRICES = 16
"""Number of times between which prices are interpolated."""
ITERATIONS = 120
CELLS = (("low", 3e-4), ("low", 2e-4), ("medium", 1e-4), ("medium", 3e-5), ("medium", 0.0))
"""Bandwidth, and error budget as a share of the largest value."""
FIRST_STEP = 0.1


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of equal rates: records per window, and how many groups there are; float64."""

    rates: FloatArray
    counts: FloatArray


def zipf_groups(records: int, groups: int) -> Groups:
    """Returns the groups of `sim.budgets.trace.zipf`, in classes of about equal rates."""
    weights = np.arange(1, groups + 1) ** -ZIPF_EXPONENT
    rates = records * weights / weights.sum()
    borders = np.geomspace(rates[-1] * 0.999, rates[0] * 1.001, RATE_CLASSES + 1)
    at = np.digitize(rates, borders) - 1
    counts = np.bincount(at, minlength=RATE_CLASSES).astype(np.float64)
    used = counts > 0.0
    return Groups(np.bincount(at, rates, RATE_CLASSES)[used] / counts[used], counts[used])


def level_probabilities(values: FloatArray, limit: float) -> FloatArray:
    """Returns the distribution of a record's value in levels, 0 to `LEVELS` + 1 (above the limit)."""
    if limit <= 0.0:
        return np.array([0.0, 1.0])
    scaled = np.minimum(values * LEVELS / limit, LEVELS + 1.0)
    below = np.floor(scaled)
    up = scaled - below
    counts = np.bincount(below.astype(np.int64), 1.0 - up, LEVELS + 2)
    return np.asarray((counts + np.bincount(np.ceil(scaled).astype(np.int64), up, LEVELS + 2)) / len(values))


def _transitions(rates: FloatArray, duration: float, values: FloatArray) -> FloatArray:
    """Returns [class, from level, to level] of a step: a compound Poisson distribution by Panjer's recursion."""
    mean, top = rates * duration, len(values) - 1
    sums = np.zeros((len(rates), top))
    sums[:, 0] = np.exp(-mean * (1.0 - values[0]))
    for k in range(1, top):
        j = np.arange(1, k + 1)
        sums[:, k] = mean / k * (sums[:, k - j] * (j * values[j])).sum(axis=1)
    result = np.zeros((len(rates), top + 1, top + 1))
    for level in range(top):
        result[:, level, level:top] = sums[:, : top - level]
        result[:, level, top] = 1.0 - result[:, level, :top].sum(axis=1)
    result[:, top, top] = 1.0
    return result


class Relaxation:
    """The dual of the policies' problem, for prices per time.

    Args:
        values: `level_probabilities`.
        slots: sends of the link per window.
    """

    def __init__(self, groups: Groups, values: FloatArray, slots: float, steps: int = STEPS) -> None:
        left = np.r_[np.geomspace(1.0, FINEST, steps), 0.0]
        durations = -np.diff(left)
        knots = np.geomspace(1.0, FINEST, PRICES)
        self._counts = groups.counts
        self._moves = [_transitions(groups.rates, duration, values) for duration in durations]
        self._slots = slots * durations
        unit = np.eye(PRICES)
        # Prices per step are linear between the knots, over the logarithm of the remaining time.
        self._basis = np.stack([np.interp(-np.log(left[:-1]), -np.log(knots), row) for row in unit], axis=1)

    def bound(self, prices: FloatArray) -> tuple[float, FloatArray]:
        """Returns a lower bound of the groups above the limit at the window's end, and its supergradient.

        Args:
            prices: float64 [`PRICES`], 0 to 1.
        """
        per_step = self._basis @ prices
        classes, levels = self._moves[0].shape[:2]
        cost = np.zeros((classes, levels))
        cost[:, -1] = 1.0
        sent = np.zeros((len(self._moves), classes, levels), bool)
        for step in range(len(self._moves) - 1, -1, -1):
            # A send at the end of a step includes the step's records, so no policy gains more by sending within the
            # step.
            if_sent = per_step[step] + cost[:, :1]
            sent[step] = if_sent < cost
            cost = np.einsum("cij,cj->ci", self._moves[step], np.minimum(if_sent, cost))
        groups = np.zeros((classes, levels))
        groups[:, 0] = self._counts
        sends = np.zeros(len(self._moves))
        for step, move in enumerate(self._moves):
            groups = np.einsum("ci,cij->cj", groups, move)
            leaving = np.where(sent[step], groups, 0.0)
            sends[step] = leaving.sum()
            groups = groups - leaving
            groups[:, 0] += leaving.sum(axis=1)
        value = float((self._counts * cost[:, 0]).sum() - (per_step * self._slots).sum())
        return value, self._basis.T @ (sends - self._slots)

    def best(self, iterations: int = ITERATIONS) -> float:
        """Returns the largest bound found: ascent with steps that shrink, scaled per price."""
        prices, scale, best = np.linspace(0.05, 1.0, PRICES), np.full(PRICES, 1e-9), 0.0
        for i in range(iterations):
            value, slope = self.bound(prices)
            best = max(best, value)
            scale = 0.8 * scale + 0.2 * slope**2
            prices = np.clip(prices + FIRST_STEP / (1.0 + i / 8.0) * slope / np.sqrt(scale), 0.0, 1.0)
        return best


def bound_table(size: BudgetsSize, *, quick: bool) -> str:
    """Returns the mean staleness of the optimum, the bound and the default policy, in windows, as Markdown."""
    workload = work("zipf", size)
    groups = zipf_groups(size.records, size.records * 2 // 5)
    truth = truth_per_window(workload.trace, workload.query("sum"), "value")
    present = float(np.mean([np.isfinite(w).sum() for w in truth.values()]))
    largest = max(float(np.nanmax(w, initial=0.0)) for w in truth.values())
    lines = ["| bandwidth | budget | optimum | bound | gain | gain / bound | bound / optimum |", "|" + "---|" * 7]
    for bandwidth, budget in CELLS[-1:] if quick else CELLS:
        limit, slots = budget * largest, BANDWIDTHS[bandwidth] * present / 2.0
        levels = level_probabilities(workload.trace.values(workload.column), limit)
        bound = Relaxation(groups, levels, slots, STEPS // 4 if quick else STEPS).best() / slots
        link = LinkModel(slots * UPDATE_BYTES / (workload.window_ms / 1000.0), bytes_per_update=UPDATE_BYTES)
        query = workload.query("sum", "error", limit)
        best, ours = (
            float(run(workload.trace, query, link, policy).staleness[WARM_UP:].mean()) for policy in (OPTIMAL, DEFAULT)
        )
        figures = f"{best:.3g} | {bound:.3g} | {ours:.3g} | {ours / bound:.2f} | {bound / best:.2f}"
        lines.append(f"| {bandwidth} | {budget:g} | {figures} |")
    return "\n".join(lines) + "\n"
