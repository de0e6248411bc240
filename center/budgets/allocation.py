"""Divides a query's error budget E between its edges, and divides it again when drift rates change. No I/O.

Invariant: for every slice, the shares that edges may apply to the slice add up to at most E. This is true whatever
messages are late, lost or duplicated, and whatever process dies. So the withheld error of an answer never exceeds E.

Why the invariant is true. A share applies to all slices from some slice on (`edgewater/model/share_steps.py`). So the
share that edge i may apply to slice x is a step function, and only grants of the center change it. A grant counts from
the moment it is stored. It counts until the edge has confirmed a smaller grant. After that, it counts only for slices
before the first slice of the smaller grant. If a share grows because other shares are reduced, it grows no earlier than
the first slice for which all these reductions are in force. A later grant to the same edge, also a smaller one, does
not apply to earlier slices: an edge that is behind has not reached this slice yet. A silent edge keeps its share. A
retired edge keeps its share for the slices that it may have closed. An edge has at most one pending grant, which
bounds the state.

How E is divided. An edge whose value drifts by r per second sends b bytes each time the drift reaches its share E_i,
which is b·r/E_i bytes per second. Under ΣE_i = E, the sum over the edges is least for E_i ∝ sqrt(b_i·r_i). A new
division must save enough bytes to pay for its messages, and must not follow the last division too soon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from center.budgets.holdings import NO_HOLDING, Grant, Holding
from edgewater.base.streams import MIN_TIME_MS, EdgeId
from edgewater.model.query import QuerySpec

_RELATIVE_TOLERANCE = 1e-9  # derived: above the rounding of sums of shares
"""Shares that were sent over the wire, and their sums, count as equal within this relative tolerance."""
MAX_RATE = 1e200
"""Largest rate in a comparison, in bytes per second and units of the budget. Sums and ratios of larger rates may be
infinite."""


@dataclass(frozen=True, slots=True)
class AllocationPolicy:
    """When a budget is divided again.

    Attributes:
        min_gain: least predicted ratio of bytes with the present division to bytes with the best division.
        min_interval_ms: least wall time between two divisions for that gain. A change of members does not wait.
        silence_timeout_ms: an edge that has not reported for this wall time keeps its share and takes no part in
            divisions.
        min_weight: least weight of an edge, as a fraction of the mean weight. An edge that is quiet now may become
            active.
        min_growth: least growth of a share that is granted, as a fraction of the target share.
    """

    min_gain: float = 1.1
    min_interval_ms: int = 10_000
    silence_timeout_ms: int = 60_000
    min_weight: float = 0.02
    min_growth: float = 0.05


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """The shares that an edge applies, from its journal.

    Attributes:
        version: version of the last grant that the edge received; 0 if it received none.
        shares: share per measure, for slices that start at or after `from_ms`.
        update_bytes: b, the size of one group's update in bytes; 0 if nothing has been sent yet.
        drift: r per measure, in the measure's unit per second of event time.
    """

    version: int
    shares: Mapping[str, float]
    from_ms: int
    update_bytes: float = 0.0
    drift: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShareViolation:
    """An edge applies a share that was not granted to it. It is granted nothing, and then a share as a new edge."""

    edge: EdgeId
    message: str


class BudgetAllocator:
    """State machine that divides one query's error budget.

    Args:
        divided: E per measure, for measures whose errors add up over edges.
        undivided: E per measure, for measures whose E every edge may use in full (see `error_limits`).

    Attributes:
        holdings: per edge, the shares that the edge may apply.
        targets: per edge, the shares that the allocator moves the edge to.
    """

    def __init__(
        self, divided: Mapping[str, float], undivided: Mapping[str, float], policy: AllocationPolicy | None = None
    ) -> None:
        self.divided, self.undivided = dict(divided), dict(undivided)
        self.policy = policy or AllocationPolicy()
        self.holdings: dict[EdgeId, Holding] = {}
        self.expected: frozenset[EdgeId] = frozenset()
        self.targets: dict[EdgeId, dict[str, float]] = {}
        self.decided_at_ms = 0

    def grants(self) -> dict[EdgeId, Grant]:
        """Returns the last grant to each edge. It is sent again at the start of each session. An edge may receive it
        twice.
        """
        return {edge: h.grant for edge, h in self.holdings.items() if h.grant.version > 0}

    def durable_state(self) -> object:
        """Returns the state that must be stored whenever it changes. Rates and report times are not part
        of this state.
        """
        return (
            {e: (h.version, h.steps, h.grant, h.retired) for e, h in self.holdings.items()},
            {e: dict(t) for e, t in self.targets.items()},
        )

    def to_state(self) -> dict[str, Any]:
        """Returns the state as JSON, except for the budget, which the query has, and the expected edges, which the
        catalog has.
        """
        return {
            "holdings": {edge: h.to_state() for edge, h in self.holdings.items()},
            "targets": self.targets,
            "decided_at_ms": self.decided_at_ms,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets the state from the result of `to_json`."""
        self.holdings = {EdgeId(e): Holding.from_state(h) for e, h in state["holdings"].items()}
        self.targets = {EdgeId(e): dict(t) for e, t in state["targets"].items()}
        self.decided_at_ms = state["decided_at_ms"]

    def reset(self, edges: Iterable[EdgeId]) -> None:
        """Forgets the state, because it cannot be used. Each edge may apply the whole budget until it reports."""
        whole = self.divided | self.undivided
        self.holdings = {edge: NO_HOLDING.revoke(0, whole) for edge in edges}
        self.targets, self.decided_at_ms = {}, 0

    def in_force(self, slice_start_ms: int) -> dict[str, float]:
        """Returns, per divided measure, the largest error that all edges together may withhold of a slice. It is at
        most E.
        """
        return {
            m: _sum(min(h.max_share_at(m, slice_start_ms), limit) for h in self.holdings.values())
            for m, limit in self.divided.items()
        }

    def _taken(self, measure: str, from_ms: int) -> dict[EdgeId, float]:
        """Returns the largest share that each edge may apply to a slice from `from_ms` on, at most the budget."""
        limit = self.divided[measure]
        return {e: min(h.max_share_from(measure, from_ms), limit) for e, h in self.holdings.items()}

    def set_members(self, expected: frozenset[EdgeId], retired: Mapping[EdgeId, int]) -> None:
        """Sets the edges between which the budget is divided.

        Args:
            expected: edges that answer the query.
            retired: edges that answered the query before and will never return. The value is the start of a slice; the
                edge has closed neither this slice nor later slices.
        """
        self.expected = expected
        for edge, gone_from_ms in retired.items():
            holding = self.holdings.get(edge)
            if holding is not None and edge not in expected and not holding.retired:
                self.holdings[edge] = holding.retire(gone_from_ms)

    def report(self, edge: EdgeId, report: BudgetReport, now_ms: int) -> list[ShareViolation]:
        """Applies the report of an edge, and returns the violations that it shows."""
        if edge not in self.expected:
            return []
        held = self.holdings.get(edge, NO_HOLDING)
        held = replace(
            held,
            reported_at_ms=max(held.reported_at_ms, now_ms),
            update_bytes=_finite_or_zero(report.update_bytes) or held.update_bytes,
            drift={m: _finite_or_zero(report.drift.get(m, 0.0)) for m in self.divided} if report.drift else held.drift,
        )
        violation = self._violation(held, report)
        if violation:
            self.holdings[edge] = held.revoke(report.version, self._claimed(report))
            return [ShareViolation(edge, f"edge {edge} {violation}")]
        if held.pending is not None and report.version == held.pending.version:
            held = held.confirm(report.from_ms)
        elif report.version != held.version:
            # The edge lost its state, or runs from a copy of its state. It withholds at most the shares that count.
            held = held.revoke(report.version, {})
        self.holdings[edge] = held
        return []

    def _violation(self, held: Holding, report: BudgetReport) -> str:
        """Returns why the grants do not allow a report, or an empty string if they allow it."""
        known, pending = self.divided | self.undivided, held.pending
        # The edge may have lost its state and apply any of its grants.
        granted = {m: held.max_share_from(m, MIN_TIME_MS) for m in known}
        if pending is not None and report.version == pending.version:
            granted = dict(pending.shares)
            if report.from_ms < pending.from_ms:
                return f"applies version {report.version} from {report.from_ms} on, granted from {pending.from_ms} on"
        elif report.version == held.version:
            granted = dict(held.last.shares)
        for measure, share in report.shares.items():
            if measure not in known or not math.isfinite(share) or share < 0:
                return f"applies a share of {share} to {measure}; the budget has {', '.join(sorted(known))}"
            largest = granted.get(measure, 0.0)
            if share > largest * (1 + _RELATIVE_TOLERANCE):
                return f"applies a share of {share:g} to {measure}, of which it was granted {largest:g}"
        return ""

    def _claimed(self, report: BudgetReport) -> dict[str, float]:
        """Returns the shares that a report claims, each at most the budget. NaN counts as the budget."""
        known = self.divided | self.undivided
        return {m: s if s < known[m] else known[m] for m, s in report.shares.items() if m in known and not s <= 0}

    def rebalance(self, now_ms: int, horizon_ms: int) -> None:
        """Divides the shares again, if it pays. `grants` then has the messages to edges.

        Args:
            horizon_ms: event time that no correct clock has passed.
        """
        heard_ms = now_ms - self.policy.silence_timeout_ms
        held = self.holdings.items()
        present = sorted(e for e, h in held if e in self.expected and h.reported_at_ms > heard_ms)
        if present:
            effective_from_ms = self._effective_from_ms(horizon_ms)
            self._decide(present, effective_from_ms, now_ms)
            self._shrink(present)
            self._grow(present, effective_from_ms)

    def _effective_from_ms(self, horizon_ms: int) -> int:
        """Returns the start of the first slice for which all confirmed reductions are in force.

        Reductions that start after the horizon are ignored, because they come from an ended stream or a wrong clock.
        """
        starts = [h.last.from_ms for h in self.holdings.values() if h.last.from_ms <= horizon_ms]
        return max(starts, default=MIN_TIME_MS)

    def _decide(self, present: list[EdgeId], effective_from_ms: int, now_ms: int) -> None:
        best = {edge: dict(self.undivided) for edge in present}
        for measure, limit in self.divided.items():
            taken = (share for e, share in self._taken(measure, effective_from_ms).items() if e not in best)
            shares = _divide(max(0.0, limit - _sum(taken)), self._weights(present, measure))
            for edge, share in shares.items():
                best[edge][measure] = share
        soon = abs(now_ms - self.decided_at_ms) < self.policy.min_interval_ms
        if self.targets.keys() == best.keys() and (soon or self._gain(best) < self.policy.min_gain):
            return
        self.targets, self.decided_at_ms = best, now_ms

    def _weights(self, present: Iterable[EdgeId], measure: str) -> dict[EdgeId, float]:
        """Returns sqrt(b·r) per edge, divided by the largest such weight. Edges without rates get the mean weight."""
        known: dict[EdgeId, float | None] = {}
        for edge in present:
            held = self.holdings[edge]
            # An edge may report any number, so the product b·r could be infinite. The product of the roots is finite.
            drift = math.sqrt(held.drift.get(measure, 0.0))
            known[edge] = math.sqrt(held.update_bytes) * drift if held.is_rated else None
        largest = max((w for w in known.values() if w), default=1.0)
        known = {edge: None if w is None else w / largest for edge, w in known.items()}
        rated = [w for w in known.values() if w is not None]
        mean = math.fsum(rated) / len(rated) if rated else 0.0
        mean = mean or 1.0
        return {e: mean if w is None else max(w, self.policy.min_weight * mean) for e, w in known.items()}

    def _gain(self, best: Mapping[EdgeId, Mapping[str, float]]) -> float:
        """Returns the ratio of bytes with the present targets to bytes with the best targets, for the measure with the
        largest ratio.
        """
        ratios = [1.0]
        for measure in self.divided:
            now = then = 0.0
            for edge, shares in best.items():
                held = self.holdings[edge]
                bytes_per_s = min(held.update_bytes * held.drift.get(measure, 0.0), MAX_RATE)
                now += _over(bytes_per_s, self.targets[edge].get(measure, 0.0))
                then += _over(bytes_per_s, shares[measure])
            ratios.append(_over(now, then) if now and math.isfinite(then) else 1.0)
        return max(ratios)

    def _shrink(self, present: Iterable[EdgeId]) -> None:
        for edge in present:
            held, target = self.holdings[edge], self.targets[edge]
            has = held.last.shares
            less = {m: min(has.get(m, 0.0), target[m]) for m in target}
            if held.pending is None and any(less[m] < has.get(m, 0.0) for m in target):
                self.holdings[edge] = held.issue(less, MIN_TIME_MS)

    def _grow(self, present: Iterable[EdgeId], effective_from_ms: int) -> None:
        free = [e for e in present if self.holdings[e].pending is None]
        grown_shares: dict[EdgeId, dict[str, float]] = {e: dict(self.holdings[e].last.shares) for e in free}
        changed: set[EdgeId] = set()
        for measure in self.divided | self.undivided:
            wanted = {e: self.targets[e][measure] - grown_shares[e].get(measure, 0.0) for e in free}
            wanted = {e: w for e, w in wanted.items() if w > 0}
            fraction = self._affordable(measure, wanted, effective_from_ms)
            for edge, want in wanted.items():
                if fraction == 1.0:
                    grown_shares[edge][measure] = self.targets[edge][measure]
                elif want * fraction >= self.policy.min_growth * self.targets[edge][measure]:
                    grown_shares[edge][measure] = grown_shares[edge].get(measure, 0.0) + want * fraction
                else:
                    continue
                changed.add(edge)
        for edge in changed:
            self.holdings[edge] = self.holdings[edge].issue(grown_shares[edge], effective_from_ms)

    def _affordable(self, measure: str, wanted: Mapping[EdgeId, float], effective_from_ms: int) -> float:
        """Returns the fraction of the wanted growth with which the shares in force still add up to at
        most the budget.
        """
        if measure not in self.divided or not wanted:
            return 1.0
        limit = self.divided[measure]
        taken = self._taken(measure, effective_from_ms)
        grown = {e: max(taken[e], self.targets[e][measure]) for e in wanted}
        if _sum((taken | grown).values()) <= limit:
            return 1.0
        room = limit - _sum(taken.values())
        return min(1.0 - _RELATIVE_TOLERANCE, max(0.0, room * (1.0 - _RELATIVE_TOLERANCE) / math.fsum(wanted.values())))


def _divide(amount: float, weights: Mapping[EdgeId, float]) -> dict[EdgeId, float]:
    """Divides `amount` in proportion to the weights. In floating point, too, the shares add up to at most `amount`."""
    total = math.fsum(weights.values())
    shares = {edge: amount * (weight / total) for edge, weight in weights.items()}
    largest = max(shares, key=lambda edge: shares[edge])
    while math.fsum(shares.values()) > amount:
        shares[largest] = math.nextafter(shares[largest], 0.0)
    return shares


def _sum(shares: Iterable[float]) -> float:
    """Returns the sum of shares, infinite if it exceeds all numbers."""
    try:
        return math.fsum(shares)
    except OverflowError:
        return math.inf


def _over(amount: float, share: float) -> float:
    if amount == 0:
        return 0.0
    return amount / share if share > 0 else math.inf


def _finite_or_zero(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def error_limits(spec: QuerySpec) -> tuple[dict[str, float], dict[str, float]]:
    """Returns a query's error budget E per measure: first the measures whose E is divided, then the others.

    Every edge may use the E of an undivided measure in full. The error of an extremum is the largest error of any edge.
    Errors of sums add up over edges, so their E is divided. Relative errors do not add up: Σ e·|vᵢ| ≤ e·|Σ vᵢ| as long
    as all vᵢ have the same sign.
    """
    if spec.error_budget is None:
        return {}, {}
    kind = {m.name: m.function.error for m in spec.measures}
    divided = {name: limit for name, limit in spec.error_budget.limits if kind[name] != "extremum"}
    return divided, {name: limit for name, limit in spec.error_budget.limits if name not in divided}
