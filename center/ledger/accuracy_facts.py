"""Adds estimate, sample and coverage to the facts of an answer, for a query with an accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from center.early import GroupPrediction, Prediction, describe_reasons, is_expensive
from edgewater.answers import AccuracyFacts, Bounds, Cause, Facts, GroupCounts, Predicted, finite
from edgewater.answers.statement import ALL_RECORDS_NEEDED, TOO_FEW_ARRIVALS, TOO_MANY_GROUPS
from edgewater.model.query import QuerySpec
from edgewater.wire import SamplingReason

UNKNOWN_SAMPLE = "unknown: records may have been sampled out that are not counted"
NOT_SAMPLED = "not sampled: the measure is cheap, and edges and links keep up"


def with_accuracy(
    facts: Facts,
    spec: QuerySpec,
    prediction: Prediction | None,
    *,
    early: bool,
    covered: bool | None,
    coverage: float | None,
    slot_ms: int,
    too_many_groups: bool,
    sampled_because: Mapping[str, frozenset[SamplingReason]],
    unknown_sample: bool,
    exceeding: Mapping[str, int],
) -> Facts:
    """Returns the facts of an answer with those that an accuracy requires.

    Args:
        prediction: the predicted value of the window (`without_false_bounds`); None if the data alone determine the
            value.
        early: whether edges may still report, or records may have been sampled out without being counted.
        coverage: among the recent final windows with an early answer, the fraction whose first interval contained the
            true value.
        sampled_because: the reasons of each edge that did not process all of the window's records.
        unknown_sample: whether edges may have left out records by sampling without counting them.
        exceeding: by edge, the number of records that came later than the declared delays.
    """
    accuracy, early_accuracy = spec.accuracy, spec.early_accuracy
    assert accuracy is not None and early_accuracy is not None
    of_records, unmet = accuracy.kind == "records", ""
    if prediction is not None:
        unmet = "" if prediction.met else prediction.reason
    elif early:
        unmet = TOO_MANY_GROUPS if too_many_groups else TOO_FEW_ARRIVALS
    is_sampled = prediction is not None and prediction.sampled < prediction.arrived
    waited = None if prediction is None else prediction.waited_slots * slot_ms
    # The counters of an open slice arrive with its close. Until then, the arrival counts give the number of records.
    observed = facts.observed if prediction is None else max(facts.observed, round(prediction.arrived))
    stated = AccuracyFacts(
        ", ".join(accuracy.measures),
        _describe_sampling(spec, sampled_because if is_sampled else None, unknown_sample),
        waited,
        coverage,
        covered,
        exceeding=None if accuracy.delays_ms is None else dict(exceeding),
        too_many_groups=too_many_groups,
        stands_for_missing=early,
        unmet=unmet,
    )
    predicted: Predicted | None = None
    if prediction is not None:
        stated = _with_prediction(stated, prediction, observed, of_records=of_records)
        predicted = _predicted(prediction, stated.measure, early_accuracy.confidence, of_records=of_records)
    elif unknown_sample:
        # The data do not determine the values, and nothing predicts them.
        stated = replace(stated, error=dict.fromkeys(("sampling", "straggler")) | {"missing": _missing(facts)})
        predicted = Predicted(stated.measure, of_records)
    deviations = facts.deviations
    if predicted is not None:  # it stands for late records, too
        deviations = tuple(d for d in deviations if d.cause is not Cause.MAY_CHANGE)
    return replace(facts, observed=observed, accuracy=stated, predicted=predicted, deviations=deviations)


def _missing(facts: Facts) -> float | None:
    return 0 if facts.is_complete else None


def _with_prediction(facts: AccuracyFacts, p: Prediction, observed: int, *, of_records: bool) -> AccuracyFacts:
    straggler = p.straggler
    if of_records:
        out = (g.upper - g.arrived for g in p.by_group if g.eligible)
        straggler = max(out, default=math.inf) if p.bounded else math.inf
    groups = None
    if p.groups is not None:
        eligible = [g for g in p.groups if g.eligible]
        groups = GroupCounts(len(eligible), sum(g.met for g in eligible), len(p.groups) - len(eligible))
    return replace(
        facts,
        is_predicted=True,
        straggler_share=finite(p.straggler_share) if p.bounded else None,
        silent=p.silent,
        groups=groups,
        expected=max(round(p.expected), observed) if p.bounded and math.isfinite(p.expected) else None,
        sampled=round(p.sampled) if math.isfinite(p.sampled) else None,
        error={"sampling": finite(p.sampling), "straggler": finite(straggler), "missing": finite(p.missing)},
    )


def _predicted(p: Prediction, measure: str, confidence: float, *, of_records: bool) -> Predicted:
    if p.groups is None:
        return Predicted(measure, of_records, confidence if p.bounded else None, _interval(p))
    return Predicted(measure, of_records, confidence, groups={g.key: _interval(g) for g in p.groups})


def _interval(interval: Prediction | GroupPrediction) -> Bounds:
    return finite(interval.estimate), finite(interval.lower), finite(interval.upper)


def without_false_bounds(prediction: Prediction | None, facts: Facts) -> Prediction | None:
    """Returns the prediction without bounds if reports of edges are missing, or may count records twice."""
    if prediction is None:
        return None
    if facts.by_cause(Cause.INPUT_LOST):
        return prediction.without_bounds("an edge may have lost input of the window")
    if lost := facts.edges_by(Cause.LOST_STATE):
        text = f"the reports of {', '.join(lost)} were lost with its state, or count records twice"
        return prediction.without_bounds(text)
    return prediction if prediction.bounded else prediction.without_bounds(prediction.reason)


def _describe_sampling(
    spec: QuerySpec, because: Mapping[str, frozenset[SamplingReason]] | None, unknown_sample: bool
) -> str:
    """Returns a text that says whether records of a window were sampled, and why.

    Args:
        because: the reasons of each edge that sampled; None if no edge sampled.
    """
    if because is not None:
        return describe_reasons(because)
    return UNKNOWN_SAMPLE if unknown_sample else ALL_RECORDS_NEEDED if is_expensive(spec) else NOT_SAMPLED
