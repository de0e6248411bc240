"""How a query's error budget E is divided among its edges, and divided anew. Pure.

The promise: for every slice, whatever messages are late, lost or doubled and whichever process dies,
the shares that edges may apply to it add up to at most E. So no window's answer is ever wrong by more.

How it is kept. A share belongs to slices from some slice on (`edge/core/budget_schedule.py`), so "what may edge i apply
to slice x" is a step function that only the center's own words move. It is counted from the moment a
grant is written down until the edge has confirmed a smaller one, and then only for slices before the one that
the edge says it begins with. A share grows no earlier than the slice from which on all shrinks that pay for
it are in force. An edge that is silent keeps what it has; one that is retired keeps it for the slices it
may have closed. An edge has one grant under way at a time, which bounds what has to be remembered.

How it is divided. An edge whose value drifts by r per second sends b bytes each time the drift reaches
its share, b·r/E_i bytes per second; the sum is least, under ΣE_i = E, at E_i ∝ sqrt(b_i·r_i). A new division
must save enough to be worth its messages and must not come too soon after the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import Any

from center.budgets.holdings import NOTHING, Grant, Holding
from edgewater.streams import MIN_TIME_MS, EdgeId

__all__ = [
    "AllocationPolicy",
    "BudgetAllocator",
    "BudgetReport",
    "Grant",
    "MembersChanged",
    "RebalanceEvent",
    "ShareReported",
    "ShareViolation",
]

_ROUNDING = 1e-9
"""Relative: shares that went through the wire and sums of them compare equal within this."""


@dataclass(frozen=True, slots=True)
class AllocationPolicy:
    """When a budget is divided anew.

    Attributes:
        gain: the least ratio of bytes, as predicted, of the present division to the best one.
        interval_ms: the least wall time between two divisions for the sake of that gain. Edges that
            come or go are not made to wait.
        silent_ms: an edge that has not reported for so long keeps what it has and takes no part.
        least: an edge's least weight, as a part of the mean: one that is quiet now may not stay so.
        step: the least growth, as a part of the share aimed at, that is worth a message.
    """

    gain: float = 1.1
    interval_ms: int = 10_000
    silent_ms: int = 60_000
    least: float = 0.02
    step: float = 0.05


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """What an edge says it applies, from its journal.

    Attributes:
        version: of the grant; 0: it has had none.
        shares: per measure, from the slice that starts at `from_ms` on.
        update_bytes: b, of one group's update; 0: nothing has been sent yet.
        drift: r per measure, in the measure's unit per second of event time.
    """

    version: int
    shares: Mapping[str, float]
    from_ms: int
    update_bytes: float = 0.0
    drift: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Who is expected to answer the query. `retired`: those who were and are gone for good, each with
    a slice from which on it can have closed none."""

    expected: frozenset[EdgeId]
    retired: Mapping[EdgeId, int]


@dataclass(frozen=True, slots=True)
class ShareReported:
    edge: EdgeId
    report: BudgetReport
    now_ms: int


@dataclass(frozen=True, slots=True)
class RebalanceEvent:
    """Time to see whether shares should move. `horizon_ms`: event time that no sound clock is past."""

    now_ms: int
    horizon_ms: int


Event = MembersChanged | ShareReported | RebalanceEvent


@dataclass(frozen=True, slots=True)
class ShareViolation:
    """An edge applies a share that it was not given. It is given its own again."""

    edge: EdgeId
    message: str


class BudgetAllocator:
    """The shares of one query.

    Args:
        divided: E per measure whose errors add up over edges.
        whole: E per measure of which every edge may have all: the error of an extremum is the largest
            of any edge's, and relative errors of values of one sign do not add up.

    Attributes:
        holdings: by edge, what it may apply.
        targets: by edge, the shares aimed at.
    """

    def __init__(
        self, divided: Mapping[str, float], whole: Mapping[str, float], policy: AllocationPolicy | None = None
    ) -> None:
        self.divided, self.whole = dict(divided), dict(whole)
        self.policy = policy or AllocationPolicy()
        self.holdings: dict[EdgeId, Holding] = {}
        self.expected: frozenset[EdgeId] = frozenset()
        self.targets: dict[EdgeId, dict[str, float]] = {}
        self.decided_at_ms = 0

    def handle(self, event: Event) -> list[ShareViolation]:
        """Takes an event in. What edges are to be told afterwards says `grants`."""
        return self._handle(event)

    @singledispatchmethod
    def _handle(self, event: Event) -> list[ShareViolation]:
        raise TypeError(f"{type(event).__name__} is no event of a share book")

    def grants(self) -> dict[EdgeId, Grant]:
        """The last word to each edge: told anew at the beginning of each session, harmless if heard before."""
        return {edge: h.word for edge, h in self.holdings.items() if h.word.version > 0}

    def obligations(self) -> object:
        """What must be written down whenever it changes; rates and times of hearing need not be."""
        return (
            {e: (h.version, h.steps, h.word, h.retired) for e, h in self.holdings.items()},
            {e: dict(t) for e, t in self.targets.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """All that is remembered. The budget itself is the query's, and who is expected the catalog's."""
        return {
            "holdings": {edge: h.to_json() for edge, h in self.holdings.items()},
            "targets": self.targets,
            "decided_at_ms": self.decided_at_ms,
        }

    def restore(self, given: Mapping[str, Any]) -> None:
        """Puts a fresh book into the state that `to_json` wrote."""
        self.holdings = {EdgeId(e): Holding.from_json(h) for e, h in given["holdings"].items()}
        self.targets = {EdgeId(e): dict(t) for e, t in given["targets"].items()}
        self.decided_at_ms = given["decided_at_ms"]

    def in_force(self, slice_start_ms: int) -> dict[str, float]:
        """Per divided measure, the most that edges may hold back of a slice in all; at most E."""
        return {m: math.fsum(h.bound(m, slice_start_ms) for h in self.holdings.values()) for m in self.divided}

    # What it is told

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
        report, held = event.report, self.holdings.get(event.edge, NOTHING)
        held = replace(
            held,
            heard_ms=max(held.heard_ms, event.now_ms),
            update_bytes=_sane(report.update_bytes) or held.update_bytes,
            drift={m: _sane(report.drift.get(m, 0.0)) for m in self.divided} if report.drift else held.drift,
        )
        wrong = self._not_given(held, report)
        if wrong:
            self.holdings[event.edge] = held.forget(report.version, self._claimed(report), self._entitled(held))
            return [ShareViolation(event.edge, f"edge {event.edge} {wrong}")]
        if held.pending is not None and report.version == held.pending.version:
            held = held.confirm(report.from_ms)
        elif report.version != held.version:
            # It has lost its state, or comes from a copy of it; it holds back no more than was counted.
            held = held.forget(report.version, {}, self._entitled(held))
        self.holdings[event.edge] = held
        return []

    def _not_given(self, held: Holding, report: BudgetReport) -> str:
        """What is wrong with a report; empty: nothing is."""
        known, pending = self.divided | self.whole, held.pending
        given = {m: held.most(m, MIN_TIME_MS) for m in known}  # by any word, should it have lost its state
        if pending is not None and report.version == pending.version:
            given = dict(pending.shares)
            if report.from_ms < pending.from_ms:
                return f"applies version {report.version} from {report.from_ms} on, given from {pending.from_ms} on"
        elif report.version == held.version:
            given = dict(held.last.shares)
        for measure, share in report.shares.items():
            if measure not in known or not math.isfinite(share) or share < 0:
                return f"applies a share of {share} to {measure}; the budget has {', '.join(sorted(known))}"
            most = given.get(measure, 0.0)
            if share > most * (1 + _ROUNDING):
                return f"applies a share of {share:g} to {measure}, of which it was given {most:g}"
        return ""

    def _claimed(self, report: BudgetReport) -> dict[str, float]:
        return {m: s for m, s in report.shares.items() if m in self.divided | self.whole and math.isfinite(s) and s > 0}

    def _entitled(self, held: Holding) -> dict[str, float]:
        """What it goes back to: the least that it was told last."""
        words = [held.last.shares] + ([held.pending.shares] if held.pending is not None else [])
        return {m: min(word.get(m, 0.0) for word in words) for m in self.divided | self.whole}

    # What it does

    @_handle.register
    def _(self, event: RebalanceEvent) -> list[ShareViolation]:
        if not self.expected:
            return []
        present = sorted(
            e
            for e, h in self.holdings.items()
            if e in self.expected and h.heard_ms > event.now_ms - self.policy.silent_ms
        )
        if present:
            border = self._border(event.horizon_ms)
            self._decide(present, border, event.now_ms)
            self._shrink(present)
            self._grow(present, border)
        return []

    def _border(self, horizon_ms: int) -> int:
        """The slice from which on all shrinks confirmed so far are in force. One that begins beyond the
        horizon (a stream that has ended, a clock that is wrong) is not waited for: it counts as not made."""
        starts = [h.last.from_ms for h in self.holdings.values() if h.last.from_ms <= horizon_ms]
        return max(starts, default=MIN_TIME_MS)

    def _decide(self, present: list[EdgeId], border: int, now_ms: int) -> None:
        best = {edge: dict(self.whole) for edge in present}
        for measure, limit in self.divided.items():
            taken = (h.most(measure, border) for e, h in self.holdings.items() if e not in best)
            shares = _divide(max(0.0, limit - math.fsum(taken)), self._weights(present, measure))
            for edge, share in shares.items():
                best[edge][measure] = share
        soon = now_ms - self.decided_at_ms < self.policy.interval_ms
        if self.targets.keys() == best.keys() and (soon or self._gain(best) < self.policy.gain):
            return
        self.targets, self.decided_at_ms = best, now_ms

    def _weights(self, present: Iterable[EdgeId], measure: str) -> dict[EdgeId, float]:
        """sqrt(b·r) per edge; the mean for those who cannot say yet."""
        known: dict[EdgeId, float | None] = {}
        for edge in present:
            held = self.holdings[edge]
            known[edge] = math.sqrt(held.update_bytes * held.drift.get(measure, 0.0)) if held.is_rated else None
        rated = [w for w in known.values() if w is not None]
        mean = math.fsum(rated) / len(rated) if rated else 0.0
        mean = mean or 1.0
        return {e: mean if w is None else max(w, self.policy.least * mean) for e, w in known.items()}

    def _gain(self, best: Mapping[EdgeId, Mapping[str, float]]) -> float:
        """Bytes under the present targets over bytes under the best ones, of the measure that gains most."""
        ratios = [1.0]
        for measure in self.divided:
            now = then = 0.0
            for edge, shares in best.items():
                held = self.holdings[edge]
                bytes_per_s = held.update_bytes * held.drift.get(measure, 0.0)
                now += _over(bytes_per_s, self.targets[edge].get(measure, 0.0))
                then += _over(bytes_per_s, shares[measure])
            ratios.append(_over(now, then) if now and math.isfinite(then) else 1.0)
        return max(ratios)

    def _shrink(self, present: Iterable[EdgeId]) -> None:
        for edge in present:
            held, aim = self.holdings[edge], self.targets[edge]
            has = held.last.shares
            less = {m: min(has.get(m, 0.0), aim[m]) for m in aim}
            if held.pending is None and any(less[m] < has.get(m, 0.0) for m in aim):
                self.holdings[edge] = held.give(less, MIN_TIME_MS)

    def _grow(self, present: Iterable[EdgeId], border: int) -> None:
        free = [e for e in present if self.holdings[e].pending is None]
        gains: dict[EdgeId, dict[str, float]] = {e: dict(self.holdings[e].last.shares) for e in free}
        worth: set[EdgeId] = set()
        for measure in self.divided | self.whole:
            wanted = {e: self.targets[e][measure] - gains[e].get(measure, 0.0) for e in free}
            wanted = {e: w for e, w in wanted.items() if w > 0}
            part = self._affordable(measure, wanted, border)
            for edge, want in wanted.items():
                if part == 1.0:
                    gains[edge][measure] = self.targets[edge][measure]
                elif want * part >= self.policy.step * self.targets[edge][measure]:
                    gains[edge][measure] = gains[edge].get(measure, 0.0) + want * part
                else:
                    continue
                worth.add(edge)
        for edge in worth:
            self.holdings[edge] = self.holdings[edge].give(gains[edge], border)

    def _affordable(self, measure: str, wanted: Mapping[EdgeId, float], border: int) -> float:
        """The part of the growth wanted that leaves the sum of what may be in force within the budget."""
        if measure not in self.divided or not wanted:
            return 1.0
        limit = self.divided[measure]
        taken = {e: h.most(measure, border) for e, h in self.holdings.items()}
        grown = {e: max(taken[e], self.targets[e][measure]) for e in wanted}
        if math.fsum((taken | grown).values()) <= limit:
            return 1.0
        room = limit - math.fsum(taken.values())
        return min(1.0 - _ROUNDING, max(0.0, room * (1.0 - _ROUNDING) / math.fsum(wanted.values())))


def _divide(amount: float, weights: Mapping[EdgeId, float]) -> dict[EdgeId, float]:
    """`amount` in proportion to the weights; the parts add up to no more, in floating point either."""
    total = math.fsum(weights.values())
    parts = {edge: amount * (weight / total) for edge, weight in weights.items()}
    largest = max(parts, key=lambda edge: parts[edge])
    while math.fsum(parts.values()) > amount:
        parts[largest] = math.nextafter(parts[largest], 0.0)
    return parts


def _over(amount: float, share: float) -> float:
    if amount == 0:
        return 0.0
    return amount / share if share > 0 else math.inf


def _sane(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
