"""`AccuracyQuality` is the statement of an answer about estimate, sample and coverage, for a query with an accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from center.early import GroupPrediction, Prediction, describe_reasons, is_expensive
from center.ledger.withheld import finite
from edgewater.model.accuracy import MAX_GROUPS
from edgewater.model.query import QuerySpec
from edgewater.wire import SamplingReason

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


@dataclass(frozen=True, slots=True)
class AccuracyQuality:
    """The statement of an answer about its accuracy, for a query with an accuracy.

    Attributes:
        measure: the measure that the accuracy is for.
        confidence: probability that the interval of the prediction contains the true value.
        prediction: predicted value of the window; None if the data alone determine the value.
        sampling: whether records were sampled, and the reason.
        waited_ms: event time from the window's end until the arrivals met the error target.
        coverage: among the recent final windows with an early answer, the fraction whose first interval contained the
            true value; None if there is no such window yet.
        covered: for a final answer, whether the first interval of this window contained the value, for all groups.
        too_many_groups: whether the query has too many groups for early answers.
        unknown_sample: whether edges may have left out records by sampling without counting them. The data then give no
            bounds.
        exceeding: by edge, the number of records of all windows so far that came later than the declared delays; None
            if no delays are declared.
        of_records: whether the measure is a synopsis. The prediction is then the number of records.
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
    of_records: bool = False

    def to_mapping(self) -> dict[str, Any]:
        """Returns the member `accuracy` of an answer's JSON."""
        p = self.prediction
        result: dict[str, Any] = {
            "measure": self.measure,
            "sampling": self.sampling,
            "waited_ms": self.waited_ms,
            "coverage": self.coverage,
            "covered": self.covered,
        }
        if p is not None:
            share = finite(p.straggler_share) if p.bounded else None
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
        """Returns JSON by measure: the interval that replaces the interval of the data, or the interval of the number
        of records.

        The members of the interval are None if the data have no bounds.
        """
        p, of = self.prediction, {"of": "records"} if self.of_records else {}
        if p is None:
            return {self.measure: {"estimate": None, "lower": None, "upper": None, "confidence": None, **of}}
        if p.groups is None:
            confidence = self.confidence if p.bounded else None
            return {self.measure: {**_interval(p), "confidence": confidence, **of}}
        groups = {g.key: list(_interval(g).values()) for g in p.groups}
        return {self.measure: {"groups": groups, "confidence": self.confidence, **of}}

    def extend(self, result: dict[str, Any], observed: int) -> None:
        """Adds this statement to an answer's JSON.

        Args:
            result: the JSON, which is changed.
            observed: number of records in the answer.
        """
        result["accuracy"] = self.to_mapping()
        p = self.prediction
        if p is not None:
            result["prediction"] = self.to_prediction()
            known = p.bounded and math.isfinite(p.expected)
            expected = max(round(p.expected), observed) if known else None
            sampled = round(p.sampled) if math.isfinite(p.sampled) else None
            result["records"] |= {"expected": expected, "sampled": sampled}
            parts = {"sampling": p.sampling, "straggler": p.straggler, "missing": p.missing}
            if self.of_records:
                out = (g.upper - g.arrived for g in p.by_group if g.eligible)
                parts["straggler"] = max(out, default=math.inf) if p.bounded else math.inf
            result["error"] |= {name: finite(width) for name, width in parts.items()}
        elif self.unknown_sample:
            result["prediction"] = self.to_prediction()
            result["records"] |= {"expected": None, "sampled": None}
            result["error"] |= {"sampling": None, "straggler": None}


def describe_sampling(
    spec: QuerySpec, because: Mapping[str, frozenset[SamplingReason]] | None, unknown_sample: bool
) -> str:
    """Returns a text that says whether records of a window were sampled, and why.

    Args:
        because: the reasons of each edge that sampled; None if no edge sampled.
        unknown_sample: whether edges may have left out records by sampling without counting them.
    """
    if because is not None:
        return describe_reasons(because)
    return UNKNOWN_SAMPLE if unknown_sample else ALL_RECORDS_NEEDED if is_expensive(spec) else NOT_SAMPLED


def _interval(interval: Prediction | GroupPrediction) -> dict[str, float | None]:
    return {name: finite(getattr(interval, name)) for name in ("estimate", "lower", "upper")}
