"""`Quality`: an answer's phase, completeness, error by cause, and contract."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from center.early import GroupPrediction, Prediction, describe_reasons, is_expensive
from center.ledger.violations import (
    ACCURACY,
    AFTER_FINAL,
    INPUT_LOST,
    LEFT,
    LOST_STATE,
    MISSING_EDGES,
    NOTHING_ARRIVED,
    REJECTED,
    STALENESS,
    Violation,
    with_violations,
)
from center.ledger.withheld import Totals, WithheldBound, over_budget, without_bounds
from edgewater.model.accuracy import MAX_GROUPS
from edgewater.model.caching import format_fraction
from edgewater.model.query import ErrorBudget, QuerySpec
from edgewater.model.streams import Constant, Delivery, EdgeId
from edgewater.wire import REJECTIONS, InputLoss, Rest, SamplingReason


class Phase(StrEnum):
    """Progress of a window's answers. A window's phase never moves back."""

    EARLY = "early"
    COMPLETE = "complete"
    FINAL = "final"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS = {Phase.EARLY: 0, Phase.COMPLETE: 1, Phase.FINAL: 2}


_NONE: Mapping[str, frozenset[SamplingReason]] = {}
_NO_CONSTANTS: Mapping[str, Mapping[str, Constant]] = {}
_NO_DELIVERIES: Mapping[str, tuple[Delivery, ...]] = {}


MAX_NAMED_EDGES = 3
"""Edges that a message names."""

MAX_LISTED_EDGES = 1_000
"""Edges that a statement of an answer lists."""

TOO_FEW_ARRIVALS = "too few arrivals are known for an error bound"
TOO_MANY_GROUPS = (
    f"there are, or recently were, more than {MAX_GROUPS} groups, or an edge whose link is too narrow for statistics of"
    " groups: windows are answered when complete"
)
UNKNOWN_SAMPLE = "unknown: records may have been sampled out that are not counted"
NOT_SAMPLED = "not sampled: the measure is cheap, and edges and links keep up"
ALL_RECORDS_NEEDED = (
    "not sampled: the measure is expensive, but every record is needed, or the needed rate is not known yet"
)


Constants = Mapping[str, Constant]
"""Columns of `group_by` that have one value in all records of an edge, with this value."""


@dataclass(frozen=True, slots=True)
class EdgeStatements:
    """What each edge had stated of a window when it was answered.

    Attributes:
        closed: expected edges, sorted, that had closed the window with all their records.
        closed_until_ms: per missing edge that has closed any slice, the event time before which it had closed all.
        totals: per edge, sorted, whose closes state late or withheld records.
        constants: of the edges in `totals`.
    """

    closed: tuple[str, ...] = ()
    closed_until_ms: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, Totals] = field(default_factory=dict)
    constants: Mapping[str, Constants] = field(default_factory=dict)

    def to_mapping(self) -> dict[str, Any]:
        """JSON; a member is null where it would have more than `MAX_LISTED_EDGES`."""
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
    """Session details of an answer.

    Attributes:
        cut: the session reached its maximum length and continues in the next one.
        cuts: number of final sessions of the query so far that were cut.
        merged_into_ms: start of the session that it was merged into; it has no data any more.
    """

    cut: bool
    cuts: int
    merged_into_ms: int | None = None


@dataclass(frozen=True, slots=True)
class AccuracyQuality:
    """Accuracy details of an answer to a query with an accuracy.

    Attributes:
        measure: the measure that the accuracy is about.
        confidence: probability that the measure's interval contains the true value.
        prediction: predicted value of the window; None: the data alone determine it.
        sampling: whether records were sampled, and the reason.
        waited_ms: event time from the window's end until the arrivals met the error target.
        coverage: fraction of the recent final windows with an early answer whose first interval contained the true
            value; None: there are none yet.
        covered: of a final answer, whether that holds for this window (for all its groups).
        too_many_groups: the query has too many groups for early answers.
        unknown_sample: records may have been sampled out that are not counted, so that the data bound nothing.
        exceeding: by edge, the records of any window so far that came later than the declared delays; None: no delays
            are declared.
    """

    measure: str
    confidence: float
    prediction: Prediction | None
    sampling: str
    waited_ms: int | None
    coverage: float | None
    covered: bool | None
    too_many_groups: bool = False
    unknown_sample: bool = False
    exceeding: Mapping[str, int] | None = None

    def to_mapping(self) -> dict[str, Any]:
        p = self.prediction
        result: dict[str, Any] = {"measure": self.measure, "sampling": self.sampling, "waited_ms": self.waited_ms,
                                  "coverage": self.coverage, "covered": self.covered}  # fmt: skip
        if p is not None:
            share = _finite(p.straggler_share) if p.bounded else None
            result |= {"straggler_share": share, "silent": list(p.silent)}
        if self.exceeding is not None:
            result["exceeding_delays"] = dict(self.exceeding)
        if self.too_many_groups:
            result["groups"] = {"limit": MAX_GROUPS, "reason": TOO_MANY_GROUPS}
        elif p is not None and p.groups is not None:
            eligible = [g for g in p.groups if g.eligible]
            result["groups"] = {
                "eligible": len(eligible),
                "met": sum(g.met for g in eligible),
                "waiting": len(p.groups) - len(eligible),
            }
        return result

    def to_prediction(self) -> dict[str, Any]:
        """Per measure, the interval that replaces the one of the data; none: the data have no bounds."""
        p = self.prediction
        if p is None:
            return {self.measure: {"estimate": None, "lower": None, "upper": None, "confidence": None}}
        if p.groups is None:
            confidence = self.confidence if p.bounded else None
            return {self.measure: {**_interval(p), "confidence": confidence}}
        groups = {g.key: list(_interval(g).values()) for g in p.groups}
        return {self.measure: {"groups": groups, "confidence": self.confidence}}


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of one answer at the time it was emitted.

    Attributes:
        expected: number of expected edges.
        missing: those, sorted, that have not closed the window, or closed it without all its records because they
            joined too late, lost their state or have lost input.
        lost_state: those of `missing` that lost their state while the window was open.
        observed, late: records in the answer, and those of them that arrived after their slice's close.
        staleness_ms: time from the window's end to this answer.
        first_staleness_ms: time from the window's end to the answer that a staleness budget applies to, as in `assess`.
        withheld: per measure, where an edge withholds anything.
        requested: the budget as requested. Without one ``{"exact": true}``, or whether each measure is exact: such an
            answer has all records, and a measure that is not exact has the error of its synopsis.
        session: set for session windows.
        accuracy: set for a query with an accuracy.
        losses: by edge, the stated losses of input that the window may lack.
        deliveries: by expected edge that does not count each record exactly once, its deliveries.
        left: edges, sorted, that were expected when the window had begun and have left since, without having closed it:
            they were retired, or no longer serve the stream.
        edges: what each edge had stated.
        constants: by edge of `missing` and `left`: its records are only in groups with these values. Edges without a
            constant are absent.
        rests: per measure of which edges withhold values, what all groups together lack; None: unknown.
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
        """Whether nothing but the staleness violates the contract. False also for an unsent maximum, whose error shows
        only beside the values of the answer (`center.serving.withheld`)."""
        unsent = any(bound.unsent is not None for bound in self.withheld.values())
        return not unsent and all(v.code == STALENESS for v in self.violations)

    def to_mapping(self) -> dict[str, Any]:
        """The members of an answer's JSON: completeness, records, staleness_ms, error, contract; and `edges`, which
        only explanations show, and `rests`, from which totals follow."""
        result: dict[str, Any] = {
            "completeness": {
                "ratio": self.reported / (self.expected + len(self.left)) if self.expected else 0.0,
                "expected": self.expected,
                "reported": self.reported,
                "missing": list(self.missing),
            },
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
        if self.lost_state:
            result["completeness"]["lost_state"] = list(self.lost_state)
        if self.left:
            result["completeness"]["left"] = list(self.left)
        if self.constants:
            result["completeness"]["only"] = {edge: dict(values) for edge, values in self.constants.items()}
        if self.deliveries:
            result["completeness"]["delivery"] = {edge: list(each) for edge, each in sorted(self.deliveries.items())}
        if self.losses:
            result["completeness"]["losses"] = [{"edge": edge, **asdict(loss)} for edge, loss in self.losses]
        if self.accuracy is not None:
            result["accuracy"] = self.accuracy.to_mapping()
            predicted = self.accuracy.prediction
            if predicted is not None:
                result["prediction"] = self.accuracy.to_prediction()
                known = predicted.bounded and math.isfinite(predicted.expected)
                expected = max(round(predicted.expected), self.observed) if known else None
                sampled = round(predicted.sampled) if math.isfinite(predicted.sampled) else None
                result["records"] |= {"expected": expected, "sampled": sampled}
                parts = {"sampling": predicted.sampling, "straggler": predicted.straggler, "missing": predicted.missing}
                result["error"] |= {name: _finite(width) for name, width in parts.items()}
            elif self.accuracy.unknown_sample:
                result["prediction"] = self.accuracy.to_prediction()
                result["records"] |= {"expected": None, "sampled": None}
                result["error"] |= {"sampling": None, "straggler": None}
        if self.session is not None:
            result["session"] = {"cut": self.session.cut, "cuts": self.session.cuts}
            if self.session.merged_into_ms is not None:
                result["merged_into_ms"] = self.session.merged_into_ms
        return result


def _interval(interval: Prediction | GroupPrediction) -> dict[str, float | None]:
    return {name: _finite(getattr(interval, name)) for name in ("estimate", "lower", "upper")}


def _finite(value: float) -> float | None:
    """None (JSON null, "unknown") for an infinite value: JSON has no infinity."""
    return value if math.isfinite(value) else None


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
        constants: by edge.
        has_data: some edge has reported records of the window.
        first_staleness_ms: staleness of the window's first answer; under a combined budget, of the first one that
            kept the error budget. A staleness budget applies to that one only.
    """
    withheld = dict(sorted((totals.withheld or {}).items()))
    requested: dict[str, Any] = {}
    violations = _incomplete(expected, missing)
    if spec.error_budget is not None or spec.staleness_budget is None:
        budget = spec.error_budget or ErrorBudget(())
        limits = {**dict(budget.limits), **{name: format_fraction(share) for name, share in budget.relative}}
        requested = {"error": limits} if spec.error_budget is not None else {"exact": _exactness(spec)}
        violations += over_budget(withheld, budget, totals.signs or {})
        violations += without_bounds(spec, withheld)
    if spec.staleness_budget is not None:
        staleness_budget_ms = spec.staleness_budget.staleness_ms
        requested["staleness_ms"] = staleness_budget_ms
        of = "first answer within the error budget" if spec.saves_bytes else "first answer"
        violations = _too_stale(first_staleness_ms, staleness_budget_ms, of) + violations
    if spec.accuracy is not None and spec.accuracy.kind is None:
        # The error of a function's value is checked where the value is computed (`center.serving.function_values`).
        promised = {"staleness_ms": requested["staleness_ms"]} if "staleness_ms" in requested else {}
        requested = {**spec.accuracy.to_contract(), **promised}
    violations += _lost_state(lost_state) + _left(left)
    if not has_data:
        violations += _nothing_arrived(expected, missing)
    return Quality(
        expected=expected,
        missing=missing,
        observed=totals.observed,
        late=totals.late,
        staleness_ms=staleness_ms,
        first_staleness_ms=first_staleness_ms,
        withheld=withheld,
        requested=requested,
        violations=(*violations, *_lost(losses)),
        lost_state=lost_state,
        losses=losses,
        deliveries=deliveries,
        left=left,
        edges=edges,
        constants={edge: constants[edge] for edge in (*missing, *left) if edge in constants},
        rests=totals.united_rests(spec),
    )


def with_late_records(quality: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Extends `Quality.to_mapping()` by records that are in no answer to the window: it was final when they came, or
    sources rejected them.

    What a rejected record would add is not known, nor whether the query's condition would accept it. So the number of
    expected records is unknown then.

    Args:
        counts: number of records by reason (`LateSlice.reason`).
    """
    rejected = {reason: n for reason, n in counts.items() if reason in REJECTIONS and n}
    late = {reason: n for reason, n in counts.items() if reason not in REJECTIONS and n}
    if not rejected and not late:
        return dict(quality)
    records, completeness = dict(quality["records"]), dict(quality["completeness"])
    violations = []
    for name, code, by_reason, what in (
        ("after_final", AFTER_FINAL, late, "accepted records of the window are not in the answer"),
        ("rejected", REJECTED, rejected, "records that sources rejected are, or may be, records of the window"),
    ):
        if by_reason:
            records[name] = completeness[name] = sum(by_reason.values())
            reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(by_reason.items()))
            violations.append(Violation(code, f"{records[name]} {what} ({reasons})"))
    lacking = sum(counts.values())
    completeness["ratio"] *= records["observed"] / (records["observed"] + lacking)
    if rejected:
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


def with_accuracy(
    quality: Quality,
    spec: QuerySpec,
    prediction: Prediction | None,
    *,
    early: bool,
    covered: bool | None,
    coverage: float | None,
    slot_ms: int,
    too_many_groups: bool = False,
    sampled_because: Mapping[str, frozenset[SamplingReason]] = _NONE,
    unknown_sample: bool = False,
    exceeding: Mapping[str, int] | None = None,
) -> Quality:
    """Extends the quality of an answer by what its accuracy requires.

    Args:
        sampled_because: reasons per edge that did not process all of the window's records.
        unknown_sample: records may have been sampled out that are not counted.
        exceeding: records by edge that came later than the declared delays.
    """
    accuracy = spec.accuracy
    assert accuracy is not None
    stated = (STALENESS, NOTHING_ARRIVED, LOST_STATE, INPUT_LOST, LEFT)
    violations = [v for v in quality.violations if v.code in stated]
    if prediction is not None and quality.losses:
        prediction = prediction.without_bounds("an edge may have lost input of the window")
    elif prediction is not None and quality.lost_state:
        lost = ", ".join(quality.lost_state)
        prediction = prediction.without_bounds(
            f"the reports of {lost} were lost with its state, or count records twice"
        )
    elif prediction is not None and not prediction.bounded:
        prediction = prediction.without_bounds(prediction.reason)
    if prediction is None and early:
        violations.append(Violation(ACCURACY, TOO_MANY_GROUPS if too_many_groups else TOO_FEW_ARRIVALS))
    elif prediction is not None and not prediction.met:
        violations.append(Violation(ACCURACY, prediction.reason))
    if not early:
        # All edges have closed the window: no estimate stands for the records that one of them lacks.
        violations += [v for v in quality.violations if v.code == MISSING_EDGES]
    requested = dict(accuracy.to_contract())
    if spec.staleness_budget is not None:
        requested["staleness_ms"] = spec.staleness_budget.staleness_ms
    sampled = prediction is not None and prediction.sampled < prediction.arrived
    waited = prediction.waited_slots * slot_ms if prediction is not None else None
    result = AccuracyQuality(
        accuracy.measure, accuracy.confidence, prediction,
        _describe_sampling(spec, sampled_because if sampled else None, unknown_sample), waited, coverage, covered,
        too_many_groups, unknown_sample, None if accuracy.delays_ms is None else dict(exceeding or {}),
    )  # fmt: skip
    # An open slice's counters arrive with its close; until then the arrival counts say how many records there are.
    observed = max(quality.observed, round(prediction.arrived)) if prediction is not None else quality.observed
    return replace(quality, observed=observed, requested=requested, violations=tuple(violations), accuracy=result)


def _exactness(spec: QuerySpec) -> bool | dict[str, bool]:
    """True if all measures are exact; otherwise, whether each is."""
    each = {m.name: m.function.exact for m in spec.measures}
    return True if all(each.values()) else each


def _describe_sampling(
    spec: QuerySpec, because: Mapping[str, frozenset[SamplingReason]] | None, unknown_sample: bool
) -> str:
    if because is not None:
        return describe_reasons(because)
    return UNKNOWN_SAMPLE if unknown_sample else ALL_RECORDS_NEEDED if is_expensive(spec) else NOT_SAMPLED


def _too_stale(first_staleness_ms: int, budget_ms: int, of: str) -> list[Violation]:
    if first_staleness_ms <= budget_ms:
        return []
    message = f"the {of} came {first_staleness_ms} ms after the window's end; the budget is {budget_ms} ms"
    return [Violation(STALENESS, message)]


def _incomplete(expected: int, missing: tuple[str, ...]) -> list[Violation]:
    if expected > 0 and not missing:
        return []
    reported = expected - len(missing)
    return [
        Violation(
            MISSING_EDGES, f"{reported} of {expected} expected edges have closed the window with all their records"
        )
    ]


def _lost_state(edges: tuple[str, ...]) -> list[Violation]:
    if not edges:
        return []
    message = f"{', '.join(edges)} lost its state while the window was open: records may be missing or counted twice"
    return [Violation(LOST_STATE, message)]


def _left(edges: tuple[EdgeId, ...]) -> list[Violation]:
    if not edges:
        return []
    message = f"{', '.join(edges)} was retired, or stopped serving the stream, before it had closed the window"
    return [Violation(LEFT, message)]


def _lost(losses: Iterable[tuple[EdgeId, InputLoss]]) -> list[Violation]:
    """One violation per edge, source and reason."""
    found: dict[tuple[str, str, str], int | None] = {}
    for edge, loss in losses:
        key = edge, loss.source, loss.reason
        known = found.get(key, 0)
        found[key] = None if known is None or loss.records is None else known + loss.records
    return [
        Violation(
            INPUT_LOST,
            f"edge {edge}: {'an unknown number of' if records is None else records} records of source {source} are"
            f" lost or may be ({reason})",
        )
        for (edge, source, reason), records in found.items()
    ]


def _nothing_arrived(expected: int, missing: tuple[str, ...]) -> list[Violation]:
    """An answer without data says nothing, unless all edges have closed the window: then it has no records."""
    if expected > 0 and not missing:
        return []
    silent = ", ".join(missing[:MAX_NAMED_EDGES]) + (", …" if len(missing) > MAX_NAMED_EDGES else "")
    whom = f" from {silent}" if missing else ""
    return [Violation(NOTHING_ARRIVED, f"no record of the window has arrived{whom}; that there are none is not known")]
