"""`Quality` is an answer's phase, completeness, error by cause, and contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from center.ledger.accuracy_quality import AccuracyQuality
from center.ledger.violations import (
    AFTER_FINAL,
    GUESSED,
    REJECTED,
    STALENESS,
    Violation,
    edges_left,
    input_lost,
    missing_edges,
    nothing_arrived,
    state_lost,
    too_stale,
    with_violations,
)
from center.ledger.withheld import Totals, WithheldBound, over_budget, without_bounds
from edgewater.model.query import ErrorBudget, QuerySpec
from edgewater.model.streams import Constant, Delivery, EdgeId
from edgewater.wire import GUESSES, REJECTIONS, InputLoss, Rest


class Phase(StrEnum):
    """Progress of a window's answers. The phase of a window never goes back."""

    EARLY = "early"
    COMPLETE = "complete"
    FINAL = "final"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS = {Phase.EARLY: 0, Phase.COMPLETE: 1, Phase.FINAL: 2}


_NO_CONSTANTS: Mapping[str, Mapping[str, Constant]] = {}
_NO_DELIVERIES: Mapping[str, tuple[Delivery, ...]] = {}


MAX_LISTED_EDGES = 1_000
"""The most edges in a list of an answer."""

Constants = Mapping[str, Constant]
"""By column of `group_by`, the value of the column if all records of an edge have the same value."""


@dataclass(frozen=True, slots=True)
class EdgeStatements:
    """The statements of each edge about a window at the time of its answer.

    Attributes:
        closed: expected edges, sorted, that had closed the window with all their records.
        closed_until_ms: for each missing edge that has closed a slice, the event time before which the edge had closed
            all slices.
        totals: totals by edge, sorted, of the edges whose closes state late or withheld records.
        constants: constants of the edges in `totals`.
    """

    closed: tuple[str, ...] = ()
    closed_until_ms: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, Totals] = field(default_factory=dict)
    constants: Mapping[str, Constants] = field(default_factory=dict)

    def to_mapping(self) -> dict[str, Any]:
        """Returns JSON. A member is null if it would have more than `MAX_LISTED_EDGES` edges."""
        bounds = {edge: t.withheld for edge, t in self.totals.items() if t.withheld}
        late = {edge: t.late for edge, t in self.totals.items() if t.late}
        few = MAX_LISTED_EDGES
        only = {edge: dict(self.constants[edge]) for edge in bounds if edge in self.constants}
        return {
            **({"only": only} if only and len(bounds) <= few else {}),
            "closed": list(self.closed) if len(self.closed) <= few else None,
            "closed_until_ms": dict(self.closed_until_ms) if len(self.closed_until_ms) <= few else None,
            "late": late if len(late) <= few else None,
            "withheld": {e: {name: b.to_mapping() for name, b in sorted(w.items())} for e, w in bounds.items()}
            if len(bounds) <= few
            else None,
        }


NO_STATEMENTS = EdgeStatements()


@dataclass(frozen=True, slots=True)
class SessionQuality:
    """The part of an answer's quality about its session.

    Attributes:
        cut: whether the session reached its maximum length and continues in the next session.
        cuts: number of final sessions of the query so far that were cut.
        merged_into_ms: start of the session into which this session was merged. This session then has no data. None if
            it was not merged.
    """

    cut: bool
    cuts: int
    merged_into_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of one answer at the time it was emitted.

    Attributes:
        expected: number of expected edges.
        missing: expected edges, sorted, that have not closed the window, or closed it without all its records because
            they joined too late, lost their state or have lost input.
        lost_state: the edges of `missing` that lost their state while the window was open.
        observed: number of records in the answer.
        late: number of records in the answer that arrived after their slice's close.
        staleness_ms: time from the window's end to this answer.
        first_staleness_ms: time from the window's end to the answer to which a staleness budget applies, as in
            `assess`.
        withheld: by measure, the withheld amounts, if an edge withholds anything.
        requested: the budget as requested. Without a budget, ``{"exact": true}`` if all measures are exact, otherwise
            whether each measure is exact. Such a contract requests all records. A measure that is not exact has the
            error of its synopsis.
        session: statement about the session, for session windows.
        accuracy: statement about the accuracy, for a query with an accuracy.
        losses: by edge, the stated losses of input that the window may lack.
        deliveries: by expected edge that does not count each record exactly once, the edge's deliveries.
        left: edges, sorted, that left after the window had begun and before they had closed it. They were retired, or
            no longer serve the stream.
        edges: the statements of each edge.
        constants: constants by edge of `missing` and `left`. The edge has records only in groups with these values.
            Edges without a constant are absent.
        rests: by measure whose values edges withhold, the amount that is missing in all groups together; None if it is
            unknown.
    """

    expected: int
    missing: tuple[str, ...]
    observed: int
    late: int
    staleness_ms: int
    first_staleness_ms: int
    withheld: Mapping[str, WithheldBound]
    requested: Mapping[str, Any]
    violations: tuple[Violation, ...] = ()
    session: SessionQuality | None = None
    accuracy: AccuracyQuality | None = None
    lost_state: tuple[str, ...] = ()
    losses: tuple[tuple[EdgeId, InputLoss], ...] = ()
    deliveries: Mapping[str, tuple[Delivery, ...]] = field(default_factory=dict)
    left: tuple[EdgeId, ...] = ()
    edges: EdgeStatements = NO_STATEMENTS
    constants: Mapping[str, Constants] = field(default_factory=dict)
    rests: Mapping[str, Rest | None] = field(default_factory=dict)

    @property
    def reported(self) -> int:
        return self.expected - len(self.missing)

    @property
    def is_complete(self) -> bool:
        return not self.missing and not self.left and self.expected > 0

    @property
    def keeps_error(self) -> bool:
        """Whether the contract has no violation except the staleness.

        It is also false if a maximum is unsent, because the error of the maximum depends on the values of the answer
        (`center.serving.withheld`).
        """
        unsent = any(bound.unsent is not None for bound in self.withheld.values())
        return not unsent and all(v.code == STALENESS for v in self.violations)

    def to_mapping(self) -> dict[str, Any]:
        """Returns the members of an answer's JSON: completeness, records, staleness_ms, error, contract.

        It also has two members that answers do not show: explanations show `edges`, and totals are computed from
        `rests`.
        """
        result: dict[str, Any] = {
            "completeness": self._completeness(),
            "records": {
                "observed": self.observed,
                "expected": self.observed if self.is_complete else None,
                "sampled": self.observed,
                "late": self.late,
                "after_final": 0,
                "rejected": 0,
            },
            "staleness_ms": self.staleness_ms,
            "first_staleness_ms": self.first_staleness_ms,
            "error": {
                "sampling": 0,
                "withheld": {name: bound.to_mapping() for name, bound in self.withheld.items()},
                "missing": 0 if self.is_complete else None,
            },
            "contract": {
                "requested": dict(self.requested),
                "met": not self.violations,
                "violations": [{"code": v.code, "message": v.message} for v in self.violations],
            },
            "edges": self.edges.to_mapping(),
            "rests": {name: None if rest is None else rest.to_json() for name, rest in self.rests.items()},
        }
        if self.accuracy is not None:
            self.accuracy.extend(result, self.observed)
        if self.session is not None:
            result["session"] = {"cut": self.session.cut, "cuts": self.session.cuts}
            if self.session.merged_into_ms is not None:
                result["merged_into_ms"] = self.session.merged_into_ms
        return result

    def _completeness(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "ratio": self.reported / (self.expected + len(self.left)) if self.expected else 0.0,
            "expected": self.expected,
            "reported": self.reported,
            "missing": list(self.missing),
        }
        if self.lost_state:
            result["lost_state"] = list(self.lost_state)
        if self.left:
            result["left"] = list(self.left)
        if self.constants:
            result["only"] = {edge: dict(values) for edge, values in self.constants.items()}
        if self.deliveries:
            result["delivery"] = {edge: list(each) for edge, each in sorted(self.deliveries.items())}
        if self.losses:
            result["losses"] = [{"edge": edge, **asdict(loss)} for edge, loss in self.losses]
        return result


def assess(
    spec: QuerySpec,
    totals: Totals,
    *,
    expected: int,
    missing: tuple[str, ...],
    staleness_ms: int,
    first_staleness_ms: int,
    lost_state: tuple[str, ...] = (),
    losses: tuple[tuple[EdgeId, InputLoss], ...] = (),
    constants: Mapping[str, Constants] = _NO_CONSTANTS,
    deliveries: Mapping[str, tuple[Delivery, ...]] = _NO_DELIVERIES,
    left: tuple[EdgeId, ...] = (),
    has_data: bool = True,
    edges: EdgeStatements = NO_STATEMENTS,
) -> Quality:
    """Computes the quality of an answer.

    Args:
        constants: the constants of each edge.
        has_data: whether an edge has reported records of the window.
        first_staleness_ms: staleness of the window's first answer. Under a combined budget, staleness of the first
            answer that kept the error budget. A staleness budget applies only to this answer.
    """
    withheld = dict(sorted((totals.withheld or {}).items()))
    violations: list[Violation] = []
    if spec.staleness_budget is not None:
        of = "first answer within the error budget" if spec.saves_bytes else "first answer"
        violations += too_stale(first_staleness_ms, spec.staleness_budget.staleness_ms, of)
    violations += missing_edges(expected, missing)
    if spec.error_budget is not None or spec.staleness_budget is None:
        violations += over_budget(withheld, spec.error_budget or ErrorBudget(()), totals.signs or {})
        violations += without_bounds(spec, withheld)
    violations += state_lost(lost_state) + edges_left(left)
    if not has_data:
        violations += nothing_arrived(expected, missing)
    return Quality(
        expected=expected,
        missing=missing,
        observed=totals.observed,
        late=totals.late,
        staleness_ms=staleness_ms,
        first_staleness_ms=first_staleness_ms,
        withheld=withheld,
        requested=_requested(spec),
        violations=(*violations, *input_lost(losses)),
        lost_state=lost_state,
        losses=losses,
        deliveries=deliveries,
        left=left,
        edges=edges,
        constants={edge: constants[edge] for edge in (*missing, *left) if edge in constants},
        rests=totals.united_rests(spec),
    )


def with_late_records(quality: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Adds records that an answer lacks, or may lack, to the result of `Quality.to_mapping()`.

    The window was final when the records came, sources rejected the records, or edges guessed. The values of a rejected
    record are not known. It is also not known whether the query's condition would accept it. So with rejected or
    guessed records, the number of expected records is unknown.

    Args:
        quality: the result of `Quality.to_mapping()`.
        counts: number of records by reason (`LateSlice.reason`).
    """
    rejected = {reason: n for reason, n in counts.items() if reason in REJECTIONS and n}
    guessed = {reason: n for reason, n in counts.items() if reason in GUESSES and n}
    late = {reason: n for reason, n in counts.items() if n and reason not in rejected and reason not in guessed}
    if not rejected and not guessed and not late:
        return dict(quality)
    records, completeness = dict(quality["records"]), dict(quality["completeness"])
    violations = []
    for name, code, by_reason, what in (
        ("after_final", AFTER_FINAL, late, "accepted records of the window are not in the answer"),
        ("rejected", REJECTED, rejected, "records that sources rejected are, or may be, records of the window"),
        ("guessed", GUESSED, guessed, "records, or more, were counted or left out on a guess"),
    ):
        if by_reason:
            records[name] = completeness[name] = sum(by_reason.values())
            reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(by_reason.items()))
            violations.append(Violation(code, f"{records[name]} {what} ({reasons})"))
    if guessed:
        completeness["guessed"] = guessed
    lacking = sum(n for reason, n in counts.items() if reason not in guessed or not GUESSES[reason].adds)
    completeness["ratio"] *= records["observed"] / (records["observed"] + lacking) if lacking else 1.0
    if rejected or guessed:
        records["expected"] = None
    elif records["expected"] is not None and "prediction" not in quality:
        records["expected"] = records["observed"] + lacking
    return {
        **quality,
        "completeness": completeness,
        "records": records,
        "error": {**quality["error"], "missing": None},
        "contract": with_violations(quality["contract"], violations),
    }


LATE_COUNTS = ("after_final", "rejected", "guessed")
"""The members of `records` that may change after the final answer."""


def late_counts(quality: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the values of `LATE_COUNTS`. Nothing else of a final answer may change."""
    return tuple(quality["records"].get(name, 0) for name in LATE_COUNTS)


def united_late_counts(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the counts of records in the completeness of several windows, added up. Counts of 0 are left out."""
    parts, guessed = list(parts), Counter[str]()
    for part in parts:
        guessed.update(part.get("guessed", {}))
    counts = {name: sum(part.get(name, 0) for part in parts) for name in ("after_final", "rejected")}
    return {name: n for name, n in {**counts, "guessed": dict(guessed)}.items() if n}


def _requested(spec: QuerySpec) -> dict[str, Any]:
    """Returns `Quality.requested`."""
    result: dict[str, Any] = {}
    if spec.error_budget is not None:
        result = {"error": spec.error_budget.to_mapping()}
    elif spec.staleness_budget is None:
        result = {"exact": _exactness(spec)}
    staleness = {} if spec.staleness_budget is None else {"staleness_ms": spec.staleness_budget.staleness_ms}
    if spec.accuracy is not None and spec.accuracy.kind is None:
        # The error of a function's value is checked where the value is computed (`center.serving.function_values`).
        result = dict(spec.accuracy.to_contract())
    return {**result, **staleness}


def _exactness(spec: QuerySpec) -> bool | dict[str, bool]:
    """Returns True if all measures are exact; otherwise, by measure, whether it is exact."""
    each = {m.name: m.function.exact for m in spec.measures}
    return True if all(each.values()) else each
