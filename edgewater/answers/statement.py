"""`Statement`: what an answer states about itself besides its values: completeness, error by cause, and contract.

A statement is a function of the answer's facts and of its values. Nothing stores it. `judged` is the only place that
decides whether an answer meets its contract.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from edgewater.answers.causes import Cause
from edgewater.answers.cells import CellColumn, FunctionErrors, plain
from edgewater.answers.facts import AccuracyFacts, Deviation, Facts, Predicted
from edgewater.answers.own_error import OwnError
from edgewater.base.timestamps import rfc3339
from edgewater.model import replies
from edgewater.model.accuracy import MAX_GROUPS
from edgewater.model.caching import format_fraction
from edgewater.model.own_columns import contract_codes
from edgewater.model.query import ErrorBudget, QuerySpec
from edgewater.synopses import Estimates
from edgewater.synopses.missing_records import has_bounds

MAX_NAMED_EDGES = 3
"""The most edges that a message names."""

STALENESS = "staleness-budget"
"""Violation code: the answer came later than its staleness budget."""
NOTHING_ARRIVED = "nothing-arrived"
"""Violation code: no record of the window has arrived, and edges that may have records have not closed the window."""
ACCURACY = "accuracy"
"""Violation code: the answer's interval is wider than the requested error."""
ERROR_BUDGET = "error-budget"
"""Violation code: a value may be off by more than the error budget."""
BOTH_SIGNS = "both-signs"
"""Violation code: edges withhold a percentage of values of both signs, which may cancel."""
WITHHELD = "withheld"
"""Violation code: edges withhold values without a budget, or records whose effect on a value has no bound."""
ROUNDING = "rounding"
"""Violation code: a value exceeds float64, so that its rounding has no bound."""
PER_WINDOW = "budget-per-window"
"""Violation code: the budget is about each window, not about the union of several."""

SAMPLED = "sampled: the measure is expensive"
OTHER_MEASURES = "not sampled: the query has other measures, which sampling would distort"
ALL_RECORDS_NEEDED = (
    "not sampled: the measure is expensive, but every record is needed, or the needed rate is not known yet"
)
TOO_FEW_ARRIVALS = "too few arrivals are known for an error bound"
TOO_MANY_GROUPS = (
    f"there are, or recently were, more than {MAX_GROUPS} groups, or an edge whose link is too narrow for statistics of"
    " groups: windows are answered when complete"
)

LEAST_CONFIDENCE = 0.95
"""An answer that allows for late records with less confidence does not meet its contract."""
_ROUNDING = 1e-9  # derived: rounding of sums of shares
"""Relative tolerance of comparisons, because in floating point n shares of E/n do not always add up to E."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A part of the contract that the answer does not keep. `code` never changes between releases."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Contract:
    """What was requested of an answer, and which parts of it the answer does not keep.

    Attributes:
        requested: the budget or the accuracy as requested. Without both, ``{"exact": true}`` if all measures are
            exact, otherwise whether each measure is exact. Such a contract requests all records. A measure that is not
            exact has the error of its synopsis.
        uncovered: measures of which a value has no bound. A contract that is met says nothing about their errors.
        may_change: late records may follow. A met contract says that the answer has all records that have come, and
            that its bounds allow for late ones with `LEAST_CONFIDENCE` or more. So an exact query is met and not exact.
    """

    requested: Mapping[str, Any]
    violations: tuple[Violation, ...] = ()
    uncovered: tuple[str, ...] = ()
    may_change: bool = False

    @property
    def met(self) -> bool:
        return not self.violations

    @property
    def codes(self) -> str:
        """The codes of the violations as text."""
        return contract_codes(self.to_json())

    def to_json(self) -> replies.StatedContract:
        """Returns the member `contract` of an answer."""
        violations: list[replies.StatedViolation] = [{"code": v.code, "message": v.message} for v in self.violations]
        stated: replies.StatedContract = {"requested": dict(self.requested), "met": self.met, "violations": violations}
        if self.uncovered:
            stated["uncovered"] = list(self.uncovered)
        if self.may_change:
            stated["may_change"] = True
        return stated


@dataclass(frozen=True, slots=True)
class Statement:
    """The statement of one answer.

    Attributes:
        error: cause -> measure -> amount; None: unknown.
        accuracy: as answers show it; None for a query without an accuracy.
        sampled: number of records that were not sampled out; None: unknown.
    """

    facts: Facts
    error: Mapping[str, Mapping[str, Any]]
    contract: Contract
    accuracy: Mapping[str, Any] | None = None
    sampled: int | None = None

    def quality(self) -> replies.Quality:
        """Returns the member `quality` of an answer's JSON."""
        facts = self.facts
        result: replies.Quality = {
            "completeness": completeness(facts),
            "records": {**_records(facts), "sampled": self.sampled},
            "staleness_ms": facts.staleness_ms,
            "first_staleness_ms": facts.first_staleness_ms,
            "error": {cause: dict(each) for cause, each in self.error.items()},
        }
        if self.accuracy is not None:
            result["accuracy"] = dict(self.accuracy)
        if facts.predicted is not None and facts.predicted.groups is None:  # those of groups are in the rows
            result["prediction"] = _prediction(facts.predicted)
        if facts.session is not None:
            result["session"] = {"cut": facts.session.cut, "cuts": facts.session.cuts}
            if facts.session.merged_into_ms is not None:
                result["merged_into"] = rfc3339(facts.session.merged_into_ms)
        return result


def completeness(facts: Facts) -> replies.Completeness:
    """Returns the member `completeness` of an answer's quality."""
    losses: list[replies.LostInput] = [
        {"edge": d.edge, "source": d.source, "reason": d.reason, "from_ms": d.from_ms, "to_ms": d.to_ms,
         "records": d.lacks.most}
        for d in facts.by_cause(Cause.INPUT_LOST)
    ]  # fmt: skip
    lacks: replies.Lacks = {
        "windows": facts.windows,
        "lost_state": facts.edges_by(Cause.LOST_STATE),
        "left": facts.edges_by(Cause.LEFT),
        "only": {d.edge: dict(d.only) for d in facts.by_cause(Cause.MISSING, Cause.LEFT) if d.only},
        "delivery": {edge: list(each) for edge, each in sorted(facts.deliveries.items())},
        "losses": losses,
        "after_final": facts.records_by(Cause.AFTER_FINAL).total(),
        "rejected": facts.records_by(Cause.REJECTED).total(),
        "guessed": dict(facts.records_by(Cause.GUESSED)),
        "unanswered": sum(d.windows for d in facts.by_cause(Cause.UNANSWERED)),
    }
    for d in facts.by_cause(Cause.MAY_CHANGE)[:1]:
        lacks["may_change"] = {"records": d.lacks.most, "confidence": d.confidence}
    return {
        "ratio": facts.ratio,
        "expected": facts.expected,
        "reported": facts.reported,
        "missing": facts.edges_by(Cause.MISSING),
        **cast(replies.Lacks, {name: value for name, value in lacks.items() if value}),
    }


def _records(facts: Facts) -> dict[str, int | dict[str, int] | None]:
    """Returns the numbers of records, without the sampled ones."""
    after_final, rejected, guessed = facts.late_counts
    expected: int | None = None
    if not rejected and not guessed and not facts.by_cause(Cause.MAY_CHANGE):
        if facts.accuracy is not None and facts.predicted is not None:
            expected = facts.accuracy.expected
        elif facts.predicted is None and not facts.without(Cause.AFTER_FINAL).lacks_records:
            expected = facts.observed + after_final
    return {
        "observed": facts.observed,
        "expected": expected,
        "late": facts.late,
        "after_final": after_final,
        "rejected": rejected,
        **({"guessed": guessed} if guessed else {}),
    }


def judged(
    facts: Facts, columns: Sequence[CellColumn], spec: QuerySpec, of_windows: Contract | None = None
) -> Statement:
    """Returns the statement of an answer.

    Args:
        columns: the values of all measures, for all groups.
        of_windows: for a union of windows, `united_contract`.
    """
    derived = {value.name for value in spec.derived}  # their errors are those of the measures that they read
    own = {column.measure: column.own for column in columns if column.measure not in derived}
    accuracy = None if facts.accuracy is None else _accuracy(facts.accuracy)
    sampled: int | None = facts.observed
    if facts.accuracy is not None and facts.predicted is not None:
        sampled = facts.accuracy.sampled
    function = next((c.function for c in columns if c.function is not None and _is_about(spec, c.measure)), None)
    if function is not None and spec.accuracy is not None and spec.accuracy.kind is None:
        sampled = int(function.sizes.sum())
        accuracy = _function_accuracy(spec, function)
    if of_windows is None:
        violations = [*violations_of_facts(facts, spec), *_of_values(facts, columns, spec)]
        asked = requested(spec)
    else:
        of_union = (*_unreadable(facts), *_unbounded_by_late(facts, columns), *_rounded(columns, spec))
        violations = [*of_windows.violations, *of_union]
        asked = dict(of_windows.requested)
    uncovered = tuple(c.measure for c in columns if c.has_unknown_bound)
    contract = Contract(asked, tuple(violations), uncovered, bool(facts.by_cause(Cause.MAY_CHANGE)))
    return Statement(facts, error_by_cause(facts, own), contract, accuracy, sampled)


def _relative_error(estimates: Estimates) -> float:
    """Returns the largest distance of a bound from its value, as a fraction of the bound; infinite: unknown."""
    known = np.isfinite(estimates.value)
    value, bounds = estimates.value[known], (estimates.lower[known], estimates.upper[known])
    errors = [np.where(b == value, 0.0, np.abs(b - value) / np.maximum(np.abs(b), 1.0)) for b in bounds]
    worst = float(np.max(errors, initial=0.0))
    return math.inf if math.isnan(worst) else worst


def _is_about(spec: QuerySpec, measure: str) -> bool:
    return spec.accuracy is not None and spec.accuracy.measure == measure


def violations_of_facts(facts: Facts, spec: QuerySpec) -> list[Violation]:
    """Returns what an answer violates whatever its values are."""
    violations = list[Violation]()
    if spec.staleness_budget is not None:
        of = "first answer within the error budget" if spec.saves_bytes else "first answer"
        violations += _too_stale(facts.first_staleness_ms, spec.staleness_budget.staleness_ms, of)
    if facts.expected and facts.has_data and not (facts.deviations or facts.withheld or facts.accuracy):
        return violations  # the most answers; a roll-up judges half a million
    accuracy, missing = facts.accuracy, facts.edges_by(Cause.MISSING)
    if accuracy is None or not accuracy.stands_for_missing:
        violations += _missing(facts.expected, facts.reported, missing)
    if not spec.omits_values:
        violations += _over_budget(facts, spec)
    if lost := facts.edges_by(Cause.LOST_STATE):
        text = "lost its state while the window was open: records may be missing or counted twice"
        violations.append(Violation(Cause.LOST_STATE, f"{', '.join(lost)} {text}"))
    if left := facts.edges_by(Cause.LEFT):
        text = "was retired, or stopped serving the stream, before it had closed the window with all its records"
        violations.append(Violation(Cause.LEFT, f"{', '.join(left)} {text}"))
    if not facts.has_data and (missing or facts.expected == 0):
        violations.append(_nothing_arrived(missing))
    violations += _input_lost(facts.by_cause(Cause.INPUT_LOST))
    if accuracy is not None and accuracy.unmet:
        violations.append(Violation(ACCURACY, accuracy.unmet))
    violations += _unreadable(facts)
    violations += _may_change(facts)
    for cause, what in (
        (Cause.AFTER_FINAL, "accepted records of the window are not in the answer"),
        (Cause.REJECTED, "records that sources rejected are, or may be, records of the window"),
        (Cause.GUESSED, "records, or more, were counted or left out on a guess"),
    ):
        if counts := facts.records_by(cause):
            reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(counts.items()) if reason)
            violations.append(Violation(cause, f"{counts.total()} {what}{f' ({reasons})' if reasons else ''}"))
    return violations


def _of_values(facts: Facts, columns: Sequence[CellColumn], spec: QuerySpec) -> list[Violation]:
    """Returns what the values of an answer violate, without what `violations_of_facts` has said of a measure."""
    violations, budget, accuracy = list[Violation](), spec.error_budget, spec.accuracy
    said = {v.message.split(":")[0] for v in _over_budget(facts, spec)} if budget is not None else set()
    may_change = bool(facts.by_cause(Cause.MAY_CHANGE))
    for column in columns:
        name, own = column.measure, column.own
        if budget is not None and name not in said:
            if column.excess is not None:
                width, limit = column.excess
                stated = f"by up to {width:g}" if math.isfinite(width) else "by an unknown amount"
                allowed = f"; the budget there is {limit:g}" if math.isfinite(limit) else ""
                by = ", with the late records that may follow" if may_change else ""
                code = Cause.MAY_CHANGE if may_change else ERROR_BUDGET
                violations.append(Violation(code, f"{name}: a value may be off {stated}{by}{allowed}"))
            if column.has_lost_bound and name not in budget.measures and not may_change:
                violations.append(_unbounded(name))
        if accuracy is None or name not in accuracy.measures:
            continue
        if accuracy.kind is not None and own.has_odd:
            violations.append(Violation(ACCURACY, f"{name}: a value is NaN or infinite"))
        is_unmet = facts.accuracy is not None and facts.accuracy.unmet
        worst = column.accuracy_error
        if may_change and accuracy.kind not in (None, "records"):  # no prediction has compared it with the accuracy
            worst = max((_relative_error(each.estimates) for each in column.intervals), default=0.0)
        if worst > accuracy.error * (1 + _ROUNDING) and not is_unmet:
            off = f"may be off by {100 * worst:.3g} %" if math.isfinite(worst) else "has no bound"
            message = f"{name}: a value {off}; the accuracy is {100 * accuracy.error:.3g} %"
            violations.append(Violation(ACCURACY, message))
        if accuracy.kind is None and column.function is not None:
            violations += _function_violations(name, accuracy.error, column.function)
    return [*violations, *_unbounded_by_late(facts, columns), *_rounded(columns, spec)]


def _unbounded_by_late(facts: Facts, columns: Sequence[CellColumn]) -> Iterable[Violation]:
    for each in columns if facts.by_cause(Cause.MAY_CHANGE) else ():
        if each.has_lost_bound:
            text = f"{each.measure}: late records may follow, and nothing bounds their effect on a value"
            yield Violation(Cause.MAY_CHANGE, text)


def _rounded(columns: Sequence[CellColumn], spec: QuerySpec) -> Iterable[Violation]:
    if not spec.may_withhold and spec.accuracy is None:
        for each in columns:
            if each.own.rounding is not None and math.isinf(each.own.rounding):
                yield Violation(ROUNDING, f"{each.measure}: a value is beyond the range of float64")


def requested(spec: QuerySpec) -> dict[str, Any]:
    """Returns `Contract.requested`."""
    result: dict[str, Any] = {}
    if spec.accuracy is not None:
        result = dict(spec.accuracy.to_contract())
        if spec.error_budget is not None:
            result["error_budget"] = spec.error_budget.to_mapping()
    elif spec.error_budget is not None:
        result = {"error": spec.error_budget.to_mapping()}
    elif not spec.omits_values:
        each = {m.name: m.function.exact for m in spec.measures}
        each |= {value.name: all(each[name] for name in value.reads()) for value in spec.derived}
        result = {"exact": True if all(each.values()) else {name: each[name] for name in spec.shown}}
    if spec.staleness_budget is not None:
        result["staleness_ms"] = spec.staleness_budget.staleness_ms
    if spec.byte_budget is not None:
        result["bytes"] = spec.byte_budget.to_value()
    return result


def united_contract(facts: Facts, violated: Mapping[str, tuple[int, str]], windows: int, spec: QuerySpec) -> Contract:
    """Returns the contract of a union of windows. It is met if each window has met its contract, and nothing is lost
    by their union. Whether a value is beyond float64 is judged of the united values (`judged`).

    Args:
        facts: the united facts.
        violated: by code, the number of windows whose contracts have the violation, and the first message.
        windows: number of windows with an answer.
    """
    violations = [Violation(code, f"{n} of {windows} windows: {message}") for code, (n, message) in violated.items()]
    if facts.predicted is not None:
        text = "a window has a prediction, and predictions are merged without bounds"
        violations.append(Violation(ACCURACY, text))
    if unanswered := sum(d.windows for d in facts.by_cause(Cause.UNANSWERED)):
        message = f"{unanswered} of {facts.windows} windows have no answer"
        violations.append(Violation(Cause.UNANSWERED, message))
    if Cause.MAY_CHANGE not in violated:
        violations += _may_change(facts)
    if spec.budget is not None or spec.byte_budget is not None:
        violations.append(Violation(PER_WINDOW, "the budget is about each window, not about several"))
    return Contract(requested(spec), tuple(violations))


def _may_change(facts: Facts) -> list[Violation]:
    violations = []
    for d in facts.by_cause(Cause.MAY_CHANGE):
        if d.lacks.most is None:
            violations.append(Violation(d.cause, "late records may follow; they may also lengthen or join sessions"))
        elif d.confidence < LEAST_CONFIDENCE:
            text = f"up to {d.lacks.most} late records may follow, at a confidence of only {d.confidence:.3g}"
            violations.append(Violation(d.cause, text))
    return violations


def _unreadable(facts: Facts) -> list[Violation]:
    return [Violation(d.cause, d.reason) for d in facts.by_cause(Cause.UNREADABLE)]


def error_by_cause(facts: Facts, own: Mapping[str, OwnError]) -> dict[str, dict[str, Any]]:
    """Returns `Statement.error`.

    Args:
        own: the synopsis' own errors of all measures.
    """
    predicted = None if facts.predicted is None else facts.predicted.measure
    is_lacking = any(facts.late_counts) or bool(facts.by_cause(Cause.MAY_CHANGE))
    whole: int | None = None if is_lacking or facts.lacks_records else 0
    result: dict[str, dict[str, Any]] = {
        "rounding": {n: _number(e.rounding) for n, e in own.items() if e.rounding is not None and n != predicted},
        "sketch": {name: 0 if e.is_sample else _number(e.half_width) for name, e in own.items()},
        "sampling": {name: _number(e.half_width) if e.is_sample else 0 for name, e in own.items()},
        "withheld": {name: bound.to_json() for name, bound in facts.withheld.items()},
    }
    if facts.predicted is not None:
        stated = {} if facts.accuracy is None else dict(facts.accuracy.error)
        if is_lacking:
            stated["missing"] = None
        each: dict[str, dict[str, Any]] = {
            cause: {name: stated.get(cause) if name == predicted else None for name in own}
            for cause in ("sampling", "straggler", "missing")
        }
        return {**result, **each}
    return {**result, "missing": dict.fromkeys(own, whole)}


def _too_stale(first_staleness_ms: int, budget_ms: int, of: str) -> Iterable[Violation]:
    if first_staleness_ms > budget_ms:
        message = f"the {of} came {first_staleness_ms} ms after the window's end; the budget is {budget_ms} ms"
        yield Violation(STALENESS, message)


def _missing(expected: int, reported: int, missing: Sequence[str]) -> Iterable[Violation]:
    if missing or not expected:
        message = f"{reported} of {expected} expected edges have closed the window with all their records"
        yield Violation(Cause.MISSING, message)


def _nothing_arrived(missing: Sequence[str]) -> Violation:
    silent = ", ".join(missing[:MAX_NAMED_EDGES]) + (", …" if len(missing) > MAX_NAMED_EDGES else "")
    whom = f" from {silent}" if missing else ""
    message = f"no record of the window has arrived{whom}; it is not known that the window has no records"
    return Violation(NOTHING_ARRIVED, message)


def _input_lost(losses: Iterable[Deviation]) -> Iterable[Violation]:
    """Yields one violation per edge, source and reason."""
    counts: dict[tuple[str, str, str], int | None] = {}
    for loss in losses:
        key = loss.edge, loss.source, loss.reason
        count = counts.get(key, 0)
        counts[key] = None if count is None or loss.lacks.most is None else count + loss.lacks.most
    for (edge, source, reason), records in counts.items():
        many = "an unknown number of" if records is None else records
        message = f"edge {edge}: {many} records of source {source} are lost or may be ({reason})"
        yield Violation(Cause.INPUT_LOST, message)


def _over_budget(facts: Facts, spec: QuerySpec) -> list[Violation]:
    """Returns a violation for each measure whose withheld amount exceeds its limit.

    A relative limit is compared with the largest withheld share of any group. Without an error budget, all measures
    must be exact. With an error budget, a measure that the budget does not name has no limit; but nothing may be
    withheld if its effect on the measure's value has no bound.
    """
    budget, accuracy = spec.error_budget or ErrorBudget(()), facts.accuracy
    limits, relative, violations = dict(budget.limits), dict(budget.relative), list[Violation]()
    measures = {m.name: m for m in spec.measures}
    why = "" if spec.byte_budget is None else "; budget.bytes does not permit more values"
    for name, bound in sorted(facts.withheld.items()):
        is_promised = spec.accuracy is not None and name in spec.accuracy.measures
        if accuracy is not None and is_promised and (accuracy.stands_for_missing or facts.predicted):
            continue  # a prediction counts records whose values edges withhold, too
        # The comparisons treat NaN as beyond the limit.
        worst, limit = float(np.maximum(bound.above, bound.below)), limits.get(name)
        if name in relative:
            if name in facts.both_signs:
                message = f"{name}: edges withhold a percentage of values of both signs, which may cancel"
                violations.append(Violation(BOTH_SIGNS, message))
                continue
            share, most = float(np.maximum(bound.above_share, bound.below_share)), relative[name]
            if not share <= most * (1 + _ROUNDING):
                stated = f"up to {100 * share:.4g}%" if math.isfinite(share) else "an unknown share"
                message = f"{name}: edges withhold {stated} of a group; the budget is {format_fraction(most)}{why}"
                violations.append(Violation(ERROR_BUDGET, message))
        elif limit is not None:
            if not worst <= limit * (1 + _ROUNDING):
                message = f"{name}: edges withhold up to {worst:g} per group; the budget is {limit:g}{why}"
                violations.append(Violation(ERROR_BUDGET, message))
        elif not limits and not relative:
            if not worst <= 0:
                violations.append(Violation(WITHHELD, f"{name}: edges withhold up to {worst:g} per group"))
        elif name not in budget.measures and not has_bounds(measures[name].function.name, measures[name].parameters):
            violations.append(_unbounded(name))
    return violations


def _unbounded(measure: str) -> Violation:
    return Violation(WITHHELD, f"{measure}: edges withhold records, and nothing bounds their effect on a value")


def _accuracy(facts: AccuracyFacts) -> dict[str, Any]:
    result: dict[str, Any] = {
        "measure": facts.measure,
        "sampling": facts.sampling,
        "waited_ms": facts.waited_ms,
        "coverage": facts.coverage,
        "covered": facts.covered,
    }
    if facts.is_predicted:
        result |= {"straggler_share": facts.straggler_share, "silent": list(facts.silent)}
    if facts.exceeding is not None:
        result["exceeding_delays"] = dict(facts.exceeding)
    if facts.too_many_groups:
        result["groups"] = {"limit": MAX_GROUPS, "reason": TOO_MANY_GROUPS}
    elif (groups := facts.groups) is not None:
        result["groups"] = {"eligible": groups.eligible, "met": groups.met, "waiting": groups.waiting}
    return result


def _prediction(predicted: Predicted) -> dict[str, Any]:
    if not predicted.measure:
        return {}
    bounds = dict(zip(("estimate", "lower", "upper"), predicted.interval, strict=True))
    of = {"of": "records"} if predicted.of_records else {}
    return {name: {**bounds, "confidence": predicted.confidence, **of} for name in predicted.measures}


def _function_accuracy(spec: QuerySpec, function: FunctionErrors) -> dict[str, Any]:
    """Returns the accuracy of a query with an accuracy of a function of a sample."""
    assert spec.accuracy is not None
    why_not = OTHER_MEASURES if len(spec.measures) > 1 else ALL_RECORDS_NEEDED
    return {
        "measure": spec.accuracy.measure,
        "sampling": SAMPLED if (function.rates < 1).any() else why_not,
        "error": plain(float(function.errors.max(initial=0.0))),
        "rate": float(function.rates.min(initial=1.0)),
    }


def _function_violations(name: str, target: float, function: FunctionErrors) -> Iterable[Violation]:
    off = function.errors > target
    if failed := next(filter(None, function.problems), ""):
        yield Violation(ACCURACY, f"{name}: the function failed: {failed}")
    elif off.any():
        size, worst = int(function.sizes[off].min()), float(function.errors.max())
        message = f"{name}: a sample of {size} rows may be off by {_percent(worst)}; the target is {_percent(target)}"
        if len(off) > 1:
            message = f"{int(off.sum())} of {len(off)} groups; {message}"
        yield Violation(ACCURACY, message)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if math.isfinite(share) else "any amount"


def _number(amount: float) -> float | int | None:
    if not math.isfinite(amount):
        return None
    return int(amount) if amount == 0.0 else amount
