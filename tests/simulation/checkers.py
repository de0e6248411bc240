"""Checks every statement of answers, as they are served, against the truth.

`check_query` takes all answers to one query and its `QueryTruth`; `RevisionWatch` takes answers as they are read, over
and over. Both return the statements that are false. What has a confidence below 1 is not checked one by one, but over
many runs: `Findings.outcomes` and `false_confidences`.

The simulation (`tests.simulation`) and the soak of real processes use the same checkers.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from typing import Any

from edgewater.base.quantities import fraction
from edgewater.model.measure import Measure
from edgewater.model.windows import SessionWindow
from tests.simulation.truth import UNKNOWN, Bounds, Fate, Group, QueryTruth, TrueWindow

Answer = Mapping[str, Any]
TOTAL = ("all groups together",)
QUANTILES = ("quantiles", "quantile", "kll")
EXACT_FUNCTIONS = ("count", "sum", "min", "max", "mean", "var")
_RANKS = {"early": 0, "complete": 1, "final": 2}
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Falsehood:
    """A false statement. `kind` is stable, for counting; `message` has the numbers."""

    kind: str
    query: str
    window: str
    revision: int
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.query} {self.window} r{self.revision}: {self.message}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a statement with a confidence below 1 was true this time.

    Attributes:
        kind: statements of one kind are judged together.
    """

    kind: str
    confidence: float
    held: bool


@dataclass(slots=True)
class Findings:
    """What was checked, and what was false."""

    false: list[Falsehood] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    answers: int = 0
    cells: int = 0

    def add(self, other: Findings) -> None:
        self.false += other.false
        self.outcomes += other.outcomes
        self.answers += other.answers
        self.cells += other.cells


def time_ms(text: str) -> int:
    """The ms of an RFC 3339 time, as answers state times."""
    moment = datetime.fromisoformat(text)
    return math.floor(moment.timestamp()) * 1000 + moment.microsecond // 1000


def _data(answer: Answer) -> str:
    """What a correction repeats of the final answer that it names."""
    records = answer["quality"]["records"]
    stable = [answer["window"], records["observed"], records["late"], _without_bounds(answer["data"])]
    stable.append(_without_bounds(answer.get("total")))
    return json.dumps(stable, sort_keys=True)


def _without_bounds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_bounds(v) for name, v in value.items() if name not in ("lower", "upper")}
    return [_without_bounds(v) for v in value] if isinstance(value, list) else value


class RevisionWatch:
    """Remembers every answer that was read; one that is read again must be the same, and only corrections may follow a
    final one.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[str, int, str], dict[int, Answer]] = defaultdict(dict)

    def note(self, answer: Answer, version: int = 1) -> list[Falsehood]:
        """Notes an answer of version `version` of its query."""
        query, window, revision = answer["query"], answer["window"]["start"], int(answer["revision"])
        known = self._read[query, version, window]
        false = []
        if known.setdefault(revision, answer) != answer:
            false.append(("revision-changed", f"was {known[revision]}, is {answer}"))
        corrections = [each for each in known.values() if "data_of" in each]
        pairs = [(each, known[each["data_of"]]) for each in corrections if each["data_of"] in known]
        if any(final["phase"] != "final" or _data(each) != _data(final) for each, final in pairs):
            false.append(("correction", f"{corrections} of {known}"))
        phases = [known[r]["phase"] for r in sorted(known)]
        if [_RANKS[p] for p in phases] != sorted(_RANKS[p] for p in phases):
            false.append(("phase-moved-back", " ".join(phases)))
        if phases.count("final") > 1 + len(corrections):
            false.append(("answer-after-final", " ".join(phases)))
        return [Falsehood(kind, query, window, revision, message) for kind, message in false]


def check_query(
    truth: QueryTruth,
    answers: Sequence[Answer],
    *,
    at_rest: bool,
    counted: int = 0,
    closed_through_ms: int | None = None,
    strict_floats: bool = False,
    late_is_known: bool = True,
) -> Findings:
    """Checks all answers to one query.

    Args:
        answers: all revisions that were read, in any order.
        at_rest: nothing is on its way any more: the last answer to each window has every record that has come.
        counted: number of records of the query that other counters than the answers' own (`after_final`) name as not in
            them; they may explain records of fate EITHER that are missing.
        closed_through_ms: at rest, all edges have closed the windows that end by then, so each that has records must
            have an answer; None: this is not checked.
        strict_floats: a sum of floats may not differ from the exact sum by its rounding, unless its bounds say so.
        late_is_known: `TrueRecord.late` is exact; False: records that are marked so may have been late.
    """
    return _QueryCheck(truth, at_rest, strict_floats, late_is_known).run(answers, counted, closed_through_ms)


def false_confidences(outcomes: Iterable[Outcome], alpha: float = 1e-6) -> list[Falsehood]:
    """The kinds of statements that were false so often that their confidence is false.

    Args:
        alpha: probability of a false alarm per kind, were each statement true with exactly its confidence.
    """
    by_kind: defaultdict[tuple[str, float], list[bool]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.confidence > 0:  # otherwise nothing is promised
            by_kind[outcome.kind, outcome.confidence].append(outcome.held)
    false = []
    for (kind, confidence), held in sorted(by_kind.items()):
        missed, most = held.count(False), _most_misses(len(held), 1 - confidence, alpha)
        if missed > most:
            message = f"{missed} of {len(held)} were false; at confidence {confidence:g} at most {most} could be"
            false.append(Falsehood("confidence", kind, "", 0, message))
    return false


def _most_misses(trials: int, probability: float, alpha: float) -> int:
    """The least k with P(more than k misses) ≤ alpha, of a binomial distribution."""
    tail = 0.0
    for k in range(trials, 0, -1):
        log_choose = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        tail += math.exp(log_choose + k * math.log(probability) + (trials - k) * math.log1p(-probability))
        if tail > alpha:
            return k
    return 0


class _QueryCheck:
    def __init__(self, truth: QueryTruth, at_rest: bool, strict_floats: bool, late_is_known: bool) -> None:
        self.truth = truth
        self.spec = truth.spec
        self.at_rest = at_rest
        self.strict_floats = strict_floats
        self.late_is_known = late_is_known
        self.findings = Findings()
        self.is_session = isinstance(self.spec.window, SessionWindow)

    def run(self, answers: Sequence[Answer], counted: int, closed_through_ms: int | None) -> Findings:
        by_window: defaultdict[int, dict[int, Answer]] = defaultdict(dict)
        for answer in answers:
            by_window[time_ms(answer["window"]["start"])][int(answer["revision"])] = answer
        for start, revisions in sorted(by_window.items()):
            if self.is_session and self.truth.has_doubt:
                continue  # which sessions there are is not known
            for revision, answer in sorted(revisions.items()):
                self._answer(answer, self.truth.windows.get(start), last=revision == max(revisions))
            if self.at_rest:
                self._may_change([answer for _, answer in sorted(revisions.items())])
        if self.at_rest and not (self.is_session and self.truth.has_doubt):
            self._nothing_is_missing(by_window, counted, closed_through_ms)
        return self.findings

    def _say(self, kind: str, answer: Answer, message: str) -> None:
        window = f"{answer['window']['start']} {answer['phase']}"
        self.findings.false.append(Falsehood(kind, answer["query"], window, int(answer["revision"]), message))

    def _may_change(self, answers: Sequence[Answer]) -> None:
        """The first answer of all edges allows for the late records that follow, with the confidence that it states."""
        whole = [a for a in answers if a["phase"] != "early" and not a["quality"]["completeness"]["missing"]]
        stated = whole[0]["quality"]["completeness"].get("may_change") if whole else None
        if stated is not None and stated["records"] is not None and stated["confidence"] > 0.0:
            first, last = (a["quality"]["records"] for a in (whole[0], answers[-1]))
            followed = last["observed"] + last["after_final"] - first["observed"] - first["after_final"]
            held = followed <= stated["records"]
            self.findings.outcomes.append(Outcome("late records that may follow", stated["confidence"], held))

    # One answer

    def _answer(self, answer: Answer, window: TrueWindow | None, *, last: bool) -> None:
        self.findings.answers += 1
        quality = answer["quality"]
        is_early, is_settled = answer["phase"] == "early", last and self.at_rest
        if self.is_session and (not is_settled or "merged_into" in quality):
            return  # a session may have been another one then
        if self.is_session and (window is None or time_ms(answer["window"]["end"]) != window.end_ms):
            self._say("session", answer, f"the session is {window and (window.start_ms, window.end_ms)}")
            return
        window = window or TrueWindow(time_ms(answer["window"]["start"]), time_ms(answer["window"]["end"]))
        completeness = quality["completeness"]
        whole = not is_early and completeness["ratio"] == 1.0 and not completeness["missing"]
        if completeness["missing"] and completeness["ratio"] == 1.0:
            self._say("completeness", answer, f"ratio 1.0, missing {completeness['missing']}")
        sure = [self._is_sure(i, window.end_ms, whole, is_settled) for i in window.records]
        self._counters(answer, window, sure, whole, is_settled)
        rows = {tuple(row["group"].get(name) for name in self.spec.group_by): row for row in answer["data"]}
        certain = dict(zip(window.records, sure, strict=True))
        in_rows = dict(certain)  # what the row of its group must have
        if not is_settled:
            in_rows = {i: is_sure and not self._is_late_in_row(i, completeness) for i, is_sure in certain.items()}
        groups = self.truth.by_group(window.records)
        for group in sorted({*rows, *groups}, key=repr):
            members = groups.get(group, [])
            row = rows.get(group)
            if whole and row is not None and not members and self.spec.group_by:
                self._say("group", answer, f"{group} has no record")
            for measure in self.spec.measures:
                if row is not None:
                    self._stated_width(answer, measure, group, row[measure.name])
                self._cell(answer, measure, group, row, members, [in_rows[i] for i in members], whole)
                if is_settled and row is not None and not whole:
                    self._what_it_has(answer, measure, group, row[measure.name], members)
            if self.spec.derived and row is not None and self.spec.accuracy is None:
                self._ratio(answer, group, row["ratio"], members, [in_rows[i] for i in members])
        self._totals(answer, window, certain, whole, is_settled)
        if answer["contract"]["met"] and completeness["missing"] and not is_early:
            self._say("met", answer, f"met, with completeness {completeness}")
        elif answer["contract"]["met"] and not whole and self.spec.accuracy is None:
            requested = answer["contract"]["requested"]
            if "exact" in requested or isinstance(requested.get("error"), Mapping):
                self._say("met", answer, f"met, with completeness {completeness}")
        if answer["confidence"] is not None and not _has_bound(answer["data"]):
            self._say("confidence", answer, f"confidence {answer['confidence']}, and no bound")
        self._staleness(answer)

    def _totals(
        self, answer: Answer, window: TrueWindow, certain: Mapping[int, bool], whole: bool, is_settled: bool
    ) -> None:
        """Each total has the truth in its interval. Of an answer that has all records it is exact, whatever the budget,
        but for a rest that a few numbers do not represent."""
        if "total" not in answer or "merged_into" in answer["quality"]:
            return  # answers of the tests of this checker have no totals
        sure = [certain[i] for i in window.records]
        for measure in self.spec.measures:
            name, cell = measure.function.name, answer["total"].get(measure.name)
            if name in QUANTILES and self.spec.accuracy is None:
                start = f"{measure.name}_"
                each = {c.removeprefix(start): v for c, v in answer["total"].items() if c.startswith(start)}
                row = {measure.name: cell or {"quantiles": each}}
                self._quantiles(answer, measure, TOTAL, row, window.records, sure, whole)
                continue
            is_expected = name in EXACT_FUNCTIONS or (name == "distinct" and self.spec.group_by and answer["data"])
            if (cell is None) == bool(is_expected):
                self._say("total", answer, f"{measure.name}: {cell}")
            if cell is None or self.spec.accuracy is not None:
                continue
            self.findings.cells += 1
            bounds = self.truth.bounds(measure, window.records, sure)
            self._interval(answer, measure, TOTAL, cell, bounds, cell.get("confidence", 1.0), whole)
            if name == "distinct":
                continue
            self._number(answer, measure, TOTAL, cell, bounds, stands=whole)
            is_known = cell["lower"] is not None or cell["upper"] is not None or bounds.low is None
            is_known |= "may_change" in answer["quality"]["completeness"]  # records may come that no answer will have
            if whole and is_settled and bounds is not UNKNOWN and math.isfinite(bounds.low or 0) and not is_known:
                self._say("total", answer, f"{measure.name}: {cell} without bounds, the truth is {_shown(bounds)}")

    def _is_sure(self, i: int, end_ms: int, whole: bool, is_settled: bool) -> bool:
        """Whether the value that the answer states must have record i."""
        late, fate = self.truth.records[i].late, self.truth.fate(i, end_ms)
        if fate is Fate.LOST:
            return whole and (is_settled or not late)
        if fate is Fate.EITHER:
            return whole and is_settled  # nothing is counted as missing
        # A bound of an answer that is not whole holds for everything that was given, heard of or not.
        return fate is Fate.COUNTED and (is_settled or not whole or not late)

    def _is_late_in_row(self, i: int, completeness: Mapping[str, Any]) -> bool:
        """Whether record i came late, and every edge that can have records of its group has closed the window: the row
        is then as in a complete answer, which later revisions extend by late records."""
        group = dict(zip(self.spec.group_by, self.truth.groups[i], strict=True))
        only = completeness.get("only", {})
        unclosed = (*completeness["missing"], *completeness.get("left", ()))
        excluded = (any(group[name] != value for name, value in only.get(edge, {}).items()) for edge in unclosed)
        return self.truth.records[i].late and all(excluded)

    def _counters(
        self, answer: Answer, window: TrueWindow, sure: Sequence[bool], whole: bool, is_settled: bool
    ) -> None:
        stated, must, most = answer["quality"]["records"], sum(sure), len(sure)
        observed, late = stated["observed"], stated["late"]
        # With a lost state, records may be counted twice, and the answer says so.
        if observed > most and not answer["quality"]["completeness"].get("lost_state"):
            self._say("observed", answer, f"observed {observed}, there are {most}")
        if whole and observed < must:
            self._say(
                "completeness",
                answer,
                f"observed {observed} of {must}, completeness {answer['quality']['completeness']}",
            )
        if whole and stated["expected"] is not None and not must <= stated["expected"] <= most:
            self._say("expected", answer, f"expected {stated['expected']}, there are {must} to {most}")
        fates = [self.truth.fate(i, window.end_ms) for i in window.records]
        doubtful = sum(fate is not Fate.COUNTED for fate in fates)
        arrived_late = sum(
            self.truth.records[i].late and fate is Fate.COUNTED for i, fate in zip(window.records, fates, strict=True)
        )
        if answer["quality"]["completeness"].get("lost_state"):
            return
        if late > arrived_late + doubtful or (self.late_is_known and whole and is_settled and late < arrived_late):
            self._say("late", answer, f"late {late}, there are {arrived_late} (and {doubtful} in doubt)")

    def _staleness(self, answer: Answer) -> None:
        if self.is_session:
            return  # a session's records may have had their first answer in another session
        budget_ms = answer["contract"]["requested"].get("staleness_ms")
        stale_ms = answer["quality"]["staleness_ms"]
        if budget_ms is not None and answer["contract"]["met"] and answer["revision"] == 1 and stale_ms > budget_ms:
            self._say("met", answer, f"stale by {stale_ms} ms, the budget is {budget_ms} ms, and the contract is met")

    # One cell

    def _cell(
        self, answer: Answer, measure: Measure, group: Group, row: Answer | None, members: list[int],
        sure: list[bool], whole: bool,
    ) -> None:  # fmt: skip
        self.findings.cells += 1
        name = measure.function.name
        if name in QUANTILES:
            self._quantiles(answer, measure, group, row, members, sure, whole)
            return
        if name not in (*EXACT_FUNCTIONS, "distinct"):
            return
        bounds = self.truth.bounds(measure, members, sure)
        cell = row[measure.name] if row is not None else self._absent(answer, measure)
        accuracy = self.spec.accuracy
        is_predicted = accuracy is not None and accuracy.measure == measure.name and "accuracy" in answer["quality"]
        if is_predicted and not whole:
            if row is not None or group == ():
                self._prediction(answer, measure, group, cell, bounds)
            return
        if row is None and (not whole or bounds.low is None):
            return  # an answer that is not whole does not say that there are no other groups, nor that nulls are a zero
        if name == "distinct":
            self._interval(answer, measure, group, cell, bounds, answer["confidence"], whole)
            self._exactly(answer, measure, group, cell, bounds, stands=whole and answer["contract"]["met"])
            return
        confidence = answer["confidence"] if is_predicted else 1.0
        # An answer without rows has no confidence; that a group is not in it is said for certain.
        self._interval(answer, measure, group, cell, bounds, 1.0 if confidence is None else confidence, whole)
        self._exactly(answer, measure, group, cell, bounds, stands=whole and answer["contract"]["met"])
        self._within_budget(answer, measure, group, cell, bounds)

    def _ratio(
        self, answer: Answer, group: Group, cell: Mapping[str, Any], members: list[int], sure: list[bool]
    ) -> None:
        """The interval of the quotient of the first two measures contains the truth, if there is one."""
        above, below = (self.truth.bounds(measure, members, sure) for measure in self.spec.measures[:2])
        if any(b.floats or not b.is_one or b.low is None or not math.isfinite(b.low) for b in (above, below)):
            return
        if not below.low:
            return
        self.findings.cells += 1
        truth, lower, upper = float(Fraction(above.low) / Fraction(below.low)), cell["lower"], cell["upper"]
        slack = 1e-12 * abs(truth)
        if (lower is not None and truth < lower - slack) or (upper is not None and truth > upper + slack):
            self._say("ratio", answer, f"{group}: {cell}, the truth is {truth}")

    def _absent(self, answer: Answer, measure: Measure) -> dict[str, Any]:
        """What an answer says of a group that it has no row of: zero, but for what edges withhold."""
        withheld = answer["quality"]["error"]["withheld"]
        bound = withheld.get(measure.name)
        if measure.function.name not in ("sum", "count") or (withheld and bound is None):
            return {"estimate": None if withheld else 0, "lower": None, "upper": None}
        if bound and max(bound.get("above_share", 1), bound.get("below_share", 1)) < 1:
            bound = None  # less than its whole value was withheld, so the value is 0
        bound = bound or {"above": 0, "below": 0}
        upper, lower = bound["above"], bound["below"]
        return {"estimate": 0, "lower": None if lower is None else -lower, "upper": upper}

    def _tolerance(self, bounds: Bounds) -> float:
        return 0.0 if self.strict_floats or not bounds.floats else 2**-52 * (bounds.count + 1) * bounds.magnitude

    def _interval(
        self, answer: Answer, measure: Measure, group: Group, cell: Mapping[str, Any], bounds: Bounds,
        confidence: float, whole: bool,
    ) -> None:  # fmt: skip
        """The interval contains the truth: one of the possible values, where there are several."""
        lower, upper = cell["lower"], cell["upper"]
        if lower is None and upper is None:
            return
        shown = f"{measure.name} of {group}: {cell['estimate']} [{lower}, {upper}], the truth is {_shown(bounds)}"
        if bounds.low is None or bounds is UNKNOWN:
            # Under a budget, a group counts as zero until its first value is sent.
            counts_as_zero = self.spec.error_budget is not None and cell["estimate"] == 0
            if bounds.low is None and whole and not counts_as_zero:
                self._say("interval", answer, shown)
            return
        if not math.isfinite(bounds.low):
            # Of an infinite truth the finite bound may be stated.
            one = math.copysign(1, bounds.low) > 0
            held = math.isinf(bounds.low) and (upper is None if one else lower is None)
            if (whole or bounds.is_one) and not held:
                self._say("not-a-number", answer, shown)
            return
        # What edges withhold is a float64.
        withheld = answer["quality"]["error"]["withheld"].get(measure.name) or {}
        rounding = sum(2**-50 * abs(withheld.get(side) or 0) for side in ("above", "below"))
        slack = Fraction(self._tolerance(bounds)) + Fraction(rounding)
        held = (lower is None or bounds.high >= Fraction(lower) - slack) and (
            upper is None or bounds.low <= Fraction(upper) + slack
        )
        if confidence >= 1.0:
            if not held:
                self._say("interval" if not whole else "number", answer, shown)
        elif bounds.is_one:
            self.findings.outcomes.append(Outcome(f"interval of {measure.function.name}", confidence, held))

    def _exactly(
        self, answer: Answer, measure: Measure, group: Group, cell: Mapping[str, Any], bounds: Bounds, *, stands: bool
    ) -> None:
        self._number(answer, measure, group, cell, bounds, stands=stands and _is_exact(answer["contract"], measure))

    def _number(
        self, answer: Answer, measure: Measure, group: Group, cell: Mapping[str, Any], bounds: Bounds, *, stands: bool
    ) -> None:
        """A number that is stated as exact is the truth."""
        if not stands or bounds is UNKNOWN:
            return
        estimate = cell["estimate"]
        shown = f"{measure.name} of {group} is exact: {estimate}, the truth is {_shown(bounds)}"
        if bounds.low is None or not math.isfinite(bounds.low):
            if estimate is not None:
                self._say("not-a-number" if bounds.low is not None else "number", answer, shown)
            return
        if estimate is None:
            if bounds.count or measure.function.name in ("count", "distinct"):
                self._say("number", answer, shown)
            return  # none of the values need be in it
        slack = Fraction(self._tolerance(bounds))
        if not bounds.low - slack <= Fraction(estimate) <= bounds.high + slack:
            self._say("exact" if measure.function.name == "distinct" else "number", answer, shown)

    def _what_it_has(
        self, answer: Answer, measure: Measure, group: Group, cell: Mapping[str, Any], members: list[int]
    ) -> None:
        """The last answer has every record of the edges that it does not name as missing, whatever it lacks of them."""
        completeness = answer["quality"]["completeness"]
        if completeness.get("lost_state") or measure.function.name not in EXACT_FUNCTIONS:
            return  # records may be counted twice
        absent, end_ms = set(completeness["missing"]), time_ms(answer["window"]["end"])
        sure = [
            self.truth.fate(i, end_ms) is Fate.COUNTED and self.truth.records[i].edge not in absent for i in members
        ]
        self._exactly(answer, measure, group, cell, self.truth.bounds(measure, members, sure), stands=True)

    def _stated_width(self, answer: Answer, measure: Measure, group: Group, cell: Any) -> None:
        """A met answer states no interval wider than its budget, and no value without bounds."""
        limits = self._limits(answer)
        if not answer["contract"]["met"] or limits is None:
            return
        limit = limits.get(measure.name)
        if measure.function.error is None and limit is not None:
            return  # the limit counts records
        share = fraction(limit) if isinstance(limit, str) else None
        for value in _intervals(cell):
            for side in ("lower", "upper"):
                bound, estimate = value[side], value["estimate"]
                shown = f"{measure.name} of {group}: {value}, the budget is {limit}, and the contract is met"
                if estimate is None:
                    continue
                if bound is None:
                    self._say("too-wide", answer, shown)
                elif limit is not None:
                    most = float(limit) if share is None else share * max(abs(bound), 1.0)
                    if abs(bound - estimate) > most * (1 + _ROUNDING):
                        self._say("too-wide", answer, shown)

    def _limits(self, answer: Answer) -> Mapping[str, Any] | None:
        """The error budget that the answer's contract is about; None: it is about none. Beside an accuracy, it is about
        answers from the data, not about predictions."""
        requested = answer["contract"]["requested"]
        if self.spec.accuracy is not None:
            is_predicted = answer["phase"] == "early" or "prediction" in answer["quality"]
            return None if is_predicted else requested.get("error_budget")
        limits = requested.get("error")
        return limits if isinstance(limits, Mapping) else None

    def _within_budget(
        self, answer: Answer, measure: Measure, group: Group, cell: Mapping[str, Any], bounds: Bounds
    ) -> None:
        contract, limits = answer["contract"], self._limits(answer)
        if not contract["met"] or limits is None or measure.name not in limits:
            return
        if measure.function.error is None or not bounds.is_one or bounds.low is None:
            return
        estimate, limit = cell["estimate"], limits[measure.name]
        shown = f"{measure.name} of {group}: {estimate}, the truth is {_shown(bounds)}, the budget is {limit}"
        if not math.isfinite(bounds.low):
            if estimate is not None:
                self._say("not-a-number", answer, shown)
            return
        if estimate is None:
            return  # nothing is said of it; its bounds are checked
        share = fraction(limit) if isinstance(limit, str) else None
        most = float(limit) if share is None else share * max(abs(float(bounds.low)), 1.0)
        if self.spec.accuracy is not None and self.spec.accuracy.measure == measure.name:
            most = min(most, self.spec.accuracy.error * max(abs(float(bounds.low)), 1.0))
        error = abs(Fraction(estimate) - bounds.low)
        if error > Fraction(most) * Fraction(1 + _ROUNDING) + Fraction(self._tolerance(bounds)):
            self._say("budget", answer, shown)

    def _prediction(
        self, answer: Answer, measure: Measure, group: Group, cell: Mapping[str, Any], bounds: Bounds
    ) -> None:
        """An estimate of what is still to come: judged over many answers."""
        accuracy, contract = self.spec.accuracy, answer["contract"]
        assert accuracy is not None
        if not bounds.is_one or bounds.low is None or not math.isfinite(bounds.low):
            return
        estimate, lower, upper = cell["estimate"], cell["lower"], cell["upper"]
        true = float(bounds.low)
        if lower is not None and upper is not None:
            held = lower <= true + _ROUNDING * abs(true) and upper >= true - _ROUNDING * abs(true)
            self.findings.outcomes.append(Outcome("interval of an early answer", accuracy.confidence, held))
        if contract["met"]:
            if estimate is None:
                self._say("met", answer, f"met without an estimate of {measure.name} of {group}")
                return
            held = abs(estimate - true) <= accuracy.error * abs(true) * (1 + _ROUNDING)
            self.findings.outcomes.append(Outcome("error of an early answer", accuracy.confidence, held))

    def _quantiles(
        self, answer: Answer, measure: Measure, group: Group, row: Answer | None, members: list[int],
        sure: list[bool], whole: bool,
    ) -> None:  # fmt: skip
        accuracy = self.spec.accuracy
        is_early = answer["phase"] == "early" and accuracy is not None and accuracy.measure == measure.name
        if row is None or not all(sure) or not (whole or is_early) or self.truth.has_non_finite(measure, members):
            return
        contract = answer["contract"]
        asked = {str(dict(measure.parameters).get("q")): row[measure.name]}
        for key, cell in row[measure.name].get("quantiles", asked).items():
            true = self.truth.quantile_range(measure, members, float(key))
            if true is None or cell["lower"] is None or cell["upper"] is None:
                continue
            shown = f"{measure.name} {key} of {group}: {cell}, the truth is {true}"
            held = cell["lower"] <= true[1] and cell["upper"] >= true[0]
            confidence = cell.get("confidence", answer["confidence"])
            if is_early and confidence < 1:
                self.findings.outcomes.append(Outcome("interval of an early quantile", confidence, held))
            elif measure.function.name != "kll" and not held:
                self._say("interval", answer, shown)
            elif measure.function.name == "kll":
                self.findings.outcomes.append(Outcome("interval of kll", confidence, held))
            if contract["met"] and _is_exact(contract, measure) and not true[0] <= cell["estimate"] <= true[1]:
                self._say("exact", answer, shown)

    # All answers

    def _nothing_is_missing(
        self, by_window: Mapping[int, Mapping[int, Answer]], counted: int, closed_through_ms: int | None
    ) -> None:
        """Every accepted record is in an answer, or counted by a counter."""
        missing, where = 0, ""
        for start, window in self.truth.windows.items():
            fates = [self.truth.fate(i, window.end_ms) for i in window.records]
            must, either = fates.count(Fate.COUNTED), fates.count(Fate.EITHER)
            revisions = by_window.get(start)
            if revisions:
                last = revisions[max(revisions)]
                if last["quality"]["completeness"]["missing"]:
                    continue  # the answer says whose records it lacks
                stated = last["quality"]["records"]
                observed = stated["observed"] + stated["after_final"] if last["phase"] != "early" else must + either
            elif closed_through_ms is None or window.end_ms > closed_through_ms:
                continue
            else:
                observed = 0
                if must:
                    name, shown = self.spec.name, f"[{window.start_ms}, {window.end_ms})"
                    self.findings.false.append(Falsehood("no-answer", name, shown, 0, f"{must} records, and no answer"))
            if observed < must + either:
                missing += must + either - observed
                where = where or f"first in [{window.start_ms}, {window.end_ms})"
        overlaps = -(-self.spec.window.longest_ms // self.spec.window.slice_ms) if not self.is_session else 1
        if missing > counted * overlaps:
            message = f"{missing} records are in no answer, and counters name {counted}; {where}"
            self.findings.false.append(Falsehood("conservation", self.spec.name, "", 0, message))


def _is_exact(contract: Mapping[str, Any], measure: Measure) -> bool:
    exact = contract["requested"].get("exact", False)
    return bool(exact[measure.name] if isinstance(exact, Mapping) else exact)


def _has_bound(value: Any) -> bool:
    """Whether any cell in it has a bound."""
    if isinstance(value, Mapping):
        return any(value.get(side) is not None for side in ("lower", "upper")) or any(map(_has_bound, value.values()))
    return isinstance(value, list) and any(map(_has_bound, value))


def _intervals(value: Any) -> Iterator[Mapping[str, Any]]:
    """All intervals in a cell."""
    if isinstance(value, Mapping) and "lower" in value:
        yield value
    elif isinstance(value, Mapping | list):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _intervals(member)


def _shown(bounds: Bounds) -> str:
    if bounds.low is None:
        return "no value"
    if not math.isfinite(bounds.low) or not math.isfinite(bounds.high):
        return f"{bounds.low}"
    values = [int(v) if v == int(v) else float(v) for v in (bounds.low, bounds.high)]
    return str(values[0]) if bounds.is_one else f"{values[0]} to {values[1]}"
