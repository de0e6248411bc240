"""Allocation of a query's error budget E to its edges, and its reallocation as drift rates change. Pure.

Invariant: for every slice, the shares that edges may apply to it add up to at most E, whatever messages are late,
lost or duplicated and whichever process dies. No answer's withheld error exceeds E.

How it holds. A share belongs to the slices from some slice on (`edgewater/model/share_steps.py`), so the share that
edge i may apply to slice x is a step function that changes only by grants of the center. A grant counts from the moment
it is stored until the edge has confirmed a smaller one, and then only for slices before the smaller share's first one.
A share grows no earlier than the slice from which all reductions that pay for it are in force. A silent edge keeps its
share; a retired edge keeps it for the slices that it may have closed. An edge has at most one pending grant, which
bounds the state.

How E is divided. An edge whose value drifts by r per second sends b bytes each time the drift reaches its share, that
is b·r/E_i bytes per second. Under ΣE_i = E the sum is least at E_i ∝ sqrt(b_i·r_i). A new division must save enough
bytes to pay for its messages, and must not follow the last one too soon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import Any

from center.budgets.holdings import NO_HOLDING, Grant, Holding
from edgewater.model.query import QuerySpec
from edgewater.model.streams import MIN_TIME_MS, EdgeId

_RELATIVE_TOLERANCE = 1e-9
"""Shares that went through the wire, and their sums, compare equal within this."""
MAX_RATE = 1e200
"""Bytes per second, in units of the budget, that are compared: sums and ratios of more may be infinite."""


@dataclass(frozen=True, slots=True)
class AllocationPolicy:
    """When a budget is reallocated.

    Attributes:
        min_gain: least predicted ratio of bytes under the present division to bytes under the best one.
        min_interval_ms: least wall time between two reallocations for that gain. A change of members does not wait.
        silence_timeout_ms: an edge that has not reported for this long keeps its share and is not reallocated.
        min_weight: least weight of an edge, as a fraction of the mean weight: a quiet edge may not stay quiet.
        min_growth: least growth that is granted, as a fraction of the target share.
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
        version: of the last grant that it received; 0: none.
        shares: per measure, from the slice that starts at `from_ms` on.
        update_bytes: b, size of one group's update; 0: nothing has been sent yet.
        drift: r per measure, in the measure's unit per second of event time.
    """

    version: int
    shares: Mapping[str, float]
    from_ms: int
    update_bytes: float = 0.0
    drift: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """The edges that share the budget.

    Attributes:
        expected: edges that answer the query.
        retired: edges that did and are gone for good, each with a slice from which on it can have closed none.
    """

    expected: frozenset[EdgeId]
    retired: Mapping[EdgeId, int]


@dataclass(frozen=True, slots=True)
class ShareReported:
    edge: EdgeId
    report: BudgetReport
    now_ms: int


@dataclass(frozen=True, slots=True)
class RebalanceEvent:
    """Shares may be reallocated now. `horizon_ms`: event time that no valid clock has passed."""

    now_ms: int
    horizon_ms: int


Event = MembersChanged | ShareReported | RebalanceEvent


@dataclass(frozen=True, slots=True)
class ShareViolation:
    """An edge applies a share that it was not granted. The share it is entitled to is granted again."""

    edge: EdgeId
    message: str


class BudgetAllocator:
    """State machine that allocates one query's error budget.

    Args:
        divided: E per measure whose errors add up over edges.
        undivided: E per measure that every edge may use in full: the error of an extremum is the largest of any
            edge's, and relative errors of values of one sign do not add up.

    Attributes:
        holdings: per edge, the shares that it may apply.
        targets: per edge, the shares that the allocator moves it to.
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

    def handle(self, event: Event) -> list[ShareViolation]:
        """Applies an event. Read `grants` afterwards for the messages to edges."""
        return self._handle(event)

    @singledispatchmethod
    def _handle(self, event: Event) -> list[ShareViolation]:
        raise TypeError(f"{type(event).__name__} is not an event of a budget allocator")

    def grants(self) -> dict[EdgeId, Grant]:
        """The last grant to each edge, sent again at the start of each session; receiving one twice is harmless."""
        return {edge: h.grant for edge, h in self.holdings.items() if h.grant.version > 0}

    def durable_state(self) -> object:
        """The state that must be stored whenever it changes; rates and report times need not be."""
        return (
            {e: (h.version, h.steps, h.grant, h.retired) for e, h in self.holdings.items()},
            {e: dict(t) for e, t in self.targets.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """The whole state, but for the budget (the query has it) and the expected edges (the catalog has them)."""
        return {
            "holdings": {edge: h.to_json() for edge, h in self.holdings.items()},
            "targets": self.targets,
            "decided_at_ms": self.decided_at_ms,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `to_json` wrote."""
        self.holdings = {EdgeId(e): Holding.from_json(h) for e, h in state["holdings"].items()}
        self.targets = {EdgeId(e): dict(t) for e, t in state["targets"].items()}
        self.decided_at_ms = state["decided_at_ms"]

    def in_force(self, slice_start_ms: int) -> dict[str, float]:
        """Per divided measure, the largest error that all edges together may withhold of a slice; at most E."""
        return {m: math.fsum(h.max_share_at(m, slice_start_ms) for h in self.holdings.values()) for m in self.divided}

    @_handle.register
    def _(self, event: MembersChanged) -> list[ShareViolation]:
        self.expected = event.expected
        for edge, gone_from_ms in event.retired.items():
            holding = self.holdings.get(edge)
            if holding is not None and edge not in event.expected and not holding.retired:
                self.holdings[edge] = holding.retire(gone_from_ms)
        return []

    @_handle.register
    def _(self, event: ShareReported) -> list[ShareViolation]:
        if event.edge not in self.expected:
            return []
        report, held = event.report, self.holdings.get(event.edge, NO_HOLDING)
        held = replace(
            held,
            reported_at_ms=max(held.reported_at_ms, event.now_ms),
            update_bytes=_finite_or_zero(report.update_bytes) or held.update_bytes,
            drift={m: _finite_or_zero(report.drift.get(m, 0.0)) for m in self.divided} if report.drift else held.drift,
        )
        violation = self._violation(held, report)
        if violation:
            self.holdings[event.edge] = held.reissue(report.version, self._claimed(report), self._entitled(held))
            return [ShareViolation(event.edge, f"edge {event.edge} {violation}")]
        if held.pending is not None and report.version == held.pending.version:
            held = held.confirm(report.from_ms)
        elif report.version != held.version:
            # The edge lost its state or runs from a copy of it. It withholds no more than was counted.
            held = held.reissue(report.version, {}, self._entitled(held))
        self.holdings[event.edge] = held
        return []

    def _violation(self, held: Holding, report: BudgetReport) -> str:
        """The reason why a report is not covered by the grants; empty: it is covered."""
        known, pending = self.divided | self.undivided, held.pending
        granted = {
            m: held.max_share_from(m, MIN_TIME_MS) for m in known
        }  # any grant, in case the edge has lost its state
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
        return {
            m: s for m, s in report.shares.items() if m in self.divided | self.undivided and math.isfinite(s) and s > 0
        }

    def _entitled(self, held: Holding) -> dict[str, float]:
        """The shares to fall back to: the smaller of the confirmed and the pending grant."""
        grants = [held.last.shares] + ([held.pending.shares] if held.pending is not None else [])
        return {m: min(shares.get(m, 0.0) for shares in grants) for m in self.divided | self.undivided}

    @_handle.register
    def _(self, event: RebalanceEvent) -> list[ShareViolation]:
        if not self.expected:
            return []
        present = sorted(
            e
            for e, h in self.holdings.items()
            if e in self.expected and h.reported_at_ms > event.now_ms - self.policy.silence_timeout_ms
        )
        if present:
            effective_from_ms = self._effective_from_ms(event.horizon_ms)
            self._decide(present, effective_from_ms, event.now_ms)
            self._shrink(present)
            self._grow(present, effective_from_ms)
        return []

    def _effective_from_ms(self, horizon_ms: int) -> int:
        """The slice from which on all confirmed reductions are in force.

        A reduction that starts beyond the horizon (an ended stream, a wrong clock) does not count.
        """
        starts = [h.last.from_ms for h in self.holdings.values() if h.last.from_ms <= horizon_ms]
        return max(starts, default=MIN_TIME_MS)

    def _decide(self, present: list[EdgeId], effective_from_ms: int, now_ms: int) -> None:
        best = {edge: dict(self.undivided) for edge in present}
        for measure, limit in self.divided.items():
            taken = (h.max_share_from(measure, effective_from_ms) for e, h in self.holdings.items() if e not in best)
            shares = _divide(max(0.0, limit - math.fsum(taken)), self._weights(present, measure))
            for edge, share in shares.items():
                best[edge][measure] = share
        soon = now_ms - self.decided_at_ms < self.policy.min_interval_ms
        if self.targets.keys() == best.keys() and (soon or self._gain(best) < self.policy.min_gain):
            return
        self.targets, self.decided_at_ms = best, now_ms

    def _weights(self, present: Iterable[EdgeId], measure: str) -> dict[EdgeId, float]:
        """sqrt(b·r) per edge, in units of the largest; the mean for edges without rates yet."""
        known: dict[EdgeId, float | None] = {}
        for edge in present:
            held = self.holdings[edge]
            # An edge may state any number: the product could be infinite.
            drift = math.sqrt(held.drift.get(measure, 0.0))
            known[edge] = math.sqrt(held.update_bytes) * drift if held.is_rated else None
        largest = max((w for w in known.values() if w), default=1.0)
        known = {edge: None if w is None else w / largest for edge, w in known.items()}
        rated = [w for w in known.values() if w is not None]
        mean = math.fsum(rated) / len(rated) if rated else 0.0
        mean = mean or 1.0
        return {e: mean if w is None else max(w, self.policy.min_weight * mean) for e, w in known.items()}

    def _gain(self, best: Mapping[EdgeId, Mapping[str, float]]) -> float:
        """Ratio of bytes under the present targets to bytes under the best ones: the largest of any measure's."""
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
        """The fraction of the wanted growth that keeps the sum of shares in force within the budget."""
        if measure not in self.divided or not wanted:
            return 1.0
        limit = self.divided[measure]
        taken = {e: h.max_share_from(measure, effective_from_ms) for e, h in self.holdings.items()}
        grown = {e: max(taken[e], self.targets[e][measure]) for e in wanted}
        if math.fsum((taken | grown).values()) <= limit:
            return 1.0
        room = limit - math.fsum(taken.values())
        return min(1.0 - _RELATIVE_TOLERANCE, max(0.0, room * (1.0 - _RELATIVE_TOLERANCE) / math.fsum(wanted.values())))


def _divide(amount: float, weights: Mapping[EdgeId, float]) -> dict[EdgeId, float]:
    """Divides `amount` in proportion to the weights; the shares add up to at most `amount`, also in floating point."""
    total = math.fsum(weights.values())
    shares = {edge: amount * (weight / total) for edge, weight in weights.items()}
    largest = max(shares, key=lambda edge: shares[edge])
    while math.fsum(shares.values()) > amount:
        shares[largest] = math.nextafter(shares[largest], 0.0)
    return shares


def _over(amount: float, share: float) -> float:
    if amount == 0:
        return 0.0
    return amount / share if share > 0 else math.inf


def _finite_or_zero(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def error_limits(spec: QuerySpec) -> tuple[dict[str, float], dict[str, float]]:
    """A query's error budget E per measure: the limits that edges divide, and those that every edge may use in full.

    Errors of sums add up over edges. The error of an extremum is the largest of any edge's. Relative errors do not add
    up either: Σ e·|vᵢ| ≤ e·|Σ vᵢ| as long as the vᵢ have one sign.
    """
    if spec.error_budget is None:
        return {}, {}
    kind = {m.name: m.function.error for m in spec.measures}
    divided = {name: limit for name, limit in spec.error_budget.limits if kind[name] != "extremum"}
    return divided, {name: limit for name, limit in spec.error_budget.limits if name not in divided}
